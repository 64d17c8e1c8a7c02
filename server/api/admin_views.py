"""What operators see: the part of the `Admin` service that changes nothing.

It reads the live tables on the loop, in slices, so that no client waits for it however much there
is. Each page of a list takes the loop equally long, wherever in the list it is. The daemon keeps
nothing between two pages: the cursor says where the next one begins.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ... import __version__
from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import CurveDisabled, InvalidKey, InvalidSize, UnknownClaim, UnknownEntry
from ...proto.kernel import FORM as KERNEL_FORM
from ...proto.keys import Key
from ...proto.namespaces import TenantNamespace
from ...proto.vocabulary import Tier
from ...tiers.ledger import Admission, Ledger
from ..core.counters import Histogram
from ..core.entries import SHARDS, EntryState
from ..core.journal import CAUSES, Happened
from ..core.sessions import Claim, HeldReservation
from ..runtime.loop import Core
from ..runtime.resizing import Resizing
from ..runtime.rounds import Slices
from ..runtime.scrubbing import Scrub
from ..runtime.verification import Reading
from . import messages
from .calls import Caller
from .identities import list_identities, saver_of
from .metrics import SCRUB_COUNTERS, TIER_COUNTERS, TIER_GAUGES, counters_dict, lag_dict
from .session_streams import Sessions
from .usage import SessionUsage, bounded

_DEFAULT_PAGE_ENTRIES = 100
#: Keys that are shown of a claim, and keys in a page of claims.
_SHOWN_KEYS = 8
_MAX_PAGE_KEYS = 100_000
#: Bounds of a `why`: the prefix of a key, events, and entries.
_MIN_KEY_BYTES = 2
_MOST_EVENTS = 1_000
_MOST_PRESENT = 100
#: Victims that a preview names: they are found at one moment.
_MOST_VICTIMS: Final = 1_000
_DEFAULT_QUARTERS = (1, 2, 4, 8, 16)
#: The owner of claims and reservations whose session has ended.
_ENDED = "(ended)"


@dataclass(eq=False, repr=False)
class AdminViews:
    """See prefixd.proto for what each rpc promises."""

    _core: Core
    _sessions: Sessions
    #: Memory that calls occupy, by name.
    _in_flight: Callable[[], Mapping[str, int]]
    #: Progress of the tiers that are scrubbed.
    _scrubs: Mapping[Tier, Scrub]
    #: What was shared with other nodes, and the nodes. The daemon sets these if it shares.
    shared: Callable[[], Mapping[str, int]] = dict
    shared_nodes: Callable[[], Sequence[pb.SharedNode]] = list
    #: (prefix of a key, limit) -> what was fetched from and offered to other nodes.
    shared_events: Callable[[bytes, int], Sequence[pb.SharedEvent]] = lambda *_: ()

    def __post_init__(self) -> None:
        self.resizing = Resizing(self._core)
        self._started_ns = self._core.clock.now_ns()

    # ---- figures

    async def stats(self, request: pb.StatsRequest, _caller: Caller) -> pb.StatsResponse:
        core, slices = self._core, Slices()
        usage = {}
        for label, sums in self._sessions.usage.items():
            usage[label] = sums.message()
            await slices.pause()
        t = core.state.tables
        unhealthy = core.unhealthy()
        return pb.StatsResponse(
            daemon_version=__version__,
            kernel=KERNEL_FORM,
            incarnation=self._sessions.incarnation,
            uptime_ms=(core.clock.now_ns() - self._started_ns) // 1_000_000,
            pid=os.getpid(),
            tiers=[self._tier_stats(ledger) for ledger in t.ledgers.values()],
            sessions=len(t.sessions),
            claims=len(t.claims),
            reservations=len(t.reservations),
            waiters=len(t.waiting),
            counters=counters_dict(core.state) | lag_dict(core.lag),
            in_flight=self._in_flight(),
            shared=self.shared(),
            shared_nodes=self.shared_nodes(),
            notices=core.notices(),
            usage=usage,
            stages=self._stages(),
            oldest_claim_ms=t.oldest_claim_ns(core.clock.now_ns()) // 1_000_000,
            health="; ".join(f"{name}: {why}" for name, why in unhealthy.items()) or "serving",
        )

    def _stages(self) -> Iterator[pb.StageTimes]:
        committers = self._core.committers
        latencies = self._sessions.latencies
        stages: dict[str, Histogram] = {"claim": latencies.claim, "save": latencies.save}
        stages |= {f"commit {tier.label}": taken for tier, taken in committers.latencies().items()}
        stages |= {f"sync {tier.label}": taken for tier, taken in committers.syncs().items()}
        stages |= {"restore": self._sessions.usage.restores(), "loop": self._core.lag.pulses}
        for name, taken in stages.items():
            times = map(bounded, taken.counts)
            yield pb.StageTimes(stage=name, bounds_ns=taken.bounds, times=times)

    def _tier_stats(self, ledger: Ledger) -> pb.TierStats:
        counters = self._core.state.tables.tier_counters[ledger.tier]
        store = self._core.stores[ledger.tier]
        numbers = {name: getattr(counters, name) for name in TIER_COUNTERS}
        numbers |= {name: getattr(ledger, name) for name in TIER_GAUGES}
        del numbers["reservations"]  # counted over all tiers only
        return pb.TierStats(
            tier=ledger.tier.value,  # type: ignore[arg-type]
            policy=pb.EvictionPolicy.Value(f"EVICTION_POLICY_{ledger.policy.name.upper()}"),
            # Memory that the store needs beside its arena is secured together with the arena.
            secured_bytes=ledger.budget_bytes - (store.size_bytes - store.secured_bytes),
            payload_bytes=counters.payload_bytes,
            state=self._core.devices.state(ledger.tier).value,  # type: ignore[arg-type]
            oldest_io_ms=self._core.devices.oldest_ns(ledger.tier) // 1_000_000,
            scrub=self._scrub_stats(ledger.tier),
            kept_bytes=self.resizing.kept_bytes(ledger.tier),
            namespaces=[
                pb.NamespaceStats(
                    namespace=part.namespace,
                    share_bytes=part.share_bytes,
                    used_bytes=part.used_bytes,
                    fixed_bytes=part.fixed_bytes,
                    entries=part.used_entries,
                )
                for part in (ledger.shares.standings if ledger.shares is not None else ())
            ],
            **numbers,
        )

    def _scrub_stats(self, tier: Tier) -> pb.ScrubStats | None:
        scrub = self._scrubs.get(tier)
        if scrub is None:
            return None
        return pb.ScrubStats(
            last_pass_unix_ns=scrub.last_pass_unix_ns,
            progress_permille=int(1_000 * scrub.progress),
            **{name: getattr(scrub, name) for name in SCRUB_COUNTERS},
        )

    async def inspect(self, request: pb.InspectRequest, _caller: Caller) -> pb.InspectResponse:
        (key,) = messages.keys_of("key", [request.key])
        entry = self._core.state.tables.entries.get(key)
        if entry is None:
            raise UnknownEntry(f"no entry {key.hex()}; it was evicted, or never published")
        response = pb.InspectResponse(entry=messages.entry_detail(entry))
        saver = await saver_of(self._core.state.tables.journal, key)
        response.identities.extend(one.message() for one in self._sessions.identities.of(saver))
        if request.verify:
            verdict = await self._core.verifications.verify(entry)
            if verdict is None:
                response.problem = "it left while it was read"
            else:
                response.verified = verdict.reading is not Reading.FAILED
                response.problem = verdict.why
        return response

    # ---- forecasts

    async def preview(self, request: pb.PreviewRequest, _caller: Caller) -> pb.PreviewResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        if not 0 < request.payload_bytes <= limits.MAX_PAYLOAD_BYTES:
            most = limits.MAX_PAYLOAD_BYTES
            raise InvalidSize(f"payload_bytes is {request.payload_bytes}; ask for 1 ... {most}")
        ledger = t.ledgers[tier]
        key = _key_of(request.namespace)
        count = request.entries or 1
        needed_bytes = count * self._core.stores[tier].stored_bytes(request.payload_bytes, 0)
        if needed_bytes >= 2**63:
            raise InvalidSize(f"{needed_bytes} bytes are more than any tier has")
        admission = ledger.admission(needed_bytes, count, key)
        victims = []
        if admission is Admission.AFTER_EVICTION:
            leaving = ledger.foretell(
                needed_bytes // count, count, lambda key: t.entries[key].stored_bytes, key
            )
            victims = [t.entries[key] for key in islice(leaving, _MOST_VICTIMS)]
        response = pb.PreviewResponse(
            admissible=admission in (Admission.FITS, Admission.AFTER_EVICTION),
            retryable=admission in (Admission.NO_ROOM, Admission.OVER_SHARE),
            message=_ADMISSION_SENTENCES[admission].format(option=f"{tier.label}.shares"),
            free_bytes=max(0, ledger.free_bytes),
            unpinned_bytes=ledger.unpinned_bytes,
            pinned_bytes=ledger.pinned_bytes,
            reserved_bytes=ledger.reserved_bytes,
            needed_bytes=needed_bytes,
            evicted_bytes=sum(entry.stored_bytes for entry in victims),
        )
        await _add_details(response.victims, victims, Slices())
        return response

    async def curve(self, request: pb.CurveRequest, _caller: Caller) -> pb.CurveResponse:
        state = self._core.state
        t = state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        sampled = state.curve(tier)
        if sampled is None:
            raise CurveDisabled("this daemon samples no curve; set server.curve_keys")
        own_bytes = t.ledgers[tier].budget_bytes
        if len(request.budget_bytes) > limits.MAX_BATCH_KEYS:
            raise InvalidSize(f"at most {limits.MAX_BATCH_KEYS} budgets go into one call")
        budgets = tuple(request.budget_bytes) or tuple(
            own_bytes * quarters // 4 for quarters in _DEFAULT_QUARTERS
        )
        curve = sampled.estimate()
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

    # ---- lists

    async def list_entries(
        self, request: pb.ListEntriesRequest, _caller: Caller
    ) -> pb.ListEntriesResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        page_entries = _page_of("page_entries", request.page_entries)
        response, slices = pb.ListEntriesResponse(), Slices()
        if request.next_victims:
            page = await self._next_victims(t.ledgers[tier], page_entries, slices)
            await _add_details(response.entries, page, slices)
            return response
        shard, last = _cursor_of(request.cursor)
        # A shard is read at one moment. Its entries are listed in the order of their keys.
        for number in range(shard, SHARDS):
            room = page_entries - len(response.entries)
            entries = [e for e in t.entries.shards[number].values() if e.tier is tier]
            keys = sorted(e.key for e in entries if number > shard or e.key > last)
            response.entries.extend(messages.entry_detail(t.entries[key]) for key in keys[:room])
            if len(response.entries) == page_entries:
                if room:
                    response.next_cursor = number.to_bytes(2, "big") + keys[room - 1]
                return response
            await slices.pause()
        return response

    async def _next_victims(
        self, ledger: Ledger, page_entries: int, slices: Slices
    ) -> list[EntryState]:
        """A page of the entries that leave next, followed by pinned ones."""
        t = self._core.state.tables
        # Read at one moment: the order must not change meanwhile.
        leaving = ledger.victims(lambda key: t.entries[key].stored_bytes)
        found = dict.fromkeys(t.entries[key] for key in islice(leaving, page_entries))
        # Pinned entries are found by their claims, many of which may hold the same entries.
        most_held = 10 * page_entries
        for claim in list(islice(t.claims.values(), most_held)):
            if len(found) >= page_entries or most_held <= 0:
                break
            await slices.pause()
            most_held -= len(claim.entries)
            found.update((e, None) for e in claim.entries if e.tier is ledger.tier and e.published)
        return list(found)[:page_entries]

    async def why(self, request: pb.WhyRequest, _caller: Caller) -> pb.WhyResponse:
        t = self._core.state.tables
        prefix = request.key
        if not _MIN_KEY_BYTES <= len(prefix) <= limits.KEY_BYTES:
            raise InvalidKey(f"a key begins with {_MIN_KEY_BYTES} to {limits.KEY_BYTES} bytes")
        journal = t.journal
        response = pb.WhyResponse(
            remembered_events=len(journal), remembered_since_unix_ns=journal.since_ns()
        )
        newest: list[Happened] = []
        slices = Slices()
        for happened in journal.newest_of(prefix):
            if happened is None:
                await slices.pause()
                continue
            newest.append(happened)
            if len(newest) == _MOST_EVENTS:
                break
        for happened in reversed(newest):
            cause = CAUSES.get(happened.what)
            owner, label = journal.who(happened.session)
            response.events.add(
                key=happened.key,
                what=pb.KeyEventKind.Value(
                    f"KEY_EVENT_KIND_{happened.what.name if cause is None else 'EVICTED'}"
                ),
                tier=pb.Tier.ValueType(happened.tier),
                at_unix_ns=happened.at_ns,
                reason=pb.SaveReason.ValueType(happened.reason),
                cause=pb.EvictionCause.Value(
                    f"EVICTION_CAUSE_{cause.name if cause else 'UNSPECIFIED'}"
                ),
                session_id=happened.session,
                owner=owner,
                label=label,
            )
            await slices.pause()
        response.shared.extend(self.shared_events(prefix, _MOST_EVENTS))
        for shard in t.entries.shards:
            there = [e for e in shard.values() if e.key.startswith(prefix)]
            room = _MOST_PRESENT - len(response.present)
            response.present.extend(messages.entry_detail(entry) for entry in there[:room])
            await slices.pause()
        return response

    async def list_claims(
        self, request: pb.ListClaimsRequest, _caller: Caller
    ) -> pb.ListClaimsResponse:
        claims = self._core.state.tables.claims
        page_claims = _page_of("page_claims", request.page_claims)
        if request.claim_id:
            claim = claims.get(request.claim_id)
            if claim is None:
                raise UnknownClaim(f"nobody holds claim {request.claim_id}")
            return pb.ListClaimsResponse(claims=[self._claim_detail(claim, len(claim.entries))])
        response, slices = pb.ListClaimsResponse(), Slices()
        keys = 0
        for number in _after(claims, request.cursor):
            if len(response.claims) == page_claims or keys > _MAX_PAGE_KEYS:
                response.next_cursor = response.claims[-1].claim_id
                break
            claim = claims.get(number)
            if claim is not None:  # it has not ended meanwhile
                keys += len(claim.entries)
                response.claims.append(self._claim_detail(claim, _SHOWN_KEYS))
                await slices.pause()
        return response

    def _claim_detail(self, claim: Claim, shown_keys: int) -> pb.ClaimDetail:
        t = self._core.state.tables
        served_ns = t.served_ns(self._core.clock.now_ns())
        session = t.sessions.get(claim.session)
        renewed_ns = max(claim.taken_ns, session.heartbeat_ns if session else 0)
        return pb.ClaimDetail(
            claim_id=claim.claim,
            session_id=claim.session,
            owner=session.owner if session else _ENDED,
            age_ms=_ms(served_ns - claim.taken_ns),
            lease_left_ms=_ms(renewed_ns + claim.lease_ns - served_ns),
            keys=[entry.key for entry in claim.entries[:shown_keys]],
            payload_bytes=sum(entry.payload_bytes for entry in claim.entries),
            entries=len(claim.entries),
        )

    async def list_reservations(
        self, request: pb.ListReservationsRequest, _caller: Caller
    ) -> pb.ListReservationsResponse:
        reservations = self._core.state.tables.reservations
        page = _page_of("page_reservations", request.page_reservations)
        tokens = _after(reservations, request.cursor)
        response, slices = pb.ListReservationsResponse(), Slices()
        if len(tokens) > page:
            response.next_cursor = tokens[page - 1]
        for token in tokens[:page]:
            reservation = reservations.get(token)
            if reservation is not None:  # it has not ended meanwhile
                response.reservations.append(self._reservation_detail(reservation))
                await slices.pause()
        return response

    def _reservation_detail(self, r: HeldReservation) -> pb.ReservationDetail:
        t = self._core.state.tables
        served_ns = t.served_ns(self._core.clock.now_ns())
        return pb.ReservationDetail(
            token=r.token,
            key=r.key,
            session_id=r.session,
            owner=t.sessions[r.session].owner if r.session in t.sessions else _ENDED,
            tier=r.tier.value,  # type: ignore[arg-type]
            stage=r.stage.value,  # type: ignore[arg-type]
            age_ms=_ms(served_ns - r.reserved_ns),
            ttl_left_ms=_ms(r.expires_ns - served_ns),
            payload_bytes=r.entry.payload_bytes,
            stored_bytes=r.entry.stored_bytes,
            waiters=len(r.waiters),
        )

    async def list_sessions(
        self, request: pb.ListSessionsRequest, _caller: Caller
    ) -> pb.ListSessionsResponse:
        t = self._core.state.tables
        now_ns = t.served_ns(self._core.clock.now_ns())
        usage = self._sessions.usage.sessions
        response, slices = pb.ListSessionsResponse(), Slices()
        for session in list(t.sessions.values()):
            reported = usage.get(session.session, SessionUsage())
            response.sessions.append(
                pb.SessionDetail(
                    session_id=session.session,
                    owner=session.owner,
                    age_ms=_ms(now_ns - session.opened_ns),
                    heartbeat_age_ms=_ms(now_ns - session.heartbeat_ns),
                    claims=len(session.claims),
                    reservations=len(session.tokens),
                    label=session.label,
                    lookups=bounded(reported.lookups),
                    hits=bounded(reported.hits),
                    restores=bounded(reported.restores),
                    restored_bytes=bounded(reported.restored_bytes),
                    saves=session.saves,
                    saved_bytes=session.saved_bytes,
                    client_version=self._sessions.client_version(session.session),
                )
            )
            await slices.pause()
        return response

    async def list_identities(
        self, request: pb.ListIdentitiesRequest, _caller: Caller
    ) -> pb.ListIdentitiesResponse:
        if len(request.digest) > limits.KEY_BYTES:
            raise InvalidKey(f"a digest has {limits.KEY_BYTES} bytes")
        journal = self._core.state.tables.journal
        return await list_identities(self._sessions.identities, journal, request.digest)


async def _add_details(
    details: MutableSequence[pb.EntryDetail], entries: Iterable[EntryState], slices: Slices
) -> None:
    """Add the details of entries, which may have left meanwhile."""
    for entry in entries:
        details.append(messages.entry_detail(entry))
        await slices.pause()


def _key_of(namespace: str) -> Key:
    """Some key of a namespace, or one without a namespace for an empty name. Raises InvalidSize."""
    key = Key(bytes(limits.KEY_BYTES))
    if not namespace:
        return key
    try:
        return TenantNamespace(namespace).stored([key])[0]
    except ValueError as problem:
        raise InvalidSize(str(problem)) from None


def _page_of(name: str, requested: int) -> int:
    if requested > limits.MAX_PAGE_ENTRIES:
        raise InvalidSize(f"{name} is above {limits.MAX_PAGE_ENTRIES}")
    return requested or _DEFAULT_PAGE_ENTRIES


def _cursor_of(cursor: bytes) -> tuple[int, bytes]:
    """The shard that the next page begins in, and the last key of it that was listed."""
    if not cursor:
        return 0, b""
    shard = int.from_bytes(cursor[:2], "big")
    if len(cursor) != 2 + limits.KEY_BYTES or shard >= SHARDS:
        raise InvalidSize("the cursor is not one that a page gave")
    return shard, cursor[2:]


def _after(table: Iterable[int], cursor: int) -> list[int]:
    """The numbers of a table above `cursor`. Tables number their rows in ascending order."""
    numbers = list(table)
    return numbers[bisect_right(numbers, cursor) :]


def _ms(duration_ns: int) -> int:
    return max(0, duration_ns) // 1_000_000


_ADMISSION_SENTENCES = {
    Admission.FITS: "it fits without evicting anything",
    Admission.AFTER_EVICTION: "it fits after evicting the victims",
    Admission.NO_ROOM: "everything that could go is pinned or reserved; retrying may help",
    Admission.TOO_LARGE: "it is larger than the tier; retrying can't help",
    Admission.OVER_SHARE: (
        "with what is pinned and reserved it would take what {option} gives to other namespaces; "
        "retrying may help"
    ),
    Admission.ABOVE_SHARES: (
        "it is larger than what {option} leaves to the namespace; retrying can't help"
    ),
}
