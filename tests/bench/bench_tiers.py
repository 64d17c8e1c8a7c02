#!/usr/bin/env python3
"""Measure the stores by themselves, without a daemon: copies, arenas, disk, allocator.

One JSON object per line: {"what", "op", "bytes" or "entries", "p50_us", and "gb_per_s" where
bytes are moved}. Batches of --entries entries; figures are stable only as ratios inside one run.

    python tests/bench/bench_tiers.py memcpy arena disk extents --entries 48 --repeats 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefixd.proto.copying import copy, copy_crc32c
from prefixd.proto.keys import Key
from prefixd.proto.record import RecordHead, crc32c
from prefixd.tiers.disk import DiskStore
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.heap import keep_large_blocks
from prefixd.tiers.ram import RamStore
from prefixd.tiers.shm import ShmStore
from prefixd.tiers.store import Location, Store, Usage

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 5 * 2**20]


def measure(repeats: int, action: Callable[[], object]) -> float:
    """Seconds, the median; the first run is a warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def report(what: str, op: str, seconds: float, operations: int, size_bytes: int = 0) -> None:
    row: dict[str, object] = {"what": what, "op": op}
    if size_bytes:
        row["bytes"] = size_bytes
    row["p50_us"] = round(seconds / operations * 1e6, 3)
    if size_bytes:
        row["gb_per_s"] = round(operations * size_bytes / seconds / 1e9, 2)
    print(json.dumps(row), flush=True)


class Batch:
    """`entries` payloads of one size, and room to read them into: touched, private memory."""

    def __init__(self, entries: int, size_bytes: int) -> None:
        self.entries = entries
        self.size_bytes = size_bytes
        self.source = memoryview(bytearray(os.urandom(size_bytes) * entries))
        self.room = memoryview(bytearray(b"\1" * (size_bytes * entries)))
        self.heads = [
            RecordHead(Key(os.urandom(32)), number, size_bytes, 512, 0, 1, 1, 0)
            for number in range(entries)
        ]

    def part(self, of: memoryview, number: int) -> memoryview:
        return of[number * self.size_bytes : (number + 1) * self.size_bytes]


def bench_memcpy(entries: int, repeats: int) -> None:
    for size_bytes in SIZES:
        batch = Batch(entries, size_bytes)
        parts = [(batch.part(batch.room, i), batch.part(batch.source, i)) for i in range(entries)]

        def assign(parts: list[tuple[memoryview, memoryview]] = parts) -> None:
            for room, source in parts:
                room[:] = source

        def copied(parts: list[tuple[memoryview, memoryview]] = parts) -> None:
            for room, source in parts:
                copy(room, source)

        def summed(parts: list[tuple[memoryview, memoryview]] = parts) -> None:
            for room, source in parts:
                copy_crc32c(room, source)

        def checked(parts: list[tuple[memoryview, memoryview]] = parts) -> None:
            for _, source in parts:
                crc32c(source)

        for op, action in (
            ("assign", assign),
            ("copy", copied),
            ("copy and crc32c", summed),
            ("crc32c", checked),
        ):
            report("memcpy", op, measure(repeats, action), entries, size_bytes)


def save_all(store: Store, batch: Batch, locations: Sequence[Location]) -> None:
    writers = []
    for number, head in enumerate(batch.heads):
        writer = store.writer(head, locations[number])
        writer.write(batch.part(batch.source, number))
        writer.seal()
        writers.append(writer)
    store.apply(writers, [])


def view_all(store: Store, batch: Batch, locations: Sequence[Location]) -> None:
    for head, location in zip(batch.heads, locations, strict=True):
        store.read(head, location, 0, batch.size_bytes)


def read_all(store: Store, batch: Batch, locations: Sequence[Location], verify: bool) -> None:
    for number, head in enumerate(batch.heads):
        room, start = batch.part(batch.room, number), 0
        for view in store.read(head, locations[number], 0, batch.size_bytes):
            target = room[start : start + len(view)]
            if verify:
                copy_crc32c(target, view)
            else:
                copy(target, view)
            start += len(view)


def bench_arena(entries: int, repeats: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="prefixd-bench-", dir="/dev/shm"))
    budget_bytes = 2 * entries * max(SIZES)
    stores: list[RamStore | ShmStore] = []
    try:
        stores += [RamStore(budget_bytes), ShmStore(directory, budget_bytes)]
        for store in stores:
            label = store.tier.label
            start = time.perf_counter()
            store.arena.secure()
            seconds = time.perf_counter() - start
            report(label, "secure", seconds, 1, store.arena.size_bytes)
            for size_bytes in SIZES:
                batch = Batch(entries, size_bytes)
                extents = ExtentAllocator(store.arena.secured_bytes, store.slab_bytes)
                stored_bytes = store.stored_bytes(size_bytes, 0)
                locations = [extents.allocate(stored_bytes) for _ in range(entries)]
                for op, action in (
                    ("save", lambda: save_all(store, batch, locations)),  # noqa: B023  # at once
                    ("view", lambda: view_all(store, batch, locations)),  # noqa: B023
                    ("read", lambda: read_all(store, batch, locations, False)),  # noqa: B023
                    ("read and verify", lambda: read_all(store, batch, locations, True)),  # noqa: B023
                ):
                    report(label, op, measure(repeats, action), entries, size_bytes)
                assert batch.room == batch.source
    finally:
        for store in stores:
            store.close()
        shutil.rmtree(directory)


def bench_disk(entries: int, repeats: int, parent: Path | None) -> None:
    for sync in (True, False):
        label = "disk" if sync else "disk without fsync"
        for size_bytes in SIZES:
            directory = Path(tempfile.mkdtemp(prefix="prefixd-bench-", dir=parent))
            batch = Batch(entries, size_bytes)
            nowhere = [()] * entries
            store = DiskStore(directory, 4 * entries * size_bytes + 2**26, sync=sync)
            try:
                # The first batches grow the file; later ones find erased pages in it.
                for _ in range(4):
                    save_all(store, batch, nowhere)
                seconds = measure(repeats, lambda: save_all(store, batch, nowhere))  # noqa: B023
                report(label, "save", seconds, entries, size_bytes)
                if sync:
                    report_reads(store, batch, label, repeats)
            finally:
                store.close()
                shutil.rmtree(directory)


def report_reads(store: DiskStore, batch: Batch, label: str, repeats: int) -> None:
    nowhere = [()] * batch.entries
    seconds = measure(repeats, lambda: read_all(store, batch, nowhere, False))
    report(label, "read from page cache", seconds, batch.entries, batch.size_bytes)
    uses = [Usage(head.key, 1, 1) for head in batch.heads]
    report(label, "usage", measure(repeats, lambda: store.record_usage(uses)), batch.entries)
    report(label, "recover", measure(repeats, lambda: store.recover({})), batch.entries)


def bench_extents(slabs: int) -> None:
    slab_bytes = 2**16
    for entry_slabs in (1, 80):
        allocator = ExtentAllocator(slabs * slab_bytes, slab_bytes)
        count, stored_bytes = slabs // entry_slabs, entry_slabs * slab_bytes
        what = f"extents of {entry_slabs} slabs, {count} entries"
        start = time.perf_counter()
        live = [allocator.allocate(stored_bytes) for _ in range(count)]
        report(what, "allocate", time.perf_counter() - start, count)
        random.Random(1).shuffle(live)
        gone, live = live[: count // 2], live[count // 2 :]
        start = time.perf_counter()
        for location in gone:
            allocator.free(location)
        report(what, "free half, at random", time.perf_counter() - start, len(gone))
        start = time.perf_counter()
        live += [allocator.allocate(stored_bytes) for _ in range(len(gone))]
        report(what, "allocate again", time.perf_counter() - start, len(gone))
        for location in live[::2]:
            allocator.free(location)
        start = time.perf_counter()
        gathered = [allocator.allocate(97 * slab_bytes) for _ in range(200)]
        report(what, "gather 97 slabs", time.perf_counter() - start, len(gathered))
        start = time.perf_counter()
        for location in gathered:
            allocator.free(location)
        report(what, "free what was gathered", time.perf_counter() - start, len(gathered))
        start = time.perf_counter()
        allocator.check()
        report(what, "check", time.perf_counter() - start, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="memcpy, arena, disk, extents; all by default")
    parser.add_argument("--entries", type=int, default=48, help="entries in a batch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slabs", type=int, default=1_000_000, help="of the allocator's arena")
    parser.add_argument("--directory", type=Path, help="where the disk store is made")
    options = parser.parse_args()
    keep_large_blocks()  # as the daemon does
    for what in options.what or ["memcpy", "arena", "disk", "extents"]:
        match what:
            case "memcpy":
                bench_memcpy(options.entries, options.repeats)
            case "arena":
                bench_arena(options.entries, options.repeats)
            case "disk":
                bench_disk(options.entries, options.repeats, options.directory)
            case "extents":
                bench_extents(options.slabs)
            case _:
                parser.error(f"what is {what}?")


if __name__ == "__main__":
    main()
