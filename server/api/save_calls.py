"""The part of the `Cache` service that saves: reservations, and the bytes for them."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import compress, repeat
from typing import Final, Protocol, TypeAlias, TypeVar, cast

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
from ..config.options import Config
from ..core.effects import CancelAnswer, ReserveAnswer, SaveEnded, WriteOrder
from ..core.events import CancelAsked, KeysTouched, KeyToSave, ReserveAsked, WriteBegan
from ..core.shares import Holder
from ..runtime.incoming import MAX_WAITING_MESSAGES, Incoming, nothing
from ..runtime.loop import Core
from ..runtime.quota import Pace, Quota
from ..runtime.rounds import Rounds, Slices
from ..runtime.staging import Staging, StagingPool
from ..runtime.writes import Piece
from . import messages
from .access import Access, Role
from .calls import Caller
from .session_streams import Membership, Sessions, first_message

Q = TypeVar("Q")
S = TypeVar("S", pb.SaveStagedResponse, pb.SaveLentResponse)

#: For each item of a save the reason why it is refused, or None if it is being written.
Refusals: TypeAlias = "list[pb.SaveResult | None]"
#: The first message of a save that may name reservations made before, instead of a header.
_Opening: TypeAlias = pb.SaveRequest | pb.SaveStagedRequest | pb.SaveLentRequest | pb.RawSaveRequest

#: What a stream of bytes may occupy of the daemon's memory: one message, which its client makes as
#: large as it likes.
SAVE_BYTES: Final = limits.MAX_MESSAGE_BYTES
#: Tokens that one event cancels, in a few milliseconds.
_CANCELLED_AT_ONCE: Final = 256
#: Writes that begin before others have their turn: a fraction of a millisecond.
_BEGUN_AT_ONCE: Final = 32


class StagedRequests(Protocol):
    """The requests that follow the first one of a staged save. Raises PrefixdError."""

    def take_staged(self) -> pb.SaveStagedRequest | None:
        """The next request, if it has arrived."""

    async def wait_staged(self) -> pb.SaveStagedRequest:
        """The next request, once it has arrived."""


class Saves:
    """See prefixd.proto for what each call promises. Methods raise PrefixdError."""

    def __init__(
        self, core: Core, sessions: Sessions, stagings: StagingPool, config: Config
    ) -> None:
        self.core: Final = core
        self._sessions = sessions
        self._stagings = stagings
        self._ttl_ms = config.sessions.reservation_ttl_ns // 1_000_000
        self._stall_s = config.server.stall_timeout_s
        self._rounds: Final = Rounds()
        self.arriving: Final = Quota("saves", config.server.max_save_bytes, self._stall_s)

    # ---- reservations

    async def reserve(self, request: pb.ReserveRequest, caller: Caller) -> pb.ReserveResponse:
        membership = self._sessions.prove(request.header.session, caller, Role.WRITE)
        answer = await self._reserve(request.header, membership, begin=False)
        caller.when_done(partial(self._cancel_unseen, membership.number, answer))
        return pb.ReserveResponse(
            results=map(messages.reserve_result, answer.results),
            ttl_ms=answer.ttl_ns // 1_000_000,
        )

    def _cancel_unseen(self, session: int, answer: ReserveAnswer, gone: bool) -> None:
        """Cancel what a client was granted that gave up before the answer: else other savers of
        these keys would wait for it."""
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
                "ttl_ms", header.ttl_ms, self._ttl_ms, limits.MAX_LEASE_MS
            ),
            wait_until_ns=messages.wait_until(now_ns, header.wait_ms),
            now_ns=now_ns,
        )
        if touched:
            core.post(KeysTouched(touched, now_ns))
        return await core.ask(question, ReserveAnswer)

    def _items(self, access: Access | None, header: pb.SaveHeader) -> tuple[KeyToSave, ...]:
        items = messages.items_of(header)
        named = tuple([item.key for item in items])
        keys = self._sessions.namespaces.keys(access, named)
        if keys is named:
            return items
        return tuple([item._replace(key=key) for item, key in zip(items, keys, strict=True)])

    async def cancel(self, request: pb.CancelRequest, caller: Caller) -> pb.CancelResponse:
        core = self.core
        membership = self._sessions.prove(request.session, caller, Role.WRITE)
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
        async with self._stream(requests, caller) as (first, membership):
            # It takes many rounds of the loop anyway, and does not wait for one.
            refusals, incoming = await self._begin_now(first, membership)
            with self.measured():
                async with incoming.to_the_end():
                    request: pb.SaveRequest | None = first
                    pace = Pace(self._stall_s)
                    while request is not None:
                        await incoming.feed(_pieces(request.parts, refusals))
                        if incoming.broken is not None:
                            break
                        pace.moved(request.ByteSize())
                        request = await self._awaited(anext(requests, None), membership, pace)
                return pb.SaveResponse(results=await results_of(refusals, incoming))

    async def save_staged(
        self,
        first: pb.SaveStagedRequest,
        following: StagedRequests,
        caller: Caller,
        tell: Callable[[pb.SaveStagedResponse], None],
    ) -> None:
        """Save from staging memory, for clients on this host (`local_socket`). `tell` sends the
        client a message for each copy that is done, and the results."""
        membership = self.opened(first, caller)
        with self._stagings.using(membership.number) as staging, self.measured():
            refusals, incoming = await self.begin(first, membership)

            async def take(request: pb.SaveStagedRequest) -> None:
                parts = messages.parts_of(request)
                if not parts.items:
                    return
                pieces = _staged_pieces(parts, staging, refusals)
                if request.quiet:
                    incoming.begin(pieces, nothing)
                else:
                    copied = pb.SaveStagedResponse(parts_copied=len(parts.items))
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
                        await asyncio.sleep(0)  # other calls have their turn
            tell(await short_results(pb.SaveStagedResponse, refusals, incoming))

    # ---- how saves begin

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a save: counts it as work that a drain waits for, and how long it takes."""
        latencies = self._sessions.latencies
        with self.core.working(), latencies.measured(latencies.save):
            yield

    @asynccontextmanager
    async def _stream(
        self, requests: AsyncIterator[pb.SaveRequest], caller: Caller
    ) -> AsyncIterator[tuple[pb.SaveRequest, Membership]]:
        """The first message of a stream that brings bytes, received once there is memory for it,
        and the session that it proves. Keeps the memory until the end of the call."""
        async with self.arriving.room(SAVE_BYTES, Holder(caller.tenant)) as room:
            try:
                async with asyncio.timeout(self._stall_s):
                    first = await first_message(requests)
            except TimeoutError:
                raise LimitReached(f"the client sent nothing for {self._stall_s:g} s") from None
            membership = self.opened(first, caller)
            if membership.holder.tenant == caller.tenant:
                await room.belongs_to(membership.holder)
            yield first, membership

    def opened(self, first: _Opening, caller: Caller) -> Membership:
        """The session that saves. Raises PrefixdError."""
        named = first.reserved if first.HasField("reserved") else _header(first)
        return self._sessions.prove(named.session, caller, Role.WRITE)

    async def begin(
        self, first: _Opening, membership: Membership, *, rounds_after: int = 0
    ) -> tuple[Refusals, Incoming]:
        """Begin the writes of the reservations that the first message names or asks for, when it is
        the turn of this save. `rounds_after`: see `Rounds.begin`."""
        await self._rounds.begin(rounds_after)
        return await self._begin_now(first, membership)

    async def _begin_now(
        self, first: _Opening, membership: Membership
    ) -> tuple[Refusals, Incoming]:
        if first.HasField("reserved"):
            return await self._begin_reserved(first.reserved.tokens, membership)
        return await self._begin_items(_header(first), membership)

    async def _begin_items(
        self, header: pb.SaveHeader, membership: Membership
    ) -> tuple[Refusals, Incoming]:
        answer = await self._reserve(header, membership, begin=True)
        incoming, slices, results = Incoming(self.core), Slices(), answer.results
        begin_write = self.core.begin_write
        refusals: Refusals = []
        try:
            for start in range(0, len(results), _BEGUN_AT_ONCE):
                some = results[start : start + _BEGUN_AT_ONCE]
                incoming.add(
                    {
                        number: begin_write(reserved)
                        for number, reserved in enumerate(some, start)
                        if isinstance(reserved, WriteOrder)
                    }
                )
                refusals += [
                    None if isinstance(reserved, WriteOrder) else messages.refused_save(reserved)
                    for reserved in some
                ]
                await slices.pause()
        except BaseException:
            self._cancel_unseen(membership.number, answer, gone=True)
            raise
        return refusals, incoming

    async def _begin_reserved(
        self, tokens: Collection[int], membership: Membership
    ) -> tuple[Refusals, Incoming]:
        messages.batch_of("tokens", tokens)
        incoming, slices = Incoming(self.core), Slices()
        refusals: Refusals = []
        try:
            for number, token in enumerate(tokens):
                refusals.append(await self._begin(membership, token, incoming, number))
                await slices.pause()
        except BaseException:
            incoming.abandon("the connection broke before its bytes arrived")
            raise
        return refusals, incoming

    async def _begin(
        self, membership: Membership, token: int, incoming: Incoming, number: int
    ) -> pb.SaveResult | None:
        """Begin the write of a reservation, which the pieces of the stream name by `number`.
        Returns the result of the save if the reservation is lost."""
        core = self.core
        question = WriteBegan(core.next_request(), membership.number, token, core.clock.now_ns())
        try:
            order = await core.ask(question, WriteOrder)
        except UnknownReservation as error:
            return pb.SaveResult(status=pb.SAVE_STATUS_LOST, message=str(error))
        incoming.add({number: core.begin_write(order)})
        return None

    # ---- how they go on

    async def _awaited(
        self,
        message: Awaitable[Q],
        membership: Membership,
        pace: Pace | None = None,
    ) -> Q:
        """The next message. Raises UnknownSession or Draining when the session has ended, and with
        it every reservation, and LimitReached when the client is silent, or slow, for too long."""
        coming = asyncio.ensure_future(message)
        pace = Pace(self._stall_s) if pace is None else pace
        try:
            with pace.waiting() as left_s:
                done, _ = await asyncio.wait(
                    (coming, membership.ended),
                    timeout=left_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if coming in done:
                return coming.result()
            if not done:
                raise pace.error()
            if self.core.gate.stopping:
                raise Draining("the daemon stops, and does not wait for the rest of this save")
            raise UnknownSession(f"session {membership.number} ended before its save did")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))
            if not coming.cancelled():
                coming.exception()  # a client that left meanwhile: asyncio would log it


def _header(first: _Opening) -> pb.SaveHeader:
    if not first.HasField("header"):
        raise MalformedMessage("the first message of a save has to hold its header")
    return first.header


def _granted(item: int, refusals: Refusals) -> bool:
    """Whether this item is being written. Raises MalformedMessage if there is no such item."""
    if item >= len(refusals):
        raise MalformedMessage(f"a part names item {item}, which is not there")
    return refusals[item] is None


def _staged_pieces(
    parts: messages.StagedParts, staging: Staging, refusals: Refusals
) -> list[Piece]:
    """The pieces of those parts whose items are being written. Raises MalformedMessage,
    UnknownStaging."""
    if refusals.count(None) < len(refusals):
        granted = [_granted(item, refusals) for item in parts.items]
        parts = messages.StagedParts._make([list(compress(column, granted)) for column in parts])
    else:
        _granted(max(parts.items), refusals)
    items, offsets, lengths, lasts, crcs = parts
    views = staging.views(offsets, lengths)
    return list(map(_piece, zip(items, views, lasts, crcs, repeat(None), strict=False)))


#: `Piece._make` without a Python call, for every block.
_piece = cast("Callable[[tuple[object, ...]], Piece]", partial(tuple.__new__, Piece))


def _pieces(parts: Collection[pb.WritePart], refusals: Refusals) -> list[Piece]:
    messages.check_parts(parts)
    return [
        Piece(p.item, p.data, p.last, p.payload_crc32c, p.offset_bytes)
        for p in parts
        if _granted(p.item, refusals)
    ]


async def short_results(answer: type[S], refusals: Refusals, incoming: Incoming) -> S:
    """The results, in few bytes if every item was saved."""
    ended = await incoming.ended()
    if len(ended) == len(refusals):  # none was refused
        saved = SaveStatus.SAVED
        if all(end.outcome is saved for end in ended.values()):
            return answer(all_saved=len(refusals))
    return answer(results=_results(refusals, ended))


async def results_of(refusals: Refusals, incoming: Incoming) -> list[pb.SaveResult]:
    """How each item ended, once all have."""
    return _results(refusals, await incoming.ended())


def _results(refusals: Refusals, ended: Mapping[int, SaveEnded]) -> list[pb.SaveResult]:
    return [
        messages.ended_save(ended[number]) if refused is None else refused
        for number, refused in enumerate(refusals)
    ]
