"""The time limit of a call, and the end of a call that nobody waits for any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ...proto.errors import DeadlineExceeded

#: A transfer that is slower than this as a whole has failed.
MIN_TRANSFER_BYTES_PER_S: Final = 64 * 2**20


class Abandonment:
    """Ends a call early, because its caller no longer waits for it. Thread-safe.

    The call's thread must stop writing into its caller's buffers soon. So what may block for long
    there is woken, and every step that asks for the time left gets an error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], object]] = []
        self.abandoned = False

    def abandon(self) -> None:
        """Wake what blocks in the call. It does not block, and may be called twice."""
        with self._lock:
            self.abandoned = True
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def add(self, wake: Callable[[], object]) -> None:
        """Call `wake()` when the call is abandoned, or at once if it was."""
        with self._lock:
            if not self.abandoned:
                self._wakes.append(wake)
                return
        wake()

    def remove(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if wake in self._wakes:
                self._wakes.remove(wake)


#: That of the call that this thread makes. None: its caller waits until it returns.
ABANDONMENT: Final[ContextVar[Abandonment | None]] = ContextVar("abandonment", default=None)


@contextmanager
def woken(wake: Callable[[], object]) -> Iterator[None]:
    """While the context lasts, abandoning this thread's call calls `wake()`."""
    abandonment = ABANDONMENT.get()
    if abandonment is None:
        yield
        return
    abandonment.add(wake)
    try:
        yield
    finally:
        abandonment.remove(wake)


class Deadline:
    """The moment by which a call has to end, or at once if it is abandoned."""

    __slots__ = ("_abandonment", "_at_s", "_clock")

    def __init__(
        self, within_ms: float, transfer_bytes: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`transfer_bytes`: size of the payloads to transfer, which adds to the time."""
        self._clock = clock
        self._at_s = clock() + within_ms / 1e3 + transfer_bytes / MIN_TRANSFER_BYTES_PER_S
        self._abandonment = ABANDONMENT.get()

    def left_s(self) -> float:
        """Seconds left, more than 0. Raises DeadlineExceeded when the deadline has passed."""
        if self._abandonment is not None and self._abandonment.abandoned:
            raise DeadlineExceeded("nobody waits for this call any more")
        left_s = self._at_s - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed before the daemon could be asked")
        return left_s

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool]) -> None:
        """Wait, with `condition` held, until `ready()`. Raises DeadlineExceeded."""

        def wake() -> None:
            with condition:
                condition.notify_all()

        abandonment = self._abandonment
        if abandonment is None:
            while not ready():
                condition.wait(self.left_s())
            return
        # `add` may call `wake` at once, in this thread: the condition's lock is re-entrant.
        abandonment.add(wake)
        try:
            while not ready():
                condition.wait(self.left_s())
        finally:
            abandonment.remove(wake)
