"""Plain file I/O with the errors of the store contract.

`calls` are those that change files, and may wait for the device: `HERE`, or those of a process that
may hang in the place of this one (`file_calls`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..proto.payload import copy_crc32c
from .store import Buffer, StoreError, StoreFull

#: Errors of a device without room: a full file system, a quota or limit, a tmpfs without memory.
FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM))
#: Errors of a file system that can't reserve blocks.
_NO_FALLOCATE: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))
_ZEROS: Final = bytes(2**20)
#: linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
PUNCH_HOLE: Final = 0x01 | 0x02
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@contextmanager
def write_errors(what: str) -> Iterator[None]:
    """OSError becomes StoreFull or StoreError: "can't `what`: ..."."""
    try:
        yield
    except OSError as problem:
        kind = StoreFull if problem.errno in FULL_ERRORS else StoreError
        raise kind(f"can't {what}: {problem}") from None


class FileCalls:
    """Calls that may wait for a device, as those of `os`: here by the calling thread itself. They
    raise OSError. Thread-safe."""

    def copy_and_write(self, fd: int, data: memoryview, offset_bytes: int, crc: int) -> int:
        """Write `data`, whose memory others may change, and return the CRC32C of what was written,
        continuing `crc`: it is copied first."""
        with memoryview(bytearray(len(data))) as copied:
            crc = copy_crc32c(copied, data, crc)
            pwrite_all(fd, copied, offset_bytes, self)
        return crc

    def copy_and_write_all(
        self, fd: int, data: Sequence[Buffer], offsets_bytes: Sequence[int]
    ) -> list[int]:
        """`copy_and_write` each at its offset, in as few calls as possible. Returns the CRC32C of
        each. Only where there is the native kernel, which makes it fast."""
        crcs = []
        for each, offset_bytes in zip(data, offsets_bytes, strict=True):
            with memoryview(each) as view:
                crcs.append(self.copy_and_write(fd, view, offset_bytes, 0))
        return crcs

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        return os.open(path, flags, mode)

    def pwrite(self, fd: int, data: bytes | memoryview, offset_bytes: int) -> int:
        return os.pwrite(fd, data, offset_bytes)

    def preadv(self, fd: int, view: memoryview, offset_bytes: int) -> int:
        return os.preadv(fd, [view], offset_bytes)

    def drop_cached(self, fd: int, start: int, length_bytes: int) -> None:
        """Let the next read of whole pages in this range ask the device, if they are synced."""
        os.posix_fadvise(fd, start, length_bytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def posix_fallocate(self, fd: int, start: int, length_bytes: int) -> None:
        os.posix_fallocate(fd, start, length_bytes)

    def punch_hole(self, fd: int, start: int, length_bytes: int) -> None:
        """Give the blocks of a range back to the device."""
        if _libc.fallocate(fd, PUNCH_HOLE, start, length_bytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def ftruncate(self, fd: int, length_bytes: int) -> None:
        os.ftruncate(fd, length_bytes)

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def own(self, fd: int, path: Path) -> None:
        """No other process may still change this file. Raises StoreError if one does."""

    def disown(self, fd: int) -> None:
        """The file is about to be closed."""

    def close(self) -> None:
        """No calls follow. Waits for none that is under way."""


#: The calls of this process.
HERE: Final = FileCalls()


def open_own_file(path: Path, mode: int, calls: FileCalls = HERE) -> int:
    """A descriptor for reading and writing. A missing file is created with `mode`.

    A file that is there gets `mode` first: an earlier start may have left it without write bits.
    Reading it sets no time in it, because that is a write, which may wait for the device. Raises
    OSError, and StoreError for anything but a regular file of this user.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        pass
    else:
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise StoreError(f"{path} is not a file of this user")
            calls.fchmod(fd, mode)
        finally:
            os.close(fd)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME
    return calls.open(path, flags, mode)


def pwrite_all(
    fd: int, data: bytes | memoryview, offset_bytes: int, calls: FileCalls = HERE
) -> None:
    """`os.pwrite` until everything is written. Raises OSError."""
    written_bytes = calls.pwrite(fd, data, offset_bytes)
    if written_bytes == len(data):
        return
    view = memoryview(data)
    while written_bytes < len(view):
        written_bytes += calls.pwrite(fd, view[written_bytes:], offset_bytes + written_bytes)


def pread_into(fd: int, view: memoryview, offset_bytes: int, calls: FileCalls = HERE) -> int:
    """Fill `view`, and return the bytes read: fewer at the end of the file. Raises OSError."""
    read_bytes = 0
    while read_bytes < len(view):
        count = calls.preadv(fd, view[read_bytes:], offset_bytes + read_bytes)
        if not count:
            break
        read_bytes += count
    return read_bytes


def secure_range(fd: int, start: int, length_bytes: int, calls: FileCalls = HERE) -> None:
    """Reserve blocks of the device for a range of the file, and extend the file to hold it.

    Keeps what is written there. Where the file system can't reserve blocks, zeros are written
    behind the end of the file. Raises OSError; the file may be longer then.
    """
    try:
        calls.posix_fallocate(fd, start, length_bytes)
    except OSError as problem:
        if problem.errno not in _NO_FALLOCATE:
            raise
        position, end = max(start, os.fstat(fd).st_size), start + length_bytes
        while position < end:
            position += calls.pwrite(fd, memoryview(_ZEROS)[: end - position], position)


def punch_hole(fd: int, start: int, length_bytes: int, calls: FileCalls = HERE) -> bool:
    """Give the blocks of a range of the file back to its device. The range reads as zeros then.
    False: the file system can't do it. Raises OSError."""
    try:
        calls.punch_hole(fd, start, length_bytes)
    except OSError as problem:
        if problem.errno in _NO_FALLOCATE:
            return False
        raise
    return True


def cut_file(fd: int, length_bytes: int, calls: FileCalls = HERE) -> None:
    """Shorten the file if it is longer. Raises OSError."""
    if os.fstat(fd).st_size > length_bytes:
        calls.ftruncate(fd, length_bytes)


def sync_directory(path: Path, calls: FileCalls = HERE) -> None:
    """Make the names of the files in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        os.close(fd)


def sync_parents(path: Path, calls: FileCalls = HERE) -> None:
    """Make the path of a directory durable: the parents on its device that this user can write to.
    Raises OSError."""
    device = path.stat().st_dev
    for parent in path.absolute().parents:
        if parent.stat().st_dev != device or not os.access(parent, os.R_OK | os.W_OK):
            return
        sync_directory(parent, calls)


def check_linked(fd: int, path: Path) -> None:
    """Raises StoreError if the file was deleted, because writes to it would be lost."""
    if not os.fstat(fd).st_nlink:
        raise StoreError(f"{path} was deleted while it was in use")
