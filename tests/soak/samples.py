"""Samples of a daemon's resources, and whether they grew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from prefixd.client.ctl.connection import AdminConnection
from prefixd.proto.errors import PrefixdError
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import PAUSE_S

TENTHS: Final = 10
#: Minutes after which nothing grows any more, in a run that is long enough.
_SETTLED_MINUTES: Final = 10
#: The allowed growth from the second tenth to the last: this part or this amount, whichever is
#: larger.
_MORE_PART: Final = 0.05
_MORE: Final = {"memory_bytes": 8 * 2**20, "descriptors": 12, "threads": 6, "file_bytes": 2**20}
#: The allowed ratio of median times. Other load on the machine changes them by half.
_SLOWER: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of the daemon and its child processes. `memory_bytes`: private memory only."""

    memory_bytes: int
    descriptors: int
    threads: int
    file_bytes: int


@dataclass
class Tenth:
    """The samples and times in one tenth of a run."""

    samples: list[Sample] = field(default_factory=list)
    took_s: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {name: self.typical(name) for name in _MORE}
        for operation, took_s in sorted(self.took_s.items()):
            *_, late_s = quantiles(took_s, n=100) if len(took_s) > 1 else took_s
            fields[f"{operation}_ms"] = [round(1000 * median(took_s), 2), round(1000 * late_s, 2)]
        return fields

    def typical(self, name: str) -> int:
        """The median of a field over the samples."""
        return int(median(getattr(sample, name) for sample in self.samples))


def settled(minutes: float) -> int:
    """The number of the tenth to compare with, from 0: the one in which the tenth minute ends. Not
    the first, which fills the tiers and creates what is created once, and none of the last half."""
    return max(1, min(int(TENTHS * _SETTLED_MINUTES / minutes), TENTHS // 2 - 1))


def growth(tenths: Sequence[Tenth], first: int = 1) -> list[str]:
    """A sentence for each field and operation that grew from this tenth (from 0) to the last."""
    earlier, last = tenths[first], tenths[-1]
    grown = []
    for name, allowed in _MORE.items():
        before, after = earlier.typical(name), last.typical(name)
        if after > before + max(allowed, _MORE_PART * before):
            grown.append(f"{name}: {before:,} in tenth {first + 1}, {after:,} in the last")
    for operation in earlier.took_s.keys() & last.took_s.keys():
        before_s, after_s = median(earlier.took_s[operation]), median(last.took_s[operation])
        if after_s > _SLOWER * before_s:
            grown.append(
                f"{operation}: {before_s:.5f} s in tenth {first + 1}, {after_s:.5f} s in the last"
            )
    return grown


def left(admin: AdminConnection, within_s: float) -> dict[str, int]:
    """What the daemon holds for clients, all of which have left. Waits a while for nothing."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            stats = admin.stats()
        except PrefixdError:  # the machine has too much to do
            if time.monotonic() > until_s:
                raise
            continue
        held = {name: used for name, used in stats.in_flight.items() if used}
        # Of these the samples have the first, and the second only counts.
        for name in ("descriptors", "log_lines_left_out"):
            held.pop(name, None)
        held |= {
            name: getattr(stats, name)
            for name in ("sessions", "claims", "reservations", "waiters")
            if getattr(stats, name)
        }
        held |= {
            f"pinned in {Tier(t.tier).label}": t.pinned_entries
            for t in stats.tiers
            if t.pinned_entries
        }
        if not held or time.monotonic() > until_s:
            return held
        time.sleep(PAUSE_S)


def sample(pid: int, directories: Sequence[Path]) -> Sample:
    """Sample a daemon. Raises OSError if it has ended."""
    memory = descriptors = threads = 0
    for one in [pid, *_children(pid)]:
        status = Path(f"/proc/{one}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in status if ":" in line)
        memory += 1024 * int(fields["RssAnon"].split()[0])
        threads += int(fields["Threads"])
        descriptors += sum(1 for _ in Path(f"/proc/{one}/fd").iterdir())
    return Sample(memory, descriptors, threads, sum(map(_stored_bytes, directories)))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _stored_bytes(directory: Path) -> int:
    """The bytes that the files below take on their device."""
    total = 0
    for path in directory.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # renamed or removed meanwhile
        total += found.st_blocks * 512
    return total
