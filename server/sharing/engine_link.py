"""How this node uses a shared engine: settings, counters, memory, threads, and a history."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from ...proto.keys import Key
from ...proto.vocabulary import Labelled, Tier
from ..runtime.clock import Clock
from ..runtime.quota import Quota
from .engine_store import SharedEntry, SharedStore

T = TypeVar("T")

#: Bytes that are received or sent in one go.
BATCH_BYTES: Final = 32 * 2**20
#: Concurrent calls to the engine, each on a thread.
THREADS: Final = 4
#: Look-ups of the engine whose time is remembered ...
LATEST_TRIPS: Final = 16
#: ... if it had so few keys: with more, the engine's work takes longer than the trip.
TRIP_KEYS: Final = 256
#: Of the fetches that are too short for any of those, each of this many is tried.
RETRY_EVERY: Final = 64
#: Keys that are remembered to be in the engine: about 150 bytes each.
MAX_KNOWN: Final = 262_144
#: Fetches and offers that are remembered for `prefixctl why`: about 200 bytes each.
MAX_HAPPENED: Final = 16_384
#: How much earlier an entry expires than the entry that precedes it in its chain ...
DEPTH_MS: Final = 1_000
#: ... and if it was never read: on a real trace 1.0 to 1.4 times the hits of an LRU, with less than
#: half of its orphans (`tests/bench/bench_eviction.py`).
UNUSED_MS: Final = 300_000
#: A use is sent to the engine if it lets an entry live this much longer. With a minute or more, hot
#: roots would age out of a small engine.
TOUCH_EVERY_MS: Final = 10_000


class WritePolicy(Enum):
    """Which entries are offered to other nodes."""

    NONE = "none"
    """None: this node only reads."""
    SECOND_USE = "second-use"
    """Entries that were read after they were saved."""
    ALL = "all"
    """Every entry."""


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """`[shared]`, for the daemon."""

    #: The tier of fetched entries.
    tier: Tier
    write: WritePolicy
    #: How long an entry stays in the engine after its last use, at most.
    life_ms: int
    #: Memory of this process that fetches and offers may use together.
    memory_bytes: int


@dataclass(slots=True)
class SharingCounters:
    """Since the start."""

    fetches: int = 0
    fetched_entries: int = 0
    fetched_bytes: int = 0
    #: Found, but not fetched: no answer in time, or no room here.
    unavailable: int = 0
    damaged: int = 0
    offered_entries: int = 0
    offered_bytes: int = 0
    refused: int = 0
    #: Not offered: too many waited, the engine did not answer, or the entry left before its turn.
    offers_dropped: int = 0
    touched: int = 0
    #: Deleted entries that the engine dropped, too.
    withdrawn: int = 0
    #: Deletes of other nodes that this node has read: of up to 32 keys each, or of a namespace.
    deletes_learned: int = 0
    #: Entries that were found and not fetched: their nodes may have missed a delete of them.
    unvouched: int = 0
    #: Fetches that were not tried: computing the tokens takes less time than two trips.
    too_short: int = 0


def expiries_ms(uses: Sequence[tuple[int, int]], life_ms: int) -> list[int]:
    """When entries may leave the engine (wall clock, ms). `uses`: the last use of each (ns, a
    stamp) and its number of hits.

    The engine evicts what expires first. A chain is used leaf first and root last, with consecutive
    stamps: each entry expires `DEPTH_MS` before the one that was used after it. An entry that was
    never read expires `UNUSED_MS` earlier."""
    expiries = [0] * len(uses)
    order = sorted(range(len(uses)), key=lambda number: uses[number][0], reverse=True)
    depth = after_ns = 0
    for number in order:
        used_ns, hits = uses[number]
        depth = depth + 1 if used_ns + 1 == after_ns else 0
        after_ns = used_ns
        earlier_ms = DEPTH_MS * depth + (0 if hits else UNUSED_MS)
        expiries[number] = used_ns // 1_000_000 + life_ms - min(earlier_ms, life_ms // 2)
    return expiries


class Latest(OrderedDict[Key, T]):
    """What is known of keys: of the latest `most` that were added."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def add(self, key: Key, value: T) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Does nothing if it is not known."""
        self.pop(key, None)


class What(Labelled):
    """What happened to an entry between this node and the engine. The numbers are the wire's."""

    FETCHED = 1
    NOT_FETCHED = 2
    """The engine has it, but it did not arrive in time, or there was no room here."""
    DAMAGED = 3
    OFFERED = 4
    NOT_OFFERED = 5
    """The engine did not answer the offer."""
    REFUSED = 6


class Trips:
    """How long a trip to the engine takes, as look-ups were measured; from that, the least time in
    which a fetch can bring anything. What a client asks for hardly changes it: look-ups of many
    keys, and those that no answer ended, are not measured."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=LATEST_TRIPS)
        self._refused = 0

    def took(self, seconds: float, keys: int) -> None:
        """A look-up of so many keys was answered after this time."""
        if keys <= TRIP_KEYS:
            self._took_s.append(seconds)

    @property
    def least_s(self) -> float:
        """One trip to look up and one to receive, as fast as the fastest of the latest look-ups."""
        return 2 * min(self._took_s, default=0.0)

    def pays(self, left_s: float) -> bool:
        """Whether a fetch may bring something in the time that is left. Every `RETRY_EVERY`-th
        that can't is let through: the engine may have become faster."""
        if left_s >= self.least_s:
            return True
        self._refused += 1
        return self._refused % RETRY_EVERY == 0


class EngineEvent(NamedTuple):
    """`node`: the node of the engine, or the one that had the payload; empty: it is not known."""

    key: Key
    what: What
    node: str
    at_ns: int


@dataclass(slots=True)
class EngineLink:
    """One engine, as this node uses it. Belongs to the event loop."""

    store: SharedStore
    config: SharingConfig
    clock: Clock
    #: Bounds the memory of fetches and offers.
    memory: Quota
    #: Keys that the engine had, and the expiry that this node set (wall clock, ms); 0: another node
    #: set it. What is not known, or forgotten, may be offered again.
    known: Latest[int] = field(default_factory=lambda: Latest(MAX_KNOWN))
    counters: SharingCounters = field(default_factory=SharingCounters)
    trips: Trips = field(default_factory=Trips)
    #: The latest events, the oldest first, for `prefixctl why` alone.
    history: deque[EngineEvent] = field(default_factory=lambda: deque(maxlen=MAX_HAPPENED))
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, "prefixd-shared")
    )
    closed: bool = False

    def note(self, what: What, entry: SharedEntry) -> None:
        """Add an event of this moment to the history."""
        node = self.store.node_of(entry)
        self.history.append(EngineEvent(entry.key, what, node, self.clock.now_ns()))

    async def call(self, call: Callable[[], T]) -> T:
        """Make a blocking call, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)
