"""The change log: the latest entries that were published and evicted, in order, for watchers.

One log serves all watchers. A watcher is a position in it: nothing is stored for a watcher, so the
loop never waits for one, and a watcher that is too slow finds its position dropped. While there is
no watcher, and was none lately, nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from typing import Final

import structlog

from ...proto import watch_events
from ..core.effects import Effect, IndexDelete, IndexPut
from ..core.entries import EntryState

log = structlog.get_logger("prefixd.changes")

#: Memory of an event and its place in the list; a long namespace takes some bytes more.
COST_BYTES: Final = 176
#: How long the log is written after the last watcher left, so that the watcher can return.
LINGER_S: Final = 60.0
#: The part of a full log that is dropped at once: dropping events one by one would move all the
#: others each time.
_DROPPED_SHARE: Final = 8


class WatchedTooSlowly(Exception):
    """The events after this position were dropped from the log."""


class ChangeLog:
    """Belongs to the event loop.

    Sequence numbers ascend by one, and begin anew with each start of the daemon. A gap, while there
    was no watcher, takes a number, so that no watcher continues from before it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.most: Final = max(_DROPPED_SHARE, size_bytes // COST_BYTES)
        self._bodies: list[bytes] = []
        #: the number of the first body, or of the next one if there is none; no watcher is at 0
        self._first = 2
        #: events were lost before this number: a watcher that is further back begins anew
        self.lost_before = 0
        self.watchers = 0
        self.closed = False
        self._active = False
        self._news = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None

    @property
    def sequence(self) -> int:
        """The last number that was assigned."""
        return self._first + len(self._bodies) - 1

    @property
    def size_bytes(self) -> int:
        """Its approximate memory."""
        return len(self._bodies) * COST_BYTES

    # ---- what the core calls; neither method raises

    def follow(self, effects: Iterable[Effect]) -> None:
        """Log effects that have just been carried out on the index."""
        if not self._active:
            return
        bodies = self._bodies
        try:
            new_bodies = _bodies(effects, self._first + len(bodies))
        except Exception as problem:
            log.critical("changes_failed", exc_info=problem)
            self.lost()
            return
        if not new_bodies:
            return
        bodies += new_bodies
        if len(bodies) > self.most:
            # More than the excess, so that not every event drops something.
            dropped = len(bodies) - self.most + self.most // _DROPPED_SHARE
            del bodies[:dropped]
            self._first += dropped
        self.wake()

    def lost(self) -> None:
        """Effects may be missing from the log."""
        self._forget()
        self.lost_before = self.sequence
        self.wake()

    # ---- watchers

    def begin(self) -> None:
        """Add a watcher."""
        self.watchers += 1
        self._active = True
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def end(self) -> None:
        """Remove a watcher."""
        self.watchers -= 1
        if not self.watchers and not self.closed:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._rest)

    def reaches(self, sequence: int) -> bool:
        """Whether the log has every event after this number."""
        return self._active and max(self._first - 1, self.lost_before) <= sequence <= self.sequence

    def since(self, sequence: int, most: int) -> list[bytes]:
        """The bodies of the next events after this number. Raises WatchedTooSlowly."""
        start = sequence + 1 - self._first
        if start < 0:
            raise WatchedTooSlowly
        return self._bodies[start : start + most]

    async def wait(self, sequence: int, timeout_s: float) -> bool:
        """Wait for an event after this number, or for `close`. False: the time is over."""
        news = self._news
        if self.sequence > sequence or self.closed:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await news.wait()
        return news.is_set()

    def close(self) -> None:
        """End the log and wake the watchers. Idempotent."""
        self.closed = True
        self._active = False
        if self._linger is not None:
            self._linger.cancel()
        self.wake()

    def wake(self) -> None:
        """Make every waiting watcher look again, whether or not there is something new."""
        # Later waiters get a new event: the old one wakes those that wait now.
        self._news.set()
        self._news = asyncio.Event()

    def _rest(self) -> None:
        self._linger = None
        self._active = False
        self._forget()

    def _forget(self) -> None:
        """Drop all events. The gap takes a number."""
        self._first = self.sequence + 2
        self._bodies.clear()


def body_of(entry: EntryState, sequence: int, parent: bytes | None = None) -> bytes:
    """The event of a published entry."""
    # Positional arguments: keywords take half as long again, for every block.
    return watch_events.published(
        entry.tier,
        entry.key,
        sequence,
        entry.generation,
        entry.content.payload_bytes,
        entry.content.token_count,
        entry.reason,
        parent,
        entry.label,
    )


def _bodies(effects: Iterable[Effect], first: int) -> list[bytes]:
    """The events of these effects for watchers, numbered from `first` on."""
    numbers = count(first)
    bodies = []
    for effect in effects:
        if isinstance(effect, IndexPut):
            for entry, parent in zip(effect.entries, effect.parents, strict=True):
                bodies.append(body_of(entry, next(numbers), parent))
        elif isinstance(effect, IndexDelete):
            bodies += [
                watch_events.evicted(entry.tier, entry.key, next(numbers), entry.generation)
                for entry in effect.entries
            ]
    return bodies
