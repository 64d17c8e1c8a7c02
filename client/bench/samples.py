"""Timing cases by turns, and the rows that result.

A machine drifts: a minute later, conditions are different. So cases that are compared take turns
(A B A B ...), and only the ratio of their medians means anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

#: The field of a row with the size of its blocks. A row without it has blocks of the largest size.
BLOCK_BYTES: Final = "block_bytes"
#: How many turns each case gets. Its samples are spread over them.
ROUNDS: Final = 8
#: Samples of a case that takes microseconds, for each sample of a case that moves bytes.
LIGHT_SAMPLES: Final = 25


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Row:
    """The measurement of one operation. `peer` is what was measured."""

    peer: str
    op: str
    #: How many blocks or keys one operation handles.
    blocks: int
    p50_ms: float
    #: None when the operation moves no payload.
    gb_per_s: float | None = None
    #: Other figures, by name.
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = {"peer": self.peer, "op": self.op, "blocks": self.blocks, "p50_ms": self.p50_ms}
        if self.gb_per_s is not None:
            row["gb_per_s"] = self.gb_per_s
        return row | dict(self.more)

    def of_blocks(self, block_bytes: int) -> Row:
        """This row with the size of its blocks."""
        return replace(self, more={**self.more, BLOCK_BYTES: block_bytes})

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Row:
        """Raises KeyError, TypeError or ValueError if `row` is none."""
        more = dict(row)
        more.pop("version", None)  # of the document
        peer, op, blocks = str(more.pop("peer")), str(more.pop("op")), int(more.pop("blocks"))
        p50_ms, gb_per_s = float(more.pop("p50_ms")), more.pop("gb_per_s", None)
        if p50_ms <= 0:
            raise ValueError(f"nothing takes {p50_ms} ms")
        return cls(peer, op, blocks, p50_ms, None if gb_per_s is None else float(gb_per_s), more)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation to time: `action`. `before` runs before it and is not timed."""

    peer: str
    op: str
    blocks: int
    action: Callable[[], object]
    #: Payload that one action moves, or makes available without moving it. 0 for none.
    moved_bytes: int = 0
    before: Callable[[], object] = _nothing
    #: Takes microseconds, so that many samples cost little.
    light: bool = False


def make_row(case: Case, seconds: Sequence[float]) -> Row:
    """A row with the median of a case's samples."""
    p50_s = statistics.median(seconds)
    gb_per_s = round(case.moved_bytes / p50_s / 1e9, 2) if case.moved_bytes else None
    return Row(case.peer, case.op, case.blocks, round(p50_s * 1e3, 4), gb_per_s)


def interleave(
    cases: Iterable[Case], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[Row]:
    """Time every case by turns, at least `repeats` samples of each. Returns a row for each case.

    Each turn begins with an action that is not timed. It brings code and data back into the caches,
    from which the other cases have driven them.
    """
    cases = list(cases)
    rounds = min(ROUNDS, repeats)
    taken: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, seconds in zip(cases, taken, strict=True):
            samples = -(-repeats // rounds) * (LIGHT_SAMPLES if case.light else 1)
            case.before()
            case.action()
            for _ in range(samples):
                case.before()
                start_s = clock()
                case.action()
                seconds.append(clock() - start_s)
    return [make_row(case, seconds) for case, seconds in zip(cases, taken, strict=True)]
