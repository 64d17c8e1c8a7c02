"""The performance goals of prefixd: ratios within the rows of one run, and their limits.

prefixctl bench -o rows.jsonl --peers peers.jsonl
python -m tests.bench.wanted rows.jsonl peers.jsonl    # tables for BENCHMARKS.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefixd.client.bench.bench_report import Rows, TextTable, as_markdown, read_rows
from prefixd.client.bench.run import EVICTED, HASHING, PINNED, UNPINNED, searches
from prefixd.client.bench.samples import Row
from prefixd.client.bench.transfers import MEMCPY
from prefixd.proto.units import format_bytes


@dataclass(frozen=True, slots=True)
class Goals:
    """Goals for one block size, as ratios of speeds: `restore` and `save` to the best peer,
    `disk_restore` to memcpy, `disk_save` to a save to ram."""

    restore: float
    save: float
    disk_restore: float
    disk_save: float
    #: the most microseconds of a view; 0: at least twenty times the speed of memcpy
    view_us: float = 0


#: The speed of the data socket relative to gRPC, and (DATA_PEER) to Mooncake over TCP.
DATA_RESTORE, DATA_SAVE, DATA_EXISTS, DATA_PEER = 2.0, 1.7, 2.0, 1.5
#: The same for a restore of a single block.
DATA_ONE_RESTORE: Final = 2.5

#: From this block size on, the cost per block is negligible beside the cost per byte.
LARGE_BYTES: Final = 2 * 2**20
LARGE: Final = Goals(restore=1.5, save=2.5, disk_restore=0.6, disk_save=0.25)
SMALL: Final = Goals(restore=2, save=1.8, disk_restore=0.5, disk_save=0.35, view_us=250)
REDIS: Final = "redis-unix"
MOONCAKE_TCP: Final = "mooncake-tcp"
DATA: Final = "prefixd-data"
GRPC: Final = "prefixd-grpc"
ARENAS: Final = ("prefixd-ram", "prefixd-shm")


@dataclass(frozen=True, slots=True)
class MeasuredGoal:
    """One measured value and its limit."""

    name: str
    value: float
    limit: float
    #: Whether the limit is a minimum or (False) a maximum.
    at_least: bool = True
    unit: str = "x"

    @property
    def good(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def measured_goals(rows: Rows, peers: Rows, block_bytes: int) -> list[MeasuredGoal]:
    """All goals that the rows measure, at the largest batch."""
    found: list[MeasuredGoal] = []
    if rows.batches:
        goals = LARGE if block_bytes >= LARGE_BYTES else SMALL
        found += _goals_of_transfers(rows, peers, rows.batches[-1], goals)
        one, over_grpc = (rows.find(peer, "restore", 1) for peer in (DATA, GRPC))
        if goals is LARGE and rows.batches[0] == 1 and one is not None and over_grpc is not None:
            name = f"restore of 1 block, {DATA} / {GRPC}"
            found.append(MeasuredGoal(name, over_grpc.p50_ms / one.p50_ms, DATA_ONE_RESTORE))
    for name, op, hashing_op in searches():
        for row in rows.of(op):
            alone = rows.find(HASHING, hashing_op, row.blocks)
            if row.peer == HASHING or alone is None:
                continue
            if op.startswith("chain-miss"):
                extra_us = (row.p50_ms - alone.p50_ms) * 1e3
                found.append(MeasuredGoal(f"{name}, beside the hash", extra_us, 10, False, " us"))
            else:
                most = 1.3 if op.startswith("walk") else 3.0
                found.append(
                    MeasuredGoal(f"{name} / hashing", row.p50_ms / alone.p50_ms, most, False)
                )
    searched = [row for op in ("walk-hit", "walk-miss") for row in rows.of(op)]
    if searched:
        lookups = max(int(row.more.get("daemon_lookups", 0)) for row in searched)
        found.append(
            MeasuredGoal("look-ups that all searches cost the daemon", lookups, 0, False, "")
        )
    unpinned, pinned = rows.of(UNPINNED, EVICTED), rows.of(PINNED, EVICTED)
    if unpinned and pinned:
        ratio = pinned[0].p50_ms / unpinned[0].p50_ms
        beside = f"{pinned[0].more.get('beside', 0):,}"
        name = f"eviction beside {beside} claimed entries / beside as many unclaimed"
        found.append(MeasuredGoal(name, ratio, 1.2, False))
    crowd = rows.crowd()
    if len(crowd) > 1:
        (_, one), (count, all_) = crowd[0], crowd[-1]
        ratio = (all_.gb_per_s or 0) / (one.gb_per_s or 1)
        found.append(MeasuredGoal(f"bytes/s of {count} processes / of one", ratio, 1.0))
    return found


def _goals_of_transfers(rows: Rows, peers: Rows, blocks: int, goals: Goals) -> list[MeasuredGoal]:
    found: list[MeasuredGoal] = []

    def add(op: str, peer: str, against: Row | None, least: float) -> None:
        row = rows.find(peer, op, blocks)
        if row is not None and against is not None:
            name = f"{op} of {blocks} blocks, {peer} / {against.peer}"
            found.append(MeasuredGoal(name, against.p50_ms / row.p50_ms, least))

    floor = rows.find(MEMCPY, "restore", blocks)
    for peer in ARENAS:
        add("restore", peer, floor, 0.8)
        add("restore", peer, best(peers, "restore", blocks), goals.restore)
        view = rows.find(peer, "view", blocks)
        if goals.view_us:
            if view is not None:
                name = f"view of {blocks} blocks, {peer}"
                found.append(MeasuredGoal(name, view.p50_ms * 1e3, goals.view_us, False, " us"))
        else:
            add("view", peer, floor, 20)
        add("save", peer, best(peers, "save", blocks), goals.save)
    add("restore", "prefixd-disk", floor, goals.disk_restore)
    add("save", "prefixd-disk", rows.find("prefixd-ram", "save", blocks), goals.disk_save)
    for peer in ARENAS:
        add("exists", peer, peers.find(REDIS, "exists", blocks), 1.0)
    if goals is LARGE:
        for op, least in (("restore", DATA_RESTORE), ("save", DATA_SAVE), ("exists", DATA_EXISTS)):
            add(op, DATA, rows.find(GRPC, op, blocks), least)
        for op in ("restore", "save"):
            add(op, DATA, peers.find(MOONCAKE_TCP, op, blocks), DATA_PEER)
    return found


def best(rows: Rows, op: str, blocks: int) -> Row | None:
    """The fastest peer. memcpy does not count, because it keeps nothing."""
    able = [row for row in rows.of(op, blocks) if row.peer != MEMCPY]
    return min(able, key=lambda row: row.p50_ms, default=None)


def goals_table(found: Sequence[MeasuredGoal], block_bytes: int) -> TextTable:
    lines = [
        (
            one.name,
            f"{'at least' if one.at_least else 'at most'} {one.limit:g}{one.unit}",
            f"{one.value:.{0 if one.value >= 10 or not one.unit else 2}f}{one.unit}",
            "yes" if one.good else "no",
        )
        for one in found
    ]
    title = f"what is wanted, blocks of {format_bytes(block_bytes)}"
    return TextTable(title, ("", "wanted", "measured", "reached"), lines)


def main() -> None:
    rows, peers = read_rows(Path(sys.argv[1])), read_rows(Path(sys.argv[2]))
    sizes = rows.block_sizes
    for size in reversed(sizes):
        theirs = peers.of_size(size, or_unsaid=size == sizes[-1])
        found = measured_goals(rows.of_size(size), theirs, size)
        print(as_markdown(goals_table(found, size)), end="\n\n")


if __name__ == "__main__":
    main()
