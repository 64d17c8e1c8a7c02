"""One transition of the metadata server: an event is being applied.

`Transition` is what the helpers of `MetaState` share while they work: the tables, the time of
the event, the effects so far, and the few moves that several of them need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...proto import limits
from ...proto.errors import PrefixdError, UnknownSession
from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ...tiers.store import EntryRef
from .effects import Effect, Erase, IndexDelete, TellClaimLost
from .entries import Entry
from .events import ClaimAsked, LookupAsked, ReserveAsked
from .journal import EvictionCause, Happening
from .sessions import Claim, Reservation, Session
from .tables import Access, Refresh, Tables, Timer, Unpin, Waiting, WaitMode, Wake

#: Compared with for every key of a claim: Enum attribute lookup is slow, so it is cached here.
_RAM: Final = Tier.RAM
#: Keys of chains that one event refreshes: as many as the longest has, some milliseconds' worth.
_CHAINED_AT_ONCE: Final = 2 * limits.MAX_BATCH_KEYS


class Refusal(Exception):
    """The whole question is refused; `MetaState` turns it into the answer."""

    def __init__(self, error: PrefixdError) -> None:
        super().__init__(str(error))
        self.error = error


class Transition:
    """See the module. `now_ns` is the time of the event, `served_ns` what deadlines count in."""

    __slots__ = ("_chained_keys", "_erased", "effects", "now_ns", "served_ns", "tables")

    def __init__(self, tables: Tables, now_ns: int) -> None:
        self.tables = tables
        self.now_ns = now_ns
        self.served_ns = tables.served_ns(now_ns)
        self.effects: list[Effect] = []
        #: the entries of the one `Erase` of each tier
        self._erased: dict[Tier, list[EntryRef]] = {}
        #: keys of chains that were refreshed
        self._chained_keys = 0

    def session(self, session: int) -> Session:
        """The live session of that number. Raises Refusal."""
        found = self.tables.sessions.get(session)
        if found is None:
            raise Refusal(
                UnknownSession(
                    f"session {session} ended or never was; open a new one and repeat the call"
                )
            )
        return found

    def holder(self, session: int) -> Session | None:
        """The session of that number, also while what it holds is taken back."""
        return self.tables.sessions.get(session) or self.tables.ending.get(session)

    # ---- waiting

    def park(
        self,
        question: LookupAsked | ClaimAsked | ReserveAsked,
        mode: WaitMode,
        pending: dict[int, int],
    ) -> bool:
        """Let a question wait for saves in flight: token -> position of the key in the question.

        False: there are none, it has waited long enough, or too much is waited for; it is to be
        answered as things are.
        """
        t = self.tables
        config = t.config
        if not pending or self.now_ns >= question.wait_until_ns:
            return False
        if len(t.waiting) >= config.max_waiters:
            return False
        if t.waited_keys + len(pending) > config.max_waited_keys:
            return False
        session = self._session_of(question)
        waited_keys = t.anonymous_waited_keys if session is None else session.waited_keys
        if waited_keys + len(pending) > config.max_waited_keys_per_session:
            return False
        self._count_waited(session, len(pending))
        if session is not None:
            session.waits[question.request] = None
        t.waiting[question.request] = Waiting(question, mode, pending, len(pending))
        for token in pending:
            t.reservations[token].waiters[question.request] = None
        return True

    def unpark(self, request: int) -> Waiting | None:
        """Take a question out of those that wait."""
        t = self.tables
        waiting = t.waiting.pop(request, None)
        if waiting is not None:
            for token in waiting.pending:
                self._forget_waiter(token, request)
            session = self._session_of(waiting.question)
            self._count_waited(session, -waiting.waited_keys)
            if session is not None:
                session.waits.pop(request, None)
        return waiting

    def _session_of(self, question: LookupAsked | ClaimAsked | ReserveAsked) -> Session | None:
        """Whose question it is; None for those that need no session."""
        if isinstance(question, LookupAsked):
            return None
        t = self.tables
        session = t.sessions.get(question.session)
        return t.ending[question.session] if session is None else session

    def _count_waited(self, session: Session | None, keys: int) -> None:
        self.tables.waited_keys += keys
        if session is None:
            self.tables.anonymous_waited_keys += keys
        else:
            session.waited_keys += keys

    def _forget_waiter(self, token: int, request: int) -> None:
        # A save that ended is not there, but its `Wake` may be.
        reservation = self.tables.reservations.get(token)
        if reservation is not None:
            reservation.waiters.pop(request, None)

    def save_ended(self, request: int, token: int, *, saved: bool) -> Waiting | None:
        """A save that a question waits for ended. Returns the question if it waits for nothing
        any more; it is out of those that wait then."""
        waiting = self.tables.waiting.get(request)
        if waiting is None:
            return None
        pending = waiting.pending
        position = pending.pop(token, None)
        if position is None:
            return None
        decides = (waiting.mode is WaitMode.RUN and not saved) or (
            waiting.mode is WaitMode.FIRST and saved
        )
        if decides:
            # Whatever becomes of the keys behind this one, the answer is the same.
            while pending:
                later, its_position = pending.popitem()
                if its_position < position:
                    pending[later] = its_position
                    break
                self._forget_waiter(later, request)
        return None if pending else self.unpark(request)

    def wake(self, reservation: Reservation, *, saved: bool) -> None:
        """A reservation ended, one way or the other: those who wait for it are told."""
        waiters = reservation.waiters
        if waiters:
            reservation.waiters = {}
            self.tables.backlog.append(Wake(reservation.token, saved, iter(waiters)))
            self.tables.waking.add(reservation.token)

    # ---- entries

    def use(self, entry: Entry) -> None:
        """One access of a published entry."""
        self._mark_used(entry)
        entry.hits += 1
        self.tables.ledgers[entry.tier].policy.hit(entry)

    def read_all(self, entries: Sequence[Entry]) -> None:
        """One access of each by a client that reads them, in this order."""
        # Written out, without calls: it runs for every block of every claim.
        tables, now_ns = self.tables, self.now_ns
        ledgers, unrecorded, stamp_ns = tables.ledgers, tables.unrecorded, tables.stamp_ns
        if not entries:
            return
        ram_use = tables.config.ram_use
        tier = entries[0].tier
        counters, hit = tables.tier_counters[tier], ledgers[tier].policy.hit
        for entry in entries:
            if entry.tier is not tier:
                tier = entry.tier
                counters, hit = tables.tier_counters[tier], ledgers[tier].policy.hit
            entry.last_used_ns = stamp_ns = now_ns if now_ns > stamp_ns else stamp_ns + 1
            if ram_use or tier is not _RAM:
                unrecorded.pop(entry.key, None)
                unrecorded[entry.key] = entry
            entry.hits += 1
            hit(entry)
            counters.hits += 1
            counters.hit_tokens += entry.token_count
        tables.stamp_ns = stamp_ns

    def observe(self, tier: Tier, accesses: Sequence[Access]) -> None:
        """Show accesses (root first) to the tier's hit curve, those that hit as well as those that
        did not and are saved now: after the next event, for nobody waits for that."""
        if accesses and tier in self.tables.curves:
            self.tables.unobserved.append((tier, accesses))

    def observe_entries(self, entries: Sequence[Entry]) -> None:
        """Show hits to the curves of their tiers."""
        for tier in self.tables.curves:
            its_own = [entry for entry in entries if entry.tier is tier]
            self.observe(tier, [(e.key, e.token_count, e.stored_bytes) for e in its_own])

    def observe_now(self) -> None:
        """Do what `observe` left."""
        tables = self.tables
        for tier, accesses in tables.unobserved:
            keys, tokens, stored_bytes = zip(*accesses, strict=True)
            tables.curves[tier].access(keys, tokens, stored_bytes)
        tables.unobserved.clear()

    def refresh(self, entry: Entry) -> None:
        """Most recent from now on, without being an access."""
        self._mark_used(entry)
        self.tables.ledgers[entry.tier].policy.refresh(entry)

    def refresh_chain(self, chain: Sequence[Key], session: Session | None) -> None:
        """All of it: now, if it is the first of an event or those before it were short."""
        refresh = Refresh(chain, session, len(chain))
        self._chained_keys += len(chain)
        if self._chained_keys > _CHAINED_AT_ONCE:
            self.tables.backlog.append(refresh)
        else:
            self.go_on_refreshing(refresh, len(chain))

    def go_on_refreshing(self, job: Refresh, keys: int) -> int:
        """`refresh` of what is there of so many keys more, the root last. Returns how many were
        left for that."""
        end = job.left
        job.left = max(0, end - keys)
        there = self.tables.entries.find_all(job.chain[job.left : end][::-1])
        self.refresh_all([entry for entry in there if entry is not None])
        if not job.left and job.session is not None:
            job.session.chained_keys -= len(job.chain)
        return end - job.left

    def refresh_all(self, entries: Iterable[Entry]) -> None:
        """`refresh` of each, in this order."""
        # Written out, without calls: it runs for every block that is saved.
        tables, now_ns = self.tables, self.now_ns
        ledgers, unrecorded, stamp_ns = tables.ledgers, tables.unrecorded, tables.stamp_ns
        ram_use = tables.config.ram_use
        for entry in entries:
            tier = entry.tier
            entry.last_used_ns = stamp_ns = now_ns if now_ns > stamp_ns else stamp_ns + 1
            if ram_use or tier is not _RAM:
                unrecorded.pop(entry.key, None)
                unrecorded[entry.key] = entry
            ledgers[tier].policy.refresh(entry)
        tables.stamp_ns = stamp_ns

    def _mark_used(self, entry: Entry) -> None:
        entry.last_used_ns = self.tables.stamp(self.now_ns)
        if entry.tier is not _RAM or self.tables.config.ram_use:
            unrecorded = self.tables.unrecorded
            unrecorded.pop(entry.key, None)
            unrecorded[entry.key] = entry

    def enter(self, entries: Sequence[Entry]) -> None:
        """Entries can be found from now on; their room is the ledger's already."""
        tables = self.tables
        counters, recounts = tables.tier_counters, tables.recounts
        for entry in entries:
            entry.published = True
            counters[entry.tier].payload_bytes += entry.payload_bytes
            for recount in recounts:
                recount.entered(entry)
        tables.entries.add(entries)

    def evict(
        self, victim: Key, cause: EvictionCause, session: int = 0, heir: Entry | None = None
    ) -> Entry:
        """An entry that `Ledger.next_victim` chose leaves. `session`: for whose save. `heir`: for
        what, which has no room yet."""
        entry = self.forget(victim, heir)
        self.tables.evicted(entry, cause, self.now_ns, session)
        return entry

    def forget(self, victim: Key, heir: Entry | None = None) -> Entry:
        """The same, where it is no eviction to be counted."""
        tables = self.tables
        entry = tables.entries[victim]
        self._leave(entry)
        tables.ledgers[entry.tier].forget(entry, heir)
        return entry

    def drop_damaged(self, entry: Entry) -> None:
        """An entry whose bytes are wrong can't be found any more, at once.

        Claims on it stay until they are released, which tells that they are lost: a read of it
        fails from now on. Its room is free when the last of them ended.
        """
        self.drop(entry, Happening.DAMAGED)
        self.tables.tier_counters[entry.tier].corrupt += 1

    def drop(self, entry: Entry, why: Happening) -> None:
        """The same, also of an entry that nothing is wrong with."""
        self.tables.happened(why, entry, self.now_ns)
        ledger = self.tables.ledgers[entry.tier]
        ledger.remove(entry)
        self._leave(entry)
        if entry.pins:
            self.tables.condemned[entry.generation] = entry
        else:
            ledger.forget(entry)

    def _leave(self, entry: Entry) -> None:
        """An entry that left the eviction order already is gone, for readers first."""
        tables, tier = self.tables, entry.tier
        for recount in tables.recounts:
            recount.left(entry)
        del tables.entries[entry.key]
        entry.published = False
        tables.tier_counters[tier].payload_bytes -= entry.payload_bytes
        tables.unrecorded.pop(entry.key, None)
        self.effects.append(IndexDelete(entry))
        erased = self._erased.get(tier)
        if erased is None:
            # Those that follow join it: what is erased sooner than it has to be is no harm.
            erased = self._erased[tier] = []
            self.effects.append(Erase(tier, erased))
        erased.append(entry)

    # ---- claims

    def pin(self, session: Session, claim: Claim) -> None:
        """A claim takes hold of its entries."""
        t = self.tables
        pinned_bytes, ledgers = session.pinned_bytes, t.ledgers
        pins = session.pins
        parts, mask = pins.parts, pins.mask
        for entry in reversed(claim.entries):
            for recount in t.recounts:
                recount.claimed(entry)
            if not entry.pins:
                ledgers[entry.tier].pin(entry)
            entry.pins += 1
            held = parts[hash(entry.key) & mask]
            count = held.get(entry, 0)
            held[entry] = count + 1
            if not count:
                tier = entry.tier
                pinned_bytes[tier] = pinned_bytes.get(tier, 0) + entry.stored_bytes
        pins.changed()

    def unpin(self, claim: int, session: Session, entries: Sequence[Entry]) -> None:
        """These entries of a claim that ended are let go, in this order."""
        t = self.tables
        pinned_bytes, ledgers = session.pinned_bytes, t.ledgers
        pins = session.pins
        parts, mask = pins.parts, pins.mask
        pins.changes += 1
        for entry in entries:
            for recount in t.recounts:
                recount.unclaimed(claim, entry)
            held = parts[hash(entry.key) & mask]
            count = held[entry]
            if count > 1:
                held[entry] = count - 1
            else:
                del held[entry]
                pinned_bytes[entry.tier] -= entry.stored_bytes
            entry.pins -= 1
            if entry.pins:
                continue
            if entry.published:
                # It enters the eviction order as the most recent: the time has to say the same.
                self._mark_used(entry)
                ledgers[entry.tier].unpin(entry)
            else:
                del t.condemned[entry.generation]
                ledgers[entry.tier].bury(entry)

    def lose_claim(self, claim_id: int, why: str) -> None:
        """Take a claim from its holder, who is told, and told again at release."""
        session = self.drop_claim(claim_id)
        self.remember_loss(session, claim_id, why)
        self.effects.append(TellClaimLost(session.session, claim_id, why))

    def remember_loss(self, session: Session, claim_id: int, why: str) -> None:
        """A claim did not hold to its end: its holder is told whenever it asks."""
        session.lost_claims[claim_id] = why
        if len(session.lost_claims) > self.tables.config.max_claims_per_session:
            del session.lost_claims[next(iter(session.lost_claims))]
        self.tables.counters.claims_lost += 1

    def drop_claim(self, claim_id: int) -> Session:
        """End a claim. Its entries are let go leaf first, so that the root is the most recent
        afterwards."""
        t = self.tables
        claim = t.claims.pop(claim_id)
        session = t.sessions.get(claim.session)
        if session is None:
            session = t.ending[claim.session]
        session.claims.pop(claim_id, None)
        job = Unpin(claim_id, session, claim.entries, len(claim.entries))
        t.unpinning[claim_id] = job
        t.backlog.append(job)
        return session

    def arm(self, in_ns: int, timer: Timer, number: int) -> None:
        """Something runs out so long after this event."""
        self.tables.set_timer(self.served_ns + in_ns, timer, number)
