"""Gives back memory that nobody uses: what a burst of large messages left in the heap.

The heap keeps large blocks, because they come again (`tiers/heap.py`). When they don't come for a
minute, the machine has them.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

import structlog

from ...tiers.heap import free_heap_bytes, give_back_free_heap

log = structlog.get_logger("prefixd.heap")

#: How often it is looked at, and how many looks in a row have to find memory free.
LOOK_S: Final = 15.0
_LOOKS: Final = 4
#: Less is not worth it.
_WORTH_BYTES: Final = 2 * 2**20
#: More takes so long that it waits until nobody is served.
_QUICK_BYTES: Final = 64 * 2**20


class IdleHeap:
    """What was free at every look of a minute is given back."""

    def __init__(self) -> None:
        self._free_bytes: deque[int] = deque(maxlen=_LOOKS)

    def look(self, *, calm: bool) -> int:
        """Look, and give back what is worth it. On a worker thread. The bytes that were free for
        all the time, 0 if they stay. `calm`: nobody was served since the last look."""
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
    """Look from time to time, for ever. `served`: returns something else after every call that
    was served."""
    heap, loop = IdleHeap(), asyncio.get_running_loop()
    before, collected = served(), False
    while True:
        await asyncio.sleep(LOOK_S)
        now = served()
        calm, before = now == before, now
        if calm and not collected:
            # Calls that were cut off leave cycles, which hold their messages, and Python looks for
            # cycles only while something is made.
            gc.collect()
        collected = calm
        idle_bytes = await loop.run_in_executor(executor, partial(heap.look, calm=calm))
        if idle_bytes:
            log.debug("heap_given_back", idle_bytes=idle_bytes)
