"""Payload bytes between arenas and the data socket, without a copy between: what worker threads do.

A turn sends or receives as long as the socket goes along, and ends when it does not for a
millisecond, when it has moved `TURN_BYTES` or begun `_TURN_PARTS`, or when all is done. So a slow
peer keeps no thread: the event loop waits for its socket. Threads only move bytes; what comes of it
the loop tells the state. Sockets don't block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import MalformedMessage, PrefixdError
from ...proto.payload import unset_bytearray
from ...proto.vocabulary import Tier
from ...tiers.store import Damaged, Store, StoreError
from ..core.entries import Entry
from ..runtime.loop import Core
from ..runtime.writes import Write
from .streams import Stream

#: What one turn moves at most, in a few milliseconds; then others have the thread.
TURN_BYTES: Final = 8 * 2**20
#: The same of parts, which take a processor longer than their bytes where these are few.
_TURN_PARTS: Final = 256
#: How long a thread waits for a socket that is full or empty before it is left to the loop.
_PATIENCE_MS: Final = 1
#: The next part is begun when fewer bytes wait to be sent: one call of the kernel takes many small
#: ones, and little of an entry is looked at before its turn.
_AHEAD_BYTES: Final = 256 * 2**10
#: Buffers that one call of the kernel takes.
_GATHER: Final = 64


class Progress(Enum):
    """How a turn ended."""

    DONE = auto()
    #: The socket does not go along.
    WAITING = auto()
    #: There is more to do.
    PAUSED = auto()


class SentRange(NamedTuple):
    """Bytes of an entry that were asked for: `number` is the range's in the request."""

    number: int
    entry: Entry
    token_ids: bool
    start: int
    end: int


class Sending:
    """Ranges of entries on their way into a socket. One turn at a time, each on any thread.

    `sent_bytes`, `damaged` and `unreadable` are the loop's to read between turns.
    """

    def __init__(
        self, core: Core, stream: Stream, ranges: Sequence[SentRange], head: bytes = b""
    ) -> None:
        """`ranges` are not empty each. `head`: what is sent before them."""
        self._core = core
        self._stream = stream
        self.ranges = ranges
        self._range = 0
        #: the first byte of the current range that is not queued
        self._next = ranges[0].start if ranges else 0
        #: what goes out next, in order
        self._queue: deque[memoryview | bytes] = deque((head,) if head else ())
        self._queued_bytes = len(head)
        self.sent_bytes: dict[Tier, int] = {}
        #: entries whose bytes are not those that were saved, by generation, each with the reason
        self.damaged: dict[int, tuple[Entry, str]] = {}
        #: the same of those that a store could not read
        self.unreadable: dict[int, tuple[Entry, str]] = {}

    @property
    def between_parts(self) -> bool:
        """Can the client understand another message now?"""
        return not self._queue

    def run(self, patience_ms: int = _PATIENCE_MS) -> Progress:
        """One turn. Raises OSError when the client is gone."""
        left_bytes, left_parts = TURN_BYTES, _TURN_PARTS
        while True:
            while left_parts and self._queued_bytes < _AHEAD_BYTES and self._load():
                left_parts -= 1
            if not self._queue:
                return Progress.PAUSED if self._range < len(self.ranges) else Progress.DONE
            if left_bytes <= 0:
                return Progress.PAUSED
            try:
                sent_bytes = self._stream.send(islice(self._queue, _GATHER))
            except BlockingIOError:
                if not self._stream.wait(patience_ms):
                    return Progress.WAITING
                continue
            left_bytes -= sent_bytes
            self._sent(sent_bytes)

    def _sent(self, sent_bytes: int) -> None:
        self._queued_bytes -= sent_bytes
        while sent_bytes:
            first = self._queue.popleft()
            if len(first) > sent_bytes:
                self._queue.appendleft(memoryview(first)[sent_bytes:])
                return
            sent_bytes -= len(first)

    def _load(self) -> bool:
        """Queue the next part. False: there is none."""
        if self._range == len(self.ranges):
            return False
        wanted = self.ranges[self._range]
        length_bytes = min(frames.PART_BYTES, wanted.end - self._next)
        part = pb.RawPart(
            range=wanted.number,
            offset_bytes=self._next - wanted.start,
            length_bytes=length_bytes,
        )
        views: Sequence[memoryview | bytes] = ()
        try:
            views = self._take(wanted, length_bytes)
        except Damaged as problem:
            part.status = pb.READ_STATUS_DAMAGED
            self.damaged[wanted.entry.generation] = wanted.entry, str(problem)
        except StoreError as problem:
            part.status = pb.READ_STATUS_UNREADABLE
            self.unreadable[wanted.entry.generation] = wanted.entry, str(problem)
        self._next += length_bytes
        if part.status:
            part.length_bytes = 0
            self._next = wanted.end
        else:
            tier = wanted.entry.tier
            self.sent_bytes[tier] = self.sent_bytes.get(tier, 0) + length_bytes
        self._queue.append(frames.frame(pb.DataResponse(part=part)))
        self._queue.extend(views)
        self._queued_bytes += len(self._queue[-1 - len(views)]) + part.length_bytes
        if self._next == wanted.end:
            self._range += 1
            if self._range < len(self.ranges):
                self._next = self.ranges[self._range].start
        return True

    def _take(self, wanted: SentRange, length_bytes: int) -> Sequence[memoryview | bytes]:
        entry, core = wanted.entry, self._core
        if not entry.published:
            raise StoreError("the entry was found damaged, and dropped")
        store: Store = core.stores[entry.tier]
        with core.devices.under_way(entry.tier):
            if wanted.token_ids:
                return [store.token_ids(entry)[self._next : self._next + length_bytes]]
            return store.read(entry, self._next, length_bytes)


class Receiving:
    """The payloads of a save on their way from a socket to where they will lie: a turn of
    `Incoming`, again and again until it is `complete`.

    Each payload is followed by its CRC32C. What comes for a write that has ended is thrown away.
    """

    def __init__(self, stream: Stream, writes: Sequence[Write]) -> None:
        """`writes` are the writes in the order in which their bytes come."""
        self._stream = stream
        self._all = writes
        self._at = 0
        #: the write before which the current turn ends at the latest
        self._end = 0
        self._received_bytes = 0
        self._crc = bytearray(frames.CRC.size)
        #: how much came of the CRC32C behind the current payload
        self._crc_bytes = 0
        #: for bytes that can't be received into an arena directly
        self._scratch: memoryview | None = None
        self.left_bytes = sum(map(_sent_bytes, writes))
        #: Was the socket empty when the last turn ended?
        self.starved = False
        #: How long a turn waits for an empty socket.
        self.patience_ms = _PATIENCE_MS
        #: `incoming.Turn`
        self.writes: Sequence[Write] = ()
        self.tier: Final = max((write.entry.tier for write in writes), default=Tier.RAM)

    @property
    def complete(self) -> bool:
        return self._at == len(self._all)

    def aim(self) -> None:
        """Choose the writes of the next turn. On the loop, before each turn."""
        end, reach_bytes = self._at, TURN_BYTES + self._received_bytes + self._crc_bytes
        while end < len(self._all) and reach_bytes > 0:
            reach_bytes -= _sent_bytes(self._all[end])
            end += 1
        self._end = end
        self.writes = self._all[self._at : end]

    def take(self) -> PrefixdError | None:
        end_bytes = max(0, self.left_bytes - TURN_BYTES)
        self.starved = False
        while self._at < self._end and self.left_bytes > end_bytes:
            try:
                self._receive()
            except BlockingIOError:
                if not self._stream.wait(self.patience_ms):
                    self.starved = True
                    break
            except OSError as problem:
                return MalformedMessage(f"the connection broke within a save: {problem}")
            except PrefixdError as problem:
                return problem
        return None

    def then(self) -> None:
        """The loop waits for the turn itself."""

    def _receive(self) -> None:
        """What one call of the kernel brings. Raises OSError, PrefixdError."""
        write = self._all[self._at]
        payload_bytes = write.entry.payload_bytes - self._received_bytes
        room, direct = self._room(write, min(payload_bytes, frames.PART_BYTES))
        buffers: list[memoryview] = [room] if payload_bytes else []
        if len(room) >= payload_bytes:
            buffers.append(memoryview(self._crc)[self._crc_bytes :])
        came_bytes = self._stream.receive(buffers)
        if not came_bytes:
            raise MalformedMessage("the client hung up within a save")
        self.left_bytes -= came_bytes
        taken_bytes = min(came_bytes, payload_bytes, len(room))
        if taken_bytes:
            self._store(write, room[:taken_bytes], direct=direct)
        self._received_bytes += taken_bytes
        self._crc_bytes += came_bytes - taken_bytes
        if self._crc_bytes == frames.CRC.size:
            self._finish(write)

    def _room(self, write: Write, most_bytes: int) -> tuple[memoryview, bool]:
        """The buffer for the next bytes, and whether that is their place in the arena."""
        if most_bytes and write.problem is None and not write.stopping:
            try:
                room = write.writer.room(most_bytes)
                if room is not None:
                    return room, True
            except Exception as problem:  # of this save; the bytes still come
                write.fail(problem)
        if self._scratch is None or len(self._scratch) < most_bytes:
            self._scratch = memoryview(unset_bytearray(most_bytes))
        return self._scratch[:most_bytes], False

    def _store(self, write: Write, came: memoryview, *, direct: bool) -> None:
        if write.problem is not None:
            return
        try:
            if direct:
                write.writer.filled(len(came))
            elif not write.stopping:
                write.writer.write(came)
        except Exception as problem:
            write.fail(problem)

    def _finish(self, write: Write) -> None:
        (payload_crc32c,) = frames.CRC.unpack(self._crc)
        self._at += 1
        self._received_bytes = self._crc_bytes = 0
        if write.problem is not None or write.stopping:
            return
        try:
            write.finish(payload_crc32c)
        except Exception as problem:
            write.fail(problem)


def _sent_bytes(write: Write) -> int:
    return write.entry.payload_bytes + frames.CRC.size
