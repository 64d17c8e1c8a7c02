"""The queue of the calls that wait for their turn: saves, and what a future was asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .threads import Threads

T = TypeVar("T")


class CallQueue:
    """Does calls in the order in which they came, in threads of its own.

    With one thread one after the other: a chain's later blocks follow its earlier ones, and one
    stream fills the connection. Bounded: what does not fit is not taken. Thread-safe.
    """

    def __init__(
        self, max_pending: int, max_pending_bytes: int = 0, *, threads: int = 1, name: str = "saver"
    ) -> None:
        """`max_pending` calls are taken, with `max_pending_bytes` of memory that they refer to (0:
        any); one that is larger is taken alone."""
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        #: Waiting, first come first; not the one that is under way.
        self._waiting: deque[Callable[[], None]] = deque()
        self._sizes: deque[int] = deque()
        #: Waiting or under way.
        self._pending = 0
        self._pending_bytes = 0
        self._dropping = False
        self._thread = Threads(f"prefixd-{name}", threads)

    @property
    def pending(self) -> tuple[int, int]:
        """Calls that wait or are under way, and the bytes that they refer to."""
        with self._changed:
            return self._pending, self._pending_bytes

    def takes(self, size_bytes: int) -> bool:
        """Would a call of that size be taken at this moment?"""
        with self._changed:
            return self._takes(size_bytes)

    def _takes(self, size_bytes: int) -> bool:
        bound = self._max_pending_bytes
        fits = not bound or not self._pending_bytes or self._pending_bytes + size_bytes <= bound
        return fits and self._pending < self._max_pending and not self._dropping

    def submit(
        self, save: Callable[[], T], drop: Callable[[], T], size_bytes: int = 0
    ) -> Future[T]:
        """`save()` in its turn, or `drop()` at once if too much is waiting or nothing is taken any
        more. Never blocks.

        What they return or raise is the future's. A future that is cancelled in time is not
        done.
        """
        future: Future[T] = Future()
        with self._changed:
            taken = self._takes(size_bytes)
            if taken:
                self._waiting.append(lambda: _resolve(future, drop if self._dropping else save))
                self._sizes.append(size_bytes)
                taken = self._thread.submit(self._do_next)
                if taken:
                    self._pending += 1
                    self._pending_bytes += size_bytes
                else:
                    self._waiting.pop()
                    self._sizes.pop()
        if not taken:
            _resolve(future, drop)
        return future

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. False: it took longer than that.

        In the done-callback of a save, which the next ones wait for, it does them itself.
        """
        if self._thread.inside:
            until_s = time.monotonic() + timeout_s
            while time.monotonic() < until_s and self._waiting:
                self._do_next()
            return not self._waiting
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def drop_pending(self) -> None:
        """From now on what is waiting, or comes, is dropped."""
        with self._changed:
            self._dropping = True

    def close(self, timeout_s: float) -> bool:
        """After `drop_pending`: wait for the save that is under way. False: it took longer."""
        self._thread.close()
        return self._thread.join(timeout_s)

    def _do_next(self) -> None:
        with self._changed:
            if not self._waiting:
                return  # `flush` did it, within a done-callback
            step, size_bytes = self._waiting.popleft(), self._sizes.popleft()
        try:
            step()
        finally:
            with self._changed:
                self._pending -= 1
                self._pending_bytes -= size_bytes
                self._changed.notify_all()


def _resolve(future: Future[T], action: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as problem:
        future.set_exception(problem)
