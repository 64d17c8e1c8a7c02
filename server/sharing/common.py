"""What fetching and offering have in common: settings, counters, memory, threads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ..runtime.clock import Clock
from .store import SharedEntry, SharedStore

T = TypeVar("T")

#: What is received or sent in one go.
BATCH_BYTES: Final = 32 * 2**20
#: Calls to the engine at one time, each on a thread.
THREADS: Final = 4
#: Keys that are known to be in the engine: about 150 bytes each.
MAX_KNOWN: Final = 262_144
#: Fetches and offers that are remembered for `prefixctl why`: about 200 bytes each.
MAX_HAPPENED: Final = 16_384
#: How much earlier an entry expires for each that has to be there before it ...
DEPTH_MS: Final = 1_000
#: ... and for never having been read: on a real trace 1.0 to 1.4 times the hits of an LRU, with
#: less than half of its orphans (`tests/bench/bench_eviction.py`).
UNUSED_MS: Final = 300_000
#: The engine is told of a use if that lets an entry live this much longer. With a minute or more,
#: hot roots would age out of a small engine.
TOUCH_EVERY_MS: Final = 10_000


class WritePolicy(Enum):
    """Which entries are offered to others."""

    NONE = "none"
    """None: this node only reads."""
    SECOND_USE = "second-use"
    """Entries that were read after they were saved."""
    ALL = "all"
    """Every one."""


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """`[shared]`, for the daemon."""

    #: The tier that fetched entries go to.
    tier: Tier
    write: WritePolicy
    #: How long an entry stays in the engine after its last use, at most.
    life_ms: int
    #: What fetches and offers may hold of this process' memory, together.
    memory_bytes: int


@dataclass(slots=True)
class SharingCounters:
    """Since the start."""

    fetches: int = 0
    fetched_entries: int = 0
    fetched_bytes: int = 0
    #: Found, but did not come: no answer in time, or no room here.
    unavailable: int = 0
    damaged: int = 0
    offered_entries: int = 0
    offered_bytes: int = 0
    refused: int = 0
    #: Not offered: too many waited, the engine did not answer, or they left before their turn.
    offers_dropped: int = 0
    touched: int = 0


def expiries_ms(uses: Sequence[tuple[int, int]], life_ms: int) -> list[int]:
    """When entries may leave the engine (wall clock, ms) of which the last use (ns, a stamp) and
    the number of hits are given.

    The engine evicts what expires first. A chain is used leaf first and root last, at stamps that
    follow each other: each entry goes `DEPTH_MS` before the one that was used after it. What was
    saved and never read goes `UNUSED_MS` earlier."""
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


class Memory:
    """A budget of bytes; a caller that needs more than are free waits."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._used_bytes = 0
        self._freed = asyncio.Event()

    async def take(self, count: int) -> None:
        """Wait until `count` bytes are free."""
        while self._used_bytes + count > self.total_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._used_bytes += count

    def give_back(self, count: int) -> None:
        """Never waits, so that a task which is being cancelled can give back what it took."""
        self._used_bytes -= count
        self._freed.set()


class Known:
    """Keys that the engine has had, the latest of them, and until when they were to live there."""

    def __init__(self) -> None:
        self._until_ms: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._until_ms

    def until_ms(self, key: Key) -> int | None:
        """As it was told from here, 0: others did; wall clock, ms. None: it is not known."""
        return self._until_ms.get(key)

    def remember(self, key: Key, until_ms: int = 0) -> None:
        """The engine has it now."""
        self._until_ms[key] = until_ms
        self._until_ms.move_to_end(key)
        if len(self._until_ms) > MAX_KNOWN:
            self._until_ms.popitem(last=False)

    def forget(self, key: Key) -> None:
        """The engine evicted it, or lost it: it may be offered again."""
        self._until_ms.pop(key, None)


class What(Enum):
    """What became of an entry between this node and the engine."""

    FETCHED = "fetched"
    NOT_FETCHED = "not_fetched"
    """The engine has it, but it did not arrive in time, or there was no room here."""
    DAMAGED = "damaged"
    OFFERED = "offered"
    NOT_OFFERED = "not_offered"
    """The engine did not answer the offer."""
    REFUSED = "refused"


class Happened(NamedTuple):
    """`node`: of the engine, or the one that had the payload; empty: that is not known."""

    key: Key
    what: What
    node: str
    at_ns: int


class History:
    """The last of what happened. Nothing depends on it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._happened: deque[Happened] = deque(maxlen=MAX_HAPPENED)

    def note(self, what: What, node: str, key: Key) -> None:
        """Add an event, with the time of now."""
        self._happened.append(Happened(key, what, node, self._clock.now_ns()))

    def of(self, beginning: bytes) -> list[Happened]:
        """What happened to keys that begin so, the oldest first. Some milliseconds."""
        return [each for each in self._happened if each.key.startswith(beginning)]


@dataclass(slots=True)
class Link:
    """One engine, as this node uses it. Belongs to the event loop."""

    store: SharedStore
    config: SharingConfig
    known: Known
    memory: Memory
    history: History
    counters: SharingCounters = field(default_factory=SharingCounters)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, "prefixd-shared")
    )
    closed: bool = False

    def note(self, what: What, entry: SharedEntry) -> None:
        """See `History.note`."""
        self.history.note(what, self.store.node_of(entry), entry.key)

    async def call(self, call: Callable[[], T]) -> T:
        """Do something that blocks, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)
