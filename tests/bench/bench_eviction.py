"""Compares eviction policies of a full shared engine on a trace: `volatile-ttl`, with expiries that
make chains expire leaf first, and `allkeys-lru`.

    python tests/bench/bench_eviction.py --trace conversation_trace.jsonl [--real]

One node requests each prompt from the engine in turn. The blocks found from the root on are hits
and are used; the others are saved. The result is the number of hit tokens and of orphans: entries
that are in the engine at the end but can't be reached, because a block before them was evicted.

The simulation evicts exactly as Redis 7: it draws `maxmemory-samples` keys, keeps the 16 best
candidates of earlier draws, evicts the best one, and knows the last use to the second. It uses the
trace's clock; simulating an hour takes a minute. `--real` also replays the trace against
redis-server through the real store. There all uses of an hour happen within the minute of the
replay, which affects LRU but not expiries. Prints one JSON object per line.
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
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.engine_link import TOUCH_EVERY_MS, expiries_ms
from prefixd.server.sharing.engine_store import Offer, Outcome, SharedEntry
from prefixd.server.sharing.redis_store import RedisStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.redis_servers import redis_servers

LIFE_MS: Final = 86_400_000
#: Candidates that Redis remembers between two draws.
POOL: Final = 16
PAYLOAD: Final = bytes(512)


class Engine(ABC):
    """Stores blocks by number. `now_ms` is the time in the trace."""

    @abstractmethod
    def run_of(self, chain: Sequence[int]) -> int:
        """The number of a prompt's blocks that are present, from the first one on."""

    @abstractmethod
    def use(self, chain: Sequence[int], now_ms: int) -> None:
        """Note the use of all present blocks of a prompt."""

    @abstractmethod
    def save(self, chain: Sequence[int], first: int, now_ms: int) -> None:
        """Save the blocks from `first` on."""

    @abstractmethod
    def content(self) -> set[int]:
        """All present blocks."""


def expiries_of(blocks: Sequence[int], now_ms: int, hits: int) -> list[int]:
    """The expiries that the daemon sets: the root counts as used last and expires last."""
    now_ns = now_ms * 1_000_000
    return expiries_ms([(now_ns - depth, hits) for depth in range(len(blocks))], LIFE_MS)


class Simulated(Engine):
    """The approximated eviction of one Redis process, with a capacity in blocks."""

    def __init__(self, capacity: int, samples: int, *, touch_every_ms: int | None) -> None:
        """`touch_every_ms`: `volatile-ttl`, where a use is reported if it prolongs the life of an
        entry by this much. None: `allkeys-lru`."""
        self._capacity, self._samples = capacity, samples
        self._touch_every_ms = touch_every_ms
        self._chance = random.Random(1)
        #: the lowest rank is evicted first: an expiry, or the second of the last use
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
            if block in self._rank:  # candidates that were removed meanwhile are skipped
                self._remove(block)
                return

    def _remove(self, block: int) -> None:
        del self._rank[block]
        place, last = self._place.pop(block), self._blocks.pop()
        if last != block:
            self._blocks[place] = last
            self._place[last] = place


class Real(Engine):
    """redis-server, through the store, with the wall clock: only the order of expiries counts."""

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
                SharedEntry(self._key(block), Content(len(PAYLOAD), 512), crc32c(PAYLOAD)),
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
    """The hit tokens, and the share of orphans among the blocks at the end."""
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
        "--fits",
        type=float,
        nargs="+",
        default=[0.4, 0.1, 0.03],
        help="capacities, as shares of the distinct blocks",
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
