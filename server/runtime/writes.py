"""Writes: the payloads of saves on their way into their stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...proto.errors import InvalidSize, MalformedMessage
from ...proto.vocabulary import SaveStatus
from ...tiers.store import Buffer, EntryWriter, Store, StoreError
from ..core.effects import SaveEnded, WriteOrder
from ..core.entries import EntryState
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

    #: made when it is needed: a payload that comes whole, for a store without records, needs none
    _writer: EntryWriter | None = None
    #: how many messages other threads copy into its room, now or soon: if the reservation is lost,
    #: the room stays until they have
    busy: int = 0
    #: the call that it belongs to, if it is traced
    call: object | None = None
    #: nothing more may be written
    stopping: bool = False
    #: the result of the save, once there is one
    ended: SaveEnded | None = None
    #: called when `ended` is set, with how many writes of the same call have ended with it
    when_ended: Callable[[int], None] | None = None
    #: the last piece arrived
    complete: bool = False
    #: CRC32C of the bytes in the store; set when the write is sealed
    crc32c: int | None = None
    expected_crc32c: int = 0
    #: the event that the write is sealed was posted, or is queued
    reported: bool = False
    #: why the write can't be completed
    problem: tuple[SaveStatus, str] | None = None

    def __init__(self, order: WriteOrder, store: Store) -> None:
        self.token, self.entry, self.token_ids = order
        self.store = store

    @property
    def writer(self) -> EntryWriter:
        writer = self._writer
        if writer is None:
            writer = self._writer = self.store.writer(self.entry, self.token_ids)
        return writer

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

    def stored(self, crc32c: int, payload_crc32c: int | None, failed_syncs: int) -> None:
        """The store has the whole payload (`Store.write_whole`). `payload_crc32c`: the expected
        checksum, None: any."""
        if self.token_ids or self.store.recorded:
            try:
                self.writer.resume(crc32c, failed_syncs)
                self.finish(payload_crc32c)
            except Exception as problem:  # its token ids could not be written
                self.fail(problem)
            return
        self.complete = True
        self.crc32c = crc32c
        self.expected_crc32c = crc32c if payload_crc32c is None else payload_crc32c

    def mismatched(self, received_bytes: int) -> None:
        """Fewer or more bytes arrived than were reserved."""
        why = f"{received_bytes} bytes came, {self.entry.payload_bytes} were reserved"
        self.problem = (SaveStatus.LENGTH_MISMATCH, why)


def end(writes: Iterable[Write], ended: SaveEnded) -> None:
    """Tell writes that their saves have ended."""
    # With few calls, because it runs for every block that is saved. Most are of one call.
    told: Callable[[int], None] | None = None
    many = 0
    for write in writes:
        if write.ended is not None:
            continue
        write.ended = ended
        # Reset: it refers back to this write, and the cycle would wait for the collector.
        when_ended, write.when_ended = write.when_ended, None
        if when_ended is not told:
            if told is not None:
                told(many)
            told, many = when_ended, 0
        many += 1
    if told is not None:
        told(many)


def take_whole(writes: Sequence[Write], pieces: Sequence[Piece]) -> bool:
    """`take` each piece, all in one call of the store. False: one of them is not the whole payload
    of a write of its own, or the store takes them one by one, and nothing has happened."""
    # With few calls, because it runs for every block that is saved.
    store = writes[0].store
    entries: list[EntryState] = []
    for write, (_, data, last, _, offset_bytes) in zip(writes, pieces, strict=True):
        entry = write.entry
        if (
            not last
            or offset_bytes
            or len(data) != entry.content.payload_bytes
            or write._writer is not None
            or write.complete
            or write.stopping
            or write.problem is not None
            or write.store is not store
        ):
            return False
        entries.append(entry)
    if len(set(writes)) < len(writes):
        return False
    whole = store.write_whole(entries, [piece.data for piece in pieces])
    if whole is None:
        return False
    crcs, failed_syncs = whole
    for write, piece, crc in zip(writes, pieces, crcs, strict=True):
        write.stored(crc, piece.payload_crc32c, failed_syncs)
    return True
