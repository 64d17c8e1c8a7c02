"""How late the event loop is: what it could not do in time because it did something else."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from .clock import Clock

#: The loop is asked this often to show that it runs.
PULSE_NS: Final = 20_000_000
#: Upper bounds of the histogram, in microseconds; above the last there is one more bucket.
BUCKETS_US: Final = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 500_000, 2_000_000)
#: Lateness that is no reason to give anybody more time.
_USUAL_NS: Final = 10_000_000
_RECENT: Final = 3_000


class LoopLag:
    """Measures by a pulse of its own. `late_ns` is told once of every delay."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        #: how many pulses were at most so late, by bucket
        self.counts = [0] * (len(BUCKETS_US) + 1)
        self.total_us = self.max_us = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._seen_ns = clock.monotonic_ns()
        self._late_ns = 0
        self._handle = self._loop.call_later(PULSE_NS / 1e9, self._pulse)

    def _pulse(self) -> None:
        self._handle = self._loop.call_later(PULSE_NS / 1e9, self._pulse)
        late_us = self._look() // 1_000
        self.total_us += late_us
        self.max_us = max(self.max_us, late_us)
        self._recent.append(late_us)
        for number, bound_us in enumerate(BUCKETS_US):
            if late_us <= bound_us:
                self.counts[number] += 1
                return
        self.counts[-1] += 1

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
        """Of the last minute or so."""
        recent = sorted(self._recent)
        return recent[min(len(recent) - 1, int(len(recent) * percent / 100))] if recent else 0

    def close(self) -> None:
        self._handle.cancel()
