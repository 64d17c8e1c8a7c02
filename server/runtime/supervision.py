"""Nothing that works in the background ends in silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from .health import Health

log = structlog.get_logger("prefixd.supervision")


class Supervisor:
    """Tasks and threads by their names. One that dies is a health condition with its name; where
    the daemon can't go on without it, `give_up` is told why, on the loop."""

    def __init__(self, health: Health, give_up: Callable[[str], None]) -> None:
        self._health = health
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        #: a dict, for they are cancelled in the order in which they began
        self._tasks: dict[asyncio.Task[None], None] = {}

    def task(
        self, name: str, work: Coroutine[Any, Any, None], *, vital: bool = False
    ) -> asyncio.Task[None]:
        """Start it. A task that is cancelled has not died."""
        task = self._loop.create_task(work, name=name)
        self._tasks[task] = None

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.pop(ended, None)
            if not ended.cancelled() and (problem := ended.exception()) is not None:
                self.died(name, problem, vital=vital)

        task.add_done_callback(done)
        return task

    def cancel(self) -> None:
        """The daemon ends: no task goes on."""
        for task in self._tasks:
            task.cancel()

    def thread(self, name: str, work: Callable[[], None], *, vital: bool = False) -> None:
        """Start it as a daemon thread: one that is stuck in I/O keeps no process."""

        def run() -> None:
            try:
                work()
            except BaseException as problem:
                self.died_threadsafe(name, problem, vital=vital)

        threading.Thread(target=run, name=f"prefixd-{name}", daemon=True).start()

    def died(self, name: str, problem: BaseException, *, vital: bool) -> None:
        log.critical("died", part=name, exc_info=problem)
        self._health.conditions[name] = f"it died: {problem!r}; restart the daemon"
        if vital:
            self._give_up(f"{name} died: {problem!r}")

    def died_threadsafe(self, name: str, problem: BaseException, *, vital: bool) -> None:
        """`died`, from any thread."""
        try:
            self._loop.call_soon_threadsafe(lambda: self.died(name, problem, vital=vital))
        except RuntimeError:
            log.debug("died_after_close", part=name)

    def failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For `loop.set_exception_handler`: a callback or a task that nobody awaits
        raised. Periodic callbacks (the flusher, the pulse) go on; the fault is shown for a
        while."""
        problem = context.get("exception")
        what = str(context.get("message"))
        log.critical("unhandled", what=what, exc_info=problem)
        self._health.fault("event loop", f"{what}: {problem!r}" if problem else what)
