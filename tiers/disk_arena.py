"""The arena of the disk tier: a file that is written with `pwrite` and read with `preadv`.

It is never mapped. So a broken sector, a full device or a truncated file is an error of one call;
with a mapping it would be a SIGBUS for the daemon. The file is as long as its secured part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..proto.arena_header import ARENA_HEADER_BYTES, PROBE_OFFSET, encode_arena_header
from ..proto.payload import copy_crc32c, crc32c, unset_bytearray
from .arena import BaseArena, check_size, ranges
from .files import (
    HERE,
    ROOM_BYTES,
    FileCalls,
    check_linked,
    open_own_file,
    pread_into,
    pwrite_all,
    secure_range,
    sync_directory,
    write_errors,
)
from .store import SEGMENT_BYTES, Damaged, Location, StoreError, StoreFull

#: What is checksummed and written at once.
PIECE_BYTES: Final = ROOM_BYTES
#: Types whose memory only the daemon can change. Anything else may be shared with a client.
_OWN: Final = frozenset((bytes, bytearray))


class DiskArena(BaseArena):
    """The file `path`, created if it is missing.

    With `sync`, `sync()` waits for the device; without it, what is written survives a crash of
    the daemon but not of the machine. While the arena is open the file has no write bits, so that
    a reader can't open it for writing. `calls` wait for the device. Raises StoreError.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        *,
        sync: bool = True,
        max_bytes: int = 0,
        calls: FileCalls = HERE,
    ) -> None:
        check_size(size_bytes)
        self.path: Final = path
        self.max_bytes = max_bytes or size_bytes
        self.holes = {}
        self._sync: Final = sync
        self._sync_lock = threading.Lock()
        self._calls = calls
        with write_errors(f"open {path}"):
            self.fd = open_own_file(path, 0o600, calls)
            try:
                calls.own(self.fd, path)
                found_bytes = os.fstat(self.fd).st_size
                calls.fchmod(self.fd, 0o400)
                if sync:
                    sync_directory(path.parent, calls)
            except BaseException:
                self.close()
                raise
        self.found_bytes = self.secured_bytes = self._ready_bytes = found_bytes
        self.size_bytes = max(size_bytes, found_bytes)
        self.max_bytes = max(self.max_bytes, found_bytes)

    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        try:
            yield from super().secure_segments(segment_bytes)
        except StoreFull:
            # Give back what the file system reserved of the segment.
            if os.fstat(self.fd).st_size > self.secured_bytes:
                self._calls.ftruncate(self.fd, self.secured_bytes)
            raise

    def put(self, start: int, data: memoryview, crc: int) -> int:
        with write_errors(f"write to {self.path}"):
            if self._calls.direct and type(data.obj) in _OWN:
                for at in range(0, len(data), PIECE_BYTES):
                    piece = data[at : at + PIECE_BYTES]
                    crc = crc32c(piece, crc)
                    pwrite_all(self.fd, piece, start + at, self._calls)
                return crc
            # Copied first, so that the checksum is that of the bytes in the file.
            with self._calls.room() as room:
                for at in range(0, len(data), PIECE_BYTES):
                    piece = data[at : at + PIECE_BYTES]
                    crc = copy_crc32c(room.view[: len(piece)], piece, crc)
                    room.write(self.fd, len(piece), start + at)
            return crc

    def views(self, location: Location, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """One view, which owns its memory."""
        if not length_bytes:
            return []
        parts = list(ranges(location, offset_bytes, length_bytes))
        own = memoryview(unset_bytearray(length_bytes))
        filled_bytes = 0
        for start, part_bytes in parts:
            part = own[filled_bytes : filled_bytes + part_bytes]
            try:
                read_bytes = pread_into(self.fd, part, start, self._calls)
            except OSError as problem:
                raise StoreError(f"can't read from {self.path}: {problem}") from None
            if read_bytes < part_bytes:
                raise Damaged(f"{self.path} ends at {start + read_bytes} bytes, within the entry")
            filled_bytes += part_bytes
        return [own.toreadonly()]

    def write_header(self, incarnation: bytes, slab_bytes: int) -> None:
        header = encode_arena_header(incarnation, slab_bytes)
        with write_errors(f"write the header of {self.path}"):
            secure_range(self.fd, 0, slab_bytes, self._calls)
            pwrite_all(self.fd, header, 0, self._calls)
        self.secured_bytes = max(self.secured_bytes, slab_bytes)
        self._ready_bytes = max(self._ready_bytes, slab_bytes)
        self.sync()

    def sync(self) -> None:
        """Make everything written so far durable. Raises StoreError; see `failed_syncs`."""
        with self._sync_lock:
            try:
                check_linked(self.fd, self.path)
                if self._sync:
                    self._calls.fdatasync(self.fd)
            except (OSError, StoreError) as problem:
                self.failed_syncs += 1
                raise StoreError(f"can't sync {self.path}: {problem}") from None

    def give_back(self, location: Location, *, at_start: bool) -> bool:  # noqa: ARG002 (at any time)
        """Punches holes into the file. Reading one returns zeros, and no process faults."""
        with write_errors(f"give room of {self.path} back"):
            return self._punch(location)

    def probe(self) -> None:
        """Write and sync a few bytes beside the header, and read them from the device, which is of
        no use if it only writes. Raises StoreError."""
        written, found = os.urandom(16), bytearray(16)
        with write_errors(f"write to {self.path}"):
            pwrite_all(self.fd, written, PROBE_OFFSET, self._calls)
        self.sync()
        if not self._sync:
            return
        try:
            self._calls.drop_cached(self.fd, 0, ARENA_HEADER_BYTES)
            pread_into(self.fd, memoryview(found), PROBE_OFFSET, self._calls)
        except OSError as problem:
            raise StoreError(f"can't read from {self.path}: {problem}") from None
        if found != written:
            raise StoreError(f"{self.path} reads other bytes than were written to it just now")

    def close(self) -> None:
        if self.fd >= 0:
            self._calls.disown(self.fd)
            os.close(self.fd)
            self.fd = -1
