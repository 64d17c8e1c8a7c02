"""Calls that may wait for a device, made by a process of their own (`tiers.file_calls_child`).

Nothing interrupts a thread that waits for a device inside a write or a sync, not even `kill -9`:
its process stays, with all descriptors that it has open, until the device answers. So the daemon
has another process make these calls. When its disk hangs, that process is left to the kernel; the
daemon ends when it should, and so do its sockets and locks.

A call on the arena has the descriptor of its lock (`own`) with it. So the lock stands until the
last call has ended: no later daemon uses the arena while an earlier one may still write to it. The
lock is a file of its own, because clients have descriptors of the arena, and could lock that.

Bytes pass through shared memory. What the page cache holds is read without the process.
"""

from __future__ import annotations

import errno
import marshal
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from ..proto.kernel import native
from ..proto.payload import copy_crc32c
from .device import wait_for_killed
from .files import PUNCH_HOLE, FileCalls
from .store import Buffer, StoreError

#: Calls at the same time: the threads of a blocking store, its committer, its probe, its recovery.
_CHANNELS: Final = 8
#: Memory of each. A call costs as much as copying some 300 KiB, so there should not be many.
_ROOM_BYTES: Final = 2**20
#: Payloads that one call writes: a request takes at most 8 KiB.
_MOST_AT_ONCE: Final = 256
_MAX_ANSWER_BYTES: Final = 4096
#: Room for one descriptor in an answer.
_CARRIED_BYTES: Final = socket.CMSG_LEN(4)
#: How long to wait for a killed process to end.
_KILLED_S: Final = 0.2
#: How long to wait for the lock of a daemon that has just ended.
_OWNED_S: Final = 2.0
_LOOK_S: Final = 0.01


class _Channel:
    """A thread of the process, and memory that both share. For one call at a time."""

    def __init__(self, connection: socket.socket, start: int, view: memoryview) -> None:
        self.connection: Final = connection
        self.start: Final = start
        self.view: Final = view

    def copy_and_write(
        self, fds: Sequence[int], data: memoryview, offset_bytes: int, crc: int
    ) -> int:
        """See `FileCalls.copy_and_write`; raises as `call`."""
        for at in range(0, len(data), len(self.view)):
            piece = data[at : at + len(self.view)]
            crc = copy_crc32c(self.view[: len(piece)], piece, crc)
            self.call(fds, "pwrite", self.start, len(piece), offset_bytes + at)
        return crc

    def call(self, fds: Sequence[int], name: str, *arguments: bytes | int | list[int]) -> Any:
        """`fds`: the file, if there is one, and its lock, if it has one. Raises OSError, and
        EOFError if the process has ended."""
        request = marshal.dumps((name, *arguments))
        try:
            socket.send_fds(self.connection, [request], fds)
            answer, carried, _, _ = self.connection.recvmsg(
                _MAX_ANSWER_BYTES, _CARRIED_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except Exception as problem:
            # Without its answer, the call may still use the channel's memory.
            raise EOFError(str(problem) or repr(problem)) from None
        except BaseException:
            # The next call must not get this one's answer.
            self.connection.shutdown(socket.SHUT_RDWR)
            raise
        if not answer:
            raise EOFError("it hung up")
        result, number = marshal.loads(answer)
        if number:
            raise OSError(number, os.strerror(number))
        return int.from_bytes(carried[0][2], sys.byteorder) if carried else result


class _Process:
    """The process, and its channels."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError."""
        self.lost = False
        #: Those that no call uses.
        self.free: Final[queue.LifoQueue[_Channel]] = queue.LifoQueue()
        self._connections: list[socket.socket] = []
        memory_fd = os.memfd_create("prefixd-calls", os.MFD_CLOEXEC)
        theirs: list[socket.socket] = []
        try:
            os.ftruncate(memory_fd, _CHANNELS * _ROOM_BYTES)
            memory = memoryview(mmap.mmap(memory_fd, _CHANNELS * _ROOM_BYTES))
            for start in range(0, len(memory), _ROOM_BYTES):
                ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._connections.append(ours)
                theirs.append(other)
                self.free.put(_Channel(ours, start, memory[start : start + _ROOM_BYTES]))
            fds = [memory_fd, *(other.fileno() for other in theirs)]
            self._process = subprocess.Popen(
                [*command, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                # Signals to the daemon's process group are not meant for it.
                start_new_session=True,
            )
        except BaseException:
            for connection in self._connections:
                connection.close()
            raise
        finally:
            os.close(memory_fd)
            for other in theirs:
                other.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def there(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill it. Calls that are under way fail. One that the device blocks is left to the
        kernel."""
        self.lost = True
        self._process.kill()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        idle: list[_Channel] = []
        with suppress(queue.Empty):
            while True:
                idle.append(self.free.get_nowait())
        for channel in idle:
            self.done(channel)
        wait_for_killed(self._process, _KILLED_S)

    def done(self, channel: _Channel) -> None:
        """No call uses it any more."""
        if self.lost:
            channel.connection.close()
        # Who waits for it learns that it is closed.
        self.free.put(channel)


class CallsApart(FileCalls):
    """The calls of a process that is started by the first of them, and again if it was lost: the
    calls that it had under way fail then, as they do if the device fails."""

    #: The command of the process, without its arguments. It imports nothing of the package.
    command: ClassVar[Sequence[str]] = (
        *(sys.executable, "-I", "-S"),
        str(Path(__file__).with_name("file_calls_child.py")),
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False
        #: The descriptors of the locks of owned files, by those of the files.
        self._locks: dict[int, int] = {}

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.there else None

    def _running(self) -> _Process:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the files are closed")
            process = self._process
            if process is not None and process.lost:
                if process.there:
                    raise OSError(errno.EIO, "the device holds a process that was killed")
                process = None
            if process is None:
                self._process = process = _Process(self.command)
            return process

    @contextmanager
    def _channel(self) -> Iterator[_Channel]:
        process = self._running()
        channel = process.free.get()
        try:
            yield channel
        except EOFError as problem:
            process.end()
            raise OSError(errno.EIO, f"the process for the disk is lost: {problem}") from None
        finally:
            process.done(channel)

    def _call(self, fd: int, name: str, *arguments: bytes | int) -> Any:
        with self._channel() as channel:
            return channel.call(self._with_lock(fd), name, *arguments)

    def _with_lock(self, fd: int) -> list[int]:
        lock_fd = self._locks.get(fd)
        return [fd] if lock_fd is None else [fd, lock_fd]

    # ---- the calls

    def copy_and_write(self, fd: int, data: memoryview, offset_bytes: int, crc: int) -> int:
        with self._channel() as channel:
            return channel.copy_and_write(self._with_lock(fd), data, offset_bytes, crc)

    def copy_and_write_all(
        self, fd: int, data: Sequence[Buffer], offsets_bytes: Sequence[int]
    ) -> list[int]:
        crcs: list[int] = []
        with self._channel() as channel:
            fds, room_bytes = self._with_lock(fd), len(channel.view)
            lengths = list(map(len, data))
            while len(crcs) < len(data):
                first = len(crcs)
                starts, last = [0], first
                while (
                    last < min(len(data), first + _MOST_AT_ONCE)
                    and starts[-1] + lengths[last] <= room_bytes
                ):
                    starts.append(starts[-1] + lengths[last])
                    last += 1
                if last == first:
                    with memoryview(data[first]) as large:
                        crcs.append(channel.copy_and_write(fds, large, offsets_bytes[first], 0))
                    continue
                some = slice(first, last)
                crcs += native.gather(channel.view, starts[:-1], lengths[some], data[some], False)
                channel.call(
                    fds, "pwrite_all", channel.start, lengths[some], list(offsets_bytes[some])
                )
        return crcs

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        with self._channel() as channel:
            fd: int = channel.call([], "open", os.fsencode(path.absolute()), flags, mode)
            return fd

    def pwrite(self, fd: int, data: bytes | memoryview, offset_bytes: int) -> int:
        with self._channel() as channel:
            length = min(len(data), len(channel.view))
            channel.view[:length] = data[:length]
            written: int = channel.call(
                self._with_lock(fd), "pwrite", channel.start, length, offset_bytes
            )
            return written

    def preadv(self, fd: int, view: memoryview, offset_bytes: int) -> int:
        # A file system may not know what it has at hand.
        with suppress(OSError):
            if cached := os.preadv(fd, [view], offset_bytes, os.RWF_NOWAIT):
                return cached
        with self._channel() as channel:
            length, fds = min(len(view), len(channel.view)), self._with_lock(fd)
            count: int = channel.call(fds, "preadv", channel.start, length, offset_bytes)
            view[:count] = channel.view[:count]
            return count

    def drop_cached(self, fd: int, start: int, length_bytes: int) -> None:
        self._call(fd, "drop_cached", start, length_bytes)

    def fsync(self, fd: int) -> None:
        self._call(fd, "fsync")

    def fdatasync(self, fd: int) -> None:
        self._call(fd, "fdatasync")

    def posix_fallocate(self, fd: int, start: int, length_bytes: int) -> None:
        self._call(fd, "posix_fallocate", start, length_bytes)

    def punch_hole(self, fd: int, start: int, length_bytes: int) -> None:
        self._call(fd, "punch_hole", PUNCH_HOLE, start, length_bytes)

    def ftruncate(self, fd: int, length_bytes: int) -> None:
        self._call(fd, "ftruncate", length_bytes)

    def fchmod(self, fd: int, mode: int) -> None:
        self._call(fd, "fchmod", mode)

    def unlink(self, path: Path) -> None:
        with self._channel() as channel:
            channel.call([], "unlink", os.fsencode(path.absolute()))

    def own(self, fd: int, path: Path) -> None:
        lock_fd = self.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _within(_OWNED_S, lambda: self._locked(lock_fd)):
                raise StoreError(
                    f"{path} is still written to by an earlier daemon, whose device does not answer"
                )
        except BaseException:
            os.close(lock_fd)
            raise
        self._locks[fd] = lock_fd

    def disown(self, fd: int) -> None:
        lock_fd = self._locks.pop(fd, None)
        if lock_fd is not None:
            os.close(lock_fd)

    def _locked(self, fd: int) -> bool:
        try:
            self._call(fd, "flock")
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.end()


def _within(limit_s: float, condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
    return True
