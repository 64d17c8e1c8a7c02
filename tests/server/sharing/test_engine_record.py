"""The format of entries in an engine. Malformed values are refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.limits import MAX_LAYERS, MAX_PAYLOAD_BYTES
from prefixd.server.sharing.engine_record import (
    HEADER_BYTES,
    MAX_VALUE_BYTES,
    cut,
    decode_header,
    encode_header,
    parts_of,
    same_entry,
)
from prefixd.server.sharing.engine_store import SharedEntry

KEY = Key(b"k" * 32)
ENTRY = SharedEntry(KEY, Content(4096, 16, layer_count=4), 77)


def test_a_header_is_decoded_as_it_was_encoded() -> None:
    header = encode_header(ENTRY)
    assert len(header) == HEADER_BYTES
    assert decode_header(KEY, header) == ENTRY
    assert decode_header(KEY, header + b"and the payload") == ENTRY


def test_any_flipped_bit_is_noticed() -> None:
    header = encode_header(ENTRY)
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_header(KEY, flipped) is None


@pytest.mark.parametrize("length", range(HEADER_BYTES))
def test_a_shorter_header_is_refused(length: int) -> None:
    assert decode_header(KEY, encode_header(ENTRY)[:length]) is None


def test_a_header_of_another_key_is_refused() -> None:
    assert decode_header(Key(b"x" * 32), encode_header(ENTRY)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"payload_bytes": 0},
        {"payload_bytes": MAX_PAYLOAD_BYTES + 1, "layer_count": 0},
        {"payload_bytes": 2**63, "layer_count": 0},
        {"layer_count": 3},
        {"layer_count": MAX_LAYERS + 1},
    ],
)
def test_intact_headers_of_impossible_entries_are_refused(fields: dict[str, int]) -> None:
    impossible = replace(ENTRY, content=ENTRY.content._replace(**fields))
    assert decode_header(KEY, encode_header(impossible)) is None


def test_a_fleet_without_deletes_has_headers_that_versions_before_stamps_read() -> None:
    """They had eight bytes of tokens, and refuse more than fit into four."""
    before = struct.Struct("<4sIQQI32s")
    header = encode_header(ENTRY)
    assert before.unpack(header[: before.size])[3] == ENTRY.token_count
    stamped = encode_header(replace(ENTRY, stamp=1))
    assert before.unpack(stamped[: before.size])[3] >= 2**32
    assert decode_header(KEY, stamped) == replace(ENTRY, stamp=1)
    assert same_entry(KEY, stamped, ENTRY)
    assert not same_entry(KEY, stamped, replace(ENTRY, payload_crc32c=ENTRY.payload_crc32c ^ 1))


WHOLE = MAX_VALUE_BYTES - HEADER_BYTES


@pytest.mark.parametrize("length", [1, 63, WHOLE - 1, WHOLE, WHOLE + 1, 5 * 2**20, 3 * WHOLE])
def test_parts_are_all_of_the_bytes_in_order(length: int) -> None:
    data = bytes(range(251)) * (length // 251 + 1)
    whole = memoryview(data)[:length]
    pieces = [whole[:1], whole[1 : length // 2], whole[length // 2 :]] if length > 2 else [whole]
    parts = cut(pieces)
    assert [b"".join(part) for part in parts] == [bytes(whole[part]) for part in parts_of(length)]
    assert b"".join(piece for part in parts for piece in part) == whole
    values = [sum(map(len, part)) for part in parts]
    values[0] += HEADER_BYTES
    assert max(values) <= MAX_VALUE_BYTES
    assert len(values) == -(-(HEADER_BYTES + length) // MAX_VALUE_BYTES)
    assert max(values) - min(values) < 64 * len(values), "parts of different lengths"
