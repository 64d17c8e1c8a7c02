"""How slowly a client may move bytes while it holds memory that others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ...proto.errors import LimitReached

#: A transfer that moves fewer bytes a second than this, over a whole stall timeout, stands still.
MIN_BYTES_PER_S: Final = 16 * 2**10


class Pace:
    """The time for which a transfer may wait for its client. It begins again with each
    `stall_s * MIN_BYTES_PER_S` bytes: a byte now and then does not hold room for ever. Only waiting
    for the client counts, not what the daemon takes itself."""

    def __init__(self, stall_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.stall_s: Final = stall_s
        self._enough_bytes = max(1, int(stall_s * MIN_BYTES_PER_S))
        self._now_s = now_s
        self._moved_bytes = 0
        self._waited_s = 0.0

    def moved(self, size_bytes: int) -> None:
        """So many bytes were moved since the last call."""
        self._moved_bytes += size_bytes
        if self._moved_bytes >= self._enough_bytes:
            self._moved_bytes, self._waited_s = 0, 0.0

    def waited(self, seconds: float) -> None:
        """It was waited for the client for so long."""
        self._waited_s += seconds

    @property
    def left_s(self) -> float:
        """How long the transfer may still wait."""
        return max(0.0, self.stall_s - self._waited_s)

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Around a wait for the client, which may take the yielded time. Raises LimitReached when
        none is left, also in place of a TimeoutError."""
        left_s, began_s = self.left_s, self._now_s()
        if not left_s:
            raise self.error()
        try:
            yield left_s
        except TimeoutError:
            raise self.error() from None
        finally:
            self.waited(self._now_s() - began_s)

    def error(self) -> LimitReached:
        """What a client is told that is too slow."""
        return LimitReached(
            f"the client stood still: it moved fewer than {self._enough_bytes} bytes while it was "
            f"waited for it for {self.stall_s:g} s"
        )
