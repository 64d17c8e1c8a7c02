"""What an engine that is full still has of a trace: entries that expire leaf first under
`volatile-ttl`, beside `allkeys-lru`.

    python tests/bench/bench_eviction.py --trace conversation_trace.jsonl [--real]

One node asks the engine for each prompt in turn. The blocks that it finds from the root on are
hits, and are used; the others are saved. It counts hit tokens, and orphans: entries in the engine,
at the end, whose prompt can't be reached any more because a block before them is gone.

The engine is simulated exactly as Redis 7 evicts: it draws `maxmemory-samples` keys, keeps the 16
best candidates of earlier draws, takes the best of them, and knows the last use to a second. The
trace's own clock is used, an hour takes a minute. `--real` replays it against redis-server, too,
through the store itself: there an hour's uses lie within the minute that a replay takes, which an
LRU sees and an expiry doesn't. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, time
from typing import Final

import redis

from prefixd.client.lab.trace import Request, TraceReader
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.link import TOUCH_EVERY_MS, expiries_ms
from prefixd.server.sharing.redis_store import RedisStore
from prefixd.server.sharing.store import Offer, Outcome, SharedEntry

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.redis_servers import redis_servers

LIFE_MS: Final = 86_400_000
#: Of Redis: candidates that it remembers between two draws.
POOL: Final = 16
PAYLOAD: Final = bytes(512)


class Engine(ABC):
    """Where blocks are kept, by number. `now_ms` is the trace's."""

    @abstractmethod
    def run_of(self, chain: Sequence[int]) -> int:
        """How many of a prompt's blocks are there, from the first on."""

    @abstractmethod
    def use(self, chain: Sequence[int], now_ms: int) -> None:
        """These were read: all of a prompt's run."""

    @abstractmethod
    def save(self, chain: Sequence[int], first: int, now_ms: int) -> None:
        """Keep the blocks from `first` on."""

    @abstractmethod
    def content(self) -> set[int]:
        """Everything that is there."""


def expiries_of(blocks: Sequence[int], now_ms: int, hits: int) -> list[int]:
    """As the daemon sets them: the root was used last, and goes last."""
    now_ns = now_ms * 1_000_000
    return expiries_ms([(now_ns - depth, hits) for depth in range(len(blocks))], LIFE_MS)


class Simulated(Engine):
    """Redis' approximated eviction of one process, in blocks."""

    def __init__(self, capacity: int, samples: int, *, touch_every_ms: int | None) -> None:
        """`touch_every_ms`: `volatile-ttl`, where a use is told if an entry lives so much longer
        by it; None: `allkeys-lru`."""
        self._capacity, self._samples = capacity, samples
        self._touch_every_ms = touch_every_ms
        self._chance = random.Random(1)
        #: what is lowest leaves first: an expiry, or the second of the last use
        self._rank: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._blocks: list[int] = []
        self._pool: list[tuple[int, int]] = []

    def run_of(self, chain: Sequence[int]) -> int:
        for count, block in enumerate(chain):
            if block not in self._rank:
                return count
        return len(chain)

    def use(self, chain: Sequence[int], now_ms: int) -> None:
        if self._touch_every_ms is None:
            for block in chain:
                self._rank[block] = now_ms // 1000
            return
        for block, expiry_ms in zip(chain, expiries_of(chain, now_ms, 1), strict=True):
            if expiry_ms - self._rank[block] >= self._touch_every_ms:
                self._rank[block] = expiry_ms

    def save(self, chain: Sequence[int], first: int, now_ms: int) -> None:
        saved = chain[first:]
        for block, expiry_ms in zip(saved, expiries_of(saved, now_ms, 0), strict=True):
            while block not in self._rank and len(self._blocks) >= self._capacity:
                self._evict()
            if block not in self._rank:
                self._place[block] = len(self._blocks)
                self._blocks.append(block)
            lru = self._touch_every_ms is None
            self._rank[block] = now_ms // 1000 if lru else expiry_ms

    def content(self) -> set[int]:
        return set(self._rank)

    def _evict(self) -> None:
        for _ in range(self._samples):
            block = self._blocks[int(self._chance.random() * len(self._blocks))]
            rank = self._rank[block]
            if len(self._pool) == POOL:
                if rank >= self._pool[-1][0]:
                    continue
                self._pool.pop()
            insort(self._pool, (rank, block))
        while self._pool:
            _, block = self._pool.pop(0)
            if block in self._rank:  # what left meanwhile is a ghost
                self._remove(block)
                return

    def _remove(self, block: int) -> None:
        del self._rank[block]
        place, last = self._place.pop(block), self._blocks.pop()
        if last != block:
            self._blocks[place] = last
            self._place[last] = place


class Real(Engine):
    """redis-server, through the store. Wall clock: only the order of expiries counts."""

    def __init__(self, store: RedisStore, *, touches: bool) -> None:
        self._store, self._touches = store, touches
        self._keys: dict[int, Key] = {}
        self._numbers: dict[bytes, int] = {}
        self._base_ms = int(time() * 1000)

    def _key(self, block: int) -> Key:
        key = self._keys.get(block)
        if key is None:
            key = self._keys[block] = Key(sha256(block.to_bytes(8, "big")).digest())
            self._numbers[self._store.name(key)] = block
        return key

    def run_of(self, chain: Sequence[int]) -> int:
        found = self._store.find([self._key(block) for block in chain], _soon())
        return next((n for n, entry in enumerate(found) if entry is None), len(chain))

    def use(self, chain: Sequence[int], now_ms: int) -> None:
        if self._touches:
            expiries = expiries_of(chain, self._base_ms + now_ms, 1)
            keys = [self._key(block) for block in chain]
            self._store.touch(list(zip(keys, expiries, strict=True)), _soon())

    def save(self, chain: Sequence[int], first: int, now_ms: int) -> None:
        saved = chain[first:]
        expiries = expiries_of(saved, self._base_ms + now_ms, 0)
        offers = [
            Offer(
                SharedEntry(self._key(block), len(PAYLOAD), 512, 0, crc32c(PAYLOAD)),
                [memoryview(PAYLOAD)],
                until_ms,
            )
            for block, until_ms in zip(saved, expiries, strict=True)
        ]
        assert set(self._store.put(offers, _soon())) <= {Outcome.DONE}

    def content(self) -> set[int]:
        (address,) = self._store.nodes.all()
        with closing(self._store.nodes.client(address)) as client:
            return {self._numbers[name] for name in client.scan_iter(count=1000)}


def _soon() -> float:
    return monotonic() + 60


def replay(requests: Sequence[Request], engine: Engine) -> dict[str, float]:
    """Hit tokens, and which part of what is in the engine at the end are orphans."""
    hit_tokens = 0
    parents: dict[int, int] = {}
    for request in requests:
        chain, now_ms = request.hash_ids, request.timestamp_ms
        run = engine.run_of(chain)
        hit_tokens += min(512 * run, request.input_length)
        engine.use(chain[:run], now_ms)
        engine.save(chain, run, now_ms)
        for parent, block in pairwise(chain):
            parents.setdefault(block, parent)
    content = engine.content()
    orphans = sum(_is_orphan(block, parents, content) for block in content)
    return {"hit_tokens": hit_tokens, "blocks": len(content), "orphans": orphans / len(content)}


def _is_orphan(block: int, parents: dict[int, int], content: set[int]) -> bool:
    while (parent := parents.get(block)) is not None:
        if parent not in content:
            return True
        block = parent
    return False


def show(case: str, found: dict[str, float], lru: dict[str, float], **more: object) -> None:
    line = {
        "case": case,
        "hit_tokens": int(found["hit_tokens"]),
        "blocks": int(found["blocks"]),
        "orphans": round(found["orphans"], 4),
        "hits_by_lru": round(found["hit_tokens"] / lru["hit_tokens"], 3),
        "orphans_by_lru": round(found["orphans"] / max(1e-9, lru["orphans"]), 3),
    }
    print(json.dumps(line | more), flush=True)


def simulate(requests: Sequence[Request], capacity: int) -> None:
    ways: dict[str, tuple[int, int | None]] = {
        "allkeys-lru, samples 5": (5, None),
        "allkeys-lru, samples 10": (10, None),
        "as the daemon does": (10, TOUCH_EVERY_MS),
        "each use told": (10, 0),
        "told of uses once a minute": (10, 60_000),
        "told of no use": (10, 2 * LIFE_MS),
    }
    lru: dict[str, float] = {}
    for name, (samples, touch_every_ms) in ways.items():
        engine = Simulated(capacity, samples, touch_every_ms=touch_every_ms)
        found = replay(requests, engine)
        lru = lru or found
        show(name, found, lru, capacity_blocks=capacity)


def measure(requests: Sequence[Request], maxmemory: str) -> None:
    lru: dict[str, float] = {}
    for policy, samples in (("allkeys-lru", 5), ("volatile-ttl", 10)):
        settings = ("--maxmemory", maxmemory, "--maxmemory-policy", policy)
        settings += ("--maxmemory-samples", str(samples))
        with (
            TemporaryDirectory(dir="/tmp") as directory,
            redis_servers(Path(directory), 1, *settings) as servers,
            closing(RedisStore([servers[0].url], "bench", 2)) as store,
        ):
            assert store.nodes.wait_until_reached(10)
            began_s = perf_counter()
            found = replay(requests, Real(store, touches=policy == "volatile-ttl"))
            seconds = round(perf_counter() - began_s)
            with redis.Redis.from_url(servers[0].url) as client:
                evicted = client.info("stats")["evicted_keys"]
        lru = lru or found
        show(f"redis-server, {policy}", found, lru, evicted=evicted, replayed_in_s=seconds)
        if policy == "volatile-ttl":
            same = Simulated(int(found["blocks"]), samples, touch_every_ms=0)
            show("simulated, as many blocks as that", replay(requests, same), lru)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument(
        "--fits", type=float, nargs="+", default=[0.4, 0.1, 0.03], help="of the different blocks"
    )
    parser.add_argument("--real", action="store_true", help="redis-server, too")
    parser.add_argument("--maxmemory", default="20mb", help="of that")
    options = parser.parse_args()
    requests = list(TraceReader(options.trace, limit=options.requests))
    blocks = {block for request in requests for block in request.hash_ids}
    for fits in options.fits:
        simulate(requests, int(fits * len(blocks)))
    if options.real:
        measure(requests, options.maxmemory)


if __name__ == "__main__":
    main()
