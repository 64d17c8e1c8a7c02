"""Arenas: the memory or file of a tier, in which entries lie in extents, and their writer.

Only the daemon writes an arena; clients get a descriptor that can only read. There are three kinds:

`Arena.anonymous`
    A memfd, sealed as soon as the daemon's own mapping exists. The kernel then refuses every
    other writable mapping, write and hole punch (F_SEAL_FUTURE_WRITE), every change of the size
    (F_SEAL_SHRINK, F_SEAL_GROW) and every other seal (F_SEAL_SEAL), through any descriptor. So no
    reader can corrupt a byte, or make another reader fault on a page that is gone.
`Arena.file`
    A file in /dev/shm, which a restart finds again. Such files take no seals: readers are limited
    by a descriptor that was opened read-only, and by the file's owner and mode. The file never
    shrinks under a reader: a smaller arena is a new file.
`DiskArena`
    A file on a disk, which is not mapped: there a broken sector is an error, not a signal.

Room is reserved on the device before anything is written to it (`secure_segments`). So a full
/dev/shm is an error when the arena is made, not a SIGBUS when it is used, and no save pays for a
first touch (measured: 0.4 GB/s with, 12-19 GB/s without).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..proto.arena_header import ARENA_HEADER_BYTES, PROBE_OFFSET, encode_arena_header
from ..proto.entry import TOKEN_IDS_CRC_BYTES, Recorded
from ..proto.kernel import native
from ..proto.payload import RELEASE_BYTES, address_of, copy_crc32c, crc32c, unset_bytearray
from .files import (
    HERE,
    FileCalls,
    check_linked,
    open_own_file,
    pread_into,
    punch_hole,
    pwrite_all,
    secure_range,
    sync_directory,
    write_errors,
)
from .store import SEGMENT_BYTES, Buffer, Damaged, EntryWriter, Location, StoreError, StoreFull

#: The name of the arena in the directory of a tier.
ARENA_FILE: Final = "arena"
DEFAULT_SLAB_BYTES: Final = 64 * 2**10
MIN_SLAB_BYTES: Final = 4096

_F_SEAL_FUTURE_WRITE: Final = 0x10
#: Against every change of the size, and every other seal.
SIZE_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALS: Final = SIZE_SEALS | _F_SEAL_FUTURE_WRITE
#: Linux 5.14: faults pages in for writing, and fails with an error instead of a signal.
_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class BaseArena(ABC):
    """The interface of all arenas.

    `size_bytes` is the requested size, which may change and is at most `max_bytes`. The first
    `secured_bytes` of it have room on the device, except for `holes`; `found_bytes` are from an
    earlier start, with their content. Where that left more than the requested size, it is the size
    for now. `fd` belongs to the arena; a client gets its own from `open_reader`. Only one
    thread at a time may write to a range. Everything else may be used from any thread.
    """

    fd: int
    size_bytes: int
    max_bytes: int
    found_bytes: int
    secured_bytes: int
    #: Up to here `secure_segments` has nothing to do.
    _ready_bytes: int
    #: Start and length of the ranges that were given back, which are not to be secured.
    holes: dict[int, int]
    #: The sum of their lengths.
    hole_bytes: int = 0
    #: `holes` in order, unless they have changed since.
    _sorted_holes: list[tuple[int, int]] | None = None
    _calls: FileCalls = HERE
    #: Failed syncs. The kernel reports a failed write-back only once: bytes that were written
    #: before it may not be stored, although a later sync succeeds.
    failed_syncs: int = 0

    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        """Reserve the arena's room on the device, segment by segment. Yields `secured_bytes` after
        each. A later call continues. Raises StoreFull, StoreError."""
        while self._ready_bytes < self.size_bytes:
            start = self._ready_bytes
            length_bytes = min(segment_bytes, self.size_bytes - start)
            for begin, part_bytes in self._without_holes(start, length_bytes):
                with write_errors(
                    f"secure more than {self.secured_bytes} of the {self.size_bytes} bytes of an "
                    "arena"
                ):
                    secure_range(self.fd, begin, part_bytes, self._calls)
                self._populate(begin, part_bytes)
            self._ready_bytes = start + length_bytes
            self.secured_bytes = max(self.secured_bytes, self._ready_bytes)
            yield self.secured_bytes

    def _without_holes(self, start: int, length_bytes: int) -> Iterator[tuple[int, int]]:
        """The parts of a range, in order."""
        end = start + length_bytes
        holes = self._sorted_holes
        if holes is None:
            holes = self._sorted_holes = sorted(self.holes.copy().items())
        first = bisect(holes, (start, 0))
        for hole, hole_bytes in holes[max(0, first - 1) : bisect(holes, (end, 0))]:
            if hole + hole_bytes <= start:
                continue
            if start < hole:
                yield start, hole - start
            start = hole + hole_bytes
        if start < end:
            yield start, end - start

    def find_holes(self) -> Iterator[tuple[int, int]]:
        """Ranges of what was found that were never written, or given back: start and length. They
        read as zeros, and some have no room on the device. Raises StoreError."""
        if os.fstat(self.fd).st_blocks * 512 >= self.found_bytes:
            return
        position = 0
        while position < self.found_bytes:
            hole = _seek(self.fd, position, os.SEEK_HOLE, self.found_bytes)
            position = _seek(self.fd, hole, os.SEEK_DATA, self.found_bytes)
            if position > hole:
                yield hole, position - hole

    def _populate(self, start: int, length_bytes: int) -> None:  # noqa: B027 (only memory has pages)
        """Bring the pages of a secured range into memory."""

    @abstractmethod
    def put(self, start: int, data: memoryview, crc: int) -> int:
        """Write `data` at an offset. Returns the CRC32C of the bytes that were written, continuing
        `crc`. Raises StoreError, StoreFull."""

    #: Whether `put_all` works here.
    puts_all: bool = False

    def put_all(self, starts: Sequence[int], data: Sequence[Buffer]) -> list[int]:
        """`put` each at its offset, in one call without the GIL, or in few. Returns their CRC32Cs.
        Raises StoreError, StoreFull."""
        raise NotImplementedError

    @abstractmethod
    def views(self, location: Location, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """A range of an entry's bytes, read-only, in order. Raises Damaged if the location or the
        arena is too short for it, StoreError if it can't be read."""

    def writable(self, start: int, length_bytes: int) -> memoryview | None:
        """The daemon's writable view of a range of the arena. None: the arena is not mapped."""
        return None

    @abstractmethod
    def write_header(self, incarnation: bytes, slab_bytes: int) -> None:
        """Write the arena's first page (`proto.arena_header`). Raises StoreError, StoreFull."""

    @abstractmethod
    def give_back(self, location: Location, *, at_start: bool) -> bool:
        """Give the room of slabs without entries back to the device. False: the arena keeps it
        while it is open. `at_start`: its tier has not served yet. Raises StoreError."""

    def _punch(self, location: Location) -> bool:
        for start, length_bytes in zip(location[::2], location[1::2], strict=True):
            if not punch_hole(self.fd, start, length_bytes, self._calls):
                return False
            self.holes[start] = length_bytes
            self.hole_bytes += length_bytes
            self._sorted_holes = None
        return True

    def take_back(self, location: Location) -> None:
        """Undo `give_back` for the beginnings of ranges. Raises StoreFull, StoreError."""
        for start, length_bytes in zip(location[::2], location[1::2], strict=True):
            hole_bytes = self.holes.get(start)
            if hole_bytes is None:
                continue
            with write_errors(f"take {length_bytes} bytes of room for an arena again"):
                secure_range(self.fd, start, length_bytes, self._calls)
            self._populate(start, length_bytes)
            del self.holes[start]
            self.hole_bytes -= length_bytes
            if hole_bytes > length_bytes:
                self.holes[start + length_bytes] = hole_bytes - length_bytes
            self._sorted_holes = None

    @abstractmethod
    def close(self) -> None:
        """Close `fd`. May be called twice."""

    def secure(self) -> None:
        """`secure_segments`, all at once."""
        for _ in self.secure_segments():
            pass

    def gather(self, location: Location, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of a range of an entry's bytes."""
        return b"".join(self.views(location, offset_bytes, length_bytes))

    def open_reader(self) -> int:
        """A new descriptor that can only read, for a client. The caller closes it."""
        # Reading it sets no time in the file: that is a write, which may wait for the device.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)


class NoArena(BaseArena):
    """The place of an arena whose device could not be used yet: only its sizes are known."""

    fd = -1
    found_bytes = secured_bytes = _ready_bytes = 0

    def __init__(self, size_bytes: int, max_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes
        self.holes = {}

    def _refuse(self, *_: object, **_how: object) -> Any:
        raise StoreError("the arena is not open")

    secure_segments = find_holes = put = views = write_header = give_back = take_back = _refuse
    open_reader = _refuse

    def close(self) -> None:
        pass


class Arena(BaseArena):
    """An arena in shared memory, mapped. Use `anonymous` or `file`."""

    def __init__(self, fd: int, size_bytes: int, max_bytes: int) -> None:
        """Takes over `fd`, a file of `max_bytes`."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes
        self.holes = {}
        # A new file has no pages, and `secure_segments` allocates them in order.
        self.found_bytes = _end_of_data(fd, max_bytes)
        self.size_bytes = max(size_bytes, self.found_bytes)
        self.secured_bytes = self.found_bytes
        # Pages of an earlier start may be swapped out.
        self._ready_bytes = 0
        self._mapping = mmap.mmap(fd, max_bytes)
        self._writable = memoryview(self._mapping)
        self._readable = self._writable.toreadonly()

    @classmethod
    def anonymous(cls, size_bytes: int, *, max_bytes: int = 0) -> Arena:
        """A sealed memfd, which can grow to `max_bytes` (0: it can't). Raises StoreError."""
        check_size(size_bytes)
        max_bytes = max_bytes or size_bytes
        fd = -1
        try:
            fd = os.memfd_create("prefixd-ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, max_bytes)
            arena = cls(fd, size_bytes, max_bytes)
            # Only after the arena has made its own writable mapping.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as problem:
            if fd >= 0:
                os.close(fd)
            raise StoreError(f"can't make an arena of {size_bytes} bytes: {problem}") from None
        return arena

    @classmethod
    def file(cls, path: Path, size_bytes: int, mode: int = 0o640, *, max_bytes: int = 0) -> Arena:
        """The arena in the file `path`, which can grow to `max_bytes` (0: it can't grow).

        A file that is there keeps its bytes, also if there are more of them. `mode` says who may
        read the file. Once it is mapped its write bits are removed, so that a reader can't open it
        for writing, not even as its owner. Raises StoreError, also if the file belongs to another
        user.
        """
        check_size(size_bytes)
        max_bytes = max_bytes or size_bytes
        writable, readable = mode | stat.S_IWUSR, mode & ~0o222
        fd = -1
        try:
            fd = open_own_file(path, writable)
            length_bytes = os.fstat(fd).st_size
            end = _end_of_data(fd, length_bytes)
            max_bytes = max(max_bytes, end)
            if end < length_bytes:
                # Pages that were secured and never touched. No entry was there.
                punch_hole(fd, end, length_bytes - end)
            os.ftruncate(fd, max_bytes)
            arena = cls(fd, size_bytes, max_bytes)
            os.fchmod(fd, readable)
            return arena
        except (OSError, StoreError) as problem:
            if fd >= 0:
                os.close(fd)
            raise StoreError(f"can't make the arena {path}: {problem}") from None

    def give_back(self, location: Location, *, at_start: bool) -> bool:
        """Only at a start. Memory that clients of this start may read is kept: the seals of a memfd
        forbid holes, and in a full tmpfs a late reader would get a SIGBUS for a page that is gone.
        At a start only a client that has not noticed the end of the last daemon, and is in the
        middle of a copy, could be that reader, and the tmpfs has just got room."""
        return at_start and self._punch(location)

    def _populate(self, start: int, length_bytes: int) -> None:
        """Without the GIL. Also brings pages of an earlier start back into memory."""
        with address_of(self._writable) as address:
            # Older kernels can't do it (EINVAL). They fault pages in on first use.
            _libc.madvise(address + start, length_bytes, _MADV_POPULATE_WRITE)

    def put(self, start: int, data: memoryview, crc: int) -> int:
        size_bytes = len(data)
        room = self._writable[start : start + size_bytes]
        if native or size_bytes >= RELEASE_BYTES:
            return copy_crc32c(room, data, crc)
        room[:] = data
        return crc32c(room, crc)

    puts_all = native is not None

    def put_all(self, starts: Sequence[int], data: Sequence[Buffer]) -> list[int]:
        # Saves are read much later, if at all: the cache is for whoever computes on this host.
        return native.gather(self._writable, starts, list(map(len, data)), data, True)

    def views(self, location: Location, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """Views of the arena itself, one per extent. Nothing is copied."""
        return [
            self._readable[start : start + taken_bytes]
            for start, taken_bytes in ranges(location, offset_bytes, length_bytes)
        ]

    def writable(self, start: int, length_bytes: int) -> memoryview:
        """See `BaseArena`. Never None."""
        return self._writable[start : start + length_bytes]

    def write_header(self, incarnation: bytes, slab_bytes: int) -> None:
        header = encode_arena_header(incarnation, slab_bytes)
        with write_errors("write an arena's header"):
            # Otherwise a full tmpfs would mean SIGBUS.
            secure_range(self.fd, 0, slab_bytes)
        self.writable(0, len(header))[:] = header

    def close(self) -> None:
        """Unmap, and close `fd`. While views are held, the mapping stays until the last is gone."""
        if self.fd < 0:
            return
        self._writable.release()
        self._readable.release()
        with suppress(BufferError):
            # While views are held the mapping can't be closed; it goes with the last of them.
            self._mapping.close()
        os.close(self.fd)
        self.fd = -1


class DiskArena(BaseArena):
    """The file `path`, created if it is missing, and as long as its secured part.

    It is written with `pwrite` and read with `preadv`, and never mapped. So a broken sector, a full
    device or a truncated file is an error of one call; with a mapping it would be a SIGBUS for the
    daemon.

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
        self.puts_all = native is not None
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
            return self._calls.copy_and_write(self.fd, data, start, crc)

    def put_all(self, starts: Sequence[int], data: Sequence[Buffer]) -> list[int]:
        with write_errors(f"write to {self.path}"):
            return self._calls.copy_and_write_all(self.fd, data, starts)

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

    def give_back(self, location: Location, *, at_start: bool) -> bool:
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


class ArenaWriter(EntryWriter):
    """Writes an entry to its extents: the payload, then the token ids and their CRC32C.

    The payload's CRC32C is computed from the bytes in the arena. So it also shows when a client
    changes its memory meanwhile.
    """

    # What all begin with belongs to the class: to set it in each takes time for every block.

    _written_bytes = 0
    _crc = 0
    #: Where the next byte goes: the index of the extent in the location, and its used bytes.
    _extent = 0
    _used_bytes = 0

    def __init__(
        self,
        arena: BaseArena,
        entry: Recorded,
        token_ids: bytes,
        before_first_byte: Callable[[], None],
    ) -> None:
        if len(token_ids) != entry.content.token_ids_bytes:
            raise ValueError(f"{len(token_ids)} bytes of token ids, not {entry.token_ids_bytes}")
        self.entry = entry
        #: `arena.failed_syncs` when the first byte was written.
        self.failed_syncs = arena.failed_syncs
        self._arena = arena
        self._before_first_byte = before_first_byte
        self._location = entry.location
        self._token_ids = token_ids

    @property
    def written_bytes(self) -> int:
        return self._written_bytes

    def _begin(self) -> None:
        if not self._written_bytes:
            self._before_first_byte()
            self.failed_syncs = self._arena.failed_syncs

    def write(self, data: Buffer) -> None:
        self._begin()
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        written_bytes = self._written_bytes + len(view)
        if written_bytes > self.entry.payload_bytes:
            raise ValueError(f"{written_bytes} bytes for a payload of {self.entry.payload_bytes}")
        self._crc = self._put(view, self._crc)
        self._written_bytes = written_bytes

    def resume(self, payload_crc32c: int, failed_syncs: int) -> None:
        self.failed_syncs = failed_syncs
        self._crc = payload_crc32c
        self._written_bytes = self._used_bytes = self.entry.content.payload_bytes

    def room(self, most_bytes: int) -> memoryview | None:
        self._begin()
        start, extent_bytes = self._location[self._extent : self._extent + 2]
        left_bytes = min(extent_bytes - self._used_bytes, most_bytes)
        most_bytes = min(left_bytes, self.entry.payload_bytes - self._written_bytes)
        return self._arena.writable(start + self._used_bytes, most_bytes)

    def filled(self, length_bytes: int) -> None:
        location = self._location
        start, extent_bytes = location[self._extent : self._extent + 2]
        room = self._arena.writable(start + self._used_bytes, length_bytes)
        assert room is not None, "`room` returned some"
        self._crc = crc32c(room, self._crc)
        self._written_bytes += length_bytes
        self._used_bytes += length_bytes
        if self._used_bytes == extent_bytes and self._extent + 2 < len(location):
            self._extent += 2
            self._used_bytes = 0

    def seal(self) -> int:
        if self._written_bytes != self.entry.content.payload_bytes:
            raise ValueError(f"{self._written_bytes} bytes of {self.entry.payload_bytes}")
        if not self.sealed:
            if self._token_ids:
                crc = crc32c(self._token_ids).to_bytes(TOKEN_IDS_CRC_BYTES, "little")
                self._put(memoryview(self._token_ids + crc), 0)
                self._token_ids = b""
            self.entry.payload_crc32c = self._crc
            self.sealed = True
        return self._crc

    def _put(self, data: memoryview, crc: int) -> int:
        """Write `data` after the last piece. Returns its CRC32C, continuing `crc`."""
        location = self._location
        if len(location) == 2:
            # Nearly every entry lies in one extent.
            used_bytes = self._used_bytes
            self._used_bytes = used_bytes + len(data)
            if self._used_bytes > location[1]:
                raise ValueError(f"{self._used_bytes} bytes do not fit into {location}")
            return self._arena.put(location[0] + used_bytes, data, crc)
        while data:
            start, extent_bytes = location[self._extent : self._extent + 2]
            piece = data[: extent_bytes - self._used_bytes]
            crc = self._arena.put(start + self._used_bytes, piece, crc)
            data = data[len(piece) :]
            self._used_bytes += len(piece)
            if self._used_bytes == extent_bytes:
                self._extent += 2
                self._used_bytes = 0
        return crc


def _seek(fd: int, start: int, whence: int, end: int) -> int:
    """The next hole or data from `start` on; `end` if there is none before. Raises StoreError."""
    try:
        return min(os.lseek(fd, start, whence), end)
    except OSError as problem:
        if problem.errno == errno.ENXIO:  # nothing but a hole from there on
            return end
        raise StoreError(f"can't look for holes of an arena: {problem}") from None


def _end_of_data(fd: int, length_bytes: int) -> int:
    """The end of the last page of a file of this length, or of the last huge page. Raises
    StoreError."""
    end = position = 0
    while (data := _seek(fd, position, os.SEEK_DATA, length_bytes)) < length_bytes:
        end = position = _seek(fd, data, os.SEEK_HOLE, length_bytes)
    return end


def ranges(location: Location, offset_bytes: int, length_bytes: int) -> Iterator[tuple[int, int]]:
    """A range of an entry's bytes as ranges of the arena: (start, length).

    Raises Damaged if the location is too short for it.
    """
    for start, extent_bytes in zip(location[::2], location[1::2], strict=True):
        if not length_bytes:
            return
        if offset_bytes >= extent_bytes:
            offset_bytes -= extent_bytes
            continue
        taken_bytes = min(extent_bytes - offset_bytes, length_bytes)
        yield start + offset_bytes, taken_bytes
        length_bytes -= taken_bytes
        offset_bytes = 0
    if length_bytes:
        raise Damaged(f"{length_bytes} bytes are beyond the entry's extents")


def check_slab(slab_bytes: int) -> None:
    """Raises ValueError unless an arena can have slabs of this size."""
    if slab_bytes < MIN_SLAB_BYTES or slab_bytes & (slab_bytes - 1):
        raise ValueError(f"a slab is a power of two from {MIN_SLAB_BYTES} bytes, not {slab_bytes}")


def whole_slabs(length_bytes: int, slab_bytes: int) -> int:
    """`length_bytes` rounded up to whole slabs."""
    return -(-length_bytes // slab_bytes) * slab_bytes


def check_size(size_bytes: int) -> None:
    """Raises StoreError unless an arena can have this size."""
    if size_bytes < 1 or size_bytes % MIN_SLAB_BYTES:
        raise StoreError(f"an arena has whole pages of {MIN_SLAB_BYTES} bytes, not {size_bytes}")
