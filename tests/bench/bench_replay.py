"""Compares the offline replay with libCacheSim and curves with replays, and measures keys.

    python tests/bench/bench_replay.py --trace conversation_trace.jsonl

Without a trace, one is generated. Prints one JSON object per line, with medians. Compared cases run
in turns, and only ratios within one run count.

replay    one (policy, capacity): ours with its prefix scan per request; libCacheSim's Python
          `get()` in a loop over the flattened block stream, with one reused request object;
          and its C `process_trace` over the same stream in a file, in two formats.
          libCacheSim does not scan prefixes. `ours_over_get` should be below 1,
          `ours_over_c` (the faster of the formats) below 4.
curve     the exact LRU curve of every capacity against single LRU replays: below 3.
sampled   curves from samples: error (in hit rate) and time.
keys      bytes per resident key, and the time of 1,000 evictions alone and among pinned keys.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from prefixd.client.lab.curve import curve_error, exact_curve, sampled_curve
from prefixd.client.lab.simulate import Cell, TouchOrder, replay
from prefixd.client.lab.trace import TraceColumns, TraceReader
from prefixd.client.lab.workloads import generate
from prefixd.tiers.eviction import POLICIES, make_policy


def medians_s(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each action. They run in turns."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            gc.collect()
            started = perf_counter()
            run()
            taken[name].append(perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


class Peer:
    """libCacheSim on the flattened blocks of a trace."""

    def __init__(self, trace: TraceColumns, folder: Path) -> None:
        import libcachesim

        self.peers: Any = libcachesim
        self.ids = [block for blocks, _length in trace for block in blocks]
        self.text = folder / "blocks.txt"
        self.text.write_text("".join(f"{block}\n" for block in self.ids))
        self.binary = folder / "blocks.oracleGeneral"
        rows = (struct.pack("<IQIq", now, block, 1, -2) for now, block in enumerate(self.ids))
        self.binary.write_bytes(b"".join(rows))

    def cache(self, cell: Cell) -> Any:
        return getattr(self.peers, cell.policy.upper())(cell.capacity_blocks)

    def get(self, cell: Cell) -> int:
        get, request, hits = self.cache(cell).get, self.peers.Request(), 0
        for block in self.ids:
            request.obj_id = block
            if get(request):
                hits += 1
        return hits

    def process(self, cell: Cell, path: Path, kind: str) -> float:
        settings = self.peers.ReaderInitParam()
        settings.obj_id_is_num = True
        reader = self.peers.TraceReader(str(path), getattr(self.peers.TraceType, kind), settings)
        return float(self.cache(cell).process_trace(reader)[0])

    def work(self, cell: Cell) -> dict[str, Callable[[], object]]:
        return {
            "get": lambda: self.get(cell),
            "c_text": lambda: self.process(cell, self.text, "PLAIN_TXT_TRACE"),
            "c_binary": lambda: self.process(cell, self.binary, "ORACLE_GENERAL_TRACE"),
        }


def compare_replays(trace: TraceColumns, capacities: list[int], repeats: int) -> None:
    with TemporaryDirectory() as folder:
        peer = Peer(trace, Path(folder))
        for policy in POLICIES:
            for capacity in capacities:
                cell = Cell(policy, capacity)
                work = {"ours": lambda cell=cell: replay(trace, cell), **peer.work(cell)}
                seconds = medians_s(work, repeats)
                show(
                    "replay",
                    policy=policy,
                    capacity_blocks=capacity,
                    **{f"{name}_s": value for name, value in seconds.items()},
                    ours_over_get=seconds["ours"] / seconds["get"],
                    ours_over_c=seconds["ours"] / min(seconds["c_text"], seconds["c_binary"]),
                )


def compare_curves(trace: TraceColumns, capacities: list[int], repeats: int) -> None:
    for order in TouchOrder:
        cells = [Cell("lru", capacity, order) for capacity in capacities]
        work: dict[str, Callable[[], object]] = {
            "curve": lambda order=order: exact_curve(trace, touch_order=order),
            "replays": lambda cells=cells: [replay(trace, cell) for cell in cells],
        }
        seconds = medians_s(work, repeats)
        one = seconds["replays"] / len(cells)
        show(
            "curve",
            touch_order=order,
            curve_s=seconds["curve"],
            single_replay_s=one,
            curve_over_replay=seconds["curve"] / one,
        )
        exact = exact_curve(trace, touch_order=order)
        for sampling in ({"rate": 0.1}, {"rate": 0.01}, {"max_blocks": 8192}, {"max_blocks": 1024}):
            curves = [
                sampled_curve(trace, touch_order=order, seed=seed, **sampling) for seed in range(5)
            ]
            errors = [curve_error(exact, curve) for curve in curves]
            show(
                "sampled",
                touch_order=order,
                **sampling,
                seeds=len(curves),
                mean_absolute_error=statistics.mean(e.mean_absolute_error for e in errors),
                max_absolute_error=max(e.max_absolute_error for e in errors),
                seconds=statistics.median(curve.seconds for curve in curves),
            )


def cost_of_keys(keys: int, pinned: int, repeats: int) -> None:
    for name in POLICIES:
        ids = [os.urandom(32) for _ in range(keys)]
        gc.collect()
        tracemalloc.start()
        policy = make_policy(name, 1 << 50)
        for key in ids:
            policy.admit(key, 1 << 20)
        bytes_per_key = tracemalloc.get_traced_memory()[0] / keys
        tracemalloc.stop()
        work = {
            "alone": lambda name=name: evictions_s(name, 0),
            "crowd": lambda name=name: evictions_s(name, pinned),
        }
        seconds = {
            how: statistics.median(run() for _ in range(repeats)) for how, run in work.items()
        }
        show(
            "keys",
            policy=name,
            keys=keys,
            bytes_per_key=bytes_per_key,
            pinned=pinned,
            evict_1000_alone_ms=1e3 * seconds["alone"],
            evict_1000_among_pinned_ms=1e3 * seconds["crowd"],
        )


def evictions_s(name: str, pinned: int) -> float:
    """The seconds of 1,000 evictions beside `pinned` older pinned keys, which a search has already
    passed."""
    policy = make_policy(name, 1 << 50)
    for key in range(pinned + 2_000):
        policy.admit(key, 1)
        if key < pinned:
            policy.pin(key)
    policy.evict()
    gc.collect()
    started = perf_counter()
    for _ in range(1_000):
        policy.evict()
    return perf_counter() - started


def show(case: str, **fields: object) -> None:
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps({"case": case, **rounded}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, help="a trace in Mooncake's format (default: a generated one)"
    )
    parser.add_argument(
        "--requests", type=int, default=12_000, help="requests of the generated trace"
    )
    parser.add_argument("--capacities", default="1000,4096,10000,30000")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--pinned", type=int, default=100_000)
    parser.add_argument("--only", choices=("replay", "curve", "keys"))
    options = parser.parse_args()
    requests = generate("multi-turn", requests=options.requests) if options.trace is None else None
    trace = TraceColumns.load(TraceReader(options.trace) if requests is None else requests)
    capacities = [int(text) for text in options.capacities.split(",")]
    show("trace", requests=len(trace), blocks=trace.blocks, unique_blocks=trace.unique_blocks)
    if options.only in (None, "replay"):
        compare_replays(trace, capacities, options.repeats)
    if options.only in (None, "curve"):
        compare_curves(trace, capacities, options.repeats)
    if options.only in (None, "keys"):
        cost_of_keys(options.keys, options.pinned, options.repeats)


if __name__ == "__main__":
    main()
