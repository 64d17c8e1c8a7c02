"""Bounds on the memory that calls use in the daemon: how much it may be, in fair shares
(`core.shares`), and how slowly a client may move bytes while it holds memory that others wait for.

A call takes room before it takes bytes, and gives the room back when they are gone. Belongs to the
event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from ...proto.errors import LimitReached
from ..core.shares import Holder, Shares

#: A transfer that moves fewer bytes a second than this, over a whole stall timeout, stands still.
MIN_BYTES_PER_S: Final = 16 * 2**10


class CallRoom:
    """The room of one call."""

    def __init__(self, quota: Quota, size_bytes: int, holder: Holder) -> None:
        self._quota = quota
        self.size_bytes: Final = size_bytes
        #: Whose it is now.
        self.holder = holder

    async def belongs_to(self, holder: Holder) -> None:
        """Count the room for this session of the same tenant from now on. May wait for other calls
        of the session. Raises LimitReached."""
        await self._quota.move(self, holder)


class _Waiting(NamedTuple):
    turn: asyncio.Future[None]
    size_bytes: int
    #: Room that is to become that of the session. None: the call has no room yet.
    room: CallRoom | None


class Quota:
    """`limit_bytes` for all calls of one kind together, in fair shares.

    A call that finds no room waits, for `wait_s` at most. Sessions have their turns one after the
    other, and the calls of each session in the order in which they came. A call that is larger
    than the whole quota waits until it has the quota for itself.
    """

    def __init__(self, what: str, limit_bytes: int, wait_s: float) -> None:
        """`what`: the bytes that it bounds, for messages."""
        self.what: Final = what
        self.limit_bytes: Final = limit_bytes
        self.shares: Final = Shares(f"bytes for {what}", limit_bytes)
        #: Calls that were refused for lack of room.
        self.refusals = 0
        self.wait_s = wait_s
        #: The waiting calls of each holder, the oldest first. Whose turn is next comes first.
        self._waiting: dict[Holder, deque[_Waiting]] = {}

    @property
    def used_bytes(self) -> int:
        return self.shares.used

    @asynccontextmanager
    async def room(self, size_bytes: int, holder: Holder = Holder()) -> AsyncIterator[CallRoom]:  # noqa: B008  # it is immutable
        """Room for `size_bytes` while the context lasts. Raises LimitReached."""
        room = CallRoom(self, size_bytes, holder)
        await self.take(size_bytes, holder)
        try:
            yield room
        finally:
            self.give(size_bytes, room.holder)

    def give(self, size_bytes: int, holder: Holder = Holder()) -> None:  # noqa: B008
        """Give back room that `take` took. Never waits."""
        self.shares.give(holder, size_bytes)
        self._wake()

    async def take(self, size_bytes: int, holder: Holder = Holder()) -> None:  # noqa: B008
        """Wait for room. Raises LimitReached."""
        if not self._waiting and self.shares.may_take(holder, size_bytes):
            self.shares.add(holder, size_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await self._wait(holder, _Waiting(turn, size_bytes, None))
        except BaseException:
            if turn.done() and not turn.cancelled():  # granted at the moment of giving up
                self.give(size_bytes, holder)
            raise

    async def move(self, room: CallRoom, holder: Holder) -> None:
        """Wait until this session may have room that its tenant holds. Raises LimitReached."""
        if self.shares.may_keep(holder, room.size_bytes):
            self._move(room, holder)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._wait(holder, _Waiting(turn, room.size_bytes, room))

    def _move(self, room: CallRoom, holder: Holder) -> None:
        self.shares.give(room.holder, room.size_bytes)
        self.shares.add(holder, room.size_bytes)
        room.holder = holder

    async def _wait(self, holder: Holder, waiting: _Waiting) -> None:
        self._waiting.setdefault(holder, deque()).append(waiting)
        self._wake()
        try:
            async with asyncio.timeout(self.wait_s):
                await waiting.turn
        except BaseException as problem:
            waiting.turn.cancel()
            self._wake()
            if isinstance(problem, TimeoutError):
                self.refusals += 1
                raise LimitReached(
                    f"{self.shares.why(holder)}; waited {self.wait_s:g} s for room"
                ) from None
            raise

    def _wake(self) -> None:
        """Wake the calls for which there is room now: one of each holder, again and again."""
        granted = True
        while granted:
            granted = False
            for holder in list(self._waiting):
                calls = self._waiting[holder]
                while calls and calls[0].turn.done():  # its call gave up
                    calls.popleft()
                if calls:
                    if self._comes_first(holder, calls[0]):
                        return
                    if not self._grant(holder, calls[0]):
                        continue  # it holds its share: others go before it
                    calls.popleft().turn.set_result(None)
                    granted = True
                # Its turn is over: the others come first.
                del self._waiting[holder]
                if calls:
                    self._waiting[holder] = calls

    def _comes_first(self, holder: Holder, waiting: _Waiting) -> bool:
        """Whether nobody may go before this call: a large one would never find room if smaller
        ones always did. A holder that has room already keeps no others from theirs."""
        if waiting.room is not None or self.shares.has_room(waiting.size_bytes):
            return False
        return not self.shares.held_by(holder)

    def _grant(self, holder: Holder, waiting: _Waiting) -> bool:
        if waiting.room is not None:
            if not self.shares.may_keep(holder, waiting.size_bytes):
                return False
            self._move(waiting.room, holder)
            return True
        if not self.shares.may_take(holder, waiting.size_bytes):
            return False
        self.shares.add(holder, waiting.size_bytes)
        return True


class Pace:
    """The time for which a transfer may wait for its client. It begins again with each
    `stall_s * MIN_BYTES_PER_S` bytes: a byte now and then does not hold room for ever. Only waiting
    for the client counts, not what the daemon takes itself."""

    def __init__(self, stall_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.stall_s: Final = stall_s
        self._enough_bytes = max(1, int(stall_s * MIN_BYTES_PER_S))
        self._now_s = now_s
        self._moved_bytes = 0
        self._waited_s = 0.0

    def moved(self, size_bytes: int) -> None:
        """So many bytes were moved since the last call."""
        self._moved_bytes += size_bytes
        if self._moved_bytes >= self._enough_bytes:
            self._moved_bytes, self._waited_s = 0, 0.0

    def waited(self, seconds: float) -> None:
        """It was waited for the client for so long."""
        self._waited_s += seconds

    @property
    def left_s(self) -> float:
        """How long the transfer may still wait."""
        return max(0.0, self.stall_s - self._waited_s)

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Around a wait for the client, which may take the yielded time. Raises LimitReached when
        none is left, also in place of a TimeoutError."""
        left_s, began_s = self.left_s, self._now_s()
        if not left_s:
            raise self.error()
        try:
            yield left_s
        except TimeoutError:
            raise self.error() from None
        finally:
            self.waited(self._now_s() - began_s)

    def error(self) -> LimitReached:
        """What a client is told that is too slow."""
        return LimitReached(
            f"the client stood still: it moved fewer than {self._enough_bytes} bytes while it was "
            f"waited for it for {self.stall_s:g} s"
        )
