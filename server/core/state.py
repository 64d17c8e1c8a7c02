"""`MetaState`: every change of the daemon's tables goes through it.

It is sans-I/O: no clock, no randomness, no files, no logging, no asyncio. Whatever happens is an
event that is passed to `apply`, which returns a list of effects. A process has one `MetaState`, and
one event loop calls it, so nothing here needs a lock.

No event takes long. Work that may concern many entries, claims or requests goes to a backlog, of
which an event does `StateConfig.max_steps`. `busy` tells that some is left; `WorkLeft` goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Final, assert_never

from ...proto import limits
from ...proto.errors import LimitReached, UnknownSession
from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ...tiers.eviction.stack_distance import SampledCurve, position_of_bytes
from ...tiers.ledger import Ledger
from ...tiers.store import Usage
from . import events as ev
from . import reads, reservations, saves, tier_changes
from .checking import ITEMS_A_STEP, Recount
from .counters import AGE_BOUNDS_NS, Histogram, TierCounters
from .effects import Answer, Effect, Opened, RecordUsage, Refused, Reply
from .journal import EvictionCause, Happening, Journal
from .reservations import Footprint
from .sessions import Session, Tenant
from .shares import HOST
from .tables import (
    EndSession,
    FlushUsage,
    Refresh,
    Reserve,
    StateConfig,
    Tables,
    Timer,
    Unpin,
    Wake,
)
from .transition import Refusal, Transition

#: Finding room for one item of a save takes as long as this many other steps.
_STEPS_OF_AN_ITEM: Final = 16

#: Accesses of so many keys are counted by the hit curves at once. Those of one call alone find the
#: curves' memory far away: 50 us for 48 keys. Of many more at once, the next call waits for them.
_OBSERVED_AT_ONCE: Final = 96

#: How much longer a session may be silent that holds nothing.
_IDLE_FACTOR: Final = (
    limits.IDLE_SESSION_LOST_AFTER_INTERVALS // limits.SESSION_LOST_AFTER_INTERVALS
)


class MetaState:
    """The tables of the daemon and the rules by which they change.

    `ledgers` has an item for each tier. `footprints` tell the stored bytes of an entry in each. A
    tier in `blocking` publishes an entry only after `Committed`. `stamp_ns` is the time of this
    start, and `recorded_ns` the newest generation that an earlier one is known to have recorded.
    """

    def __init__(
        self,
        config: StateConfig,
        ledgers: Mapping[Tier, Ledger],
        footprints: Mapping[Tier, Footprint],
        blocking: frozenset[Tier],
        stamp_ns: int,
        recorded_ns: int = 0,
    ) -> None:
        self.tables = Tables(config, dict(ledgers), max(stamp_ns, recorded_ns))
        self.tables.journal = Journal(config.journal_bytes, stamp_ns, config.unsure_ns)
        self.tables.tier_counters = {tier: TierCounters() for tier in ledgers}
        self.tables.eviction_ages = {
            (tier, cause): Histogram(AGE_BOUNDS_NS) for tier in ledgers for cause in EvictionCause
        }
        if config.curve_keys:
            self.tables.curves = {
                tier: SampledCurve(position_of_bytes, max_keys=config.curve_keys, root_mru=True)
                for tier in ledgers
            }
        self._footprints = dict(footprints)
        self._blocking = blocking

    # ---- the one door

    def apply(self, event: ev.Event) -> list[Effect]:
        """Apply an event to the tables. Returns its effects, in the order to carry them out."""
        if isinstance(event, ev.Tick):
            self.tables.credit_ns += event.late_ns
        transition = Transition(self.tables, event.now_ns)
        if self.tables.unobserved_keys >= _OBSERVED_AT_ONCE:
            self.tables.observe_now()
        self._happen(transition, event)
        self._work(transition, self.tables.config.max_steps)
        self.tables.sift_timers(self.tables.config.max_steps)
        return transition.effects

    @property
    def busy(self) -> bool:
        """Whether `WorkLeft` is due: some work is left."""
        return bool(self.tables.backlog) or self.tables.unobserved_keys >= _OBSERVED_AT_ONCE

    def next_deadline_ns(self) -> int | None:
        """When the next deadline ends, and with it a `Tick` is due."""
        timer = self.tables.next_timer()
        return None if timer is None else timer[0] + self.tables.credit_ns

    def curve(self, tier: Tier) -> SampledCurve[Key] | None:
        """The hit curve of a tier, of all accesses so far; None if it has none."""
        self.tables.observe_now()
        return self.tables.curves.get(tier)

    def recount(self, items_a_step: int = ITEMS_A_STEP) -> Recount:
        """A recount of all tables in steps; events may be applied between them."""
        return Recount(self.tables, items_a_step)

    def check(self) -> list[str]:
        """Recount all tables at once. Returns each mismatch as a sentence."""
        with self.recount() as recount:
            for _ in recount.steps():
                pass
        return recount.problems

    def _happen(self, transition: Transition, event: ev.Event) -> None:
        t = transition.tables
        if isinstance(event, ev.Question):
            if isinstance(event, ev.ClaimAsked | ev.ReserveAsked):
                asking = t.sessions.get(event.session)
                if asking is not None:
                    asking.asked_ns = max(asking.asked_ns, transition.served_ns)
            self._answer(transition, event)
            waiting = t.waiting.get(event.request)
            if waiting is not None:
                in_ns = waiting.question.wait_until_ns - transition.now_ns
                transition.arm(in_ns, Timer.WAITING, event.request)
                t.counters.waits += 1
            return
        match event:
            case ev.HeartbeatCame():
                session = t.sessions.get(event.session)
                if session is not None:
                    # A delay that is noticed late makes served time step back.
                    session.heartbeat_ns = max(session.heartbeat_ns, transition.served_ns)
            case ev.SessionLost():
                self._session_lost(transition, event.session, event.why, closed=event.closed)
            case ev.KeysTouched():
                reads.touched(transition, event)
            case ev.KeysSuspected():
                reads.suspected(transition, event)
            case ev.RequestDropped():
                transition.unpark(event.request)
                if event.request in t.reserving:
                    t.reserving[event.request].dropped = True
            case ev.WriteSealed():
                saves.sealed(transition, event, self._blocking)
            case ev.WriteStopped():
                saves.stopped(transition, event)
            case ev.Committed():
                saves.committed(transition, event)
            case ev.CommitFailed():
                saves.commit_failed(transition, event)
            case ev.EntryDamaged():
                entry = t.entries.find(event.key)
                if entry is not None and entry.generation == event.generation:
                    transition.drop(entry, Happening.DAMAGED)
                    t.tier_counters[entry.tier].corrupt += 1
            case ev.ArenaGrown():
                t.ledgers[event.tier].grow(event.secured_bytes)
            case ev.SlabsRestored():
                t.ledgers[event.tier].restore(event.location)
            case ev.TierChanged():
                t.closed.pop(event.tier, None)
                if event.state is not ev.TierState.SERVING:
                    t.closed[event.tier] = event.state
                elif not t.closed:
                    t.superseded.clear()
            case ev.BytesRead():
                t.tier_counters[event.tier].read_bytes += event.payload_bytes
            case ev.TierRecovered():
                tier_changes.recovered(transition, event, self._footprints)
            case ev.LimitsChanged():
                t.config = replace(t.config, **dict(event.changes))  # type: ignore[arg-type]
            case ev.Tick():
                self._tick(transition)
                if event.flush:
                    t.observe_now()
                    if t.unrecorded:
                        t.backlog.append(FlushUsage(iter(t.unrecorded.values())))
                        t.unrecorded = {}
            case ev.WorkLeft():
                pass
            case _:
                assert_never(event)

    def _answer(self, transition: Transition, question: ev.Question) -> None:
        try:
            answer = self._ask(transition, question)
        except Refusal as refusal:
            answer = Refused(refusal.error)
        if answer is not None:
            transition.effects.append(Reply(question.request, answer))

    def _ask(self, transition: Transition, question: ev.Question) -> Answer | None:
        match question:
            case ev.SessionOpened():
                return self._open_session(transition, question)
            case ev.LookupAsked():
                return reads.lookup(transition, question)
            case ev.ClaimAsked():
                return reads.claim(transition, question)
            case ev.ReleaseAsked():
                return reads.release(transition, question)
            case ev.DeleteAsked():
                return reads.delete(transition, question)
            case ev.ReserveAsked():
                reservations.reserve(transition, question)
                return None
            case ev.CancelAsked():
                return saves.cancel(transition, question)
            case ev.WriteBegan():
                return saves.began(transition, question)
            case ev.EvictAsked():
                return tier_changes.evict(transition, question)
            case ev.ResizeAsked():
                return tier_changes.resize(transition, question)
            case ev.RetireAsked():
                return tier_changes.retire(transition, question)
            case _:
                assert_never(question)

    # ---- work that was left for later

    def _work(self, transition: Transition, steps: int) -> int:
        """Do about `steps` of the backlog. Returns how many steps are left over."""
        backlog = transition.tables.backlog
        while backlog and steps > 0:
            job = backlog[0]
            match job:
                case Unpin():
                    done, took = self._unpin(transition, job, steps)
                case Wake():
                    done, took = self._wake(transition, job, steps)
                case Reserve():
                    done, took = self._reserve(transition, job, steps)
                case Refresh():
                    done, took = self._refresh(transition, job, steps)
                case EndSession():
                    done, took = self._end_session(transition, job, steps)
                case FlushUsage():
                    done, took = self._flush_usage(transition, job, steps)
                case _:
                    assert_never(job)
            if done:
                backlog.remove(job)
            steps -= took
        return steps

    # Each of these returns whether the job is done, and how many steps it took.

    def _unpin(self, transition: Transition, job: Unpin, steps: int) -> tuple[bool, int]:
        left = max(0, job.left - steps)
        took = job.left - left
        leaving = job.entries[left : job.left]
        job.left = left
        transition.unpin(job.claim, job.session, leaving[::-1])
        if not left:
            del transition.tables.unpinning[job.claim]
        return not left, took

    def _wake(self, transition: Transition, job: Wake, steps: int) -> tuple[bool, int]:
        t = transition.tables
        took = 0
        while took < steps:
            request = next(job.waiters, None)
            if request is None:
                t.waking.discard(job.token)
                return True, took
            took += 1
            waiting = transition.save_ended(request, job.token, saved=job.saved)
            if waiting is None:
                continue
            self._answer(transition, waiting.question)
            took += reads.keys_asked(waiting.question)
            if request in t.reserving:
                # Reserve before the next waiter: it may have to wait for what this one saves.
                t.backlog.appendleft(t.backlog.pop())
                break
        return False, took

    def _reserve(self, transition: Transition, job: Reserve, steps: int) -> tuple[bool, int]:
        items = 1 + steps // _STEPS_OF_AN_ITEM
        items -= reservations.go_on_reserving(transition, job, self._footprints, items)
        return job.asked.request not in transition.tables.reserving, items * _STEPS_OF_AN_ITEM

    def _refresh(self, transition: Transition, job: Refresh, steps: int) -> tuple[bool, int]:
        took = transition.go_on_refreshing(job, steps)
        return not job.left, took

    def _end_session(self, transition: Transition, job: EndSession, steps: int) -> tuple[bool, int]:
        t = transition.tables
        took = 0
        while took < steps:
            if (request := next(job.waits, None)) is not None:
                waiting = transition.unpark(request)
                if waiting is not None:
                    took += waiting.waited_keys
                    gone = UnknownSession(f"session {job.session.session} ended: {job.why}")
                    transition.effects.append(Reply(request, Refused(gone)))
            # Claims before saves: requests that wait for these saves may need the claims' room.
            elif (claim := next(job.claims, None)) is not None:
                transition.drop_claim(claim)
            elif (token := next(job.tokens, None)) is not None:
                reservation = t.reservations.get(token)
                if reservation is not None:
                    saves.lose(transition, reservation, job.why, tell=False)
            else:
                self._forget_session(job.session)
                return True, took
            took += 1
        return False, took

    def _forget_session(self, session: Session) -> None:
        """It holds nothing more, except saves whose writers have not stopped yet, and claims whose
        pins are being taken back."""
        t, tenant = self.tables, session.of
        del t.ending[session.session]
        if tenant is not None:
            for tier, stored_bytes in session.reserved_bytes.items():
                tenant.reserve(tier, -stored_bytes)
            tenant.sessions -= 1
            if not tenant.sessions:
                del t.tenants[session.tenant]

    def _flush_usage(self, transition: Transition, job: FlushUsage, steps: int) -> tuple[bool, int]:
        t = transition.tables
        by_tier: dict[Tier, list[Usage]] = {}
        some = list(islice(job.entries, steps))
        for entry in some:
            # An entry that was used again since then goes with the next flush.
            if entry.published and entry.key not in t.unrecorded:
                usage = Usage(entry, entry.last_used_ns, entry.hits)
                by_tier.setdefault(entry.tier, []).append(usage)
        for tier, usages in by_tier.items():
            transition.effects.append(RecordUsage(tier, tuple(usages)))
        return len(some) < steps, len(some)

    # ---- sessions

    def _open_session(self, transition: Transition, asked: ev.SessionOpened) -> Opened:
        t = transition.tables
        held = len(t.sessions) + len(t.ending)
        if held >= t.config.max_sessions:
            raise Refusal(LimitReached(f"{held} sessions are open; try again later"))
        served_ns = transition.served_ns
        session = Session(
            t.next_session,
            asked.owner,
            served_ns,
            served_ns,
            label=asked.label,
            tenant=asked.tenant,
        )
        if asked.tenant != HOST:
            session.of = t.tenants.setdefault(asked.tenant, Tenant())
            session.of.sessions += 1
        t.next_session += 1
        t.sessions[session.session] = session
        t.journal.know(session.session, asked.owner, asked.label)
        t.counters.sessions_opened += 1
        transition.arm(t.config.session_lost_after_ns, Timer.SESSION, session.session)
        return Opened(session.session)

    def _session_lost(
        self, transition: Transition, session_id: int, why: str, *, closed: bool = False
    ) -> None:
        """End a session. The backlog takes back what it holds."""
        t = transition.tables
        session = t.sessions.pop(session_id, None)
        if session is None:
            return
        t.ending[session_id] = session
        t.backlog.append(
            EndSession(
                session,
                why,
                iter(tuple(session.waits)),
                iter(tuple(session.tokens)),
                iter(tuple(session.claims)),
            )
        )
        t.counters.sessions_ended += 1
        t.counters.sessions_lost += not closed

    # ---- time

    def _tick(self, transition: Transition) -> None:
        t = transition.tables
        steps = self._work(transition, t.config.max_steps)
        while steps > 0 and (due := t.next_timer()) and due[0] <= transition.served_ns:
            at_ns, timer, number = t.pop_timer()
            steps -= 1
            deadline_ns = self._deadline_ns(timer, number, at_ns)
            if deadline_ns is not None and deadline_ns > at_ns:
                # Set again even if it is due by now: however late a tick comes, deadlines end in
                # their order.
                t.set_timer(deadline_ns, timer, number)
            elif deadline_ns is not None:
                steps -= self._expire(transition, timer, number)
            # The work that this left is done before the next deadline ends.
            steps = self._work(transition, steps)

    def _deadline_ns(self, timer: Timer, number: int, at_ns: int) -> int | None:
        """The current deadline of what a timer was set for, in served time. None if that has
        ended."""
        t = self.tables
        match timer:
            case Timer.SESSION:
                session = t.sessions.get(number)
                if session is None:
                    return None
                heard_ns = max(session.heartbeat_ns, session.asked_ns)
                lost_after_ns = t.config.session_lost_after_ns
                if session.holds:
                    return heard_ns + lost_after_ns
                # It may begin to hold something: the timer is set again as often as if it did.
                idle_after_ns = _IDLE_FACTOR * lost_after_ns
                return min(heard_ns + idle_after_ns, at_ns + lost_after_ns)
            case Timer.CLAIM:
                claim = t.claims.get(number)
                session = None if claim is None else t.sessions.get(claim.session)
                if claim is None or session is None:
                    return None
                return max(claim.taken_ns, session.heartbeat_ns) + claim.lease_ns
            case Timer.RESERVATION:
                reservation = t.reservations.get(number)
                return None if reservation is None else reservation.expires_ns
            case Timer.WAITING:
                return at_ns if number in t.waiting else None
            case _:
                assert_never(timer)

    def _expire(self, transition: Transition, timer: Timer, number: int) -> int:
        """End what has reached its deadline. Returns how many more steps that took."""
        t = self.tables
        match timer:
            case Timer.SESSION:
                self._session_lost(transition, number, "its heartbeats stopped")
            case Timer.CLAIM:
                transition.lose_claim(number, "its lease ran out")
            case Timer.RESERVATION:
                why = "its time to live ran out"
                saves.lose(transition, t.reservations[number], why, tell=True)
            case Timer.WAITING:
                waiting = transition.unpark(number)
                assert waiting is not None
                t.counters.waits_timed_out += 1
                self._answer(transition, waiting.question)
                return reads.keys_asked(waiting.question)
            case _:
                assert_never(timer)
        return 0
