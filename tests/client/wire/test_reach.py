"""A client talks only to a daemon whose user it may rely on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefixd.client.wire.reach import connect, reach
from prefixd.proto.errors import DaemonUnavailable
from tests.support.users import STRANGER, VICTIM, needs_root, run_as

WITHIN_S = 10.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, as sockets need it, which every user can reach."""
    with TemporaryDirectory(prefix="pd-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def listening(path: Path, owner: int = 0) -> socket.socket:
    """A server that a process of this user began; the kernel remembers that."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o666)
    if owner == os.geteuid():
        server.listen()
    else:
        run_as(owner, server.listen)
    return server


def why_refused(*addresses: str) -> str:
    try:
        reach(addresses, WITHIN_S).close()
    except DaemonUnavailable as problem:
        return str(problem)
    return ""


def test_each_reason_is_said(directory: Path) -> None:
    path = directory / "s"
    assert why_refused(f"unix:{path}") == f"no daemon at unix:{path}: there is no such socket"
    listening(path, os.geteuid()).close()
    assert why_refused(f"unix:{path}") == f"no daemon at unix:{path}: no process listens there"
    path.unlink()
    path.touch()
    assert why_refused(f"unix:{path}") == f"no daemon at unix:{path}: no process listens there"


def test_a_socket_is_reached_whatever_becomes_of_its_name(directory: Path) -> None:
    path = directory / "s"
    with listening(path, os.geteuid()) as server:
        reached = reach([f"unix:{path}"], WITHIN_S)
        server.accept()[0].close()
        assert reached.there
        path.rename(directory / "other")
        assert not reached.there
        with listening(path, os.geteuid()), socket.socket(socket.AF_UNIX) as client:
            assert not reached.there
            client.connect(reached.target.removeprefix("unix:"))
            server.accept()[0].close()
        reached.close()
        reached.close()


def test_tcp_is_taken_as_it_is() -> None:
    reached = reach(["cache.example:7"], WITHIN_S)
    assert reached.target == reached.address == "cache.example:7"
    assert reached.there
    reached.close()


def test_the_first_that_answers_is_taken(directory: Path) -> None:
    places = [directory / name for name in ("one", "two", "three")]
    for place in places:
        place.mkdir(mode=0o700)
    addresses = [f"unix:{place}/s" for place in places]
    listening(places[0] / "s", os.geteuid()).close()
    assert why_refused(*addresses) == (
        f"no daemon at any of the default addresses: {addresses[0]}: no process listens there; "
        f"{addresses[1]}: there is no such socket; {addresses[2]}: there is no such socket"
    )
    with listening(places[2] / "s", os.geteuid()):
        with closing(reach(addresses, WITHIN_S)) as reached:
            assert reached.address == addresses[2]
        with (
            listening(places[1] / "s", os.geteuid()),
            closing(reach(addresses, WITHIN_S)) as reached,
        ):
            assert reached.address == addresses[1]


def test_a_server_that_takes_no_connection_keeps_nobody(directory: Path) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(path))
            with pytest.raises(OSError, match="temporarily unavailable"):
                connect(path, 0.01)


@needs_root
def test_a_stranger_in_front_of_the_default_address_gets_nobody(directory: Path) -> None:
    """It made the directory that only the daemon would check."""
    theirs = directory / f"prefixd-{VICTIM}"
    directory.chmod(0o1777)
    run_as(STRANGER, lambda: theirs.mkdir(mode=0o755))
    path = theirs / "s"
    with listening(path, STRANGER):
        why = run_as(VICTIM, lambda: why_refused(f"unix:{path}"))
        assert f"its server is not relied on: it runs as the user {STRANGER}" in why
        why = run_as(VICTIM, lambda: why_refused(f"unix:{path}", f"unix:{path}2"))
        assert f"{theirs} belongs to the user {STRANGER}" in why


@needs_root
def test_a_daemon_with_a_user_of_its_own_is_reached_where_root_put_it() -> None:
    with TemporaryDirectory(dir="/run") as name:
        os.chown(name, STRANGER, STRANGER)
        Path(name).chmod(0o755)
        with listening(Path(name, "s"), STRANGER):
            assert run_as(VICTIM, lambda: why_refused(f"unix:{name}/s")) == ""
            Path(name).chmod(0o777)
            assert "every user can write" in run_as(VICTIM, lambda: why_refused(f"unix:{name}/s"))


@needs_root
def test_who_may_not_connect_is_told_so(directory: Path) -> None:
    path = directory / "s"
    with listening(path):
        path.chmod(0o600)
        why = run_as(VICTIM, lambda: why_refused(f"unix:{path}"))
    admits = "permission denied: its mode or its directory does not admit this user"
    assert why == f"no daemon at unix:{path}: {admits}"
