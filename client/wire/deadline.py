"""The time limit of a call, shared by all of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...proto.errors import DeadlineExceeded

#: A transfer that is slower than this as a whole has failed.
MIN_TRANSFER_BYTES_PER_S: Final = 64 * 2**20


class Deadline:
    """The moment by which a call has to end."""

    __slots__ = ("_at_s", "_clock")

    def __init__(
        self, within_ms: float, transfer_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`transfer_bytes`: size of the payloads to transfer, which adds to the time."""
        self._clock = clock
        self._at_s = clock() + within_ms / 1e3 + transfer_bytes / MIN_TRANSFER_BYTES_PER_S

    def left_s(self) -> float:
        """Seconds left, more than 0. Raises DeadlineExceeded when the deadline has passed."""
        left_s = self._at_s - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed before the daemon could be asked")
        return left_s
