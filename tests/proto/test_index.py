"""Columns of rows have the same fields as rows that are unpacked one by one."""

from __future__ import annotations

from prefixd.proto.index import IndexRow, columns_of, pack_row, unpack_row
from prefixd.proto.keys import Key


def row(number: int, location: tuple[int, ...]) -> bytes:
    key = Key(bytes([number]) * 32)
    return pack_row(IndexRow(key, number, 3, 16, 5, 6, 7, 1 + number % 3, 2, location), location)


def test_columns_are_the_fields_of_the_rows() -> None:
    rows = [row(number, (number * 4096, 4096)) for number in range(1, 6)]
    said = [unpack_row(each) for each in rows]
    columns = columns_of(rows)
    assert columns is not None
    assert list(columns.keys) == [each.key for each in said]
    assert list(columns.generations) == [each.generation for each in said]
    assert list(columns.payload_bytes) == [each.payload_bytes for each in said]
    assert list(zip(columns.offsets, columns.lengths, strict=True)) == [e.location for e in said]
    assert list(columns.token_counts) == [each.token_count for each in said]
    assert list(columns.payload_crc32c) == [each.payload_crc32c for each in said]
    assert list(columns.token_ids_bytes) == [each.token_ids_bytes for each in said]
    assert list(columns.layer_counts) == [each.layer_count for each in said]
    assert list(columns.tiers) == [each.tier for each in said]
    assert list(columns.reasons) == [each.reason for each in said]


def test_what_has_no_extent_or_several_has_no_columns() -> None:
    one = row(1, (4096, 4096))
    assert columns_of([]) is None
    assert columns_of([one, row(2, ())]) is None
    several = row(3, (4096, 4096, 16384, 4096)) + bytes(16)
    assert columns_of([one, several]) is None
