#!/usr/bin/env python3
"""Measures the calls that connectors depend on, beside their elementary parts.

    python -m tests.bench.bench_connectors

Prints one JSON object per line, with medians. The cases take turns, and only ratios within one run
count. `look`: look-ups of single keys and of a chain of 256, beside a loop over a dict, in
microseconds of the thread's CPU time. `save` and `restore`: a page of 4 MiB in one buffer and in
64.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import TypeAlias

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories

LOOKS, KEYS = 2_000, 256
PAGE_BYTES, PIECES = 4 * 2**20, 64
BUDGETS = ("--ram.budget=1GiB", "--shm.budget=16MiB", "--disk.budget=16MiB")
Cases: TypeAlias = "dict[str, Callable[[], object]]"


def by_turns(
    what: str, cases: Cases, clock: Callable[[], float], rounds: int, times: int = 1
) -> None:
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, action in cases.items():
            began = clock()
            for _ in range(times):
                action()
            taken[name].append((clock() - began) / times)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}
    base = next(iter(medians))
    for name, seconds in medians.items():
        row = {"what": what, "how": name, "p50_us": round(seconds * 1e6, 2)}
        print(json.dumps(row | {f"rate / {base}": round(medians[base] / seconds, 2)}), flush=True)


def looks(client: Client, rounds: int) -> None:
    keys = [os.urandom(32) for _ in range(KEYS)]
    client.save_many([SaveItem(key, b"state") for key in keys], tier=Tier.RAM)
    client.exists(keys)
    present, one, absent = dict.fromkeys(keys, True), keys[7], os.urandom(32)

    def loop() -> int:
        run = 0
        for key in keys:
            if key not in present:
                break
            run += 1
        return run

    single: Cases = {
        "dict": lambda: one in present,
        "exists_one": lambda: client.exists_one(one),
        "exists_one, absent": lambda: client.exists_one(absent),
        "exists of one": lambda: client.exists([one]),
    }
    by_turns("look", single, time.thread_time, rounds, LOOKS)
    chain: Cases = {
        "dict loop of 256": loop,
        "leading_run of 256": lambda: client.leading_run(keys),
    }
    by_turns("look", chain, time.thread_time, rounds, LOOKS // KEYS)


def every_other(memory: memoryview) -> list[memoryview]:
    """Pieces of a page with gaps between them."""
    size = PAGE_BYTES // PIECES
    return [memory[2 * n * size : (2 * n + 1) * size] for n in range(PIECES)]


def pieces(client: Client, rounds: int) -> None:
    """Buffers are page-aligned, as in engines. A bytearray is 16 bytes off such an alignment."""
    whole = memoryview(mmap.mmap(-1, PAGE_BYTES))
    whole[:] = os.urandom(PAGE_BYTES)
    apart = every_other(memoryview(mmap.mmap(-1, 2 * PAGE_BYTES)))
    unaligned = every_other(memoryview(bytearray(2 * PAGE_BYTES)))
    target = memoryview(mmap.mmap(-1, PAGE_BYTES))

    def save(payload: object) -> None:
        assert client.save(os.urandom(32), payload, tier=Tier.RAM).ok

    saves: Cases = {
        "one": lambda: save(whole),
        "64": lambda: save(apart),
        "64, unaligned": lambda: save(unaligned),
    }
    by_turns("save", saves, time.perf_counter, rounds)
    key = os.urandom(32)
    client.save(key, whole, tier=Tier.RAM)
    with client.claim([key]) as hit:
        restores: Cases = {
            "one": lambda: hit.restore_into([target]),
            "64": lambda: hit.restore_into([apart]),
            "64, unaligned": lambda: hit.restore_into([unaligned]),
        }
        by_turns("restore", restores, time.thread_time, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    with (
        temporary_directories("bench") as (directory, shm_directory),
        PrivateDaemon(directory, shm_directory, BUDGETS) as daemon,
        Client(daemon.address) as client,
    ):
        client.wait_connected()
        looks(client, options.rounds)
        pieces(client, options.rounds)
