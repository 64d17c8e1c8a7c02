"""How long a call may take, from its first step to its last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...proto.errors import DeadlineExceeded

#: A transfer that is slower than this over its whole length has failed.
MIN_TRANSFER_BYTES_PER_S: Final = 64 * 2**20


class Deadline:
    """A point in time. What it bounds asks it how much is left."""

    __slots__ = ("_at_s", "_clock")

    def __init__(
        self, within_ms: float, transfer_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`transfer_bytes`: payload to be moved, which is given time of its own."""
        self._clock = clock
        self._at_s = clock() + within_ms / 1e3 + transfer_bytes / MIN_TRANSFER_BYTES_PER_S

    def left_s(self) -> float:
        """Seconds left, above 0. Raises DeadlineExceeded when there are none."""
        left_s = self._at_s - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the call's time was over before the daemon was asked")
        return left_s
