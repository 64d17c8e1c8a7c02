"""Records: golden files, every damaged bit of a head refused, nothing but the documented error."""

import runpy
import struct
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.proto import record
from prefixd.proto.errors import EntryCorrupt, InvalidKey, InvalidSize, RecordError
from prefixd.proto.keys import Key
from prefixd.proto.limits import MAX_LAYERS, MAX_PAYLOAD_BYTES, MAX_TOKEN_IDS_BYTES
from prefixd.proto.record import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    MAX_METADATA_BYTES,
    TRAILER_BYTES,
    RecordHead,
    crc32c,
    decode_head,
    decode_trailer,
    encode_head,
    encode_trailer,
    head_bytes_for,
    record_bytes,
)

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = Key(bytes(range(32)))
PLAIN = RecordHead(
    key=KEY,
    generation=0x0102030405060708,
    payload_bytes=1,
    token_count=1,
    layer_count=0,
    reason=3,
    tier=2,
    created_ns=1_700_000_000_123_456_789,
)
WITH_TOKEN_IDS = replace(
    PLAIN,
    token_count=4,
    payload_bytes=7,
    token_ids=struct.pack("<5I", 1, 2, 3, 2**31 - 1, 2**32 - 1),
)


@st.composite
def heads(draw: st.DrawFn) -> RecordHead:
    layer_count = draw(st.sampled_from([0, 1, 2, 32, MAX_LAYERS]))
    return RecordHead(
        key=Key(draw(st.binary(min_size=32, max_size=32))),
        generation=draw(st.integers(0, 2**64 - 1)),
        payload_bytes=draw(st.integers(1, 2**20)) * max(1, layer_count),
        token_count=draw(st.integers(0, 2**32 - 1)),
        layer_count=layer_count,
        reason=draw(st.integers(0, 255)),
        tier=draw(st.integers(0, 255)),
        created_ns=draw(st.integers(-(2**63), 2**63 - 1)),
        token_ids=draw(st.integers(0, 300).map(lambda n: bytes(range(4)) * n)),
    )


def with_crc(head: bytes | bytearray, metadata_bytes: int) -> bytes:
    """A head that was changed, with a checksum that says that it was not."""
    changed = bytearray(head)
    metadata = bytes(changed[48 : 48 + metadata_bytes])
    struct.pack_into("<I", changed, 44, crc32c(metadata, crc32c(bytes(changed[:44]))))
    return bytes(changed)


def with_metadata(packed: bytes) -> bytes:
    """A head whose checksum is right around any metadata."""
    raw = bytearray(encode_head(PLAIN)[:48])
    struct.pack_into("<I", raw, 8, len(packed))
    raw += packed
    raw += bytes(-len(raw) % ALIGNMENT_BYTES)
    return with_crc(raw, len(packed))


# ---- golden files


def test_the_golden_files_are_what_their_generator_writes() -> None:
    records = runpy.run_path(str(GOLDEN / "make_records.py"))["RECORDS"]
    on_disk = {path.stem: path.read_bytes() for path in GOLDEN.glob("*.bin")}
    assert records == on_disk


GOLDEN_HEADS = {
    "record_plain": PLAIN,
    "record_layers": replace(PLAIN, payload_bytes=96, token_count=512, layer_count=4),
    "record_token_ids": WITH_TOKEN_IDS,
    "record_long_token_ids": replace(
        PLAIN,
        payload_bytes=100,
        token_count=64,
        token_ids=b"".join(n.to_bytes(4, "little") for n in range(100, 164)),
    ),
}


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden_records(name: str) -> None:
    raw = (GOLDEN / f"{name}.bin").read_bytes()
    expected = GOLDEN_HEADS[name]
    head, offset = decode_head(raw)
    assert head == expected
    assert encode_head(expected) == raw[:offset]
    payload = raw[offset:-TRAILER_BYTES]
    assert len(payload) == head.payload_bytes
    assert decode_trailer(raw[-TRAILER_BYTES:]) == crc32c(payload)
    assert encode_trailer(crc32c(payload)) == raw[-TRAILER_BYTES:]
    assert len(raw) == record_bytes(offset, len(payload))


def test_names_of_later_versions_are_ignored() -> None:
    head, offset = decode_head((GOLDEN / "record_later_names.bin").read_bytes())
    assert head == replace(PLAIN, payload_bytes=7, token_count=2)
    assert offset == 128


@pytest.mark.parametrize(("name", "why"), [("version", "format 2"), ("flags", "flags 0x8000")])
def test_what_a_reader_would_have_to_know_is_refused(name: str, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        decode_head((GOLDEN / f"refused_{name}.bin").read_bytes())


# ---- round trip, sizes


@given(heads(), st.binary(max_size=100))
def test_a_head_comes_back(head: RecordHead, behind: bytes) -> None:
    raw = encode_head(head)
    assert len(raw) == head_bytes_for(len(head.token_ids))
    assert len(raw) % ALIGNMENT_BYTES == 0
    for buffer in (raw, bytearray(raw + behind), memoryview(raw + behind).toreadonly()):
        assert decode_head(buffer) == (head, len(raw))


@pytest.mark.parametrize(
    "sizes",
    [range(0, 2**10, 4), range(2**16 - 2**8, 2**16 + 2**8, 4), [MAX_TOKEN_IDS_BYTES]],
    ids=["up to 1 KiB", "around 64 KiB", "largest"],
)
def test_the_size_of_a_head_is_known_before_it_is_made(sizes: Iterable[int]) -> None:
    for token_ids_bytes in sizes:
        raw = encode_head(replace(PLAIN, token_ids=bytes(token_ids_bytes)))
        assert len(raw) == head_bytes_for(token_ids_bytes)
        assert decode_head(raw)[0].token_ids == bytes(token_ids_bytes)


@given(st.integers(0, MAX_TOKEN_IDS_BYTES // 4 - 1), st.integers(1, 2**40))
def test_a_head_never_shrinks_with_its_token_ids(words: int, payload_bytes: int) -> None:
    here, more = head_bytes_for(words * 4), head_bytes_for(words * 4 + 4)
    assert HEADER_BYTES + words * 4 < here <= more
    assert record_bytes(here, payload_bytes) == here + payload_bytes + TRAILER_BYTES


def test_the_header_is_48_bytes_of_fields_and_a_checksum() -> None:
    raw = encode_head(PLAIN)
    assert record._FIELDS.size + record._CRC.size == HEADER_BYTES == 48
    assert raw[:8] == b"PFXD\x01\x00\x00\x00"
    assert crc32c(raw[48 : 48 + raw[8]], crc32c(raw[:44])) == int.from_bytes(raw[44:48], "little")


# ---- damage


@pytest.mark.parametrize("head", [PLAIN, WITH_TOKEN_IDS], ids=["plain", "token ids"])
@pytest.mark.parametrize("behind_bytes", [0, 5000])
def test_every_flipped_bit_of_a_head_is_refused(head: RecordHead, behind_bytes: int) -> None:
    raw = bytearray(encode_head(head))
    size = len(raw)
    raw += bytes(n % 251 for n in range(behind_bytes))
    for bit in range(size * 8):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            decode_head(raw)
        raw[bit // 8] ^= 1 << bit % 8
    assert decode_head(raw)[0] == head


@pytest.mark.parametrize("head", [PLAIN, WITH_TOKEN_IDS], ids=["plain", "token ids"])
def test_every_truncation_of_a_head_is_refused(head: RecordHead) -> None:
    raw = encode_head(head)
    for length in range(len(raw)):
        with pytest.raises(RecordError, match=r"cut off|begins with"):
            decode_head(raw[:length])


@given(heads(), st.data())
def test_bytes_that_changed_places_or_values_are_refused(
    head: RecordHead, data: st.DataObject
) -> None:
    raw = bytearray(encode_head(head))
    start = data.draw(st.integers(0, len(raw) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=min(8, len(raw) - start)))
    changed = bytearray(raw)
    changed[start : start + len(patch)] = patch
    if changed == raw:
        assert decode_head(changed)[0] == head
    else:
        with pytest.raises(RecordError):
            decode_head(changed)


@given(st.binary(max_size=300))
def test_random_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(RecordError):
        decode_head(raw)


@given(st.binary(min_size=40, max_size=300))
def test_random_bytes_after_a_plausible_beginning_are_no_record(raw: bytes) -> None:
    with pytest.raises(RecordError):
        decode_head(b"PFXD\x01\x00\x00\x00" + raw)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(st.binary(max_size=80) | json_like.map(msgpack.packb))
def test_metadata_with_a_right_checksum_is_still_not_trusted(packed: bytes) -> None:
    with pytest.raises(RecordError):
        decode_head(with_metadata(packed))


def pack(**names: Any) -> bytes:
    packed: bytes = msgpack.packb(names)
    return packed


@pytest.mark.parametrize(
    "packed",
    [
        pack(),
        pack(key=KEY[:31]),
        pack(key=KEY + b"x"),
        pack(key="k" * 32),
        pack(key=KEY, token_ids=b"123"),
        pack(key=KEY, token_ids=[1, 2]),
        pack(key=KEY, token_ids=None),
        pack(key=KEY) + b"\xc0",
        pack(key=KEY)[:-1],
        b"\x93\x01\x02\x03",
        b"\x81" * 2000,
        b"\x91" * 3000 + b"\xc0",
        b"\x82\xa3key\xc4\x20" + KEY + b"\xc0\xc0",
        b"\x82\xa3key\xc4\x20" + KEY + b"\xa1x\xd6\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa3key\xc4\x20" + KEY,
        b"\x81\xa2\xff\xfe\xc0",
    ],
    ids=repr,
)
def test_metadata_that_says_nothing_usable(packed: bytes) -> None:
    with pytest.raises(RecordError, match=r"metadata|record's key|token ids"):
        decode_head(with_metadata(packed))


@pytest.mark.parametrize("metadata_bytes", [MAX_METADATA_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_that_nobody_vouches_for_is_not_followed(metadata_bytes: int) -> None:
    raw = bytearray(encode_head(PLAIN))
    struct.pack_into("<I", raw, 8, metadata_bytes)
    with pytest.raises(RecordError, match="no record has"):
        decode_head(raw)


def test_metadata_above_the_limit_is_refused_however_well_it_adds_up() -> None:
    largest = MAX_METADATA_BYTES - len(pack(key=KEY, later=b"")) - 3  # the length takes 5 bytes
    assert decode_head(with_metadata(pack(key=KEY, later=bytes(largest))))[0] == PLAIN
    with pytest.raises(RecordError, match="no record has"):
        decode_head(with_metadata(pack(key=KEY, later=bytes(largest + 1))))


@pytest.mark.parametrize(
    ("offset", "kind", "value"),
    [
        (16, "<Q", 0),
        (16, "<Q", MAX_PAYLOAD_BYTES + 1),
        (16, "<Q", 2**64 - 1),
        (42, "<H", 2),
    ],
)
def test_a_layout_that_is_impossible(offset: int, kind: str, value: int) -> None:
    raw = bytearray(encode_head(replace(PLAIN, payload_bytes=7)))
    struct.pack_into(kind, raw, offset, value)
    with pytest.raises(RecordError, match=r"payload has|equal layers"):
        decode_head(with_crc(raw, raw[8]))


def test_padding_is_zero() -> None:
    raw = bytearray(encode_head(PLAIN))
    raw[-1] = 1
    with pytest.raises(RecordError, match="padding"):
        decode_head(raw)


def test_a_bad_record_is_a_corrupt_entry() -> None:
    assert issubclass(RecordError, EntryCorrupt)


@pytest.mark.parametrize("length", [0, 3, 5, 8])
def test_a_trailer_is_four_bytes(length: int) -> None:
    with pytest.raises(RecordError, match="4 bytes"):
        decode_trailer(bytes(length))


# ---- what can't be written


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload_bytes": 0},
        {"payload_bytes": -1},
        {"payload_bytes": MAX_PAYLOAD_BYTES + 1},
        {"payload_bytes": 10, "layer_count": 3},
        {"payload_bytes": MAX_LAYERS + 1, "layer_count": MAX_LAYERS + 1},
        {"layer_count": -1},
        {"generation": -1},
        {"generation": 2**64},
        {"token_count": 2**32},
        {"token_count": -1},
        {"reason": 256},
        {"tier": -1},
        {"created_ns": 2**63},
        {"token_ids": b"123"},
        {"token_ids": bytes(MAX_TOKEN_IDS_BYTES + 4)},
    ],
    ids=str,
)
def test_a_head_that_no_record_can_hold(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSize):
        encode_head(replace(PLAIN, **wrong))


def test_a_head_without_a_key() -> None:
    with pytest.raises(InvalidKey):
        encode_head(replace(PLAIN, key=Key(b"short")))
