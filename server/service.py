"""The `Cache` service: what workers call. Every rpc becomes one question to the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import TypeAlias, TypeVar

from ..proto import limits
from ..proto import prefixd_pb2 as pb
from ..proto import prefixd_pb2_grpc as rpc
from ..proto.errors import (
    ClaimLost,
    InvalidSize,
    LimitReached,
    MalformedMessage,
    UnknownClaim,
    UnknownReservation,
    UnknownSession,
    UnknownStaging,
)
from ..tiers.store import StoreError
from . import messages
from .answers import (
    CancelAnswer,
    ClaimAnswer,
    LookupAnswer,
    ReleaseAnswer,
    ReserveAnswer,
    WriteOrder,
)
from .events import (
    CancelAsked,
    ClaimAsked,
    ClaimMode,
    KeysTouched,
    LookupAsked,
    ReleaseAsked,
    ReserveAsked,
    WriteBegan,
)
from .incoming import MAX_WAITING_MESSAGES, Incoming, Piece
from .loop import Core
from .sessions import ServiceConfig, SessionStream, first_message
from .tables import Entry
from .verifying import head_of
from .wire import Context

Q = TypeVar("Q")
#: Of each item of a save, why it is not written; None: it is.
Refusals: TypeAlias = "list[pb.SaveResult | None]"

_CLAIM_MODES = {
    pb.CLAIM_MODE_RUN: ClaimMode.RUN,
    pb.CLAIM_MODE_FIRST: ClaimMode.FIRST,
    pb.CLAIM_MODE_ANY: ClaimMode.ANY,
}


class CacheService(rpc.CacheServicer):
    """See prefixd.proto for what each rpc promises."""

    def __init__(self, core: Core, config: ServiceConfig) -> None:
        self._core = core
        self._config = config

    def _session(self, ref: pb.SessionRef) -> int:
        return messages.session_of(ref, self._config.incarnation)

    def _wait_until(self, now_ns: int, wait_ms: int) -> int:
        return now_ns + messages.milliseconds("wait_ms", wait_ms, 0, limits.MAX_WAIT_MS)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncGenerator[pb.SessionEvent, None]:
        stream = SessionStream(self._core, self._config)
        async with aclosing(stream.run(request_iterator)) as events:
            async for event in events:
                yield event

    # ---- read side

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        core = self._core
        now_ns = core.clock.now_ns()
        question = LookupAsked(
            request=core.next_request(),
            keys=messages.keys_of("keys", request.keys),
            stop_at_first_absent=request.stop_at_first_absent,
            wait_until_ns=self._wait_until(now_ns, request.wait_ms),
            now_ns=now_ns,
        )
        answer = await core.ask(question, LookupAnswer)
        return messages.lookup_response(answer, self._config.incarnation)

    async def Claim(self, request: pb.ClaimRequest, context: Context) -> pb.ClaimResponse:
        core = self._core
        now_ns = core.clock.now_ns()
        if request.mode not in _CLAIM_MODES:
            raise MalformedMessage(f"claim mode {request.mode} does not exist")
        question = ClaimAsked(
            request=core.next_request(),
            session=self._session(request.session),
            keys=messages.keys_of("keys", request.keys),
            mode=_CLAIM_MODES[request.mode],
            lease_ns=messages.milliseconds(
                "lease_ms",
                request.lease_ms,
                default=self._config.claim_lease_ms,
                most=self._config.claim_lease_ms,
            ),
            wait_until_ns=self._wait_until(now_ns, request.wait_ms),
            now_ns=now_ns,
        )
        answer = await core.ask(question, ClaimAnswer)
        context.add_done_callback(
            lambda done: self._release_unseen(question, answer, done)  # type: ignore[arg-type]  # the stub wants a class of its own
        )
        if request.brief:
            return messages.brief_claim_response(answer)
        return messages.claim_response(answer)

    def _release_unseen(self, asked: ClaimAsked, answer: ClaimAnswer, context: Context) -> None:
        """A claim whose client gave up before the answer came would stay as long as its session."""
        if answer.claim and context.cancelled():
            core = self._core
            claims = (answer.claim,)
            now_ns = core.clock.now_ns()
            core.post(ReleaseAsked(core.next_request(), asked.session, claims, now_ns))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        core = self._core
        messages.batch_of("claim_ids", request.claim_ids)
        question = ReleaseAsked(
            request=core.next_request(),
            session=self._session(request.session),
            claims=tuple(request.claim_ids),
            now_ns=core.clock.now_ns(),
        )
        answer = await core.ask(question, ReleaseAnswer)
        return pb.ReleaseResponse(results=[r.value for r in answer.results])  # type: ignore[misc]

    async def Read(
        self, request: pb.ReadRequest, context: Context
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        with self._core.working():
            async with aclosing(self._read(request)) as responses:
                async for response in responses:
                    yield response

    async def _read(self, request: pb.ReadRequest) -> AsyncGenerator[pb.ReadResponse, None]:
        session = self._session(request.session)
        messages.batch_of("ranges", request.ranges)
        self._claimed(session, request.claim_id)
        pending = pb.ReadResponse()
        pending_bytes = 0
        for number, wanted in enumerate(request.ranges):
            entries = self._claimed(session, request.claim_id)
            if wanted.index >= len(entries):
                raise InvalidSize(
                    f"ranges[{number}]: the claim has {len(entries)} entries, "
                    f"index {wanted.index} is not one of them"
                )
            entry = entries[wanted.index]
            offset, end = _bounds(number, wanted, entry)
            sent_bytes = 0
            while offset + sent_bytes < end:
                # A chunk at a time: in between, others have their turn, and the claim may end.
                self._claimed(session, request.claim_id)
                room = limits.CHUNK_BYTES - pending_bytes
                piece_bytes = min(room, end - offset - sent_bytes)
                part = pending.parts.add(range=number, offset_bytes=sent_bytes)
                try:
                    part.data = await self._bytes(entry, wanted, offset + sent_bytes, piece_bytes)
                except StoreError as problem:
                    part.status = pb.READ_STATUS_UNREADABLE
                    yield pending
                    pending, pending_bytes = pb.ReadResponse(), 0
                    # Ends the claim, and with it this read: nothing of the rest is sent.
                    self._core.damaged(entry, str(problem))
                    break
                self._core.state.tables.tier_counters[entry.tier].read_bytes += piece_bytes
                sent_bytes += piece_bytes
                pending_bytes += piece_bytes
                if pending_bytes >= limits.CHUNK_BYTES:
                    yield pending
                    pending, pending_bytes = pb.ReadResponse(), 0
        # The last bytes were copied while the claim held, or nobody gets them.
        self._claimed(session, request.claim_id)
        if pending.parts:
            yield pending

    def _claimed(self, session: int, claim_id: int) -> tuple[Entry, ...]:
        """The entries of a live claim of this session."""
        tables = self._core.state.tables
        holder = tables.sessions.get(session)
        if holder is None:
            raise UnknownSession(f"session {session} ended or never was; open a new one")
        if claim_id in holder.claims:
            return tables.claims[claim_id].entries
        if claim_id in holder.lost_claims:
            raise ClaimLost(
                f"claim {claim_id} is lost: {holder.lost_claims[claim_id]}; "
                "throw away what was read under it"
            )
        raise UnknownClaim(f"this session holds no claim {claim_id}")

    async def _bytes(
        self, entry: Entry, wanted: pb.ReadRange, offset: int, length_bytes: int
    ) -> bytes:
        core = self._core
        store = core.stores[entry.tier]

        def take() -> bytes:
            if wanted.token_ids:
                ids = store.token_ids(head_of(entry), entry.location, entry.token_ids_bytes)
                return ids[offset : offset + length_bytes]
            views = store.read(head_of(entry), entry.location, offset, length_bytes)
            return b"".join(views)

        if not store.blocking:
            return take()
        return await asyncio.get_running_loop().run_in_executor(core.executor, take)

    # ---- write side

    async def _reserve(self, header: pb.SaveHeader, *, begin: bool) -> ReserveAnswer:
        core = self._core
        now_ns = core.clock.now_ns()
        touched = messages.keys_of("touched", header.touched, may_be_empty=True)
        question = ReserveAsked(
            request=core.next_request(),
            session=self._session(header.session),
            tier=messages.tier_of(header.tier, core.stores),
            reason=messages.reason_of(header.reason),
            items=messages.items_of(header.items),
            ancestors=messages.keys_of("ancestors", header.ancestors, may_be_empty=True),
            begin=begin,
            ttl_ns=messages.milliseconds(
                "ttl_ms", header.ttl_ms, self._config.reservation_ttl_ms, limits.MAX_LEASE_MS
            ),
            wait_until_ns=self._wait_until(now_ns, header.wait_ms),
            now_ns=now_ns,
        )
        if touched:
            core.post(KeysTouched(touched, now_ns))
        return await core.ask(question, ReserveAnswer)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        answer = await self._reserve(request.header, begin=False)
        return pb.ReserveResponse(
            results=map(messages.reserve_result, answer.results),
            ttl_ms=answer.ttl_ns // 1_000_000,
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        core = self._core
        messages.batch_of("tokens", request.tokens)
        question = CancelAsked(
            request=core.next_request(),
            session=self._session(request.session),
            tokens=tuple(request.tokens),
            now_ns=core.clock.now_ns(),
        )
        return pb.CancelResponse(cancelled=(await core.ask(question, CancelAnswer)).results)

    async def Save(
        self, request_iterator: AsyncIterator[pb.SaveRequest], context: Context
    ) -> pb.SaveResponse:
        first = await first_message(request_iterator)
        refusals, incoming = await self._begin_save(first)

        async def take(request: pb.SaveRequest) -> None:
            await incoming.feed(_pieces(request.parts, refusals))

        with self._core.working():
            await _receive(incoming, first, request_iterator, take)
            results = await _results(refusals, incoming)
        return pb.SaveResponse(results=results)

    async def SaveWhole(
        self, request: pb.SaveWholeRequest, context: Context
    ) -> pb.SaveWholeResponse:
        refusals, incoming = await self._begin_save(request)
        with self._core.working():
            async with incoming.to_the_end():
                await incoming.feed(_pieces(request.parts, refusals))
            results = await _results(refusals, incoming)
        return pb.SaveWholeResponse(results=results)

    async def SaveStaged(
        self,
        requests: AsyncIterator[pb.SaveStagedRequest],
        tell: Callable[[pb.SaveStagedResponse], None],
    ) -> None:
        """Not an rpc: for clients on this host (`local.py`), who are told of every copy."""
        first = await first_message(requests)
        reserved = first.reserved if first.HasField("reserved") else None
        session = self._session((reserved or _header(first)).session)
        staging = self._core.stagings.get(session)
        if staging is None:
            raise UnknownStaging("this session has no staging memory; save over gRPC")
        if reserved is None:
            refusals, incoming = await self._begin_save(first)
        else:
            messages.batch_of("tokens", reserved.tokens)
            incoming = Incoming(self._core)
            refusals = [
                await self._begin(session, token, incoming, number)
                for number, token in enumerate(reserved.tokens)
            ]

        async def take(request: pb.SaveStagedRequest) -> None:
            if not request.parts:
                return
            pieces = [
                Piece(
                    p.item,
                    staging.view(p.staging_offset_bytes, p.length_bytes),
                    p.last,
                    p.payload_crc32c,
                )
                for p in request.parts
                if _granted(p.item, refusals)
            ]
            copied = pb.SaveStagedResponse(parts_copied=len(request.parts))
            incoming.begin(pieces, partial(tell, copied))
            if incoming.waiting > MAX_WAITING_MESSAGES:
                await incoming.idle()

        with self._core.working():
            await _receive(incoming, first, requests, take)
            tell(pb.SaveStagedResponse(results=await _results(refusals, incoming)))

    async def _begin_save(
        self, first: pb.SaveRequest | pb.SaveWholeRequest | pb.SaveStagedRequest
    ) -> tuple[Refusals, Incoming]:
        """Reserve what the first message asks for, and open what is granted."""
        answer = await self._reserve(_header(first), begin=True)
        incoming = Incoming(self._core)
        refusals: Refusals = []
        for number, reserved in enumerate(answer.results):
            if isinstance(reserved, WriteOrder):
                incoming.add(number, self._core.begin_write(reserved))
                refusals.append(None)
            else:
                refusals.append(messages.refused_save(reserved))
        return refusals, incoming

    async def Write(
        self, request_iterator: AsyncIterator[pb.WriteRequest], context: Context
    ) -> pb.WriteResponse:
        first = await first_message(request_iterator)
        session = self._session(first.session)
        incoming = Incoming(self._core)
        #: in the order in which the stream names them: refused with this, or being written
        named: dict[int, pb.SaveResult | None] = {}

        async def take(request: pb.WriteRequest) -> None:
            for part in request.parts:
                if part.token not in named:
                    named[part.token] = await self._begin(session, part.token, incoming, part.token)
                    if len(named) > limits.MAX_BATCH_KEYS:
                        raise LimitReached("too many reservations in one stream of writes")
            await incoming.feed(
                [
                    Piece(p.token, p.data, p.last, p.payload_crc32c, p.offset_bytes)
                    for p in request.parts
                    if p.token in incoming
                ]
            )

        with self._core.working():
            await _receive(incoming, first, request_iterator, take)
            ended = await incoming.ended()
        return pb.WriteResponse(
            tokens=named,
            results=[refused or messages.ended_save(ended[t]) for t, refused in named.items()],
        )

    async def _begin(
        self, session: int, token: int, incoming: Incoming, number: int
    ) -> pb.SaveResult | None:
        """Begin the write of a reservation, which the stream's pieces name by `number`; the
        result, if there can't be one."""
        core = self._core
        question = WriteBegan(core.next_request(), session, token, core.clock.now_ns())
        try:
            order = await core.ask(question, WriteOrder)
        except UnknownReservation as error:
            return pb.SaveResult(status=pb.SAVE_STATUS_LOST, message=str(error))
        incoming.add(number, core.begin_write(order))
        return None


# ---- streams


def _header(first: pb.SaveRequest | pb.SaveWholeRequest | pb.SaveStagedRequest) -> pb.SaveHeader:
    if not first.HasField("header"):
        raise MalformedMessage("the first message of a save has to hold its header")
    return first.header


def _granted(item: int, refusals: Refusals) -> bool:
    """Does anybody want the bytes of this item? Raises MalformedMessage if there is none such."""
    if item >= len(refusals):
        raise MalformedMessage(f"a part names item {item}, which is not there")
    return refusals[item] is None


def _pieces(parts: Iterable[pb.WritePart], refusals: Refusals) -> list[Piece]:
    return [
        Piece(p.item, p.data, p.last, p.payload_crc32c, p.offset_bytes)
        for p in parts
        if _granted(p.item, refusals)
    ]


async def _results(refusals: Refusals, incoming: Incoming) -> list[pb.SaveResult]:
    ended = await incoming.ended()
    return [
        messages.ended_save(ended[number]) if refused is None else refused
        for number, refused in enumerate(refusals)
    ]


async def _receive(
    incoming: Incoming,
    first: Q,
    requests: AsyncIterator[Q],
    take: Callable[[Q], Awaitable[None]],
) -> None:
    """Feed a stream to its end. However it ends, no write is left open."""
    async with incoming.to_the_end():
        await take(first)
        async for request in requests:
            if incoming.broken is not None:
                break
            await take(request)


def _bounds(number: int, wanted: pb.ReadRange, entry: Entry) -> tuple[int, int]:
    """First and last byte of a range, checked against the entry."""
    there_bytes = entry.token_ids_bytes if wanted.token_ids else entry.payload_bytes
    end = wanted.offset_bytes + (wanted.length_bytes or there_bytes - wanted.offset_bytes)
    if wanted.offset_bytes > there_bytes or end > there_bytes:
        raise InvalidSize(
            f"ranges[{number}]: bytes {wanted.offset_bytes} to {end} are asked for, "
            f"the entry has {there_bytes}"
        )
    return wanted.offset_bytes, end
