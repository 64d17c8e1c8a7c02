"""Keeps Python's cycle collector away from the tables.

Entries are many, live long and refer to nothing that refers back to them: reference counting
alone frees them. The collector would still walk over all of them, with the event loop standing
still meanwhile (measured: 130 ms for 300,000 entries, growing with them).
"""

from __future__ import annotations

import gc
from typing import Final

#: New entries that the collector may walk over: a few milliseconds.
_MAX_WATCHED_ENTRIES: Final = 20_000
#: New objects between two looks of the collector at the young ones. Those of a save of some hundred
#: blocks are gone by themselves before: at Python's own 700 it took a twentieth of each save.
_NEW_OBJECTS: Final = 10_000


def look_seldom() -> None:
    """For the whole process: for programs, not for libraries."""
    gc.set_threshold(_NEW_OBJECTS)


class Freezer:
    """Takes what lives long out of the collector's sight, from time to time."""

    def __init__(self) -> None:
        self._published = 0

    def published(self, total: int) -> None:
        """So many entries were published since the start. What is alive now is not looked at
        again; young cycles are collected before, so that they don't stay for ever."""
        if total - self._published >= _MAX_WATCHED_ENTRIES:
            self._published = total
            gc.collect(1)
            gc.freeze()
