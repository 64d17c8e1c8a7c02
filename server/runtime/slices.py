"""Long work on the event loop, in pieces between which everything else happens."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import structlog

from ..core.state import MetaState

T = TypeVar("T")

log = structlog.get_logger("prefixd.recounting")

#: A call of a client takes some rounds of the loop, and waits for one slice in each.
SLICE_NS: Final = 2_000_000
#: How many items are sorted at once: well below a slice.
_SORTED_AT_ONCE: Final = 2_048


class Slices:
    """Call `pause` between two steps: when a slice is over, it lets the loop run once."""

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


async def recount(state: MetaState) -> tuple[list[str], int]:
    """Recount the state while the daemon serves. Returns the problems as sentences, and how many
    there are: of very many, only the first are listed. Never raises: a recount that fails is a
    problem, too."""
    with state.recount() as counting:
        try:
            await Slices().through(counting.steps())
        except Exception as problem:
            log.critical("recount_failed", exc_info=problem)
            return [*counting.problems, f"the recount failed: {problem!r}"], counting.found + 1
    return counting.problems, counting.found
