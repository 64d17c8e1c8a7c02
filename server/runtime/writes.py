"""Writes: the payloads of saves on their way into their stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...proto.errors import InvalidSize, MalformedMessage
from ...proto.vocabulary import SaveStatus
from ...tiers.store import Buffer, EntryWriter, StoreError
from ..core.effects import SaveEnded
from ..core.entries import Entry
from .limited_log import LimitedLog

log = LimitedLog("prefixd.writes")


class Piece(NamedTuple):
    """Bytes of one write. `number`: the stream's name for the write. `offset_bytes` None: the next
    bytes."""

    number: int
    data: Buffer
    last: bool
    payload_crc32c: int
    offset_bytes: int | None = None


class Write:
    """One reservation that a stream writes."""

    # What all begin with belongs to the class: to set it in each takes time for every block.

    #: how many messages other threads copy into its room, now or soon: if the reservation is lost,
    #: the room stays until they have
    busy: int = 0
    #: the call that it belongs to, if it is traced
    call: object | None = None
    #: nothing more may be written
    stopping: bool = False
    #: the result of the save, once there is one
    ended: SaveEnded | None = None
    #: called when `ended` is set
    when_ended: Callable[[], None] | None = None
    #: the last piece arrived
    complete: bool = False
    #: CRC32C of the bytes in the store; set when the write is sealed
    crc32c: int | None = None
    expected_crc32c: int = 0
    #: the event that the write is sealed was posted, or is queued
    reported: bool = False
    #: why the write can't be completed
    problem: tuple[SaveStatus, str] | None = None

    def __init__(self, token: int, entry: Entry, writer: EntryWriter) -> None:
        self.token = token
        self.entry = entry
        self.writer = writer

    def take(self, piece: Piece) -> None:
        """Copy one piece. On any thread, but one at a time.

        Raises PrefixdError for what breaks the stream, other exceptions for what ends this write.
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
        """The store failed to write a piece."""
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
        """The last byte has arrived. `payload_crc32c`: the expected checksum, None: any. Raises
        StoreError."""
        writer = self.writer
        if writer.written_bytes != self.entry.content.payload_bytes:
            self.mismatched(writer.written_bytes)
            return
        self.complete = True
        self.crc32c = crc32c = writer.seal()
        self.expected_crc32c = crc32c if payload_crc32c is None else payload_crc32c

    def mismatched(self, received_bytes: int) -> None:
        """Fewer or more bytes arrived than were reserved."""
        why = f"{received_bytes} bytes came, {self.entry.payload_bytes} were reserved"
        self.problem = (SaveStatus.LENGTH_MISMATCH, why)

    def end(self, ended: SaveEnded) -> None:
        """The save ended."""
        if self.ended is None:
            self.ended = ended
            # Reset: it refers back to this write, and the cycle would wait for the collector.
            when_ended, self.when_ended = self.when_ended, None
            if when_ended is not None:
                when_ended()


def take_whole(writes: Sequence[Write], pieces: Sequence[Piece]) -> bool:
    """`take` each piece, all in one call of the store. False: one of them is not the whole payload
    of a write of its own, or the store takes them one by one, and nothing has happened."""
    # With few calls, because it runs for every block that is saved.
    writers: list[EntryWriter] = []
    for write, (_, data, last, _, offset_bytes) in zip(writes, pieces, strict=True):
        if (
            not last
            or offset_bytes
            or len(data) != write.entry.content.payload_bytes
            or write.complete
            or write.stopping
            or write.problem is not None
        ):
            return False
        writers.append(write.writer)
    if len(set(writers)) < len(writers):
        return False
    crcs = writers[0].write_whole(writers, [piece.data for piece in pieces])
    if crcs is None:
        return False
    for write, writer, piece, crc in zip(writes, writers, pieces, crcs, strict=True):
        payload_crc32c = piece.payload_crc32c
        if writer.sealed:
            write.complete = True
            write.crc32c = crc
            write.expected_crc32c = crc if payload_crc32c is None else payload_crc32c
            continue
        try:
            write.finish(payload_crc32c)
        except Exception as problem:  # its token ids could not be written
            write.fail(problem)
    return True
