"""Calls that another process makes: as its caller's own, but for what hangs and what ends."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from prefixd.proto.kernel import native
from prefixd.proto.payload import crc32c
from prefixd.tiers import file_calls
from prefixd.tiers.arena import DiskArena
from prefixd.tiers.file_calls import CallsApart
from prefixd.tiers.files import HERE, FileCalls, open_own_file, pread_into, pwrite_all
from prefixd.tiers.store import StoreError
from tests.support.daemon import eventually

#: More than the process takes at once.
DATA = os.urandom(3 * 2**20 + 5)


@pytest.fixture
def apart() -> Iterator[CallsApart]:
    calls = CallsApart()
    yield calls
    calls.close()


def test_every_call_is_overridden() -> None:
    """One that was forgotten would wait for the device in the daemon."""
    here = {name for name in vars(FileCalls) if not name.startswith("__")}
    assert here == {name for name in vars(CallsApart) if not name.startswith("_")} - {
        "command",
        "pid",
    }


@pytest.mark.parametrize("kind", ["here", "apart"])
def test_the_calls_do_what_those_of_the_system_do(
    tmp_path: Path, apart: CallsApart, kind: str
) -> None:
    calls = {"here": HERE, "apart": apart}[kind]
    path = tmp_path / "file"
    fd = open_own_file(path, 0o600, calls)
    try:
        assert not os.get_inheritable(fd)
        pwrite_all(fd, DATA, 7, calls)
        expected = bytes(7) + DATA
        foreign = memoryview(bytearray(DATA[::-1]))
        crc = calls.copy_and_write(fd, foreign, len(expected), crc32c(b"before"))
        assert crc == crc32c(b"before" + foreign)
        expected += foreign
        assert path.read_bytes() == expected
        calls.fsync(fd)
        calls.fdatasync(fd)
        found = bytearray(len(expected) + 10)
        for drops in (False, True):
            if drops:
                calls.drop_cached(fd, 0, len(expected))
            assert pread_into(fd, memoryview(found), 0, calls) == len(expected)
            assert found[: len(expected)] == expected
        calls.posix_fallocate(fd, 0, len(expected) + 4096)
        assert path.stat().st_size == len(expected) + 4096
        calls.punch_hole(fd, 4096, 4096)
        assert path.read_bytes()[4096:8192] == bytes(4096)
        calls.ftruncate(fd, 5)
        calls.fchmod(fd, 0o400)
        assert path.stat().st_mode & 0o777 == 0o400
        assert path.read_bytes() == expected[:5]
        calls.unlink(path)
        assert not path.exists()
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["here", "apart"])
def test_many_payloads_are_each_written_at_their_offset(
    tmp_path: Path, apart: CallsApart, kind: str
) -> None:
    """More than one call takes, by number and by size, and one that is larger than its room."""
    if native is None:
        pytest.skip("needs the native kernel")
    calls = {"here": HERE, "apart": apart}[kind]
    chance = random.Random(5)
    sizes = [*(chance.randrange(2_000) for _ in range(700)), len(DATA), 2**20, 0, 600_000, 600_000]
    chance.shuffle(sizes)
    payloads = [chance.randbytes(size) for size in sizes]
    ends = [*accumulate(size + 3 for size in sizes)]
    offsets = [end - size for end, size in zip(ends, sizes, strict=True)]
    path = tmp_path / "file"
    fd = open_own_file(path, 0o600, calls)
    try:
        crcs = calls.copy_and_write_all(fd, payloads, offsets)
    finally:
        os.close(fd)
    assert crcs == [crc32c(payload) for payload in payloads]
    found = path.read_bytes()
    assert found == b"".join(bytes(3) + payload for payload in payloads)[: len(found)]


def test_errors_are_those_of_the_call(tmp_path: Path, apart: CallsApart) -> None:
    with pytest.raises(FileNotFoundError):
        apart.open(tmp_path / "missing" / "file", os.O_RDWR | os.O_CREAT)
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            apart.pwrite(fd, b"x", 0)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="Invalid argument"):
            apart.ftruncate(fd, -1)
        if native is not None:
            with pytest.raises(OSError, match="No space left"):
                apart.copy_and_write_all(fd, [b"x", DATA, b"y"], [0, 1, 2])
    finally:
        os.close(fd)
    assert apart.pid is not None, "none of this ends the process"


def test_a_call_without_its_answer_ends_the_process(
    tmp_path: Path, apart: CallsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write what is in the channel's memory, which the next call would change."""
    fd = open_own_file(tmp_path / "file", 0o600, apart)

    def without_memory(*_: object) -> None:
        raise MemoryError

    try:
        first = apart.pid
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "recvmsg", without_memory, raising=False)
            with pytest.raises(OSError, match=r"is lost: MemoryError"):
                apart.pwrite(fd, b"first", 0)
        assert apart.pwrite(fd, b"next", 0) == 4
        assert apart.pid not in (None, first)
    finally:
        os.close(fd)


def test_a_process_that_is_lost_costs_the_calls_that_it_had(
    tmp_path: Path, apart: CallsApart
) -> None:
    arena = DiskArena(tmp_path / "arena", 2**20, calls=apart)
    arena.secure()
    first = apart.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(StoreError, match="the process for the disk is lost"):
        arena.sync()
    assert arena.failed_syncs == 1, "nothing written before it is known to be stored"
    arena.put(4096, memoryview(b"again"), 0)
    arena.sync()
    assert apart.pid not in (None, first)
    assert arena.gather((4096, 4096), 0, 5) == b"again"
    arena.close()


def test_what_hangs_keeps_no_other_call_and_no_close(tmp_path: Path, apart: CallsApart) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "file").open("w") as file:
        waits = threading.Thread(
            target=pytest.raises, args=(OSError, apart.open, tmp_path / "pipe", os.O_RDONLY)
        )
        waits.start()
        apart.fsync(file.fileno())
        apart.close()
        waits.join()
        with pytest.raises(OSError, match="closed"):
            apart.fsync(file.fileno())


def test_no_second_process_is_started_beside_one_that_can_not_end(
    tmp_path: Path, apart: CallsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write. A process that the device holds is one that no kill ends."""
    with (tmp_path / "file").open("w") as file:
        apart.fsync(file.fileno())
        process = apart._process
        assert process is not None
        with monkeypatch.context() as patch:
            patch.setattr(type(process), "there", property(lambda _: True))
            process.end()
            with pytest.raises(OSError, match="the device holds a process that was killed"):
                apart.fsync(file.fileno())
        apart.fsync(file.fileno())


def test_a_file_that_an_earlier_daemon_still_writes_is_not_opened(
    tmp_path: Path, apart: CallsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = DiskArena(tmp_path / "arena", 2**20, calls=apart)
    later = CallsApart()
    monkeypatch.setattr(file_calls, "_OWNED_S", 0.0)
    with pytest.raises(StoreError, match="still written to by an earlier daemon"):
        DiskArena(tmp_path / "arena", 2**20, calls=later)
    arena.close()
    DiskArena(tmp_path / "arena", 2**20, calls=later).close()
    later.close()


def test_the_process_ends_with_the_daemon(tmp_path: Path, apart: CallsApart) -> None:
    """Also if that has no time to end it."""
    with (tmp_path / "file").open("w") as file:
        apart.fsync(file.fileno())
    process = apart._process
    assert process is not None
    for connection in process._connections:
        connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: not process.there)
    assert process._process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_for_the_daemon_do_not_end_it(
    tmp_path: Path, apart: CallsApart, number: signal.Signals
) -> None:
    with (tmp_path / "file").open("w") as file:
        apart.fsync(file.fileno())
        pid = apart.pid
        assert pid is not None
        os.kill(pid, number)
        apart.fsync(file.fileno())
        assert apart.pid == pid
