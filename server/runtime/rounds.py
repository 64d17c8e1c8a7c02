"""Spreads work that comes at once over several rounds of the event loop, so that each is short.

A save over a socket is done within two or three rounds, one over gRPC takes a dozen. Where many
clients save all the time, a round that began all that had come would take as long as all of these
saves together, and a save over gRPC a dozen times as long: beside 31 savers with staging memory one
over gRPC got a sixth as much as each of them. So what comes over a socket is begun over as many
rounds as a save over gRPC takes (`docs/understand/bounds.md` has the figures).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

#: What waits is begun over so many rounds.
_SPREAD: Final = 16


class Rounds:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        #: Whether something has begun in this round.
        self._busy = False

    async def begin(self) -> None:
        """Return when it is this caller's round: at once, if nothing else has begun in this one. In
        the order of the calls."""
        loop = asyncio.get_running_loop()
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        left = -(-len(self._waiting) // _SPREAD)
        self._busy = left > 0
        while left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its caller gave up
                turn.set_result(None)
                left -= 1
        if self._busy:
            asyncio.get_running_loop().call_soon(self._next)
