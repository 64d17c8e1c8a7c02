"""What the contract suite does not test of the stores: records, and what only RAM and shm do.

`test_disk.py` has what only the disk store does.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import (
    PAYLOAD,
    SLAB,
    Placed,
    budget,
    key,
    numbers_of,
    payload_of,
    place_of,
    records_file,
)

from prefixd.proto.arena_header import read_arena_incarnation
from prefixd.proto.entry import Content, EntryRecord, Location
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers.arena import Arena
from prefixd.tiers.arena_stores import DiskStore, RamStore, ShmStore
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.records import USAGE_FILE
from prefixd.tiers.rows import RECORDS_FILE, ROW_BYTES, encode_rows
from prefixd.tiers.store import SEGMENT_BYTES, Damaged, StoreError, StoreFull, Usage

Opened = Callable[..., Placed]


def change(path: Path, offset: int, data: bytes) -> None:
    """Write to a file whatever its mode says."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    change(path, offset, bytes([byte ^ 1 << bit]))


def own_row(entry: EntryRecord) -> bytes:
    return encode_rows(entry, SLAB)[-1][1]


def put_rows(placed: Placed, *rows: tuple[int, bytes]) -> None:
    """Write rows without any check."""
    placed.store._records.table.apply([], rows)


# ---- damage


@pytest.mark.parametrize("first", range(0, ROW_BYTES, 16))
def test_a_flipped_bit_in_a_record_costs_that_entry_at_most(
    opened: Opened, directory: Path, kind: type, first: int
) -> None:
    _, entry, _ = opened().save(0, 1, 2)
    for offset in range(first, first + 16):
        place = place_of(directory, own_row(entry))
        flip(records_file(directory), place + offset, bit=offset % 8)
        placed = opened()
        recovery = placed.recover()
        if kind is DiskStore:
            # It is repaired.
            assert numbers_of(recovery.entries) == [0, 1, 2], offset
            continue
        assert numbers_of(recovery.entries) == [0, 2], offset
        assert len(recovery.dropped) == 1
        assert placed.numbers() == {0, 2}
        placed = opened()
        assert not placed.recover().dropped, "what was dropped was erased"
        (entry,) = placed.save(1)


@pytest.mark.parametrize("offset", range(32))
def test_a_flipped_bit_in_usage_loses_that_hint(
    opened: Opened, directory: Path, offset: int
) -> None:
    placed = opened()
    entries = placed.save(0, 1, 2)
    placed.store.record_usage([Usage(entry, 9_000, 7) for entry in entries])
    flip(directory / USAGE_FILE, entries[1].location[0] // SLAB * 32 + offset, bit=offset % 8)
    recovery = opened().recover()
    assert not recovery.dropped
    assert {entry.record.key: entry.hits for entry in recovery.entries} == {
        key(0): 7,
        key(1): 0,
        key(2): 7,
    }


def test_flips_anywhere_cost_what_they_hit_and_never_show(opened: Opened, directory: Path) -> None:
    """In every file, for many rounds: wrong bytes are never read, and the store always opens."""
    rng = random.Random(4)
    placed = opened(256, verify_payloads=False)
    saved = {entry.key: entry for entry in placed.save(*range(40))}
    for _ in range(30):
        names = [directory / "arena", records_file(directory), directory / USAGE_FILE]
        for path in (names[1], names[1], names[2], names[0]):
            flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
        placed = opened(256, verify_payloads=False)
        recovery = placed.recover()
        lost = 0
        for entry in recovery.entries:
            assert entry.record == saved[entry.record.key]
            try:
                placed.store.verify(entry.record, entry.record.payload_crc32c)
                assert b"".join(placed.store.read(entry.record, 0, PAYLOAD)) == payload_of(
                    entry.record.generation - 1
                )
            except Damaged:
                lost += 1
        assert lost <= 30
        assert len(recovery.dropped) <= 2
    assert len(placed.numbers()) >= 5


def test_a_flipped_bit_in_a_payload_is_found(opened: Opened, directory: Path) -> None:
    entries = opened().save(0, 1, 2)
    flip(directory / "arena", entries[1].location[0] + 1_000)
    placed = opened(verify_payloads=False)
    assert not placed.recover().dropped
    with pytest.raises(Damaged, match="was saved"):
        placed.store.verify(entries[1], entries[1].payload_crc32c)
    placed = opened(verify_payloads=True)
    recovery = placed.recover()
    assert numbers_of(recovery.entries) == [0, 2]
    ((dropped, why),) = recovery.dropped
    assert dropped == key(1)
    assert "CRC32C" in why
    assert placed.store.unerased == 1
    placed.store.apply([])
    assert placed.numbers() == {0, 2}


@pytest.mark.parametrize("name", [RECORDS_FILE, USAGE_FILE, "arena"])
@pytest.mark.parametrize("left", [0.0, 0.01, 0.4, 1.0])
def test_a_file_that_was_cut_short_loses_what_is_gone(
    opened: Opened, directory: Path, kind: type, name: str, left: float
) -> None:
    entries = opened(128).save(*range(10))
    path = records_file(directory) if name == RECORDS_FILE else directory / name
    path.chmod(0o600)
    end = int(path.stat().st_size * left)
    os.truncate(path, end)
    rows_end = {RECORDS_FILE: end // ROW_BYTES, "arena": end // SLAB}.get(name, 128)
    # An arena in memory counts in pages, and has all the pages that it reports.
    kept = [
        entry
        for entry in entries
        if (entry.location[0] if name == RECORDS_FILE else sum(entry.location)) // SLAB
        <= rows_end - (name == RECORDS_FILE)
    ]
    placed = opened(128)
    recovery = placed.recover()
    found = sorted(numbers_of(recovery.entries))
    if kind is DiskStore and name == RECORDS_FILE:
        # LMDB put the rows near the beginning.
        assert found == (list(range(10)) if left >= 0.4 else [])
    else:
        assert found == sorted(e.generation - 1 for e in kept)
    for entry in recovery.entries:
        assert placed.is_whole(entry.record)
    placed.save(*range(100, 103))
    assert not opened(128).recover().dropped


@pytest.mark.parametrize("name", [RECORDS_FILE, USAGE_FILE, "arena"])
def test_a_file_that_is_gone_loses_what_was_in_it(
    opened: Opened, directory: Path, name: str
) -> None:
    opened().save(0, 1, 2)
    (records_file(directory) if name == RECORDS_FILE else directory / name).unlink()
    placed = opened()
    assert len(placed.recover().entries) == (3 if name == USAGE_FILE else 0)
    placed.save(10)
    assert 10 in placed.numbers()


def test_what_is_no_usage_file_is_set_aside(opened: Opened, directory: Path) -> None:
    opened().save(0)
    for number in (1, 2):
        (directory / USAGE_FILE).unlink()
        (directory / USAGE_FILE).mkdir()
        assert len(opened().recover().entries) == 1
        assert (directory / f"{USAGE_FILE}.damaged-{number}").is_dir()


def test_what_is_no_records_file_is_refused(opened: Opened, directory: Path) -> None:
    directory.mkdir()
    (directory / RECORDS_FILE).mkdir()
    with pytest.raises(StoreError, match="records"):
        opened()


# ---- records that can't be right


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (4, b"\2", "format 2, this version reads 1"),
        (5, b"\7", "tier 7"),
        (5, b"\1", "of the ram tier"),
        (6, b"\x09", "save reason 9"),
        (7, b"\x10", "slabs of 2**16"),
        (48, bytes(8), "a payload has"),
        (72, b"\3", "token ids"),
        (78, b"\1", "flags 0x0001"),
        (80, b"\0", "own first slab"),
        (80, b"\x06", "extents from number 5 on are not there"),
        (84, b"\x07", "own first slab"),
        (88, b"\x04", "room for"),
        (88, b"\x07", "room for"),
    ],
)
def test_a_whole_record_of_another_kind_is_dropped(
    opened: Opened, offset: int, value: bytes, reason: str
) -> None:
    """Like records of a later version: the checksum matches."""
    placed = opened()
    entries = placed.save(0, 1, 2)
    row = bytearray(own_row(entries[1]))
    row[offset : offset + len(value)] = value
    row[-4:] = crc32c(row[:-4]).to_bytes(4, "little")
    put_rows(placed, (entries[1].location[0] // SLAB, bytes(row)))
    placed = opened()
    recovery = placed.recover()
    assert numbers_of(recovery.entries) == [0, 2]
    ((dropped, why),) = recovery.dropped
    assert dropped == key(1)
    assert reason in why
    assert placed.numbers() == {0, 2}


def forge(placed: Placed, entry: EntryRecord) -> None:
    put_rows(placed, *encode_rows(entry, SLAB))


def test_of_records_that_overlap_the_newest_holds(opened: Opened) -> None:
    placed = opened()
    old, _, new = placed.save(1, 2, 3)
    start = old.location[0]
    first: Location = (start - 2 * SLAB, 6 * SLAB)
    # It overlaps the end of one entry and the start of the next.
    forged = replace(new, key=key(9), generation=99, location=first)
    forge(placed, forged)
    recovery = opened(verify_payloads=False).recover()
    assert key(9) in {entry.record.key for entry in recovery.entries}
    assert {why for _, why in recovery.dropped} == {"its room was given to a later entry"}
    lost = {dropped for dropped, _ in recovery.dropped}
    assert key(1) in lost
    assert len(recovery.entries) + len(lost) == 4
    assert not opened(verify_payloads=False).recover().dropped


def test_of_two_records_of_a_key_the_newest_holds(opened: Opened) -> None:
    first, second = opened().save(1, 2)
    for winner, loser in ((first, second), (second, first)):
        placed = opened(verify_payloads=False)
        forge(placed, replace(loser, key=key(7), generation=50))
        forge(placed, replace(winner, key=key(7), generation=60))
        recovery = opened(verify_payloads=False).recover()
        assert [entry.record.location for entry in recovery.entries] == [winner.location]
        assert recovery.dropped == [(key(7), "it was saved again later")]


def test_an_entry_whose_extents_are_those_of_another_is_dropped(opened: Opened) -> None:
    """A continuation counts only for the entry that wrote it."""
    placed = opened()
    placed.save(*range(10), payload_bytes=SLAB - 200)
    placed.save(*range(10, 20), payload_bytes=SLAB - 200)
    kept = [e for batch in placed.store.scan() for e in batch if (e.location[0] // SLAB) % 2]
    gone = [e for batch in placed.store.scan() for e in batch if e not in kept]
    placed.erase(*gone)
    long = placed.extents.allocate(40 * SLAB)
    placed.extents.free(long)
    (entry,) = placed.save(30, payload_bytes=placed.extents.free_bytes - SLAB)
    assert len(entry.location) // 2 > 5
    slab, continuation = encode_rows(entry, SLAB)[0]
    placed = opened()
    assert entry in [found.record for found in placed.recover().entries]
    put_rows(placed, (slab, continuation[:20] + b"\xff" + continuation[21:]))
    recovery = opened().recover()
    assert [(key(30), "extents from number 5 on are not there")] == recovery.dropped
    assert len(recovery.entries) == len(kept)


# ---- sizes


def test_everything_together_takes_the_budget(
    opened: Opened, directory: Path, kind: type[ShmStore] | type[DiskStore]
) -> None:
    placed = opened(64)
    for number in range(30):
        placed.erase(*placed.save(number))
    # Both LMDB files end with a whole page.
    spare_bytes = 2 * mmap.PAGESIZE if kind is DiskStore else 0
    taken_bytes = sum(path.stat().st_size for path in directory.iterdir())
    assert budget(64, kind) - spare_bytes <= taken_bytes <= budget(64, kind)


def test_the_records_of_slabs_that_were_never_used_are_given_back(shm: Path) -> None:
    """A larger tier secures its records first. This one was killed before it secured its arena."""

    def opened() -> ShmStore:
        size, most = budget(64, ShmStore), budget(960, ShmStore)
        return ShmStore(shm, size, SLAB, max_budget_bytes=most)

    store = opened()
    for _ in store.secure_segments():
        pass
    store._records.secure(960)
    store.close()
    store = opened()
    taken_bytes = sum(path.stat().st_blocks * 512 for path in shm.iterdir())
    assert taken_bytes <= budget(64, ShmStore) + 2 * mmap.PAGESIZE
    store.close()


def test_a_larger_budget_keeps_the_entries(opened: Opened) -> None:
    opened(64).save(0, 1, 2)
    placed = opened(96)
    recovery = placed.recover()
    assert len(recovery.entries) == 3
    assert not recovery.dropped
    assert placed.extents.free_bytes == 95 * SLAB - sum(
        sum(entry.record.location[1::2]) for entry in recovery.entries
    )


def test_a_smaller_budget_opens_what_is_there_as_it_is(
    opened: Opened, kind: type[ShmStore] | type[DiskStore]
) -> None:
    """The allocator starts at the end, so half of the entries are beyond the new size."""
    placed = opened(64)
    assert not placed.store.found_budget_bytes
    placed.save(*range(10))
    placed = opened(40)
    assert placed.store.size_bytes == placed.store.secured_bytes == 64 * SLAB
    assert placed.store.found_budget_bytes == budget(64, kind)
    recovery = placed.recover()
    assert set(numbers_of(recovery.entries)) == set(range(10))
    assert not recovery.dropped
    assert all(placed.is_whole(entry.record) for entry in recovery.entries)


def test_another_slab_is_refused_with_a_way_out(
    opened: Opened, directory: Path, kind: type[ShmStore] | type[DiskStore]
) -> None:
    opened().save(0)
    with pytest.raises(StoreError, match="slabs of 4096 bytes: configure these, or remove"):
        kind(directory, 100 * 2 * SLAB, 2 * SLAB)
    assert len(opened().recover().entries) == 1


def test_a_budget_without_a_slab_is_refused(
    directory: Path, kind: type[ShmStore] | type[DiskStore]
) -> None:
    with pytest.raises(StoreError, match="hold no slab"):
        kind(directory, budget(2, kind) - 1, SLAB)
    with pytest.raises(ValueError, match="power of two"):
        kind(directory, budget(20, kind), 1000)
    kind(directory, budget(2, kind), SLAB).close()


@pytest.mark.parametrize("number", [0, 1])
def test_the_layout_of_an_earlier_version_is_refused(
    directory: Path, kind: type[ShmStore] | type[DiskStore], number: int
) -> None:
    olds = {DiskStore: ("data.mdb", "records"), ShmStore: ("usage/data.mdb",) * 2}
    old = olds[kind][number]
    path = directory / old
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    with pytest.raises(StoreError, match=r"earlier version .* remove it, or configure another"):
        kind(directory, budget(64, kind), SLAB)
    assert path.read_bytes() == b"x"


def test_only_the_daemon_can_look(opened: Opened, directory: Path) -> None:
    opened()
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {mode for name, mode in modes.items() if name != "arena"} == {0o600}
    assert not modes["arena"] & 0o222, "a reader can't open it again for writing"


def test_a_device_smaller_than_a_segment_gives_what_it_has(
    directory: Path, kind: type[ShmStore] | type[DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a larger device, less than a segment is left to its other users."""
    real, room_bytes = os.posix_fallocate, 11 * 2**20

    def scarce(fd: int, start: int, length_bytes: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        if name == "arena" and start + length_bytes > room_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, length_bytes)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    monkeypatch.setattr(
        kind, "_fits", lambda store, more_bytes: store.secured_bytes + more_bytes <= room_bytes
    )
    store = kind(directory, 64 * 2**20, SLAB)
    for segment_bytes, secured_bytes in ((4, 8), (16, 11), (16, 11)):
        with pytest.raises(StoreFull):
            for _ in store.secure_segments(segment_bytes * 2**20):
                pass
        assert store.secured_bytes == secured_bytes * 2**20
    store.close()


# ---- the incarnation


def test_readers_see_which_start_writes(opened: Opened) -> None:
    placed = opened()
    fd = placed.store.arena.open_reader()
    try:
        for incarnation in (b"first".ljust(16), b"second".ljust(16)):
            placed.store.set_incarnation(incarnation)
            assert read_arena_incarnation(os.pread(fd, SLAB, 0)) == incarnation
    finally:
        os.close(fd)


# ---- failures


def test_a_deleted_directory_takes_no_saves(opened: Opened, directory: Path) -> None:
    placed = opened()
    placed.save(0)
    writer = placed.written(placed.entry(1))
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    with pytest.raises(StoreError, match="was deleted"):
        placed.store.apply([writer])
    with pytest.raises(StoreError, match="was deleted"):
        placed.store.probe()


def test_a_closed_store_answers_with_an_error(opened: Opened) -> None:
    placed = opened()
    (entry,) = placed.save(0)
    writer = placed.written(placed.entry(1))
    placed.store.close()
    for action in (
        lambda: placed.store.apply([writer]),
        lambda: placed.recover(),
        lambda: placed.numbers(),
        lambda: placed.store.record_usage([Usage(entry, 1, 1)]),
        lambda: placed.store.probe(),
    ):
        with pytest.raises(StoreError):
            action()
    placed.store.close()


def test_what_an_earlier_start_left_needs_no_room_again(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its device is full or not."""
    store = opened(1024).store
    free = SimpleNamespace(f_bavail=store.record_bytes(1024), f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    assert store._fits(SEGMENT_BYTES)


def test_a_budget_holds_the_records_of_slabs_that_are_just_being_secured(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier may become smaller while a thread makes it as large as it was to be. The room that
    the records of that segment take stays theirs."""
    store = ShmStore(shm, budget(6, ShmStore), SLAB)
    smaller = budget(4, ShmStore)
    found: list[int] = []

    def secure(self: Arena, segment_bytes: int) -> Iterator[int]:
        found.append(store.arena_bytes_of(smaller))
        return secure_segments(self, segment_bytes)

    secure_segments = Arena.secure_segments
    monkeypatch.setattr(Arena, "secure_segments", secure)
    next(store.secure_segments())
    assert found[0] + store.record_bytes(6) <= smaller
    assert found[0] == store.arena_bytes_of(smaller) == 3 * SLAB
    store.close()


def test_a_budget_holds_exactly_its_blocks() -> None:
    """4,096 blocks of 4 KiB in 16 MiB: there is no header."""
    store = RamStore(4096 * 4096, slab_bytes=4096)
    store.arena.secure()
    extents = ExtentAllocator(store.arena.secured_bytes, 4096, store.header_bytes)
    entries = []
    for number in range(4096):
        key = Key(number.to_bytes(32, "big"))
        location = extents.allocate(store.stored_bytes(4096, 0))
        entries.append(
            EntryRecord(key, Tier.RAM, SaveReason.COLD, number, 0, Content(4096, 512), location)
        )
        writer = store.writer(entries[-1])
        writer.write(key * 128)
        writer.seal()
    assert extents.free_bytes == 0
    for entry in entries:
        (view,) = store.read(entry, 0, 4096)
        assert view == entry.key * 128
    store.close()


def test_a_budget_is_rounded_down_to_whole_slabs() -> None:
    store = RamStore(3 * 65536 + 100)
    assert store.arena.size_bytes == 3 * 65536
    assert store.stored_bytes(65536, 0) == 65536
    assert store.stored_bytes(65536, 4) == 2 * 65536
    store.close()


def test_what_can_be_no_arena_is_refused() -> None:
    with pytest.raises(StoreError, match="whole pages"):
        RamStore(4095, slab_bytes=4096)
    with pytest.raises(ValueError, match="power of two"):
        RamStore(2**20, slab_bytes=1024)


HERE = str(Path(__file__).parent)


@pytest.fixture
def placed(shm: Path) -> Iterator[Placed]:
    made = Placed(ShmStore, shm)
    yield made
    made.store.close()


def test_a_payload_begins_at_the_first_byte_of_its_room(placed: Placed) -> None:
    (entry,) = placed.save(3)
    raw = (placed.store.directory / "arena").read_bytes()
    assert raw[entry.location[0] :][:PAYLOAD] == payload_of(3)
    (view,) = placed.store.read(entry, 0, PAYLOAD)
    placed.store.arena.writable(entry.location[0], 1)[0] ^= 1  # type: ignore[attr-defined]  # of shm
    assert view != payload_of(3), "a view is the arena itself"


def test_what_is_forgotten_is_erased_at_once(placed: Placed) -> None:
    entries = placed.save(1, 2)
    placed.store.forget(entries[:1])
    assert placed.store.unerased == 0
    assert placed.numbers() == {2}


WRITES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers import Placed, ShmStore
placed = Placed(ShmStore, Path(sys.argv[1]), 4096)
for number in range(600):
    placed.save(number)
    print(number, flush=True)
"""


def test_what_was_saved_survives_a_kill(shm: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(shm), HERE],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(20)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.stdout.close()
    child.wait()
    saved = {int(line) for line in lines if line.endswith("\n")}
    assert len(saved) >= 20
    placed = Placed(ShmStore, shm, 4096)
    try:
        recovery = placed.recover()
        assert not recovery.dropped
        assert saved <= set(numbers_of(recovery.entries))
        assert len(recovery.entries) <= len(saved) + 1
        assert all(placed.is_whole(entry.record) for entry in recovery.entries)
    finally:
        placed.store.close()


def test_what_can_be_no_store_is_refused(shm: Path) -> None:
    (shm / "file").write_text("")
    with pytest.raises(StoreError, match="can't make the shm tier"):
        ShmStore(shm / "file" / "below", budget(64, ShmStore), SLAB)
