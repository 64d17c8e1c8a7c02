"""The protocol between the daemon and the process with its LMDB table (`tiers.lmdb_child`).

A message is its length (u32, little-endian) and a msgpack list. The process first sends an answer
of nil when it is ready, or an error. Then each request has one answer.

    request                                  answer
    ---------------------------------------  -----------------------------------------------
    ["apply", erasures, rows]                ["ok", nil, notes]
      erasures: [slab, generation or nil]
      rows: [slab, row]
    ["read", slab]                           ["ok", row, or nothing, notes]
    ["chunk", first slab]                    ["ok", [first slab, cells], notes]; nil instead of
                                             the pair after the last chunk; the next chunk begins
                                             CHUNK_SLABS later
    any, when it fails                       ["full" or "error", a sentence], and the process ends
    notes: sentences about damage that was found and repaired since the last answer

The table is kept in cells, each the value of one key (the slab, u32 big-endian):

    offset  bytes  type  meaning
    ------  -----  ----  ---------------------------------------------------------------
         0      4  raw   "PFXr"
         4      8  u64   sequence number: of two cells of a slab the higher one is valid
        12      4  u32   slab
        16    128  raw   the row (`tiers.rows`); zeros: erased
       144      4  u32   CRC32C of bytes 0..143

All cells have one length, which is longer than a row. So the key in a row, which a client chose,
can't contain a forged cell.
"""

from __future__ import annotations

import functools
import mmap
import re
import socket
import struct
import time
from typing import Any, Final

import msgpack
from fastcrc import crc32

ROW_BYTES: Final = 128
crc32c: Final = crc32.iscsi
CELL: Final = struct.Struct("<4sQI128s")
CELL_BYTES: Final = CELL.size + 4
CELL_MAGIC: Final = b"PFXr"
CELL_ROW: Final = slice(16, 16 + ROW_BYTES)

#: There are two files: the one with the highest number is valid, the other is the spare one.
FILE_NAME: Final = re.compile(r"records-(\d{1,18})\.mdb")
#: What each file takes: a fixed part, and a part for each slab. Cells take 165 bytes of a new file.
#: The rest is for changes, which are only ever appended. The more room they have, the smaller the
#: part of the next copy that each put has to do.
FILE_FIXED_BYTES: Final = 32 * mmap.PAGESIZE
FILE_SLAB_BYTES: Final = 512

#: The CRC32C of any bytes that are followed by their own CRC32C.
_GOOD_CRC32C: Final = 0x48674BC7

CHUNK_SLABS: Final = 8192
#: Changes in one request.
MAX_CHANGES: Final = 8192
_MAX_MESSAGE_BYTES: Final = 4 * 2**20
_LENGTH: Final = struct.Struct("<I")


def file_bytes(slabs: int) -> int:
    """What each of the two files takes for this many slabs."""
    pages = -(-(FILE_FIXED_BYTES + slabs * FILE_SLAB_BYTES) // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


def encode_cell(sequence: int, slab: int, row: bytes) -> bytes:
    """A cell with its checksum."""
    cell = CELL.pack(CELL_MAGIC, sequence, slab, row)
    return cell + crc32c(cell).to_bytes(4, "little")


def whole_cell(cell: bytes) -> bytes | None:
    """The cell as it was written: unchanged, or with a single flipped bit repaired. None: it is
    not a cell.

    Remains in the free parts of LMDB's pages look like damaged cells too. So a repaired cell counts
    only if the row in it matches its own checksum as well.
    """
    if len(cell) != CELL_BYTES:
        return None
    if crc32c(cell) == _GOOD_CRC32C:
        return cell
    error = crc32c(cell[:-4]) ^ int.from_bytes(cell[-4:], "little")
    bit = _bits_by_error().get(error)
    if bit is None:
        return None
    repaired = bytearray(cell)
    repaired[bit // 8] ^= 1 << bit % 8
    row = repaired[CELL_ROW]
    good = not any(row) or crc32c(row[:-4]) == int.from_bytes(row[-4:], "little")
    return bytes(repaired) if good else None


@functools.cache
def _bits_by_error() -> dict[int, int]:
    """Error of the checksum -> the flipped bit of the cell that causes it. Each bit has its own."""
    good = crc32c(bytes(CELL.size))
    found = {}
    for bit in range(8 * CELL.size):
        flipped = bytearray(CELL.size)
        flipped[bit // 8] = 1 << bit % 8
        found[crc32c(flipped) ^ good] = bit
    return found | {1 << bit: 8 * CELL.size + bit for bit in range(32)}


def send(connection: socket.socket, message: list[Any]) -> None:
    """Raises OSError, and ValueError for a message that is too large."""
    packed = msgpack.packb(message)
    if len(packed) > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(packed)} bytes, {_MAX_MESSAGE_BYTES} at most")
    connection.sendall(_LENGTH.pack(len(packed)) + packed)


def receive(connection: socket.socket, until_s: float | None = None) -> list[Any]:
    """The next message. Raises EOFError, OSError, ValueError if it is malformed, and TimeoutError
    if it is not complete at `until_s` of the monotonic clock."""
    (length,) = _LENGTH.unpack(_receive_all(connection, _LENGTH.size, until_s))
    if length > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes, {_MAX_MESSAGE_BYTES} at most")
    message = msgpack.unpackb(_receive_all(connection, length, until_s))
    if not isinstance(message, list) or not message:
        raise ValueError("not a message")
    return message


def _receive_all(connection: socket.socket, length: int, until_s: float | None) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        if until_s is not None:
            connection.settimeout(max(0.001, until_s - time.monotonic()))
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection ended")
        view = view[count:]
    return bytes(data)
