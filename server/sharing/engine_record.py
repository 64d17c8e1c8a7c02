"""The format of an entry in a shared engine.

The value under `px1:<epoch>:{<64 hex digits of the key>}`, the head, is a header and then the
beginning of the payload. The rest lies under the same name with the suffix `:1`, `:2` ...; the
braces keep all parts on one node of a Cluster. There are as few values as `MAX_VALUE_BYTES` allows,
all of the same length: Redis receives a large value into the buffer of the one before, and copies
it if their lengths differ. The head is written last, so that a reader that finds it can expect the
rest. Nothing is trusted: the header has a checksum and names its key, and the payload is checked
against its CRC32C, over all parts.

| offset | bytes | what |
|---:|---:|---|
| 0 | 4 | `pxs1` |
| 4 | 16 | the content (`proto.entry.pack_content`) |
| 20 | 4 | stamp: the deletes that the writer had done (`delete_log`), 0: none |
| 24 | 4 | CRC32C of the payload |
| 28 | 32 | key |
| 60 | 4 | CRC32C of the 60 bytes before |
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ...proto.entry import PACKED_BYTES, pack_content, unpack_content
from ...proto.errors import InvalidSize
from ...proto.keys import Key
from ...proto.payload import crc32c
from .engine_store import SharedEntry

MAGIC: Final = b"pxs1"
_FIELDS: Final = struct.Struct(f"<4s{PACKED_BYTES}sII32s")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
#: Larger values block an engine's event loop, and are distributed unevenly.
MAX_VALUE_BYTES: Final = HEADER_BYTES + 4 * 2**20
#: Parts begin at a multiple of this, for fast copies; it is the length of the header.
_ALIGNED_BYTES: Final = 64


def encode_header(entry: SharedEntry) -> bytes:
    """The first `HEADER_BYTES` of an entry's value."""
    fields = _FIELDS.pack(
        MAGIC,
        pack_content(entry.content),
        entry.stamp,
        entry.payload_crc32c,
        entry.key,
    )
    return fields + _CHECK.pack(crc32c(fields))


def decode_header(key: Key, header: bytes | bytearray | memoryview) -> SharedEntry | None:
    """The entry that the header of `key` describes. None if the header is incomplete, of another
    key, or impossible."""
    if len(header) < HEADER_BYTES:
        return None
    fields = bytes(header[: _FIELDS.size])
    magic, packed, stamp, payload_crc32c, named = _FIELDS.unpack(fields)
    (check,) = _CHECK.unpack_from(header, _FIELDS.size)
    if magic != MAGIC or check != crc32c(fields) or named != key:
        return None
    try:
        return SharedEntry(key, unpack_content(packed), payload_crc32c, stamp)
    except InvalidSize:
        return None


def same_entry(key: Key, header: bytes | bytearray | memoryview, entry: SharedEntry) -> bool:
    """Whether the header of `key` describes this entry, whoever vouches for it."""
    found = decode_header(key, header)
    return found is not None and replace(found, stamp=entry.stamp, location=entry.location) == entry


def parts_of(payload_bytes: int) -> list[slice]:
    """The part of the payload in each value; at least one."""
    total_bytes = HEADER_BYTES + payload_bytes
    count = -(-total_bytes // MAX_VALUE_BYTES)
    value_bytes = -(-total_bytes // (count * _ALIGNED_BYTES)) * _ALIGNED_BYTES
    ends = [*range(value_bytes, total_bytes, value_bytes), total_bytes]
    begins = [HEADER_BYTES, *ends]
    return [
        slice(begin - HEADER_BYTES, end - HEADER_BYTES)
        for begin, end in zip(begins, ends, strict=False)
    ]


def cut(pieces: Sequence[memoryview]) -> list[list[memoryview]]:
    """The bytes of `pieces`, cut into the parts of their payload without copying."""
    parts: list[list[memoryview]] = []
    rest = deque(pieces)
    for part in parts_of(sum(map(len, pieces))):
        parts.append([])
        room = part.stop - part.start
        while room:
            piece = rest.popleft()
            if len(piece) > room:
                rest.appendleft(piece[room:])
                piece = piece[:room]
            room -= len(piece)
            parts[-1].append(piece)
    return parts
