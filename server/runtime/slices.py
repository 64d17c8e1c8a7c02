"""Work on the event loop that would take long, in pieces between which everything else happens."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

#: A call of a client takes some rounds of the loop, and waits for one slice in each.
SLICE_NS: Final = 2_000_000
#: Sorted at once: well below a slice.
_SORTED_AT_ONCE: Final = 2_048


class Slices:
    """Call `pause` between two steps: it waits for a round of the loop when a slice is over."""

    def __init__(self) -> None:
        self._end_ns = time.monotonic_ns() + SLICE_NS

    async def pause(self) -> None:
        if time.monotonic_ns() >= self._end_ns:
            await asyncio.sleep(0)
            self._end_ns = time.monotonic_ns() + SLICE_NS

    async def through(self, steps: Iterable[object]) -> None:
        """Take all the steps."""
        for _ in steps:
            await self.pause()

    async def in_order(self, items: Sequence[T], key: Callable[[T], int]) -> Iterator[T]:
        """The items, the smallest key first. Sorting a million at once would take a second."""
        parts = []
        for start in range(0, len(items), _SORTED_AT_ONCE):
            parts.append(sorted(items[start : start + _SORTED_AT_ONCE], key=key))
            await self.pause()
        return heapq.merge(*parts, key=key)
