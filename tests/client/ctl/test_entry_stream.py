"""The stream of an export: it reads back as written, and anything else is refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import pytest

from prefixd.client.ctl.entry_stream import (
    HEADER_BYTES,
    MAGIC,
    BrokenStream,
    Exported,
    StreamReader,
    StreamWriter,
)
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.limits import MAX_PAYLOAD_BYTES
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason


def entry(
    number: int,
    size_bytes: int = 20,
    *,
    token_ids: bytes | None = None,
    **content: int,
) -> Exported:
    payload = bytes((number + place) % 256 for place in range(size_bytes))
    if token_ids is None:
        token_ids = b"\1\0\0\0" * number
    said = {"token_count": number, "layer_count": 0} | content
    return Exported(
        key=Key(bytes([number]) * 32),
        reason=SaveReason.FINISH,
        content=Content(payload_bytes=len(payload), token_ids_bytes=len(token_ids), **said),
        payload=payload,
        payload_crc32c=crc32c(payload),
        token_ids=token_ids,
    )


def written(*entries: Exported, end: bool = True) -> bytes:
    out = io.BytesIO()
    writer = StreamWriter(out)
    writer.begin()
    for one in entries:
        writer.put(one)
    if end:
        writer.end()
    return out.getvalue()


def test_what_was_written_is_read() -> None:
    entries = [entry(1), entry(2, layer_count=4, token_count=0), entry(3, 1, token_ids=b"")]
    reader = StreamReader(io.BytesIO(written(*entries)))
    assert list(reader) == entries
    assert (reader.entries, reader.payload_bytes) == (3, 41)
    assert list(StreamReader(io.BytesIO(written()))) == []


def test_no_flipped_bit_goes_unnoticed() -> None:
    stream = written(entry(1), entry(2))
    first_ends = len(written(entry(1), end=False))
    for place in range(len(stream)):
        for bit in (1, 128):
            damaged = bytearray(stream)
            damaged[place] ^= bit
            found: list[Exported] = []
            with pytest.raises(BrokenStream):
                # It has read the entries before the damage.
                found.extend(StreamReader(io.BytesIO(damaged)))
            assert found == [entry(1), entry(2)][: len(found)], "nothing wrong is ever handed on"
            assert len(found) >= (place >= first_ends)


def test_a_stream_that_was_cut_off_anywhere_is_known_as_such() -> None:
    stream = written(entry(1), entry(2))
    for length in range(len(stream)):
        with pytest.raises(BrokenStream):
            list(StreamReader(io.BytesIO(stream[:length])))


def test_the_record_and_its_place_are_named() -> None:
    stream = bytearray(written(entry(1), entry(2)))
    second = len(written(entry(1), end=False))
    stream[second + HEADER_BYTES] ^= 1
    with pytest.raises(BrokenStream, match=f"record 2, at byte {second}: its payload") as broken:
        list(StreamReader(io.BytesIO(stream)))
    assert broken.value.good_bytes == second


def header(**fields: int) -> bytes:
    """A header with any values and a correct checksum."""
    said = {"layers": 0, "size": 20, "tokens": 1, "ids": 0, "reason": 1} | fields
    packed = struct.pack(
        "<4sIQQIIII32s", b"pxe1", said["layers"], said["size"], said["tokens"], said["ids"],
        said["reason"], 0, 0, bytes(32),
    )  # fmt: skip
    return packed + struct.pack("<I", crc32c(packed))


@pytest.mark.parametrize(
    "lie",
    [
        {"size": 0}, {"size": MAX_PAYLOAD_BYTES + 1}, {"size": 2**63}, {"ids": 2**31},
        {"ids": 3}, {"layers": 3}, {"layers": 2**31}, {"reason": 0}, {"reason": 6},
        {"tokens": 2**32},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_lies_is_refused(lie: dict[str, int]) -> None:
    with pytest.raises(BrokenStream, match="says what no entry can be"):
        list(StreamReader(io.BytesIO(MAGIC + header(**lie))))


def test_what_a_header_announces_takes_no_memory_before_it_comes() -> None:
    asked: list[int] = []

    class Short(io.BytesIO):
        def read(self, length: int | None = -1) -> bytes:
            asked.append(length or 0)
            return super().read(length)

    with pytest.raises(BrokenStream, match="ends within its payload"):
        list(StreamReader(Short(MAGIC + header(size=MAX_PAYLOAD_BYTES) + b"x" * 100)))
    assert max(asked) <= 16 * 2**20


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stream: stream + b"x", "something follows"),
        (lambda _: written(entry(1), end=False) + written()[len(MAGIC) :], "ends with 0 records"),
        (lambda stream: b"GIF89a" + stream, "no stream of entries"),
        (lambda _: b"prefixd entries 2\n", "another version"),
        (lambda _: b"", "no stream of entries"),
    ],
)
def test_other_streams_are_refused(change: Callable[[bytes], bytes], why: str) -> None:
    with pytest.raises(BrokenStream, match=why):
        list(StreamReader(io.BytesIO(change(written(entry(1))))))
