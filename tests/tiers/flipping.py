#!/usr/bin/env python3
"""Flips bits in the files of a disk store, stopped and running, and measures what that costs.

    python tests/tiers/flipping.py --flips 10000

Nothing may be served that was not saved; an entry may be lost only if a flip hit its own bytes or
its own cell; the store always opens. The result is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from helpers import SLAB, Placed, payload_of  # after the path was set

from prefixd.proto.entry import EntryRecord
from prefixd.tiers.arena_stores import DiskStore
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.lmdb_wire import CELL, CELL_BYTES, CELL_MAGIC
from prefixd.tiers.store import Damaged, StoreError

SLABS = 256
ENTRIES = 25


@dataclass
class Flipping:
    """A store whose bits are flipped, and the entries that it has acknowledged."""

    directory: Path
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    saved: dict[int, EntryRecord] = field(default_factory=dict)
    #: Slabs with a flipped bit in their bytes or in their cells.
    hit: set[int] = field(default_factory=set)
    number: int = 0

    def __post_init__(self) -> None:
        self.placed = self._opened()
        self.placed.recover()
        self.change()

    def _opened(self) -> Placed:
        return Placed(DiskStore, self.directory, SLABS, sync=False)

    def flip(self) -> None:
        """Flip one bit of one file."""
        path = self.rng.choice(sorted(self.directory.iterdir()))
        path.chmod(0o600)
        with path.open("r+b") as file:
            place = self.rng.randrange(path.stat().st_size)
            file.seek(max(0, place - CELL_BYTES + 1))
            around = file.read(2 * CELL_BYTES - 1)
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << self.rng.randrange(8)]))
        self.counts["flips"] += 1
        if path.name == "arena":
            self.hit.add(place // SLAB)
        elif path.suffix == ".mdb":
            at = around.find(CELL_MAGIC)
            while at != -1 and at + CELL.size <= len(around):
                if at <= min(place, CELL_BYTES - 1) < at + CELL_BYTES:
                    self.hit.add(CELL.unpack_from(around, at)[2])
                at = around.find(CELL_MAGIC, at + 1)

    def was_hit(self, entry: EntryRecord) -> bool:
        location = entry.location
        return any(
            slab in self.hit
            for start, length in zip(location[::2], location[1::2], strict=True)
            for slab in range(start // SLAB, (start + length) // SLAB)
        )

    def read_all(self) -> None:
        """Every acknowledged entry without a flipped bit is whole."""
        for number, entry in list(self.saved.items()):
            try:
                self.placed.store.verify(entry, entry.payload_crc32c)
            except Damaged:
                assert self.was_hit(entry), "an entry is damaged that was not hit"
                self.counts["damaged"] += 1
                self.drop(number)
                continue
            data = b"".join(self.placed.store.read(entry, 0, entry.payload_bytes))
            assert data == payload_of(number, entry.payload_bytes), "wrong bytes"
            self.counts["read"] += 1

    def drop(self, number: int) -> None:
        entry = self.saved.pop(number)
        self.placed.store.forget([entry])
        self.placed.extents.free(entry.location)

    def change(self) -> None:
        """Erase and save some entries. Try again what fails, as a committer does."""
        for number in self.rng.sample(sorted(self.saved), min(3, len(self.saved))):
            self.drop(number)
        while len(self.saved) < ENTRIES:
            self.number += 1
            entry = self.placed.entry(self.number, self.rng.randrange(1, 8 * SLAB))
            for _ in range(3):
                try:
                    writer = self.placed.written(entry)
                    # Its bytes are new, so earlier flips do not affect it.
                    self.hit -= set(range(SLABS)) & {
                        slab
                        for start, length in zip(
                            entry.location[::2], entry.location[1::2], strict=True
                        )
                        for slab in range(start // SLAB, (start + length) // SLAB)
                    }
                    self.placed.store.apply([writer])
                    self.saved[self.number] = writer.entry
                    break
                except StoreError:
                    self.counts["refused"] += 1
            else:
                raise AssertionError("a save is refused for ever")

    def start_again(self, kill: bool) -> None:
        """Reopen the store. It has to have exactly the acknowledged entries."""
        if kill:
            table = self.placed.store._records.table
            assert isinstance(table, LmdbRows)
            if table.pid is not None:
                os.kill(table.pid, signal.SIGKILL)
        self.placed.store.close()
        self.flips_while_stopped()
        self.placed = self._opened()
        self.counts["starts"] += 1
        recovery = self.placed.recover()
        found = {entry.record.generation - 1: entry.record for entry in recovery.entries}
        for number, entry in list(self.saved.items()):
            if number not in found:
                assert self.was_hit(entry), "an acknowledged entry is lost that was not hit"
                self.counts["lost"] += 1
                del self.saved[number]
            else:
                assert found[number] == entry, "a record is not the one that was written"
        for number, entry in found.items():
            if number not in self.saved:
                # It was erased, or was never acknowledged.
                self.counts["back"] += 1
                self.saved[number] = entry
                self.hit.add(entry.location[0] // SLAB)
        self.read_all()

    stopped_flips: int = 0

    def flips_while_stopped(self) -> None:
        for _ in range(self.stopped_flips):
            self.flip()

    def run(self, flips: int) -> Counter[str]:
        """Half of the flips happen while the store runs."""
        while self.counts["flips"] < flips:
            for _ in range(4):
                for _ in range(2):
                    self.flip()
                self.read_all()
                self.change()
            self.stopped_flips = 8
            self.start_again(kill=self.rng.random() < 0.5)
            self.change()
        self.placed.store.close()
        return self.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="prefixd-flips-"))
    try:
        counts = Flipping(directory / "tier", random.Random(options.seed)).run(options.flips)
        print(json.dumps({**counts, "seed": options.seed}))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
