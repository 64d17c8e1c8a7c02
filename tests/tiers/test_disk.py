"""What only the disk store does: the order of syncs, killed processes, its file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import HERE, SLAB, Placed, budget, numbers_of, payload_of

from prefixd.proto.arena_header import PROBE_OFFSET
from prefixd.proto.kernel import native
from prefixd.proto.payload import crc32c
from prefixd.tiers.arena import DiskArena
from prefixd.tiers.arena_stores import DiskStore
from prefixd.tiers.file_calls import CallsApart
from prefixd.tiers.files import FileCalls
from prefixd.tiers.rows import Erasure
from prefixd.tiers.store import StoreError

# ---- what survives


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers import Placed, DiskStore
placed = Placed(DiskStore, Path(sys.argv[1]), 4096)
for batch in range(10_000):
    entries = placed.save(*range(3 * batch, 3 * batch + 3), payload_bytes=300_000)
    if batch > 5:
        # The oldest batch is erased, and the next one takes its room.
        held = [entry for part in placed.store.scan() for entry in part]
        placed.erase(*sorted(held, key=lambda entry: entry.generation)[:3])
    print(batch, flush=True)
"""


@pytest.mark.parametrize("acknowledged", [1, 4, 20])
def test_what_was_acknowledged_survives_a_kill(
    disk: Callable[..., Placed], tmp_path: Path, acknowledged: int
) -> None:
    """A process saves batch after batch, and is killed in the middle of one."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "disk"), HERE],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(acknowledged)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.stdout.close()
    assert child.wait() == -9
    batches = sum(line.endswith("\n") for line in lines)
    assert batches >= acknowledged

    placed = disk()
    recovery = placed.recover()
    assert not recovery.dropped
    found = set(numbers_of(recovery.entries))
    # Parts of the batches that were being erased and saved may be there.
    assert found >= set(range(max(0, 3 * batches - 3 * 5), 3 * batches))
    assert max(found) < 3 * batches + 3
    for entry in recovery.entries:
        assert placed.is_whole(entry.record)


def test_records_are_written_when_their_payload_was_synced(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = disk()
    table = placed.store._records.table
    calls: list[str] = []
    real_pwrite, real_sync, real_apply = os.pwrite, os.fdatasync, table.apply

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        calls.append("write payload")
        return real_pwrite(fd, data, offset)

    def sync(fd: int) -> None:
        calls.append("sync payload")
        real_sync(fd)

    def apply(erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        calls.append(f"erase {len(erasures)} and put {len(rows)}")
        real_apply(erasures, rows)

    (old,) = placed.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "fdatasync", sync)
        patch.setattr(table, "apply", apply)
        placed.store.forget([old])
        assert calls == []
        writer = placed.written(placed.entry(2, payload_bytes=SLAB))
        assert calls == ["erase 1 and put 0", "write payload", "write payload"]
        calls.clear()
        placed.store.apply([writer])
    assert calls == ["sync payload", "erase 0 and put 2"], "the record and the mark"


def test_nothing_waits_for_the_device_without_sync(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda _: pytest.fail("a sync"))
    placed = disk(sync=False)
    placed.erase(*placed.save(1, 2))
    placed.store.probe()


def test_the_names_that_lead_to_a_new_tier_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the name of a directory is lost, so is everything that was synced in it."""
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "new" / "deeper" / "tier"
    DiskStore(path, budget(8, DiskStore), SLAB).close()
    assert {str(path), *map(str, list(path.parents)[:3])} <= set(synced)
    synced.clear()
    DiskStore(path, budget(8, DiskStore), SLAB, sync=False).close()
    assert synced == []


# ---- many at once


def test_readers_see_entries_whole_while_others_are_written(disk: Callable[..., Placed]) -> None:
    placed = disk(sync=False)
    kept = placed.save(0, 1)
    done, went_round = threading.Event(), threading.Event()
    bad: list[int] = []

    def read() -> None:
        while not done.is_set():
            bad.extend(entry.generation for entry in kept if not placed.is_whole(entry))
            went_round.set()

    reader = threading.Thread(target=read)
    reader.start()
    last = placed.save(2)
    for number in range(3, 30):
        placed.erase(*last)
        last = placed.save(number)
    assert went_round.wait(60)
    done.set()
    reader.join()
    assert not bad


def test_saves_may_come_from_many_threads(disk: Callable[..., Placed]) -> None:
    placed = disk(sync=False)
    entries = [placed.entry(number, payload_bytes=70_000) for number in range(100)]

    def work(first: int) -> None:
        for entry in entries[first : first + 5]:
            writer = placed.written(entry)
            placed.store.apply([writer])
            assert placed.is_whole(writer.entry)
            if (entry.generation - 1) % 2:
                placed.store.forget([entry])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 100, 5)))
    placed.store.apply([])
    assert placed.numbers() == set(range(0, 100, 2))
    assert not disk(verify_payloads=True).recover().dropped


def test_whole_payloads_in_one_call_are_those_of_their_writers(disk: Callable[..., Placed]) -> None:
    if native is None:
        pytest.skip("needs the native kernel")
    placed = disk(calls=CallsApart())
    entries = [placed.entry(number, payload_bytes=70_000) for number in range(9)]
    payloads = [payload_of(number, 70_000) for number in range(9)]
    whole = placed.store.write_whole(entries, payloads)
    assert whole is not None
    assert whole.payload_crc32c == [crc32c(payload) for payload in payloads]
    writers = []
    for entry, crc in zip(entries, whole.payload_crc32c, strict=True):
        writer = placed.store.writer(entry, b"abcd" * (entry.token_ids_bytes // 4))
        writer.resume(crc, whole.failed_syncs)
        assert writer.seal() == crc
        writers.append(writer)
    placed.store.apply(writers)
    assert all(placed.is_whole(entry) for entry in entries)
    assert placed.numbers() == set(range(9))
    assert not disk(verify_payloads=True).recover().dropped


def test_a_device_that_refuses_whole_payloads_is_met_again_by_each_writer(
    disk: Callable[..., Placed],
) -> None:
    class Full(CallsApart):
        def copy_and_write_all(self, *_: object) -> list[int]:
            raise OSError(errno.ENOSPC, "full")

    placed = disk(calls=Full())
    placed.store.arena.puts_all = True  # without the native kernel, too
    entry = placed.entry(1)
    assert placed.store.write_whole([entry], [payload_of(1, entry.payload_bytes)]) is None
    placed.store.apply([placed.written(entry)])
    assert placed.is_whole(entry)


class NeverReads(FileCalls):
    """Those of a device that writes: it reads nothing, or `bytes_read`."""

    def __init__(self, bytes_read: bytes = b"") -> None:
        super().__init__()
        self.dropped: list[tuple[int, int]] = []
        self.bytes_read = bytes_read

    def drop_cached(self, fd: int, start: int, length_bytes: int) -> None:
        super().drop_cached(fd, start, length_bytes)
        self.dropped.append((start, start + length_bytes))

    def preadv(self, _fd: int, view: memoryview, _offset_bytes: int) -> int:
        if not self.bytes_read:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view[:] = self.bytes_read[: len(view)]
        return len(view)


@pytest.mark.parametrize(
    ("bytes_read", "why"), [(b"", "can't read from .*arena"), (bytes(16), "reads other bytes")]
)
def test_a_probe_notices_a_device_that_writes_and_does_not_read(
    tmp_path: Path, bytes_read: bytes, why: str
) -> None:
    """The page cache would answer for it."""
    calls = NeverReads(bytes_read)
    arena = DiskArena(tmp_path / "arena", 64 * SLAB, calls=calls)
    try:
        arena.secure()
        with pytest.raises(StoreError, match=why):
            arena.probe()
        ((start, end),) = calls.dropped
        assert start <= PROBE_OFFSET < PROBE_OFFSET + 16 <= end, "a page that is dropped as a whole"
        assert start % 4096 == end % 4096 == 0
    finally:
        arena.close()


# ---- the file


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "victim").write_bytes(b"do not touch")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    for name in ("directory", "link", "pipe", "missing/arena"):
        with pytest.raises(StoreError, match=name):
            DiskArena(tmp_path / name, 64 * SLAB)
    assert (tmp_path / "victim").read_bytes() == b"do not touch"
    with pytest.raises(StoreError, match="whole pages"):
        DiskArena(tmp_path / "arena", 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't make the disk tier"):
        DiskStore(tmp_path / "file" / "below", budget(64, DiskStore), SLAB)


def test_a_readers_descriptor_can_only_read(disk: Callable[..., Placed]) -> None:
    placed = disk()
    (entry,) = placed.save(1)
    fd = placed.store.arena.open_reader()
    try:
        start, length = entry.location
        assert os.pread(fd, length, start)[: entry.payload_bytes] == payload_of(1)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", start)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, SLAB)
    finally:
        os.close(fd)
