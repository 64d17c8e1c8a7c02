"""What the metadata server knows: every table of `MetaState`, and nothing that acts on them.

The invariants stand beside the attributes that they bind; `server.core.checking` recounts them all.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Protocol, TypeAlias, assert_never

from ...proto import limits
from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ...tiers.eviction.sampled import SampledCurve
from ...tiers.ledger import Ledger
from .counters import Counters, Histogram, TierCounters
from .effects import Reserved
from .entries import Entry, EntryTable
from .events import ClaimAsked, LookupAsked, ReserveAsked, TierState
from .journal import EvictionCause, Happening, Journal
from .sessions import Claim, Reservation, SaveBatch, Session


class WaitMode(Enum):
    """Which of the saves that a question waits for can still change its answer."""

    ALL = auto()
    #: those before the first that failed
    RUN = auto()
    #: those before the first that was published
    FIRST = auto()


@dataclass(slots=True, eq=False)
class Waiting:
    """A question that waits for saves in flight, and is answered when none of them is left."""

    question: LookupAsked | ClaimAsked | ReserveAsked
    mode: WaitMode
    #: token of each save that is waited for -> position of its key in the question, ascending. A
    #: save that ends is removed, and so are those whose outcome no longer matters
    pending: dict[int, int]
    #: what this counts for in `waited_keys`
    waited_keys: int


# ---- work that is left for later: an event does a bounded amount of it


@dataclass(slots=True, eq=False)
class Unpin:
    """Entries of a claim that ended lose their pins, leaf first."""

    claim: int
    session: Session
    entries: tuple[Entry, ...]
    #: so many, from the root on, are still pinned
    left: int


@dataclass(slots=True, eq=False)
class Wake:
    """A save ended, one way or the other: the requests that wait for it are told."""

    token: int
    saved: bool
    waiters: Iterator[int]


@dataclass(slots=True, eq=False)
class EndSession:
    """A session ended: what it holds is taken back."""

    session: Session
    why: str
    waits: Iterator[int]
    tokens: Iterator[int]
    claims: Iterator[int]


@dataclass(slots=True, eq=False)
class FlushUsage:
    """Uses that the stores do not know yet are handed over to them, in order of use."""

    entries: Iterator[Entry]


@dataclass(slots=True, eq=False)
class Reserve:
    """Room is being found for the items of a save."""

    asked: ReserveAsked
    session: Session
    batch: SaveBatch
    #: of the first items
    results: list[Reserved] = field(default_factory=list)
    #: an item for which some were evicted and more are to be
    coming: Entry | None = None
    #: how many may be evicted now
    evictions: int = 0
    #: the request was given up: what was granted is taken back
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Refresh:
    """The chain of a save that ended becomes the most recent, the root last."""

    chain: Sequence[Key]
    #: None: that has ended
    session: Session | None
    #: how many of them are left, those next to the root
    left: int


#: What a hit curve is shown: key, tokens, stored bytes.
Access: TypeAlias = "tuple[Key, int, int]"

Job: TypeAlias = Unpin | Wake | Reserve | Refresh | EndSession | FlushUsage


class Timer(IntEnum):
    """What a deadline belongs to. Of deadlines at one moment the waits come last: they are
    answered with what the others left."""

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
    #: saves that waiting requests may wait for, over all of them and for each session
    max_waited_keys: int = limits.MAX_WAITED_KEYS
    max_waited_keys_per_session: int = limits.MAX_WAITED_KEYS_PER_SESSION
    #: parts of a tier's budget that the claims, and the reservations, of one session may hold
    max_pinned_share: float = 1.0
    max_reserved_share: float = 1.0
    #: how long a reservation may stand without its first byte
    unwritten_ttl_ns: int = limits.MAX_LEASE_MS * 1_000_000
    #: what one event does at most of work that can wait: an entry, a key or a request each
    max_steps: int = 2048
    #: keys that the live hit curve of a tier samples; 0: there is none
    curve_keys: int = 0
    #: hand over the use of what is in RAM as well, which no store records
    ram_use: bool = False
    #: what `journal.Journal` may take
    journal_bytes: int = 0


class Watcher(Protocol):
    """The changes that a running recount is told of, each before it is made."""

    def entered(self, entry: Entry) -> None: ...
    def left(self, entry: Entry) -> None: ...
    def claimed(self, entry: Entry) -> None: ...
    def unclaimed(self, claim: int, entry: Entry) -> None: ...
    def reserved(self, reservation: Reservation) -> None: ...
    def settled(self, reservation: Reservation) -> None: ...


@dataclass(slots=True)
class Tables:
    """Everything. Only the functions of `server.core.state` and its helpers change it."""

    config: StateConfig
    ledgers: dict[Tier, Ledger]
    #: the last stamp given out; stamps only grow
    stamp_ns: int
    #: all and only the published keys
    entries: EntryTable = field(default_factory=EntryTable)
    #: by generation: entries that were dropped while claims held them; no key leads to them, but
    #: their room is not free before the last of these claims ends
    condemned: dict[int, Entry] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    #: sessions that ended and still hold something, see `EndSession`
    ending: dict[int, Session] = field(default_factory=dict)
    #: each belongs to exactly one session and is in its `claims`
    claims: dict[int, Claim] = field(default_factory=dict)
    #: every reservation that holds room, doomed ones included
    reservations: dict[int, Reservation] = field(default_factory=dict)
    #: those that can still be published; disjoint from `entries`
    in_flight: dict[Key, Reservation] = field(default_factory=dict)
    #: by request number; each is in `waiters` of all its reservations
    waiting: dict[int, Waiting] = field(default_factory=dict)
    #: saves that all of `waiting` wait for, and those of it that belong to no session
    waited_keys: int = 0
    anonymous_waited_keys: int = 0
    #: work that is left, the next first
    backlog: deque[Job] = field(default_factory=deque)
    #: the `Unpin` in `backlog`, by claim
    unpinning: dict[int, Unpin] = field(default_factory=dict)
    #: the `Reserve` in `backlog`, by request
    reserving: dict[int, Reserve] = field(default_factory=dict)
    #: tokens of the saves whose `Wake` is in `backlog`
    waking: set[int] = field(default_factory=set)
    #: recounts under way, which have to know what changes
    recounts: list[Watcher] = field(default_factory=list)
    #: what hits every capacity of a tier would have had, from a sample of its keys
    curves: dict[Tier, SampledCurve[Key]] = field(default_factory=dict)
    #: uses that the curves have not counted yet, in order
    unobserved: list[tuple[Tier, Sequence[Access]]] = field(default_factory=list)
    #: entries whose use is not yet recorded by their store, in order of use; none of the RAM
    #: tier, which is gone with the daemon
    unrecorded: dict[Key, Entry] = field(default_factory=dict)
    #: a heap of what may be due when, in served time. Everything that can run out is in it or in
    #: `old_timers`, which is a heap too; what ended before it was due stays until it would have
    #: been, or until there is too much of that and `sift_timers` moves over what is alive
    timers: list[tuple[int, Timer, int]] = field(default_factory=list)
    old_timers: list[tuple[int, Timer, int]] = field(default_factory=list)
    #: the tiers that do not serve; those that do are not in it
    closed: dict[Tier, TierState] = field(default_factory=dict)
    #: keys that were deleted since not all tiers serve: their records may not have been read yet
    deleted: set[Key] = field(default_factory=set)
    #: the highest generation of an earlier start; those above are of this one
    adopted_ns: int = 0
    #: by tier: the last stamp of use that was adopted at start
    recovered_ns: dict[Tier, int] = field(default_factory=dict)
    #: for how long in all the daemon did not serve, see `served_ns`
    credit_ns: int = 0
    next_session: int = 1
    next_claim: int = 1
    next_token: int = 1
    counters: Counters = field(default_factory=Counters)
    tier_counters: dict[Tier, TierCounters] = field(default_factory=dict)
    #: what happened to entries
    journal: Journal = field(default_factory=lambda: Journal(0))
    #: for how long evicted entries had not been used, in nanoseconds
    eviction_ages: dict[tuple[Tier, EvictionCause], Histogram] = field(default_factory=dict)

    def oldest_claim_ns(self, now_ns: int) -> int:
        """For how long the oldest claim is held; 0: there is none. Callable on any thread."""
        try:
            oldest = next(iter(self.claims.values()), None)
        except RuntimeError:  # they changed in that moment
            return 0
        return 0 if oldest is None else max(0, self.served_ns(now_ns) - oldest.taken_ns)

    def happened(self, what: Happening, entry: Entry, now_ns: int, session: int = 0) -> None:
        """Let the journal remember it."""
        self.journal.note(what, (entry,), now_ns, session)

    def evicted(self, entry: Entry, cause: EvictionCause, now_ns: int, session: int = 0) -> None:
        """Count an eviction. `session`: for whose save."""
        tier = entry.tier
        self.happened(cause.happening, entry, now_ns, session)
        counters = self.tier_counters[tier]
        counters.evictions += 1
        counters.evicted_bytes += entry.stored_bytes
        self.eviction_ages[tier, cause].observe(max(0, now_ns - entry.last_used_ns))

    def timed(self, timer: Timer) -> Mapping[int, object]:
        """What is alive of all that a kind of timer can belong to, by number."""
        match timer:
            case Timer.SESSION:
                return self.sessions
            case Timer.CLAIM:
                return self.claims
            case Timer.RESERVATION:
                return self.reservations
            case Timer.WAITING:
                return self.waiting
            case _:
                assert_never(timer)

    @property
    def max_timers(self) -> int:
        """As many stale ones as live ones, and some."""
        live = len(self.sessions) + len(self.claims) + len(self.reservations) + len(self.waiting)
        return 2 * live + 64

    # ---- deadlines

    def served_ns(self, now_ns: int) -> int:
        """`now_ns` less the time in which the daemon did not get around to serve.

        Deadlines are kept in it: while the daemon was late, the time of no session, claim,
        reservation or wait ran, for what their clients said meanwhile was not heard either.
        """
        return now_ns - self.credit_ns

    def set_timer(self, at_ns: int, timer: Timer, number: int) -> None:
        """`at_ns`: in served time."""
        heapq.heappush(self.timers, (at_ns, timer, number))

    def next_timer(self) -> tuple[int, Timer, int] | None:
        """The soonest deadline; stays where it is."""
        soonest = self._soonest()
        return soonest[0] if soonest else None

    def pop_timer(self) -> tuple[int, Timer, int]:
        return heapq.heappop(self._soonest())

    def _soonest(self) -> list[tuple[int, Timer, int]]:
        old, new = self.old_timers, self.timers
        return old if old and (not new or old[0] < new[0]) else new

    def sift_timers(self, steps: int) -> None:
        """Claims are released long before their leases end: without this, their timers would
        pile up. Looks at `steps` timers at most."""
        if not self.old_timers and len(self.timers) > self.max_timers:
            self.old_timers, self.timers = self.timers, []
        # From the end: what is left of a heap is a heap.
        for _ in range(min(steps, len(self.old_timers))):
            timer = self.old_timers.pop()
            if timer[2] in self.timed(timer[1]):
                heapq.heappush(self.timers, timer)

    def stamp(self, now_ns: int) -> int:
        """A time that was never given out before, `now_ns` whenever possible."""
        last_ns = self.stamp_ns
        self.stamp_ns = stamp_ns = now_ns if now_ns > last_ns else last_ns + 1
        return stamp_ns
