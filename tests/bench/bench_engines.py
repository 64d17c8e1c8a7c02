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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

from prefixd.client.ctl.private import PrivateDaemon, temporary_directories

#: One turn: the milliseconds that each operation took.
Turn: TypeAlias = Callable[[], dict[str, float]]
GIB: Final = "1GiB"


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


ENGINES: Final = {"lmcache": lmcache}


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
