"""`MetaState`: the only thing that changes what prefixd knows.

It is sans-I/O: no clock, no randomness, no files, no logging, no asyncio. Everything that
happens goes in as an event through `apply`, and comes out as a list of effects. One process
has one `MetaState`, and one event loop calls it: that is the whole of prefixd's concurrency.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import assert_never

from ..proto.errors import LimitReached, UnknownSession, UnknownTier
from ..proto.vocabulary import SaveReason, Tier
from ..tiers.eviction.sampled import SampledCurve, position_of_bytes
from ..tiers.ledger import Admission, Ledger
from ..tiers.store import StoredEntry, Usage
from . import checking, reading, saving
from .answers import Answer, EvictAnswer, Evicted, Opened, Refused
from .effects import Effect, Erase, IndexDelete, IndexPut, RecordUsage, Reply
from .events import (
    ArenaGrown,
    CancelAsked,
    ClaimAsked,
    ClaimsInherited,
    CommitFailed,
    Committed,
    EntryDamaged,
    Event,
    EvictAsked,
    HeartbeatCame,
    KeysSuspected,
    KeysTouched,
    LookupAsked,
    Question,
    ReleaseAsked,
    RequestDropped,
    ReserveAsked,
    SessionLost,
    SessionOpened,
    Tick,
    TierRecovered,
    WriteBegan,
    WriteSealed,
    WriteStopped,
)
from .saving import Footprint
from .tables import Claim, Entry, Session, StateConfig, Tables, TierCounters, Timer
from .turn import Refusal, Turn


class MetaState:
    """The tables of the daemon and the rules by which they change.

    `ledgers` are the tiers; `footprints` say what an entry costs in each; a tier in `blocking`
    publishes only after its store said `Committed`. `stamp_ns` has to be later than every
    stamp of an earlier start.
    """

    def __init__(
        self,
        config: StateConfig,
        ledgers: Mapping[Tier, Ledger],
        footprints: Mapping[Tier, Footprint],
        blocking: frozenset[Tier],
        stamp_ns: int,
    ) -> None:
        self.tables = Tables(config, dict(ledgers), stamp_ns)
        self.tables.tier_counters = {tier: TierCounters() for tier in ledgers}
        if config.curve_keys:
            self.tables.curves = {
                tier: SampledCurve(position_of_bytes, max_keys=config.curve_keys, root_mru=True)
                for tier in ledgers
            }
        self._footprints = dict(footprints)
        self._blocking = blocking

    # ---- the one door

    def apply(self, event: Event) -> list[Effect]:
        """Let something happen; returns what is to be done about it, in order."""
        turn = Turn(self.tables, event.now_ns)
        self._happen(turn, event)
        while turn.woken:
            woken, turn.woken = turn.woken, []
            for request in woken:
                waiting = turn.unpark(request)
                if waiting is not None:
                    self._answer(turn, waiting.question)
        self._drop_stale_timers()
        return turn.effects

    def next_deadline_ns(self) -> int | None:
        """When a Tick is due at the latest, if nothing else happens."""
        timers = self.tables.timers
        return timers[0][0] if timers else None

    def check(self) -> list[str]:
        """Recount everything from scratch; what does not add up, in sentences."""
        return checking.problems(self.tables)

    def _happen(self, turn: Turn, event: Event) -> None:
        match event:
            case (
                SessionOpened()
                | LookupAsked()
                | ClaimAsked()
                | ReleaseAsked()
                | ReserveAsked()
                | CancelAsked()
                | WriteBegan()
                | EvictAsked()
            ):
                self._answer(turn, event)
                self._begin_wait(turn, event)
            case HeartbeatCame():
                session = turn.tables.sessions.get(event.session)
                if session is not None:
                    session.heartbeat_ns = event.now_ns
            case SessionLost():
                self._session_lost(turn, event.session, event.why)
            case KeysTouched():
                reading.touched(turn, event)
            case KeysSuspected():
                reading.suspected(turn, event)
            case RequestDropped():
                turn.unpark(event.request)
            case WriteSealed():
                saving.sealed(turn, event, self._blocking)
            case WriteStopped():
                saving.stopped(turn, event)
            case Committed():
                saving.committed(turn, event)
            case CommitFailed():
                saving.commit_failed(turn, event)
            case EntryDamaged():
                entry = turn.tables.entries.get(event.key)
                if entry is not None and entry.generation == event.generation:
                    turn.drop_damaged(entry, event.why)
            case ArenaGrown():
                turn.tables.ledgers[event.tier].grow(event.secured_bytes)
            case TierRecovered():
                self._recovered(turn, event)
            case ClaimsInherited():
                self._inherit_claims(turn, event)
            case Tick():
                self._tick(turn)
                if event.flush:
                    self._flush_usage(turn)
            case _:
                assert_never(event)

    def _answer(self, turn: Turn, question: Question) -> None:
        try:
            answer = self._ask(turn, question)
        except Refusal as refusal:
            answer = Refused(refusal.error)
        if answer is not None:
            turn.effects.append(Reply(question.request, answer))

    def _begin_wait(self, turn: Turn, question: Question) -> None:
        """A question that is not answered yet has a deadline from now on."""
        waiting = turn.tables.waiting.get(question.request)
        if waiting is not None:
            turn.set_timer(waiting.question.wait_until_ns, Timer.WAITING, question.request)
            turn.tables.counters.waits += 1

    def _ask(self, turn: Turn, question: Question) -> Answer | None:
        match question:
            case SessionOpened():
                return self._open_session(turn, question)
            case LookupAsked():
                return reading.lookup(turn, question)
            case ClaimAsked():
                return reading.claim(turn, question)
            case ReleaseAsked():
                return reading.release(turn, question)
            case ReserveAsked():
                return saving.reserve(turn, question, self._footprints)
            case CancelAsked():
                return saving.cancel(turn, question)
            case WriteBegan():
                return saving.began(turn, question)
            case EvictAsked():
                return self._evict(turn, question)
            case _:
                assert_never(question)

    # ---- sessions

    def _open_session(self, turn: Turn, asked: SessionOpened) -> Opened:
        t = turn.tables
        if len(t.sessions) >= t.config.max_sessions:
            raise Refusal(LimitReached(f"{len(t.sessions)} sessions are open; try again later"))
        session = Session(t.next_session, asked.owner, turn.now_ns, turn.now_ns)
        t.next_session += 1
        t.sessions[session.session] = session
        t.counters.sessions_opened += 1
        turn.set_timer(turn.now_ns + t.config.session_lost_after_ns, Timer.SESSION, session.session)
        return Opened(session.session)

    def _session_lost(self, turn: Turn, session_id: int, why: str) -> None:
        t = turn.tables
        session = t.sessions.get(session_id)
        if session is None:
            return
        for request, waiting in list(t.waiting.items()):
            question = waiting.question
            if not isinstance(question, LookupAsked) and question.session == session_id:
                turn.unpark(request)
                gone = UnknownSession(f"session {session_id} ended: {why}")
                turn.effects.append(Reply(request, Refused(gone)))
        for token in sorted(session.tokens):
            saving.lose(turn, t.reservations[token], why, tell=False)
        for claim in sorted(session.claims):
            turn.drop_claim(claim)
        del t.sessions[session_id]
        t.counters.sessions_lost += 1

    # ---- time

    def _tick(self, turn: Turn) -> None:
        timers = turn.tables.timers
        while timers and timers[0][0] <= turn.now_ns:
            at_ns, timer, number = heapq.heappop(timers)
            match timer:
                case Timer.SESSION:
                    self._session_due(turn, number, at_ns)
                case Timer.CLAIM:
                    self._claim_due(turn, number, at_ns)
                case Timer.RESERVATION:
                    reservation = turn.tables.reservations.get(number)
                    if reservation is not None:
                        saving.lose(turn, reservation, "its time to live ran out", tell=True)
                case Timer.WAITING:
                    waiting = turn.unpark(number)
                    if waiting is not None:
                        turn.tables.counters.waits_timed_out += 1
                        self._answer(turn, waiting.question)
                case _:
                    assert_never(timer)

    # What was renewed gets a new timer even if that is due by now, too: however late a tick
    # comes, things happen in the order in which they were due.

    def _session_due(self, turn: Turn, number: int, at_ns: int) -> None:
        session = turn.tables.sessions.get(number)
        if session is None:
            return
        due_ns = session.heartbeat_ns + turn.tables.config.session_lost_after_ns
        if due_ns > at_ns:
            turn.set_timer(due_ns, Timer.SESSION, number)
        else:
            self._session_lost(turn, number, "its heartbeats stopped")

    def _claim_due(self, turn: Turn, number: int, at_ns: int) -> None:
        claim = turn.tables.claims.get(number)
        if claim is None:
            return
        renewed_ns = max(claim.taken_ns, turn.tables.sessions[claim.session].heartbeat_ns)
        due_ns = renewed_ns + claim.lease_ns
        if due_ns > at_ns:
            turn.set_timer(due_ns, Timer.CLAIM, number)
        else:
            turn.lose_claim(number, "its lease ran out")

    def _drop_stale_timers(self) -> None:
        """Claims are released long before their leases end: without this, their timers would
        pile up."""
        t = self.tables
        if len(t.timers) > t.max_timers:
            t.timers = [timer for timer in t.timers if timer[2] in t.timed(timer[1])]
            heapq.heapify(t.timers)

    def _flush_usage(self, turn: Turn) -> None:
        by_tier: dict[Tier, list[Usage]] = {}
        for entry in turn.tables.unrecorded.values():
            usage = Usage(entry.key, entry.last_used_ns, entry.hits)
            by_tier.setdefault(entry.tier, []).append(usage)
        turn.tables.unrecorded.clear()
        for tier, usages in by_tier.items():
            turn.effects.append(RecordUsage(tier, tuple(usages)))

    # ---- operators and starts

    def _evict(self, turn: Turn, asked: EvictAsked) -> EvictAnswer:
        t = turn.tables
        unknown = [tier.label for tier in asked.tiers if tier not in t.ledgers]
        if unknown:
            raise Refusal(UnknownTier(f"this daemon has no {', '.join(unknown)} tier"))
        results = []
        for tier in asked.tiers or tuple(t.ledgers):
            entries = freed_bytes = 0
            while freed_bytes < asked.free_bytes:
                victim = t.ledgers[tier].next_victim()
                if victim is None:
                    break
                entries += 1
                freed_bytes += turn.evict(victim).stored_bytes
            results.append(Evicted(tier, entries, freed_bytes))
        return EvictAnswer(tuple(results))

    def _recovered(self, turn: Turn, event: TierRecovered) -> None:
        """Adopt what survived, the most recently used first while there is room."""
        t = turn.tables
        ledger = t.ledgers[event.tier]
        counters = t.tier_counters[event.tier]
        counters.dropped_at_start += event.dropped
        footprint = self._footprints[event.tier]
        keep: list[tuple[StoredEntry, int]] = []
        kept_bytes = 0
        for stored in sorted(event.entries, key=lambda s: s.last_used_ns, reverse=True):
            head = stored.head
            cost = footprint(head.payload_bytes, len(head.token_ids))
            fits = ledger.admission(kept_bytes + cost, len(keep) + 1) is Admission.FITS
            if fits and head.key not in t.entries:
                keep.append((stored, cost))
                kept_bytes += cost
            else:
                counters.dropped_at_start += 1
                turn.effects.append(Erase(event.tier, (head.key,)))
                if head.key not in t.entries:
                    turn.effects.append(IndexDelete(head.key))
        numbers: dict[int, int] = {}
        for stored, cost in reversed(keep):
            entry = _entry_of(stored, event.tier, cost, numbers)
            t.stamp_ns = max(t.stamp_ns, entry.last_used_ns, entry.generation)
            ledger.adopt(entry)
            t.entries[entry.key] = entry
            counters.recovered_entries += 1
            counters.recovered_bytes += entry.payload_bytes
            counters.payload_bytes += entry.payload_bytes
            turn.effects.append(IndexPut(entry))

    def _inherit_claims(self, turn: Turn, event: ClaimsInherited) -> None:
        """Hold claimed entries of the earlier start, in a session that nobody renews."""
        t = turn.tables
        entries = tuple(t.entries[key] for key in event.keys)
        if not entries:
            return
        config = t.config
        session = Session(
            t.next_session,
            "readers from before the restart",
            turn.now_ns,
            event.until_ns - config.session_lost_after_ns,
        )
        t.next_session += 1
        t.sessions[session.session] = session
        turn.set_timer(event.until_ns, Timer.SESSION, session.session)
        # Counted from the last heartbeat, which is in the future here.
        lease_ns = event.until_ns - max(turn.now_ns, session.heartbeat_ns)
        claim = Claim(t.next_claim, session.session, entries, turn.now_ns, lease_ns)
        t.next_claim += 1
        t.claims[claim.claim] = claim
        session.claims.add(claim.claim)
        turn.set_timer(event.until_ns, Timer.CLAIM, claim.claim)
        turn.pin(entries)


def _entry_of(stored: StoredEntry, tier: Tier, stored_bytes: int, numbers: dict[int, int]) -> Entry:
    """`numbers`: see `SaveBatch`."""
    head, once = stored.head, numbers.setdefault
    return Entry(
        key=head.key,
        stored_bytes=once(stored_bytes, stored_bytes),
        location=stored.location,
        tier=tier,
        reason=SaveReason(head.reason),
        generation=head.generation,
        last_used_ns=max(stored.last_used_ns, head.generation),
        payload_bytes=once(head.payload_bytes, head.payload_bytes),
        token_count=once(head.token_count, head.token_count),
        payload_crc32c=stored.payload_crc32c,
        layer_count=head.layer_count,
        token_ids_bytes=len(head.token_ids),
        hits=stored.hits,
    )
