"""Compares the shared store with pipelines of redis-py, on a real Redis or a Redis Cluster.

    python tests/bench/bench_shared.py --masters 3

Needs redis-server. With hiredis installed, redis-py copies what it sends and receives faster;
`hiredis` says whether it is installed. Prints one JSON object per line, with medians: GB/s and
ratios of putting and getting 48 payloads in turns, and the time of finding 48, in us. With several
masters, also how many of 48 are got while one master is dead, and the longest call while one is
stopped.

    python tests/bench/bench_shared.py --hedge

The benefit of requesting from the same master twice: reads one payload at a time under load from
two other clients, without and with a second request on another connection, which is sent after the
95th percentile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, time
from typing import Any

import redis
from redis.utils import HIREDIS_AVAILABLE

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.engine_store import Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.redis_store import RedisStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.redis_servers import RedisServer, redis_servers

#: The longest that a call may take while a node hangs.
DEADLINE_S = 0.5


def medians_s(work: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, run in work.items():
            started = perf_counter()
            run()
            taken[name].append(perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


class Peer:
    """redis-py as usually used: all commands in one pipeline."""

    def __init__(self, servers: list[RedisServer], names: list[bytes], data: list[bytes]) -> None:
        cluster = len(servers) > 1
        self.client: Any = (redis.RedisCluster if cluster else redis.Redis).from_url(servers[0].url)
        self.names, self.data = names, data

    def _pipeline(self) -> Any:
        return self.client.pipeline(transaction=False)

    def put(self) -> None:
        pipeline = self._pipeline()
        for name, data in zip(self.names, self.data, strict=True):
            pipeline.set(name, data)
        pipeline.execute()

    def get(self) -> None:
        pipeline = self._pipeline()
        for name in self.names:
            pipeline.get(name)
        assert all(pipeline.execute())

    def find(self) -> None:
        pipeline = self._pipeline()
        for name in self.names:
            pipeline.exists(name)
        assert all(pipeline.execute())


class Ours:
    def __init__(self, store: RedisStore, keys: list[Key], data: list[bytes]) -> None:
        self.store, self.keys = store, keys
        self.entries = [
            SharedEntry(key, Content(len(each), 16), crc32c(each))
            for key, each in zip(keys, data, strict=True)
        ]
        until_ms = int(time() * 1000) + 3_600_000
        self.offers = [
            Offer(entry, [memoryview(each)], until_ms)
            for entry, each in zip(self.entries, data, strict=True)
        ]
        buffers = [memoryview(bytearray(len(each))) for each in data]
        self.reads = [
            Wanted(entry, buffer) for entry, buffer in zip(self.entries, buffers, strict=True)
        ]

    def put(self) -> None:
        assert set(self.store.put(self.offers, deadline_in(60))) == {Outcome.DONE}

    def get(self) -> None:
        assert set(self.store.get(self.reads, deadline_in(60))) == {Outcome.DONE}

    def find(self) -> None:
        assert None not in self.store.find(self.keys, deadline_in(60))

    def got(self, within_s: float = DEADLINE_S) -> int:
        return self.store.get(self.reads, deadline_in(within_s)).count(Outcome.DONE)


def deadline_in(seconds: float) -> float:
    return monotonic() + seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--masters", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--block-bytes", type=int, default=5 * 2**20)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--hedge", action="store_true")
    options = parser.parse_args()
    data = [os.urandom(options.block_bytes) for _ in range(options.blocks)]
    keys = [Key(sha256(number.to_bytes(8, "big")).digest()) for number in range(options.blocks)]
    with TemporaryDirectory(dir="/tmp") as directory:
        settings = ("--maxmemory", "4gb", "--maxmemory-policy", "volatile-ttl")
        # Separate engines: memory that one frees would not fit the values of the other.
        with (
            redis_servers(Path(directory) / "ours", options.masters, *settings) as servers,
            redis_servers(Path(directory) / "peer", options.masters, *settings) as of_peer,
            closing(RedisStore([servers[0].url], "bench", 4 if options.hedge else 2)) as store,
        ):
            assert store.nodes.wait_until_reached(10)
            ours = Ours(store, keys, data)
            if options.hedge:
                ours.put()
                hedge(ours, 100 * options.turns)
                return
            peer = Peer(of_peer, [key.hex().encode() for key in keys], data)
            compare(ours, peer, options)
            if len(servers) > 1:
                fail(ours, servers)


def compare(ours: Ours, peer: Peer, options: argparse.Namespace) -> None:
    total_gb = options.blocks * options.block_bytes / 1e9
    for op in ("put", "get", "find"):
        work = {"ours": getattr(ours, op), "redis_py": getattr(peer, op)}
        seconds = medians_s(work, options.turns)
        shown = {"ratio": round(seconds["redis_py"] / seconds["ours"], 2)}
        for name, median_s in seconds.items():
            if op == "find":
                shown[f"{name}_us"] = round(1e6 * median_s)
            else:
                shown[f"{name}_gb_per_s"] = round(total_gb / median_s, 3)
        case = {"case": op, "masters": options.masters, "hiredis": HIREDIS_AVAILABLE}
        print(json.dumps(case | shown), flush=True)


def hedge(ours: Ours, turns: int) -> None:
    """In turns: without and with a second request after the 95th percentile so far."""
    over = threading.Event()
    buffers = [memoryview(bytearray(len(read.room))) for read in ours.reads]

    def load(part: int) -> None:
        own = [Wanted(read.entry, buffer) for read, buffer in zip(ours.reads, buffers, strict=True)]
        while not over.is_set():
            ours.store.get(own[part::2], deadline_in(60))

    def get(number: int) -> Outcome:
        # Each request has its own buffer, because both may be in flight at once.
        entry = ours.reads[number % len(ours.reads)].entry
        read = Wanted(entry, memoryview(bytearray(entry.payload_bytes)))
        return ours.store.get([read], deadline_in(60))[0]

    loading = [threading.Thread(target=load, args=(part,)) for part in range(2)]
    for thread in loading:
        thread.start()
    taken_s: dict[str, list[float]] = {"once": [], "hedged": []}
    hedges = 0
    with ThreadPoolExecutor(4) as pool:
        for number in range(40 + turns):
            began_s = perf_counter()
            assert pool.submit(get, number).result() is Outcome.DONE
            taken_s["once"].append(perf_counter() - began_s)
            if number < 40:
                continue
            after_s = statistics.quantiles(taken_s["once"][-200:], n=20)[-1]
            began_s = perf_counter()
            pending = [pool.submit(get, number)]
            if not futures.wait(pending, after_s).done:
                hedges += 1
                pending.append(pool.submit(get, number))
            futures.wait(pending, return_when=futures.FIRST_COMPLETED)
            taken_s["hedged"].append(perf_counter() - began_s)
            futures.wait(pending)
    over.set()
    for thread in loading:
        thread.join()
    shown: dict[str, object] = {"hedges": hedges, "calls": turns}
    for name, seconds in taken_s.items():
        parts = statistics.quantiles(seconds[-turns:], n=100)
        shown[name] = {
            "p50_ms": round(1e3 * parts[49], 2),
            "p99_ms": round(1e3 * parts[98], 2),
        }
    print(json.dumps({"case": "the same master asked twice", **shown}), flush=True)


def fail(ours: Ours, servers: list[RedisServer]) -> None:
    servers[0].signal(signal.SIGSTOP)
    calls_s, got = [], 0
    for _ in range(5):
        started = perf_counter()
        got = ours.got()
        calls_s.append(perf_counter() - started)
    servers[0].signal(signal.SIGCONT)
    stopped = {"longest_call_s": round(max(calls_s), 3), "deadline_s": DEADLINE_S, "got": got}
    print(json.dumps({"case": "one master stopped", **stopped}), flush=True)
    servers[0].kill()
    ours.got()
    print(json.dumps({"case": "one master dead", "got": ours.got(30)}), flush=True)


if __name__ == "__main__":
    main()
