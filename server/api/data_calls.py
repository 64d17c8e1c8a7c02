"""The calls of the data socket that move payloads: read, fetch, save.

The services decide what may be moved (`service`, `saves`); worker threads move it (`raw_bytes`), a
turn at a time, between which the claim is looked at and others have their turn. What a slow client
can hold is bounded by the quotas of reads and saves, for how long by `stall_timeout`.
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
from ..core.events import BytesRead, ReleaseAsked
from ..runtime.incoming import Incoming
from ..runtime.loop import Core
from ..runtime.slices import Slices
from . import messages
from .calls import Caller, PlainCaller
from .data_frames import DataFrames
from .raw_bytes import Progress, Receiving, Sending, SentRange
from .saves import Refusals, Saves, results_of
from .service import READ_BYTES, CacheService, bounds_of
from .streams import to_its_end

#: Fewer bytes than this are moved on the loop: to wake a thread takes as long.
_INLINE_BYTES: Final = 256 * 2**10
#: What a save takes of the daemon's memory: what the socket holds, and a piece for a disk.
_SAVE_BYTES: Final = 4 * limits.CHUNK_BYTES
_READ_END: Final = pb.DataResponse(read_end=pb.ReadEnd())


class DataCalls:
    """The event loop's. Methods raise PrefixdError, and OSError when the client is gone."""

    def __init__(self, core: Core, service: CacheService, saves: Saves) -> None:
        self._core = core
        self._service = service
        self._saves = saves

    # ---- out

    async def read(self, request: pb.ReadRequest, caller: Caller, frames: DataFrames) -> None:
        session = self._service.session_of(request.session, caller).number
        async with self._service.reads.room(READ_BYTES, session):
            claim = request.claim_id
            ranges = await self._ranges(session, claim, request.ranges)
            sending = Sending(self._core, frames.stream, ranges)
            async with self._told(sending):
                await self._send(session, claim, sending, frames)
        await frames.tell(_READ_END)

    async def fetch(self, request: pb.FetchRequest, caller: Caller, frames: DataFrames) -> None:
        """A claim that ends with the last byte."""
        columns = request.room_bytes or request.generations
        if len(columns) != len(request.keys) or (request.room_bytes and request.generations):
            raise InvalidBatch("a fetch names the generation of each key, or the room for each")
        session = self._service.session_of(request.session, caller).number
        messages.batch_of("keys", request.keys)  # before they are copied
        async with self._service.reads.room(READ_BYTES, session):
            asked = pb.ClaimRequest(
                session=request.session,
                keys=request.keys,
                mode=request.mode,
                brief=not request.room_bytes,
            )
            granted = self._service.claim_now(asked, PlainCaller(caller.access))
            claim, held = granted.claim_id, not granted.claim_id
            try:
                sending = await self._fetched(session, request, granted, frames)
                # Reported after the release: a damaged entry ends the claim on the others, too.
                async with self._told(sending):
                    await self._send(session, claim, sending, frames)
                    if claim:
                        question = self._release_of(session, claim)
                        (result,) = self._core.ask_now(question, ReleaseAnswer).results
                        held = result.value == pb.RELEASE_STATUS_RELEASED
                    if held:
                        await frames.tell(_READ_END)
            finally:
                if not held:
                    self._core.post(self._release_of(session, claim))
        if not held:
            raise ClaimLost("the claim was lost; throw away what was read under it")

    async def _fetched(
        self, session: int, request: pb.FetchRequest, granted: pb.ClaimResponse, frames: DataFrames
    ) -> Sending:
        """What a fetch sends of its claim. Raises UnknownEntry unless that is on exactly what the
        client means."""
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
        granted.ClearField("claim_id")  # it is given back without the client
        head = frame(pb.DataResponse(claim=granted))
        return Sending(self._core, frames.stream, fitting, head)

    def _release_of(self, session: int, claim: int) -> ReleaseAsked:
        core = self._core
        return ReleaseAsked(core.next_request(), session, (claim,), core.clock.now_ns())

    async def _send(self, session: int, claim: int, sending: Sending, frames: DataFrames) -> None:
        """All of it, as long as the claim holds."""
        service, core, slices = self._service, self._core, Slices()
        ranges = sending.ranges
        whole_bytes = sum(wanted.end - wanted.start for wanted in ranges)
        tier = max((wanted.entry.tier for wanted in ranges), default=None)
        inline = tier is None or (whole_bytes <= _INLINE_BYTES and not core.stores[tier].blocking)
        try:
            with core.working():
                progress = Progress.PAUSED
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
                        await frames.until_ready()
                # The last bytes left while the claim held, or nothing that was sent counts.
                if ranges:
                    service.claimed(session, claim)
        finally:
            frames.may_tell = frames.in_step = sending.between_parts

    async def _ranges(
        self, session: int, claim: int, asked: Sequence[pb.ReadRange]
    ) -> list[SentRange]:
        messages.batch_of("ranges", asked)
        entries = self._service.claimed(session, claim)
        found, slices = [], Slices()
        for number, wanted in enumerate(asked):
            entry, start, end = bounds_of(number, wanted, entries)
            if end > start:
                found.append(SentRange(number, entry, wanted.token_ids, start, end))
            await slices.pause()
        return found

    @asynccontextmanager
    async def _told(self, sending: Sending) -> AsyncIterator[None]:
        """Report what was sent and what could not be read, once no thread sends any more."""
        core = self._core
        began_ns = 0 if core.tracing is None else core.tracing.now_ns()
        try:
            yield
        finally:
            for tier, sent_bytes in sending.sent_bytes.items():
                core.post(BytesRead(tier, sent_bytes, core.clock.now_ns()))
                if core.tracing is not None:
                    core.tracing.read(tier, sent_bytes, began_ns)
            await self._service.report(sending.unreadable, sending.damaged)

    # ---- in

    async def save(self, request: pb.RawSaveRequest, caller: Caller, frames: DataFrames) -> None:
        saves, core = self._saves, self._core
        membership, reserved = saves.opened(request, caller)
        async with saves.arriving.room(_SAVE_BYTES, membership.number):
            with core.working(), saves.timed():
                if reserved is None:
                    refusals, incoming = await saves.begin_save(request, membership)
                else:
                    refusals, incoming = await saves.begin_reserved(reserved, membership)
                async with incoming.to_the_end():
                    await self._receive(refusals, incoming, frames)
                results = await results_of(refusals, incoming)
        await frames.tell(pb.DataResponse(save=pb.SaveResponse(results=results)))

    async def _receive(self, refusals: Refusals, incoming: Incoming, frames: DataFrames) -> None:
        wanted = [number for number, refused in enumerate(refusals) if refused is None]
        if not wanted:
            return
        await frames.tell(pb.DataResponse(save_ready=pb.SaveReady(items=wanted)))
        frames.in_step = False
        receiving = Receiving(frames.stream, [incoming.write_of(number) for number in wanted])
        blocking = self._core.stores[receiving.tier].blocking
        while not receiving.complete:
            inline = receiving.left_bytes <= _INLINE_BYTES and not blocking
            if inline:
                receiving.patience_ms = 0
            receiving.aim()
            await incoming.take_turn(receiving, inline=inline)
            if incoming.broken is not None:
                return  # which whoever waits for the end of it raises
            if receiving.starved:
                await frames.until_ready()
        frames.in_step = True
