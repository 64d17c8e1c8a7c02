#!/usr/bin/env python3
"""Measures the two implementations of LRU: linked residents of a tier, and keys of a replay.

    python tests/bench/bench_order.py              # 200,000 entries
    python tests/bench/bench_order.py --entries 1000000

Prints the bytes of the order per entry, and the nanoseconds of a claim of one entry with its
release and of an access of a replay, for both implementations. They take turns; medians count.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from prefixd.proto.keys import Key
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.order import Order, OrderOfKeys, Recency, Resident

CLAIMS = 5_000
ROUNDS = 15


def made(order: Order, entries: int) -> tuple[list[Resident], float]:
    """Insert residents into an order. Returns them, and the bytes of the order per resident."""
    held = [Resident(key=key_of(number), stored_bytes=1, place=0) for number in range(entries)]
    gc.collect()
    tracemalloc.start()
    for resident in held:
        order.enter(resident)
        order.unpin(resident)
    order_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held, order_bytes / entries


def key_of(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def claims(order: Order, held: list[Resident], chosen: list[int]) -> None:
    for number in chosen:
        order.pin(held[number])
        order.unpin(held[number])


def replay_by_keys(accesses: list[int], capacity: int) -> None:
    LRU[int](capacity).access_run(accesses)


def replay_by_ring(accesses: list[int], capacity: int) -> None:
    order = Recency()
    there: dict[Key, Resident] = {}
    for number in accesses:
        key = key_of(number)
        resident = there.get(key)
        if resident is not None:
            order.hit(resident)
            continue
        if len(there) >= capacity:
            victim = order.evict(None)
            assert victim is not None
            del there[victim]
        there[key] = resident = Resident(key=key, stored_bytes=1, place=0)
        order.unpin(resident)


def per_item_ns(work: Callable[[], object], items: int) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=200_000)
    entries = parser.parse_args().entries
    orders = {"ring": Recency(), "keys": OrderOfKeys(LRU(1 << 40))}
    sides = {name: (order, *made(order, entries)) for name, order in orders.items()}
    accesses = [int(random.expovariate(10 / entries)) % entries for _ in range(entries)]
    replays = {"ring": replay_by_ring, "keys": replay_by_keys}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    gc.disable()
    for _ in range(ROUNDS):
        chosen = random.sample(range(entries), min(CLAIMS, entries))
        for name, (order, held, _) in sides.items():
            claim_ns = per_item_ns(partial(claims, order, held, chosen), len(chosen))
            replay_ns = per_item_ns(partial(replays[name], accesses, entries // 10), entries)
            took[name].append((claim_ns, replay_ns))
    print(f"{'':6}{'bytes an entry':>16}{'ns a claim':>12}{'ns an access':>14}")
    for name, (_, _, entry_bytes) in sides.items():
        claim_ns, replay_ns = (
            statistics.median(column) for column in zip(*took[name], strict=True)
        )
        print(f"{name:6}{entry_bytes:16.0f}{claim_ns:12.0f}{replay_ns:14.0f}")


if __name__ == "__main__":
    main()
