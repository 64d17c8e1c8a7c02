"""The layout of the disk tier, against the obvious way to compute it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.disk import (
    CHUNK_BYTES,
    CHUNK_KEY_BYTES,
    chunk_count,
    chunk_key,
    chunk_length,
    chunk_ranges,
    decode_usage,
    encode_usage,
)
from prefixd.proto.keys import Key

KEY = Key(bytes(range(32)))


def test_chunk_keys_sort_as_their_chunks() -> None:
    assert chunk_key(KEY, 1) == KEY + b"\0\0\0\1"
    assert len(chunk_key(KEY, 2**32 - 1)) == CHUNK_KEY_BYTES
    keys = [chunk_key(KEY, index) for index in (0, 1, 255, 256, 65535, 65536)]
    assert keys == sorted(keys)


def test_a_chunk_fills_its_pages() -> None:
    page_header_bytes = 16
    assert (CHUNK_BYTES + page_header_bytes) % 4096 == 0


@given(st.integers(1, 5 * CHUNK_BYTES))
def test_chunks_add_up(payload_bytes: int) -> None:
    lengths = [chunk_length(payload_bytes, index) for index in range(chunk_count(payload_bytes))]
    assert sum(lengths) == payload_bytes
    assert all(length == CHUNK_BYTES for length in lengths[:-1])
    assert 0 < lengths[-1] <= CHUNK_BYTES


@given(st.integers(0, 4 * CHUNK_BYTES), st.integers(0, 3 * CHUNK_BYTES))
def test_a_range_is_found_in_its_chunks(offset_bytes: int, length_bytes: int) -> None:
    position = offset_bytes
    for index, part in chunk_ranges(offset_bytes, length_bytes):
        assert index * CHUNK_BYTES + part.start == position
        assert 0 <= part.start < part.stop <= CHUNK_BYTES
        position += part.stop - part.start
    assert position == offset_bytes + length_bytes


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))
def test_usage_is_read_as_written(last_used_ns: int, hits: int) -> None:
    row = encode_usage(last_used_ns, hits)
    assert row == struct.pack("<qQ", last_used_ns, hits)
    assert decode_usage(memoryview(row)) == (last_used_ns, hits)


def test_another_row_is_refused() -> None:
    with pytest.raises(ValueError, match="15"):
        decode_usage(bytes(15))
