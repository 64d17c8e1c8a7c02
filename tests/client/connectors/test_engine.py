"""An engine with a changed interface, or wrong options, is refused when it is attached, not at its
first request."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from prefixd.client import Tier
from prefixd.client.connectors import engine
from prefixd.client.connectors.engine import Engine, UnsupportedEngine, attach
from prefixd.proto.errors import ConfigError

ENGINE = Engine("Engine", "engine", "1.0")


class Base(ABC):
    """A base class of the engine."""

    def __init__(self, what_its_factory_gives: int) -> None:
        self.given = what_its_factory_gives

    @abstractmethod
    def get(self, key: str, target: Any = None) -> Any:
        raise NotImplementedError

    def set(self, key: str, *, value: Any) -> bool:
        raise NotImplementedError


def made(base: type = Base, **changed: Callable[..., Any]) -> type:
    """A class of ours, derived from that base, with changed methods."""

    def get(self: Any, key: str, target: Any = None) -> Any:
        return self, key, target

    def set_(self: Any, key: str, *, value: Any) -> Any:
        return self, key, value

    def more(self: Any, number: int) -> Any:
        return self, number

    methods = {"__init__": lambda _: None, "get": get, "set": set_, "more": more}
    return type("Made", (base,), methods | changed)


def later(name: str, method: Callable[..., Any]) -> type:
    """The base class of a later version, in which one method has changed."""
    return type("Later", (Base,), {name: method})


def test_one_that_is_as_it_was() -> None:
    ENGINE.check_interface(made())


@pytest.mark.parametrize(
    ("base", "what"),
    [
        (
            later("get", lambda self, key, target=None, sizes=None: (self, key, target, sizes)),
            "it calls get(self, key, target=None, sizes=None)",
        ),
        (
            later("get", lambda self, name, target=None: (self, name, target)),
            "it calls get(self, name, target=None)",
        ),
        (
            later("set", lambda self, key, value: (self, key, value)),
            "it calls set(self, key, value)",
        ),
        (later("set", lambda self, key: (self, key)), "it calls set(self, key)"),
        (later("fetch", abstractmethod(lambda self: self)), "it asks for fetch"),
    ],
)
def test_one_that_calls_in_another_way_is_refused_by_name(base: type, what: str) -> None:
    with pytest.raises(UnsupportedEngine) as refused:
        ENGINE.check_interface(made(base))
    said = f"prefixd's connector does not know Engine unknown: {what}; it was made for 1.0"
    assert str(refused.value) == said


@pytest.mark.parametrize(
    "get", [lambda self, key: (self, key), lambda self, *, key: (self, key)], ids=["less", "named"]
)
def test_one_that_says_less_is_no_trouble(get: Callable[..., Any]) -> None:
    ENGINE.check_interface(made(later("get", get)))


def test_an_argument_that_only_we_ask_for_is_never_given() -> None:
    ours = made(get=lambda self, key, target: (self, key, target))
    with pytest.raises(UnsupportedEngine, match=r"it calls get\(self, key, target=None\)"):
        ENGINE.check_interface(ours)


def test_a_function_that_takes_something_else_is_refused() -> None:
    ENGINE.check_call(Base.get, "self", "key")
    with pytest.raises(UnsupportedEngine, match=r"it has Base\.get\(self, key, target=None\); it"):
        ENGINE.check_call(Base.get, "self", "key", "target", "sizes")


# ---- options


@pytest.fixture
def address(tmp_path: os.PathLike[str]) -> str:
    return f"unix:{tmp_path}/none.sock"


def test_what_is_given_counts_and_the_rest_is_usual(address: str) -> None:
    options: dict[str, Any] = {"address": address}
    client, tier = attach("engine", options, [])
    assert (tier, client.deadline_ms) == (Tier.RAM, 5_000)
    client.close()
    options |= {"tier": "Disk", "deadline_ms": 7, "max_pending_saves": 0, "salt": "s"}
    client, tier = attach("engine", options, ["salt"])
    assert (tier, client.deadline_ms, client.would_drop()) == (Tier.DISK, 7, True)
    client.close()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tier": "nvme"}, "tier is one of ram, shm, disk, not 'nvme'"),
        ({"tier": None}, "tier is one of ram, shm, disk, not None"),
        ({"deadline_ms": 0}, "deadline_ms is a whole number of at least 1, not 0"),
        ({"deadline_ms": "5s"}, "deadline_ms is a whole number of at least 1, not '5s'"),
        ({"deadline_ms": True}, "deadline_ms is a whole number of at least 1, not True"),
        ({"max_pending_saves": -1}, "max_pending_saves is a whole number of at least 0, not -1"),
        ({"address": 7070}, "address is unix:/path or host:port, not 7070"),
        ({"salt": ["x"]}, "salt is text, not ['x']"),
        ({"teir": "shm"}, "there is no option 'teir'; there are address, deadline_ms, "),
    ],
)
def test_what_can_t_be_is_refused_with_its_name(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        attach("engine", options, ["salt"])
    assert str(refused.value).startswith(f"prefixd's options for engine: {what}")


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tier is .*deadline_ms is .*there is no option 'x'"):
        attach("engine", {"tier": "x", "deadline_ms": 0, "x": 1}, [])


def test_options_of_the_engine_s_own_are_its_own(address: str) -> None:
    client, _ = attach("engine", {"address": address, "prefetch_threshold": 256})
    client.close()


@pytest.mark.parametrize(
    ("tested", "installed", "is_tested"),
    [
        ("1.0", "1.0", True),
        ("1.0", "1.0.3", True),
        ("1.0", "1.1", False),
        ("0.27 to 0.33", "0.27.0", True),
        ("0.27 to 0.33", "0.33.4.post1+cu129", True),
        ("0.27 to 0.33", "0.26.9", False),
        ("0.27 to 0.33", "0.34.0rc1", False),
        ("0.5.16 to 0.5.23", "0.5.9", False),
        ("0.5.16 to 0.5.23", "0.5.23", True),
        ("0.5.16 to 0.5.23", "0.6", False),
        ("0.27 to 0.33", "unknown", True),
    ],
)
def test_ranges_of_versions(
    monkeypatch: pytest.MonkeyPatch, tested: str, installed: str, is_tested: bool
) -> None:
    monkeypatch.setattr(engine, "version", lambda _package: installed)
    assert Engine("Engine", "engine", tested).is_tested is is_tested
