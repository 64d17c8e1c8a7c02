"""The `Admin` service: what operators see and order. Reads the live tables on the loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

from ..proto import limits
from ..proto import prefixd_pb2 as pb
from ..proto import prefixd_pb2_grpc as rpc
from ..proto.errors import CurveDisabled, InvalidSize, UnknownEntry
from ..tiers.ledger import Admission, Ledger
from . import messages
from .answers import EvictAnswer
from .effects import IndexClaim, IndexDelete, IndexPut
from .events import EvictAsked, Tick
from .loop import Core
from .metrics import counters_dict
from .recovery import collect_garbage
from .sessions import ServiceConfig
from .tables import Entry
from .wire import Context

_DEFAULT_PAGE_ENTRIES = 100
#: More entries than any tier holds.
_MAX_CURSOR = 2**40
_DEFAULT_QUARTERS = (1, 2, 4, 8, 16)


class AdminService(rpc.AdminServicer):
    """See prefixd.proto for what each rpc promises."""

    def __init__(self, core: Core, config: ServiceConfig) -> None:
        self._core = core
        self._config = config
        self._started_ns = core.clock.now_ns()

    # ---- what there is

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        core = self._core
        t = core.state.tables
        ill = core.ill()
        return pb.StatsResponse(
            daemon_version=self._config.daemon_version,
            incarnation=self._config.incarnation,
            uptime_ms=(core.clock.now_ns() - self._started_ns) // 1_000_000,
            pid=os.getpid(),
            tiers=[self._tier_stats(ledger) for ledger in t.ledgers.values()],
            sessions=len(t.sessions),
            claims=len(t.claims),
            reservations=len(t.reservations),
            waiters=len(t.waiting),
            counters=counters_dict(core.state),
            health="; ".join(f"{name}: {why}" for name, why in ill.items()) or "serving",
        )

    def _tier_stats(self, ledger: Ledger) -> pb.TierStats:
        counters = self._core.state.tables.tier_counters[ledger.tier]
        return pb.TierStats(
            tier=ledger.tier.value,  # type: ignore[arg-type]
            policy=ledger.policy.name,
            budget_bytes=ledger.budget_bytes,
            secured_bytes=ledger.limit_bytes,
            published_bytes=ledger.published_bytes,
            reserved_bytes=ledger.reserved_bytes,
            pinned_bytes=ledger.pinned_bytes,
            payload_bytes=counters.payload_bytes,
            entries=ledger.entries,
            pinned_entries=ledger.pinned_entries,
            max_entries=ledger.max_entries,
            hits=counters.hits,
            hit_tokens=counters.hit_tokens,
            saves=counters.saves,
            saved_bytes=counters.saved_bytes,
            read_bytes=counters.read_bytes,
            evictions=counters.evictions,
            evicted_bytes=counters.evicted_bytes,
            corrupt=counters.corrupt,
            recovered_entries=counters.recovered_entries,
            recovered_bytes=counters.recovered_bytes,
            dropped_at_start=counters.dropped_at_start,
        )

    async def ListEntries(
        self, request: pb.ListEntriesRequest, context: Context
    ) -> pb.ListEntriesResponse:
        t = self._core.state.tables
        ledger = t.ledgers[messages.tier_of(request.tier, t.ledgers)]
        page_entries = request.page_entries or _DEFAULT_PAGE_ENTRIES
        if page_entries > limits.MAX_PAGE_ENTRIES:
            raise InvalidSize(f"page_entries is above {limits.MAX_PAGE_ENTRIES}")
        if request.cursor > _MAX_CURSOR:
            raise InvalidSize(f"cursor {request.cursor} is not one that a page gave")
        # A page more by one tells whether another follows.
        order = self._next_victim_first(ledger)
        page = list(islice(order, request.cursor, request.cursor + page_entries + 1))
        more = len(page) > page_entries
        return pb.ListEntriesResponse(
            entries=map(messages.entry_detail, page[:page_entries]),
            next_cursor=request.cursor + page_entries if more else 0,
        )

    def _next_victim_first(self, ledger: Ledger) -> Iterator[Entry]:
        entries = self._core.state.tables.entries
        yield from (entries[key] for key in ledger.victims())
        yield from (e for e in entries.values() if e.tier is ledger.tier and e.pins)

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectResponse:
        (key,) = messages.keys_of("key", [request.key])
        entry = self._core.state.tables.entries.get(key)
        if entry is None:
            raise UnknownEntry(f"no entry {key.hex()}; it was evicted, or never published")
        detail = messages.entry_detail(entry)
        problem = await self._verify(entry) if request.verify else None
        return pb.InspectResponse(entry=detail, verified=problem is not None, problem=problem or "")

    async def ListClaims(
        self, request: pb.ListClaimsRequest, context: Context
    ) -> pb.ListClaimsResponse:
        t = self._core.state.tables
        now_ns = self._core.clock.now_ns()
        claims = []
        for claim in t.claims.values():
            session = t.sessions[claim.session]
            renewed_ns = max(claim.taken_ns, session.heartbeat_ns)
            claims.append(
                pb.ClaimDetail(
                    claim_id=claim.claim,
                    session_id=claim.session,
                    owner=session.owner,
                    age_ms=_ms(now_ns - claim.taken_ns),
                    lease_left_ms=_ms(renewed_ns + claim.lease_ns - now_ns),
                    keys=[entry.key for entry in claim.entries],
                    payload_bytes=sum(entry.payload_bytes for entry in claim.entries),
                )
            )
        return pb.ListClaimsResponse(claims=claims)

    async def ListReservations(
        self, request: pb.ListReservationsRequest, context: Context
    ) -> pb.ListReservationsResponse:
        t = self._core.state.tables
        now_ns = self._core.clock.now_ns()
        return pb.ListReservationsResponse(
            reservations=[
                pb.ReservationDetail(
                    token=r.token,
                    key=r.key,
                    session_id=r.session,
                    owner=t.sessions[r.session].owner if r.session in t.sessions else "(ended)",
                    tier=r.tier.value,  # type: ignore[arg-type]
                    stage=r.stage.name.lower(),
                    age_ms=_ms(now_ns - r.reserved_ns),
                    ttl_left_ms=_ms(r.expires_ns - now_ns),
                    payload_bytes=r.payload_bytes,
                    stored_bytes=r.stored_bytes,
                    waiters=len(r.waiters),
                )
                for r in t.reservations.values()
            ]
        )

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        now_ns = self._core.clock.now_ns()
        return pb.ListSessionsResponse(
            sessions=[
                pb.SessionDetail(
                    session_id=session.session,
                    owner=session.owner,
                    age_ms=_ms(now_ns - session.opened_ns),
                    heartbeat_age_ms=_ms(now_ns - session.heartbeat_ns),
                    claims=len(session.claims),
                    reservations=len(session.tokens),
                )
                for session in self._core.state.tables.sessions.values()
            ]
        )

    # ---- room

    async def Preview(self, request: pb.PreviewRequest, context: Context) -> pb.PreviewResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        if not 0 < request.payload_bytes <= limits.MAX_PAYLOAD_BYTES:
            raise InvalidSize(f"payload_bytes is {request.payload_bytes}; ask for at least 1")
        ledger = t.ledgers[tier]
        count = request.entries or 1
        needed_bytes = count * self._core.stores[tier].stored_bytes(request.payload_bytes, 0)
        admission = ledger.admission(needed_bytes, count)
        victims = []
        if admission is Admission.AFTER_EVICTION:
            victims = list(self._preview_victims(ledger, needed_bytes, count))
        return pb.PreviewResponse(
            admissible=admission in (Admission.FITS, Admission.AFTER_EVICTION),
            retryable=admission is Admission.NO_ROOM,
            message=_ADMISSION_SENTENCES[admission],
            free_bytes=max(0, ledger.free_bytes),
            unpinned_bytes=ledger.unpinned_bytes,
            pinned_bytes=ledger.pinned_bytes,
            reserved_bytes=ledger.reserved_bytes,
            needed_bytes=needed_bytes,
            evicted_bytes=sum(entry.stored_bytes for entry in victims),
            victims=map(messages.entry_detail, victims[: limits.MAX_PAGE_ENTRIES]),
        )

    def _preview_victims(self, ledger: Ledger, needed_bytes: int, count: int) -> Iterator[Entry]:
        entries = self._core.state.tables.entries
        freed_bytes = 0
        for freed_entries, key in enumerate(ledger.victims()):
            if ledger.fits_after(needed_bytes, count, freed_bytes, freed_entries):
                return
            entry = entries[key]
            freed_bytes += entry.stored_bytes
            yield entry

    async def Curve(self, request: pb.CurveRequest, context: Context) -> pb.CurveResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        if tier not in t.curves:
            raise CurveDisabled("this daemon samples no curve; set server.curve_keys")
        own_bytes = t.ledgers[tier].budget_bytes
        budgets = tuple(request.budget_bytes) or tuple(
            own_bytes * quarters // 4 for quarters in _DEFAULT_QUARTERS
        )
        if len(budgets) > limits.MAX_BATCH_KEYS:
            raise InvalidSize(f"at most {limits.MAX_BATCH_KEYS} budgets go into one call")
        curve = t.curves[tier].estimate()
        return pb.CurveResponse(
            points=[
                pb.CurvePoint(budget_bytes=budget, hit_tokens=round(curve.at(budget)))
                for budget in budgets
            ],
            budget_bytes=own_bytes,
            hit_tokens=t.tier_counters[tier].hit_tokens,
            total_tokens=round(curve.total),
            sampled_keys=curve.keys,
            sampled_tokens=round(curve.total * curve.rate),
        )

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        core = self._core
        if request.free_bytes == 0:
            raise InvalidSize("free_bytes is 0; say how many bytes to free")
        question = EvictAsked(
            request=core.next_request(),
            tiers=messages.tiers_of(request.tiers, core.stores),
            free_bytes=request.free_bytes,
            now_ns=core.clock.now_ns(),
        )
        answer = await core.ask(question, EvictAnswer)
        return pb.EvictResponse(
            results=[
                pb.EvictResult(
                    tier=r.tier.value,  # type: ignore[arg-type]
                    entries=r.entries,
                    freed_bytes=r.freed_bytes,
                )
                for r in answer.results
            ]
        )

    # ---- order

    async def Gc(self, request: pb.GcRequest, context: Context) -> pb.GcResponse:
        core = self._core
        counters = core.state.tables.counters
        claims, reservations = counters.claims_lost, counters.reservations_lost
        core.post(Tick(core.clock.now_ns(), flush=True))
        records, rows = await collect_garbage(core)
        return pb.GcResponse(
            expired_claims=counters.claims_lost - claims,
            expired_reservations=counters.reservations_lost - reservations,
            orphan_records=records,
            orphan_index_rows=rows,
        )

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckResponse:
        core = self._core
        problems = [*core.state.check(), *self._index_problems()]
        verified = verified_bytes = 0
        if request.deep:
            for entry in list(core.state.tables.entries.values()):
                if not entry.published:
                    continue
                problem = await self._verify(entry)
                if problem is None:
                    continue
                if problem:
                    problems.append(f"entry {entry.key.hex()}: {problem}")
                verified += 1
                verified_bytes += entry.payload_bytes
        return pb.CheckResponse(
            problems=problems,
            entries=len(core.state.tables.entries),
            payloads_verified=verified,
            payload_bytes_verified=verified_bytes,
        )

    def _index_problems(self) -> Iterator[str]:
        """The index has to say what the state says, no more and no less."""
        index = self._core.index
        if index.problem is not None:
            yield f"the index is behind: {index.problem}"
        if index.revoked:
            return
        for change in index.differences(self._core.state.tables.entries):
            match change:
                case IndexPut():
                    yield f"the index lacks {change.entry.key.hex()}, or has something else for it"
                case IndexDelete():
                    yield f"the index lists {change.key.hex()}, which is not there"
                case IndexClaim():
                    for key in change.keys:
                        yield f"the index is wrong about a claim on {key.hex()}"

    async def _verify(self, entry: Entry) -> str | None:
        """What is wrong with the bytes of an entry, if anything is; it is dropped then. None: it
        left meanwhile, and what was read may have been another's."""
        core = self._core
        problem = await core.read_problem(entry)
        if not problem:
            return ""
        if not entry.published:
            return None
        core.damaged(entry, problem)
        return problem


_ADMISSION_SENTENCES = {
    Admission.FITS: "it fits without evicting anything",
    Admission.AFTER_EVICTION: "it fits after evicting the victims",
    Admission.NO_ROOM: "everything that could go is pinned or reserved; retrying may help",
    Admission.TOO_LARGE: "it is larger than the tier; retrying can't help",
}


def _ms(duration_ns: int) -> int:
    return max(0, duration_ns) // 1_000_000
