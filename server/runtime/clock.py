"""The daemon's only clock."""

from __future__ import annotations

import time


class Clock:
    """Wall-clock nanoseconds that never run backwards: read once, then counted monotonically.

    Stamps outlive a start, so they have to be wall-clock time; leases must not jump when
    somebody sets the time, so they have to be monotonic. This is both, within one start.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        return self._offset_ns + time.monotonic_ns()

    def monotonic_ns(self) -> int:
        """For measuring how long something took, the loop's own delays among them."""
        return time.monotonic_ns()
