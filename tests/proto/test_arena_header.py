"""The header of an arena: what a reader accepts."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.arena_header import (
    ARENA_HEADER_BYTES,
    PROBE_OFFSET,
    decode_arena_header,
    encode_arena_header,
    read_arena_incarnation,
)
from prefixd.proto.errors import RecordError

INCARNATION = bytes(range(16))


def test_the_layout() -> None:
    header = encode_arena_header(INCARNATION, 65536)
    assert header[:16] == b"PFXARENA" + (1).to_bytes(4, "little") + (65536).to_bytes(4, "little")
    assert header[16:32] == INCARNATION
    assert len(header) == 36 < PROBE_OFFSET < ARENA_HEADER_BYTES


def test_it_is_read_from_a_mapping_too() -> None:
    with mmap.mmap(-1, ARENA_HEADER_BYTES) as mapping:
        header = encode_arena_header(INCARNATION, 4096)
        mapping[: len(header)] = header
        assert read_arena_incarnation(mapping) == INCARNATION
        assert decode_arena_header(mapping) == (INCARNATION, 4096)


def test_no_bit_flips_unnoticed() -> None:
    for bit in range(36 * 8):
        page = bytearray(encode_arena_header(INCARNATION, 4096).ljust(ARENA_HEADER_BYTES, b"\0"))
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            read_arena_incarnation(page)


@given(st.binary(max_size=100))
def test_noise_is_no_header(noise: bytes) -> None:
    with pytest.raises(RecordError):
        read_arena_incarnation(noise)


def test_an_incarnation_has_its_length() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        encode_arena_header(bytes(15), 4096)
