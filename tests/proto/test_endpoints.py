"""Default addresses, and what an address may look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto.endpoints import (
    admin_address,
    default_addresses,
    normalize_address,
    socket_path,
)
from prefixd.proto.errors import ConfigError


def test_the_variable_wins() -> None:
    environ = {"PREFIXD_ADDRESS": "cache-node:7070", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert default_addresses(environ, uid=0) == ("cache-node:7070",)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="'nonsense' is no address"):
        default_addresses({"PREFIXD_ADDRESS": "nonsense"}, uid=0)


def directories(environ: dict[str, str], uid: int) -> list[str]:
    found = default_addresses(environ, uid)
    assert all(each.startswith("unix:") and each.endswith("/prefixd.sock") for each in found)
    return [each.removeprefix("unix:").removesuffix("/prefixd.sock") for each in found]


def test_places_of_users_and_of_root() -> None:
    xdg = {"XDG_RUNTIME_DIR": "/xdg/7"}
    own = ["/run/user/7/prefixd", "/tmp/prefixd-7"]
    assert directories({}, 7) == [*own, "/run/prefixd"]
    assert directories(xdg, 7) == ["/xdg/7/prefixd", *own, "/run/prefixd"]
    assert directories({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == [*own, "/run/prefixd"]
    root = ["/run/user/0/prefixd", "/tmp/prefixd-0"]
    assert directories({}, 0) == ["/run/prefixd", *root]
    assert directories(xdg, 0) == ["/run/prefixd", "/xdg/7/prefixd", *root]


def test_a_place_that_no_socket_can_have_is_left_out() -> None:
    for runtime in ("relative", "/" + "x" * 90):
        assert directories({"XDG_RUNTIME_DIR": runtime}, 7) == directories({}, 7)


@pytest.mark.parametrize("uid", [0, 7])
@pytest.mark.parametrize("there", [{}, {"XDG_RUNTIME_DIR": "/run/user/7"}])
@pytest.mark.parametrize("here", [{}, {"XDG_RUNTIME_DIR": "/run/user/7"}])
def test_clients_look_wherever_a_daemon_of_the_user_or_of_the_machine_listens(
    uid: int, there: dict[str, str], here: dict[str, str]
) -> None:
    """Whatever the daemon's environment has, and the client's has not."""
    listening = {default_addresses(there, uid)[0], "unix:/run/prefixd/prefixd.sock"}
    if uid or "XDG_RUNTIME_DIR" not in there:
        assert listening <= {*default_addresses(here, uid)}


def test_without_arguments_it_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", "/a/b.sock")
    assert default_addresses() == ("unix:/a/b.sock",)


def test_an_ipv6_address_without_brackets_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"in brackets, as in \[::1\]:9999"):
        normalize_address("::1:9999")
    assert normalize_address("[::1%lo]:9999") == "[::1%lo]:9999"


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("unix:/a/b", "unix:/a/b"),
        ("unix:///a/b", "unix:/a/b"),
        ("/a/b", "unix:/a/b"),
        (" 127.0.0.1:80 ", "127.0.0.1:80"),
        ("[::1]:7070", "[::1]:7070"),
        ("host:65535", "host:65535"),
    ],
)
def test_addresses_have_one_form(given: str, normal: str) -> None:
    assert normalize_address(given) == normal
    assert normalize_address(normal) == normal


@pytest.mark.parametrize(
    "given",
    ["", "host", ":80", "host:", "host:x", "host:0", "host:65536", "unix:", "unix:a", "unix:/"],
)
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(ConfigError):
        normalize_address(given)


def test_a_listener_may_ask_for_any_port() -> None:
    assert normalize_address("127.0.0.1:0", listening=True) == "127.0.0.1:0"


def test_socket_paths_have_the_length_of_the_kernel() -> None:
    longest = "/" + "a" * 106
    assert normalize_address(longest) == f"unix:{longest}"
    with pytest.raises(ConfigError, match="107 bytes"):
        normalize_address(longest + "a")


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalize_address("./d.sock") == f"unix:{tmp_path / 'd.sock'}"


def test_socket_path() -> None:
    assert socket_path("unix:/a/b") == Path("/a/b")
    assert socket_path("host:1") is None


def test_operators_are_served_beside_the_workers_on_their_host_only() -> None:
    assert admin_address("/run/d.sock") == "unix:/run/d.sock.admin"
    assert admin_address("unix:/run/d.sock") == "unix:/run/d.sock.admin"
    assert admin_address("localhost:7070") is None
