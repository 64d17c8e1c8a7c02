"""The simulated machine's devices: real files in a temporary directory, accessed through a
replacement for `os` that tracks unsynced writes, injects faults and advances simulated time.

After a power loss, each sector of a disk file holds either its content at the last sync or the
content after any later write. A failed sync is worse, as on Linux: its data may be lost even if a
later sync succeeds.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.sim.world import World

SECTOR_BYTES: Final = 512


@dataclass
class Fault:
    """Makes calls on files whose path contains `part` fail, until `until_ns` and at most `times`
    times."""

    kind: str
    part: str
    until_ns: int
    rate: float
    times: int


#: The calls that each kind of fault affects.
FAULTS: Final = {
    "read error": ("pread",),
    "short read": ("pread",),
    "flipped read": ("pread",),
    "write error": ("pwrite",),
    "short write": ("pwrite",),
    "full": ("pwrite", "fallocate"),
    "sync error": ("sync",),
    "hang": ("pread", "pwrite", "sync", "fallocate"),
}


@dataclass
class _File:
    path: Path
    #: by sector: its content at the last sync, and after each write since
    unsynced: dict[int, list[bytes]] = field(default_factory=dict)
    #: by sector: its content before a failed sync, which a power loss may restore even if a later
    #: sync succeeds
    limbo: dict[int, bytes] = field(default_factory=dict)
    durable_bytes: int = 0


class Devices:
    """The files below `root`. Files in `disk` survive a power loss, files in `shm` do not."""

    def __init__(self, world: World, root: Path) -> None:
        self._world = world
        self._random = random.Random(world.random.random())
        self.disk, self.shm = root / "disk", root / "shm"
        self.disk.mkdir()
        self.shm.mkdir()
        self.faults: list[Fault] = []
        #: whether the page cache has nothing: a read that must not wait gets nothing
        self.cold = False
        #: how often each kind of fault happened
        self.happened: dict[str, int] = {}
        self._files: dict[tuple[int, int], _File | None] = {}
        #: called for every write of a process with (path, offset, length)
        self.when_written: list[Callable[[Path, int, int], None]] = []

    # ---- faults

    def fault(self, call: str, path: Path) -> str | None:
        """The kind of fault that strikes this call, if any. A hang passes its time here."""
        now_ns = self._world.now_ns
        if not self.faults:
            return None
        self.faults = [f for f in self.faults if f.until_ns > now_ns and f.times]
        for fault in self.faults:
            if (
                call in FAULTS[fault.kind]
                and fault.part in str(path)
                and self._random.random() < fault.rate
            ):
                fault.times -= 1
                self.happened[fault.kind] = self.happened.get(fault.kind, 0) + 1
                if fault.kind != "hang":
                    return fault.kind
                self._world.pass_time(max(0, fault.until_ns - now_ns))
        return None

    def flip(self, data: Any) -> bytes:
        copy = bytearray(data)
        bit = self._random.randrange(8 * len(copy))
        copy[bit // 8] ^= 1 << bit % 8
        return bytes(copy)

    # ---- durability

    def file_of(self, fd: int) -> _File | None:
        """The simulated file behind a descriptor. None: it is not on a simulated device."""
        found = os.fstat(fd)
        number = found.st_dev, found.st_ino
        if number not in self._files:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            ours = path.is_relative_to(self.disk) or path.is_relative_to(self.shm)
            self._files[number] = _File(path) if ours and path.is_file() else None
        return self._files[number]

    def before_write(self, file: _File, fd: int, offset: int, length: int) -> range:
        """Remember the content that a write is about to replace. Returns the sectors."""
        sectors = range(offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES))
        for sector in sectors:
            if sector not in file.unsynced:
                file.unsynced[sector] = [os.pread(fd, SECTOR_BYTES, sector * SECTOR_BYTES)]
        return sectors

    def after_write(self, file: _File, fd: int, sectors: range) -> None:
        for sector in sectors:
            file.unsynced[sector].append(os.pread(fd, SECTOR_BYTES, sector * SECTOR_BYTES))

    def synced(self, file: _File, fd: int) -> None:
        for sector in file.unsynced:
            file.limbo.pop(sector, None)
        file.unsynced.clear()
        file.durable_bytes = os.fstat(fd).st_size

    def sync_failed(self, file: _File) -> None:
        """The kernel marks the pages clean although they were not stored."""
        for sector, versions in file.unsynced.items():
            file.limbo.setdefault(sector, versions[0])
        file.unsynced.clear()

    def lose_power(self) -> None:
        """Replace all files by what the devices kept. All processes are already dead."""
        draw = self._random
        for number, file in self._files.items():
            if file is None or not file.path.is_relative_to(self.disk) or not file.path.exists():
                continue
            found = file.path.stat()
            if (found.st_dev, found.st_ino) != number:
                continue  # it was removed, and another file has its name
            fd = os.open(file.path, os.O_RDWR) if file.path.stat().st_mode & 0o200 else None
            if fd is None:
                file.path.chmod(0o600)
                fd = os.open(file.path, os.O_RDWR)
            try:
                found_bytes = os.fstat(fd).st_size
                for sector, versions in file.unsynced.items():
                    base = file.limbo.get(sector)
                    choices = versions if base is None else [base, *versions]
                    os.pwrite(fd, draw.choice(choices), sector * SECTOR_BYTES)
                for sector, base in file.limbo.items():
                    if sector not in file.unsynced and draw.random() < 0.5:
                        os.pwrite(fd, base, sector * SECTOR_BYTES)
                if found_bytes > file.durable_bytes and draw.random() < 0.5:
                    os.ftruncate(fd, file.durable_bytes)
                else:
                    os.ftruncate(fd, found_bytes)
                file.durable_bytes = os.fstat(fd).st_size
            finally:
                os.close(fd)
            file.unsynced.clear()
            file.limbo.clear()
        for path in sorted(self.shm.rglob("*")):
            if path.is_file():
                path.unlink()
        self._files = {n: f for n, f in self._files.items() if f and f.path.exists()}


class SimOs:
    """`os` for simulated processes. Calls on files outside the simulated devices pass through."""

    def __init__(self, world: World, devices: Devices) -> None:
        self._world = world
        self._devices = devices

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def urandom(self, size: int) -> bytes:
        return self._world.entropy.randbytes(size) if self._world.here() else os.urandom(size)

    def _ours(self, fd: int) -> _File | None:
        return self._devices.file_of(fd) if self._world.here() else None

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        file = self._ours(fd)
        if file is None:
            return os.pwrite(fd, data, offset)
        self._world.operate(5_000)
        fault = self._devices.fault("pwrite", file.path)
        if fault == "write error":
            raise OSError(errno.EIO, "on purpose")
        if fault == "full":
            raise OSError(errno.ENOSPC, "on purpose")
        if fault == "short write" and len(data) > 1:
            data = data[: len(data) // 2]
        for callback in self._devices.when_written:
            callback(file.path, offset, len(data))
        sectors = self._devices.before_write(file, fd, offset, len(data))
        written = os.pwrite(fd, data, offset)
        self._devices.after_write(file, fd, sectors)
        self._world.operate(5_000)
        return written

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        file = self._ours(fd)
        if file is None:
            return os.pread(fd, size, offset)
        self._world.operate(5_000)
        fault = self._devices.fault("pread", file.path)
        if fault == "read error":
            raise OSError(errno.EIO, "on purpose")
        data = os.pread(fd, size, offset)
        return self._devices.flip(data) if fault == "flipped read" and data else data

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        file = self._ours(fd)
        if file is None:
            return os.preadv(fd, buffers, offset, flags)
        self._world.operate(5_000)
        if self._devices.cold and flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "not in the page cache")
        fault = self._devices.fault("pread", file.path)
        if fault == "read error":
            raise OSError(errno.EIO, "on purpose")
        buffer = buffers[0]
        if fault == "short read" and len(buffer) > 1:
            buffer = buffer[: len(buffer) // 2]
        count = os.preadv(fd, [buffer], offset)
        if fault == "flipped read" and count:
            buffer[:count] = self._devices.flip(buffer[:count])
        self._world.operate(5_000)
        return count

    def _sync(self, fd: int, real: Callable[[int], None]) -> None:
        file = self._ours(fd)
        if file is None:
            real(fd)
            return
        self._world.operate(200_000)
        if self._devices.fault("sync", file.path) == "sync error":
            self._devices.sync_failed(file)
            raise OSError(errno.EIO, "on purpose")
        self._devices.synced(file, fd)
        self._world.synced()
        self._world.operate(50_000)

    def fdatasync(self, fd: int) -> None:
        self._sync(fd, os.fdatasync)

    def fsync(self, fd: int) -> None:
        self._sync(fd, os.fsync)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        file = self._ours(fd)
        if file is not None:
            self._world.operate(20_000)
            if self._devices.fault("fallocate", file.path) == "full":
                raise OSError(errno.ENOSPC, "on purpose")
        os.posix_fallocate(fd, offset, length)
