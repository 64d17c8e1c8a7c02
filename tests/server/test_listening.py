"""Sockets that are removed under a running daemon, and daemons that meet at one address."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from prefixd.client import Client, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import DaemonUnavailable, PrefixdError
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon, temporary_directories, whole_lines

ONE = Key(bytes(32))
NAMES = ("d.sock", "d.sock.admin", "d.sock.local")


def events(daemon: PrivateDaemon) -> list[dict[str, object]]:
    return [json.loads(line) for line in whole_lines(daemon.log) if line.startswith("{")]


def bound_again(daemon: PrivateDaemon) -> list[object]:
    return [each["paths"] for each in events(daemon) if each["event"] == "sockets_bound_again"]


def inodes(directory: Path) -> dict[str, int]:
    return {name: (directory / name).stat().st_ino for name in (*NAMES, "d.sock.lock")}


def assert_served(daemon: PrivateDaemon) -> None:
    """A new client is served in place, and operators are."""
    with Client(daemon.address) as client:
        assert client.wait_connected(deadline_ms=60_000)
        with client.claim([ONE]) as hit:
            assert hit.read(0) == b"abc"
        assert client.in_place
    with daemon.admin() as admin:
        assert admin.health()
        assert admin.stats().health == "serving"


@pytest.mark.parametrize("gone", [*NAMES, "d.sock.lock", "."])
def test_what_is_removed_is_bound_again(gone: str) -> None:
    """And what was connected stays connected."""
    with private_daemon() as daemon, Client(daemon.address) as before:
        assert before.save(ONE, b"abc", tier=Tier.RAM).ok
        was = inodes(daemon.directory)
        if gone == ".":
            for name in was:
                (daemon.directory / name).unlink()
        else:
            (daemon.directory / gone).unlink()
        (paths,) = eventually(lambda: bound_again(daemon))
        lost = NAMES if gone == "." else [name for name in NAMES if name == gone]
        assert sorted(paths) == sorted(f"{daemon.directory}/{name}" for name in lost)
        now = inodes(daemon.directory)
        assert all(now[name] == was[name] for name in now if name not in lost and gone in NAMES)
        assert_served(daemon)
        assert before.counters["sessions"] == 1
        assert before.save(Key(bytes(31) + b"1"), b"abc", tier=Tier.RAM).ok
        daemon.stop()
        assert not any((daemon.directory / name).exists() for name in NAMES)


def daemon_at(address: str, directory: Path, shm: Path, *flags: str) -> PrivateDaemon:
    """A small daemon that listens there."""
    budgets = ("--ram=8MiB", "--shm=8MiB", "--disk=0", "--log-format=json")
    daemon = PrivateDaemon(directory, shm, [*budgets, f"--address={address}", *flags])
    daemon.address = address
    return daemon


def test_a_directory_that_is_removed_is_made_again() -> None:
    with temporary_directories() as (directory, shm):
        run = directory / "run"
        with daemon_at(f"unix:{run}/d.sock", directory, shm) as daemon:
            with Client(daemon.address) as client:
                assert client.save(ONE, b"abc", tier=Tier.RAM).ok
            shutil.rmtree(run)
            eventually(lambda: bound_again(daemon))
            assert run.stat().st_mode & 0o777 == 0o700
            assert_served(daemon)


def test_while_it_can_not_be_reached_it_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where its directory was: as after a logout, when the user may not make it."""
    with temporary_directories() as (directory, shm):
        run = directory / "run"
        operators = f"unix:{directory}/d.sock.admin"
        daemon = daemon_at(
            f"unix:{run}/d.sock", directory, shm, f"--server.admin_address={operators}"
        )
        monkeypatch.setattr(
            daemon,
            "admin",
            lambda timeout_s=60: AdminConnection(daemon.address, timeout_s, operators),
        )
        with daemon:
            shutil.rmtree(run)
            run.touch()
            with daemon.admin() as admin:
                why = eventually(lambda: admin.stats().health.removeprefix("serving"))
                assert "sockets: clients can't reach this daemon" in why
                with pytest.raises(DaemonUnavailable, match="no daemon answers"):
                    admin.health()
                run.unlink()
                eventually(lambda: admin.stats().health == "serving")
                eventually(admin.health)


def test_a_daemon_whose_place_was_taken_ends_and_leaves_the_other_its_sockets() -> None:
    with temporary_directories() as (directory, shm), temporary_directories() as (other, shm2):
        run = directory / "run"
        address = f"unix:{run}/d.sock"
        first, second = daemon_at(address, directory, shm), daemon_at(address, other, shm2)
        first.start()
        stopped = first._process
        assert stopped is not None
        os.kill(first.pid, signal.SIGSTOP)  # so that the second one is faster
        try:
            shutil.rmtree(run)
            second.start()
        finally:
            os.kill(first.pid, signal.SIGCONT)
        assert stopped.wait(60) == 1
        assert "another daemon has taken this one's place" in first.tail()
        with Client(address) as client:
            assert client.save(ONE, b"abc", tier=Tier.RAM).ok
        assert_served(second)
        second.stop()


def test_a_socket_that_is_in_use_is_not_replaced() -> None:
    """Although the lock file, which says so, is gone."""
    with private_daemon() as first, temporary_directories() as (other, shm):
        second = daemon_at(first.address, other, shm)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            (first.directory / "d.sock.lock").unlink()
            with pytest.raises(PrefixdError, match=r"listens on .* already"):
                second.start()
        finally:
            os.kill(first.pid, signal.SIGCONT)
        eventually(lambda: bound_again(first))
        with first.admin() as admin:
            assert admin.health()
