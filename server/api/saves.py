"""The part of the `Cache` service that saves: reservations, and the bytes for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    Draining,
    LimitReached,
    MalformedMessage,
    UnknownReservation,
    UnknownSession,
)
from ...proto.vocabulary import SaveStatus
from ..core.effects import CancelAnswer, ReserveAnswer, SaveEnded, WriteOrder
from ..core.events import CancelAsked, KeysTouched, ReserveAsked, SaveItem, WriteBegan
from ..runtime.incoming import MAX_WAITING_MESSAGES, Incoming, nothing
from ..runtime.loop import Core
from ..runtime.quota import Quota, Room
from ..runtime.slices import Slices
from ..runtime.staging import StagingPool
from ..runtime.writes import Piece
from . import messages
from .access import Access, Role
from .calls import Caller
from .sessions import Membership, ServiceConfig, Sessions, first_message

Q = TypeVar("Q")
S = TypeVar("S", pb.SaveStagedResponse, pb.SaveLentResponse)


class StagedRequests(Protocol):
    """What follows the first request of a staged save. Raises PrefixdError."""

    def take_staged(self) -> pb.SaveStagedRequest | None:
        """The next request, if it has come."""

    async def wait_staged(self) -> pb.SaveStagedRequest:
        """The next request, once it has come."""


#: For each item of a save, why it is not written; None: it is.
Refusals: TypeAlias = "list[pb.SaveResult | None]"
#: The first message of a save.
Opening: TypeAlias = (
    "pb.SaveRequest | pb.SaveWholeRequest | pb.SaveStagedRequest | pb.SaveLentRequest"
    " | pb.RawSaveRequest"
)

#: What a stream of bytes may take of the daemon's memory: the message that comes is as large as
#: its client makes it.
SAVE_BYTES: Final = limits.MAX_MESSAGE_BYTES
#: A few milliseconds' worth.
_CANCELLED_AT_ONCE: Final = 256


class Saves:
    """See prefixd.proto for what each call promises. Methods raise PrefixdError."""

    def __init__(
        self, core: Core, sessions: Sessions, stagings: StagingPool, config: ServiceConfig
    ) -> None:
        self.core: Final = core
        self._sessions = sessions
        self._stagings = stagings
        self._config = config
        self._stall_s = config.stall_timeout_s
        self.arriving: Final = Quota("saves", config.max_save_bytes, config.stall_timeout_s)

    def _writer(self, ref: pb.SessionRef, caller: Caller) -> Membership:
        """The session that a call acts for. Raises what `Sessions.prove` raises."""
        return self._sessions.prove(ref, caller, Role.WRITE)

    def _items(self, access: Access | None, header: pb.SaveHeader) -> tuple[SaveItem, ...]:
        items = messages.items_of(header)
        named = tuple([item.key for item in items])
        keys = self._sessions.namespaces.keys(access, named)
        if keys is named:
            return items
        return tuple([item._replace(key=key) for item, key in zip(items, keys, strict=True)])

    # ---- reservations

    async def reserve(self, request: pb.ReserveRequest, caller: Caller) -> pb.ReserveResponse:
        membership = self._writer(request.header.session, caller)
        answer = await self._reserve(request.header, membership, begin=False)
        caller.when_done(partial(self._cancel_unseen, membership.number, answer))
        return pb.ReserveResponse(
            results=map(messages.reserve_result, answer.results),
            ttl_ms=answer.ttl_ns // 1_000_000,
        )

    def _cancel_unseen(self, session: int, answer: ReserveAnswer, gone: bool) -> None:
        """Others would wait for what a client that gave up was granted."""
        tokens = tuple(r.token for r in answer.results if isinstance(r, WriteOrder))
        if tokens and gone:
            core = self.core
            core.post(CancelAsked(core.next_request(), session, tokens, core.clock.now_ns()))

    async def _reserve(
        self, header: pb.SaveHeader, membership: Membership, *, begin: bool
    ) -> ReserveAnswer:
        core = self.core
        now_ns = core.clock.now_ns()
        access, keys = membership.access, self._sessions.namespaces.keys
        touched = keys(access, messages.keys_of("touched", header.touched, may_be_empty=True))
        question = ReserveAsked(
            request=core.next_request(),
            session=membership.number,
            tier=messages.tier_of(header.tier, core.stores),
            reason=messages.reason_of(header.reason),
            items=self._items(access, header),
            ancestors=keys(
                access, messages.keys_of("ancestors", header.ancestors, may_be_empty=True)
            ),
            begin=begin,
            ttl_ns=messages.milliseconds(
                "ttl_ms", header.ttl_ms, self._config.reservation_ttl_ms, limits.MAX_LEASE_MS
            ),
            wait_until_ns=messages.wait_until(now_ns, header.wait_ms),
            now_ns=now_ns,
        )
        if touched:
            core.post(KeysTouched(touched, now_ns))
        return await core.ask(question, ReserveAnswer)

    async def cancel(self, request: pb.CancelRequest, caller: Caller) -> pb.CancelResponse:
        core = self.core
        membership = self._writer(request.session, caller)
        messages.batch_of("tokens", request.tokens)
        response, slices = pb.CancelResponse(), Slices()
        for start in range(0, len(request.tokens), _CANCELLED_AT_ONCE):
            question = CancelAsked(
                request=core.next_request(),
                session=membership.number,
                tokens=tuple(request.tokens[start : start + _CANCELLED_AT_ONCE]),
                now_ns=core.clock.now_ns(),
            )
            response.cancelled.extend((await core.ask(question, CancelAnswer)).results)
            await slices.pause()
        return response

    # ---- bytes

    async def save(
        self, requests: AsyncIterator[pb.SaveRequest], caller: Caller
    ) -> pb.SaveResponse:
        async with self._stream(requests) as (first, room):
            membership = await self._prove(_header(first).session, caller, room)
            refusals, incoming = await self.begin_save(first, membership)

            async def take(request: pb.SaveRequest) -> None:
                await incoming.feed(_pieces(request.parts, refusals))

            with self.core.working(), self.timed():
                async with incoming.to_the_end():
                    await take(first)
                    while incoming.broken is None:
                        request = await self._next(requests, membership)
                        if request is None:
                            break
                        await take(request)
                return pb.SaveResponse(results=await results_of(refusals, incoming))

    async def save_whole(
        self, requests: AsyncIterator[pb.SaveWholeRequest], caller: Caller
    ) -> pb.SaveWholeResponse:
        """`requests` is one, which is only taken from the wire when there is room for it."""
        async with self._stream(requests) as (request, room):
            membership = await self._prove(_header(request).session, caller, room)
            refusals, incoming = await self.begin_save(request, membership)
            with self.core.working(), self.timed():
                async with incoming.to_the_end():
                    await incoming.feed(_pieces(request.parts, refusals))
                return pb.SaveWholeResponse(results=await results_of(refusals, incoming))

    async def write(
        self, requests: AsyncIterator[pb.WriteRequest], caller: Caller
    ) -> pb.WriteResponse:
        async with self._stream(requests) as (first, room):
            membership = await self._prove(first.session, caller, room)
            incoming = Incoming(self.core)
            #: in the order in which the stream names them: refused with this, or being written
            named: dict[int, pb.SaveResult | None] = {}
            request: pb.WriteRequest | None = first
            with self.core.working(), self.timed():
                async with incoming.to_the_end():
                    while request is not None and incoming.broken is None:
                        await self._write(request, membership, incoming, named)
                        request = await self._next(requests, membership)
                ended = await incoming.ended()
            return pb.WriteResponse(
                tokens=named,
                results=[refused or messages.ended_save(ended[t]) for t, refused in named.items()],
            )

    async def _write(
        self,
        request: pb.WriteRequest,
        membership: Membership,
        incoming: Incoming,
        named: dict[int, pb.SaveResult | None],
    ) -> None:
        """Take one message of a Write stream."""
        messages.check_parts(request.parts)
        slices = Slices()
        for part in request.parts:
            await slices.pause()
            if part.token not in named:
                named[part.token] = await self._begin(membership, part.token, incoming, part.token)
                if len(named) > limits.MAX_BATCH_KEYS:
                    raise LimitReached("too many reservations in one stream of writes")
        await incoming.feed(
            [
                Piece(p.token, p.data, p.last, p.payload_crc32c, p.offset_bytes)
                for p in request.parts
                if p.token in incoming
            ]
        )

    async def save_staged(
        self,
        first: pb.SaveStagedRequest,
        following: StagedRequests,
        caller: Caller,
        tell: Callable[[pb.SaveStagedResponse], None],
    ) -> None:
        """For clients on this host (`local_socket`), who are told of every copy."""
        membership, reserved = self.opened(first, caller)
        with (
            self._stagings.using(membership.number) as staging,
            self.core.working(),
            self.timed(),
        ):
            if reserved is None:
                refusals, incoming = await self.begin_save(first, membership)
            else:
                refusals, incoming = await self.begin_reserved(reserved, membership)

            async def take(request: pb.SaveStagedRequest) -> None:
                parts = messages.parts_of(request)
                if not parts:
                    return
                pieces = [
                    Piece(item, staging.view(offset_bytes, length_bytes), last, payload_crc32c)
                    for item, offset_bytes, length_bytes, last, payload_crc32c in parts
                    if _granted(item, refusals)
                ]
                if request.quiet:
                    incoming.begin(pieces, nothing)
                else:
                    copied = pb.SaveStagedResponse(parts_copied=len(parts))
                    incoming.begin(pieces, partial(tell, copied))
                if incoming.waiting > MAX_WAITING_MESSAGES:
                    await incoming.idle()

            async with incoming.to_the_end():
                request: pb.SaveStagedRequest | None = first
                while request is not None and incoming.broken is None:
                    await take(request)
                    if request.last:
                        break
                    request = following.take_staged()
                    if request is None:
                        if not incoming.waiting:
                            incoming.tell_sealed()
                        request = await self._awaited(following.wait_staged(), membership)
                    else:
                        await asyncio.sleep(0)  # others have their turn
            tell(await short_results(pb.SaveStagedResponse, refusals, incoming))

    def opened(
        self, first: pb.SaveStagedRequest | pb.SaveLentRequest | pb.RawSaveRequest, caller: Caller
    ) -> tuple[Membership, pb.StagedReservations | None]:
        """The session that saves, and the reservations that it made before. Raises PrefixdError."""
        reserved = first.reserved if first.HasField("reserved") else None
        return self._writer((reserved or _header(first)).session, caller), reserved

    def timed(self) -> AbstractContextManager[None]:
        """Around a save, for the statistics."""
        latencies = self._sessions.latencies
        return latencies.measured(latencies.save)

    # ---- how streams begin

    @asynccontextmanager
    async def _stream(self, requests: AsyncIterator[Q]) -> AsyncIterator[tuple[Q, Room]]:
        """The first message of a stream that brings bytes, once there is room for it, and that
        room until the end of the call."""
        async with self.arriving.room(SAVE_BYTES) as room:
            try:
                async with asyncio.timeout(self._stall_s):
                    first = await first_message(requests)
            except TimeoutError:
                raise self._silent() from None
            yield first, room

    async def _prove(self, ref: pb.SessionRef, caller: Caller, room: Room) -> Membership:
        membership = self._writer(ref, caller)
        await room.belongs_to(membership.number)
        return membership

    async def begin_save(self, first: Opening, membership: Membership) -> tuple[Refusals, Incoming]:
        """Reserve what the first message asks for, and open what is granted."""
        answer = await self._reserve(_header(first), membership, begin=True)
        incoming, slices = Incoming(self.core), Slices()
        refusals: Refusals = []
        try:
            for number, reserved in enumerate(answer.results):
                if isinstance(reserved, WriteOrder):
                    incoming.add(number, self.core.begin_write(reserved))
                    refusals.append(None)
                else:
                    refusals.append(messages.refused_save(reserved))
                await slices.pause()
        except BaseException:
            self._cancel_unseen(membership.number, answer, gone=True)
            raise
        return refusals, incoming

    async def begin_reserved(
        self, reserved: pb.StagedReservations, membership: Membership
    ) -> tuple[Refusals, Incoming]:
        messages.batch_of("tokens", reserved.tokens)
        incoming, slices = Incoming(self.core), Slices()
        refusals: Refusals = []
        try:
            for number, token in enumerate(reserved.tokens):
                refusals.append(await self._begin(membership, token, incoming, number))
                await slices.pause()
        except BaseException:
            incoming.abandon("the connection broke before its bytes arrived")
            raise
        return refusals, incoming

    async def _begin(
        self, membership: Membership, token: int, incoming: Incoming, number: int
    ) -> pb.SaveResult | None:
        """Begin the write of a reservation, which the stream's pieces name by `number`; the
        result, if there can't be one."""
        core = self.core
        question = WriteBegan(core.next_request(), membership.number, token, core.clock.now_ns())
        try:
            order = await core.ask(question, WriteOrder)
        except UnknownReservation as error:
            return pb.SaveResult(status=pb.SAVE_STATUS_LOST, message=str(error))
        incoming.add(number, core.begin_write(order))
        return None

    # ---- how they go on

    async def _next(self, requests: AsyncIterator[Q], membership: Membership) -> Q | None:
        """The next message; None: that was all. Raises UnknownSession or Draining when the session
        has ended, and with it every reservation, and LimitReached of a client that is silent for
        too long."""
        return await self._awaited(_following(requests), membership)

    async def _awaited(
        self, message: Coroutine[None, None, Q | None], membership: Membership
    ) -> Q | None:
        coming = asyncio.ensure_future(message)
        try:
            done, _ = await asyncio.wait(
                (coming, membership.ended),
                timeout=self._stall_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if coming in done:
                return coming.result()
            if not done:
                raise self._silent()
            if self.core.gate.stopping:
                raise Draining("the daemon stops, and does not wait for the rest of this save")
            raise UnknownSession(f"session {membership.number} ended before its save did")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))

    def _silent(self) -> LimitReached:
        return LimitReached(f"the client sent nothing for {self._stall_s:g} s")


async def _following(requests: AsyncIterator[Q]) -> Q | None:
    return await anext(requests, None)


def _header(first: Opening) -> pb.SaveHeader:
    if not first.HasField("header"):
        raise MalformedMessage("the first message of a save has to hold its header")
    return first.header


def _granted(item: int, refusals: Refusals) -> bool:
    """Are the bytes of this item wanted? Raises MalformedMessage if there is none such."""
    if item >= len(refusals):
        raise MalformedMessage(f"a part names item {item}, which is not there")
    return refusals[item] is None


def _pieces(parts: Collection[pb.WritePart], refusals: Refusals) -> list[Piece]:
    messages.check_parts(parts)
    return [
        Piece(p.item, p.data, p.last, p.payload_crc32c, p.offset_bytes)
        for p in parts
        if _granted(p.item, refusals)
    ]


async def short_results(answer: type[S], refusals: Refusals, incoming: Incoming) -> S:
    """`results_of`, in few bytes if all were saved."""
    ended = await incoming.ended()
    if len(ended) == len(refusals):  # all of them were granted
        saved = SaveStatus.SAVED
        if all(end.outcome is saved for end in ended.values()):
            return answer(all_saved=len(refusals))
    return answer(results=_results_of(refusals, ended))


async def results_of(refusals: Refusals, incoming: Incoming) -> list[pb.SaveResult]:
    """How each item ended, once all did."""
    return _results_of(refusals, await incoming.ended())


def _results_of(refusals: Refusals, ended: Mapping[int, SaveEnded]) -> list[pb.SaveResult]:
    return [
        messages.ended_save(ended[number]) if refused is None else refused
        for number, refused in enumerate(refusals)
    ]
