"""Threads of the client's own, and a bounded queue of calls for them.

The standard library's executors don't fit: their threads take no work once the interpreter has
begun to end, and the interpreter waits for them. These are daemon threads: they work as long as
the process runs, and nothing waits for them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class ThreadPool:
    """Runs work in at most `max_threads` threads, started when needed. Thread-safe."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False
        self._numbers = count()

    def submit(self, work: Callable[[], None]) -> bool:
        """Queue `work`, which must not raise. False: it will not run, because the pool is closed
        or the interpreter starts no more threads."""
        with self._changed:
            if self._closed or sys.is_finalizing():
                return False
            grow = len(self._queue) >= self._idle and len(self._threads) < self._max_threads
            if grow and not self._start() and not self._threads:
                return False
            self._queue.append(work)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Take no more work. The threads end after the work that was submitted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of a closed pool. False: not all of them ended in time.

        Called in one of them, it waits for the others.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    @property
    def inside(self) -> bool:
        """Is the caller one of these threads?"""
        return threading.current_thread() in self._threads

    def run_queued(self, timeout_s: float) -> bool:
        """Run queued work in the calling thread. False: some is left after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with self._changed:
                if not self._queue:
                    return True
                work = self._queue.popleft()
            work()
        return not self._queue

    def _start(self) -> bool:
        name = f"{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or the system has no more threads
            return False
        self._threads.add(thread)
        return True

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # an idle thread keeps nothing alive

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._idle += 1
            while not self._queue and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._threads.discard(threading.current_thread())
            return None


class CallQueue:
    """Makes calls in the order of their arrival, in a thread pool of its own. Thread-safe.

    One thread makes them one after the other: the later blocks of a chain follow the earlier
    ones, and a single stream fills the connection. The queue is bounded: calls beyond are dropped.
    """

    def __init__(
        self, max_pending: int, max_pending_bytes: int = 0, *, threads: int = 1, name: str = "saver"
    ) -> None:
        """At most `max_pending` calls are pending, and at most `max_pending_bytes` of memory that
        they refer to (0: any amount). A call larger than that is taken when nothing else is."""
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        #: Calls that are queued or running, and their bytes.
        self._pending = 0
        self._pending_bytes = 0
        self._dropping = False
        self._threads = ThreadPool(f"prefixd-{name}", threads)

    @property
    def pending(self) -> tuple[int, int]:
        """Calls that are queued or running, and the bytes that they refer to."""
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
        self,
        call: Callable[[], T],
        drop: Callable[[], T],
        size_bytes: int = 0,
        future: Future[T] | None = None,
    ) -> Future[T]:
        """Queue `call`, or run `drop` at once when the queue takes nothing (more). Never blocks.

        The future (`future`, or a new one) gets what they return or raise. A future cancelled
        before its turn makes no call.
        """
        future = Future() if future is None else future

        def run() -> None:
            try:
                resolve(future, drop if self._dropping else call)
            finally:
                with self._changed:
                    self._pending -= 1
                    self._pending_bytes -= size_bytes
                    self._changed.notify_all()

        with self._changed:
            taken = self._takes(size_bytes) and self._threads.submit(run)
            if taken:
                self._pending += 1
                self._pending_bytes += size_bytes
        if not taken:
            resolve(future, drop)
        return future

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. False: that took longer.

        In the done-callback of a call, which holds up the next ones, it makes those itself.
        """
        if self._threads.inside:
            return self._threads.run_queued(timeout_s)
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def drop_pending(self) -> None:
        """From now on, drop the queued calls and any new ones."""
        with self._changed:
            self._dropping = True

    def close(self, timeout_s: float) -> bool:
        """After `drop_pending`: wait for the running calls. False: they took longer."""
        self._threads.close()
        return self._threads.join(timeout_s)


def resolve(future: Future[T], action: Callable[[], T]) -> None:
    """Give `future` what `action` returns or raises, unless it was cancelled before."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as problem:
        future.set_exception(problem)
