"""The bytes of saves on their way in: one stream's writes, whatever rpc it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
from .writes import Piece, Write

#: Fewer bytes than this are copied at once, on the loop: a thread would take longer to wake.
_INLINE_BYTES = 1 * 2**20
#: The same of small pieces, whose copies hold the interpreter's lock in any thread.
_INLINE_SMALL_BYTES = limits.STAGED_MESSAGE_BYTES
#: Writes that are complete are told of at once when they are so large together.
_SEALED_BYTES = 16 * 2**20
#: Writes of one event: some milliseconds' worth.
_SEALED_AT_ONCE = 256
#: So many messages of one stream are copied before it is another stream's turn.
_TURN_MESSAGES = 8
#: So many messages of one stream may wait to be copied.
MAX_WAITING_MESSAGES = 64


class Turn(Protocol):
    """Something that brings bytes for some of a stream's writes."""

    @property
    def writes(self) -> Sequence[Write]:
        """The writes that it may bring bytes for, the same from being queued to `then`."""

    @property
    def tier(self) -> Tier | None:
        """The slowest that it writes to, whose device is watched meanwhile; None: it sees to that
        itself."""

    def take(self) -> PrefixdError | None:
        """Store the bytes, on any thread. Returns what breaks the stream, if anything does."""

    def then(self) -> None:
        """It has been taken. On the loop."""


@dataclass(slots=True)
class _Message:
    """Pieces that came together; `writes` are theirs, one for each."""

    writes: Sequence[Write]
    pieces: Sequence[Piece]
    then: Callable[[], None]

    @property
    def tier(self) -> Tier:
        """The slowest that it goes to. One stream brings bytes for one tier, as a rule."""
        return max((write.entry.tier for write in self.writes), default=Tier.RAM)

    def take(self) -> PrefixdError | None:
        """Copy the pieces. On any thread. Returns what breaks the stream, if anything does."""
        for write, piece in zip(self.writes, self.pieces, strict=True):
            try:
                write.take(piece)
            except PrefixdError as error:
                return error
            except Exception as problem:  # of one save; whoever waits for the others is told
                write.fail(problem)
        return None


class Incoming:
    """Feeds the pieces of one stream into the stores, in the order in which they come.

    Writes that become complete in one message are sealed in one event, if they are not very many.
    Large messages are copied on a worker thread, one after the other while the loop does other
    things: it is told of each. Turns may be taken side by side, on threads of the caller's: see
    `take_turns`.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        #: the threads that turns are taken on, and on how many; None: those of their devices
        self._executor: Executor | None = None
        self._lanes = 1
        self._loop = asyncio.get_running_loop()
        self._writes: dict[int, Write] = {}
        self._waiting: deque[Turn] = deque()
        #: one for each thread that copies
        self._copying: set[asyncio.Future[None]] = set()
        #: writes whose save has not ended
        self._open = 0
        self._all_ended: asyncio.Future[None] | None = None
        #: writes that are complete, which the state was not told yet
        self._sealed: list[Write] = []
        self._sealed_bytes = 0
        #: those that it is being told of, some in each round of the loop
        self._telling: deque[Write] = deque()
        #: what broke the stream: a piece out of order
        self.broken: PrefixdError | None = None

    def add(self, number: int, write: Write) -> None:
        """`number` is how the stream's pieces name this write."""
        self._writes[number] = write
        if write.ended is None:
            self._open += 1
            write.when_ended = self._one_ended

    def _one_ended(self) -> None:
        self._open -= 1
        if not self._open and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)

    @property
    def waiting(self) -> int:
        """Messages that nobody copies yet."""
        return len(self._waiting)

    def __contains__(self, number: object) -> bool:
        return number in self._writes

    async def feed(self, pieces: Sequence[Piece]) -> None:
        """Take the pieces of one message; those of writes that ended are skipped.

        Raises what breaks the whole stream.
        """
        self.begin(pieces, nothing)
        await self.idle()
        self.tell_sealed()
        if self.broken is not None:
            raise self.broken

    def begin(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """`feed` without waiting; `then` is called when the pieces have been copied. Has to be
        followed by `tell_sealed` before anything else is waited for."""
        message = _Message([self._writes[piece.number] for piece in pieces], pieces, then)
        if not self._copying and self._take_at_once(message):
            self._taken(message, message.take())
            return
        self._queue(message)

    async def take_turn(self, turn: Turn, *, inline: bool) -> None:
        """Take what brings its bytes itself, `inline` on the loop, else on a worker thread; returns
        when it has. One at a time."""
        if inline:
            self._taken(turn, turn.take())
        else:
            self._queue(turn)
            await self.idle()
        self.tell_sealed()

    async def take_turns(self, turns: Iterable[Turn], executor: Executor, lanes: int) -> None:
        """Take turns that bring their bytes themselves, each for other writes, on so many threads;
        returns when all are taken. `executor` has these threads free."""
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
        """On the loop: few bytes, and none for a disk."""
        stores = self._core.stores
        tiers = {write.entry.tier for write in message.writes}
        if any(stores[tier].blocking for tier in tiers):
            return False
        sizes = [len(piece.data) for piece in message.pieces]
        small = max(sizes, default=0) < RELEASE_BYTES
        return sum(sizes) <= (_INLINE_SMALL_BYTES if small else _INLINE_BYTES)

    async def idle(self) -> None:
        """Wait until nothing is being copied. A stream that is torn down meanwhile does not stop
        the thread: until it is done, the room it writes to is not given to anybody else."""
        cancelled: asyncio.CancelledError | None = None
        while self._copying:
            try:
                await asyncio.wait(self._copying)
            except asyncio.CancelledError as again:
                # However often: a stop cancels what a client that is gone cancelled already.
                cancelled = again
        if cancelled is not None:
            raise cancelled

    def _copy(self) -> None:
        # What waits for a device waits on the threads of that device.
        devices = self._core.devices
        executor = self._executor or devices.executor(self._waiting[0].tier or Tier.RAM)
        copying = self._loop.run_in_executor(executor, self._copy_some)
        self._copying.add(copying)
        copying.add_done_callback(self._copied_some)

    def _copy_some(self) -> None:
        """On a worker thread, which other streams may be waiting for: a few messages only."""
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
        """Tell the state what became of the writes of one message; of those that are complete
        only when there are many, see `tell_sealed`."""
        for write in writes:
            if write.ended is not None:
                continue
            if write.stopping:
                if not write.busy:
                    self._core.stop_write(write, SaveStatus.LOST, "the reservation was lost")
            elif write.problem is not None:
                self._core.stop_write(write, *write.problem)
            elif write.crc32c is not None and not write.told:
                write.told = True
                self._sealed.append(write)
                self._sealed_bytes += write.entry.payload_bytes
        if self._sealed_bytes >= _SEALED_BYTES:
            self.tell_sealed()

    def tell_sealed(self) -> None:
        """Tell the state of the writes that are complete: all at once, which is one event and on a
        disk one sync; of very many in a few. To be called when nothing more is there to be
        copied."""
        idle = not self._telling
        self._telling += self._sealed
        self._sealed, self._sealed_bytes = [], 0
        if idle:
            self._tell_some()

    def _tell_some(self) -> None:
        telling = self._telling
        sealed = [telling.popleft() for _ in range(min(len(telling), _SEALED_AT_ONCE))]
        # What was lost meanwhile has ended.
        columns = [
            (write.token, write.crc32c or 0, write.expected_crc32c)
            for write in sealed
            if write.ended is None
        ]
        if telling:
            # Not by whoever called: however that ends, all that is complete is told of.
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
        """The stream is over: whatever is not complete never will be."""
        for write in self._writes.values():
            if not write.complete and write.ended is None:
                self._core.stop_write(write, outcome, why)

    async def ended(self) -> dict[int, SaveEnded]:
        """How each write ended, once all did."""
        if self._open:
            self._all_ended = asyncio.get_running_loop().create_future()
            await self._all_ended
        return {number: _end_of(write) for number, write in self._writes.items()}


def _end_of(write: Write) -> SaveEnded:
    assert write.ended is not None
    return write.ended


def nothing() -> None:
    """What follows a message that nobody has to be told of."""
