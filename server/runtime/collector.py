"""Keeps Python's cycle collector away from the tables.

Entries are many, live long and refer to nothing that refers back to them: reference counting
alone frees them. The collector would still walk over all of them, with every thread standing
still meanwhile (measured: 130 ms for 300,000 entries, growing with them; at a restart with a
million, on another thread than the loop, up to half a second again and again).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Final

from ..core.counters import TierCounters

#: Objects more than were freed again, after which the youngest are looked at. Python's own 700 are
#: fewer than one batch of a recovery has: each of them was looked at, for a quarter of its time.
_YOUNG_OBJECTS: Final = 40_000
#: New entries that the collector may walk over: a millisecond.
_MAX_WATCHED_ENTRIES: Final = 4_000


def begin() -> None:
    """For a process that is to hold many entries: what is alive now stays, and is not looked at
    again."""
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.freeze()


class Freezer:
    """Takes what lives long out of the collector's sight, from time to time."""

    def __init__(self) -> None:
        self._published = 0

    def published(self, counters: Iterable[TierCounters]) -> None:
        """Look at what all tiers published since the start. If it is much, what is alive now is
        not looked at again; young cycles are collected before, so that they don't stay for ever."""
        total = sum(tier.saves + tier.recovered_entries for tier in counters)
        if total - self._published >= _MAX_WATCHED_ENTRIES:
            self._published = total
            gc.collect(1)
            gc.freeze()

    def expect(self, entries: int) -> None:
        """A start has read that `entries` come next. If they are many, the list of them is
        large, and the collector is kept from walking over it even once."""
        if entries >= _MAX_WATCHED_ENTRIES:
            gc.freeze()
