"""What holds of many records, in order, without one long piece of work."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import NoReturn

import pytest
from helpers import SLAB, key
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.entry import EntryRecord, Location
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers import survivors as module
from prefixd.tiers.rows import encode_rows
from prefixd.tiers.store import StoredEntry
from prefixd.tiers.survivors import Survivors, sorted_parts

SLABS = 64


def entry_of(number: int, location: Location, generation: int = 0) -> EntryRecord:
    return EntryRecord(
        key=key(number),
        tier=Tier.DISK,
        reason=SaveReason.EVICT,
        generation=generation or number + 1,
        created_ns=number + 1,
        payload_bytes=sum(location[1::2]),
        token_count=512,
        layer_count=0,
        token_ids_bytes=0,
        location=location,
        payload_crc32c=number,
    )


def no_other_row(slab: int) -> NoReturn:
    raise AssertionError(f"nothing names slab {slab}")


def no_usage(_slab: int, _generation: int) -> None:
    return None


def read(entries: list[EntryRecord], used: dict[int, int] | None = None) -> Survivors:
    """`used`: last use by generation."""
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
    older, newer = entry_of(1, one_slab(0), 5), entry_of(1, one_slab(1), 6)
    if not older_first:
        older, newer = replace(newer, generation=5), replace(older, generation=6)
    survivors = read([older, newer, entry_of(2, one_slab(4))])
    assert survivors.left == 2
    assert newer in [stored.record for stored in taken(survivors)]
    assert survivors.dropped == [(key(1), "it was saved again later")]
    assert survivors.erasures == [(older.location[0] // SLAB, 5)]


def test_of_what_overlaps_the_newest_holds() -> None:
    one, two, three = (4 * SLAB, 4 * SLAB), (6 * SLAB, 4 * SLAB), (9 * SLAB, SLAB)
    entries = [entry_of(1, one, 30), entry_of(2, two, 20), entry_of(3, three, 10)]
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
