"""Keeps each round of the event loop short: long work is done in slices, between which everything
else happens (`Slices`), and work that comes at once is spread over several rounds (`Rounds`).

A save through staging memory is done within two or three rounds, one whose bytes come over a socket
takes some more, one over gRPC a dozen. Where many clients save all the time, a round that began all
that had come would take as long as all of these saves together, and a save over gRPC a dozen times
as long: beside 31 savers with staging memory one over gRPC got a sixth as much as each of them. So
what comes over a socket is begun over as many rounds as a save over gRPC takes, and what takes more
rounds afterwards has its turn so many rounds earlier (`docs/understand/bounds.md` has the figures).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Final

import structlog

from ..core.state import MetaState

log = structlog.get_logger("prefixd.recounting")

#: A call of a client takes some rounds of the loop, and waits for one slice in each.
SLICE_NS: Final = 2_000_000
#: What waits is begun over so many rounds.
_SPREAD: Final = 16


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


class Rounds:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        #: By the round in which each came, less those that it takes afterwards; then in order.
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._round = 0
        #: Whether something has begun in this round.
        self._busy = False

    async def begin(self, rounds_after: int = 0) -> None:
        """Return when it is this caller's round: at once, if nothing else has begun in this one. In
        the order of the calls, where one that takes `rounds_after` rounds counts as so much
        earlier. So nobody is overtaken for longer than that."""
        loop = asyncio.get_running_loop()
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        heappush(self._waiting, (self._round - rounds_after, next(self._numbers), turn))
        await turn

    def _next(self) -> None:
        self._round += 1
        left = -(-len(self._waiting) // _SPREAD)
        self._busy = left > 0
        while left and self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.done():  # its caller gave up
                turn.set_result(None)
                left -= 1
        if self._busy:
            asyncio.get_running_loop().call_soon(self._next)
