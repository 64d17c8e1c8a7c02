"""`Transition`: the application of one event to the tables.

The rules of `MetaState` share it: the tables, the time of the event, the effects so far, and the
changes that several rules make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...proto import limits
from ...proto.errors import LimitReached, PrefixdError, UnknownSession
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, Tier
from ...tiers.store import EntryRef
from .effects import Effect, Erase, IndexDelete, IndexPut, TellClaimLost
from .entries import EntryState, by_tier
from .events import ClaimAsked, LookupAsked, ReserveAsked
from .journal import EvictionCause, Happening
from .sessions import Claim, HeldReservation, Session
from .shares import Holder
from .tables import Refresh, Tables, Timer, Unpin, Waiting, Wake

#: Used for every key of a claim. Enum attribute lookup is slow, so it is cached here.
_RAM: Final = Tier.RAM
#: Chain keys that one event refreshes: as many as the longest chain has. Takes some milliseconds.
_CHAINED_AT_ONCE: Final = 2 * limits.MAX_BATCH_KEYS


class Refusal(Exception):
    """A question is refused as a whole. `MetaState` turns this into the answer."""

    def __init__(self, error: PrefixdError) -> None:
        super().__init__(str(error))
        self.error = error


class Transition:
    """`now_ns` is the time of the event, `served_ns` the same in served time
    (`Tables.served_ns`), which deadlines are in."""

    __slots__ = (
        "_chained_keys",
        "_erased",
        "_hidden",
        "_listed",
        "effects",
        "now_ns",
        "served_ns",
        "tables",
    )

    def __init__(self, tables: Tables, now_ns: int) -> None:
        self.tables = tables
        self.now_ns = now_ns
        self.served_ns = tables.served_ns(now_ns)
        self.effects: list[Effect] = []
        #: The entries of each tier's `Erase`, of which there is at most one.
        self._erased: dict[Tier, list[EntryRef]] = {}
        #: What the last change of the index hides, or lists, with the keys before it; the other one
        #: is None.
        self._hidden: list[EntryState] | None = None
        self._listed: tuple[list[EntryState], list[bytes | None]] | None = None
        #: Chain keys that were refreshed so far.
        self._chained_keys = 0

    def session(self, session: int) -> Session:
        """The open session of that number. Raises Refusal."""
        found = self.tables.sessions.get(session)
        if found is None:
            raise Refusal(
                UnknownSession(
                    f"session {session} ended or never was; open a new one and repeat the call"
                )
            )
        return found

    def hold(self, session: Session, keys: int) -> None:
        """Raises Refusal unless a session may hold so many keys more. `Tables.held` counts them."""
        t = self.tables
        t.held.total = t.config.max_held_keys
        if not t.held.may_take(session.holder, keys):
            t.counters.quota_refusals += 1
            raise Refusal(LimitReached(t.held.why(session.holder)))

    # ---- waiting

    def park(
        self,
        question: LookupAsked | ClaimAsked | ReserveAsked,
        mode: ClaimMode,
        keys: Sequence[Key],
    ) -> bool:
        """Let a question about `keys` wait for the saves in flight that can change its answer.

        False: no such save is in flight, its waiting time is over, or a bound on waiting is
        reached. The question is to be answered now.
        """
        t = self.tables
        config = t.config
        pending = self._awaited(keys, mode) if self.now_ns < question.wait_until_ns else {}
        if not pending:
            return False
        if len(t.waiting) >= config.max_waiters:
            return False
        if t.waited_keys + len(pending) > config.max_waited_keys:
            return False
        session = self._asker(question)
        waited_keys = t.anonymous_waited_keys if session is None else session.waited_keys
        if waited_keys + len(pending) > config.max_waited_keys_per_session:
            return False
        holder = self._holder(question, session)
        t.waiters.total, t.waits.total = config.max_waiters, config.max_waited_keys
        if not (t.waiters.may_take(holder) and t.waits.may_take(holder, len(pending))):
            return False
        t.waiters.add(holder)
        t.waits.add(holder, len(pending))
        self._count_waited(session, len(pending))
        if session is not None:
            session.waits[question.request] = None
        t.waiting[question.request] = Waiting(question, mode, pending, len(pending), holder)
        for token in pending:
            t.reservations[token].waiters[question.request] = None
        return True

    def unpark(self, request: int) -> Waiting | None:
        """Stop the wait of a question. None if it does not wait."""
        t = self.tables
        waiting = t.waiting.pop(request, None)
        if waiting is not None:
            for token in waiting.pending:
                self._forget_waiter(token, request)
            t.waiters.give(waiting.holder)
            t.waits.give(waiting.holder, waiting.waited_keys)
            session = self._asker(waiting.question)
            self._count_waited(session, -waiting.waited_keys)
            if session is not None:
                session.waits.pop(request, None)
        return waiting

    def _awaited(self, keys: Sequence[Key], mode: ClaimMode) -> dict[int, int]:
        """The saves in flight that can change the answer to a question about `keys`: token ->
        position of the key."""
        t = self.tables
        pending: dict[int, int] = {}
        for position, key in enumerate(keys):
            flight = t.in_flight.get(key)
            if flight is not None:
                pending.setdefault(flight.token, position)
            elif mode is not ClaimMode.ANY and (key in t.entries) == (mode is ClaimMode.FIRST):
                break
        return pending

    def _asker(self, question: LookupAsked | ClaimAsked | ReserveAsked) -> Session | None:
        """The session that a question belongs to; None for lookups, which need none."""
        return None if isinstance(question, LookupAsked) else self.tables.holder(question.session)

    def _holder(self, question: object, session: Session | None) -> Holder:
        """The tenant that asks."""
        if session is not None:
            return Holder(session.tenant)
        return Holder(question.tenant) if isinstance(question, LookupAsked) else Holder()

    def _count_waited(self, session: Session | None, keys: int) -> None:
        self.tables.waited_keys += keys
        if session is None:
            self.tables.anonymous_waited_keys += keys
        else:
            session.waited_keys += keys

    def _forget_waiter(self, token: int, request: int) -> None:
        # A save that ended has no reservation, but its `Wake` may still be in the backlog.
        reservation = self.tables.reservations.get(token)
        if reservation is not None:
            reservation.waiters.pop(request, None)

    def save_ended(self, request: int, token: int, *, saved: bool) -> Waiting | None:
        """A save ended for which `request` waits. If that was the last one, stop the wait and
        return the question."""
        waiting = self.tables.waiting.get(request)
        if waiting is None:
            return None
        pending = waiting.pending
        position = pending.pop(token, None)
        if position is None:
            return None
        decides = (waiting.mode is ClaimMode.RUN and not saved) or (
            waiting.mode is ClaimMode.FIRST and saved
        )
        if decides:
            # The keys behind this one no longer change the answer.
            while pending:
                later, its_position = pending.popitem()
                if its_position < position:
                    pending[later] = its_position
                    break
                self._forget_waiter(later, request)
        return None if pending else self.unpark(request)

    def wake(self, reservation: HeldReservation, *, saved: bool) -> None:
        """A reservation ended: have the backlog tell the requests that wait for it."""
        waiters = reservation.waiters
        if waiters:
            reservation.waiters = {}
            self.tables.backlog.append(Wake(reservation.token, saved, iter(waiters)))
            self.tables.waking.add(reservation.token)

    # ---- entries

    def use(self, entry: EntryState) -> None:
        """Count one access of a published entry."""
        self._mark_used((entry,))
        entry.hits += 1
        self.tables.ledgers[entry.tier].policy.hit(entry)

    def read_all(self, entries: Sequence[EntryState]) -> None:
        """Count one access of each entry by a client that reads them, in this order."""
        tables = self.tables
        self._mark_used(entries)
        for tier, its_own in by_tier(entries).items():
            tables.ledgers[tier].policy.hit_all(its_own)
            counters = tables.tier_counters[tier]
            counters.hits += len(its_own)
            counters.hit_tokens += sum([entry.content.token_count for entry in its_own])
            for entry in its_own:
                entry.hits += 1

    def observe(
        self,
        tier: Tier,
        keys: Sequence[Key],
        token_counts: Sequence[int],
        stored_bytes: Sequence[int],
    ) -> None:
        """Show accesses (root first) to the tier's hit curve: hits, and misses that are saved now.

        A later event has them counted, because no answer depends on it (`Tables.observe_now`).
        """
        tables = self.tables
        if keys and tier in tables.curves:
            tables.unobserved.append((tier, keys, token_counts, stored_bytes))
            tables.unobserved_keys += len(keys)

    def observe_entries(self, entries: Sequence[EntryState]) -> None:
        """Show hits to the hit curves of their tiers."""
        if not entries or not self.tables.curves:
            return
        for tier, its_own in by_tier(entries).items():
            self.observe(
                tier,
                [entry.key for entry in its_own],
                [entry.content.token_count for entry in its_own],
                [entry.stored_bytes for entry in its_own],
            )

    def refresh_chain(self, chain: Sequence[Key], session: Session | None) -> None:
        """Make a chain the most recent: now, or in the backlog if this event has refreshed many
        keys already."""
        refresh = Refresh(chain, session, len(chain))
        self._chained_keys += len(chain)
        if self._chained_keys > _CHAINED_AT_ONCE:
            self.tables.backlog.append(refresh)
        else:
            self.go_on_refreshing(refresh, len(chain))

    def go_on_refreshing(self, job: Refresh, keys: int) -> int:
        """Refresh the entries of the next `keys` keys of the chain, the root last. Returns how many
        keys that were."""
        end = job.left
        job.left = max(0, end - keys)
        there = self.tables.entries.find_all(job.chain[job.left : end][::-1])
        self.refresh_all([entry for entry in there if entry is not None])
        if not job.left and job.session is not None:
            job.session.chained_keys -= len(job.chain)
        return end - job.left

    def refresh_all(self, entries: Sequence[EntryState]) -> None:
        """Make each entry the most recent, in this order, without counting an access."""
        self._mark_used(entries)
        for tier, its_own in by_tier(entries).items():
            self.tables.ledgers[tier].policy.refresh_all(its_own)

    def _mark_used(self, entries: Sequence[EntryState]) -> None:
        # Without calls, because it runs for every block of every save, claim and release.
        tables, now_ns = self.tables, self.now_ns
        unrecorded, stamp_ns = tables.unrecorded, tables.stamp_ns
        ram_use = tables.config.ram_use
        for entry in entries:
            entry.last_used_ns = stamp_ns = now_ns if now_ns > stamp_ns else stamp_ns + 1
            if ram_use or entry.tier is not _RAM:
                unrecorded.pop(entry.key, None)
                unrecorded[entry.key] = entry
        tables.stamp_ns = stamp_ns

    def enter(self, entries: Sequence[EntryState], parents: Sequence[bytes | None]) -> None:
        """Publish entries of one tier. The ledger has their room already. `parents`: the key before
        each in its chain (`IndexPut`)."""
        tables = self.tables
        payload_bytes = 0
        for entry in entries:
            entry.published = True
            payload_bytes += entry.content.payload_bytes
        tables.tier_counters[entries[0].tier].payload_bytes += payload_bytes
        for recount in tables.recounts:
            for entry in entries:
                recount.entered(entry)
        tables.entries.add(entries)
        if self._listed is None:
            self._hidden, self._listed = None, ([], [])
            self.effects.append(IndexPut(*self._listed))
        self._listed[0].extend(entries)
        self._listed[1].extend(parents)

    def evict(
        self, victim: Key, cause: EvictionCause, session: int = 0, heir: EntryState | None = None
    ) -> EntryState:
        """Remove an entry that `Ledger.next_victim` chose, and count the eviction. `session`: the
        one whose save needs the room. `heir`: the entry to be saved, which has no room yet."""
        entry = self.forget(victim, heir)
        self.tables.evicted((entry,), cause, self.now_ns, session)
        return entry

    def evict_all(self, victims: Sequence[EntryState], cause: EvictionCause, session: int) -> None:
        """`evict` entries of one tier that `Ledger.victims_for` chose. The caller has the ledger
        free their room."""
        self._leave(victims)
        self.tables.evicted(victims, cause, self.now_ns, session)

    def forget(self, victim: Key, heir: EntryState | None = None) -> EntryState:
        """Remove an entry that has left the eviction order, without counting an eviction."""
        tables = self.tables
        entry = tables.entries[victim]
        self._leave((entry,))
        tables.ledgers[entry.tier].forget(entry, heir)
        return entry

    def drop(self, entry: EntryState, why: Happening, session: int = 0) -> None:
        """Unpublish an entry at once, claimed or not. `session`: the one that asks for it.

        Claims on it stay until they are released, and the release reports them as lost. Its room is
        free when the last of them has ended.
        """
        self.tables.journal.note(why, (entry,), self.now_ns, session)
        ledger = self.tables.ledgers[entry.tier]
        ledger.remove(entry)
        self._leave((entry,))
        if entry.pins:
            self.tables.condemned[entry.generation] = entry
        else:
            ledger.forget(entry)

    def _leave(self, entries: Sequence[EntryState]) -> None:
        """Unpublish entries of one tier that have left the eviction order: for readers of the index
        first."""
        # With few calls, because it runs for every block that takes the room of another.
        tables, tier = self.tables, entries[0].tier
        for recount in tables.recounts:
            for entry in entries:
                recount.left(entry)
        tables.entries.drop(entries)
        if tables.closed:
            for entry in entries:
                tables.superseded.note(entry.key, entry.generation)
        payload_bytes, unrecorded = 0, tables.unrecorded
        for entry in entries:
            entry.published = False
            payload_bytes += entry.content.payload_bytes
            if unrecorded:
                unrecorded.pop(entry.key, None)
        tables.tier_counters[tier].payload_bytes -= payload_bytes
        # Later entries join these two effects. To hide or erase them sooner than necessary does no
        # harm.
        if self._hidden is None:
            self._hidden, self._listed = [], None
            self.effects.append(IndexDelete(self._hidden))
        self._hidden += entries
        erased = self._erased.get(tier)
        if erased is None:
            erased = self._erased[tier] = []
            self.effects.append(Erase(tier, erased))
        erased += entries

    # ---- claims

    def pin(self, session: Session, claim: Claim) -> None:
        """Pin the entries of a claim."""
        # With few calls, because it runs for every block of every claim.
        recounts, pinned_bytes = self.tables.recounts, session.pinned_bytes
        pins, tenant = session.pins, session.of
        parts, mask = pins.parts, pins.mask
        first: list[EntryState] = []
        for entry in reversed(claim.entries):
            for recount in recounts:
                recount.claimed(entry)
            if not entry.pins:
                first.append(entry)
            entry.pins += 1
            held = parts[hash(entry.key) & mask]
            count = held.get(entry, 0)
            held[entry] = count + 1
            if not count:
                tier = entry.tier
                pinned_bytes[tier] = pinned_bytes.get(tier, 0) + entry.stored_bytes
                if tenant is not None:
                    tenant.pin(entry)
        for tier, its_own in by_tier(first).items():
            self.tables.ledgers[tier].pin(its_own)
        pins.changed()

    def unpin(self, claim: int, session: Session, entries: Sequence[EntryState]) -> None:
        """Take the pins of an ended claim from these entries, in this order."""
        # With few calls, as `pin`.
        t, recounts, pinned_bytes = self.tables, self.tables.recounts, session.pinned_bytes
        pins, tenant = session.pins, session.of
        parts, mask = pins.parts, pins.mask
        pins.changes += 1
        last: list[EntryState] = []
        for entry in entries:
            for recount in recounts:
                recount.unclaimed(claim, entry)
            held = parts[hash(entry.key) & mask]
            count = held[entry]
            if count > 1:
                held[entry] = count - 1
            else:
                del held[entry]
                pinned_bytes[entry.tier] -= entry.stored_bytes
                if tenant is not None:
                    tenant.unpin(entry)
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.published:
                last.append(entry)
            else:
                del t.condemned[entry.generation]
                t.ledgers[entry.tier].bury(entry)
        # They enter the eviction order as the most recent, so `last_used_ns` has to agree.
        self._mark_used(last)
        for tier, its_own in by_tier(last).items():
            t.ledgers[tier].unpin(its_own)

    def lose_claim(self, claim_id: int, why: str) -> None:
        """Take a claim from its session, which is told now and again at the release."""
        session = self.drop_claim(claim_id)
        self.remember_loss(session, claim_id, why)
        self.effects.append(TellClaimLost(session.session, claim_id, why))

    def remember_loss(self, session: Session, claim_id: int, why: str) -> None:
        """Note that a claim was lost, for its session to be told whenever it releases the claim."""
        session.lost_claims[claim_id] = why
        if len(session.lost_claims) > self.tables.config.max_claims_per_session:
            del session.lost_claims[next(iter(session.lost_claims))]
        self.tables.counters.claims_lost += 1

    def drop_claim(self, claim_id: int) -> Session:
        """End a claim. The backlog unpins its entries leaf first, so that the root is the most
        recent afterwards."""
        t = self.tables
        claim = t.claims.pop(claim_id)
        session = t.holder(claim.session)
        assert session is not None
        session.claims.pop(claim_id, None)
        t.held.give(session.holder, claim.keys)
        job = Unpin(claim_id, session, claim.entries, len(claim.entries))
        t.unpinning[claim_id] = job
        t.backlog.append(job)
        return session

    def arm(self, in_ns: int, timer: Timer, number: int) -> None:
        """Set a deadline, this long after the event."""
        self.tables.set_timer(self.served_ns + in_ns, timer, number)
