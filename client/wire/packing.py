"""How saves leave: payloads packed into messages.

The messages of a save are encoded here rather than by protobuf, which would copy every payload
three times on its way into a message (into `bytes`, into its arena, out of it; a quarter of the
time of a save). A part is encoded by protobuf without its data and the data appended as the
field that it is, so that the bytes of a payload are copied once, into the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidBatch
from ...proto.payload import FlatBytes, crc32c_of, views_of

_LENGTH_DELIMITED: Final = 2
#: What a message and its part need beside the data, generously.
_OVERHEAD_BYTES: Final = 128
#: What a message needs beside its header, and for a part of each item, generously.
_FRAMING_BYTES, _PART_BYTES = 64, 32


def _tag(field: int) -> bytes:
    """What announces a field of bytes or a message on the wire (fields below 16)."""
    return bytes([field << 3 | _LENGTH_DELIMITED])


# Save and Write streams number their parts alike, so that one packer does for both.
_PARTS_TAG: Final = _tag(pb.SaveRequest.PARTS_FIELD_NUMBER)
_DATA_TAG: Final = _tag(pb.WritePart.DATA_FIELD_NUMBER)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def pack(
    opening: bytes,
    labels: Sequence[pb.WritePart],
    payloads: Sequence[FlatBytes],
    *,
    chunk_bytes: int,
    max_message_bytes: int,
) -> Iterator[bytes]:
    """The encoded messages of a Save or Write stream.

    `opening` is the encoded first message without parts, `labels` say which item or token each
    of `payloads` (flat bytes, referenced until the last message is out) belongs to. Parts are
    at most `chunk_bytes`; a message holds one, or as many small ones as make up a chunk. The
    CRC32C of a payload is taken while it is cut, a chunk at a time, while that is in the cache.
    """
    chunk_bytes = min(chunk_bytes, max_message_bytes - _OVERHEAD_BYTES)
    pieces: list[bytes | memoryview] = [opening]
    size_bytes = len(opening)
    for label, payload in zip(labels, payloads, strict=True):
        encoded_label = label.SerializeToString()
        crc = 0
        for offset in range(0, len(payload), chunk_bytes):
            data = payload[offset : offset + chunk_bytes]
            full = size_bytes >= chunk_bytes
            if full or size_bytes + len(data) + _OVERHEAD_BYTES > max_message_bytes:
                yield b"".join(pieces)
                pieces, size_bytes = [], 0
            crc = crc32c_of(data, crc)
            part = pb.WritePart(offset_bytes=offset)
            if offset + len(data) == len(payload):
                part.last, part.payload_crc32c = True, crc
            head = encoded_label + part.SerializeToString() + _DATA_TAG + _varint(len(data))
            length_bytes = len(head) + len(data)
            pieces += [_PARTS_TAG, _varint(length_bytes), head, *views_of(data)]
            size_bytes += length_bytes + _OVERHEAD_BYTES
    yield b"".join(pieces)


def check_header(header: pb.SaveHeader, max_message_bytes: int) -> None:
    """Raises InvalidBatch for a header that does not fit into one message."""
    framing_bytes = _FRAMING_BYTES + _PART_BYTES * len(header.keys)
    header_bytes = header.ByteSize() + framing_bytes
    if header_bytes > max_message_bytes:
        raise InvalidBatch(
            f"keys and token ids of {len(header.keys)} items are {header_bytes} bytes, more "
            f"than the {max_message_bytes} of a message: save them in several calls"
        )
