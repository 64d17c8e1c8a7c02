"""What was published and what left, in order, as far back as it fits: what watchers read from.

One log serves all of them. A watcher is a position in it: nothing is kept for a watcher, so the
loop never waits for one, and one that is slower than what happens finds its place gone. While
nobody watches, and nobody did lately, nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import count
from typing import Final

import structlog

from ...proto import watch
from ..core.effects import Effect, IndexDelete, IndexPut
from ..core.entries import Entry
from .listeners import ChangeListener

log = structlog.get_logger("prefixd.changes")

#: What an event takes with its place in the list; one of a long namespace some bytes more.
COST_BYTES: Final = 176
#: How long the log goes on after the last watcher left, so that it can come back.
LINGER_S: Final = 60.0
#: The part of the log that is dropped at once when it is full: dropping one by one would move
#: all the others each time.
_DROPPED_SHARE: Final = 8


class WatchedTooSlowly(Exception):
    """The events after this position were dropped from the log."""


class ChangeLog(ChangeListener):
    """The event loop's.

    Sequence numbers ascend by one, and are of this start of the daemon. What was not written
    because nobody watched has taken a number, so that no watcher goes on from before it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.most: Final = max(_DROPPED_SHARE, size_bytes // COST_BYTES)
        self._bodies: list[bytes] = []
        #: the number of the first of them, or of the one that comes next; no watcher is at 0
        self._first = 2
        #: events were lost before this number: a watcher that has not got so far begins anew
        self.lost_before = 0
        self.watchers = 0
        self.closed = False
        self._active = False
        self._news = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None

    @property
    def sequence(self) -> int:
        """The last number that was given out."""
        return self._first + len(self._bodies) - 1

    @property
    def size_bytes(self) -> int:
        """What it takes, about."""
        return len(self._bodies) * COST_BYTES

    # ---- what happens

    def follow(self, effects: Iterable[Effect]) -> None:
        """Write down effects that have just been carried out on the index."""
        if not self._active:
            return
        bodies = self._bodies
        try:
            came = _bodies(effects, self._first + len(bodies))
        except Exception as problem:
            log.critical("changes_failed", exc_info=problem)
            self.lost()
            return
        if not came:
            return
        bodies += came
        if len(bodies) > self.most:
            # As much as is too much, and some, so that it is not done for every event.
            dropped = len(bodies) - self.most + self.most // _DROPPED_SHARE
            del bodies[:dropped]
            self._first += dropped
        self.wake()

    def lost(self) -> None:
        """Some of what was done may not have been told."""
        self._forget()
        self.lost_before = self.sequence
        self.wake()

    # ---- watchers

    def begin(self) -> None:
        """There is a watcher more."""
        self.watchers += 1
        self._active = True
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def end(self) -> None:
        """There is a watcher less."""
        self.watchers -= 1
        if not self.watchers and not self.closed:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._rest)

    def reaches(self, sequence: int) -> bool:
        """Is everything known that came after this number?"""
        return self._active and max(self._first - 1, self.lost_before) <= sequence <= self.sequence

    def since(self, sequence: int, most: int) -> list[bytes]:
        """The bodies of the next events after this number. Raises WatchedTooSlowly."""
        start = sequence + 1 - self._first
        if start < 0:
            raise WatchedTooSlowly
        return self._bodies[start : start + most]

    async def wait(self, sequence: int, timeout_s: float) -> bool:
        """Wait for something after this number, or for the end. False: there was nothing."""
        news = self._news
        if self.sequence > sequence or self.closed:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await news.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Nothing more happens: watchers are woken. Idempotent."""
        self.closed = True
        self._active = False
        if self._linger is not None:
            self._linger.cancel()
        self.wake()

    def wake(self) -> None:
        """Make every waiting watcher look again, whether or not something happened."""
        # A new event for later waiters: those that wait now have all been woken by the old one.
        self._news.set()
        self._news = asyncio.Event()

    def _rest(self) -> None:
        self._linger = None
        self._active = False
        self._forget()

    def _forget(self) -> None:
        """A number is given to what is not in the log."""
        self._first = self.sequence + 2
        self._bodies.clear()


def body_of(entry: Entry, sequence: int, parent: bytes | None = None) -> bytes:
    """The event that tells of a published entry."""
    # By position: by name it takes half as long again, for every block.
    return watch.published(
        entry.tier,
        entry.key,
        sequence,
        entry.generation,
        entry.payload_bytes,
        entry.token_count,
        entry.reason,
        parent,
        entry.label,
    )


def _bodies(effects: Iterable[Effect], first: int) -> list[bytes]:
    """The events for watchers that these effects make, numbered from `first` on."""
    numbers = count(first)
    bodies = []
    for effect in effects:
        if isinstance(effect, IndexPut):
            bodies.append(body_of(effect.entry, next(numbers), effect.parent))
        elif isinstance(effect, IndexDelete):
            entry = effect.entry
            bodies.append(watch.evicted(entry.tier, entry.key, next(numbers), entry.generation))
    return bodies
