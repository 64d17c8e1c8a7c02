"""The daemon's own memory: keeps Python's cycle collector away from the tables, and large freed
blocks for the next use, and gives unused heap back to the machine.

Entries are many, live long and refer to nothing that refers back to them: reference counting
alone frees them. The collector would still walk over all of them, and stop every thread meanwhile
(measured: 130 ms for 300,000 entries, growing with them; at a restart with a million, on another
thread than the loop, up to half a second again and again).

The heap keeps the large blocks that a burst of large messages needed, because such blocks are
needed again. Blocks that stay free for a minute go back to the machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from ..core.counters import TierCounters

log = structlog.get_logger("prefixd.heap")

#: The collector looks at young objects when so many more were made than freed. Python's own 700
#: are fewer than one batch of a recovery has: looking at each batch took a quarter of its time.
_YOUNG_OBJECTS: Final = 40_000
#: New entries that the collector may walk over: a millisecond.
_MAX_WATCHED_ENTRIES: Final = 4_000

#: How often the free heap is looked at, and how many looks in a row must find it free.
LOOK_S: Final = 15.0
_LOOKS: Final = 4
#: Less is not worth it.
_WORTH_BYTES: Final = 2 * 2**20
#: More takes so long that it waits until no call is served.
_QUICK_BYTES: Final = 64 * 2**20

#: glibc's numbers of its settings.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
#: The most that glibc allows.
_LARGEST_HEAP_BLOCK_BYTES: Final = 32 * 2**20
_KEPT_BYTES: Final = 512 * 2**20


def begin() -> None:
    """Prepare a process that will hold many entries: what is alive now is frozen."""
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.freeze()


class Freezer:
    """Hides long-lived objects from the cycle collector, from time to time."""

    def __init__(self) -> None:
        self._published = 0

    def published(self, counters: Iterable[TierCounters]) -> None:
        """Freeze what is alive if the tiers published many entries since the last time. Young
        cycles are collected before, or they would stay for ever."""
        total = sum(tier.saves + tier.recovered_entries for tier in counters)
        if total - self._published >= _MAX_WATCHED_ENTRIES:
            self._published = total
            gc.collect(1)
            gc.freeze()

    def expect(self, entries: int) -> None:
        """`entries` that a start has read come next. If they are many, their list is large: freeze
        it before the collector walks over it even once."""
        if entries >= _MAX_WATCHED_ENTRIES:
            gc.freeze()


def keep_large_blocks() -> bool:
    """Let this process reuse large freed blocks. False: the C library can't do it.

    By default glibc gives them back to the kernel, which zeroes every page when it is requested
    again. For reads of the disk tier on worker threads, whose buffers come and go, that was most
    of the time: of 240 MiB, 140 ms without and 30 ms with this. All threads share one heap, because
    blocks that a thread frees in a heap of its own are lost to the others. The process keeps at
    most 512 MiB.

    Call it before threads are started. It affects the whole process, so it is for programs, not
    for libraries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def free_heap_bytes() -> int:
    """Free bytes of this process's heap, whether they have pages or not. 0 if the C library does
    not report them."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _MallInfo
    return int(mallinfo2().fordblks)


def give_back_free_heap() -> None:
    """Give the pages of free heap memory back to the kernel. Takes 0.2 to 0.4 ms a MiB (measured);
    meanwhile a request for a block of more than 512 bytes waits."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class IdleHeap:
    """Gives back what was free at every look of a minute."""

    def __init__(self) -> None:
        self._free_bytes: deque[int] = deque(maxlen=_LOOKS)

    def look(self, *, calm: bool) -> int:
        """Look, and give back what is worth it. On a worker thread. `calm`: no call was served
        since the last look. Returns the bytes that were given back."""
        self._free_bytes.append(free_heap_bytes())
        idle_bytes = min(self._free_bytes)
        if len(self._free_bytes) < _LOOKS or idle_bytes < _WORTH_BYTES:
            return 0
        if idle_bytes > _QUICK_BYTES and not calm:
            return 0
        give_back_free_heap()
        self._free_bytes.clear()
        return idle_bytes


async def give_back_idle_heap(executor: Executor, served: Callable[[], object]) -> None:
    """Look from time to time, for ever. `served` returns another value after every served call."""
    heap, loop = IdleHeap(), asyncio.get_running_loop()
    before, collected = served(), False
    while True:
        await asyncio.sleep(LOOK_S)
        now = served()
        calm, before = now == before, now
        if calm and not collected:
            # Calls that were cut off leave cycles, which hold their messages, and Python collects
            # cycles only while new objects are made.
            gc.collect()
        collected = calm
        idle_bytes = await loop.run_in_executor(executor, partial(heap.look, calm=calm))
        if idle_bytes:
            log.debug("heap_given_back", idle_bytes=idle_bytes)
