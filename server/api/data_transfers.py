"""The calls that move payloads between arenas and a socket: read, fetch, save.

The services decide what may be moved (`service`, `save_calls`). Worker threads move it without a
copy in between, a turn at a time; between two turns the claim is checked and other calls run.
Quotas bound the memory that slow clients hold, and `stall_timeout` for how long.

A turn sends or receives until the socket blocks for a millisecond, until it has moved `TURN_BYTES`
or begun `_TURN_PARTS`, or until everything is done. So a slow peer occupies no thread: the event
loop waits for its socket. Threads only move bytes; the loop reports the outcome to the core.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import ClaimLost, InvalidBatch, MalformedMessage, PrefixdError, UnknownEntry
from ...proto.frames import CRC, PART_BYTES, frame
from ...proto.payload import unset_bytearray
from ...proto.vocabulary import Tier
from ...tiers.store import Damaged, StoreError
from ..core.effects import ReleaseAnswer
from ..core.entries import EntryState
from ..core.events import BytesRead
from ..runtime.incoming import Incoming
from ..runtime.loop import Core
from ..runtime.rounds import Slices
from ..runtime.writes import Write
from . import messages
from .calls import Caller, to_its_end
from .data_streams import DataFrames, Stream
from .save_calls import Refusals, Saves, results_of
from .service import READ_BYTES, CacheService, ReadFailures, bounds_of

#: One turn moves at most this much, in a few milliseconds; then others have the thread.
TURN_BYTES: Final = 8 * 2**20
#: One turn begins at most so many parts: small ones cost more CPU time than their bytes.
_TURN_PARTS: Final = 256
#: How long a thread waits for a socket that is full or empty before it is left to the loop.
_PATIENCE_MS: Final = 1
#: How long the waits of one turn may take together.
_MOST_WAITED_S: Final = 0.016
#: The next part is begun when fewer bytes than this are queued: enough for one system call to send
#: many small parts, and little enough that entries are read shortly before they are sent.
_AHEAD_BYTES: Final = 256 * 2**10
#: Buffers that one system call sends.
_GATHER: Final = 64
#: Fewer bytes than this are moved on the loop: waking a thread takes as long.
_INLINE_BYTES: Final = 256 * 2**10
#: A save without TLS that brings no more than this is received on the loop. A thread has to wait
#: for the interpreter whenever it has received something, and beside a busy loop each of these
#: waits takes milliseconds: where clients with and without staging memory saved all the time, those
#: without got less than half as much (`tests/bench/bench_savers.py --staged 16 --socket 16`).
_INLINE_SAVE_BYTES: Final = 2**20
#: How many rounds of the event loop a save takes after its first message was answered: the client
#: reads the answer and sends the bytes, which come in pieces.
_ROUNDS_OF_A_SAVE: Final = 7
#: What a save occupies of the daemon's memory: what the socket holds, and a piece for a disk.
_SAVE_BYTES: Final = 4 * limits.CHUNK_BYTES
_READ_END: Final = pb.FramedResponse(read_end=pb.ReadEnd())


class DataCalls:
    """The event loop's. Methods raise PrefixdError, and OSError when the client is gone."""

    def __init__(self, core: Core, service: CacheService, saves: Saves) -> None:
        self._core = core
        self._service = service
        self._saves = saves

    # ---- out

    async def read(self, request: pb.ReadRequest, caller: Caller, frames: DataFrames) -> None:
        membership = self._service.sessions.prove(request.session, caller)
        session = membership.number
        async with self._service.reads.room(READ_BYTES, membership.holder):
            claim = request.claim_id
            ranges = await self._ranges(session, claim, request.ranges)
            sending = Sending(self._core, frames.stream, ranges)
            async with self._reported(sending):
                await self._send(session, claim, sending, frames)
        await frames.tell(_READ_END)

    async def fetch(self, request: pb.FetchRequest, caller: Caller, frames: DataFrames) -> None:
        """A read under a claim of its own, which ends with the last byte."""
        columns = request.room_bytes or request.generations
        if len(columns) != len(request.keys) or (request.room_bytes and request.generations):
            raise InvalidBatch("a fetch names the generation of each key, or the room for each")
        membership = self._service.sessions.prove(request.session, caller)
        session = membership.number
        messages.batch_of("keys", request.keys)  # before they are copied
        async with self._service.reads.room(READ_BYTES, membership.holder):
            wanted = pb.ClaimRequest(
                session=request.session,
                keys=request.keys,
                mode=pb.CLAIM_MODE_RUN if request.generations else request.mode,
                brief=not request.room_bytes,
            )
            granted = self._service.claim_now(wanted, Caller(caller.access, caller.tenant))
            claim, held = granted.claim_id, not granted.claim_id
            try:
                sending = await self._fetched(session, request, granted, frames)
                # Failures are reported after the release: a damaged entry would end the claim.
                async with self._reported(sending):
                    await self._send(session, claim, sending, frames)
                    if claim:
                        question = self._service.release_of(session, [claim])
                        (result,) = self._core.ask_now(question, ReleaseAnswer).results
                        held = result.value == pb.RELEASE_STATUS_RELEASED
                    if held:
                        await frames.tell(_READ_END)
            finally:
                if not held:
                    self._core.post(self._service.release_of(session, [claim]))
        if not held:
            raise ClaimLost("the claim was lost; throw away what was read under it")

    async def _fetched(
        self, session: int, request: pb.FetchRequest, granted: pb.ClaimResponse, frames: DataFrames
    ) -> Sending:
        """What a fetch sends of its claim. Raises UnknownEntry if the client named generations
        and the claim does not hold exactly these."""
        if not request.room_bytes:
            if list(granted.generations) != list(request.generations):
                raise UnknownEntry("some entries are gone or were replaced since they were found")
            ranges = await self._ranges(session, granted.claim_id, request.ranges)
            return Sending(self._core, frames.stream, ranges)
        rooms_bytes = [
            room_bytes
            for room_bytes, result in zip(request.room_bytes, granted.results, strict=False)
            if result.claimed
        ]
        entries = self._service.claimed(session, granted.claim_id) if rooms_bytes else ()
        fitting = [
            SentRange(number, entry, False, 0, entry.payload_bytes)
            for number, (entry, room_bytes) in enumerate(zip(entries, rooms_bytes, strict=True))
            if entry.payload_bytes == room_bytes
        ]
        granted.ClearField("claim_id")  # the daemon releases it, not the client
        head = frame(pb.FramedResponse(claim=granted))
        return Sending(self._core, frames.stream, fitting, head)

    async def _send(self, session: int, claim: int, sending: Sending, frames: DataFrames) -> None:
        """Send everything, as long as the claim holds."""
        service, core, slices = self._service, self._core, Slices()
        ranges = sending.ranges
        whole_bytes = sum(each.end - each.start for each in ranges)
        # The threads of a tier that hangs are taken, and nothing of it is read.
        answering = {each.entry.tier for each in ranges} - core.devices.hung
        tier = max(answering, default=None)
        inline = tier is None or (whole_bytes <= _INLINE_BYTES and not core.stores[tier].blocking)
        try:
            with core.working():
                progress, pace, sent_bytes = Progress.PAUSED, frames.pace(), 0
                while progress is not Progress.DONE:
                    if ranges:
                        service.claimed(session, claim)
                    if inline:
                        progress = sending.run(0)
                        await slices.pause()
                    else:
                        assert tier is not None
                        progress = await to_its_end(core.devices.run(tier, sending.run))
                    if progress is Progress.WAITING:
                        pace.moved(sending.all_bytes - sent_bytes)
                        sent_bytes = sending.all_bytes
                        pace.waited(sending.take_waited_s())
                        await frames.until_ready(pace)
                # What was sent counts only if the claim still held when the last byte left.
                if ranges:
                    service.claimed(session, claim)
        finally:
            frames.may_tell = frames.in_step = sending.between_parts

    async def _ranges(
        self, session: int, claim: int, requested: Sequence[pb.ReadRange]
    ) -> list[SentRange]:
        messages.batch_of("ranges", requested)
        entries = self._service.claimed(session, claim)
        found, slices = [], Slices()
        for number, each in enumerate(requested):
            entry, start, end = bounds_of(number, each, entries)
            if end > start:
                found.append(SentRange(number, entry, each.token_ids, start, end))
            await slices.pause()
        return found

    @asynccontextmanager
    async def _reported(self, sending: Sending) -> AsyncIterator[None]:
        """Report what was sent and what could not be read, after the last turn."""
        core = self._core
        began_ns = 0 if core.tracing is None else core.tracing.now_ns()
        try:
            yield
        finally:
            for tier, sent_bytes in sending.sent_bytes.items():
                core.post(BytesRead(tier, sent_bytes, core.clock.now_ns()))
                if core.tracing is not None:
                    core.tracing.read(tier, sent_bytes, began_ns)
            await self._service.report(sending.failures)

    # ---- in

    async def save(self, request: pb.RawSaveRequest, caller: Caller, frames: DataFrames) -> None:
        saves = self._saves
        membership = saves.opened(request, caller)
        async with saves.arriving.room(_SAVE_BYTES, membership.holder):
            with saves.measured():
                refusals, incoming = await saves.begin(
                    request, membership, rounds_after=_ROUNDS_OF_A_SAVE
                )
                async with incoming.to_the_end():
                    await self._receive(refusals, incoming, frames)
                results = await results_of(refusals, incoming)
        await frames.tell(pb.FramedResponse(save=pb.SaveResponse(results=results)))

    async def _receive(self, refusals: Refusals, incoming: Incoming, frames: DataFrames) -> None:
        granted = [number for number, refused in enumerate(refusals) if refused is None]
        if not granted:
            return
        await frames.tell(pb.FramedResponse(save_ready=pb.SaveReady(items=granted)))
        frames.in_step = False
        receiving = Receiving(frames.stream, [incoming.write_of(number) for number in granted])
        blocking = self._core.stores[receiving.tier].blocking
        small = receiving.left_bytes <= _INLINE_SAVE_BYTES and not frames.stream.encrypted
        inline_bytes = _INLINE_SAVE_BYTES if small else _INLINE_BYTES
        pace, left_bytes = frames.pace(), receiving.left_bytes
        while not receiving.complete:
            inline = receiving.left_bytes <= inline_bytes and not blocking
            if inline:
                receiving.patience_ms = 0
            receiving.aim()
            await incoming.take_turn(receiving, inline=inline)
            if incoming.broken is not None:
                return  # the wait for the end of the save raises it
            if receiving.starved:
                pace.moved(left_bytes - receiving.left_bytes)
                left_bytes = receiving.left_bytes
                pace.waited(receiving.take_waited_s())
                await frames.until_ready(pace)
        frames.in_step = True


# ---- the work of threads


class Progress(Enum):
    """How a turn ended."""

    DONE = auto()
    #: The socket blocks.
    WAITING = auto()
    #: There is more to do.
    PAUSED = auto()


class SentRange(NamedTuple):
    """A range of bytes of an entry; `number` is its place in the request."""

    number: int
    entry: EntryState
    token_ids: bool
    start: int
    end: int


class _Waits:
    """The waits of a thread for a socket. They are short, and so is their sum in one turn: a client
    that moves a byte each millisecond occupies no thread."""

    def __init__(self) -> None:
        self._left_s = 0.0
        self._waited_s = 0.0

    def begin(self) -> None:
        """A turn begins."""
        self._left_s = _MOST_WAITED_S

    def ready(self, stream: Stream, patience_ms: int) -> bool:
        """Whether the stream can go on after a wait in this turn."""
        if self._left_s <= 0 or not patience_ms:
            return False
        began_s = time.monotonic()
        ready = stream.wait(patience_ms)
        waited_s = time.monotonic() - began_s
        self._left_s -= waited_s
        self._waited_s += waited_s
        return ready

    def take_waited_s(self) -> float:
        """How long the turns since the last call have waited."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class Sending(_Waits):
    """Ranges of entries on their way into a socket. Takes one turn at a time, each on any thread.

    The loop reads `sent_bytes` and `failures` between turns.
    """

    def __init__(
        self, core: Core, stream: Stream, ranges: Sequence[SentRange], head: bytes = b""
    ) -> None:
        """No range is empty. `head` is sent before them."""
        super().__init__()
        self._core = core
        self._stream = stream
        self.ranges = ranges
        self._range = 0
        #: The first byte of the current range that is not queued yet.
        self._next = ranges[0].start if ranges else 0
        #: What is sent next, in order.
        self._queue: deque[memoryview | bytes] = deque((head,) if head else ())
        self._queued_bytes = len(head)
        self.sent_bytes: dict[Tier, int] = {}
        #: Everything that the socket took.
        self.all_bytes = 0
        self.failures: Final = ReadFailures()

    @property
    def between_parts(self) -> bool:
        """Whether the client would understand another message now."""
        return not self._queue

    def run(self, patience_ms: int = _PATIENCE_MS) -> Progress:
        """One turn. Raises OSError when the client is gone."""
        left_bytes, left_parts = TURN_BYTES, _TURN_PARTS
        self.begin()
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
                if not self.ready(self._stream, patience_ms):
                    return Progress.WAITING
                continue
            left_bytes -= sent_bytes
            self._sent(sent_bytes)

    def _sent(self, sent_bytes: int) -> None:
        self._queued_bytes -= sent_bytes
        self.all_bytes += sent_bytes
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
        current = self.ranges[self._range]
        entry, tier = current.entry, current.entry.tier
        length_bytes = min(PART_BYTES, current.end - self._next)
        part = pb.RawPart(range=current.number, offset_bytes=self._next - current.start)
        views: Sequence[memoryview | bytes] = ()
        try:
            views = self._take(current, length_bytes)
        except (Damaged, StoreError) as problem:
            part.status = self.failures.add(entry, problem)
            self._next = current.end
        else:
            part.length_bytes = length_bytes
            self._next += length_bytes
            self.sent_bytes[tier] = self.sent_bytes.get(tier, 0) + length_bytes
        head = frame(pb.FramedResponse(part=part))
        self._queue.append(head)
        self._queue.extend(views)
        self._queued_bytes += len(head) + part.length_bytes
        if self._next == current.end:
            self._range += 1
            if self._range < len(self.ranges):
                self._next = self.ranges[self._range].start
        return True

    def _take(self, current: SentRange, length_bytes: int) -> Sequence[memoryview | bytes]:
        entry, core = current.entry, self._core
        core.devices.check_answers(entry.tier)
        if not entry.published:
            raise StoreError("the entry was found damaged, and dropped")
        store = core.stores[entry.tier]
        with core.devices.under_way(entry.tier):
            if current.token_ids:
                return [store.token_ids(entry)[self._next : self._next + length_bytes]]
            return store.read(entry, self._next, length_bytes)


class Receiving(_Waits):
    """The payloads of a save on their way from a socket into arenas: an `incoming.Turn` that is
    taken again and again until it is `complete`.

    Each payload is followed by its CRC32C. Bytes for a write that has ended are thrown away.
    """

    def __init__(self, stream: Stream, writes: Sequence[Write]) -> None:
        """`writes`: in the order in which their bytes arrive."""
        super().__init__()
        self._stream = stream
        self._all = writes
        self._at = 0
        #: The current turn ends before this write at the latest.
        self._end = 0
        self._received_bytes = 0
        self._crc = bytearray(CRC.size)
        #: Received bytes of the CRC32C behind the current payload.
        self._crc_bytes = 0
        #: Buffer for bytes that can't be received into an arena directly.
        self._scratch: memoryview | None = None
        self.left_bytes = sum(map(_sent_bytes, writes))
        #: Whether the socket was empty when the last turn ended.
        self.starved = False
        #: How long a turn waits for an empty socket.
        self.patience_ms = _PATIENCE_MS
        #: Those of the next turn (`incoming.Turn`).
        self.writes: Sequence[Write] = ()
        self.tier: Final = max((write.entry.tier for write in writes), default=Tier.RAM)

    @property
    def complete(self) -> bool:
        return self._at == len(self._all)

    def aim(self) -> None:
        """Choose the writes of the next turn. Called on the loop, before each turn."""
        end, reach_bytes = self._at, TURN_BYTES + self._received_bytes + self._crc_bytes
        while end < len(self._all) and reach_bytes > 0:
            reach_bytes -= _sent_bytes(self._all[end])
            end += 1
        self._end = end
        self.writes = self._all[self._at : end]

    def take(self) -> PrefixdError | None:
        end_bytes = max(0, self.left_bytes - TURN_BYTES)
        self.starved = False
        self.begin()
        while self._at < self._end and self.left_bytes > end_bytes:
            try:
                self._receive()
            except BlockingIOError:
                if not self.ready(self._stream, self.patience_ms):
                    self.starved = True
                    break
            except OSError as problem:
                return MalformedMessage(f"the connection broke within a save: {problem}")
            except PrefixdError as problem:
                return problem
        return None

    def then(self) -> None:
        """Nothing to do: the loop waits for each turn."""

    def _receive(self) -> None:
        """Make one system call, and store what it brings. Raises OSError, PrefixdError."""
        write = self._all[self._at]
        payload_bytes = write.entry.payload_bytes - self._received_bytes
        room, direct = self._room(write, min(payload_bytes, PART_BYTES))
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
        if self._crc_bytes == CRC.size:
            self._finish(write)

    def _room(self, write: Write, most_bytes: int) -> tuple[memoryview, bool]:
        """The buffer for the next bytes, and whether that is their place in the arena."""
        if most_bytes and write.problem is None and not write.stopping:
            try:
                room = write.writer.room(most_bytes)
                if room is not None:
                    return room, True
            except Exception as problem:  # ends this write only; its bytes still arrive
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
        (payload_crc32c,) = CRC.unpack(self._crc)
        self._at += 1
        self._received_bytes = self._crc_bytes = 0
        if write.problem is not None or write.stopping:
            return
        try:
            write.finish(payload_crc32c)
        except Exception as problem:
            write.fail(problem)


def _sent_bytes(write: Write) -> int:
    return write.entry.payload_bytes + CRC.size
