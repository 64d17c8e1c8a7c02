"""What a tier notes about deletes: keys that were deleted while its records were still being read,
and how far it has followed the deletes of a fleet.

A recovery may find the record of a key after a client was told that it is deleted. The daemon
remembers such keys, and writes them to this file first, so that they stay deleted if the recovery
is interrupted. The file goes when the recovery has erased their records.

    offset  bytes  type  meaning
         0     32  raw   key
        32      8  u64   generation: records of this key up to here are deleted
        40      4  u32   CRC32C of bytes 0..39

A row that was torn by a crash was never acknowledged; it and what follows it are ignored.

The other file holds a CRC32C, and a mark in the log of a fleet's deletes
(`server/sharing/delete_log.py`). What was deleted up to there is gone from the records, too. If the
file is torn or missing, the tier has to follow the log from its beginning.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..proto.keys import Key
from ..proto.payload import crc32c
from .files import HERE, FileCalls, open_own_file, pwrite_all, sync_directory, write_errors

GRAVES_FILE: Final = "deleted"
MARK_FILE: Final = "deletes-followed"
#: The longest mark.
MAX_MARK_BYTES: Final = 255
_ROW: Final = struct.Struct("<32sQ")
_CRC: Final = struct.Struct("<I")
_ROW_BYTES: Final = _ROW.size + _CRC.size


class Graves:
    """The files in `directory`. Calls do I/O, one at a time."""

    def __init__(self, directory: Path, *, sync: bool, calls: FileCalls = HERE) -> None:
        self._path: Final = directory / GRAVES_FILE
        self._mark_path: Final = directory / MARK_FILE
        self._sync: Final = sync
        self._calls: Final = calls

    def add(self, keys: Iterable[Key], generation: int) -> None:
        """Records of these keys up to `generation` are deleted. Durable on return. Raises
        StoreError, StoreFull."""
        rows = bytearray()
        for key in keys:
            row = _ROW.pack(key, generation)
            rows += row + _CRC.pack(crc32c(row))
        with write_errors(f"note deleted keys in {self._path}"):
            fd = open_own_file(self._path, 0o600, self._calls)
            try:
                size_bytes = os.fstat(fd).st_size
                at = size_bytes - size_bytes % _ROW_BYTES
                pwrite_all(fd, bytes(rows), at, self._calls)
                if self._sync:
                    self._calls.fsync(fd)
            finally:
                os.close(fd)
            if self._sync and not size_bytes:
                sync_directory(self._path.parent, self._calls)

    def read(self) -> dict[Key, int]:
        """The deleted keys, and up to which generation. Raises StoreError."""
        found: dict[Key, int] = {}
        with write_errors(f"read {self._path}"):
            try:
                rows = self._path.read_bytes()
            except FileNotFoundError:
                return found
        for start in range(0, len(rows) - _ROW_BYTES + 1, _ROW_BYTES):
            row, crc = rows[start : start + _ROW.size], rows[start + _ROW.size : start + _ROW_BYTES]
            if _CRC.pack(crc32c(row)) != crc:
                break
            key, generation = _ROW.unpack(row)
            found[Key(key)] = max(generation, found.get(Key(key), 0))
        return found

    def clear(self) -> None:
        """The records of all of them were erased durably. Raises StoreError."""
        with write_errors(f"remove {self._path}"), suppress(FileNotFoundError):
            self._calls.unlink(self._path)

    def mark(self, mark: bytes) -> None:
        """Everything up to here is deleted. Durable on return. Raises StoreError, StoreFull."""
        with write_errors(f"write {self._mark_path}"):
            fd = open_own_file(self._mark_path, 0o600, self._calls)
            try:
                row = _CRC.pack(crc32c(mark)) + bytes([len(mark)]) + mark
                pwrite_all(fd, row, 0, self._calls)
                if self._sync:
                    self._calls.fsync(fd)
            finally:
                os.close(fd)

    def marked(self) -> bytes:
        """The last mark; empty: there is none. Raises StoreError."""
        with write_errors(f"read {self._mark_path}"):
            try:
                found = self._mark_path.read_bytes()
            except FileNotFoundError:
                return b""
        length = found[_CRC.size] if len(found) > _CRC.size else 0
        mark = found[_CRC.size + 1 :][:length]
        return mark if found[: _CRC.size] == _CRC.pack(crc32c(mark)) else b""
