"""Plain file I/O with the errors of the store contract."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .store import StoreError, StoreFull

#: Errors of a device without room: a full file system, a quota or limit, a tmpfs without memory.
FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM))
#: Errors of a file system that can't reserve blocks.
_NO_FALLOCATE: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))
_ZEROS: Final = bytes(2**20)
#: linux/falloc.h
_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
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


def open_own_file(path: Path, mode: int) -> int:
    """A descriptor for reading and writing. A missing file is created with `mode`.

    A file that is there gets `mode` first: an earlier start may have left it without write bits.
    Raises OSError, and StoreError for anything but a regular file of this user.
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
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def pwrite_all(fd: int, data: bytes | memoryview, offset_bytes: int) -> None:
    """`os.pwrite` until everything is written. Raises OSError."""
    written_bytes = os.pwrite(fd, data, offset_bytes)
    if written_bytes == len(data):
        return
    view = memoryview(data)
    while written_bytes < len(view):
        written_bytes += os.pwrite(fd, view[written_bytes:], offset_bytes + written_bytes)


def pread_into(fd: int, view: memoryview, offset_bytes: int) -> int:
    """Fill `view`, and return the bytes read: fewer at the end of the file. Raises OSError."""
    read_bytes = 0
    while read_bytes < len(view):
        count = os.preadv(fd, [view[read_bytes:]], offset_bytes + read_bytes)
        if not count:
            break
        read_bytes += count
    return read_bytes


def secure_range(fd: int, start: int, length_bytes: int) -> None:
    """Reserve blocks of the device for a range of the file, and extend the file to hold it.

    Keeps what is written there. Where the file system can't reserve blocks, zeros are written
    behind the end of the file. Raises OSError; the file may be longer then.
    """
    try:
        os.posix_fallocate(fd, start, length_bytes)
    except OSError as problem:
        if problem.errno not in _NO_FALLOCATE:
            raise
        position, end = max(start, os.fstat(fd).st_size), start + length_bytes
        while position < end:
            position += os.pwrite(fd, memoryview(_ZEROS)[: end - position], position)


def punch_hole(fd: int, start: int, length_bytes: int) -> bool:
    """Give the blocks of a range of the file back to its device. The range reads as zeros then.
    False: the file system can't do it. Raises OSError."""
    if not _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, length_bytes):
        return True
    number = ctypes.get_errno()
    if number in _NO_FALLOCATE:
        return False
    raise OSError(number, os.strerror(number))


def cut_file(fd: int, length_bytes: int) -> None:
    """Shorten the file if it is longer. Raises OSError."""
    if os.fstat(fd).st_size > length_bytes:
        os.ftruncate(fd, length_bytes)


def sync_directory(path: Path) -> None:
    """Make the names of the files in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_parents(path: Path) -> None:
    """Make the path of a directory durable: the parents on its device that this user can write to.
    Raises OSError."""
    device = path.stat().st_dev
    for parent in path.absolute().parents:
        if parent.stat().st_dev != device or not os.access(parent, os.R_OK | os.W_OK):
            return
        sync_directory(parent)


def check_linked(fd: int, path: Path) -> None:
    """Raises StoreError if the file was deleted, because writes to it would be lost."""
    if not os.fstat(fd).st_nlink:
        raise StoreError(f"{path} was deleted while it was in use")
