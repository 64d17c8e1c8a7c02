"""How the metadata server scales: time and memory of the state alone, without I/O.

    python tests/bench/bench_state.py            # 10,000 against 1,000,000 entries

Prints one JSON object per line. Ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.answers import ClaimAnswer, Opened, ReserveAnswer, WriteOrder
from prefixd.server.effects import Effect, Reply
from prefixd.server.events import (
    ClaimAsked,
    ClaimMode,
    EvictAsked,
    Question,
    ReleaseAsked,
    ReserveAsked,
    SaveItem,
    SessionOpened,
    WriteSealed,
)
from prefixd.server.state import MetaState
from prefixd.server.tables import StateConfig
from prefixd.tiers.eviction import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger

SLAB_BYTES = 64 * 2**10
BATCH_KEYS = 48
SECOND_NS = 10**9


class Driver:
    """A state with one RAM tier, and a session that drives it."""

    def __init__(self, room_entries: int) -> None:
        budget_bytes = room_entries * SLAB_BYTES
        ledger = Ledger(
            Tier.RAM,
            budget_bytes,
            LRU(budget_bytes),
            extents=ExtentAllocator(budget_bytes, SLAB_BYTES),
        )
        config = StateConfig(max_claims_per_session=10**9, max_reservations_per_session=10**9)
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
                items=tuple(SaveItem(key, SLAB_BYTES, 512) for key in keys),
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
        # Checksums differ from entry to entry in real life, and so does their memory.
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

    def evict(self, entries: int) -> list[Effect]:
        return self.state.apply(
            EvictAsked(self.request(), (Tier.RAM,), entries * SLAB_BYTES, self.now_ns)
        )


def new_keys(count: int) -> list[Key]:
    raw = os.urandom(32 * count)
    return [Key(raw[i : i + 32]) for i in range(0, len(raw), 32)]


def timed_us(action: Callable[[int], object], repeats: int) -> float:
    """The median of one call, in microseconds."""
    seconds = []
    for repeat in range(repeats):
        start = time.perf_counter()
        action(repeat)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def scale(entries: int, repeats: int) -> dict[str, float]:
    """Claim, release and save at so many entries; and what an entry takes."""
    driver = Driver(entries)
    gc.collect()
    before_bytes = resident_bytes()
    sample: list[Key] = []
    for start in range(0, entries, BATCH_KEYS):
        keys = new_keys(min(BATCH_KEYS, entries - start))
        driver.save(keys)
        if start % (entries // repeats + 1) < BATCH_KEYS and len(keys) == BATCH_KEYS:
            sample.extend(keys)
    gc.collect()
    entry_bytes = (resident_bytes() - before_bytes) / entries
    batches = [sample[i : i + BATCH_KEYS] for i in range(0, len(sample), BATCH_KEYS)]
    claims: list[int] = []
    claim_us = timed_us(
        lambda i: claims.append(driver.claim(batches[i % len(batches)])), len(batches)
    )
    release_us = timed_us(lambda i: driver.release(claims[i]), len(batches))
    fresh = [new_keys(BATCH_KEYS) for _ in range(repeats)]
    save_us = timed_us(lambda i: driver.save(fresh[i]), repeats)
    return {
        "claim_us": claim_us,
        "release_us": release_us,
        "save_evicting_us": save_us,
        "entry_bytes": entry_bytes,
    }


def eviction(entries: int, pinned: int) -> float:
    """Microseconds for each of 1,000 evictions, with so many entries pinned among the oldest."""
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
    few, many = scale(options.few, options.repeats), scale(options.many, options.repeats)
    for name, count, row in (("few", options.few, few), ("many", options.many, many)):
        rounded = {key: round(value, 1) for key, value in row.items()}
        print(json.dumps({"case": name, "entries": count, "batch_keys": BATCH_KEYS, **rounded}))
    names = ("claim_us", "release_us", "save_evicting_us")
    print(json.dumps({"ratio": {name: round(many[name] / few[name], 2) for name in names}}))
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
