"""What lies in a shared engine under the name of an entry.

The value under `px1:<epoch>:{<64 hex digits of the key>}` is a header, and behind it the first
`PART_BYTES` of the payload. The rest lies under the same name with `:1`, `:2` ... behind it; the
braces keep all of it on one node of a Cluster. The head is written last, so that who finds it may
expect the rest. Nothing here is trusted: the header has a checksum of its own and names its key,
and the payload is held against its CRC32C, over all parts.

| offset | bytes | what |
|---:|---:|---|
| 0 | 4 | `pxs1` |
| 4 | 4 | layers, 0: no layer table |
| 8 | 8 | payload bytes |
| 16 | 8 | tokens |
| 24 | 4 | CRC32C of the payload |
| 28 | 32 | key |
| 60 | 4 | CRC32C of the 60 bytes before |
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from ...proto.keys import Key
from ...proto.layout import crc32c
from ...proto.limits import MAX_LAYERS, MAX_PAYLOAD_BYTES
from .store import SharedEntry

MAGIC: Final = b"pxs1"
_FIELDS: Final = struct.Struct("<4sIQQI32s")
_CHECK: Final = struct.Struct("<I")
#: What the other places of an entry have room for.
_MAX_TOKENS: Final = 2**32 - 1
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
#: Larger values make an engine's event loop wait for each of them, and spread badly.
PART_BYTES: Final = 4 * 2**20


def encode_header(entry: SharedEntry) -> bytes:
    """The first `HEADER_BYTES` of an entry's value."""
    fields = _FIELDS.pack(
        MAGIC,
        entry.layer_count,
        entry.payload_bytes,
        entry.token_count,
        entry.payload_crc32c,
        entry.key,
    )
    return fields + _CHECK.pack(crc32c(fields))


def decode_header(key: Key, header: bytes | bytearray | memoryview) -> SharedEntry | None:
    """What the header of `key` says; None if it is not whole, not of this key, or says what no
    entry can be."""
    if len(header) < HEADER_BYTES:
        return None
    fields = bytes(header[: _FIELDS.size])
    magic, layers, payload_bytes, tokens, payload_crc32c, named = _FIELDS.unpack(fields)
    (check,) = _CHECK.unpack_from(header, _FIELDS.size)
    if magic != MAGIC or check != crc32c(fields) or named != key:
        return None
    if not 0 < payload_bytes <= MAX_PAYLOAD_BYTES or layers > MAX_LAYERS or tokens > _MAX_TOKENS:
        return None
    if layers and payload_bytes % layers:
        return None
    return SharedEntry(key, payload_bytes, tokens, layers, payload_crc32c)


def parts_of(payload_bytes: int) -> int:
    """How many values the payload lies in; at least one."""
    return -(-payload_bytes // PART_BYTES)


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """CRC32C over all of them."""
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return value


def cut(pieces: Sequence[memoryview], part_bytes: int = PART_BYTES) -> list[list[memoryview]]:
    """The bytes of `pieces` in parts of `part_bytes`, the last one shorter; nothing is copied."""
    parts: list[list[memoryview]] = [[]]
    room = part_bytes
    for piece in pieces:
        while len(piece):
            if not room:
                parts.append([])
                room = part_bytes
            taken = piece[:room]
            parts[-1].append(taken)
            piece, room = piece[len(taken) :], room - len(taken)
    return parts
