"""Saves under way: the bytes of each on their way into its store, and who is told when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import structlog

from ...proto.errors import InvalidSize, MalformedMessage
from ...proto.vocabulary import SaveStatus
from ...tiers.store import Buffer, Store, StoreError
from ..core.effects import SaveEnded, WriteOrder

log = structlog.get_logger("prefixd.writes")


class Piece(NamedTuple):
    """Bytes of one write, as a stream named it. `offset_bytes` None: whatever comes next."""

    number: int
    data: Buffer
    last: bool
    payload_crc32c: int
    offset_bytes: int | None = None


class Write:
    """One reservation that a stream writes.

    `busy` counts the messages that other threads copy into its room, now or soon: a lost
    reservation then keeps its room until that ended. `ended` says how the save did, once it has;
    `when_ended` is called then. `call`: for which call it is, where calls are traced.
    """

    __slots__ = (
        "busy",
        "call",
        "complete",
        "crc32c",
        "ended",
        "entry",
        "expected_crc32c",
        "problem",
        "stopping",
        "token",
        "told",
        "when_ended",
        "writer",
    )

    def __init__(self, order: WriteOrder, store: Store) -> None:
        """Opens the store's writer."""
        self.token, self.entry, token_ids = order
        self.writer = store.writer(self.entry, token_ids)
        self.busy = 0
        self.call: object | None = None
        self.stopping = False
        self.ended: SaveEnded | None = None
        self.when_ended: Callable[[], None] | None = None
        #: the last piece came
        self.complete = False
        #: CRC32C of the bytes that the store took; set when the write is sealed
        self.crc32c: int | None = None
        self.expected_crc32c = 0
        #: the state was told so, or is to be soon
        self.told = False
        self.problem: tuple[SaveStatus, str] | None = None

    def take(self, piece: Piece) -> None:
        """Copy one piece. On any thread, but one at a time.

        Raises PrefixdError for what breaks the stream, anything else for what ends the write.
        """
        if self.problem is not None or self.stopping:
            return
        number, data, last, payload_crc32c, offset_bytes = piece
        if self.complete:
            raise MalformedMessage(f"write {number}: a part came after the last one")
        writer = self.writer
        taken_bytes, payload_bytes = writer.written_bytes, self.entry.payload_bytes
        if offset_bytes is not None and offset_bytes != taken_bytes:
            raise InvalidSize(
                f"write {number}: a part for offset {offset_bytes} came, "
                f"the next byte is {taken_bytes}; parts come in order and without gaps"
            )
        if taken_bytes + len(data) > payload_bytes:
            why = f"more than the {payload_bytes} bytes reserved came"
            self.problem = (SaveStatus.LENGTH_MISMATCH, why)
            return
        writer.write(data)
        if last:
            self.finish(payload_crc32c)

    def fail(self, problem: Exception) -> None:
        """The store could not take a piece."""
        match problem:
            case StoreError():
                why = str(problem)
            case MemoryError():
                why = "there is no memory for it"
            case _:
                why = f"the daemon failed: {problem!r}"
                log.error("write_failed", key=self.entry.key.hex(), exc_info=problem)
        self.problem = (SaveStatus.FAILED, why)

    def finish(self, payload_crc32c: int | None) -> None:
        """The last byte has come. `payload_crc32c`: what the payload has to have; None: any.
        Raises StoreError."""
        writer = self.writer
        if writer.written_bytes != self.entry.payload_bytes:
            self.mismatched(writer.written_bytes)
            return
        self.complete = True
        self.crc32c = crc32c = writer.seal()
        self.expected_crc32c = crc32c if payload_crc32c is None else payload_crc32c

    def mismatched(self, came_bytes: int) -> None:
        """Fewer or more bytes came than were reserved."""
        why = f"{came_bytes} bytes came, {self.entry.payload_bytes} were reserved"
        self.problem = (SaveStatus.LENGTH_MISMATCH, why)

    def end(self, ended: SaveEnded) -> None:
        """The save ended."""
        if self.ended is None:
            self.ended = ended
            # Dropped: it refers back to this write, and the cycle would wait for the collector.
            when_ended, self.when_ended = self.when_ended, None
            if when_ended is not None:
                when_ended()
