"""The `Cache` service: what workers call, over whatever transport. Every call becomes one question
to the state. Saves are in `saves`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import chain
from time import monotonic
from typing import Final, TypeAlias

import structlog

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import ClaimLost, InvalidSize, MalformedMessage, UnknownClaim, UnknownSession
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode
from ...tiers.store import Damaged, StoreError
from ..core.effects import ClaimAnswer, DeleteAnswer, LookupAnswer, ReleaseAnswer
from ..core.entries import Entry
from ..core.events import BytesRead, ClaimAsked, DeleteAsked, LookupAsked, ReleaseAsked
from ..runtime.loop import Core
from ..runtime.quota import Quota
from ..runtime.slices import Slices
from . import messages
from .access import Access, Role
from .calls import Caller, taken_within
from .sessions import Membership, ServiceConfig, Sessions, SessionStream

log = structlog.get_logger("prefixd.service")

#: What a read takes of the daemon's memory: the chunk that is being read, as bytes, as a message
#: and as what gRPC holds of it until the client takes it.
READ_BYTES: Final = 4 * limits.CHUNK_BYTES

#: Keys of one event: between two, others have their turn.
_DELETED_AT_ONCE: Final = 256

_CLAIM_MODES = {
    pb.CLAIM_MODE_RUN: ClaimMode.RUN,
    pb.CLAIM_MODE_FIRST: ClaimMode.FIRST,
    pb.CLAIM_MODE_ANY: ClaimMode.ANY,
}


#: Keys, what is wanted of them, until when (`time.monotonic()`); how many came.
Fetcher: TypeAlias = Callable[[Sequence[Key], ClaimMode, float], Awaitable[int]]

#: Entries whose bytes a read did not get, by generation, each with the reason.
Failed: TypeAlias = dict[int, tuple[Entry, str]]


class CacheService:
    """See prefixd.proto for what each call promises. Methods raise PrefixdError."""

    def __init__(self, core: Core, sessions: Sessions, config: ServiceConfig) -> None:
        self._core = core
        self._sessions = sessions
        self._config = config
        #: brings what other nodes have; None: this one shares nothing
        self.fetcher: Fetcher | None = None
        self.reads: Final = Quota("reads", config.max_read_bytes, config.stall_timeout_s)

    def session_of(
        self, ref: pb.SessionRef, caller: Caller, needed: Role = Role.READ
    ) -> Membership:
        """The session that a call acts for. Raises what `Sessions.prove` raises."""
        return self._sessions.prove(ref, caller, needed)

    def _keys(self, access: Access | None, raw: Sequence[bytes]) -> tuple[Key, ...]:
        """The keys that a request names, as the daemon has them."""
        return self._sessions.namespaces.keys(access, messages.keys_of("keys", raw))

    async def session(
        self, requests: AsyncIterator[pb.SessionRequest], caller: Caller
    ) -> AsyncGenerator[pb.SessionEvent, None]:
        config = self._config
        if caller.access is not None:
            # The client came over TCP: it can read nothing in place.
            config = replace(config, local_socket="")
        stream = SessionStream(self._core, self._sessions, config, caller.access)
        async with aclosing(stream.run(requests)) as events:
            async for event in events:
                yield event

    # ---- read side

    async def lookup(self, request: pb.LookupRequest, caller: Caller) -> pb.LookupResponse:
        answer = await self._core.ask(self._lookup_asked(request, caller), LookupAnswer)
        return self._lookup_response(request, answer)

    def lookup_now(self, request: pb.LookupRequest, caller: Caller) -> pb.LookupResponse:
        """`lookup` that waits for no save."""
        answer = self._core.ask_now(self._lookup_asked(request, caller), LookupAnswer)
        return self._lookup_response(request, answer)

    def _lookup_asked(self, request: pb.LookupRequest, caller: Caller) -> LookupAsked:
        core = self._core
        now_ns = core.clock.now_ns()
        return LookupAsked(
            request=core.next_request(),
            keys=self._keys(caller.access, request.keys),
            stop_at_first_absent=request.stop_at_first_absent,
            wait_until_ns=messages.wait_until(now_ns, request.wait_ms),
            now_ns=now_ns,
        )

    def _lookup_response(
        self, request: pb.LookupRequest, answer: LookupAnswer
    ) -> pb.LookupResponse:
        if request.brief:
            return messages.brief_lookup_response(answer, self._config.incarnation)
        return messages.lookup_response(answer, self._config.incarnation)

    async def claim(self, request: pb.ClaimRequest, caller: Caller) -> pb.ClaimResponse:
        question = self._claim_asked(request, caller)
        with self._sessions.latencies.measured(self._sessions.latencies.claim):
            answer = await self._core.ask(question, ClaimAnswer)
        return self._claim_response(request, caller, question, answer)

    def claim_now(self, request: pb.ClaimRequest, caller: Caller) -> pb.ClaimResponse:
        """`claim` that waits for no save."""
        question = self._claim_asked(request, caller)
        with self._sessions.latencies.measured(self._sessions.latencies.claim):
            answer = self._core.ask_now(question, ClaimAnswer)
        return self._claim_response(request, caller, question, answer)

    def _claim_asked(self, request: pb.ClaimRequest, caller: Caller) -> ClaimAsked:
        core = self._core
        now_ns = core.clock.now_ns()
        if request.mode not in _CLAIM_MODES:
            raise MalformedMessage(f"claim mode {request.mode} does not exist")
        membership = self.session_of(request.session, caller)
        return ClaimAsked(
            request=core.next_request(),
            session=membership.number,
            keys=self._keys(membership.access, request.keys),
            mode=_CLAIM_MODES[request.mode],
            lease_ns=messages.milliseconds(
                "lease_ms",
                request.lease_ms,
                default=self._config.claim_lease_ms,
                most=self._config.claim_lease_ms,
            ),
            wait_until_ns=messages.wait_until(now_ns, request.wait_ms),
            now_ns=now_ns,
        )

    def _claim_response(
        self, request: pb.ClaimRequest, caller: Caller, question: ClaimAsked, answer: ClaimAnswer
    ) -> pb.ClaimResponse:
        caller.when_done(partial(self._release_unseen, question, answer))
        if request.brief:
            return messages.brief_claim_response(answer)
        return messages.claim_response(answer)

    def _release_unseen(self, asked: ClaimAsked, answer: ClaimAnswer, gone: bool) -> None:
        """A claim whose client gave up before the answer came would stay as long as its session."""
        if answer.claim and gone:
            core = self._core
            claims = (answer.claim,)
            now_ns = core.clock.now_ns()
            core.post(ReleaseAsked(core.next_request(), asked.session, claims, now_ns))

    async def release(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseResponse:
        return self.release_now(request, caller)

    def release_now(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseResponse:
        """`release`, which waits for nothing."""
        core = self._core
        messages.batch_of("claim_ids", request.claim_ids)
        question = ReleaseAsked(
            request=core.next_request(),
            session=self.session_of(request.session, caller).number,
            claims=tuple(request.claim_ids),
            now_ns=core.clock.now_ns(),
        )
        answer = core.ask_now(question, ReleaseAnswer)
        return pb.ReleaseResponse(results=[r.value for r in answer.results])  # type: ignore[misc]

    async def delete(self, request: pb.DeleteRequest, caller: Caller) -> pb.DeleteResponse:
        core = self._core
        named = messages.keys_of("keys", request.keys)
        membership = self.session_of(request.session, caller, Role.WRITE)
        keys = self._sessions.namespaces.keys(membership.access, named)
        response, slices = pb.DeleteResponse(), Slices()
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            question = DeleteAsked(
                request=core.next_request(),
                session=membership.number,
                keys=keys[start : start + _DELETED_AT_ONCE],
                now_ns=core.clock.now_ns(),
            )
            answer = await core.ask(question, DeleteAnswer)
            response.results.extend(r.value for r in answer.results)  # type: ignore[misc]
            await slices.pause()
        return response

    async def pull(self, request: pb.PullRequest, caller: Caller) -> pb.PullResponse:
        membership = self.session_of(request.session, caller, Role.WRITE)
        keys = self._keys(membership.access, request.keys)
        if request.mode not in (pb.CLAIM_MODE_RUN, pb.CLAIM_MODE_FIRST):
            raise MalformedMessage(f"a pull of mode {request.mode} does not exist")
        if self.fetcher is None:
            return pb.PullResponse()
        mode = _CLAIM_MODES[request.mode]
        wait_ms = min(request.wait_ms or limits.DEFAULT_SHARED_WAIT_MS, limits.MAX_WAIT_MS)
        fetched = await self.fetcher(keys, mode, monotonic() + wait_ms / 1e3)
        return pb.PullResponse(pulled=fetched)

    async def read(
        self, request: pb.ReadRequest, caller: Caller
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        session = self.session_of(request.session, caller).number
        messages.batch_of("ranges", request.ranges)
        self.claimed(session, request.claim_id)
        unreadable: Failed = {}
        damaged: Failed = {}
        async with (
            self.reads.room(READ_BYTES, session),
            aclosing(self._read(session, request, unreadable, damaged)) as responses,
        ):
            try:
                with self._core.working():
                    async for response in responses:
                        # A client that does not take it has the memory that others wait for.
                        with taken_within(self._config.stall_timeout_s, "what it reads"):
                            yield response
            finally:
                # Last: a damaged entry may end the claim, and with it the reading of the others.
                await self.report(unreadable, damaged)

    async def _read(
        self, session: int, request: pb.ReadRequest, unreadable: Failed, damaged: Failed
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        tracing, slices = self._core.tracing, Slices()
        pending = pb.ReadResponse()
        pending_bytes = 0
        for number, wanted in enumerate(request.ranges):
            await slices.pause()
            entries = self.claimed(session, request.claim_id)
            entry, offset, end = bounds_of(number, wanted, entries)
            sent_bytes = 0
            while offset + sent_bytes < end:
                # A chunk at a time: in between, others have their turn, and the claim may end.
                self.claimed(session, request.claim_id)
                room = limits.CHUNK_BYTES - pending_bytes
                piece_bytes = min(room, end - offset - sent_bytes)
                part = pending.parts.add(range=number, offset_bytes=sent_bytes)
                began_ns = 0 if tracing is None else tracing.now_ns()
                try:
                    part.data = await self._bytes(entry, wanted, offset + sent_bytes, piece_bytes)
                except Damaged as problem:
                    part.status = pb.READ_STATUS_DAMAGED
                    damaged[entry.generation] = entry, str(problem)
                    break
                except StoreError as problem:
                    part.status = pb.READ_STATUS_UNREADABLE
                    unreadable[entry.generation] = entry, str(problem)
                    break
                self._core.post(BytesRead(entry.tier, piece_bytes, self._core.clock.now_ns()))
                if tracing is not None:
                    tracing.read(entry.tier, piece_bytes, began_ns)
                sent_bytes += piece_bytes
                pending_bytes += piece_bytes
                if pending_bytes >= limits.CHUNK_BYTES:
                    yield pending
                    pending, pending_bytes = pb.ReadResponse(), 0
        # The last bytes were copied while the claim held, or nobody gets them.
        self.claimed(session, request.claim_id)
        if pending.parts:
            yield pending

    async def report(self, unreadable: Failed, damaged: Failed) -> None:
        """Tell what a read found. All of it, though its client hangs up meanwhile."""
        slices = Slices()
        reports = chain(
            ((self._unreadable, *failed) for failed in unreadable.values()),
            ((self._core.damaged, *failed) for failed in damaged.values()),
        )
        try:
            for report, entry, why in reports:
                report(entry, why)
                await slices.pause()
        finally:
            for report, entry, why in reports:
                report(entry, why)

    def _unreadable(self, entry: Entry, why: str) -> None:
        """Have an entry verified that could not be read. It stays; if it can't be read again, its
        tier is unhealthy."""
        log.warning("entry_unreadable", key=entry.key.hex(), why=why)
        self._core.verifications.request(entry)

    def claimed(self, session: int, claim_id: int) -> tuple[Entry, ...]:
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
        if not entry.published:
            raise StoreError("the entry was found damaged, and dropped")

        def take() -> bytes:
            with core.devices.under_way(entry.tier):
                if wanted.token_ids:
                    ids = store.token_ids(entry)
                    return ids[offset : offset + length_bytes]
                views = store.read(entry, offset, length_bytes)
                return b"".join(views)

        if not store.blocking:
            return take()
        return await core.devices.run(entry.tier, take)


def bounds_of(
    number: int, wanted: pb.ReadRange, entries: Sequence[Entry]
) -> tuple[Entry, int, int]:
    """Entry, first and last byte of a range, checked against the entries of its claim. Raises
    InvalidSize."""
    if wanted.index >= len(entries):
        raise InvalidSize(
            f"ranges[{number}]: the claim has {len(entries)} entries, "
            f"index {wanted.index} is not one of them"
        )
    entry = entries[wanted.index]
    there_bytes = entry.token_ids_bytes if wanted.token_ids else entry.payload_bytes
    end = wanted.offset_bytes + (wanted.length_bytes or there_bytes - wanted.offset_bytes)
    if wanted.offset_bytes > there_bytes or end > there_bytes:
        raise InvalidSize(
            f"ranges[{number}]: bytes {wanted.offset_bytes} to {end} are asked for, "
            f"the entry has {there_bytes}"
        )
    return entry, wanted.offset_bytes, end
