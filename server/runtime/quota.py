"""Bounds on the memory that calls use in the daemon.

A call takes room before it takes bytes, and gives the room back when they are gone. Belongs to the
event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from ...proto.errors import LimitReached

#: The largest part of a quota that one session may have.
_SESSION_SHARE: Final = 0.5


class Room:
    """The room of one call."""

    def __init__(self, quota: Quota, size_bytes: int) -> None:
        self._quota = quota
        self.size_bytes: Final = size_bytes
        self._session: int | None = None

    async def belongs_to(self, session: int) -> None:
        """Count the room for a session from now on. May wait for other calls of the session. Raises
        LimitReached."""
        try:
            await self._quota.share_of(session).take(self.size_bytes)
            self._session = session
        except BaseException:
            self._quota.forget_share(session)
            raise

    def end(self) -> None:
        if self._session is not None:
            self._quota.share_of(self._session).give(self.size_bytes)
            self._quota.forget_share(self._session)


class Quota:
    """`limit_bytes` for all calls of one kind together, and a share of that for each session.

    A call that finds no room waits its turn, for `wait_s` at most. A call that is larger than the
    whole quota waits until it has the quota for itself.
    """

    def __init__(self, what: str, limit_bytes: int, wait_s: float) -> None:
        """`what`: the bytes that it bounds, for messages."""
        self.what: Final = what
        self.limit_bytes: Final = limit_bytes
        self.used_bytes = 0
        #: calls that were refused for lack of room
        self.refusals = 0
        self.wait_s = wait_s
        #: shares of the sessions that have room, or wait for it
        self._shares: dict[int, Quota] = {}
        #: waiting calls with the bytes that each needs, the oldest first
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def room(self, size_bytes: int, session: int | None = None) -> AsyncIterator[Room]:
        """Room for `size_bytes` while the context lasts. Raises LimitReached."""
        room = Room(self, size_bytes)
        try:
            if session is not None:
                await room.belongs_to(session)
            await self.take(size_bytes)
            try:
                yield room
            finally:
                self.give(size_bytes)
        finally:
            room.end()

    def share_of(self, session: int) -> Quota:
        """The quota of one session."""
        share = self._shares.get(session)
        if share is None:
            share_bytes = int(self.limit_bytes * _SESSION_SHARE)
            share = Quota(f"{self.what} of this session", share_bytes, self.wait_s)
            self._shares[session] = share
        return share

    def forget_share(self, session: int) -> None:
        """Forget the share of a session, unless one of its calls has room of it or waits for it."""
        share = self._shares.get(session)
        if share is not None and not share.used_bytes and not share._waiting:
            self.refusals += share.refusals
            del self._shares[session]

    def give(self, size_bytes: int) -> None:
        """Give back room that `take` took. Never waits."""
        self.used_bytes -= size_bytes
        self._wake()

    def _fits(self, size_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + size_bytes <= self.limit_bytes

    async def take(self, size_bytes: int) -> None:
        """Wait for room. Raises LimitReached."""
        if not self._waiting and self._fits(size_bytes):
            self.used_bytes += size_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size_bytes))
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except BaseException as problem:
            if turn.done() and not turn.cancelled():  # granted at the moment of giving up
                self.used_bytes -= size_bytes
            turn.cancel()
            self._wake()
            if isinstance(problem, TimeoutError):
                self.refusals += 1
                raise LimitReached(
                    f"the {self.limit_bytes} bytes for {self.what} were taken for {self.wait_s:g} s"
                ) from None
            raise

    def _wake(self) -> None:
        """Wake the waiting calls for which there is room now, the oldest first."""
        while self._waiting:
            turn, size_bytes = self._waiting[0]
            if turn.done():  # its call gave up
                self._waiting.popleft()
            elif self._fits(size_bytes):
                self._waiting.popleft()
                self.used_bytes += size_bytes
                turn.set_result(None)
            else:
                return
