"""How long to wait before the next attempt to reach a daemon that does not answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

INITIAL_MS: Final = 50.0
MAX_MS: Final = 2_000.0
FACTOR: Final = 2.0


class Backoff:
    """No wait for the first attempt, then doubling waits up to a maximum.

    Each wait is drawn from its upper half, so that clients that lost one daemon at the same
    moment don't come back at the same moment.
    """

    def __init__(
        self,
        initial_ms: float = INITIAL_MS,
        max_ms: float = MAX_MS,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` gives numbers in [0, 1)."""
        self._initial_ms = initial_ms
        self._max_ms = max_ms
        self._draw = draw
        self._next_ms = 0.0

    def next_s(self) -> float:
        """The wait before the next attempt, in seconds."""
        wait_ms = self._next_ms
        self._next_ms = min(self._max_ms, max(self._initial_ms, wait_ms * FACTOR))
        return wait_ms * (1 + self._draw()) / 2 / 1e3

    def reset(self) -> None:
        """The daemon answered: its next loss is a new story."""
        self._next_ms = 0.0
