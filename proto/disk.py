"""How entries lie in the LMDB environment of the disk tier.

The daemon writes it, local readers open it read-only. Three tables, all changed for an entry
in one transaction, so that a reader sees an entry whole or not at all:

    table   key                     value
    ------  ----------------------  -------------------------------------------------------
    heads   key (32)                head of `record.py`, token ids included, then its trailer
    chunks  key (32), u32be index   `CHUNK_BYTES` of the payload; what is left in the last one
    usage   key (32)                i64le last used, wall-clock ns; u64le hits

Chunks, because a value is one run of pages: whole entries of mixed sizes as single values
let the file grow to 1.47 x the live bytes, and finding a run took longer the larger it was.
In chunks of 1 MiB it is 1.24 x, the same as for smaller ones, which are slower to write
(GB/s committed: 4 KiB 1.1, 64 KiB 2.6, 256 KiB 2.8, 1 MiB 2.9, 4 MiB 3.0).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from .keys import Key
from .limits import KEY_BYTES

HEADS: Final = b"heads"
CHUNKS: Final = b"chunks"
USAGE: Final = b"usage"
TABLES: Final = 3
#: 1 MiB less what LMDB puts before a run of pages, so that a chunk fills its pages exactly.
CHUNK_BYTES: Final = 2**20 - 16
CHUNK_KEY_BYTES: Final = KEY_BYTES + 4

_INDEX: Final = struct.Struct(">I")
_USAGE: Final = struct.Struct("<qQ")
USAGE_BYTES: Final = _USAGE.size


def chunk_key(key: Key, index: int) -> bytes:
    """The key of chunk `index`; the chunks of an entry follow each other in their order."""
    return key + _INDEX.pack(index)


def chunk_count(payload_bytes: int) -> int:
    """Chunks of a payload."""
    return -(-payload_bytes // CHUNK_BYTES)


def chunk_length(payload_bytes: int, index: int) -> int:
    """Bytes in chunk `index` of a payload."""
    return min(CHUNK_BYTES, payload_bytes - index * CHUNK_BYTES)


def chunk_ranges(offset_bytes: int, length_bytes: int) -> Iterator[tuple[int, slice]]:
    """A range of a payload as the chunks that hold it, and the part of each."""
    while length_bytes > 0:
        index, begin = divmod(offset_bytes, CHUNK_BYTES)
        end = min(begin + length_bytes, CHUNK_BYTES)
        yield index, slice(begin, end)
        offset_bytes += end - begin
        length_bytes -= end - begin


def encode_usage(last_used_ns: int, hits: int) -> bytes:
    """A row of the usage table."""
    return _USAGE.pack(last_used_ns, hits)


def decode_usage(row: bytes | memoryview) -> tuple[int, int]:
    """`last_used_ns` and `hits`. Raises ValueError if it is no such row."""
    if len(row) != USAGE_BYTES:
        raise ValueError(f"a usage row has {USAGE_BYTES} bytes, not {len(row)}")
    last_used_ns, hits = _USAGE.unpack(row)
    return last_used_ns, hits
