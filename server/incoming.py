"""The bytes of saves on their way in: one stream's writes, whatever rpc it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..proto.errors import InvalidSize, MalformedMessage, PrefixdError
from ..tiers.store import Buffer, StoreError
from .effects import SaveEnded
from .events import SaveOutcome, WriteSealed
from .loop import Core, Write

#: Fewer bytes than this are copied at once, on the loop: a thread would take longer to wake.
_INLINE_BYTES = 1 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one write, as a stream named it. `offset_bytes` None: whatever comes next."""

    number: int
    data: Buffer
    last: bool
    payload_crc32c: int
    offset_bytes: int | None = None


@dataclass(slots=True)
class _Feed:
    """One reservation that this stream writes."""

    write: Write
    meant_crc32c: int = 0
    #: the last piece came
    complete: bool = False
    #: of what the store took; set when it is sealed, taken when that is told
    crc32c: int | None = None
    problem: tuple[SaveOutcome, str] | None = None

    def take(self, piece: Piece) -> None:
        """Copy one piece. On any thread, but one at a time. Raises what breaks the stream."""
        if self.problem is not None or self.write.stopping:
            return
        if self.complete:
            raise MalformedMessage(f"write {piece.number}: a part came after the last one")
        writer = self.write.writer
        taken_bytes, meant_bytes = writer.written_bytes, self.write.order.payload_bytes
        if piece.offset_bytes not in (None, taken_bytes):
            raise InvalidSize(
                f"write {piece.number}: a part for offset {piece.offset_bytes} came, "
                f"the next byte is {taken_bytes}; parts come in order and without gaps"
            )
        if taken_bytes + len(piece.data) > meant_bytes:
            why = f"more than the {meant_bytes} bytes reserved came"
            self.problem = (SaveOutcome.LENGTH_MISMATCH, why)
            return
        try:
            writer.write(piece.data)
        except (StoreError, MemoryError) as problem:
            self.problem = (SaveOutcome.FAILED, str(problem) or "there is no memory for it")
            return
        if piece.last:
            self._last(piece)

    def _last(self, piece: Piece) -> None:
        writer = self.write.writer
        taken_bytes, meant_bytes = writer.written_bytes, self.write.order.payload_bytes
        if taken_bytes != meant_bytes:
            why = f"{taken_bytes} bytes came, {meant_bytes} were reserved"
            self.problem = (SaveOutcome.LENGTH_MISMATCH, why)
            return
        self.complete = True
        self.meant_crc32c = piece.payload_crc32c
        self.crc32c = writer.seal()


class Incoming:
    """Feeds the pieces of one stream into the stores, in the order in which they come.

    Writes that become complete in one message are sealed in one event.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._feeds: dict[int, _Feed] = {}

    def add(self, number: int, write: Write) -> None:
        """`number` is how the stream's pieces name this write."""
        self._feeds[number] = _Feed(write)

    def __contains__(self, number: object) -> bool:
        return number in self._feeds

    async def feed(self, pieces: Sequence[Piece]) -> None:
        """Take the pieces of one message; those of writes that ended are skipped.

        Raises what breaks the whole stream: a piece out of order.
        """
        feeds = [self._feeds[piece.number] for piece in pieces]
        try:
            if sum(len(piece.data) for piece in pieces) <= _INLINE_BYTES:
                broken = _take_all(feeds, pieces)
            else:
                broken = await self._take_elsewhere(feeds, pieces)
        finally:
            self._settle(feeds)
        if broken is not None:
            raise broken

    async def _take_elsewhere(
        self, feeds: Sequence[_Feed], pieces: Sequence[Piece]
    ) -> PrefixdError | None:
        """Copy on a worker thread. A stream that is torn down meanwhile does not stop the
        thread: until it is done, the room it writes to is not given to anybody else."""
        for feed in feeds:
            feed.write.busy = True
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._core.executor, _take_all, feeds, pieces)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # However often: a stop cancels what a client that is gone cancelled already.
            while not copying.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            raise
        finally:
            for feed in feeds:
                feed.write.busy = False

    def _settle(self, feeds: Sequence[_Feed]) -> None:
        """Tell the state what became of the writes of one message."""
        sealed: list[tuple[int, int, int]] = []
        for feed in {id(feed): feed for feed in feeds}.values():
            write = feed.write
            if write.ended.done():
                continue
            if write.stopping:
                self._core.stop_write(write, SaveOutcome.LOST, "the reservation was lost")
            elif feed.problem is not None:
                self._core.stop_write(write, *feed.problem)
            elif feed.crc32c is not None:
                sealed.append((write.order.token, feed.crc32c, feed.meant_crc32c))
                feed.crc32c = None
        if sealed:
            tokens, crcs, meant = zip(*sealed, strict=True)
            self._core.post(WriteSealed(tokens, crcs, meant, self._core.clock.now_ns()))

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Around the reading of the stream: however it ends, no write is left open."""
        try:
            yield
        except PrefixdError as error:
            self._abandon(SaveOutcome.LOST, str(error))
            raise
        except BaseException:
            self._abandon(SaveOutcome.LOST, "the connection broke while its bytes arrived")
            raise
        self._abandon(SaveOutcome.LENGTH_MISMATCH, "the stream ended before all bytes had come")

    def _abandon(self, outcome: SaveOutcome, why: str) -> None:
        """The stream is over: whatever is not complete never will be."""
        for feed in self._feeds.values():
            if not feed.complete:
                self._core.stop_write(feed.write, outcome, why)

    async def ended(self) -> dict[int, SaveEnded]:
        """How each write ended, once all did."""
        return {number: await feed.write.ended for number, feed in self._feeds.items()}


def _take_all(feeds: Sequence[_Feed], pieces: Sequence[Piece]) -> PrefixdError | None:
    """Copy pieces; returns what breaks the stream, if anything does."""
    for feed, piece in zip(feeds, pieces, strict=True):
        try:
            feed.take(piece)
        except PrefixdError as error:
            return error
    return None
