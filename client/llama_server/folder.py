"""The folder through which slot files go, in memory.

Only this process and llama-server, which runs as the same user, can look into it. A file has a
random name and is gone once it was read: what llama-server is given was written here, and what it
wrote is mapped before anything else can change it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_BEGINS: Final = "prefixd-"
_OWN: Final = "prefixd-llama-server-"
_LOCK: Final = "lock"
MEMORY: Final = Path("/dev/shm")


class UnsafeFolder(Exception):
    """Other users could write what llama-server reads, or another proxy uses the folder."""


class SlotFolder:
    """A folder that llama-server has as `--slot-save-path`. Removes what an earlier proxy left."""

    def __init__(self, path: Path) -> None:
        """Raises UnsafeFolder, OSError."""
        self.path = path
        self._remove = False
        self._used: set[str] = set()
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(self._lock)
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UnsafeFolder(
                    f"{path} has to belong to this user, and only this user may write to it"
                )
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UnsafeFolder(f"another prefixd-llama-server uses {path}") from None
        except BaseException:
            os.close(self._lock)
            raise
        self._sweep()

    def _sweep(self) -> None:
        """Remove slot files that nobody uses: of an earlier proxy, and of a save that llama-server
        made after it was given up."""
        for each in self.path.iterdir():
            ours = each.name.startswith(_BEGINS) and each.suffix == ".bin"
            if ours and each.name not in self._used:
                each.unlink(missing_ok=True)

    @classmethod
    def temporary(cls, within: Path = MEMORY) -> SlotFolder:
        """A folder of its own in memory, removed by `close`. Removes those of this user that no
        process holds any more. Raises OSError."""
        own = within / f"{_OWN}{os.geteuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        with _locked(own):
            for each in own.iterdir():
                if each.is_dir() and not _held(each):
                    shutil.rmtree(each, ignore_errors=True)
            path = own / secrets.token_hex(8)
            path.mkdir(mode=0o700)
            folder = cls(path)
        folder._remove = True
        return folder

    @contextmanager
    def name(self) -> Iterator[str]:
        """A name for a file, which is gone when the block ends. What llama-server still writes
        under it then is gone when somebody takes the next name."""
        self._sweep()
        name = f"{_BEGINS}{secrets.token_hex(16)}.bin"
        self._used.add(name)
        try:
            yield name
        finally:
            self._unlink(name)

    def create(self, name: str, size_bytes: int) -> memoryview:
        """The memory of a new zeroed file to write. The room is there: without it raises OSError,
        and no write ends this process."""
        descriptor = self._open(name)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return memoryview(mmap.mmap(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    def replace(self, name: str, other: str) -> None:
        """Let a file take the place of another one."""
        (self.path / name).replace(self.path / other)

    @contextmanager
    def offer(self) -> Iterator[str]:
        """The `name` of a new empty file that llama-server is to fill, and nobody else can open."""
        with self.name() as name:
            os.close(self._open(name))
            yield name

    def take(self, name: str) -> memoryview:
        """What llama-server wrote, read-only; the file has no name any more."""
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._unlink(name)
            if not os.fstat(descriptor).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Leave the folder, and remove it if it was made here."""
        if self._remove:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self.path / name, flags, 0o600)

    def _unlink(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)
        self._used.discard(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UnsafeFolder(f"{folder} has to be a folder of this user alone (mode 0700)")
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _held(folder: Path) -> bool:
    """Whether a process uses the folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
