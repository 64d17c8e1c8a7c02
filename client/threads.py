"""A few threads of a client's own, for what must not be done in the caller's.

Not concurrent.futures: its threads take no work once the interpreter has begun to end, and the
interpreter waits for them. These are daemon threads: they work as long as anything does, and
nothing waits for them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

Work: TypeAlias = Callable[[], None]


class Threads:
    """Runs work in at most `max_threads` threads, made when they are needed. Thread-safe."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False
        self._numbers = count()

    def submit(self, work: Work) -> bool:
        """Have `work` done, first come, first served; it must not raise. False: it will not be,
        since this was closed or the interpreter starts no thread any more."""
        with self._changed:
            if self._closed or sys.is_finalizing():
                return False
            wanted = len(self._queue) >= self._idle and len(self._threads) < self._max_threads
            if wanted and not self._start() and not self._threads:
                return False
            self._queue.append(work)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Take no more work. The threads end when they have done what was submitted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of a closed one. False: not all of them ended in time.

        From one of them: wait for the others.
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

    def _start(self) -> bool:
        name = f"{self._name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or the system has no more
            return False
        self._threads.add(thread)
        return True

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # an idle thread keeps nothing alive

    def _next(self) -> Work | None:
        with self._changed:
            self._idle += 1
            while not self._queue and not self._closed:
                self._changed.wait()
            self._idle -= 1
            if self._queue:
                return self._queue.popleft()
            self._threads.discard(threading.current_thread())
            return None
