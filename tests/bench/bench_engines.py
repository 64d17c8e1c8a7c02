#!/usr/bin/env python3
"""Compares the connectors with the engines' own stores on /dev/shm, in turns.

    python -m tests.bench.bench_engines lmcache|sglang|vllm [--turns 5]

Runs in an engine's environment, which `make engines-lmcache` (`-sglang`, `-vllm`) builds. Prints a
table with one row per operation: the median of all turns in ms, and the speed relative to the
engine's own store. Only the ratios count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

from prefixd.client.bench.run import wait_until_secured
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories

#: Runs one turn. Returns the milliseconds of each operation.
Turn: TypeAlias = Callable[[], dict[str, float]]
GIB: Final = "1GiB"
MIB: Final = 2**20
#: Rounds of one turn, after a warm-up.
ROUNDS: Final = 5


@contextmanager
def daemon_of(gib: str = GIB) -> Iterator[PrivateDaemon]:
    """A new daemon with tiers of this size. All its memory is secured before it is used, so that
    securing is not part of a save."""
    flags = [f"--{tier}.budget={gib}" for tier in ("ram", "shm", "disk")]
    with (
        temporary_directories("bench") as (directory, shm_directory),
        PrivateDaemon(directory, shm_directory, flags) as daemon,
    ):
        with daemon.admin() as admin:
            wait_until_secured(admin)
        yield daemon


def lmcache() -> tuple[str, dict[str, Turn]]:
    from tests.engines.lmcache_l2 import bench_l2, plugin

    def own() -> dict[str, float]:
        with TemporaryDirectory(dir="/dev/shm") as directory:
            return bench_l2({"type": "fs_native", "base_path": directory}).p50_ms

    def ours(tier: str) -> Turn:
        def turn() -> dict[str, float]:
            with daemon_of() as daemon:
                benched = bench_l2(plugin(daemon.address, tier))
            assert benched.status == 0, benched.text
            return benched.p50_ms

        return turn

    return "fs_native", {"fs_native": own, **{tier: ours(tier) for tier in ("shm", "ram", "disk")}}


def sglang() -> tuple[str, dict[str, Turn]]:
    """32 pages of 3 MiB, through SGLang's own controller."""
    import torch

    from tests.engines import sglang_hicache as hicache

    hicache.without_torchvision()
    pages, page_tokens = 32, 64
    indices = torch.arange(pages * page_tokens)

    def turn_of(layout: str, backend: str, extra: dict[str, object]) -> dict[str, float]:
        pool = hicache.host_pool(layout, pages=pages, page_tokens=page_tokens, layers=24, heads=8)
        pool.kv_buffer.fill_(1.0)
        made = hicache.controller(pool, backend, extra)
        taken: dict[str, list[float]] = {"backup": [], "prefetch": []}
        for _ in range(1 + ROUNDS):
            hashes = hicache.fresh_hashes(pages)
            began = time.perf_counter()
            assert hicache.backup(made, hashes, indices) == len(indices)
            middle = time.perf_counter()
            assert hicache.prefetch(made, hashes, indices) == pages
            taken["backup"].append(middle - began)
            taken["prefetch"].append(time.perf_counter() - middle)
        getattr(made.storage_backend, "close", lambda: None)()
        return {name: statistics.median(each[1:]) * 1e3 for name, each in taken.items()}

    def own(layout: str) -> Turn:
        def turn() -> dict[str, float]:
            with TemporaryDirectory(dir="/dev/shm") as directory:
                found = turn_of(layout, "file", {"file_storage_path": directory})
            return named(layout, found)

        return turn

    def ours(tier: str, layout: str) -> Turn:
        def turn() -> dict[str, float]:
            with daemon_of() as daemon:
                extra = hicache.prefixd_extra(daemon.address, tier)
                return named(layout, turn_of(layout, "dynamic", extra))

        return turn

    def named(layout: str, found: dict[str, float]) -> dict[str, float]:
        return {f"{name}, {layout}": value for name, value in found.items()}

    def both(of: Callable[[str], Turn]) -> Turn:
        turns = [of(layout) for layout in ("page_first", "layer_first")]
        return lambda: {name: value for turn in turns for name, value in turn().items()}

    return "file", {
        "file": both(own),
        **{tier: both(partial(ours, tier)) for tier in ("shm", "ram")},
    }


def vllm() -> tuple[str, dict[str, Turn]]:
    """Jobs of 32 chunks of 2 MiB. The file tier has 16 threads and its C extension. It answers a
    look-up in a later step, so its figure is the time of repeated look-ups until the answer."""
    import numpy as np

    from tests.engines import vllm_tiering as tiering

    chunks, chunk_bytes = 32, 2 * MIB
    rows = np.ones((chunks, chunk_bytes), np.int8)

    def turn_of(options: dict[str, Any]) -> dict[str, float]:
        made = tiering.tier(memoryview(rows), **options)
        taken: dict[str, list[float]] = {"store": [], "promote": [], "lookup of 32": []}
        for number in range(1 + ROUNDS):
            keys = tiering.keys(chunks, os.urandom(4))
            began = time.perf_counter()
            made.submit_store(tiering.job(2 * number, keys, range(chunks)))
            assert tiering.ended(made).success
            stored = time.perf_counter()
            while not all(made.lookup(key, tiering.context()).name == "HIT" for key in keys):
                made.on_schedule_end(None)
            looked = time.perf_counter()
            made.submit_load(tiering.job(2 * number + 1, keys, range(chunks), is_promotion=True))
            assert tiering.ended(made).success
            taken["store"].append(stored - began)
            taken["lookup of 32"].append(looked - stored)
            taken["promote"].append(time.perf_counter() - looked)
        made.shutdown()
        return {name: statistics.median(each[1:]) * 1e3 for name, each in taken.items()}

    def own() -> dict[str, float]:
        with TemporaryDirectory(dir="/dev/shm") as directory:
            return turn_of({"type": "fs", "root_dir": directory})

    def ours(name: str) -> Turn:
        def turn() -> dict[str, float]:
            with daemon_of() as daemon:
                return turn_of(tiering.prefixd(daemon.address, name))

        return turn

    return "fs", {"fs": own, **{name: ours(name) for name in ("shm", "ram")}}


ENGINES: Final = {"lmcache": lmcache, "sglang": sglang, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    base, cases = ENGINES[options.engine]()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(options.turns):
        for name, turn in cases.items():
            taken[name].append(turn())
    print(
        f"| {options.engine} | operation | p50 ms | speed / {base} |\n| --- | --- | ---: | ---: |"
    )
    for name, turns in taken.items():
        for operation in turns[0]:
            own = [turn[operation] for turn in taken[base]]
            these = [turn[operation] for turn in turns]
            # Ratios of adjacent turns, because the speed of a machine drifts.
            ratio = statistics.median(b / a for a, b in zip(these, own, strict=True))
            median = statistics.median(these)
            print(f"| {name} | {operation} | {median:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
