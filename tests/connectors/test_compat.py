"""An engine whose interface changed is refused when it is attached, not at its first request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from prefixd.connectors.compat import Engine, UnsupportedEngine

ENGINE = Engine("Engine", "engine", "1.0")


class Base(ABC):
    """An engine's."""

    def __init__(self, what_its_factory_gives: int) -> None:
        self.given = what_its_factory_gives

    @abstractmethod
    def get(self, key: str, target: Any = None) -> Any:
        raise NotImplementedError

    def set(self, key: str, *, value: Any) -> bool:
        raise NotImplementedError


def made(base: type = Base, **changed: Callable[..., Any]) -> type:
    """Ours, derived from that base."""

    def get(self: Any, key: str, target: Any = None) -> Any:
        return self, key, target

    def set_(self: Any, key: str, *, value: Any) -> Any:
        return self, key, value

    def more(self: Any, number: int) -> Any:
        return self, number

    methods = {"__init__": lambda _: None, "get": get, "set": set_, "more": more}
    return type("Made", (base,), methods | changed)


def later(name: str, method: Callable[..., Any]) -> type:
    """A base of which one method changed."""
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
