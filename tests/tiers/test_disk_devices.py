"""The disk store on devices that are full or fail."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers import HERE, SLAB, Placed, numbers_of, payload_of

from prefixd.tiers import file_calls, files
from prefixd.tiers.arena import DiskArena
from prefixd.tiers.file_calls import CallsApart
from prefixd.tiers.files import FileCalls
from prefixd.tiers.rows import Erasure
from prefixd.tiers.store import Damaged, StoreError, StoreFull

# ---- devices without room


LIMITED = """
import ctypes, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers import DiskStore, SLAB, budget, Placed
from prefixd.tiers.store import StoreFull
kind, directory = sys.argv[3], Path(sys.argv[1]) / "disk"
if kind == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
else:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
        sys.exit(77)
    if libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, b"size=1200k"):
        sys.exit(77)

class Small(Placed):
    segment_bytes = 16 * SLAB
    def __init__(self):
        try:
            super().__init__(DiskStore, directory, 1024)
        except StoreFull:
            print("full", end=" ")
    def close_unfilled(self):
        pass

small = Small()
store = small.store
secured = store.arena.secured_bytes
assert 2**19 < secured < 1024 * SLAB, secured
from prefixd.tiers.extents import ExtentAllocator
small.extents = ExtentAllocator(secured, SLAB, SLAB)
number = 0
live = []
# All secured room can be written, erased and written again.
for round in range(3):
    while small.extents.free_bytes >= 8 * SLAB:
        live += small.save(number, payload_bytes=6 * SLAB)
        number += 1
    assert all(small.is_whole(entry) for entry in live)
    if round < 2:
        small.erase(*live[:10])
        del live[:10]
try:
    for _ in store.secure_segments(16 * SLAB):
        pass
except StoreFull:
    print("full", end=" ")
store.close()
small = Small()
assert small.store.arena.found_bytes == secured
small.extents = ExtentAllocator(secured, SLAB, SLAB)
assert len(small.recover().entries) == len(live)
small.store.close()
"""


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_a_full_device_gives_what_it_has_and_goes_on(tmp_path: Path, kind: str) -> None:
    """With a limit on the size of files, and on a small tmpfs in a mount namespace."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), HERE, kind],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("no permission to mount a tmpfs in a namespace of its own")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["full"] * 3


def test_a_start_without_room_leaves_a_directory_that_opens_later(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(StoreFull):
            disk()
    placed = disk()
    placed.save(1)
    assert numbers_of(disk().recover().entries) == [1]


def test_room_is_secured_later_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = DiskArena(tmp_path / "arena", 64 * SLAB)
    real, left = os.posix_fallocate, [2]

    def scarce(fd: int, offset: int, length: int) -> None:
        if not left[0]:
            # Some file systems keep what they reserved of a range that failed.
            real(fd, offset, length // 2)
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    steps = arena.secure_segments(10 * SLAB)
    assert [next(steps), next(steps)] == [10 * SLAB, 20 * SLAB]
    with pytest.raises(StoreFull, match="more than 81920 of the 262144 bytes"):
        next(steps)
    assert (arena.secured_bytes, os.fstat(arena.fd).st_size) == (20 * SLAB, 20 * SLAB)
    left[0] = 100
    assert next(arena.secure_segments(10 * SLAB)) == 30 * SLAB
    arena.close()
    again = DiskArena(tmp_path / "arena", 64 * SLAB)
    assert again.found_bytes == again.secured_bytes == 30 * SLAB
    again.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_reserves_nothing_gets_zeros_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: int) -> None:
        raise OSError(code, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    for slabs in (16, 24):
        arena = DiskArena(tmp_path / "arena", slabs * SLAB)
        assert arena.found_bytes == (0 if slabs == 16 else 16 * SLAB)
        for _ in arena.secure_segments(5 * SLAB):
            pass
        assert os.fstat(arena.fd).st_blocks * 512 >= slabs * SLAB
        if slabs == 16:
            arena.put(3 * SLAB, memoryview(payload_of(1)), 0)
        assert arena.gather((3 * SLAB, 5 * SLAB), 0, 5 * SLAB) == payload_of(1)
        arena.close()


@pytest.mark.parametrize("written_slabs", [0, 1023])
def test_a_copy_with_holes_says_where_they_are(tmp_path: Path, written_slabs: int) -> None:
    """Some ways to copy a file leave holes. They are retired, and get their blocks again before
    entries come there (`tests/server/runtime/test_fit.py`)."""
    with (tmp_path / "arena").open("wb") as file:
        file.write(bytes(written_slabs * SLAB))
        file.truncate(1024 * SLAB)
    arena = DiskArena(tmp_path / "arena", 1024 * SLAB)
    assert arena.found_bytes == 1024 * SLAB
    (hole,) = arena.find_holes()
    assert hole == (written_slabs * SLAB, (1024 - written_slabs) * SLAB)
    assert arena.give_back(hole, at_start=True)
    arena.take_back(hole)
    assert not arena.holes
    assert os.fstat(arena.fd).st_blocks * 512 >= 1024 * SLAB
    arena.close()


# ---- devices that fail


def failing(code: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_sector_that_can_not_be_read_is_a_failure_and_not_damage(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = disk()
    (entry,) = placed.save(1)
    for code in (errno.EIO, errno.ENOMEM):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing(code))
            for action in (
                lambda: placed.store.read(entry, 0, 10),
                lambda: placed.store.token_ids(entry),
                lambda: placed.store.verify(entry, entry.payload_crc32c),
            ):
                with pytest.raises(StoreError, match="can't read") as caught:
                    action()
                assert type(caught.value) is StoreError
    assert placed.is_whole(entry)


def test_a_file_that_ends_within_an_entry_is_damage(disk: Callable[..., Placed]) -> None:
    placed = disk()
    entry, other = placed.save(1, 2)
    first, last = sorted((entry, other), key=lambda e: e.location)
    os.truncate(placed.store.arena.fd, last.location[0] + SLAB)
    with pytest.raises(Damaged, match="ends at"):
        placed.store.read(last, 0, last.payload_bytes)
    assert placed.store.read(last, 0, SLAB)
    assert placed.is_whole(first)


def test_short_reads_and_writes_are_gone_on_with(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = disk()
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:777]], at))
    (entry,) = placed.save(1)
    assert placed.is_whole(entry)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, StoreError), (errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull)],
)
def test_a_write_that_fails_has_its_kind(
    disk: Callable[..., Placed],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[StoreError],
) -> None:
    placed = disk()
    writer = placed.store.writer(placed.entry(1), b"abcd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(code))
        with pytest.raises(StoreError) as caught:
            writer.write(payload_of(1))
        assert type(caught.value) is kind
        with pytest.raises(StoreError):
            placed.store.probe()
    placed.store.probe()


def test_what_was_written_before_a_failed_sync_is_never_acknowledged(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports lost pages once, to the first sync, which may be for another entry."""
    placed = disk()
    early = placed.written(placed.entry(1))
    begun = placed.store.writer(placed.entry(2), b"abcd" * 2)
    begun.write(payload_of(2)[:100])
    other = placed.written(placed.entry(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing(errno.EIO))
        with pytest.raises(StoreError, match="can't sync"):
            placed.store.apply([other])
    begun.write(payload_of(2)[100:])
    begun.seal()
    for writer in (early, begun, other):
        with pytest.raises(StoreError, match="not known to be stored"):
            placed.store.apply([writer])
    placed.save(4)
    assert placed.numbers() == {4}


def test_a_failed_batch_leaves_no_record_when_its_room_is_used_again(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync fails after the rows were written: they are neither acknowledged nor used."""
    placed = disk(64)
    placed.save(0)
    writers = [placed.written(placed.entry(number)) for number in (1, 2)]
    table = placed.store._records.table
    real = table.apply

    def broken(erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        real(erasures, rows)
        raise StoreError("can't write records: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(table, "apply", broken)
        with pytest.raises(StoreError, match="can't write records"):
            placed.store.apply(writers)
        assert placed.store.unerased == 2
        placed.extents.free(writers[0].entry.location)
        with pytest.raises(StoreError, match="can't write records"):
            placed.written(placed.entry(3))
    placed.extents.check()
    placed.store.apply([])
    assert placed.store.unerased == 0
    assert placed.numbers() == {0}


def test_a_probe_sees_a_sync_that_fails(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = disk()
    early = placed.written(placed.entry(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing(errno.EIO))
        with pytest.raises(StoreError, match="can't sync"):
            placed.store.probe()
    with pytest.raises(StoreError, match="not known to be stored"):
        placed.store.apply([early])


@pytest.mark.parametrize("module", [files, file_calls])
def test_what_a_client_writes_meanwhile_does_not_change_what_is_checked(
    disk: Callable[..., Placed], monkeypatch: pytest.MonkeyPatch, module: types.ModuleType
) -> None:
    """The checksum is that of the bytes in the file, although the memory changes meanwhile."""
    calls = CallsApart() if module is file_calls else FileCalls()
    placed = disk(calls=calls)
    staging = bytearray(payload_of(1, 3 * 2**20))
    real = module.copy_crc32c

    def scribbling(room: memoryview, piece: memoryview, crc: int) -> int:
        crc = real(room, piece, crc)
        staging[:] = bytes(len(staging))
        return crc

    monkeypatch.setattr(module, "copy_crc32c", scribbling)
    entry = placed.entry(0, payload_bytes=len(staging))
    writer = placed.store.writer(entry)
    writer.write(staging)
    crc = writer.seal()
    placed.store.apply([writer])
    placed.store.verify(writer.entry, crc)
