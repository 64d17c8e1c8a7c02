"""The `Cache` service: what workers call, over whatever transport. Every call becomes an event of
the core. Saves are in `save_calls`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from time import monotonic
from typing import Final

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import ClaimLost, InvalidSize, MalformedMessage, UnknownClaim, UnknownSession
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, DeleteStatus
from ...tiers.store import Damaged, StoreError
from ..config.options import Config
from ..core.effects import ClaimAnswer, DeleteAnswer, LookupAnswer, ReleaseAnswer
from ..core.entries import EntryState
from ..core.events import BytesRead, ClaimAsked, DeleteAsked, LookupAsked, ReleaseAsked
from ..core.shares import Holder
from ..runtime.devices import DoesNotAnswer
from ..runtime.limited_log import LimitedLog
from ..runtime.loop import Core
from ..runtime.quota import Quota
from ..runtime.recovery import durable_deletes
from ..runtime.rounds import Slices
from . import messages
from .access import Access, Role
from .calls import Caller, taken_within
from .session_streams import Sessions, SessionStream

log = LimitedLog("prefixd.service")

#: What a read occupies of the daemon's memory: its current chunk, as bytes, as a message, and as
#: what gRPC holds of it until the client takes it.
READ_BYTES: Final = 4 * limits.CHUNK_BYTES

#: The results of keys that are not there any more.
_GONE: Final = frozenset({DeleteStatus.DELETED, DeleteStatus.ABSENT})
#: Keys that one event deletes: between two, other calls have their turn.
_DELETED_AT_ONCE: Final = 128
#: How long a delete waits for the device that has its record, and for the shared engine.
DELETE_WAIT_S: Final = 1.0

_CLAIM_MODES = {
    pb.CLAIM_MODE_RUN: ClaimMode.RUN,
    pb.CLAIM_MODE_FIRST: ClaimMode.FIRST,
    pb.CLAIM_MODE_ANY: ClaimMode.ANY,
}


class CacheService:
    """See prefixd.proto for what each call promises. Methods raise PrefixdError."""

    def __init__(self, core: Core, sessions: Sessions, config: Config) -> None:
        self._core = core
        self.sessions: Final = sessions
        self.config: Final = config
        #: (keys, claim mode, deadline by `time.monotonic`) -> number of entries that were fetched
        #: from other nodes. None: this node shares nothing.
        self.fetcher: Callable[[Sequence[Key], ClaimMode, float], Awaitable[int]] | None = None
        self._lease_ms = config.sessions.claim_lease_ns // 1_000_000
        self._stall_s = config.server.stall_timeout_s
        self.reads: Final = Quota("reads", config.server.max_read_bytes, self._stall_s)

    def _keys(self, access: Access | None, raw: Sequence[bytes]) -> tuple[Key, ...]:
        """The stored keys for those that a request names. Raises PrefixdError."""
        return self.sessions.namespaces.keys(access, messages.keys_of("keys", raw))

    async def session(
        self, requests: AsyncIterator[pb.SessionRequest], caller: Caller
    ) -> AsyncGenerator[pb.SessionEvent, None]:
        stream = SessionStream(self._core, self.sessions, self.config, caller)
        async with aclosing(stream.run(requests)) as events:
            async for event in events:
                yield event

    # ---- lookups and claims

    async def lookup(self, request: pb.LookupRequest, caller: Caller) -> pb.LookupResponse:
        answer = await self._core.ask(self._lookup_asked(request, caller), LookupAnswer)
        return self._lookup_response(request, answer)

    def lookup_now(self, request: pb.LookupRequest, caller: Caller) -> pb.LookupResponse:
        """`lookup` for a request that waits for no save in flight."""
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
            tenant=caller.tenant,
        )

    def _lookup_response(
        self, request: pb.LookupRequest, answer: LookupAnswer
    ) -> pb.LookupResponse:
        return messages.lookup_response(answer, self.sessions.incarnation, brief=request.brief)

    async def claim(self, request: pb.ClaimRequest, caller: Caller) -> pb.ClaimResponse:
        question = self._claim_asked(request, caller)
        with self.sessions.latencies.measured(self.sessions.latencies.claim):
            answer = await self._core.ask(question, ClaimAnswer)
        return self._claim_response(request, caller, question, answer)

    def claim_now(self, request: pb.ClaimRequest, caller: Caller) -> pb.ClaimResponse:
        """`claim` for a request that waits for no save in flight."""
        question = self._claim_asked(request, caller)
        with self.sessions.latencies.measured(self.sessions.latencies.claim):
            answer = self._core.ask_now(question, ClaimAnswer)
        return self._claim_response(request, caller, question, answer)

    def _claim_asked(self, request: pb.ClaimRequest, caller: Caller) -> ClaimAsked:
        core = self._core
        now_ns = core.clock.now_ns()
        if request.mode not in _CLAIM_MODES:
            raise MalformedMessage(f"claim mode {request.mode} does not exist")
        membership = self.sessions.prove(request.session, caller)
        return ClaimAsked(
            request=core.next_request(),
            session=membership.number,
            keys=self._keys(membership.access, request.keys),
            mode=_CLAIM_MODES[request.mode],
            lease_ns=messages.milliseconds(
                "lease_ms",
                request.lease_ms,
                default=self._lease_ms,
                most=self._lease_ms,
            ),
            wait_until_ns=messages.wait_until(now_ns, request.wait_ms),
            now_ns=now_ns,
        )

    def _claim_response(
        self, request: pb.ClaimRequest, caller: Caller, question: ClaimAsked, answer: ClaimAnswer
    ) -> pb.ClaimResponse:
        caller.when_done(partial(self._release_unseen, question.session, answer.claim))
        return messages.claim_response(answer, brief=request.brief)

    def _release_unseen(self, session: int, claim: int, gone: bool) -> None:
        """Release a claim whose client gave up before the answer: else it would last as long as
        its session."""
        if claim and gone:
            self._core.post(self.release_of(session, [claim]))

    def release_of(self, session: int, claims: Sequence[int]) -> ReleaseAsked:
        core = self._core
        return ReleaseAsked(core.next_request(), session, tuple(claims), core.clock.now_ns())

    async def release(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseResponse:
        return self.release_now(request, caller)

    def release_now(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseResponse:
        """`release`, which never waits."""
        messages.batch_of("claim_ids", request.claim_ids)
        session = self.sessions.prove(request.session, caller).number
        answer = self._core.ask_now(self.release_of(session, request.claim_ids), ReleaseAnswer)
        return pb.ReleaseResponse(results=[r.value for r in answer.results])  # type: ignore[misc]

    def claimed(self, session: int, claim_id: int) -> tuple[EntryState, ...]:
        """The entries of a claim that this session holds. Raises UnknownSession, ClaimLost,
        UnknownClaim."""
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

    # ---- deletes and pulls

    async def delete(self, request: pb.DeleteRequest, caller: Caller) -> pb.DeleteResponse:
        requested = messages.keys_of("keys", request.keys)
        membership = self.sessions.prove(request.session, caller, Role.WRITE)
        keys = self.sessions.namespaces.keys(membership.access, requested)
        results = await delete_entries(self._core, membership.holder, keys)
        return pb.DeleteResponse(results=[r.value for r in results])  # type: ignore[misc]

    async def pull(self, request: pb.PullRequest, caller: Caller) -> pb.PullResponse:
        membership = self.sessions.prove(request.session, caller, Role.WRITE)
        keys = self._keys(membership.access, request.keys)
        if request.mode not in (pb.CLAIM_MODE_RUN, pb.CLAIM_MODE_FIRST):
            raise MalformedMessage(f"a pull of mode {request.mode} does not exist")
        if self.fetcher is None:
            return pb.PullResponse()
        wait_ms = min(request.wait_ms or limits.DEFAULT_SHARED_WAIT_MS, limits.MAX_WAIT_MS)
        deadline_s = monotonic() + wait_ms / 1e3
        fetched = await self.fetcher(keys, _CLAIM_MODES[request.mode], deadline_s)
        return pb.PullResponse(pulled=fetched)

    # ---- reads

    async def read(
        self, request: pb.ReadRequest, caller: Caller
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        membership = self.sessions.prove(request.session, caller)
        session = membership.number
        messages.batch_of("ranges", request.ranges)
        self.claimed(session, request.claim_id)
        failures = ReadFailures()
        async with (
            self.reads.room(READ_BYTES, membership.holder),
            aclosing(self._read(session, request, failures)) as responses,
        ):
            try:
                with self._core.working():
                    async for response in responses:
                        # A client that does not read its answer holds memory that others need.
                        with taken_within(self._stall_s, "what it reads"):
                            yield response
            finally:
                # Reported last: a damaged entry may end the claim, and the reading with it.
                await self.report(failures)

    async def _read(
        self, session: int, request: pb.ReadRequest, failures: ReadFailures
    ) -> AsyncGenerator[pb.ReadResponse, None]:
        tracing, slices = self._core.tracing, Slices()
        pending = pb.ReadResponse()
        pending_bytes = 0
        for number, requested in enumerate(request.ranges):
            await slices.pause()
            entries = self.claimed(session, request.claim_id)
            entry, offset, end = bounds_of(number, requested, entries)
            sent_bytes = 0
            while offset + sent_bytes < end:
                # Other calls run between two chunks, and the claim may end.
                self.claimed(session, request.claim_id)
                room = limits.CHUNK_BYTES - pending_bytes
                piece_bytes = min(room, end - offset - sent_bytes)
                part = pending.parts.add(range=number, offset_bytes=sent_bytes)
                began_ns = 0 if tracing is None else tracing.now_ns()
                try:
                    part.data = await self._bytes(
                        entry, requested, offset + sent_bytes, piece_bytes
                    )
                except (Damaged, StoreError) as problem:
                    part.status = failures.add(entry, problem)
                    break
                self._core.post(BytesRead(entry.tier, piece_bytes, self._core.clock.now_ns()))
                if tracing is not None:
                    tracing.read(entry.tier, piece_bytes, began_ns)
                sent_bytes += piece_bytes
                pending_bytes += piece_bytes
                if pending_bytes >= limits.CHUNK_BYTES:
                    yield pending
                    pending, pending_bytes = pb.ReadResponse(), 0
        # The last bytes are sent only if the claim still held after they were copied.
        self.claimed(session, request.claim_id)
        if pending.parts:
            yield pending

    async def _bytes(
        self, entry: EntryState, requested: pb.ReadRange, offset: int, length_bytes: int
    ) -> bytes:
        core = self._core
        store = core.stores[entry.tier]
        core.devices.check_answers(entry.tier)
        if not entry.published:
            raise StoreError("the entry was found damaged, and dropped")

        def take() -> bytes:
            with core.devices.under_way(entry.tier):
                if requested.token_ids:
                    return store.token_ids(entry)[offset : offset + length_bytes]
                return b"".join(store.read(entry, offset, length_bytes))

        if not store.blocking:
            return take()
        return await core.devices.run(entry.tier, take)

    async def report(self, failures: ReadFailures) -> None:
        """Report what a read could not get: all of it, even if the call is cancelled meanwhile."""
        slices = Slices()
        reports = chain(
            ((self._unreadable, *failed) for failed in failures.unreadable.values()),
            ((self._core.damaged, *failed) for failed in failures.damaged.values()),
        )
        try:
            for report, entry, why in reports:
                report(entry, why)
                await slices.pause()
        finally:
            for report, entry, why in reports:
                report(entry, why)

    def _unreadable(self, entry: EntryState, why: str) -> None:
        """Have an entry verified that could not be read. It stays. If it can't be read again, its
        tier is unhealthy."""
        log.warning("entry_unreadable", key=entry.key.hex(), why=why)
        self._core.verifications.request(entry)


class ReadFailures:
    """The entries whose bytes a read did not get, by generation, each with the reason."""

    def __init__(self) -> None:
        #: Their bytes are not those that were saved.
        self.damaged: Final[dict[int, tuple[EntryState, str]]] = {}
        #: A store could not read them.
        self.unreadable: Final[dict[int, tuple[EntryState, str]]] = {}

    def add(self, entry: EntryState, problem: Damaged | StoreError) -> pb.ReadStatus.ValueType:
        """Returns what the client is told of the entry."""
        if isinstance(problem, DoesNotAnswer):
            return pb.READ_STATUS_UNREADABLE  # it says nothing about the entry
        damaged = isinstance(problem, Damaged)
        (self.damaged if damaged else self.unreadable)[entry.generation] = entry, str(problem)
        return pb.READ_STATUS_DAMAGED if damaged else pb.READ_STATUS_UNREADABLE


async def delete_entries(
    core: Core, holder: Holder | None, keys: Sequence[Key]
) -> list[DeleteStatus]:
    """Delete entries for a session, or (None) for an operator, and wait until that is durable.

    Where a device or the shared engine does not take it within `DELETE_WAIT_S`, the result is
    ERASING.
    """
    until_s = monotonic() + DELETE_WAIT_S
    generation = core.state.tables.stamp_ns
    results, withdrawn = await drop_entries(core, holder, keys, until_s)
    # The others stay: a recovery must not drop their records.
    gone = [key for key, each in zip(keys, results, strict=True) if each in _GONE]
    durable = await durable_deletes(core, gone, generation, until_s)
    if not (durable and withdrawn):
        results = [DeleteStatus.ERASING if each in _GONE else each for each in results]
    return results


async def drop_entries(
    core: Core,
    holder: Holder | None,
    keys: Sequence[Key],
    until_s: float,
    *,
    announced: bool = True,
) -> tuple[list[DeleteStatus], bool]:
    """Delete entries here, a few at a time, and from the shared engine. Does not wait until that is
    durable. Returns what became of each, and whether the engine has dropped them by `until_s`, and
    tells the other nodes. `announced`: they are to be told of these keys."""
    results: list[DeleteStatus] = []
    if not keys:
        return results, True
    shared = core.entry_listener
    session = None if holder is None else holder.session
    slices = Slices()
    if shared is not None:
        shared.deleting(keys, holder or Holder())
    try:
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            part = tuple(keys[start : start + _DELETED_AT_ONCE])
            question = DeleteAsked(core.next_request(), session, part, core.clock.now_ns())
            results += (await core.ask(question, DeleteAnswer)).results
            await slices.pause()
    finally:
        # Also of a call that was given up: what it deleted is gone from here.
        if shared is not None:
            gone = {key: None for key, each in zip(keys, results, strict=False) if each in _GONE}
            kept = [key for key in keys if key not in gone]
            withdrawn = await shared.deleted(list(gone), kept, until_s, announced=announced)
    return results, shared is None or withdrawn


def bounds_of(
    number: int, requested: pb.ReadRange, entries: Sequence[EntryState]
) -> tuple[EntryState, int, int]:
    """The entry of a range, its first byte, and the end of it. `entries` are those of the claim.
    Raises InvalidSize."""
    if requested.index >= len(entries):
        raise InvalidSize(
            f"ranges[{number}]: the claim has {len(entries)} entries, "
            f"index {requested.index} is not one of them"
        )
    entry = entries[requested.index]
    size_bytes = entry.token_ids_bytes if requested.token_ids else entry.payload_bytes
    end = requested.offset_bytes + (requested.length_bytes or size_bytes - requested.offset_bytes)
    if requested.offset_bytes > size_bytes or end > size_bytes:
        raise InvalidSize(
            f"ranges[{number}]: bytes {requested.offset_bytes} to {end} are asked for, "
            f"the entry has {size_bytes}"
        )
    return entry, requested.offset_bytes, end
