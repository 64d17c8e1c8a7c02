"""What fetching and offering have in common: settings, counters, memory, threads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ..runtime.clock import Clock
from .store import SharedStore

T = TypeVar("T")

#: What is received or sent in one go.
BATCH_BYTES: Final = 32 * 2**20
#: Calls to the engine at one time, each on a thread.
THREADS: Final = 4
#: Keys that are known to be in the engine: about 150 bytes each.
MAX_KNOWN: Final = 262_144


class WritePolicy(Enum):
    """Which entries are offered to others."""

    NONE = "none"
    """None: this node only reads."""
    SECOND_USE = "second-use"
    """Those that were read after they were saved."""
    ALL = "all"
    """Every one."""


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """`[shared]`, for the daemon."""

    #: Where what is brought goes.
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


def expiries_ms(last_used_ns: Sequence[int], until_ms: int) -> list[int]:
    """When entries that were used then may go, the last used at `until_ms`. A chain is used leaf
    first and root last, all within a moment: a millisecond apart, the engine drops its leaves
    before its root."""
    order = sorted(range(len(last_used_ns)), key=lambda n: -last_used_ns[n])
    expiries = [0] * len(order)
    for depth, number in enumerate(order):
        expiries[number] = until_ms - depth
    return expiries


class Memory:
    """Bytes that may be in use; who needs more than are free waits."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._used_bytes = 0
        self._freed = asyncio.Event()

    async def take(self, count: int) -> None:
        """Wait until so many are free."""
        while self._used_bytes + count > self.total_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._used_bytes += count

    def give_back(self, count: int) -> None:
        """Without waiting: whoever took them may be cancelled at any moment."""
        self._used_bytes -= count
        self._freed.set()


class Known:
    """Keys that the engine has had, the latest of them, and when that was said last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_ms: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._said_ms

    def said_ms(self, key: Key) -> int | None:
        """Wall clock, ms; None: never, or long ago."""
        return self._said_ms.get(key)

    def remember(self, key: Key) -> None:
        """The engine has it now."""
        self._said_ms[key] = self.now_ms()
        self._said_ms.move_to_end(key)
        if len(self._said_ms) > MAX_KNOWN:
            self._said_ms.popitem(last=False)

    def now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000


@dataclass(slots=True)
class Link:
    """One engine, as this node uses it. Belongs to the event loop."""

    store: SharedStore
    config: SharingConfig
    known: Known
    memory: Memory
    counters: SharingCounters = field(default_factory=SharingCounters)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, "prefixd-shared")
    )
    closed: bool = False

    async def call(self, call: Callable[[], T]) -> T:
        """Do something that blocks, on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)
