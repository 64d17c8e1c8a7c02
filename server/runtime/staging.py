"""Staging memory: where clients on this host put the bytes of their saves.

Each session has a memfd of its own. The daemon makes it and seals it against resizing, so that no
client can make the daemon fault by shrinking it. The client writes into it whenever it likes; the
daemon only copies out of it, and trusts the checksum of its copy, not the memory.

The total is bounded. The more sessions there are, the smaller are their areas, in powers of two,
and none is more than twice as large as another. An area that no save uses for a while is taken
back, and so is one that is larger than others could have now. The client is not informed, so its
next save from there is refused: it goes over gRPC, and then the client asks for an area again.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import add
from typing import Final

from ...proto.errors import UnknownStaging
from ...tiers.arena import SIZE_SEALS
from ...tiers.files import HERE
from .clock import Clock
from .limited_log import LimitedLog

log = LimitedLog("prefixd.staging")

#: An area that was unused for so long gives its memory back; after half of that, if another session
#: needs it.
IDLE_S: Final = 60
_IDLE_NS: Final = IDLE_S * 10**9
#: No area is divided into smaller ones than this.
MIN_AREA_BYTES: Final = 2**20


class Staging:
    """One session's staging memory. It owns `fd`, which the client gets a duplicate of."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("prefixd-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            self._mapping = mmap.mmap(self.fd, size_bytes, prot=mmap.PROT_READ)
        except OSError:
            os.close(self.fd)
            raise
        self._view = memoryview(self._mapping)
        self._ended = False
        self._unmapped = False

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Bytes that the client wrote. Raises UnknownStaging beyond the end of the memory, and
        after `end`."""
        if self._ended:
            raise UnknownStaging("the session that this staging memory belonged to is over")
        if offset_bytes + length_bytes > self.size_bytes:
            raise UnknownStaging(
                f"bytes {offset_bytes} to {offset_bytes + length_bytes} of staging memory are "
                f"named, it has {self.size_bytes}"
            )
        return self._view[offset_bytes : offset_bytes + length_bytes]

    def views(self, offsets: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """`view` of each range."""
        if not self._ended and max(map(add, offsets, lengths), default=0) <= self.size_bytes:
            view = self._view
            return [
                view[offset : offset + length]
                for offset, length in zip(offsets, lengths, strict=True)
            ]
        return list(map(self.view, offsets, lengths))

    @property
    def resident_bytes(self) -> int:
        """Memory that is allocated to it."""
        return os.fstat(self.fd).st_blocks * 512

    def end(self) -> None:
        """Refuse further views. Idempotent."""
        self._ended = True
        self._view.release()

    def unmap(self) -> None:
        """Call after `end`, on any thread; takes up to a second, without the interpreter's lock. A
        copy that still runs keeps the mapping until it is done. Idempotent."""
        if self._unmapped:
            return
        self._unmapped = True
        with suppress(BufferError):  # then it goes with the last view
            self._mapping.close()
        os.close(self.fd)

    def close(self) -> None:
        """`end`, then `unmap`. Idempotent."""
        self.end()
        self.unmap()


def _change(event: str, fd: int, size_bytes: int, call: Callable[[int, int, int], None]) -> None:
    """Allocate the memory of a memfd, or take it away, and close `fd`. On a worker thread; takes
    milliseconds, without the interpreter's lock."""
    try:
        call(fd, 0, size_bytes)
    except OSError as problem:
        log.warning(event, problem=problem.strerror)
    finally:
        os.close(fd)


@dataclass(slots=True)
class _Area:
    """A session's staging memory in the pool."""

    memory: Staging
    used_ns: int
    #: saves that are being copied out of it
    copies: int = 0


class StagingPool:
    """The staging memory of all sessions, `total_bytes` at most. Belongs to the event loop."""

    def __init__(self, area_bytes: int, total_bytes: int, executor: Executor, clock: Clock) -> None:
        """`area_bytes`: the largest area."""
        self.area_bytes: Final = area_bytes
        self.total_bytes: Final = total_bytes
        #: memory of all areas
        self.used_bytes = 0
        #: areas that were refused because all memory was in use
        self.refusals = 0
        self._executor = executor
        self._clock = clock
        self._areas: dict[int, _Area] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._areas)

    def __contains__(self, session: object) -> bool:
        return session in self._areas

    def open(self, session: int) -> Staging:
        """The memory of a session, made by the first call and populated in the background.

        Raises UnknownStaging when other sessions use all of it; OSError.
        """
        area = self._areas.get(session)
        if area is None:
            size_bytes = self._part_bytes(len(self._areas) + 1)
            self._make_room(size_bytes)
            area = self._areas[session] = _Area(Staging(size_bytes), self._clock.now_ns())
            self.used_bytes += size_bytes
            self._look_again()
            # A descriptor of its own: the session may end meanwhile.
            fd = os.dup(area.memory.fd)
            self._executor.submit(
                _change, "staging_not_populated", fd, size_bytes, os.posix_fallocate
            )
        return area.memory

    @contextmanager
    def using(self, session: int) -> Iterator[Staging]:
        """The memory of a session, for one save; it stays meanwhile. Raises UnknownStaging."""
        area = self._areas.get(session)
        if area is None:
            raise UnknownStaging(
                "this session has no staging memory, or has none any more; save this over gRPC"
            )
        area.copies += 1
        try:
            yield area.memory
        finally:
            area.copies -= 1
            area.used_ns = self._clock.now_ns()

    def close(self, session: int) -> None:
        """The session is over. Idempotent."""
        if session in self._areas:
            self._unmap(self._take_out(session))

    def close_all(self) -> None:
        """The daemon stops."""
        if self._timer is not None:
            self._timer.cancel()
        for session in list(self._areas):
            self._take_out(session).close()

    def give_back_idle(self, idle_ns: int = _IDLE_NS) -> None:
        """Take back the areas that were unused for `idle_ns`."""
        now_ns = self._clock.now_ns()
        for session, area in list(self._areas.items()):
            if not area.copies and now_ns - area.used_ns >= idle_ns:
                self._take_back(session)

    def _part_bytes(self, sessions: int) -> int:
        """The size of an area when so many sessions have one."""
        size_bytes = self.area_bytes
        while size_bytes * sessions > self.total_bytes and size_bytes >= 2 * MIN_AREA_BYTES:
            size_bytes //= 2
        return size_bytes - size_bytes % mmap.PAGESIZE

    def _take_out(self, session: int) -> Staging:
        memory = self._areas.pop(session).memory
        self.used_bytes -= memory.size_bytes
        return memory

    def _unmap(self, memory: Staging) -> None:
        memory.end()
        unmapped = self._executor.submit(memory.unmap)
        # An executor that ends does not run what waits.
        unmapped.add_done_callback(lambda _: memory.unmap())

    def _take_back(self, session: int) -> None:
        """Take an area from a session that lives on. Its client may keep the mapping, but not these
        pages."""
        memory = self._take_out(session)
        fd = os.dup(memory.fd)
        self._executor.submit(
            _change, "staging_not_given_back", fd, memory.size_bytes, HERE.punch_hole
        )
        self._unmap(memory)

    def _look_again(self) -> None:
        """Set the timer that finds idle memory."""
        if self._timer is None and self.used_bytes:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S / 4, self._due)

    def _due(self) -> None:
        self._timer = None
        self.give_back_idle()
        self._look_again()

    def _make_room(self, size_bytes: int) -> None:
        """Have memory for one more area: take back areas that were idle for long, and those that
        are larger. Raises UnknownStaging."""
        while self.used_bytes + size_bytes > self.total_bytes:
            session = self._dispensable(size_bytes)
            if session is None:
                self.refusals += 1
                raise UnknownStaging(
                    f"other sessions use the {self.total_bytes} bytes of staging memory; save over "
                    "gRPC"
                )
            self._take_back(session)

    def _dispensable(self, size_bytes: int) -> int | None:
        """The session that may lose its area for one of this size: the longest idle one, or, if
        none is idle for long, the one of which that is true among those with larger areas."""
        free = [session for session, area in self._areas.items() if not area.copies]
        oldest = min(free, key=lambda each: self._areas[each].used_ns, default=None)
        if oldest is None:
            return None
        if self._clock.now_ns() - self._areas[oldest].used_ns >= _IDLE_NS // 2:
            return oldest
        larger = [each for each in free if self._areas[each].memory.size_bytes > size_bytes]
        return min(larger, key=lambda each: self._areas[each].used_ns, default=None)
