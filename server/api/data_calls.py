"""The calls that move payloads through a socket: read, fetch, save.

The services decide what may be moved (`service`, `saves`). Worker threads move it, a turn at a time
(`data_transfers`); between two turns the claim is checked and other calls run. Quotas bound the
memory that slow clients hold, and `stall_timeout` for how long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import ClaimLost, InvalidBatch, UnknownEntry
from ...proto.frames import frame
from ..core.effects import ReleaseAnswer
from ..core.events import BytesRead
from ..runtime.incoming import Incoming
from ..runtime.loop import Core
from ..runtime.slices import Slices
from . import messages
from .calls import Caller, PlainCaller, to_its_end
from .data_streams import DataFrames
from .data_transfers import Progress, Receiving, Sending, SentRange
from .saves import Refusals, Saves, results_of
from .service import READ_BYTES, CacheService, bounds_of

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
            granted = self._service.claim_now(wanted, PlainCaller(caller.access, caller.tenant))
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
