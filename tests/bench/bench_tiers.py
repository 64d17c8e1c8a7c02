#!/usr/bin/env python3
"""Measures the stores without a daemon: copies, arenas, disk, allocator.

Prints one JSON object per line: {"what", "op", "bytes" or "entries", "p50_us", and "gb_per_s" where
bytes are moved}. Batches have --entries entries. Only ratios within one run are stable.

    python tests/bench/bench_tiers.py memcpy arena disk records extents --entries 48 --repeats 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.payload import copy, copy_crc32c, crc32c
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.runtime.process_memory import keep_large_blocks
from prefixd.tiers.arena_stores import DiskStore, RamStore, RecordedStore, ShmStore
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.records import Records
from prefixd.tiers.rows import RowFile
from prefixd.tiers.store import Store, Usage

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 5 * 2**20]


def measure(repeats: int, action: Callable[[], object]) -> float:
    """The median seconds. The first run is a warm-up."""
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
    """`entries` payloads of one size, and buffers to read them into: touched, private memory."""

    def __init__(self, entries: int, size_bytes: int) -> None:
        self.entries = entries
        self.size_bytes = size_bytes
        self.source = memoryview(bytearray(os.urandom(size_bytes) * entries))
        self.room = memoryview(bytearray(b"\1" * (size_bytes * entries)))
        self._generation = 0

    def placed(self, store: Store, extents: ExtentAllocator) -> list[EntryRecord]:
        """An entry for each payload, each with its own extent."""
        stored_bytes = store.stored_bytes(self.size_bytes, 0)
        entries = []
        for _ in range(self.entries):
            self._generation += 1
            entries.append(
                EntryRecord(
                    key=Key(os.urandom(32)),
                    tier=store.tier,
                    reason=SaveReason.COLD,
                    generation=self._generation,
                    created_ns=self._generation,
                    content=Content(self.size_bytes, 512),
                    location=extents.allocate(stored_bytes),
                )
            )
        return entries

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


def save_all(store: Store, batch: Batch, entries: Sequence[EntryRecord]) -> None:
    writers = []
    for number, entry in enumerate(entries):
        writer = store.writer(entry)
        writer.write(batch.part(batch.source, number))
        writer.seal()
        writers.append(writer)
    store.apply(writers)


def replace_all(store: Store, batch: Batch, entries: Sequence[EntryRecord]) -> None:
    """Save as in a full tier: the entries that occupied the extents are erased first."""
    store.forget(entries)
    save_all(store, batch, entries)


def view_all(store: Store, batch: Batch, entries: Sequence[EntryRecord]) -> None:
    for entry in entries:
        store.read(entry, 0, batch.size_bytes)


def read_all(store: Store, batch: Batch, entries: Sequence[EntryRecord], verify: bool) -> None:
    for number, entry in enumerate(entries):
        room, start = batch.part(batch.room, number), 0
        for view in store.read(entry, 0, batch.size_bytes):
            target = room[start : start + len(view)]
            if verify:
                copy_crc32c(target, view)
            else:
                copy(target, view)
            start += len(view)


def opened(store: Store) -> ExtentAllocator:
    """Prepare a store for writing."""
    store.set_incarnation(os.urandom(16))
    secured_bytes = [0, *store.secure_segments()][-1]
    return ExtentAllocator(secured_bytes, store.slab_bytes, store.header_bytes)


def bench_arena(entries: int, repeats: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="prefixd-bench-", dir="/dev/shm"))
    budget_bytes = (2 * entries + 1) * max(SIZES)
    stores: list[RamStore | ShmStore] = []
    try:
        stores += [RamStore(budget_bytes), ShmStore(directory, budget_bytes)]
        for store in stores:
            label = store.tier.label
            start = time.perf_counter()
            extents = opened(store)
            seconds = time.perf_counter() - start
            report(label, "secure", seconds, 1, store.arena.size_bytes)
            for size_bytes in SIZES:
                batch = Batch(entries, size_bytes)
                placed = batch.placed(store, extents)
                report_store(store, label, batch, placed, repeats)
                assert batch.room == batch.source
                for entry in placed:
                    extents.free(entry.location)
    finally:
        for store in stores:
            store.close()
        shutil.rmtree(directory)


def report_store(
    store: Store, label: str, batch: Batch, placed: list[EntryRecord], repeats: int
) -> None:
    for op, action in (
        ("save", lambda: save_all(store, batch, placed)),
        ("save in place of others", lambda: replace_all(store, batch, placed)),
        ("view", lambda: view_all(store, batch, placed)),
        ("read", lambda: read_all(store, batch, placed, False)),
        ("read and verify", lambda: read_all(store, batch, placed, True)),
    ):
        if op != "view" or not store.blocking:
            report(label, op, measure(repeats, action), batch.entries, batch.size_bytes)
    uses = [Usage(entry, 1, 1) for entry in placed]
    report(label, "usage", measure(repeats, lambda: store.record_usage(uses)), batch.entries)


def bench_disk(entries: int, repeats: int, parent: Path | None) -> None:
    for sync in (True, False):
        label = "disk" if sync else "disk without fsync"
        for size_bytes in SIZES:
            directory = Path(tempfile.mkdtemp(prefix="prefixd-bench-", dir=parent))
            batch = Batch(entries, size_bytes)
            store: RecordedStore = DiskStore(
                directory, 2 * entries * max(size_bytes, 2**16) + 2**26, sync=sync
            )
            try:
                extents = opened(store)
                report_store(store, label, batch, batch.placed(store, extents), repeats)
            finally:
                store.close()
                shutil.rmtree(directory)


def record_at(slab: int, slab_bytes: int) -> EntryRecord:
    return EntryRecord(
        *(Key(os.urandom(32)), Tier.DISK, SaveReason.COLD, slab, slab),
        *(Content(slab_bytes, 512), (slab * slab_bytes, slab_bytes), 1),
    )


def children_kib() -> int:
    """The largest peak memory of any ended child process."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def bench_records(count: int, puts: int, repeats: int, parent: Path | None) -> None:
    """Compare rows in a flat file and in LMDB: batches of records, and a start with all of them."""
    slab_bytes = 2**16
    kinds: list[type[RowFile] | type[LmdbRows]] = [RowFile, LmdbRows]
    directories = {kind: Path(tempfile.mkdtemp(prefix="prefixd-", dir=parent)) for kind in kinds}

    def opened(kind: type[RowFile] | type[LmdbRows]) -> Records:
        table = kind(directories[kind], count + 1, sync=True)
        return Records(directories[kind], Tier.DISK, count + 1, slab_bytes, table)

    try:
        tables = {kind: opened(kind) for kind in kinds}
        for kind, records in tables.items():
            records.secure(count + 1)
            start = time.perf_counter()
            for first in range(1, count + 1, 10_000):
                upto = min(first + 10_000, count + 1)
                records.put([record_at(slab, slab_bytes) for slab in range(first, upto)])
            report(kind.__name__, "fill, 10,000 a batch", time.perf_counter() - start, count)
        rng = random.Random(5)
        for batch in (1, 48, 10_000):
            seconds: dict[str, list[float]] = {kind.__name__: [] for kind in kinds}
            for _ in range(max(repeats, puts if batch == 1 else puts // 4 * 48 // batch)):
                slabs = rng.sample(range(1, count + 1), min(batch, count))
                entries = [record_at(slab, slab_bytes) for slab in slabs]
                for kind, records in tables.items():
                    start = time.perf_counter()
                    records.put(entries)
                    seconds[kind.__name__].append(time.perf_counter() - start)
            for name, took in seconds.items():
                report(name, f"put of {batch}, median", statistics.median(took), 1)
                report(name, f"put of {batch}, mean", statistics.mean(took), 1)
                p99 = sorted(took)[int(0.99 * len(took))]
                report(name, f"put of {batch}, 99th percentile", p99, 1)
                report(name, f"put of {batch}, longest", max(took), 1)
        for kind, records in tables.items():
            records.close()
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.perf_counter()
            records = opened(kind)
            records.table.read(1)
            report(kind.__name__, "open", time.perf_counter() - start, 1)
            start = time.perf_counter()
            found = sum(len(batch.entries) for batch in records.recover((count + 1) * slab_bytes))
            assert found == count
            report(kind.__name__, "recover", time.perf_counter() - start, 1)
            added_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            records.close()
            line = {"what": kind.__name__, "peak_kib_of_children": children_kib()}
            print(json.dumps(line | {"recover_peak_bytes_an_entry": added_kib * 1024 // count}))
    finally:
        for directory in directories.values():
            shutil.rmtree(directory)


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
    parser.add_argument("what", nargs="*", help="memcpy, arena, disk, records, extents")
    parser.add_argument("--entries", type=int, default=48, help="entries in a batch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--slabs", type=int, default=1_000_000, help="slabs of the allocator's arena"
    )
    parser.add_argument("--records", type=int, default=1_000_000, help="entries to recover")
    parser.add_argument("--puts", type=int, default=6_000, help="of one record")
    parser.add_argument("--directory", type=Path, help="where to create the disk store")
    options = parser.parse_args()
    keep_large_blocks()  # as the daemon does
    for what in options.what or ["memcpy", "arena", "disk", "records", "extents"]:
        match what:
            case "memcpy":
                bench_memcpy(options.entries, options.repeats)
            case "arena":
                bench_arena(options.entries, options.repeats)
            case "disk":
                bench_disk(options.entries, options.repeats, options.directory)
            case "records":
                bench_records(options.records, options.puts, options.repeats, options.directory)
            case "extents":
                bench_extents(options.slabs)
            case _:
                parser.error(f"what is {what}?")


if __name__ == "__main__":
    main()
