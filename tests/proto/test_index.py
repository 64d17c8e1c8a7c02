"""Columns of rows have the same fields as rows that are unpacked one by one."""

from __future__ import annotations

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.index import ROW_BYTES, IndexRow, pack_row, packed_rows, unpack_row
from prefixd.proto.keys import Key


def row(number: int, location: tuple[int, ...]) -> bytes:
    key = Key(bytes([number]) * 32)
    return pack_row(
        IndexRow(key, number, Content(3, 16, 6, 7), 5, 1 + number % 3, 2, location), location
    )


def test_columns_are_the_fields_of_the_rows() -> None:
    rows = [row(number, (number * 4096, 4096)) for number in range(1, 6)]
    said = [unpack_row(each) for each in rows]
    placed = list(enumerate(rows, 100))
    columns = packed_rows(placed)
    assert columns is not None
    assert list(columns.keys) == [each.key for each in said]
    assert list(columns.generations) == [each.generation for each in said]
    assert list(columns.payload_bytes) == [each.payload_bytes for each in said]
    assert list(zip(columns.offsets, columns.lengths, strict=True)) == [e.location for e in said]
    assert list(columns.token_counts) == [each.token_count for each in said]
    assert list(columns.payload_crc32c) == [each.payload_crc32c for each in said]
    assert list(columns.contents) == [each.content for each in said]
    assert list(columns.tiers) == [each.tier for each in said]
    assert list(columns.reasons) == [each.reason for each in said]
    assert columns.numbers == [100, 101, 102, 103, 104]
    assert (list(columns), len(columns), columns[-1]) == (placed, 5, placed[-1])
    assert columns.packed[: ROW_BYTES - 4] == rows[0]
    assert packed_rows(columns) is columns


def test_some_rows_are_a_part_of_all() -> None:
    placed = [(number, row(number, (number * 4096, 4096))) for number in range(1, 6)]
    columns = packed_rows(placed)
    assert columns is not None
    for some in (columns.some([3, 0]), columns[3:0:-3]):
        assert list(some)[:1] == placed[3:4]
    assert list(columns.some([3, 0])) == [placed[3], placed[0]]
    assert columns[1:3].generations == [2, 3]
    assert not columns[2:2]
    with pytest.raises(IndexError):
        columns[5]


def test_what_has_no_extent_or_several_has_no_columns() -> None:
    one = row(1, (4096, 4096))
    assert packed_rows([(1, one), (2, row(2, ()))]) is None
    several = row(3, (4096, 4096, 16384, 4096)) + bytes(16)
    assert packed_rows([(1, one), (3, several)]) is None
    assert packed_rows([(3, several)]) is None
