"""How late the event loop is: what it could not do in time because it did something else."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from ..core.counters import Histogram
from .clock import Clock

#: The loop is asked this often to show that it runs.
PULSE_NS: Final = 20_000_000
#: Buckets of the histogram: 1 ms to 2 s.
BOUNDS_NS: Final = tuple(10**6 * ms for ms in (1, 2, 5, 10, 20, 50, 100, 500, 2_000))
#: Lateness that is no reason to give anybody more time.
_USUAL_NS: Final = 10_000_000
_RECENT: Final = 3_000


class LoopLag:
    """Measures by a pulse of its own. `late_ns` is told once of every delay."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        #: how late the pulses were
        self.pulses: Final = Histogram(BOUNDS_NS)
        self.max_us = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._seen_ns = clock.monotonic_ns()
        self._late_ns = 0
        self._handle = self._loop.call_later(PULSE_NS / 1e9, self._pulse)

    def _pulse(self) -> None:
        self._handle = self._loop.call_later(PULSE_NS / 1e9, self._pulse)
        late_ns = self._look()
        self.pulses.observe(late_ns)
        self.max_us = max(self.max_us, late_ns // 1_000)
        self._recent.append(late_ns // 1_000)

    def _look(self) -> int:
        """The loop runs at this moment: for how long could it not, beyond the pulse?"""
        now_ns = self._clock.monotonic_ns()
        late_ns = max(0, now_ns - self._seen_ns - PULSE_NS)
        self._seen_ns = now_ns
        if late_ns > _USUAL_NS:
            self._late_ns += late_ns
        return late_ns

    def take_late_ns(self) -> int:
        """For how long the loop did not serve, since the last time that this was asked."""
        self._look()
        late_ns, self._late_ns = self._late_ns, 0
        return late_ns

    def percentile_us(self, percent: float) -> int:
        """A percentile of the pulses of the last minute or so."""
        recent = sorted(self._recent)
        return recent[min(len(recent) - 1, int(len(recent) * percent / 100))] if recent else 0

    def close(self) -> None:
        self._handle.cancel()
