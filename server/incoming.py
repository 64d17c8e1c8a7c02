"""The bytes of saves on their way in: one stream's writes, whatever rpc it is."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto import prefixd_pb2 as pb
from ..proto.errors import InvalidSize, MalformedMessage
from ..tiers.store import StoreError
from .effects import SaveEnded
from .events import SaveOutcome, WriteSealed
from .loop import Core, Write


@dataclass(slots=True)
class _Feed:
    """One reservation that this stream writes."""

    write: Write
    meant_crc32c: int = 0
    complete: bool = False


class Incoming:
    """Feeds the parts of one stream into the stores, in the order in which they come.

    Parts are at most one chunk long, so each is copied at once, on the loop; writes that
    become complete in one message are sealed in one event.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._feeds: dict[int, _Feed] = {}
        self._sealed: list[tuple[int, int, int]] = []

    def add(self, number: int, write: Write) -> None:
        """`number` is how the stream's parts name this write."""
        self._feeds[number] = _Feed(write)

    def __contains__(self, number: object) -> bool:
        return number in self._feeds

    def feed(self, number: int, part: pb.WritePart) -> None:
        """Take one part. A part of a write that ended already is skipped."""
        feed = self._feeds[number]
        write = feed.write
        if write.ended.done():
            return
        if feed.complete:
            raise MalformedMessage(f"write {number}: a part came after the last one")
        taken_bytes = write.writer.written_bytes
        if part.offset_bytes != taken_bytes:
            raise InvalidSize(
                f"write {number}: a part for offset {part.offset_bytes} came, "
                f"the next byte is {taken_bytes}; parts come in order and without gaps"
            )
        meant_bytes = write.order.payload_bytes
        if taken_bytes + len(part.data) > meant_bytes:
            self._wrong_length(write, f"more than the {meant_bytes} bytes reserved came")
            return
        try:
            write.writer.write(part.data)
        except StoreError as problem:
            self._core.stop_write(write, SaveOutcome.FAILED, str(problem))
            return
        if part.last:
            self._last(feed, part.payload_crc32c)

    def _last(self, feed: _Feed, meant_crc32c: int) -> None:
        write = feed.write
        taken_bytes, meant_bytes = write.writer.written_bytes, write.order.payload_bytes
        if taken_bytes != meant_bytes:
            self._wrong_length(write, f"{taken_bytes} bytes came, {meant_bytes} were reserved")
            return
        feed.complete = True
        self._sealed.append((write.order.token, write.writer.seal(), meant_crc32c))

    def _wrong_length(self, write: Write, why: str) -> None:
        self._core.stop_write(write, SaveOutcome.LENGTH_MISMATCH, why)

    def flush(self) -> None:
        """The end of a message: what is complete goes on to be published."""
        if self._sealed:
            tokens, crcs, meant = zip(*self._sealed, strict=True)
            self._sealed = []
            self._core.post(WriteSealed(tokens, crcs, meant, self._core.clock.now_ns()))

    def abandon(self, outcome: SaveOutcome, why: str) -> None:
        """The stream is over: whatever is not complete never will be."""
        self.flush()
        for feed in self._feeds.values():
            if not feed.complete:
                self._core.stop_write(feed.write, outcome, why)

    async def ended(self) -> dict[int, SaveEnded]:
        """How each write ended, once all did."""
        return {number: await feed.write.ended for number, feed in self._feeds.items()}
