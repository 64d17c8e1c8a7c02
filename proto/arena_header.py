"""The header of the shm and disk arenas, which tells which start of the daemon writes to the file.

Offsets are from the start of the file, integers are little-endian.

    offset  bytes  type  meaning
    ------  -----  ----  -----------------------------------------------------------------
         0      8  raw   magic, "PFXARENA"
         8      4  u32   format version, 1
        12      4  u32   bytes of a slab; entries begin at the second slab
        16     16  raw   incarnation of the daemon that writes to the file
        32      4  u32   CRC32C of bytes 0..31
        36   2012  raw   zeros
      2048   2048  raw   written by the daemon's probes; no meaning

The daemon writes its incarnation before it writes anything else to the file. So a reader whose
index belongs to another start sees after its copy that the bytes may be newer than the index rows
that led to them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from .errors import RecordError
from .payload import crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: The page that a reader needs. No slab is smaller.
ARENA_HEADER_BYTES: Final = 4096
INCARNATION_BYTES: Final = 16
#: Where the daemon's probes write.
PROBE_OFFSET: Final = 2048

_MAGIC: Final = b"PFXARENA"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<8sII16s")
_CRC: Final = struct.Struct("<I")


def encode_arena_header(incarnation: bytes, slab_bytes: int) -> bytes:
    """The header up to the zeros of its page. Raises ValueError if the incarnation is malformed."""
    if len(incarnation) != INCARNATION_BYTES:
        raise ValueError(f"an incarnation has {INCARNATION_BYTES} bytes, not {len(incarnation)}")
    fields = _FIELDS.pack(_MAGIC, _VERSION, slab_bytes, incarnation)
    return fields + _CRC.pack(crc32c(fields))


def read_arena_incarnation(buffer: Buffer) -> bytes:
    """The incarnation in the header that `buffer` begins with.

    `buffer` is a mapping of the arena or a copy of its first page. Raises `RecordError` unless it
    begins with a complete header of this version.
    """
    return decode_arena_header(buffer)[0]


def decode_arena_header(buffer: Buffer) -> tuple[bytes, int]:
    """The incarnation and the bytes of a slab. Raises `RecordError` as `read_arena_incarnation`."""
    view = memoryview(buffer)
    # A copy, because the daemon may write between the check and the use.
    header = bytes(view[: _FIELDS.size + _CRC.size])
    if len(header) < _FIELDS.size + _CRC.size:
        raise RecordError(f"an arena's header is cut off: {len(header)} bytes")
    magic, version, slab_bytes, incarnation = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        raise RecordError(f"an arena begins with {_MAGIC!r}, not with {magic!r}")
    if version != _VERSION:
        raise RecordError(f"the arena has format {version}, this version reads {_VERSION}")
    if _CRC.unpack_from(header, _FIELDS.size) != (crc32c(header[: _FIELDS.size]),):
        raise RecordError("the arena's header does not match its checksum")
    return incarnation, slab_bytes
