"""One shared mapping in which entries lie in extents, and what writes an entry into it.

The daemon maps an arena once for writing; everybody else maps it read-only. Two kinds:

`Arena.anonymous`
    A memfd, sealed as soon as the daemon's own mapping exists: with F_SEAL_FUTURE_WRITE the
    kernel refuses every other writable mapping, write and hole punch, with F_SEAL_SHRINK and
    F_SEAL_GROW every change of the size, with F_SEAL_SEAL every other seal, through whatever
    descriptor it is tried. So no reader can corrupt a byte, and none can make another one
    fault on a page that is gone.
`Arena.file`
    A file in /dev/shm, which a restart finds again. Such files take no seals: what keeps
    readers from more is a descriptor that was opened read-only, and the file's owner and mode.
    It never shrinks under a reader: a smaller arena is a new file.

Pages are real memory before anything is written to them (`secure`). A full /dev/shm is
therefore an answer when the arena is made, not a SIGBUS when it is used, and no save pays
for a first touch (measured: 0.4 GB/s with, 12-19 GB/s without).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..proto.copying import address_of, copy, copy_crc32c
from ..proto.record import RecordHead
from .store import Buffer, EntryWriter, Location, StoreError, StoreFull

DEFAULT_SLAB_BYTES: Final = 64 * 2**10
MIN_SLAB_BYTES: Final = 4096
#: What is secured at once: about 30 ms on a machine that has the memory at hand.
SEGMENT_BYTES: Final = 64 * 2**20

_F_SEAL_SEAL: Final = 0x01
_F_SEAL_SHRINK: Final = 0x02
_F_SEAL_GROW: Final = 0x04
_F_SEAL_FUTURE_WRITE: Final = 0x10
SEALS: Final = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
#: Linux 5.14: faults pages in for writing as an answer, never as a signal.
_MADV_POPULATE_WRITE: Final = 23
#: What a device without room answers: a full file system, a quota or limit, no memory.
FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A shared mapping of `size_bytes`, of which `secured_bytes` from the start are memory.

    `fd` belongs to the arena. Writing to one range is for one thread at a time; everything
    else may be used from any.
    """

    def __init__(self, fd: int, size_bytes: int, *, reused: bool) -> None:
        """Takes over `fd`. Use `anonymous` or `file`."""
        self.fd = fd
        self.size_bytes: Final = size_bytes
        #: Is this a file that an earlier daemon left, with its bytes?
        self.reused: Final = reused
        # Pages are only ever allocated in order, by `secure_segments`.
        self.secured_bytes = min(os.fstat(fd).st_blocks * 512, size_bytes) if reused else 0
        self._mapping = mmap.mmap(fd, size_bytes)
        self._writable = memoryview(self._mapping)
        self._readable = self._writable.toreadonly()

    @classmethod
    def anonymous(cls, size_bytes: int, name: str = "prefixd-ram") -> Arena:
        """A sealed memfd. `name` is what /proc shows. Raises StoreError."""
        _check_size(size_bytes)
        fd = -1
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size_bytes)
            arena = cls(fd, size_bytes, reused=False)
            # After the one mapping that may write was made.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as problem:
            if fd >= 0:
                os.close(fd)
            raise StoreError(f"can't make an arena of {size_bytes} bytes: {problem}") from None
        return arena

    @classmethod
    def file(cls, path: Path, size_bytes: int, mode: int = 0o640) -> Arena:
        """The arena in the file `path`, with its bytes if it is there and no larger than this.

        A larger one is replaced by a new file; who still maps the old one keeps it. `mode` says
        who may read it: a file takes no seals, but once it is mapped it has no mode for writing,
        so that a reader can't open it anew for that, not even as its owner. Raises StoreError,
        also if the file belongs to somebody else.
        """
        _check_size(size_bytes)
        writable, readable = mode | stat.S_IWUSR, mode & ~0o222
        fd = -1
        try:
            found_bytes = _make_writable(path, writable)
            if found_bytes > size_bytes:
                path.unlink()
                found_bytes = 0
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, writable)
            os.ftruncate(fd, size_bytes)
            arena = cls(fd, size_bytes, reused=found_bytes > 0)
            os.fchmod(fd, readable)
            return arena
        except (OSError, StoreError) as problem:
            if fd >= 0:
                os.close(fd)
            raise StoreError(f"can't make the arena {path}: {problem}") from None

    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        """Turn the arena into real memory, segment by segment; yields `secured_bytes` after each.

        Meant for a background thread: each step runs without the GIL. Raises StoreFull when the
        device has no more room; what was secured stays.
        """
        done_bytes = 0
        while done_bytes < self.size_bytes:
            length_bytes = min(segment_bytes, self.size_bytes - done_bytes)
            try:
                os.posix_fallocate(self.fd, done_bytes, length_bytes)
            except OSError as problem:
                if problem.errno not in FULL_ERRORS:
                    raise StoreError(f"can't secure an arena: {problem}") from None
                raise StoreFull(
                    f"room for {self.secured_bytes} of the {self.size_bytes} bytes of an arena: "
                    f"{problem.strerror}"
                ) from None
            with address_of(self._writable[done_bytes : done_bytes + length_bytes]) as address:
                # Older kernels don't have it (EINVAL); then pages are faulted in on first use.
                _libc.madvise(address, length_bytes, _MADV_POPULATE_WRITE)
            done_bytes += length_bytes
            self.secured_bytes = max(self.secured_bytes, done_bytes)
            yield self.secured_bytes

    def secure(self) -> None:
        """`secure_segments`, all at once."""
        for _ in self.secure_segments():
            pass

    def views(self, location: Location, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """Read-only views of a range of an entry's bytes, one per extent. Nothing is copied.

        Raises StoreError if the location does not hold so many bytes.
        """
        views: list[memoryview] = []
        for start, extent_bytes in zip(location[::2], location[1::2], strict=True):
            if not length_bytes:
                break
            if offset_bytes >= extent_bytes:
                offset_bytes -= extent_bytes
                continue
            taken_bytes = min(extent_bytes - offset_bytes, length_bytes)
            begin = start + offset_bytes
            views.append(self._readable[begin : begin + taken_bytes])
            length_bytes -= taken_bytes
            offset_bytes = 0
        if length_bytes:
            raise StoreError(f"{length_bytes} bytes are beyond the entry's extents")
        return views

    def gather(self, location: Location, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of a range of an entry's bytes."""
        return b"".join(self.views(location, offset_bytes, length_bytes))

    def writable(self, start: int, length_bytes: int) -> memoryview:
        """The daemon's own view of a range of the arena."""
        return self._writable[start : start + length_bytes]

    def open_reader(self) -> int:
        """A new descriptor that can only read, for a client. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap, and close `fd`. While views are held, the mapping stays until the last is gone."""
        if self.fd < 0:
            return
        self._writable.release()
        self._readable.release()
        with suppress(BufferError):
            # Views that are still held keep the mapping alive; it goes with them.
            self._mapping.close()
        os.close(self.fd)
        self.fd = -1


class ArenaWriter(EntryWriter):
    """Writes an entry through its extents: what comes `before`, the payload, what comes `after`.

    `after` is given the payload's CRC32C, which is computed over the arena's own bytes.
    """

    def __init__(
        self,
        arena: Arena,
        head: RecordHead,
        location: Location,
        *,
        before: bytes,
        after: Callable[[int], bytes],
    ) -> None:
        self.head = head
        self.location = location
        self._arena = arena
        self._before = before
        self._after = after
        self._written_bytes = 0
        self._crc = 0
        self._sealed = False
        #: where the next byte goes: the extent, and what is used of it
        self._extent = 0
        self._used_bytes = 0

    @property
    def written_bytes(self) -> int:
        return self._written_bytes

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if self._written_bytes + len(view) > self.head.payload_bytes:
            raise ValueError(
                f"{self._written_bytes + len(view)} bytes for a payload of "
                f"{self.head.payload_bytes}"
            )
        self._put(self._before)
        self._before = b""
        for room, piece in self._rooms(view):
            self._crc = copy_crc32c(room, piece, self._crc)
        self._written_bytes += len(view)

    def seal(self) -> int:
        if self._written_bytes != self.head.payload_bytes:
            raise ValueError(f"{self._written_bytes} bytes of {self.head.payload_bytes}")
        if not self._sealed:
            self._put(self._after(self._crc))
            self._sealed = True
        return self._crc

    def _put(self, data: bytes) -> None:
        for room, piece in self._rooms(memoryview(data)):
            copy(room, piece)

    def _rooms(self, data: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
        """`data` in pieces, each with the place in the arena where it goes."""
        while data:
            start, extent_bytes = self.location[self._extent : self._extent + 2]
            piece = data[: extent_bytes - self._used_bytes]
            yield self._arena.writable(start + self._used_bytes, len(piece)), piece
            data = data[len(piece) :]
            self._used_bytes += len(piece)
            if self._used_bytes == extent_bytes:
                self._extent += 2
                self._used_bytes = 0


def check_slab(slab_bytes: int) -> None:
    """Raises ValueError unless arenas can be divided into such slabs."""
    if slab_bytes < MIN_SLAB_BYTES or slab_bytes & (slab_bytes - 1):
        raise ValueError(f"a slab is a power of two from {MIN_SLAB_BYTES} bytes, not {slab_bytes}")


def whole_slabs(length_bytes: int, slab_bytes: int) -> int:
    """`length_bytes` rounded up to whole slabs."""
    return -(-length_bytes // slab_bytes) * slab_bytes


def _make_writable(path: Path, mode: int) -> int:
    """The size of a file that an earlier daemon left, 0 without one. Raises OSError, StoreError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise StoreError(f"{path} is not a file of this user")
        os.fchmod(fd, mode)
        return found.st_size
    finally:
        os.close(fd)


def _check_size(size_bytes: int) -> None:
    if size_bytes < 1 or size_bytes % MIN_SLAB_BYTES:
        raise StoreError(f"an arena has whole pages of {MIN_SLAB_BYTES} bytes, not {size_bytes}")
