"""Reads of a disk that may have to wait for the device.

A device that hangs blocks whoever reads from it, for as long as it hangs. So the caller's thread
takes only what is in the page cache (`RWF_NOWAIT`), straight into the caller's buffer. The rest is
read here: by a few threads, into memory of their own, while the caller waits until its deadline.
What arrives later is dropped with that memory, so nothing is written into a buffer after its call
has ended.

While one read takes longer than `STUCK_S`, the device counts as hung, and other reads fail at once.
So a hung device costs each client a few calls their deadline, and at most `MAX_THREADS` threads
with `PIECE_BYTES` each. Reads of what is in the page cache fail as well: `RWF_NOWAIT` may start to
read ahead, and would then wait for a place in the device's queue if that is full.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from ...proto.errors import DeadlineExceeded
from ...proto.payload import unset_bytearray
from ..thread_pool import ThreadPool
from ..wire.deadline import Deadline

MAX_THREADS: Final = 4
PIECE_BYTES: Final = 2**20
#: Pieces that are read ahead of the one that the caller takes.
_AHEAD: Final = 4
#: A device that needs longer for one piece is as good as hung.
STUCK_S: Final = 1.0

#: Reads at an offset into some buffers, and returns the number of bytes, as `os.preadv`.
ReadInto = Callable[[int, Sequence[bytearray | memoryview], int], int]


class DeviceHangs(OSError):
    """The disk does not answer other reads at this moment, so this one was not begun."""


class _Piece:
    """One range of a file. Its thread fills it; the caller takes it, or leaves it."""

    __slots__ = ("began_s", "data", "left", "length_bytes", "problem", "start")

    def __init__(self, start: int, length_bytes: int) -> None:
        self.start = start
        self.length_bytes = length_bytes
        self.began_s: float | None = None
        #: Its caller has given up.
        self.left = False
        self.data: bytearray | None = None
        #: The arguments of an OSError, which itself would refer to the frames that it passed, and
        #: so to this piece and to the arena.
        self.problem: tuple[object, ...] | None = None

    @property
    def done(self) -> bool:
        return self.data is not None or self.problem is not None


class DiskReads:
    """The threads of one client that wait for its disk. Thread-safe."""

    def __init__(self, read: ReadInto = os.preadv) -> None:
        self._read = read
        self._threads = ThreadPool("prefixd-disk", MAX_THREADS)
        self._changed = threading.Condition()
        #: Those that a thread reads at this moment.
        self._under_way: set[_Piece] = set()

    @property
    def stuck(self) -> bool:
        """Does a read take so long that the device must be hanging?"""
        if not self._under_way:
            return False  # nearly always
        before_s = time.monotonic() - STUCK_S
        with self._changed:
            return any(piece.began_s < before_s for piece in self._under_way if piece.began_s)

    def pieces(
        self, owner: object, fd: int, ranges: Sequence[tuple[int, int]], deadline: Deadline
    ) -> Iterator[bytearray]:
        """The bytes of these ranges, each a start and a length, in order, in pieces. `owner` keeps
        `fd` open, and is kept until its last read has ended. Raises TimeoutError, DeviceHangs and
        any other OSError."""
        wanted = (
            _Piece(at, min(PIECE_BYTES, start + length_bytes - at))
            for start, length_bytes in ranges
            for at in range(start, start + length_bytes, PIECE_BYTES)
        )
        ahead: deque[_Piece] = deque()
        try:
            while True:
                while len(ahead) < _AHEAD and (piece := next(wanted, None)) is not None:
                    self._begin(owner, fd, piece)
                    ahead.append(piece)
                if not ahead:
                    return
                data = self._taken(ahead[0], deadline)
                ahead.popleft()
                yield data
        finally:
            for piece in ahead:
                piece.left = True

    def check_answers(self) -> None:
        """Raises DeviceHangs while the device hangs."""
        if self.stuck:
            raise DeviceHangs("the disk has not answered an earlier read")

    def _begin(self, owner: object, fd: int, piece: _Piece) -> None:
        self.check_answers()
        # The queue, and then the thread, refers to `owner` until the read has ended.
        if not self._threads.submit(partial(self._fill, owner, fd, piece)):
            raise OSError("no thread can read from the disk")

    def _fill(self, owner: object, fd: int, piece: _Piece) -> None:  # noqa: ARG002  # kept
        """In a thread."""
        if piece.left:
            return
        with self._changed:
            piece.began_s = time.monotonic()
            self._under_way.add(piece)
        problem: tuple[object, ...] | None = None
        data, at = unset_bytearray(piece.length_bytes), 0
        try:
            with memoryview(data) as room:
                while at < piece.length_bytes:
                    read_bytes = self._read(fd, [room[at:]], piece.start + at)
                    if not read_bytes:
                        raise OSError("the file does not hold so many bytes")
                    at += read_bytes
        except OSError as failed:
            problem = failed.args
        with self._changed:
            self._under_way.discard(piece)
            if problem is None:
                piece.data = data
            piece.problem = problem
            self._changed.notify_all()

    def _taken(self, piece: _Piece, deadline: Deadline) -> bytearray:
        with self._changed:
            try:
                deadline.wait_for(self._changed, lambda: piece.done)
            except DeadlineExceeded as late:
                raise TimeoutError(str(late)) from None
        if piece.problem is not None:
            raise OSError(*piece.problem)
        assert piece.data is not None
        return piece.data

    def close(self) -> None:
        """Begin no more reads. Waits for none of those under way."""
        self._threads.close()

    def join(self, timeout_s: float) -> bool:
        """After `close`: wait for the threads. False: not all of them ended in time."""
        return self._threads.join(timeout_s)
