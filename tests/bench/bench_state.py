"""Measures how the state machine scales: time and memory of the state alone, without I/O.

    python tests/bench/bench_state.py            # 10,000 against 1,000,000 entries

Prints one JSON object per line. The two sizes take turns, and only ratios within one run count. A
batch is 48 keys that were saved together, like the blocks of a prompt. `scattered` keys were not
saved together, which is the worst case. `bench_entries.py` measures the same end to end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveReason, Tier
from prefixd.server.core.effects import (
    ClaimAnswer,
    Effect,
    Opened,
    Reply,
    ReserveAnswer,
    WriteOrder,
)
from prefixd.server.core.events import (
    ClaimAsked,
    EvictAsked,
    KeyToSave,
    Question,
    ReleaseAsked,
    ReserveAsked,
    SessionOpened,
    Tick,
    WriteSealed,
)
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.eviction import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger

SLAB_BYTES = 64 * 2**10
CONTENT = Content(SLAB_BYTES, 512)
BATCH_KEYS = 48
SECOND_NS = 10**9
#: Keys saved between two flushes, as in a few seconds of a busy daemon.
FLUSH_KEYS = BATCH_KEYS * 500
TURNS = 10

T = TypeVar("T")


class Driver:
    """A state with one RAM tier, and a session that uses it."""

    def __init__(self, room_entries: int) -> None:
        budget_bytes = room_entries * SLAB_BYTES
        ledger = Ledger(
            Tier.RAM,
            budget_bytes,
            LRU(budget_bytes),
            extents=ExtentAllocator(budget_bytes, SLAB_BYTES),
        )
        config = StateConfig(
            max_claims_per_session=10**9, max_reservations_per_session=10**9, max_steps=10**9
        )
        whole_slabs = lambda payload, ids: -(-(payload + ids) // SLAB_BYTES) * SLAB_BYTES  # noqa: E731
        self.state = MetaState(config, {Tier.RAM: ledger}, {Tier.RAM: whole_slabs}, frozenset(), 1)
        self.now_ns = time.time_ns()
        self.requests = 0
        opened = self.ask(SessionOpened(self.request(), "bench", self.now_ns))
        assert isinstance(opened, Opened)
        self.session = opened.session

    def request(self) -> int:
        self.requests += 1
        self.now_ns += 1000
        return self.requests

    def ask(self, question: Question) -> object:
        return next(e.answer for e in self.state.apply(question) if isinstance(e, Reply))

    def save(self, keys: list[Key]) -> None:
        answer = self.ask(
            ReserveAsked(
                request=self.request(),
                session=self.session,
                tier=Tier.RAM,
                reason=SaveReason.COLD,
                items=tuple(KeyToSave(key, CONTENT) for key in keys),
                ancestors=(),
                begin=True,
                ttl_ns=60 * SECOND_NS,
                wait_until_ns=0,
                now_ns=self.now_ns,
            )
        )
        assert isinstance(answer, ReserveAnswer)
        tokens = tuple(r.token for r in answer.results if isinstance(r, WriteOrder))
        assert len(tokens) == len(keys)
        # Different checksums for all entries, as in reality, because each takes memory.
        crcs = tuple(int.from_bytes(key[:4], "little") for key in keys)
        self.state.apply(WriteSealed(tokens, crcs, crcs, self.now_ns))

    def claim(self, keys: list[Key]) -> int:
        answer = self.ask(
            ClaimAsked(
                request=self.request(),
                session=self.session,
                keys=tuple(keys),
                mode=ClaimMode.ANY,
                lease_ns=300 * SECOND_NS,
                wait_until_ns=0,
                now_ns=self.now_ns,
            )
        )
        assert isinstance(answer, ClaimAnswer)
        assert all(answer.claimed)
        return answer.claim

    def release(self, claim: int) -> None:
        self.ask(ReleaseAsked(self.request(), self.session, (claim,), self.now_ns))

    def flush(self) -> None:
        """As the daemon does every second."""
        self.state.apply(Tick(self.now_ns, flush=True))

    def evict(self, entries: int) -> list[Effect]:
        return self.state.apply(
            EvictAsked(self.request(), Tier.RAM, entries * SLAB_BYTES, entries, self.now_ns)
        )


def new_keys(count: int) -> list[Key]:
    raw = os.urandom(32 * count)
    return [Key(raw[i : i + 32]) for i in range(0, len(raw), 32)]


def timed_us(action: Callable[[int], object], repeats: int) -> float:
    """The median microseconds of one call."""
    seconds = []
    for repeat in range(repeats):
        start = time.perf_counter()
        action(repeat)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Side:
    """A full state with this many entries, and the microseconds of its batches."""

    def __init__(self, entries: int) -> None:
        gc.collect()
        before_bytes = resident_bytes()
        self.driver = Driver(entries)
        self.keys: list[Key] = []
        for start in range(0, entries, BATCH_KEYS):
            keys = new_keys(min(BATCH_KEYS, entries - start))
            self.driver.save(keys)
            self.keys += keys
            if start % FLUSH_KEYS == 0:
                self.driver.flush()
        gc.collect()
        gc.freeze()  # as the daemon does, see `server/runtime/process_memory.py`
        # The list belongs to the benchmark, its keys to the state.
        own_bytes = sys.getsizeof(self.keys)
        self.entry_bytes = (resident_bytes() - before_bytes - own_bytes) / entries
        self.took_us: dict[str, list[float]] = defaultdict(list)
        self.random = random.Random(1)

    def timed(self, op: str, action: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = action()
        self.took_us[op].append((time.perf_counter() - start) * 1e6)
        return result

    def claim_and_release(self, op: str, keys: list[Key]) -> None:
        claim = self.timed(f"claim{op}", lambda: self.driver.claim(keys))
        self.timed(f"release{op}", lambda: self.driver.release(claim))

    def read_turn(self, samples: int) -> None:
        self.driver.flush()
        for _ in range(samples):
            start = self.random.randrange(len(self.keys) // BATCH_KEYS) * BATCH_KEYS
            self.claim_and_release("", self.keys[start : start + BATCH_KEYS])
        for _ in range(samples):
            self.claim_and_release("_scattered", self.random.sample(self.keys, BATCH_KEYS))

    def save_turn(self, samples: int) -> None:
        self.driver.flush()
        for _ in range(samples):
            keys = new_keys(BATCH_KEYS)
            self.timed("save_evicting", lambda keys=keys: self.driver.save(keys))  # type: ignore[misc]

    def medians(self) -> dict[str, float]:
        return {op: statistics.median(took_us) for op, took_us in self.took_us.items()}


def scale(few: int, many: int, repeats: int) -> Iterator[dict[str, object]]:
    """Compare claims, releases, saves and memory per entry at two numbers of entries."""
    sides = [Side(few), Side(many)]
    for turn in (Side.read_turn, Side.save_turn):
        for _ in range(TURNS):
            for side in sides:
                turn(side, -(-repeats // TURNS))
    for entries, side in zip((few, many), sides, strict=True):
        rounded = {f"{op}_us": round(us, 1) for op, us in side.medians().items()}
        more = {"entry_bytes": round(side.entry_bytes)}
        yield {"entries": entries, "batch_keys": BATCH_KEYS, **rounded, **more}
    few_us, many_us = (side.medians() for side in sides)
    yield {"ratio": {op: round(many_us[op] / us, 2) for op, us in few_us.items()}}


def eviction(entries: int, pinned: int) -> float:
    """Microseconds per eviction, over 1,000 evictions, with this many old entries pinned."""
    driver = Driver(entries + pinned)
    held = new_keys(pinned)
    for start in range(0, pinned, BATCH_KEYS):
        driver.save(held[start : start + BATCH_KEYS])
    for start in range(0, entries, BATCH_KEYS):
        driver.save(new_keys(min(BATCH_KEYS, entries - start)))
    for start in range(0, pinned, 4096):
        driver.claim(held[start : start + 4096])
    return timed_us(lambda _: driver.evict(1000), 7) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", type=int, default=10_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--pinned", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    for row in scale(options.few, options.many, options.repeats):
        print(json.dumps(row))
    runs = [(eviction(10_000, 0), eviction(10_000, options.pinned)) for _ in range(3)]
    free_us, pinned_us = (statistics.median(column) for column in zip(*runs, strict=True))
    print(
        json.dumps(
            {
                "case": "evict",
                "free_us": round(free_us, 2),
                "pinned_us": round(pinned_us, 2),
                "ratio": round(pinned_us / free_us, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
