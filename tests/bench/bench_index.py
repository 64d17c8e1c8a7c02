#!/usr/bin/env python3
"""Measures the index: look-ups of a reader, changes by the writer, and memory.

    python tests/bench/bench_index.py            # 10,000 and 1,000,000 entries
    python tests/bench/bench_index.py --entries 100000 --extents 20

Look-ups: nanoseconds per key, in batches, and the ratio to the same loop over a dict in the same
run. Only ratios count. `warm` keys were looked up just before, `cold` keys are random. The result
of a round is the median of its batches, and the printed figure is that of the best round. Changes
are timed one by one. Printed are their median and the slowest of 1,000, the cost of growing.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable

from prefixd.proto.entry import Content
from prefixd.proto.index import IndexRow
from prefixd.proto.index_reader import IndexReader
from prefixd.proto.keys import Key
from prefixd.server.runtime.index import IndexWriter

WARM_BATCHES = 20
COLD_BATCHES = 400
SLAB_BYTES = 64 * 2**10


def per_key_ns(look_up: Callable[[list[Key]], object], batches: list[list[Key]]) -> float:
    """The median of the batches."""
    times = []
    for batch in batches:
        start = time.perf_counter_ns()
        look_up(batch)
        times.append((time.perf_counter_ns() - start) / len(batch))
    return statistics.median(times)


def change_ns(change: Callable[[IndexRow], object], entries: Iterable[IndexRow]) -> list[int]:
    times = []
    for entry in entries:
        start = time.perf_counter_ns()
        change(entry)
        times.append(time.perf_counter_ns() - start)
    return times


class Side:
    """An index with this many entries, a reader of it, and a dict with the same content."""

    def __init__(self, entries: int, extents: int, batch_keys: int) -> None:
        self.keys = [Key(os.urandom(32)) for _ in range(entries)]
        self.rows = [
            IndexRow(
                key=key,
                generation=number + 1,
                content=Content(5 * 2**20, 512, 2048),
                payload_crc32c=number & 2**32 - 1,
                tier=1,
                reason=1,
                location=tuple(SLAB_BYTES * (number + i) for i in range(2 * extents)),
            )
            for number, key in enumerate(self.keys)
        ]
        self.dict = dict(zip(self.keys, self.rows, strict=True))
        rows_per_entry = 1 - -2 * (extents - 1) // 9
        self.writer = IndexWriter(os.urandom(16), entries * max(1, rows_per_entry // 2))
        # Otherwise, the garbage collector would traverse the lists above during measurements.
        gc.collect()
        gc.freeze()
        self.changes = {"put, growing": change_ns(self.writer.put, self.rows)}
        self.stats = self.writer.stats()
        assert not self.stats.unlisted
        fd = self.writer.open_reader()
        self.reader = IndexReader.attach(fd)
        os.close(fd)
        self.batch_keys = batch_keys

    def batches(self, keys: list[Key]) -> list[list[Key]]:
        return [keys[i : i + self.batch_keys] for i in range(0, len(keys), self.batch_keys)]

    def look_ups(self, rounds: int) -> dict[str, tuple[float, float]]:
        """Nanoseconds per key in the index and in the dict."""
        get, in_dict = self.reader.get, self.dict.get
        warm = self.batches(self.keys[: WARM_BATCHES * self.batch_keys])
        absent = self.batches([Key(os.urandom(32)) for _ in range(WARM_BATCHES * self.batch_keys)])
        found = {
            id(batch): [placed for placed in self.reader.find(batch) if placed is not None]
            for batch in warm
        }

        def from_dict(batch: list[Key]) -> object:
            return [in_dict(key) for key in batch]

        def unchanged(batch: list[Key]) -> object:
            return self.reader.unchanged(found[id(batch)])

        def find(batch: list[Key]) -> object:
            return list(self.reader.find(batch))

        cases: dict[str, tuple[Callable[[list[Key]], object], list[list[Key]] | None]] = {
            "get, warm": (get, warm),
            "find, warm": (find, warm),
            "unchanged, warm": (unchanged, warm),
            "miss, warm": (get, absent),
            "get, cold": (get, None),
        }
        best = dict.fromkeys(cases, (float("inf"), float("inf")))
        for _ in range(rounds):
            for case, (look_up, chosen) in cases.items():
                took = []
                for action in (look_up, from_dict):
                    batches = chosen or self.cold()
                    if chosen:
                        per_key_ns(action, batches)
                    took.append(per_key_ns(action, batches))
                best[case] = (min(best[case][0], took[0]), min(best[case][1], took[1]))
        return best

    def cold(self) -> list[list[Key]]:
        count = min(len(self.keys), COLD_BATCHES * self.batch_keys)
        return self.batches(random.sample(self.keys, count))

    def change(self) -> None:
        """Replace, delete and put random entries."""
        shuffled = random.sample(self.rows, min(len(self.rows), 100_000))
        self.changes["put, replacing"] = change_ns(self.writer.put, shuffled)
        self.changes["delete"] = change_ns(lambda row: self.writer.delete(row.key), shuffled)
        self.changes["put, again"] = change_ns(self.writer.put, shuffled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--extents", type=int, default=1)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for entries in options.entries:
        side = Side(entries, options.extents, options.batch)
        print(f"{entries:,} entries of {options.extents} extents, batches of {options.batch} keys")
        print(f"  {side.stats.memory_bytes / entries:.0f} bytes an entry")
        print(f"  {'look-up':<16} {'ns a key':>9} {'dict':>7} {'ratio':>7}")
        for case, (index_ns, dict_ns) in side.look_ups(options.rounds).items():
            print(f"  {case:<16} {index_ns:9.0f} {dict_ns:7.0f} {index_ns / dict_ns:7.1f}")
        side.change()
        print(f"  {'change':<16} {'us':>9} {'slowest of 1,000':>24}")
        for case, took_ns in side.changes.items():
            slow_ns = statistics.quantiles(took_ns, n=1000)[-1]
            print(f"  {case:<16} {statistics.median(took_ns) / 1e3:9.1f} {slow_ns / 1e3:24.1f}")
        side.reader.close()
        side.writer.close()


if __name__ == "__main__":
    main()
