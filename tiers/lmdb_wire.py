"""What the daemon and the process with its LMDB table (`tiers.lmdb_child`) say to each other.

A message is its length (u32, little-endian) and a msgpack list. The process first says that it
is ready (an answer of nil), or why not; then each request has one answer.

    request                                  answer
    ---------------------------------------  -----------------------------------------------
    ["apply", erasures, rows]                ["ok", nil, notes]
      erasures: [slab, generation or nil]
      rows: [slab, row]
    ["read", slab]                           ["ok", row, or nothing, notes]
    ["chunk", first slab]                    ["ok", [first slab, cells], notes]; nil instead
                                             of both behind the last chunk; the next one begins
                                             CHUNK_SLABS later
    whatever fails                           ["full" or "error", a sentence], and the process ends
    notes: sentences about damage that was met and mended since the answer before

The table is kept in cells, each the value of one key (the slab, u32 big-endian):

    offset  bytes  type  meaning
    ------  -----  ----  ---------------------------------------------------------------
         0      4  raw   "PFXr"
         4      8  u64   sequence number: of two cells of a slab the higher one holds
        12      4  u32   slab
        16    128  raw   the row (`tiers.rows`); zeros: erased
       144      4  u32   CRC32C of bytes 0..143

All cells have one length, which is longer than a row: what a client chose, a key, can't hold one.
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

#: The files: the one with the highest number holds, the one before it is room for the next.
FILE_NAME: Final = re.compile(r"records-(\d{1,18})\.mdb")
#: What each of the two takes: a fixed part, and for each slab. Cells take 165 bytes of a new file;
#: what is beyond is for changes, which LMDB here only ever appends. The more it is, the less of
#: the copy into the next file falls to a put.
FILE_FIXED_BYTES: Final = 32 * mmap.PAGESIZE
FILE_SLAB_BYTES: Final = 512

#: The CRC32C of any bytes with their CRC32C behind them.
_GOOD_CRC32C: Final = 0x48674BC7

CHUNK_SLABS: Final = 8192
#: Changes in one request.
MAX_CHANGES: Final = 8192
_MAX_MESSAGE_BYTES: Final = 4 * 2**20
_LENGTH: Final = struct.Struct("<I")


def file_bytes(slabs: int) -> int:
    """What each of the two files takes for so many slabs."""
    pages = -(-(FILE_FIXED_BYTES + slabs * FILE_SLAB_BYTES) // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


def encode_cell(sequence: int, slab: int, row: bytes) -> bytes:
    """A cell with its checksum."""
    cell = CELL.pack(CELL_MAGIC, sequence, slab, row)
    return cell + crc32c(cell).to_bytes(4, "little")


def whole_cell(cell: bytes) -> bytes | None:
    """The cell as it was written: as it is, or with the one bit flipped back that is wrong. None:
    it is none.

    What LMDB leaves in the free parts of its pages looks like damaged cells, too: a cell that was
    mended is believed if its row, which has a checksum of its own, says the same.
    """
    if len(cell) != CELL_BYTES:
        return None
    if crc32c(cell) == _GOOD_CRC32C:
        return cell
    wrong = crc32c(cell[:-4]) ^ int.from_bytes(cell[-4:], "little")
    bit = _bits_by_error().get(wrong)
    if bit is None:
        return None
    mended = bytearray(cell)
    mended[bit // 8] ^= 1 << bit % 8
    row = mended[CELL_ROW]
    good = not any(row) or crc32c(row[:-4]) == int.from_bytes(row[-4:], "little")
    return bytes(mended) if good else None


@functools.cache
def _bits_by_error() -> dict[int, int]:
    """Which flipped bit of a cell makes its checksum differ in this way: each another."""
    good = crc32c(bytes(CELL.size))
    found = {}
    for bit in range(8 * CELL.size):
        flipped = bytearray(CELL.size)
        flipped[bit // 8] = 1 << bit % 8
        found[crc32c(flipped) ^ good] = bit
    return found | {1 << bit: 8 * CELL.size + bit for bit in range(32)}


def send(connection: socket.socket, message: list[Any]) -> None:
    """Raises OSError, ValueError for what is too large."""
    packed = msgpack.packb(message)
    if len(packed) > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(packed)} bytes, {_MAX_MESSAGE_BYTES} at most")
    connection.sendall(_LENGTH.pack(len(packed)) + packed)


def receive(connection: socket.socket, until_s: float | None = None) -> list[Any]:
    """The next message. Raises EOFError, OSError, ValueError for what is none, TimeoutError if it
    is not there at `until_s` of the monotonic clock."""
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
