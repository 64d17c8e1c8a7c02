"""Records by themselves: rows, order, memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import SLAB, key
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.entry import EntryRecord, Location
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.records import Records, decode_usage, encode_usage
from prefixd.tiers.row_table import RowFile, RowTable
from prefixd.tiers.rows import (
    CONTINUATION_EXTENTS,
    ENTRY_EXTENTS,
    ROW_BYTES,
    RowRefused,
    decode_entry,
    encode_rows,
)
from prefixd.tiers.store import Usage


def entry_of(number: int, location: Location, payload_bytes: int = 0) -> EntryRecord:
    return EntryRecord(
        key=key(number),
        tier=Tier.DISK,
        reason=SaveReason.EVICT,
        generation=number + 1,
        created_ns=number + 1,
        payload_bytes=payload_bytes or sum(location[1::2]),
        token_count=512,
        layer_count=0,
        token_ids_bytes=0,
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
        key(0), Tier.SHM, reason, generation, created, payload, count, 0, 0, (slab_bytes, room), 9
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
