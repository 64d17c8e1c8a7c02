"""What only the shm store does: which rows of the index it believes after a restart."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixd.proto.keys import Key
from prefixd.proto.record import (
    RecordHead,
    crc32c,
    decode_head,
    decode_trailer,
    head_bytes_for,
    record_bytes,
)
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.shm import ARENA_FILE, ShmStore
from prefixd.tiers.store import Location, StoreError, Usage

SLAB = 4096
PAYLOAD = 5 * SLAB


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(PAYLOAD)


def head(number: int, token_ids: bytes = b"") -> RecordHead:
    return RecordHead(key(number), number, PAYLOAD, 1, 5, 1, Tier.SHM, 1_000 + number, token_ids)


def save(store: ShmStore, extents: ExtentAllocator, number: int) -> Location:
    entry = head(number, b"abcd" * number)
    location = extents.allocate(store.stored_bytes(PAYLOAD, len(entry.token_ids)))
    writer = store.writer(entry, location)
    writer.write(payload_of(number))
    writer.seal()
    store.apply([writer], [])
    return location


@pytest.fixture
def shm() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def opened(shm: Path) -> Iterator[Callable[..., ShmStore]]:
    """Opens the one store of a test, closing the one before."""
    stores: list[ShmStore] = []

    def open_again(slabs: int = 64, **options: bool) -> ShmStore:
        while stores:
            stores.pop().close()
        stores.append(ShmStore(shm, slabs * SLAB, SLAB, **options))
        stores[-1].arena.secure()
        return stores[-1]

    yield open_again
    while stores:
        stores.pop().close()


def filled(store: ShmStore, entries: int = 5) -> dict[Key, Location]:
    extents = ExtentAllocator(store.arena.secured_bytes, SLAB)
    return {key(number): save(store, extents, number) for number in range(entries)}


def test_an_entry_is_a_record(opened: Callable[..., ShmStore]) -> None:
    store = opened()
    location = filled(store)[key(3)]
    assert len(location) == 2
    start = location[0]
    raw = (store.directory / ARENA_FILE).read_bytes()[start : start + location[1]]
    found, offset = decode_head(raw)
    assert found == head(3, b"abcd" * 3)
    assert offset == store.payload_offset(12) == head_bytes_for(12)
    assert offset % 64 == 0
    assert raw[offset : offset + PAYLOAD] == payload_of(3)
    trailer = raw[offset + PAYLOAD : offset + PAYLOAD + 4]
    assert decode_trailer(trailer) == crc32c(payload_of(3))
    assert store.stored_bytes(PAYLOAD, 12) == -(-record_bytes(offset, PAYLOAD) // SLAB) * SLAB


# ---- recovery


def flip(store: ShmStore, offset: int) -> None:
    store.arena.writable(offset, 1)[0] ^= 8


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, "a record begins with"),
        (20, "does not match its checksum"),
        (60, "does not match its checksum"),
        (head_bytes_for(8) + 1000, "payload does not match its checksum"),
        (head_bytes_for(8) + PAYLOAD, "payload does not match its checksum"),
    ],
)
def test_a_record_that_is_not_whole_is_dropped(
    opened: Callable[..., ShmStore], offset: int, reason: str
) -> None:
    store = opened()
    directory = filled(store)
    flip(store, directory[key(2)][0] + offset)
    recovery = opened().recover(directory)
    assert {entry.head.key for entry in recovery.entries} == set(directory) - {key(2)}
    ((dropped, why),) = recovery.dropped
    assert dropped == key(2)
    assert reason in why


def test_payloads_can_be_taken_on_trust(opened: Callable[..., ShmStore]) -> None:
    store = opened()
    directory = filled(store)
    flip(store, directory[key(2)][0] + head_bytes_for(8) + 1000)
    recovery = opened(verify_payloads=False).recover(directory)
    assert not recovery.dropped
    crcs = {entry.head.key: entry.payload_crc32c for entry in recovery.entries}
    assert crcs[key(2)] == crc32c(payload_of(2)), "so that whoever reads it can tell"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (lambda d: d[key(0)], "an overlap"),
        (lambda d: (d[key(0)][0], SLAB), "an overlap"),
        (lambda d: (d[key(1)][0] + 1, d[key(1)][1]), "no location"),
        (lambda d: (d[key(1)][0], d[key(1)][1] - 1), "no location"),
        (lambda d: (64 * SLAB, d[key(1)][1]), "no location"),
        (lambda d: (-SLAB, d[key(1)][1]), "no location"),
        (lambda _: (), "no location"),
        (lambda _: (0,), "no location"),
        (lambda d: (d[key(1)][0], d[key(1)][1] - SLAB), "bytes for a record of"),
        (lambda d: (0, d[key(1)][1]), "begins with"),
        (lambda d: (d[key(1)][0] + SLAB, d[key(1)][1] - SLAB), "begins with"),
    ],
)
def test_a_row_that_points_elsewhere_is_dropped(
    opened: Callable[..., ShmStore],
    row: Callable[[dict[Key, Location]], Location],
    reason: str,
) -> None:
    store = opened()
    directory = filled(store)
    directory[key(1)] = row(directory)
    recovery = opened().recover(directory)
    assert {entry.head.key for entry in recovery.entries} == set(directory) - {key(1)}
    ((dropped, why),) = recovery.dropped
    assert dropped == key(1)
    assert reason in why


def test_a_record_of_another_key_is_dropped_and_its_own_row_still_counts(
    opened: Callable[..., ShmStore],
) -> None:
    store = opened()
    directory = filled(store)
    rows = {key(9): directory[key(1)], **directory}
    recovery = opened().recover(rows)
    assert {entry.head.key for entry in recovery.entries} == set(directory)
    ((dropped, why),) = recovery.dropped
    assert dropped == key(9)
    assert key(1).hex() in why


def test_a_larger_budget_keeps_the_entries_a_smaller_one_does_not(
    opened: Callable[..., ShmStore],
) -> None:
    directory = filled(opened(64))
    assert len(opened(80).recover(directory).entries) == 5
    recovery = opened(64).recover(directory)
    assert not recovery.entries
    assert {name for name, _ in recovery.dropped} == set(directory)


def test_usage_of_what_did_not_come_back_is_forgotten(opened: Callable[..., ShmStore]) -> None:
    store = opened()
    directory = filled(store)
    store.record_usage([Usage(name, 7, 7) for name in directory])
    location = directory.pop(key(2))
    opened().recover(directory)
    directory[key(2)] = location
    hits = {entry.head.key: entry.hits for entry in opened().recover(directory).entries}
    assert hits == {key(number): 0 if number == 2 else 7 for number in range(5)}


WRITES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tiers_shm import ExtentAllocator, ShmStore, SLAB, save
store = ShmStore(Path(sys.argv[1]), 4096 * SLAB, SLAB)
store.arena.secure()
extents = ExtentAllocator(store.arena.secured_bytes, SLAB)
for number in range(500):
    print(number, *save(store, extents, number), flush=True)
"""


def test_what_was_saved_survives_a_kill(opened: Callable[..., ShmStore], shm: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(shm), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(20)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.stdout.close()
    child.wait()
    directory = {}
    for line in lines:
        if line.endswith("\n"):
            number, *location = map(int, line.split())
            directory[key(number)] = tuple(location)
    assert len(directory) >= 20
    store = opened(4096)
    recovery = store.recover(directory)
    assert not recovery.dropped
    assert len(recovery.entries) == len(directory)
    for entry in recovery.entries:
        found = b"".join(store.read(entry.head, entry.location, 0, PAYLOAD))
        assert found == payload_of(entry.head.generation)


# ---- making it


def test_what_can_be_no_store_is_refused(shm: Path) -> None:
    (shm / "file").write_text("")
    with pytest.raises(StoreError, match="can't make the shm tier"):
        ShmStore(shm / "file" / "below", 64 * SLAB, SLAB)
    with pytest.raises(StoreError, match="whole pages"):
        ShmStore(shm / "tiny", SLAB - 1, SLAB)
    with pytest.raises(ValueError, match="power of two"):
        ShmStore(shm / "slabs", 64 * SLAB, 1000)


def test_the_head_of_another_entry_is_not_taken_for_ones_own(
    opened: Callable[..., ShmStore],
) -> None:
    store = opened()
    directory = filled(store)
    assert store.token_ids(head(2), directory[key(2)], 8) == b"abcdabcd"
    with pytest.raises(StoreError, match="the record there is"):
        store.token_ids(head(1), directory[key(2)], 4)
    with pytest.raises(StoreError, match="8 bytes of token ids, not 4"):
        store.token_ids(head(2), directory[key(2)], 4)
