"""What of a daemon could grow, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Final

TENTHS: Final = 10
#: The first tenth fills the tiers, and what is made once.
_SETTLED: Final = 1
#: What may be there more at the end than in the second tenth, by the larger of both: a part of it,
#: and a little for what comes and goes.
_MORE_PART: Final = 0.05
_MORE: Final = {"memory_bytes": 8 * 2**20, "descriptors": 12, "threads": 6, "file_bytes": 2**20}
#: Medians of operations. Other work on the machine makes them differ by half.
_SLOWER: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the daemon and its processes, at one moment. `memory_bytes`: its own, not the arenas."""

    memory_bytes: int
    descriptors: int
    threads: int
    file_bytes: int


@dataclass
class Tenth:
    """A tenth of the time."""

    samples: list[Sample] = field(default_factory=list)
    took_s: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        told: dict[str, object] = {name: self.typical(name) for name in _MORE}
        for operation, took_s in sorted(self.took_s.items()):
            *_, late_s = quantiles(took_s, n=100) if len(took_s) > 1 else took_s
            told[f"{operation}_ms"] = [round(1000 * median(took_s), 2), round(1000 * late_s, 2)]
        return told

    def typical(self, name: str) -> int:
        """The median over the samples."""
        return int(median(getattr(sample, name) for sample in self.samples))


def growth(tenths: Sequence[Tenth]) -> list[str]:
    """What is more in the last tenth than in the second, in sentences."""
    second, last = tenths[_SETTLED], tenths[-1]
    grown = []
    for name, little in _MORE.items():
        before, after = second.typical(name), last.typical(name)
        if after > before + max(little, _MORE_PART * before):
            grown.append(f"{name}: {before:,} in the second tenth, {after:,} in the last")
    for operation in second.took_s.keys() & last.took_s.keys():
        before_s, after_s = median(second.took_s[operation]), median(last.took_s[operation])
        if after_s > _SLOWER * before_s:
            grown.append(f"a {operation} took {before_s:.5f} s, and {after_s:.5f} s in the last")
    return grown


def sample(pid: int, directories: Sequence[Path]) -> Sample:
    """Raises OSError if the daemon is gone."""
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
    """What the files below take of their device."""
    total = 0
    for path in directory.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # it was renamed meanwhile
        total += found.st_blocks * 512
    return total
