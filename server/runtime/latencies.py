"""How long what clients wait for takes, in the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...proto.limits import LATENCY_BOUNDS_NS
from ..core.counters import Histogram
from .clock import Clock


class Latencies:
    """Histograms of calls, in nanoseconds. The event loop's; each committer has its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: from the request to the answer, waiting for saves in flight included
        self.claim = Histogram(LATENCY_BOUNDS_NS)
        #: from the first message to the results, the client's sending included
        self.save = Histogram(LATENCY_BOUNDS_NS)

    @contextmanager
    def measured(self, histogram: Histogram) -> Iterator[None]:
        """What happens within it, unless it fails."""
        began_ns = self._clock.monotonic_ns()
        yield
        histogram.observe(self._clock.monotonic_ns() - began_ns)
