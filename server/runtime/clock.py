"""The daemon's only clock, and what is measured by it: latencies, and how late the loop is."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...proto.limits import LATENCY_BOUNDS_NS
from ..core.counters import Histogram

#: How often the loop runs a callback that measures its delay.
PULSE_NS: Final = 20_000_000
#: Buckets of the histogram of delays: 1 ms to 2 s.
BOUNDS_NS: Final = tuple(10**6 * ms for ms in (1, 2, 5, 10, 20, 50, 100, 500, 2_000))
#: A shorter delay extends no deadline.
_USUAL_NS: Final = 10_000_000
_RECENT_PULSES: Final = 3_000


class Clock:
    """Wall-clock nanoseconds that never run backwards: read once, then counted monotonically.

    Stamps outlive a restart, so they have to be wall-clock time; leases must not jump when the
    system time is set, so they have to be monotonic. Within one start of the daemon this is both.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        return self._offset_ns + time.monotonic_ns()

    def monotonic_ns(self) -> int:
        """For durations, the loop's own delays among them."""
        return time.monotonic_ns()


class Latencies:
    """Histograms of the calls of clients, in nanoseconds. Belongs to the event loop; each committer
    has histograms of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: from the request to the answer, including waits for saves in flight
        self.claim = Histogram(LATENCY_BOUNDS_NS)
        #: from the first message to the results, including the client's sending
        self.save = Histogram(LATENCY_BOUNDS_NS)

    @contextmanager
    def measured(self, histogram: Histogram) -> Iterator[None]:
        """Measure the body, unless it raises."""
        began_ns = self._clock.monotonic_ns()
        yield
        histogram.observe(self._clock.monotonic_ns() - began_ns)


class LoopLag:
    """Measures how late the event loop runs its callbacks, with a periodic callback of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        #: how late the pulses were
        self.pulses: Final = Histogram(BOUNDS_NS)
        self.max_us = 0
        self._recent_us: deque[int] = deque(maxlen=_RECENT_PULSES)
        self._seen_ns = clock.monotonic_ns()
        self._late_ns = 0
        self._handle = self._loop.call_later(PULSE_NS / 1e9, self._pulse)

    def _pulse(self) -> None:
        self._handle = self._loop.call_later(PULSE_NS / 1e9, self._pulse)
        late_ns = self._measure()
        self.pulses.observe(late_ns)
        self.max_us = max(self.max_us, late_ns // 1_000)
        self._recent_us.append(late_ns // 1_000)

    def _measure(self) -> int:
        """How long the loop ran nothing since the last measurement, beyond the pulse interval."""
        now_ns = self._clock.monotonic_ns()
        late_ns = max(0, now_ns - self._seen_ns - PULSE_NS)
        self._seen_ns = now_ns
        if late_ns > _USUAL_NS:
            self._late_ns += late_ns
        return late_ns

    def take_late_ns(self) -> int:
        """How long the loop did not serve since the last call of this. Each delay is returned
        once."""
        self._measure()
        late_ns, self._late_ns = self._late_ns, 0
        return late_ns

    def percentile_us(self, percent: float) -> int:
        """A percentile of the pulses of the last minute or so."""
        recent = sorted(self._recent_us)
        return recent[min(len(recent) - 1, int(len(recent) * percent / 100))] if recent else 0

    def close(self) -> None:
        self._handle.cancel()
