"""The tables of `MetaState`: everything that the daemon knows, and its deadlines.

Invariants are documented at the attributes that they bind; `server.core.checking` recounts them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, TypeAlias

from ...proto import limits
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, Tier
from ...tiers.eviction.stack_distance import SampledCurve
from ...tiers.ledger import Ledger
from .counters import Counters, Histogram, TierCounters
from .effects import Reserved
from .entries import EntryState, EntryTable
from .events import ClaimAsked, LookupAsked, ReserveAsked, TierState
from .journal import HAPPENINGS, EvictionCause, Journal
from .sessions import Claim, HeldReservation, SaveBatch, Session, Tenant
from .shares import Holder, Shares
from .superseded import Superseded


@dataclass(slots=True, eq=False)
class Waiting:
    """A question that waits for saves in flight. It is answered when none of them is left."""

    question: LookupAsked | ClaimAsked | ReserveAsked
    #: Which of these saves can still change the answer. `RUN`: those before the first that failed.
    #: `FIRST`: those before the first that was published. `ANY`: all of them.
    mode: ClaimMode
    #: Token of each awaited save -> position of its key in the question, ascending. A save is
    #: removed when it ends, or when its outcome no longer matters.
    pending: dict[int, int]
    #: What the question adds to `Tables.waited_keys`.
    waited_keys: int
    #: Whose share of all waits it counts to.
    holder: Holder


# ---- jobs of the backlog: an event does a bounded amount of them


@dataclass(slots=True, eq=False)
class Unpin:
    """Unpin the entries of a claim that ended, leaf first."""

    claim: int
    session: Session
    entries: tuple[EntryState, ...]
    #: This many, from the root on, are still pinned.
    left: int


@dataclass(slots=True, eq=False)
class Wake:
    """Tell the requests that wait for a save that it ended."""

    token: int
    saved: bool
    waiters: Iterator[int]


@dataclass(slots=True, eq=False)
class EndSession:
    """Take back what a session that ended holds."""

    session: Session
    why: str
    waits: Iterator[int]
    tokens: Iterator[int]
    claims: Iterator[int]


@dataclass(slots=True, eq=False)
class FlushUsage:
    """Hand the uses that the stores have not recorded yet over to them, in order of use."""

    entries: Iterator[EntryState]


@dataclass(slots=True, eq=False)
class Reserve:
    """Find room for the items of a save."""

    asked: ReserveAsked
    session: Session
    batch: SaveBatch
    #: Of the items that were dealt with, in their order.
    results: list[Reserved] = field(default_factory=list)
    #: The item that room is being made for, if more entries have to be evicted for it.
    coming: EntryState | None = None
    #: How many entries this event may still evict.
    evictions: int = 0
    #: The request was given up: take back what was granted.
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Refresh:
    """Make the chain of a save that ended the most recent, the root last."""

    chain: Sequence[Key]
    #: None: it has ended.
    session: Session | None
    #: This many keys, from the root on, are still to be refreshed.
    left: int


#: Accesses as the hit curve of a tier takes them: keys, tokens, stored bytes.
Accesses: TypeAlias = "tuple[Tier, Sequence[Key], Sequence[int], Sequence[int]]"

Job: TypeAlias = Unpin | Wake | Reserve | Refresh | EndSession | FlushUsage


class Timer(IntEnum):
    """What a deadline belongs to. Of deadlines at the same moment, waits come last: their answers
    take into account what the others changed."""

    SESSION = 0
    CLAIM = 1
    RESERVATION = 2
    WAITING = 3


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The part of the configuration that `MetaState` needs."""

    session_lost_after_ns: int = (
        limits.SESSION_LOST_AFTER_INTERVALS * limits.DEFAULT_HEARTBEAT_INTERVAL_MS * 1_000_000
    )
    max_sessions: int = limits.MAX_SESSIONS
    max_claims_per_session: int = limits.MAX_CLAIMS_PER_SESSION
    max_reservations_per_session: int = limits.MAX_RESERVATIONS_PER_SESSION
    max_waiters: int = limits.MAX_WAITERS
    #: Saves that requests may wait for, over all requests and for each session.
    max_waited_keys: int = limits.MAX_WAITED_KEYS
    max_waited_keys_per_session: int = limits.MAX_WAITED_KEYS_PER_SESSION
    #: Entries of claims, and keys of unfinished saves with their chains, over all sessions.
    max_held_keys: int = limits.MAX_HELD_KEYS
    #: Shares of a tier that the claims, and the reservations, of one session may hold.
    max_pinned_share: float = 1.0
    max_reserved_share: float = 1.0
    #: How long a reservation may stand without its first byte.
    unwritten_ttl_ns: int = limits.MAX_LEASE_MS * 1_000_000
    #: Backlog steps of one event at most. A step is an entry, a key or a request.
    max_steps: int = 2048
    #: Keys that the live hit curve of a tier samples; 0: no curve is kept.
    curve_keys: int = 0
    #: Hand over the use of entries in RAM as well, though no store records it.
    ram_use: bool = False
    #: Memory for `journal.Journal`.
    journal_bytes: int = 0
    #: For how long after the start a key that is not known may be of an earlier start; 0: there
    #: was none.
    unsure_ns: int = 0


class Watcher(Protocol):
    """What a running recount is told: each change, before it is made."""

    def entered(self, entry: EntryState) -> None: ...
    def left(self, entry: EntryState) -> None: ...
    def claimed(self, entry: EntryState) -> None: ...
    def unclaimed(self, claim: int, entry: EntryState) -> None: ...
    def reserved(self, reservation: HeldReservation) -> None: ...
    def settled(self, reservation: HeldReservation) -> None: ...


@dataclass(slots=True)
class Tables:
    """All tables. Only `server.core` changes them."""

    config: StateConfig
    ledgers: dict[Tier, Ledger]
    #: The last stamp given out. Stamps only grow.
    stamp_ns: int
    #: All and only the published keys.
    entries: EntryTable = field(default_factory=EntryTable)
    #: By generation: entries that were dropped while claims held them. No key leads to them. Their
    #: room is not free before the last of these claims ends.
    condemned: dict[int, EntryState] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    #: By name: what the sessions of each tenant over TCP hold, as long as there are any.
    tenants: dict[str, Tenant] = field(default_factory=dict)
    #: Sessions that ended and still hold something, see `EndSession`.
    ending: dict[int, Session] = field(default_factory=dict)
    #: Each belongs to exactly one session and is in its `claims`.
    claims: dict[int, Claim] = field(default_factory=dict)
    #: Every reservation that holds room, doomed ones included.
    reservations: dict[int, HeldReservation] = field(default_factory=dict)
    #: Reservations that can still be published. Disjoint from `entries`.
    in_flight: dict[Key, HeldReservation] = field(default_factory=dict)
    #: By request number. Each is in `waiters` of every reservation that it waits for.
    waiting: dict[int, Waiting] = field(default_factory=dict)
    #: Saves that the requests in `waiting` wait for: of all, and of those without a session.
    waited_keys: int = 0
    anonymous_waited_keys: int = 0
    #: The same requests, and the saves that they wait for, in shares of the tenants.
    waiters: Shares = field(default_factory=lambda: Shares("waiting requests (max_waiters)", 0))
    waits: Shares = field(default_factory=lambda: Shares("waits (max_waited_keys)", 0))
    #: What claims and unfinished saves hold, see `StateConfig.max_held_keys`.
    held: Shares = field(
        default_factory=lambda: Shares("keys of claims and saves (max_held_keys)", 0)
    )
    #: Work that was left for later, the next job first.
    backlog: deque[Job] = field(default_factory=deque)
    #: Each `Unpin` in `backlog`, by claim.
    unpinning: dict[int, Unpin] = field(default_factory=dict)
    #: Each `Reserve` in `backlog`, by request.
    reserving: dict[int, Reserve] = field(default_factory=dict)
    #: Tokens of the saves whose `Wake` is in `backlog`.
    waking: set[int] = field(default_factory=set)
    #: Recounts under way, which are told of changes.
    recounts: list[Watcher] = field(default_factory=list)
    #: The hits that a tier would have had at other capacities, from a sample of its keys.
    curves: dict[Tier, SampledCurve[Key]] = field(default_factory=dict)
    #: Accesses that the curves have not counted yet, in order, and how many keys they are of.
    unobserved: list[Accesses] = field(default_factory=list)
    unobserved_keys: int = 0
    #: Entries whose store has not recorded their last use yet, in order of use. None of the RAM
    #: tier, which does not outlive the daemon, unless `StateConfig.ram_use` is set.
    unrecorded: dict[Key, EntryState] = field(default_factory=dict)
    #: Two heaps of deadlines, in served time. Everything that can expire has a timer in one of
    #: them. What ends earlier leaves a stale timer. When there are too many of these, all timers
    #: become `old_timers`, and `sift_timers` moves the live ones back.
    timers: list[tuple[int, Timer, int]] = field(default_factory=list)
    old_timers: list[tuple[int, Timer, int]] = field(default_factory=list)
    #: The state of each tier that does not serve.
    closed: dict[Tier, TierState] = field(default_factory=dict)
    #: Entries that left, and keys that were deleted, while some tier did not serve: it may not have
    #: read its records of them yet.
    superseded: Superseded = field(default_factory=Superseded)
    #: Keys of entries that were found while a later save of theirs was being committed to a device
    #: that hangs. Such a save replaces the entry when it is published.
    overtaken: set[Key] = field(default_factory=set)
    #: The highest generation of an earlier start. Higher ones are of this start.
    adopted_ns: int = 0
    #: By tier: the last stamp of use that recovery has given to an entry.
    recovered_ns: dict[Tier, int] = field(default_factory=dict)
    #: How long the daemon did not serve in total, see `served_ns`.
    credit_ns: int = 0
    next_session: int = 1
    next_claim: int = 1
    next_token: int = 1
    counters: Counters = field(default_factory=Counters)
    tier_counters: dict[Tier, TierCounters] = field(default_factory=dict)
    #: What happened to entries.
    journal: Journal = field(default_factory=lambda: Journal(0))
    #: How long evicted entries had not been used, in nanoseconds.
    eviction_ages: dict[tuple[Tier, EvictionCause], Histogram] = field(default_factory=dict)

    def oldest_claim_ns(self, now_ns: int) -> int:
        """The age of the oldest claim; 0 if there is none. Callable on any thread."""
        try:
            oldest = next(iter(self.claims.values()), None)
        except RuntimeError:  # the dict changed at this moment
            return 0
        return 0 if oldest is None else max(0, self.served_ns(now_ns) - oldest.taken_ns)

    def holder(self, session: int) -> Session | None:
        """The session of that number, open or ending."""
        return self.sessions.get(session) or self.ending.get(session)

    def observe_now(self) -> None:
        """Have the curves count what they have not counted yet."""
        for tier, keys, token_counts, stored_bytes in self.unobserved:
            self.curves[tier].access(keys, token_counts, stored_bytes)
        self.unobserved.clear()
        self.unobserved_keys = 0

    def evicted(
        self, entries: Sequence[EntryState], cause: EvictionCause, now_ns: int, session: int = 0
    ) -> None:
        """Count the evictions of entries of one tier. `session`: the one whose save needs the
        room."""
        tier = entries[0].tier
        self.journal.note(HAPPENINGS[cause], entries, now_ns, session)
        counters = self.tier_counters[tier]
        counters.evictions += len(entries)
        counters.evicted_bytes += sum([entry.stored_bytes for entry in entries])
        ages_ns = [max(0, now_ns - entry.last_used_ns) for entry in entries]
        self.eviction_ages[tier, cause].observe_all(ages_ns)

    @property
    def timed(self) -> tuple[Mapping[int, object], ...]:
        """The tables that timers refer to by number, in the order of `Timer`."""
        return self.sessions, self.claims, self.reservations, self.waiting

    @property
    def max_timers(self) -> int:
        """The most timers that are kept: as many stale ones as live ones, and some."""
        live = len(self.sessions) + len(self.claims) + len(self.reservations) + len(self.waiting)
        return 2 * live + 64

    # ---- deadlines

    def served_ns(self, now_ns: int) -> int:
        """`now_ns` less the time during which the daemon was too late to serve.

        Deadlines are in served time, so no session, claim, reservation or wait expires because
        the daemon was late: it did not hear their clients during that time either.
        """
        return now_ns - self.credit_ns

    def set_timer(self, at_ns: int, timer: Timer, number: int) -> None:
        """Set a deadline. `at_ns`: in served time."""
        heapq.heappush(self.timers, (at_ns, timer, number))

    def set_timers(self, at_ns: int, timer: Timer, numbers: Iterable[int]) -> None:
        """`set_timer` for each number."""
        timers = self.timers
        for number in numbers:
            heapq.heappush(timers, (at_ns, timer, number))

    def next_timer(self) -> tuple[int, Timer, int] | None:
        """The next deadline, which stays set; None if there is none."""
        soonest = self._soonest()
        return soonest[0] if soonest else None

    def pop_timer(self) -> tuple[int, Timer, int]:
        return heapq.heappop(self._soonest())

    def _soonest(self) -> list[tuple[int, Timer, int]]:
        old, new = self.old_timers, self.timers
        return old if old and (not new or old[0] < new[0]) else new

    def sift_timers(self, steps: int) -> None:
        """Remove stale timers, looking at `steps` timers at most. Without this they would pile up,
        because claims are released long before their leases end."""
        if not self.old_timers and len(self.timers) > self.max_timers:
            self.old_timers, self.timers = self.timers, []
        old = self.old_timers
        if not old:
            return
        timed = self.timed
        # Taken from the end, so that the rest stays a heap.
        for _ in range(min(steps, len(old))):
            timer = old.pop()
            if timer[2] in timed[timer[1]]:
                heapq.heappush(self.timers, timer)

    def stamp(self, now_ns: int) -> int:
        """A time that was never given out before: `now_ns` whenever possible."""
        last_ns = self.stamp_ns
        self.stamp_ns = stamp_ns = now_ns if now_ns > last_ns else last_ns + 1
        return stamp_ns
