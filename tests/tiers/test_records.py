"""Records by themselves: rows, memory, which of them a start takes, and in which order."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers import SLAB, key
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.entry import Content, EntryRecord, Location
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers import records as module
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.records import Records, Survivors, decode_usage, encode_usage, sorted_parts
from prefixd.tiers.rows import (
    CONTINUATION_EXTENTS,
    ENTRY_EXTENTS,
    ROW_BYTES,
    RowFile,
    RowRefused,
    RowTable,
    decode_entry,
    decode_mark,
    encode_mark,
    encode_rows,
)
from prefixd.tiers.store import StoredEntry, Usage


def entry_of(
    number: int, location: Location, payload_bytes: int = 0, generation: int = 0
) -> EntryRecord:
    return EntryRecord(
        key=key(number),
        tier=Tier.DISK,
        reason=SaveReason.EVICT,
        generation=generation or number + 1,
        created_ns=number + 1,
        content=Content(payload_bytes or sum(location[1::2]), 512),
        location=location,
        payload_crc32c=number,
    )


@pytest.fixture(params=[RowFile, LmdbRows])
def records(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Records]:
    table: RowTable = request.param(tmp_path, 60_000, sync=False)
    made = Records(tmp_path, Tier.DISK, 60_000, SLAB, table)
    made.secure(60_000)
    yield made
    made.close()


# ---- rows


@pytest.mark.parametrize(
    "extents",
    [
        *(1, 2, ENTRY_EXTENTS, ENTRY_EXTENTS + 1, ENTRY_EXTENTS + CONTINUATION_EXTENTS),
        *(ENTRY_EXTENTS + CONTINUATION_EXTENTS + 1, 700),
    ],
)
def test_any_number_of_extents_has_its_rows(extents: int) -> None:
    location = tuple(n for i in range(extents) for n in ((3 + 2 * i) * SLAB, SLAB))
    entry = entry_of(7, location)
    rows = dict(encode_rows(entry, SLAB))
    assert len(rows) == 1 + -(-max(0, extents - ENTRY_EXTENTS) // CONTINUATION_EXTENTS)
    assert set(rows) <= {offset // SLAB for offset in location[::2]}
    assert list(encode_rows(entry, SLAB))[-1][0] == 3, "the entry's row is written last"
    assert decode_entry(rows[3], 3, SLAB, rows.__getitem__) == entry
    for slab in set(rows) - {3}:
        with pytest.raises(RowRefused, match="are not there"):
            decode_entry(rows[3], 3, SLAB, lambda at, gone=slab: b"" if at == gone else rows[at])


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(1, 2**40),
    st.integers(0, 2**32 - 1),
    st.sampled_from(SaveReason),
)
def test_every_field_comes_back(
    name: bytes, generation: int, created: int, payload: int, count: int, reason: SaveReason
) -> None:
    slab_bytes = 2**20
    room = -(-payload // slab_bytes) * slab_bytes
    entry = EntryRecord(
        key(0),
        Tier.SHM,
        reason,
        generation,
        created,
        Content(payload, count),
        (slab_bytes, room),
        9,
    )
    entry = replace(entry, key=Key(name))
    ((slab, row),) = encode_rows(entry, slab_bytes)
    assert len(row) == ROW_BYTES
    assert decode_entry(row, slab, slab_bytes, lambda _: b"") == entry


@given(st.binary(min_size=ROW_BYTES, max_size=ROW_BYTES))
def test_noise_is_no_record(noise: bytes) -> None:
    for row in (noise, b"PFXE\1" + noise[5:]):
        with pytest.raises(RowRefused):
            decode_entry(row, 1, SLAB, lambda _: noise)


def test_usage_is_that_of_its_entry() -> None:
    row = encode_usage(5, -1, 2**64 - 1)
    assert decode_usage(row, 5) == (-1, 2**64 - 1)
    assert decode_usage(row, 6) is None
    assert decode_usage(row[:-1], 5) is None
    assert decode_usage(b"", 5) is None


# ---- many


def test_recovery_is_ordered_by_use_and_comes_in_batches(records: Records) -> None:
    entries = [entry_of(number, ((number + 1) * SLAB, SLAB)) for number in range(10_000)]
    records.put(entries)
    records.record_usage(
        [Usage(entry, 10**9 - entry.generation, 1) for entry in entries if entry.generation % 3]
    )
    batches = list(records.recover(60_000 * SLAB))
    assert len(batches) > 2
    found = [entry for batch in batches for entry in batch.entries]
    assert len(found) == 10_000
    assert not any(batch.dropped for batch in batches)
    uses = [entry.last_used_ns for entry in found]
    assert uses == sorted(uses)
    assert sum(entry.hits for entry in found) == sum(e.generation % 3 > 0 for e in entries)


def test_recovery_takes_little_memory_for_an_entry(records: Records) -> None:
    count = 12_500
    for first in range(0, count, 2_500):
        records.put([entry_of(n, ((n + 1) * SLAB, SLAB)) for n in range(first, first + 2_500)])
    tracemalloc.start()
    try:
        found = 0
        for batch in records.recover(60_000 * SLAB):
            found += len(batch.entries)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == count
    assert peak_bytes < 700 * count


def test_what_is_forgotten_is_erased_only_where_it_still_stands(records: Records) -> None:
    old = entry_of(1, (SLAB, SLAB))
    new = entry_of(2, (SLAB, SLAB))
    records.put([old])
    records.forget([old])
    assert records.unerased == 1
    records.put([new])
    assert records.unerased == 0
    records.forget([old])
    records.flush()
    assert [list(batch) for batch in records.scan()] == [[new]]


def test_the_row_of_the_header_is_never_an_entry(records: Records) -> None:
    records.put([entry_of(1, (SLAB, SLAB))])
    for _ in range(3):
        records.probe()
        (batch,) = records.recover(60_000 * SLAB)
        assert len(batch.entries) == 1
        assert not batch.dropped


@pytest.mark.parametrize("table", [RowFile, LmdbRows])
def test_the_newest_generation_outlives_its_entry(tmp_path: Path, table: type[RowTable]) -> None:
    def opened() -> Records:
        rows: Any = table
        return Records(tmp_path, Tier.DISK, 100, SLAB, rows(tmp_path, 100, sync=False))

    with closing(opened()) as records:
        assert records.newest == 0
        old = entry_of(70, (SLAB, SLAB))
        records.put([old])
        records.forget([old])
        records.put([entry_of(20, (2 * SLAB, SLAB))])
        records.probe()
    with closing(opened()) as records:
        assert records.newest == old.generation
        records.put([entry_of(80, (3 * SLAB, SLAB))])
    with closing(opened()) as records:
        assert records.newest == entry_of(80, ()).generation


@given(st.integers(0, 2**64 - 1), st.integers(0, ROW_BYTES * 8 - 1))
def test_a_mark_is_whole_or_unknown(generation: int, bit: int) -> None:
    row = encode_mark(generation)
    assert (len(row), decode_mark(row)) == (ROW_BYTES, generation)
    flipped = bytearray(row)
    flipped[bit // 8] ^= 1 << bit % 8
    assert decode_mark(bytes(flipped)) == decode_mark(row[:-1]) == decode_mark(b"") == 0


# ---- which records a start takes


SLABS = 64


def no_other_row(slab: int) -> NoReturn:
    raise AssertionError(f"nothing names slab {slab}")


def no_usage(_slab: int, _generation: int) -> None:
    return None


def read(entries: list[EntryRecord], used: dict[int, int] | None = None) -> Survivors:
    """Survivors of these entries. `used`: last use by generation."""
    rows = sorted(row for entry in entries for row in encode_rows(entry, SLAB))
    survivors = Survivors(Tier.DISK, SLABS, SLAB, SLABS, dict(rows).__getitem__)
    survivors.read(rows, lambda _, generation: (used[generation], 7) if used else None)
    survivors.settle()
    return survivors


def taken(survivors: Survivors, at_once: int = 2) -> list[StoredEntry]:
    return [stored for batch in survivors.batches(at_once) for stored in batch]


def one_slab(number: int) -> Location:
    return ((number + 1) * SLAB, SLAB)


def test_it_comes_in_order_of_use_with_what_is_left() -> None:
    entries = [entry_of(n, one_slab(n)) for n in range(5)]
    survivors = read(entries, {entry.generation: 100 - entry.generation for entry in entries})
    assert survivors.left == 5
    left = []
    found = []
    for batch in survivors.batches(2):
        found += batch
        left.append(survivors.left)
    assert [stored.record for stored in found] == entries[::-1]
    assert [stored.last_used_ns for stored in found] == [95, 96, 97, 98, 99]
    assert {stored.hits for stored in found} == {7}
    assert left == [3, 1, 0]


def test_entries_of_many_extents_come_whole() -> None:
    extents = tuple(n for i in range(9) for n in ((2 * i + 1) * SLAB, SLAB))
    several = (40 * SLAB, SLAB, 44 * SLAB, 2 * SLAB)
    entries = [entry_of(1, extents), entry_of(2, several), entry_of(3, (50 * SLAB, 3 * SLAB))]
    assert [stored.record for stored in taken(read(entries))] == entries


@pytest.mark.parametrize("older_first", [True, False])
def test_of_one_key_the_newest_holds(older_first: bool) -> None:
    older, newer = entry_of(1, one_slab(0), generation=5), entry_of(1, one_slab(1), generation=6)
    if not older_first:
        older, newer = replace(newer, generation=5), replace(older, generation=6)
    survivors = read([older, newer, entry_of(2, one_slab(4))])
    assert survivors.left == 2
    assert newer in [stored.record for stored in taken(survivors)]
    assert survivors.dropped == [(key(1), "it was saved again later")]
    assert survivors.erasures == [(older.location[0] // SLAB, 5)]


def test_of_what_overlaps_the_newest_holds() -> None:
    one, two, three = (4 * SLAB, 4 * SLAB), (6 * SLAB, 4 * SLAB), (9 * SLAB, SLAB)
    entries = [
        entry_of(1, one, generation=30),
        entry_of(2, two, generation=20),
        entry_of(3, three, generation=10),
    ]
    survivors = read(entries)
    assert [stored.record for stored in taken(survivors)] == [entries[0], entries[2]]
    assert survivors.dropped == [(key(2), "its room was given to a later entry")]
    assert survivors.erasures == [(6, 20)]


def test_what_waits_is_nothing_for_the_cycle_collector() -> None:
    count = 5_000
    rows = [row for n in range(count) for row in encode_rows(entry_of(n, one_slab(n)), SLAB)]
    gc.collect()
    survivors = Survivors(Tier.DISK, count + 1, SLAB, count + 1, no_other_row)
    before = len(gc.get_objects())
    survivors.read(rows, no_usage)
    assert survivors.left == count
    assert len(gc.get_objects()) - before < 50
    assert len(taken(survivors, 100)) == count


@given(st.lists(st.lists(st.integers(-(2**90), 2**90))))
def test_parts_are_sorted_as_one(parts: list[list[int]]) -> None:
    numbers = sorted(number for part in parts for number in part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SORTED_AT_ONCE", 8)
        assert [number for part in sorted_parts(parts) for number in part] == numbers
    assert parts == []


@pytest.mark.parametrize("order", [1, -1])
def test_no_part_is_large(order: int) -> None:
    numbers = list(range(100_000))[::order]
    parts = [numbers[start : start + 8192] for start in range(0, len(numbers), 8192)]
    assert max(len(part) for part in sorted_parts(parts)) <= 4 * 4096
