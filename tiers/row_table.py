"""A table of rows, one for each slab of an arena: what `Records` keeps its rows in.

`RowFile`
    A file in which row i lies at its own place. It has no structure that could be damaged: what
    a flipped bit hits is one row. For shm: an `apply` is a few writes to memory.
`LmdbRows` (`tiers.lmdb_rows`)
    The same table in LMDB, in a process of its own. For the disk.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from .files import (
    check_linked,
    open_own_file,
    pwrite_all,
    secure_range,
    sync_directory,
    write_errors,
)
from .rows import ROW_BYTES, ZERO_ROW, generation_of, has_crc
from .store import StoreError

#: Slabs that are read at once.
CHUNK_SLABS: Final = 8192
RECORDS_FILE: Final = "records"
#: A row that is another one each time can't be read.
_READINGS: Final = 5

#: A slab whose row is to be erased if it is of this generation; None: whatever it is.
Erasure = tuple[int, int | None]


class RowTable(ABC):
    """Rows of `ROW_BYTES` for the slabs 0, 1, ... of an arena.

    What one call gets is not atomic: a failure, or the end of a process, may leave a part of it
    done. Every method may be called from any thread, one at a time. Raises StoreError, StoreFull.
    """

    @abstractmethod
    def secure(self, slabs: int) -> None:
        """Take room on the device for the rows of the first `slabs` slabs. Never less than
        before."""

    @abstractmethod
    def apply(self, erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        """Erase, then write, in order. When it returns, all of it is durable."""

    @abstractmethod
    def read(self, slab: int) -> bytes:
        """The row of a slab; zeros or nothing if it has none."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """The rows that are not zeros, with their slabs, in order: the first slab of a range of
        `CHUNK_SLABS`, and those in it. Never the row of slab 0."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. May be called twice, and at any moment."""

    def probe(self) -> None:
        """Make a real write durable: to the row of slab 0, which belongs to no entry."""
        self.apply((), [(0, os.urandom(16).ljust(ROW_BYTES, b"\0"))])


class RowFile(RowTable):
    """The table in the file `records` of `directory`, for `slabs` slabs.

    `sync`: changes wait for the device. Raises StoreError if the file can't be used.
    """

    def __init__(self, directory: Path, slabs: int, *, sync: bool) -> None:
        self._path: Final = directory / RECORDS_FILE
        self._slabs: Final = slabs
        self._sync: Final = sync
        self._secured_slabs = 0
        self._fd = -1
        with write_errors(f"open the records in {directory}"):
            try:
                self._fd = open_own_file(self._path, 0o600)
                if os.fstat(self._fd).st_size > slabs * ROW_BYTES:
                    os.ftruncate(self._fd, slabs * ROW_BYTES)
                if sync:
                    sync_directory(directory)
            except BaseException:
                self.close()
                raise

    def secure(self, slabs: int) -> None:
        first, more = self._secured_slabs, slabs - self._secured_slabs
        if more > 0:
            with write_errors(f"make room for records in {self._path.parent}"):
                secure_range(self._fd, first * ROW_BYTES, more * ROW_BYTES)
            self._secured_slabs = slabs

    def apply(self, erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        with write_errors(f"write records in {self._path.parent}"):
            check_linked(self._fd, self._path)
            for slab, generation in erasures:
                if generation is None or generation_of(self._pread(slab)) == generation:
                    pwrite_all(self._fd, ZERO_ROW, slab * ROW_BYTES)
            for slab, row in rows:
                pwrite_all(self._fd, row, slab * ROW_BYTES)
            if self._sync:
                os.fdatasync(self._fd)

    def read(self, slab: int) -> bytes:
        with write_errors(f"read the records in {self._path.parent}"):
            return self._pread(slab)

    def chunks(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        zeros = bytes(CHUNK_SLABS * ROW_BYTES)
        for first in range(0, self._slabs, CHUNK_SLABS):
            with write_errors(f"read the records in {self._path.parent}"):
                chunk = os.pread(self._fd, CHUNK_SLABS * ROW_BYTES, first * ROW_BYTES)
            if chunk != zeros[: len(chunk)]:
                rows = [(slab, self._stored(slab, row)) for slab, row in _used_rows(first, chunk)]
                yield first, [(slab, row) for slab, row in rows if row != ZERO_ROW]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _stored(self, slab: int, row: bytes) -> bytes:
        """What was read of a row, or is when it is read again: what is dropped for its checksum is
        erased, so that is not believed once. Raises StoreError."""
        for _ in range(_READINGS):
            if has_crc(row) or row == ZERO_ROW:
                return row
            before, row = row, self.read(slab).ljust(ROW_BYTES, b"\0")
            if row == before:
                return row  # so it is stored
        raise StoreError(f"the row of slab {slab} is another one each time")

    def _pread(self, slab: int) -> bytes:
        return os.pread(self._fd, ROW_BYTES, slab * ROW_BYTES)


def _used_rows(first_slab: int, chunk: bytes) -> Iterator[tuple[int, bytes]]:
    for start in range(0 if first_slab else ROW_BYTES, len(chunk) - ROW_BYTES + 1, ROW_BYTES):
        row = chunk[start : start + ROW_BYTES]
        if row != ZERO_ROW:
            yield first_slab + start // ROW_BYTES, row
