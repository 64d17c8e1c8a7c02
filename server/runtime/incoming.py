"""The incoming bytes of saves: one stream's writes, for every rpc and transport."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from ...proto import limits
from ...proto.errors import PrefixdError
from ...proto.payload import RELEASE_BYTES
from ...proto.vocabulary import SaveStatus, Tier
from ..core.effects import SaveEnded
from ..core.events import WriteSealed
from .loop import Core
from .writes import Piece, Write, take_whole

#: Fewer bytes than this are copied at once, on the loop: waking a thread would take longer.
_INLINE_BYTES = 1 * 2**20
#: The same for small pieces, whose copies hold the interpreter's lock in any thread.
_INLINE_SMALL_BYTES = limits.STAGED_MESSAGE_BYTES
#: Complete writes that are together so large are reported at once.
_SEALED_BYTES = 16 * 2**20
#: Complete writes in one event: some milliseconds' worth.
_SEALED_AT_ONCE = 256
#: How many messages of one stream are copied before it is another stream's turn.
_TURN_MESSAGES = 8
#: How many messages of one stream may wait to be copied.
MAX_WAITING_MESSAGES = 64


class Turn(Protocol):
    """Work that stores bytes of some of a stream's writes."""

    @property
    def writes(self) -> Sequence[Write]:
        """The writes that it may store bytes of, the same from being queued to `then`."""

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that it writes to, whose device is watched meanwhile. None: the turn has
        the device watched itself."""

    def take(self) -> PrefixdError | None:
        """Store the bytes, on any thread. Returns what breaks the stream, if anything does."""

    def then(self) -> None:
        """Called on the loop after `take`."""


@dataclass(slots=True)
class _Message:
    """Pieces that arrived together, and the write of each."""

    writes: Sequence[Write]
    pieces: Sequence[Piece]
    then: Callable[[], None]

    @property
    def tier(self) -> Tier:
        """The slowest tier among them. As a rule, one stream writes to one tier."""
        return max((write.entry.tier for write in self.writes), default=Tier.RAM)

    def take(self) -> PrefixdError | None:
        if len(self.writes) > 1 and take_whole(self.writes, self.pieces):
            return None
        for write, piece in zip(self.writes, self.pieces, strict=True):
            try:
                write.take(piece)
            except PrefixdError as error:
                return error
            except Exception as problem:  # fails one save; the others go on
                write.fail(problem)
        return None


class Incoming:
    """Feeds the pieces of one stream into the stores, in the order in which they arrive.

    Writes that one message completes are sealed in one event, if they are not very many. Large
    messages are copied on a worker thread, one after the other, while the loop goes on. Turns may
    be taken side by side, on threads of the caller: see `take_turns`.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        #: the threads that take turns, and how many of them; None: the threads of the device
        self._executor: Executor | None = None
        self._lanes = 1
        self._loop = asyncio.get_running_loop()
        self._writes: dict[int, Write] = {}
        self._waiting: deque[Turn] = deque()
        #: one future for each thread that copies
        self._copying: set[asyncio.Future[None]] = set()
        #: writes whose save has not ended
        self._open = 0
        self._all_ended: asyncio.Future[None] | None = None
        #: complete writes that are to be reported to the state
        self._sealed: list[Write] = []
        self._sealed_bytes = 0
        #: complete writes that are being reported, some in each round of the loop
        self._telling: deque[Write] = deque()
        #: what broke the stream: a piece out of order
        self.broken: PrefixdError | None = None

    def add(self, writes: Mapping[int, Write]) -> None:
        """Take in writes by their numbers, which name them in the stream's pieces."""
        self._writes.update(writes)
        some_ended = self._some_ended
        for write in writes.values():
            if write.ended is None:
                self._open += 1
                write.when_ended = some_ended

    def _some_ended(self, writes: int) -> None:
        self._open -= writes
        if not self._open and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)

    @property
    def waiting(self) -> int:
        """Messages that are not being copied yet."""
        return len(self._waiting)

    async def feed(self, pieces: Sequence[Piece]) -> None:
        """Copy the pieces of one message, except those of writes that have ended.

        Raises what breaks the whole stream.
        """
        self.begin(pieces, nothing)
        await self.idle()
        self.tell_sealed()
        if self.broken is not None:
            raise self.broken

    def begin(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """`feed` without waiting; `then` is called when the pieces have been copied. `tell_sealed`
        has to be called before the caller waits for anything else."""
        message = _Message([self._writes[piece.number] for piece in pieces], pieces, then)
        if not self._copying and self._take_at_once(message):
            self._taken(message, message.take())
        else:
            self._queue(message)

    async def take_turn(self, turn: Turn, *, inline: bool) -> None:
        """Take one turn and return when it is done: on the loop if `inline`, else on a worker
        thread. One at a time."""
        if inline:
            self._taken(turn, turn.take())
        else:
            self._queue(turn)
            await self.idle()
        self.tell_sealed()

    async def take_turns(self, turns: Iterable[Turn], executor: Executor, lanes: int) -> None:
        """Take turns, each for other writes, on `lanes` free threads of `executor`, and return when
        all are done."""
        self._executor, self._lanes = executor, lanes
        for turn in turns:
            self._queue(turn)
        await self.idle()
        self.tell_sealed()

    def write_of(self, number: int) -> Write:
        return self._writes[number]

    def _queue(self, message: Turn) -> None:
        for write in message.writes:
            write.busy += 1
        self._waiting.append(message)
        if len(self._copying) < self._lanes:
            self._copy()

    def _take_at_once(self, message: _Message) -> bool:
        """Whether to copy it on the loop: few bytes, and none for a disk."""
        stores = self._core.stores
        for tier in {write.entry.tier for write in message.writes}:
            if stores[tier].blocking:
                return False
        sizes = [len(piece.data) for piece in message.pieces]
        small = max(sizes, default=0) < RELEASE_BYTES
        return sum(sizes) <= (_INLINE_SMALL_BYTES if small else _INLINE_BYTES)

    async def idle(self) -> None:
        """Wait until nothing is being copied. Cancellation does not stop the thread that copies:
        until it is done, the room that it writes to must not be reused."""
        cancelled: asyncio.CancelledError | None = None
        while self._copying:
            try:
                await asyncio.wait(self._copying)
            except asyncio.CancelledError as again:
                # May happen again: a stop also cancels what a client cancelled by leaving.
                cancelled = again
        if cancelled is not None:
            raise cancelled

    def _copy(self) -> None:
        # A call that blocks on a device blocks a thread of that device.
        devices = self._core.devices
        executor = self._executor or devices.executor(self._waiting[0].tier or Tier.RAM)
        copying = self._loop.run_in_executor(executor, self._copy_some)
        self._copying.add(copying)
        copying.add_done_callback(self._copied_some)

    def _copy_some(self) -> None:
        """On a worker thread that other streams may be waiting for: a few messages only."""
        for _ in range(_TURN_MESSAGES):
            try:
                message = self._waiting.popleft()
            except IndexError:
                return
            if message.tier is None:
                broken = message.take()
            else:
                with self._core.devices.under_way(message.tier):
                    broken = message.take()
            self._loop.call_soon_threadsafe(self._copied, message, broken)

    def _copied(self, message: Turn, broken: PrefixdError | None) -> None:
        for write in message.writes:
            write.busy -= 1
        self._taken(message, broken)

    def _copied_some(self, copying: asyncio.Future[None]) -> None:
        self._copying.discard(copying)
        if self._waiting:
            self._copy()
        elif not self._copying:
            self.tell_sealed()

    def _taken(self, message: Turn, broken: PrefixdError | None) -> None:
        self.broken = self.broken or broken
        self._settle(message.writes)
        message.then()

    def _settle(self, writes: Sequence[Write]) -> None:
        """Report the writes of one message that failed or stopped. Complete ones are collected, and
        reported when they are many, see `tell_sealed`."""
        for write in writes:
            if write.ended is not None:
                continue
            if write.stopping:
                if not write.busy:
                    self._core.stop_write(write, SaveStatus.LOST, "the reservation was lost")
            elif write.problem is not None:
                self._core.stop_write(write, *write.problem)
            elif write.crc32c is not None and not write.reported:
                write.reported = True
                self._sealed.append(write)
                self._sealed_bytes += write.entry.content.payload_bytes
        if self._sealed_bytes >= _SEALED_BYTES:
            self.tell_sealed()

    def tell_sealed(self) -> None:
        """Report complete writes to the state, to be called when there is nothing more to copy: in
        one event, which is one sync on a disk, or in a few events if they are very many."""
        idle = not self._telling
        self._telling += self._sealed
        self._sealed, self._sealed_bytes = [], 0
        if idle:
            self._tell_some()

    def _tell_some(self) -> None:
        telling = self._telling
        sealed = [telling.popleft() for _ in range(min(len(telling), _SEALED_AT_ONCE))]
        # A write that was lost meanwhile has ended.
        columns = [
            (write.token, write.crc32c or 0, write.expected_crc32c)
            for write in sealed
            if write.ended is None
        ]
        if telling:
            # Not in the caller's task: if it ends, all complete writes are reported nevertheless.
            self._loop.call_soon(self._tell_some)
        if columns:
            tokens, crc32c, expected_crc32c = zip(*columns, strict=True)
            now_ns = self._core.clock.now_ns()
            self._core.post(WriteSealed(tokens, crc32c, expected_crc32c, now_ns))

    @asynccontextmanager
    async def to_the_end(self) -> AsyncIterator[None]:
        """Around the reading of the stream: however it ends, no write is left open."""
        try:
            try:
                yield
            finally:
                await self.idle()
                self.tell_sealed()
            if self.broken is not None:
                raise self.broken
        except PrefixdError as error:
            self.abandon(str(error))
            raise
        except BaseException:
            self.abandon("the connection broke while its bytes arrived")
            raise
        self.abandon("the stream ended before all bytes had come", SaveStatus.LENGTH_MISMATCH)

    def abandon(self, why: str, outcome: SaveStatus = SaveStatus.LOST) -> None:
        """The stream is over: incomplete writes will never be complete."""
        for write in self._writes.values():
            if not write.complete and write.ended is None:
                self._core.stop_write(write, outcome, why)

    async def ended(self) -> dict[int, SaveEnded]:
        """The result of each write, once all have ended."""
        if self._open:
            self._all_ended = asyncio.get_running_loop().create_future()
            await self._all_ended
        return {n: write.ended for n, write in self._writes.items() if write.ended is not None}


def nothing() -> None:
    """Does nothing after a message was copied."""
