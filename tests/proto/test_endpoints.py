"""Default addresses, and what an address may look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto.endpoints import (
    admin_address,
    default_address,
    normalize_address,
    socket_path,
)
from prefixd.proto.errors import ConfigError


def test_the_variable_wins() -> None:
    environ = {"PREFIXD_ADDRESS": "cache-node:7070", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert default_address(environ, uid=0) == "cache-node:7070"


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="'nonsense' is no address"):
        default_address({"PREFIXD_ADDRESS": "nonsense"}, uid=0)


def test_the_runtime_directory_of_the_user_comes_next() -> None:
    assert default_address({"XDG_RUNTIME_DIR": "/run/user/7"}, uid=7) == (
        "unix:/run/user/7/prefixd/prefixd.sock"
    )


def test_root_and_others_without_a_runtime_directory() -> None:
    assert default_address({}, uid=0) == "unix:/run/prefixd/prefixd.sock"
    assert default_address({}, uid=1000) == "unix:/tmp/prefixd-1000/prefixd.sock"


def test_without_arguments_it_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", "/a/b.sock")
    assert default_address() == "unix:/a/b.sock"


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
