"""A histogram of whole numbers, such as durations, with fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

#: Of the times that entries went unused, in nanoseconds: a second to a month.
AGE_BOUNDS_NS: Final = tuple(
    round(1e9 * s)
    for s in (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600, 30 * 24 * 3600)
)


class Histogram:
    """Counts by bucket. One thread observes; others may read, and see counts of about now."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        """`bounds`: what each bucket holds at most, ascending; one more takes what is above."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
