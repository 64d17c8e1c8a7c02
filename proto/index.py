"""The rows of the index: what a reader on the same host needs to find an entry's bytes.

The index is an LMDB environment in /dev/shm that the daemon alone writes and anybody who may
open it reads. A row is keyed by the 32 bytes of its entry's key; little-endian:

    offset  bytes  type  meaning
    ------  -----  ----  --------------------------------------------
         0      1  u8    tier
         1      1  u8    save reason
         2      2  u16   layer count
         4      4  u32   token count
         8      4  u32   CRC32C of the payload
        12      4  u32   bytes of token ids
        16      8  u64   generation
        24      8  u64   payload bytes
        32   16*n  u64   extents in the tier's arena: offset, length ...

The row is removed, and its removal committed, before anything else is written to its extents.
A reader that copies the bytes and then finds a row of the same generation has a good copy.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from .errors import RecordError
from .record import head_bytes_for
from .vocabulary import Tier

#: Under this name (no key: it is not 32 bytes) stands the incarnation of the daemon that writes.
INCARNATION_ROW: Final = b"incarnation"
#: Before the key of an entry of the shm tier: somebody holds a claim on it. For the daemon's own
#: use after a restart.
CLAIMED: Final = b"claimed:"
#: Environment of the index, below the directory of the shm tier.
INDEX_DIRECTORY: Final = "index"

_FIXED: Final = struct.Struct("<BBHIIIQQ")


class IndexRow(NamedTuple):
    """See the table above. `location` is offset, length, offset, length ..."""

    tier: int
    reason: int
    layer_count: int
    token_count: int
    payload_crc32c: int
    token_ids_bytes: int
    generation: int
    payload_bytes: int
    location: tuple[int, ...]

    @property
    def payload_offset(self) -> int:
        """Where the payload begins within the extents: shm holds whole records."""
        return head_bytes_for(self.token_ids_bytes) if self.tier == Tier.SHM else 0


def pack_row(row: IndexRow) -> bytes:
    """The stored form."""
    fixed = _FIXED.pack(
        row.tier,
        row.reason,
        row.layer_count,
        row.token_count,
        row.payload_crc32c,
        row.token_ids_bytes,
        row.generation,
        row.payload_bytes,
    )
    return fixed + struct.pack(f"<{len(row.location)}Q", *row.location)


def unpack_fixed(data: bytes | memoryview) -> tuple[int, int, int, int, int, int, int, int]:
    """Everything before the extents, in the order of the table. Raises `RecordError`."""
    try:
        return _FIXED.unpack_from(data)
    except struct.error:
        raise RecordError(f"an index row of {len(data)} bytes") from None


def generation_of(data: bytes | memoryview) -> int:
    """Of a stored row. Raises `RecordError`."""
    return unpack_fixed(data)[6]


def unpack_row(data: bytes | memoryview) -> IndexRow:
    """Read a row. Raises `RecordError` where it has no row's length."""
    extents_bytes = len(data) - _FIXED.size
    if extents_bytes < 0 or extents_bytes % 16:
        raise RecordError(f"an index row of {len(data)} bytes")
    tier, reason, layers, tokens, crc32c, ids_bytes, generation, payload = unpack_fixed(data)
    location = struct.unpack_from(f"<{extents_bytes // 8}Q", data, _FIXED.size)
    return IndexRow(tier, reason, layers, tokens, crc32c, ids_bytes, generation, payload, location)
