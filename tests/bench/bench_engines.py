#!/usr/bin/env python3
"""The connectors beside what their engines bring along, on /dev/shm, by turns in one run.

    python -m tests.bench.bench_engines lmcache [--turns 5]

To be run in an engine's environment (`make engines-lmcache` makes one). One row an operation, in a
table: the median of all turns in ms, and how many times as fast as the engine's own it is. Only
the ratios mean something.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

from prefixd.client.ctl.private import PrivateDaemon, temporary_directories

#: One turn: the milliseconds that each operation took.
Turn: TypeAlias = Callable[[], dict[str, float]]
GIB: Final = "1GiB"
#: Of one turn, beside a warm-up.
ROUNDS: Final = 5


@contextmanager
def daemon_of(gib: str = GIB) -> Iterator[PrivateDaemon]:
    """A fresh one, with tiers of this size."""
    flags = [f"--{tier}.budget={gib}" for tier in ("ram", "shm", "disk")]
    with (
        temporary_directories("bench") as (directory, shm_directory),
        PrivateDaemon(directory, shm_directory, flags) as daemon,
    ):
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
    """Pages of 3 MiB, 32 of them, through its own controller."""
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


ENGINES: Final = {"lmcache": lmcache, "sglang": sglang}


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
            # Of neighbours in time: a machine drifts.
            ratio = statistics.median(b / a for a, b in zip(these, own, strict=True))
            median = statistics.median(these)
            print(f"| {name} | {operation} | {median:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
