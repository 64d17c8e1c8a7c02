"""What of the daemon does not work at this moment, and since when it is known."""

from __future__ import annotations

from typing import Final

from .clock import Clock

#: How long a fault that happened once makes the daemon unhealthy.
FAULT_SHOWN_NS: Final = 60_000_000_000


class Health:
    """Reasons to call the daemon unhealthy, by the part that they concern.

    A condition lasts until it is over: who enters one into `conditions` takes it out again. A
    fault happened once, and is shown for a while, or until something like it succeeds. A notice
    is no reason: what is less than it could be while the daemon serves, by the part too.
    """

    def __init__(self, clock: Clock) -> None:
        self.conditions: dict[str, str] = {}
        self.notices: dict[str, str] = {}
        self._clock = clock
        #: the reason, and until when it is shown
        self._faults: dict[str, tuple[str, int]] = {}

    def fault(self, part: str, why: str) -> None:
        """Something failed."""
        self._faults[part] = why, self._clock.now_ns() + FAULT_SHOWN_NS

    def succeeded(self, part: str) -> None:
        """What failed before works."""
        self._faults.pop(part, None)

    def unhealthy(self) -> dict[str, str]:
        """Empty when all is well. On any thread."""
        now_ns = self._clock.now_ns()
        faults = self._faults.copy()
        shown = {part: why for part, (why, until_ns) in faults.items() if now_ns < until_ns}
        return self.conditions.copy() | shown
