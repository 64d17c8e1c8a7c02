"""One turn of the metadata server: an event is being applied.

`Turn` is what the helpers of `MetaState` share while they work: the tables, the time of the
event, the effects so far, and the few moves that several of them need.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..proto.errors import PrefixdError, UnknownSession
from ..proto.keys import Key
from ..proto.vocabulary import Tier
from .effects import Effect, Erase, IndexClaim, IndexDelete, TellClaimLost
from .events import ClaimAsked, LookupAsked, ReserveAsked
from .tables import Entry, Reservation, Session, Tables, Timer, Waiting

#: Asked of every key of a claim: looking a member up in its class takes as long as a call.
_RAM: Final = Tier.RAM
_SHM: Final = Tier.SHM


class Refusal(Exception):
    """The whole question is refused; `MetaState` turns it into the answer."""

    def __init__(self, error: PrefixdError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Turn:
    """See the module."""

    tables: Tables
    now_ns: int
    effects: list[Effect] = field(default_factory=list)
    #: requests whose reservations ended in this turn, to be asked again at its end
    woken: list[int] = field(default_factory=list)

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

    def set_timer(self, at_ns: int, timer: Timer, number: int) -> None:
        heapq.heappush(self.tables.timers, (at_ns, timer, number))

    # ---- waiting

    def park(
        self,
        question: LookupAsked | ClaimAsked | ReserveAsked,
        keys: Iterable[Key],
    ) -> bool:
        """Let a question wait for saves in flight. False: it has waited long enough, or
        there are too many waiting; it is to be answered as things are."""
        t = self.tables
        if self.now_ns >= question.wait_until_ns:
            return False
        if len(t.waiting) >= t.config.max_waiters:
            return False
        reservations = tuple(t.in_flight[key] for key in keys)
        t.waiting[question.request] = Waiting(question, reservations)
        for reservation in reservations:
            reservation.waiters.add(question.request)
        return True

    def unpark(self, request: int) -> Waiting | None:
        """Take a question out of the waiting room."""
        waiting = self.tables.waiting.pop(request, None)
        if waiting is not None:
            for reservation in waiting.reservations:
                reservation.waiters.discard(request)
        return waiting

    def wake(self, reservation: Reservation) -> None:
        """A reservation ended, one way or the other: whoever waits for it is asked again."""
        self.woken.extend(sorted(reservation.waiters))

    # ---- entries

    def use(self, entry: Entry) -> None:
        """One access of a published entry."""
        self._mark_used(entry)
        entry.hits += 1
        self.tables.ledgers[entry.tier].policy.hit(entry)

    def read(self, entry: Entry) -> None:
        """One access by somebody who reads it."""
        self.use(entry)
        counters = self.tables.tier_counters[entry.tier]
        counters.hits += 1
        counters.hit_tokens += entry.token_count

    def observe(self, tier: Tier, accesses: Sequence[tuple[Key, int, int]]) -> None:
        """Show accesses (key, tokens, stored bytes; root first) to the tier's hit curve, those
        that hit as well as those that did not and are saved now."""
        curve = self.tables.curves.get(tier)
        if curve is not None and accesses:
            keys, tokens, stored_bytes = zip(*accesses, strict=True)
            curve.access(keys, tokens, stored_bytes)

    def observe_entries(self, entries: Iterable[Entry]) -> None:
        """Show hits to the curves of their tiers."""
        if self.tables.curves:
            by_tier: dict[Tier, list[tuple[Key, int, int]]] = {}
            for entry in entries:
                access = (entry.key, entry.token_count, entry.stored_bytes)
                by_tier.setdefault(entry.tier, []).append(access)
            for tier, accesses in by_tier.items():
                self.observe(tier, accesses)

    def refresh(self, entry: Entry) -> None:
        """Most recent from now on, without being an access."""
        self._mark_used(entry)
        self.tables.ledgers[entry.tier].policy.refresh(entry)

    def _mark_used(self, entry: Entry) -> None:
        entry.last_used_ns = self.tables.stamp(self.now_ns)
        if entry.tier is not _RAM:
            unrecorded = self.tables.unrecorded
            unrecorded.pop(entry.key, None)
            unrecorded[entry.key] = entry

    def pin(self, entries: Iterable[Entry]) -> None:
        first: list[Entry] = []
        for entry in entries:
            if not entry.pins:
                self.tables.ledgers[entry.tier].pin(entry)
                first.append(entry)
            entry.pins += 1
        self._remember_claims(first, claimed=True)

    def unpin(self, entries: Iterable[Entry]) -> None:
        last: list[Entry] = []
        for entry in entries:
            entry.pins -= 1
            if not entry.pins:
                # It enters the eviction order as the most recent: the time has to say the same.
                self._mark_used(entry)
                self.tables.ledgers[entry.tier].unpin(entry)
                last.append(entry)
        self._remember_claims(last, claimed=False)

    def _remember_claims(self, entries: Iterable[Entry], *, claimed: bool) -> None:
        # Only the shm tier outlives a daemon in memory that others have mapped.
        keys = tuple(entry.key for entry in entries if entry.tier is _SHM)
        if keys:
            self.effects.append(IndexClaim(keys, claimed))

    def evict(self, victim: Key) -> Entry:
        """An entry that `Ledger.next_victim` chose leaves."""
        entry = self._leave(victim)
        counters = self.tables.tier_counters[entry.tier]
        counters.evictions += 1
        counters.evicted_bytes += entry.stored_bytes
        return entry

    def drop_damaged(self, entry: Entry, why: str) -> None:
        """An entry whose bytes are wrong leaves at once; claims on it are lost."""
        if entry.pins:
            holders = [c.claim for c in self.tables.claims.values() if entry in c.entries]
            for claim in holders:
                self.lose_claim(claim, why)
        self.tables.ledgers[entry.tier].remove(entry)
        self._leave(entry.key)
        self.tables.tier_counters[entry.tier].corrupt += 1

    def _leave(self, key: Key) -> Entry:
        """An unpinned entry, out of the eviction order already, is gone: first for readers."""
        tables = self.tables
        entry = tables.entries.pop(key)
        entry.published = False
        tables.tier_counters[entry.tier].payload_bytes -= entry.payload_bytes
        tables.unrecorded.pop(key, None)
        self.effects.append(IndexDelete(key))
        self.effects.append(Erase(entry.tier, (key,)))
        tables.ledgers[entry.tier].forget(entry)
        return entry

    # ---- claims

    def lose_claim(self, claim_id: int, why: str) -> None:
        """Take a claim from its holder, who is told, and told again at release."""
        session = self.drop_claim(claim_id)
        if session is not None:
            session.lost_claims[claim_id] = why
            if len(session.lost_claims) > self.tables.config.max_claims_per_session:
                del session.lost_claims[next(iter(session.lost_claims))]
            self.tables.counters.claims_lost += 1
            self.effects.append(TellClaimLost(session.session, claim_id, why))

    def drop_claim(self, claim_id: int) -> Session | None:
        """End a claim: leaf first, so that the root is the most recent afterwards."""
        claim = self.tables.claims.pop(claim_id)
        self.unpin(reversed(claim.entries))
        session = self.tables.sessions.get(claim.session)
        if session is not None:
            session.claims.discard(claim_id)
        return session
