"""Timing cases by turns, and the rows that come of it.

A machine drifts: what runs a minute later runs under other conditions. So cases that are to be
compared take turns (A B A B ...), and only the ratio of their medians means anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

#: How large the blocks of a row are; one that does not say so is of the largest there are.
BLOCK_BYTES: Final = "block_bytes"
#: Turns that each case gets; its samples are spread over them.
ROUNDS: Final = 8
#: Samples of a case that takes microseconds, for one of a case that moves bytes.
LIGHT_SAMPLES: Final = 25


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one operation; `peer` is who did it."""

    peer: str
    op: str
    #: Blocks, or keys, that one operation is about.
    blocks: int
    p50_ms: float
    #: None: the operation moves no payload.
    gb_per_s: float | None = None
    #: What else there is to say, by name.
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = {"peer": self.peer, "op": self.op, "blocks": self.blocks, "p50_ms": self.p50_ms}
        if self.gb_per_s is not None:
            row["gb_per_s"] = self.gb_per_s
        return row | dict(self.more)

    def of_blocks(self, block_bytes: int) -> Row:
        """This row with the size of its blocks in it."""
        return replace(self, more={**self.more, BLOCK_BYTES: block_bytes})

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Row:
        """Raises KeyError, TypeError or ValueError for what is no row."""
        more = dict(row)
        peer, op, blocks = str(more.pop("peer")), str(more.pop("op")), int(more.pop("blocks"))
        p50_ms, gb_per_s = float(more.pop("p50_ms")), more.pop("gb_per_s", None)
        if p50_ms <= 0:
            raise ValueError(f"nothing takes {p50_ms} ms")
        return cls(peer, op, blocks, p50_ms, None if gb_per_s is None else float(gb_per_s), more)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation to be timed: `action`, after `before`, which is not."""

    peer: str
    op: str
    blocks: int
    action: Callable[[], object]
    #: Payload that one action moves, or saves the moving of; 0: none.
    moved_bytes: int = 0
    before: Callable[[], object] = _nothing
    #: It takes microseconds: many samples cost nothing.
    light: bool = False


def make_row(case: Case, seconds: Sequence[float], more: Mapping[str, Any] | None = None) -> Row:
    """The median of what a case took."""
    p50_s = statistics.median(seconds)
    gb_per_s = round(case.moved_bytes / p50_s / 1e9, 2) if case.moved_bytes else None
    return Row(case.peer, case.op, case.blocks, round(p50_s * 1e3, 4), gb_per_s, more or {})


def interleave(
    cases: Iterable[Case], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[Row]:
    """Time every case, at least `repeats` samples of each, by turns; a row for each, in order.

    A turn begins with one action that is not timed: it brings code and data back that the turns
    of the others have driven out of the caches.
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
