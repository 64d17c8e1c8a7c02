"""What the metadata server knows: every table of `MetaState`, and nothing that acts on them.

The invariants stand beside the attributes that they bind; `server.checking` recounts them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import assert_never

from ..proto import limits
from ..proto.keys import Key
from ..proto.vocabulary import SaveReason, Tier
from ..tiers.eviction.sampled import SampledCurve
from ..tiers.ledger import Ledger
from ..tiers.order import Resident
from .events import ClaimAsked, LookupAsked, ReserveAsked


@dataclass(slots=True, eq=False)
class Entry(Resident):
    """A key that is published, or is being saved.

    `generation` and `last_used_ns` are stamps: the time in nanoseconds of the event, made
    unique and strictly increasing, so that they order entries exactly and a generation is
    never used twice. `generation` is therefore also the time of creation.
    """

    tier: Tier
    reason: SaveReason
    generation: int
    last_used_ns: int
    payload_bytes: int
    token_count: int
    payload_crc32c: int
    layer_count: int
    token_ids_bytes: int
    hits: int = 0
    #: claims that hold it
    pins: int = 0
    #: False before, and once it left, for those who have it in hand
    published: bool = True


@dataclass(slots=True, eq=False)
class Claim:
    """A pin on entries, root first."""

    claim: int
    session: int
    entries: tuple[Entry, ...]
    taken_ns: int
    lease_ns: int


class Stage(IntEnum):
    """Where a save stands."""

    RESERVED = auto()
    WRITING = auto()
    COMMITTING = auto()
    #: lost while somebody still writes into its room
    DOOMED = auto()
    PUBLISHED = auto()
    GONE = auto()


class Signal(IntEnum):
    """What can happen to a save."""

    BEGIN = auto()
    SEALED = auto()
    REFUSED = auto()  # the bytes are wrong
    STOPPED = auto()  # the writer gave up
    LOSE = auto()  # cancelled, expired, or its session ended
    COMMITTED = auto()
    COMMIT_FAILED = auto()


#: The protocol of a save. A pair that is missing cannot happen; `tests/test_server_stages.py`
#: enumerates them all. A save whose bytes are whole and checked is not lost any more.
NEXT_STAGE: dict[tuple[Stage, Signal], Stage] = {
    (Stage.RESERVED, Signal.BEGIN): Stage.WRITING,
    (Stage.RESERVED, Signal.LOSE): Stage.GONE,
    (Stage.WRITING, Signal.SEALED): Stage.COMMITTING,
    (Stage.WRITING, Signal.REFUSED): Stage.GONE,
    (Stage.WRITING, Signal.STOPPED): Stage.GONE,
    (Stage.WRITING, Signal.LOSE): Stage.DOOMED,
    (Stage.COMMITTING, Signal.COMMITTED): Stage.PUBLISHED,
    (Stage.COMMITTING, Signal.COMMIT_FAILED): Stage.GONE,
    (Stage.COMMITTING, Signal.LOSE): Stage.COMMITTING,
    (Stage.DOOMED, Signal.SEALED): Stage.GONE,
    (Stage.DOOMED, Signal.REFUSED): Stage.GONE,
    (Stage.DOOMED, Signal.STOPPED): Stage.GONE,
    (Stage.DOOMED, Signal.LOSE): Stage.DOOMED,
}


@dataclass(slots=True, eq=False)
class SaveBatch:
    """The chain that one save belongs to: used as a whole once its last item ended."""

    chain: tuple[Key, ...]
    unsettled: int
    #: sizes and counts of its entries: those that repeat, which is most, are one object. 96 bytes
    #: less for each entry
    numbers: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Reservation:
    """The exclusive right to save an entry, which has its room already."""

    token: int
    entry: Entry
    session: int
    token_ids: bytes
    batch: SaveBatch
    reserved_ns: int
    expires_ns: int
    stage: Stage = Stage.RESERVED
    #: requests that wait for its end
    waiters: set[int] = field(default_factory=set)

    @property
    def key(self) -> Key:
        return self.entry.key

    @property
    def tier(self) -> Tier:
        return self.entry.tier

    @property
    def payload_bytes(self) -> int:
        return self.entry.payload_bytes

    @property
    def stored_bytes(self) -> int:
        return self.entry.stored_bytes


@dataclass(slots=True, eq=False)
class Session:
    """One connected client."""

    session: int
    owner: str
    opened_ns: int
    heartbeat_ns: int
    claims: set[int] = field(default_factory=set)
    tokens: set[int] = field(default_factory=set)
    #: claims that were lost and not yet given back, with the reason; bounded like claims
    lost_claims: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Waiting:
    """A question that waits for saves in flight; asked again when one of them ends."""

    question: LookupAsked | ClaimAsked | ReserveAsked
    reservations: tuple[Reservation, ...]


class Timer(IntEnum):
    """What a deadline belongs to. Of deadlines at one moment the waits come last: they are
    answered with what the others left."""

    SESSION = 0
    CLAIM = 1
    RESERVATION = 2
    WAITING = 3


@dataclass(slots=True)
class TierCounters:
    """What happened in a tier since the start."""

    hits: int = 0
    hit_tokens: int = 0
    saves: int = 0
    saved_bytes: int = 0
    read_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0
    recovered_entries: int = 0
    recovered_bytes: int = 0
    dropped_at_start: int = 0
    #: a gauge, not a counter: payload bytes of the entries that are published now
    payload_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """What happened since the start, over all tiers."""

    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0
    claims: int = 0
    claims_empty: int = 0
    claimed_entries: int = 0
    releases: int = 0
    claims_lost: int = 0
    reservations: int = 0
    duplicate_saves: int = 0
    in_flight_refusals: int = 0
    too_large_refusals: int = 0
    no_room_refusals: int = 0
    reservations_lost: int = 0
    crc_mismatches: int = 0
    length_mismatches: int = 0
    failed_saves: int = 0
    waits: int = 0
    waits_timed_out: int = 0
    touches: int = 0
    suspects: int = 0
    sessions_opened: int = 0
    sessions_lost: int = 0


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
    #: keys that the live hit curve of a tier samples; 0: there is none
    curve_keys: int = 0


@dataclass(slots=True)
class Tables:
    """Everything. Only the functions of `server.state` and its helpers change it."""

    config: StateConfig
    ledgers: dict[Tier, Ledger]
    #: the last stamp given out; stamps only grow
    stamp_ns: int
    #: all and only the published keys
    entries: dict[Key, Entry] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    #: each belongs to exactly one session and is in its `claims`
    claims: dict[int, Claim] = field(default_factory=dict)
    #: every reservation that holds room, doomed ones included
    reservations: dict[int, Reservation] = field(default_factory=dict)
    #: those that can still be published; disjoint from `entries`
    in_flight: dict[Key, Reservation] = field(default_factory=dict)
    #: by request number; each is in `waiters` of all its reservations
    waiting: dict[int, Waiting] = field(default_factory=dict)
    #: what hits every capacity of a tier would have had, from a sample of its keys
    curves: dict[Tier, SampledCurve[Key]] = field(default_factory=dict)
    #: entries whose use is not yet recorded by their store, in order of use; none of the RAM
    #: tier, which is gone with the daemon
    unrecorded: dict[Key, Entry] = field(default_factory=dict)
    #: a heap of what may be due when. Everything that can run out is in it; what ended before
    #: it was due stays until it would have been, or until there is too much of that
    timers: list[tuple[int, Timer, int]] = field(default_factory=list)
    next_session: int = 1
    next_claim: int = 1
    next_token: int = 1
    counters: Counters = field(default_factory=Counters)
    tier_counters: dict[Tier, TierCounters] = field(default_factory=dict)

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

    def stamp(self, now_ns: int) -> int:
        """A time that was never given out before, `now_ns` whenever possible."""
        last_ns = self.stamp_ns
        self.stamp_ns = stamp_ns = now_ns if now_ns > last_ns else last_ns + 1
        return stamp_ns
