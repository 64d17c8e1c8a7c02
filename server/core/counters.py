"""What is counted of the daemon and its tiers since the start: numbers and histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: How long an entry went unused before it was evicted, in nanoseconds: a second to a month.
AGE_BOUNDS_NS: Final = tuple(
    round(1e9 * s)
    for s in (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600, 30 * 24 * 3600)
)


class Histogram:
    """Counts of whole numbers, such as durations, by bucket.

    One thread observes. Others may read, and see counts that are about current.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        """`bounds`: the largest value of each bucket, ascending. One more bucket takes the rest."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[int]) -> None:
        """`observe` each; quickly where all are of one bucket."""
        bucket = bisect_left(self.bounds, min(values))
        if bucket == bisect_left(self.bounds, max(values)):
            self.counts[bucket] += len(values)
            self.total += sum(values)
        else:
            for value in values:
                self.observe(value)


@dataclass(slots=True)
class TierCounters:
    """What happened in a tier since the start."""

    hits: int = 0
    hit_tokens: int = 0
    saves: int = 0
    saved_bytes: int = 0
    read_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0
    recovered_entries: int = 0
    recovered_bytes: int = 0
    dropped_at_start: int = 0
    #: a gauge, not a counter: payload bytes of the entries that are published now
    payload_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """What happened since the start, over all tiers."""

    lookups: int = 0
    lookup_keys: int = 0
    lookup_hits: int = 0
    claims: int = 0
    claims_empty: int = 0
    claimed_entries: int = 0
    releases: int = 0
    claims_lost: int = 0
    reservations: int = 0
    duplicate_saves: int = 0
    in_flight_refusals: int = 0
    too_large_refusals: int = 0
    no_room_refusals: int = 0
    quota_refusals: int = 0
    closed_refusals: int = 0
    reservations_lost: int = 0
    crc_mismatches: int = 0
    length_mismatches: int = 0
    failed_saves: int = 0
    waits: int = 0
    waits_timed_out: int = 0
    touches: int = 0
    suspects: int = 0
    deletes: int = 0
    sessions_opened: int = 0
    sessions_ended: int = 0
    sessions_lost: int = 0
