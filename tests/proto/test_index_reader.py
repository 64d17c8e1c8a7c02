"""The index reader: it finds right rows or none, whatever the file holds."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.errors import RecordError
from prefixd.proto.index import (
    CHECKED_BYTES,
    CONTINUATION_OFFSET,
    HEADER_BYTES,
    LINK_OFFSET,
    LIVE,
    MAX_CHAIN,
    MAX_EXTENTS,
    MOVING,
    ROW_BYTES,
    SHAPE,
    STATE,
    TIER_OFFSET,
    IndexLayout,
    generation_of,
    pack_header,
    pack_row,
    place_of,
    unpack_row,
)
from prefixd.proto.index import entry_of as entry_of_row
from prefixd.proto.index_reader import IndexReader, Placed
from prefixd.proto.keys import Key
from prefixd.server.runtime.index import IndexWriter

from ..support.index_rows import INCARNATION, entry_of, key_of

ENTRIES = 40
KEYS = [key_of(number) for number in range(ENTRIES)]
ABSENT = [key_of(number) for number in range(1_000, 1_000 + ENTRIES)]
#: Has continuation rows: see `entry_of`.
MANY = 7
OFFSET_OF_MULTIPLIER, END_OF_HEADER = 36, 56


@dataclass
class Image:
    """A copy of an index that a test may damage, and a reader of it."""

    memory: mmap.mmap
    reader: IndexReader
    rows: list[bytes]

    def words(self) -> memoryview:
        return memoryview(self.memory).cast("I")

    def numbers(self) -> range:
        return range(self.reader.layout.first_row, self.reader.layout.end_row)

    def number_of(self, key: Key) -> int:
        return self.memory.find(key) // ROW_BYTES

    def check(self) -> int:
        """Look every key up in every way: each is right or absent. Returns the number of hits."""
        found = self.reader.get(KEYS)
        for row, right in zip(found, self.rows, strict=True):
            assert row is None or row == right
        assert self.reader.get(ABSENT) == [None] * len(ABSENT)
        believed = None if not self.reader.live else False
        assert [bool(self.reader.tier_of(key)) or believed for key in KEYS] == [
            row is not None or believed for row in found
        ]
        assert {self.reader.tier_of(key) for key in ABSENT} == {believed}
        for number in self.numbers():
            assert self.reader.row_at(number) in (None, *self.rows)
        return len(found) - found.count(None)


@pytest.fixture
def writer() -> Iterator[IndexWriter]:
    made = IndexWriter(INCARNATION, 64)
    for number, key in enumerate(KEYS):
        assert made.put(entry_of(key, number + 1))
    yield made
    made.close()


@pytest.fixture
def reader(writer: IndexWriter) -> Iterator[IndexReader]:
    made = IndexReader.attach(writer.fd)
    yield made
    made.close()


@pytest.fixture
def image(writer: IndexWriter) -> Image:
    memory = mmap.mmap(-1, writer.size_bytes)
    memory[:] = os.pread(writer.fd, writer.size_bytes, 0)
    copy = IndexReader(memory)
    rows = [row for row in copy.get(KEYS) if row is not None]
    assert len(rows) == ENTRIES
    return Image(memory, copy, rows)


# ---- tiers that hang


def test_entries_of_tiers_that_hang_are_passed_over(
    writer: IndexWriter, reader: IndexReader
) -> None:
    """They are listed all the same: a read that has begun stays good, and later they are found."""
    rows = reader.find(KEYS)
    tiers = [row[1][TIER_OFFSET] for row in rows if row is not None]
    assert set(tiers) == {1, 2, 3}
    for hanging in ([], [3], [1, 3], [1, 2, 3], []):
        writer.set_hanging(hanging)
        expected = [None if tier in hanging else row for tier, row in zip(tiers, rows, strict=True)]
        assert reader.find(KEYS) == expected
        assert reader.find(iter(KEYS)) == expected
        there = [row is not None for row in expected]
        assert reader.contains(KEYS) == [bool(reader.tier_of(key)) for key in KEYS] == there
        for stop_at in (True, False):
            end = there.index(stop_at) + 1 if stop_at in there else len(there)
            assert reader.find(KEYS, stop_at) == expected[:end]
        assert reader.unchanged([row for row in rows if row is not None])
        assert len(writer) == ENTRIES


# ---- rows


def test_a_row_lies_as_its_table_says() -> None:
    entry = entry_of(KEYS[0], 5, extents=1)
    row = pack_row(entry, entry.location)
    assert len(row) == CHECKED_BYTES
    assert row[:32] == entry.key
    assert struct.unpack_from("<QQQQ", row, 32) == (5, entry.payload_bytes, *entry.location)
    counts = (entry.token_count, entry.payload_crc32c, entry.token_ids_bytes)
    assert struct.unpack_from("<III", row, 64) == counts
    assert struct.unpack_from("<HBB", row, 76) == (entry.layer_count, entry.tier, entry.reason)
    assert struct.unpack_from("<II", row, 80) == (1, 0)


@pytest.mark.parametrize("extents", [0, 1, 2, 5, 6, 10, 11, 300, MAX_EXTENTS])
def test_an_entry_comes_back_with_all_its_extents(extents: int) -> None:
    writer = IndexWriter(INCARNATION, 1_000)
    entry = entry_of(KEYS[0], 3, extents)
    assert writer.put(entry)
    (row,) = IndexReader.attach(writer.fd).get(KEYS[:1])
    assert row is not None
    assert unpack_row(row) == entry
    assert generation_of(row) == 3
    writer.close()


@given(st.binary(max_size=200))
def test_other_bytes_are_no_row(data: bytes) -> None:
    try:
        row = unpack_row(data)
    except RecordError:
        return
    assert len(data) == CHECKED_BYTES + 16 * max(0, len(row.location) // 2 - 1)


def test_a_row_that_was_cut_is_refused() -> None:
    entry = entry_of(KEYS[0], 3, extents=1)
    row = pack_row(entry, entry.location)
    for read in (unpack_row, generation_of):
        with pytest.raises(RecordError):
            read(row[:-1])
    with pytest.raises(RecordError):
        unpack_row(row + b"\0")


# ---- looking up


def test_what_was_put_is_found_and_nothing_else(reader: IndexReader) -> None:
    assert reader.incarnation == INCARNATION
    rows = reader.get([*KEYS, *ABSENT])
    said = [unpack_row(row) for row in rows[:ENTRIES] if row is not None]
    assert said == [entry_of(key, number + 1) for number, key in enumerate(KEYS)]
    assert rows[ENTRIES:] == [None] * ENTRIES
    assert reader.contains([KEYS[0], ABSENT[0]]) == [True, False]


def found_of(reader: IndexReader, keys: Sequence[Key]) -> list[Placed]:
    """The keys that are there."""
    return [found for found in reader.find(keys) if found is not None]


def test_a_search_takes_no_key_before_the_row_of_the_one_before(reader: IndexReader) -> None:
    keys = iter([*KEYS[:5], ABSENT[0], ABSENT[1], KEYS[5]])
    *run, last = reader.find(keys, stop_at=False)
    assert [unpack_row(found[1]).key for found in run if found] == KEYS[:5]
    assert last is None
    assert list(keys) == [ABSENT[1], KEYS[5]]
    keys = iter([ABSENT[0], ABSENT[1], KEYS[5], KEYS[6]])
    assert [found and unpack_row(found[1]).key for found in reader.find(keys, stop_at=True)] == [
        None,
        None,
        KEYS[5],
    ]
    assert list(keys) == [KEYS[6]]
    assert reader.find([]) == []


def test_a_row_is_found_with_its_place(reader: IndexReader) -> None:
    for number, row in found_of(reader, KEYS):
        place = reader.row_at(number)
        assert place is not None
        assert place == row
        found = unpack_row(row)
        assert place_of(row) == (found.generation, found.tier, found.location)
        assert entry_of_row(row) == found[:-1]


def test_a_key_of_another_length_is_the_callers_mistake(reader: IndexReader) -> None:
    for key in (b"", KEYS[0][:-1], KEYS[0] + b"\0"):
        with pytest.raises((struct.error, ValueError)):
            reader.get([key])


def test_unchanged_means_the_same_generation(writer: IndexWriter, reader: IndexReader) -> None:
    keys = KEYS[:8]
    rows = found_of(reader, keys)
    assert reader.unchanged(rows)
    # Listed again, with its rows in other places.
    for key, row in zip(keys, rows, strict=True):
        writer.delete(key)
        assert not reader.unchanged([row])
    for row in rows:
        writer.put(unpack_row(row[1]))
        assert reader.unchanged([row])
    assert found_of(reader, keys) != rows
    assert reader.unchanged(rows)
    writer.put(entry_of(keys[3], 99))
    assert not reader.unchanged(rows)
    assert reader.unchanged(rows[:3])


def test_a_place_that_another_entry_has_now_does_not_speak_for_the_old_one(
    writer: IndexWriter, reader: IndexReader
) -> None:
    (old,) = found_of(reader, KEYS[:1])
    writer.delete(KEYS[0])
    writer.put(entry_of(ABSENT[0], 99))
    (new,) = found_of(reader, ABSENT[:1])
    assert new[0] == old[0], "the same place"
    assert not reader.unchanged([old])
    assert reader.unchanged([new])


def test_nothing_of_a_revoked_index_is_believed(writer: IndexWriter, reader: IndexReader) -> None:
    rows = found_of(reader, KEYS)
    assert reader.live
    writer.revoke()
    assert not reader.live
    assert reader.get(KEYS) == [None] * ENTRIES
    assert found_of(reader, KEYS) == []
    assert not reader.unchanged(rows)


def test_closing_gives_the_mapping_back(writer: IndexWriter) -> None:
    memory = mmap.mmap(writer.fd, 0, prot=mmap.PROT_READ)
    reader = IndexReader(memory)
    reader.close()
    reader.close()
    memory.close()


# ---- damage


def test_no_flipped_bit_of_a_row_is_believed(image: Image) -> None:
    for key in (KEYS[0], KEYS[MANY]):
        start = image.number_of(key) * ROW_BYTES
        for offset, bit in itertools.product(range(CHECKED_BYTES), range(8)):
            image.memory[start + offset] ^= 1 << bit
            assert image.reader.get([key]) == [None]
            image.memory[start + offset] ^= 1 << bit
        assert image.reader.contains([key]) == [True]


def test_no_flipped_bit_of_a_list_of_extents_is_believed(image: Image) -> None:
    continuation = CONTINUATION_OFFSET // 4
    number = image.number_of(KEYS[MANY])
    passed = 0
    while number := image.words()[number * ROW_BYTES // 4 + continuation]:
        for offset, bit in itertools.product(range(CHECKED_BYTES), range(8)):
            image.memory[number * ROW_BYTES + offset] ^= 1 << bit
            assert image.reader.get([KEYS[MANY]]) == [None]
            image.memory[number * ROW_BYTES + offset] ^= 1 << bit
        passed += 1
    assert passed > 1
    assert image.check() == ENTRIES


def test_damage_anywhere_is_a_miss_at_worst(image: Image) -> None:
    chosen = random.Random(1)
    sound = image.memory[:]
    used_bytes = len(sound.rstrip(b"\0"))
    hits = []
    for _ in range(1_500):
        for place in (chosen.randrange(used_bytes) for _ in range(chosen.choice((1, 4, 200)))):
            image.memory[place] ^= chosen.randrange(1, 256)
        hits.append(image.check())
        image.memory[:] = sound
    assert min(hits) < ENTRIES == max(hits)


@pytest.mark.parametrize("link", ["itself", "far", "header", "heads", "end"])
def test_links_that_lead_nowhere_are_misses(image: Image, link: str) -> None:
    words = image.words()
    heads = HEADER_BYTES // 4
    for number in image.numbers():
        to = {"itself": number, "far": 2**32 - 1, "header": 1, "heads": 50}
        words[number * ROW_BYTES // 4 + LINK_OFFSET // 4] = to.get(link, image.numbers().stop)
    image.check()
    for bucket in range(image.reader.layout.max_heads):
        first = image.numbers()[bucket % ENTRIES]
        to = {"itself": first, "far": 2**32 - 1, "header": 1, "heads": 50}
        words[heads + bucket] = to.get(link, image.numbers().stop)
    assert image.check() < ENTRIES


@pytest.mark.parametrize("count", [0, 1, 2**31, 2**32 - 1, MOVING | 1024, 2**64 - 1])
def test_no_number_of_heads_leads_out_of_the_file(image: Image, count: int) -> None:
    memoryview(image.memory).cast("Q")[SHAPE] = count
    hits = image.check()
    # No more heads than are in use here, and never none.
    assert hits < ENTRIES if count in (0, 1) else hits == ENTRIES


def test_a_state_that_is_not_live_is_not_believed(image: Image) -> None:
    for bit in range(64):
        memoryview(image.memory).cast("Q")[STATE] = LIVE ^ 1 << bit
        assert image.check() == 0


def test_a_removed_row_is_not_believed_where_a_link_still_leads_to_it(
    writer: IndexWriter, reader: IndexReader
) -> None:
    writer.delete(KEYS[0])
    memory = mmap.mmap(-1, writer.size_bytes)
    memory[:] = os.pread(writer.fd, writer.size_bytes, 0)
    number = memory.find(KEYS[0]) // ROW_BYTES
    words = memoryview(memory).cast("I")
    for bucket in range(reader.layout.max_heads):
        words[HEADER_BYTES // 4 + bucket] = number
    assert IndexReader(memory).get(KEYS[:1]) == [None]


def test_a_continuation_row_is_no_entry(image: Image) -> None:
    """A client can choose a key that equals the first extents in a continuation row."""
    number = image.words()[image.number_of(KEYS[MANY]) * ROW_BYTES // 4 + CONTINUATION_OFFSET // 4]
    key = image.memory[number * ROW_BYTES : number * ROW_BYTES + 32]
    for bucket in range(image.reader.layout.max_heads):
        image.words()[HEADER_BYTES // 4 + bucket] = number
    assert image.reader.get([key]) == [None]


def test_a_chain_is_followed_no_further_than_its_bound(image: Image) -> None:
    words, numbers = image.words(), image.numbers()
    row = image.memory[numbers[0] * ROW_BYTES : (numbers[0] + 1) * ROW_BYTES]
    for number in numbers:
        image.memory[number * ROW_BYTES : (number + 1) * ROW_BYTES] = row
        words[number * ROW_BYTES // 4 + LINK_OFFSET // 4] = number + 1
    for bucket in range(image.reader.layout.max_heads):
        words[HEADER_BYTES // 4 + bucket] = numbers[0]
    key = KEYS[1]
    listed = entry_of(key, 5, extents=1)
    entry = pack_row(listed, listed.location)
    for place, found in ((MAX_CHAIN - 1, entry), (MAX_CHAIN, None)):
        start = numbers[place] * ROW_BYTES
        image.memory[start : start + CHECKED_BYTES] = entry
        assert image.reader.get([key]) == [found]
        image.memory[start : start + ROW_BYTES] = row
        words[start // 4 + LINK_OFFSET // 4] = numbers[place] + 1


# ---- what is no index


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_other_bytes_are_no_index(data: bytes) -> None:
    with pytest.raises(RecordError):
        IndexReader(data)


@given(
    data=st.binary(max_size=4 * HEADER_BYTES),
    multiplier=st.integers(0, 2**128 - 1),
    max_heads=st.integers(0, 2**32 - 1) | st.integers(0, 64),
    max_rows=st.integers(0, 2**32 - 1) | st.integers(0, 64),
    shape=st.integers(0, 2**64 - 1) | st.integers(0, 64),
    words=st.lists(st.integers(0, 300), max_size=2 * HEADER_BYTES // 4),
)
def test_garbage_behind_a_good_header_is_an_empty_index(
    data: bytes, multiplier: int, max_heads: int, max_rows: int, shape: int, words: list[int]
) -> None:
    header = bytearray(HEADER_BYTES)
    fixed = pack_header(IndexLayout(max_heads, max_rows), INCARNATION, multiplier)
    header[: len(fixed)] = fixed
    struct.pack_into("<QQ", header, 8 * STATE, LIVE, shape)
    behind = struct.pack(f"<{len(words)}I", *words) + data
    try:
        reader = IndexReader(bytes(header) + behind + bytes(HEADER_BYTES))
    except RecordError:
        return
    assert reader.get(KEYS) == [None] * ENTRIES
    assert [reader.row_at(number) for number in range(50)] == [None] * 50


def test_no_flipped_bit_of_the_header_is_accepted(image: Image) -> None:
    for offset, bit in itertools.product(range(END_OF_HEADER), range(8)):
        image.memory[offset] ^= 1 << bit
        with pytest.raises(RecordError):
            IndexReader(image.memory)
        image.memory[offset] ^= 1 << bit


def test_a_reader_keeps_what_it_read_of_the_header(image: Image) -> None:
    image.memory[OFFSET_OF_MULTIPLIER] ^= 2
    assert image.check() == ENTRIES


def test_a_shorter_file_is_refused(image: Image) -> None:
    whole = image.memory[:]
    for size_bytes in (0, 1, END_OF_HEADER, HEADER_BYTES, len(whole) - 1):
        with pytest.raises(RecordError):
            IndexReader(whole[:size_bytes])


def test_an_empty_file_is_no_index() -> None:
    fd = os.memfd_create("empty")
    try:
        with pytest.raises(RecordError):
            IndexReader.attach(fd)
        os.ftruncate(fd, 2 * HEADER_BYTES)
        with pytest.raises(RecordError):
            IndexReader.attach(fd)
    finally:
        os.close(fd)
