#!/usr/bin/env python3
"""Compares small blocks with files in /dev/shm, the best alternative at that size, and memcpy.

    python tests/bench/bench_small.py

All cases run in turns in one process and use the same memory. So each finds the CPU caches as the
others left them, which separate runs would not show. `files` are written and renamed, one per
block, and read in place, without any check. `unchecked` restores without CRC32C, like reading
files. `by one` and `by two` use that number of threads, while `restore` chooses it. Prints one JSON
object per line, with medians of all turns: `beside_us` is the time of a block minus that of its
memcpy, `cpu_us` its CPU time in client and daemon together, and `cpu_beside_us` that without its
copies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prefixd.client import restores
from prefixd.client.bench.transfers import BlockBatch, Buffers, Subject, memcpy_case
from prefixd.client.client import Client
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.proto.vocabulary import Tier

KIB: Final = 2**10
#: Actions per turn.
SAMPLES: Final = 4
#: The number of batches that a tier has memory for.
BATCHES: Final = 2 * SAMPLES
#: How often a block is copied: a save has it in staging memory on its way. Restores: once.
COPIES: Final = {"save": 2, "view": 0}
#: A view takes only microseconds, so a turn has this many times as many.
LIGHT: Final = 10


@dataclass(slots=True)
class Case:
    """An action that takes turns, and its times."""

    who: str
    what: str
    action: Callable[[], object]
    before: Callable[[], object] = lambda: None
    taken_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class Files:
    """One file per block, as blocks would be stored without a daemon."""

    def __init__(self, directory: Path, buffers: Buffers, blocks: int) -> None:
        self._paths = [directory / str(number) for number in range(blocks)]
        self._sources, self._rooms = buffers.sources(blocks), buffers.rooms(blocks)

    def save(self) -> None:
        for path, source in zip(self._paths, self._sources, strict=True):
            unfinished = f"{path}.new"
            with open(unfinished, "wb", buffering=0) as file:  # noqa: PTH123  # the fastest way
                file.write(source)
            os.rename(unfinished, path)  # noqa: PTH104

    def restore(self) -> None:
        for path, room in zip(self._paths, self._rooms, strict=True):
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                file.readinto(room)  # type: ignore[attr-defined]


def cpu_s(pid: int) -> float:
    """The CPU time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def measured(cases: list[Case], pid: int, turns: int) -> None:
    for _ in range(turns):
        for case in cases:
            samples = SAMPLES * (LIGHT if case.what == "view" else 1)
            case.before()
            case.action()  # refills the caches after the other cases
            before_s = time.process_time() + cpu_s(pid)
            for _ in range(samples):
                case.before()
                start_s = time.perf_counter()
                case.action()
                case.taken_s.append(time.perf_counter() - start_s)
            case.cpu_s.append((time.process_time() + cpu_s(pid) - before_s) / samples)


def rows(blocks: int, block_bytes: int, turns: int) -> Iterator[dict[str, object]]:
    buffers = Buffers(blocks, block_bytes)
    room_bytes = BATCHES * blocks * block_bytes
    with ExitStack() as stack:
        directory, shm = stack.enter_context(temporary_directories("bench"))
        budgets = [f"--{tier}.budget={room_bytes}" for tier in ("ram", "shm")]
        slabs = [f"--{tier}.slab={min(64, block_bytes // KIB)}KiB" for tier in ("ram", "shm")]
        command = [*budgets, *slabs, "--disk.budget=0"]
        daemon = stack.enter_context(PrivateDaemon(directory, shm, command))
        client = stack.enter_context(Client(daemon.address, verify="always"))
        trusting = stack.enter_context(Client(daemon.address, verify="never"))
        assert client.wait_connected()
        assert trusting.wait_connected()
        files_directory = Path(tempfile.mkdtemp(prefix="bench-files-", dir=shm))
        stack.callback(shutil.rmtree, files_directory)
        files = Files(files_directory, buffers, blocks)
        cases = [
            Case("memcpy", "restore", memcpy_case(buffers, blocks).action),
            Case("files", "save", files.save),
            Case("files", "restore", files.restore),
        ]
        for tier in (Tier.RAM, Tier.SHM):
            batch = BlockBatch(Subject(tier.label, client, tier, True), buffers, blocks)
            unchecked = BlockBatch(Subject(tier.label, trusting, tier, True), buffers, blocks)
            batch.warm_up()
            unchecked.renew()
            unchecked.save()
            cases += [
                Case(tier.label, "save", batch.save, batch.renew),
                Case(tier.label, "restore", batch.restore),
                Case(tier.label, "unchecked", unchecked.restore, kept(unchecked, trusting)),
                Case(tier.label, "by one", shared_from(2**62, batch)),
                Case(tier.label, "by two", shared_from(1, batch)),
                Case(tier.label, "view", batch.view),
            ]
        measured(cases, daemon.pid, turns)
        floor_s = statistics.median(cases[0].taken_s)
        copy_cpu_s = statistics.median(cases[0].cpu_s)
        file_save_s, file_restore_s = (statistics.median(case.taken_s) for case in cases[1:3])
        for case in cases:
            median_s = statistics.median(case.taken_s)
            peer_s = {"save": file_save_s, "view": None}.get(case.what, file_restore_s)
            yield {
                "peer": case.who,
                "op": case.what,
                "blocks": blocks,
                "block_bytes": block_bytes,
                "us": round(median_s * 1e6),
                "gb_per_s": round(blocks * block_bytes / median_s / 1e9, 2),
                "of_memcpy": round(floor_s / median_s, 2),
                "of_files": peer_s and round(peer_s / median_s, 2),
                "beside_us": round((median_s - floor_s) / blocks * 1e6, 1),
                "cpu_us": round(statistics.median(case.cpu_s) / blocks * 1e6, 1),
                "cpu_beside_us": round(
                    (statistics.median(case.cpu_s) - COPIES.get(case.what, 1) * copy_cpu_s)
                    / blocks
                    * 1e6,
                    1,
                ),
            }


def kept(batch: BlockBatch, client: Client) -> Callable[[], None]:
    """Save a batch again if other cases evicted it. Called before a restore."""

    def save_if_gone() -> None:
        if not all(client.exists(batch.keys)):
            batch.renew()
            batch.save()

    return save_if_gone


def shared_from(size_bytes: int, batch: BlockBatch) -> Callable[[], None]:
    """A restore that uses two threads from this size on."""

    def restore() -> None:
        usual, restores.SHARED_BYTES = restores.SHARED_BYTES, size_bytes  # type: ignore[misc]
        try:
            batch.restore()
        finally:
            restores.SHARED_BYTES = usual  # type: ignore[misc]

    return restore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--kib", default="64,192,640", help="sizes of a block, in KiB")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    for size in args.kib.split(","):
        for row in rows(args.blocks, int(size) * KIB, args.turns):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
