"""Locks that keep two daemons apart and end with their daemon; systemd's protocol."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.proto.errors import DirectoryInUse
from prefixd.server.config.loading import load_config
from prefixd.server.config.options import Config
from prefixd.server.process import (
    LOCK_NAME,
    keep_alive,
    lock_directories,
    lock_directory,
    notify,
    watchdog_interval_s,
)
from tests.support.warm import WARM

HOLD = """
import sys
from pathlib import Path
from prefixd.server.process import lock_directory
with lock_directory(Path(sys.argv[1]), "unix:/held"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def config(
    root: Path, *, socket: str = "run/a.sock", shm: str = "shm", disk: str = "disk"
) -> Config:
    paths = [f"--address={root / socket}", f"--shm.directory={root / shm}"]
    return load_config([*paths, f"--disk.directory={root / disk}"], {})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_are_made_for_this_user_only(tmp_path: Path) -> None:
    with lock_directories(config(tmp_path)):
        assert not (tmp_path / "disk").exists(), "its tier locks it"
        for name in ("run", "shm"):
            assert mode(tmp_path / name) == 0o700
        assert mode(tmp_path / "shm" / LOCK_NAME) == 0o600
        assert mode(tmp_path / "run" / "a.sock.lock") == 0o600


def test_directories_that_exist_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir(mode=0o755)
    (tmp_path / "shm").chmod(0o755)
    with lock_directories(config(tmp_path)):
        assert mode(tmp_path / "shm") == 0o755


@pytest.mark.parametrize("shared", ["socket", "shm"])
def test_the_refusal_of_a_second_daemon_names_the_first(tmp_path: Path, shared: str) -> None:
    places = {"socket": "run/a.sock", "shm": "shm", "disk": "disk"}
    others = {name: f"other-{place}" for name, place in places.items()}
    with lock_directories(config(tmp_path, **places)):
        second = config(tmp_path, **(others | {shared: places[shared]}))
        with pytest.raises(DirectoryInUse) as refused, lock_directories(second):
            pass
        # The refused attempt released the locks that it had taken.
        with lock_directories(config(tmp_path, **others)):
            pass
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / places[shared]} is in use by the daemon with pid ")
    assert f"pid {os.getpid()} at unix:{tmp_path}/run/a.sock, started 2" in message
    with lock_directories(second):
        pass


def test_sockets_may_share_a_directory(tmp_path: Path) -> None:
    first = config(tmp_path)
    second = config(tmp_path, socket="run/b.sock", shm="shm2", disk="disk2")
    with lock_directories(first), lock_directories(second):
        pass


@pytest.mark.parametrize("tier", ["shm", "disk"])
def test_a_tier_that_is_off_creates_and_locks_no_directory(tmp_path: Path, tier: str) -> None:
    def without(name: str) -> Config:
        places = {place: f"{name}-{place}" for place in ("shm", "disk")} | {tier: "common"}
        argv = [f"--address={tmp_path}/{name}.sock", f"--{tier}=0"]
        argv += [f"--{place}.directory={tmp_path / at}" for place, at in places.items()]
        return load_config(argv, {})

    with lock_directories(without("a")), lock_directories(without("b")):
        assert not (tmp_path / "common").exists()


def test_two_daemons_with_ram_alone_differ_in_their_sockets_only(tmp_path: Path) -> None:
    def ram_alone(socket: str) -> Config:
        places = [f"--{place}.directory={tmp_path / place}" for place in ("shm", "disk")]
        return load_config([f"--address={tmp_path / socket}", "--shm=0", "--disk=0", *places], {})

    with lock_directories(ram_alone("a.sock")), lock_directories(ram_alone("b.sock")):
        assert sorted(file.name for file in tmp_path.iterdir()) == ["a.sock.lock", "b.sock.lock"]


def test_the_note_names_the_holder(tmp_path: Path) -> None:
    for address in ("unix:/a, which is longer", "unix:/b"):
        with lock_directory(tmp_path, address):
            note = json.loads((tmp_path / LOCK_NAME).read_text())
            assert note["pid"] == os.getpid()
            assert note["address"] == address


def test_the_note_of_an_earlier_holder_is_replaced_without_emptying_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 writes a file that was emptied when it is closed, and a device that hangs would hold the
    daemon there: `hostile/test_hanging_device.py` met it once in twenty runs."""
    lengths = []

    def ftruncate(fd: int, length: int) -> None:
        lengths.append(length)
        cut(fd, length)

    cut = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    for address in ("unix:/a-name-that-is-longer", "unix:/a"):
        with lock_directory(tmp_path, address):
            assert json.loads((tmp_path / LOCK_NAME).read_text())["address"] == address
    assert len(lengths) == 2
    assert min(lengths) > 0


@pytest.mark.parametrize("note", ["", "{", "[]", '{"pid": "x"}', '{"pid":1,"address":"a"}'])
def test_an_invalid_note_is_no_error(tmp_path: Path, note: str) -> None:
    with lock_directory(tmp_path, "unix:/a"):
        (tmp_path / LOCK_NAME).write_text(note)
        with (
            pytest.raises(DirectoryInUse, match="in use by another daemon"),
            lock_directory(tmp_path, "unix:/b"),
        ):
            pass


def test_a_killed_daemon_leaves_no_obstacle(tmp_path: Path) -> None:
    command = [*WARM, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with (
            pytest.raises(DirectoryInUse, match=f"pid {holder.pid} at unix:/held"),
            lock_directory(tmp_path, "unix:/b"),
        ):
            pass
        holder.kill()
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == holder.pid
    with lock_directory(tmp_path, "unix:/b"):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_program_that_the_daemon_starts_does_not_inherit_the_lock(tmp_path: Path) -> None:
    with lock_directory(tmp_path, "unix:/a"):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    with child, lock_directory(tmp_path, "unix:/b"):
        assert child.poll() is None
        child.communicate()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=LOCK_NAME), lock_directory(tmp_path, "unix:/a"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        os.chown(tmp_path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(PermissionError, match="belongs to the user"):
        lock_directory(tmp_path, "unix:/a").__enter__()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_states_are_sent_to_the_manager(manager: socket.socket) -> None:
    assert notify("READY=1")
    assert manager.recv(100) == b"READY=1"


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    for address in (str(tmp_path / "nobody"), "relative", "@nobody-listens-here"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert not notify("READY=1")


def test_the_watchdog_is_fed_from_the_loop(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_interval_s() == pytest.approx(0.001)

    async def feed() -> None:
        feeding = asyncio.ensure_future(keep_alive())
        for _ in range(3):
            assert await asyncio.to_thread(manager.recv, 100) == b"WATCHDOG=1"
        feeding.cancel()

    asyncio.run(feed())
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_interval_s() == 0, "the watchdog belongs to another process"
    monkeypatch.delenv("WATCHDOG_USEC")
    assert watchdog_interval_s() == 0
