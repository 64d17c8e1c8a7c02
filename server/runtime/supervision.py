"""Whether the daemon is well: health, and background tasks and threads, none of which ends
unnoticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from .clock import Clock

T = TypeVar("T")

log = structlog.get_logger("prefixd.supervision")

#: How long a single fault makes the daemon unhealthy.
FAULT_SHOWN_NS: Final = 60_000_000_000


class Health:
    """Reasons to call the daemon unhealthy, by the part that they concern.

    A condition lasts until it is over: the code that enters one into `conditions` removes it. A
    fault happened once, and is shown for a while, or until something like it succeeds. A notice,
    also by part, does not make the daemon unhealthy: it serves, but with less than it could.
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
        """What may have failed before works."""
        self._faults.pop(part, None)

    def unhealthy(self) -> dict[str, str]:
        """Empty when all is well. On any thread."""
        now_ns = self._clock.now_ns()
        faults = self._faults.copy()
        shown = {part: why for part, (why, until_ns) in faults.items() if now_ns < until_ns}
        return self.conditions.copy() | shown


class Supervisor:
    """Tasks and threads by their names. One that dies becomes a health condition of its name; where
    the daemon can't go on without it, `give_up` is called with the reason, on the loop."""

    def __init__(self, health: Health, give_up: Callable[[str], None]) -> None:
        self._health = health
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        #: a dict, because they are cancelled in the order in which they began
        self._tasks: dict[asyncio.Task[None], None] = {}

    def task(
        self, name: str, work: Coroutine[Any, Any, None], *, vital: bool = False
    ) -> asyncio.Task[None]:
        """Start it. A task that is cancelled has not died."""
        task = self._loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(partial(self._ended, name, vital))
        return task

    def thread(self, name: str, work: Callable[[], None], *, vital: bool = False) -> None:
        """Start it as a daemon thread: one that is stuck in I/O does not keep the process alive."""
        on_thread(name, work).add_done_callback(partial(self._ended, name, vital))

    def _ended(self, name: str, vital: bool, work: asyncio.Future[None]) -> None:
        if not work.cancelled() and (problem := work.exception()) is not None:
            self.died(name, problem, vital=vital)

    def cancel(self) -> None:
        """Cancel all tasks: the daemon ends."""
        for task in self._tasks:
            task.cancel()

    def died(self, name: str, problem: BaseException, *, vital: bool) -> None:
        log.critical("died", part=name, exc_info=problem)
        self._health.conditions[name] = f"it died: {problem!r}; restart the daemon"
        if vital:
            self._give_up(f"{name} died: {problem!r}")

    def died_threadsafe(self, name: str, problem: BaseException, *, vital: bool) -> None:
        """`died`, from any thread."""
        try:
            self._loop.call_soon_threadsafe(partial(self.died, name, problem, vital=vital))
        except RuntimeError:
            log.debug("died_after_close", part=name)

    def failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For `loop.set_exception_handler`: a callback, or a task that is not awaited, raised.
        Periodic callbacks (the flush, the pulse) go on; the fault is shown for a while."""
        problem = context.get("exception")
        what = str(context.get("message"))
        log.critical("unhandled", what=what, exc_info=problem)
        self._health.fault("event loop", f"{what}: {problem!r}" if problem else what)


def on_thread(name: str, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call on a daemon thread of its own: one that hangs does not keep the process
    alive. An exception that is never awaited is not logged."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not result.done():
            outcome()
            result.exception()  # marks it as retrieved

    def run() -> None:
        try:
            outcome = partial(result.set_result, call())
        except BaseException as problem:
            # A future takes no StopIteration, and SystemExit would end the loop.
            usable = isinstance(problem, Exception) and not isinstance(problem, StopIteration)
            error = problem if usable else RuntimeError(repr(problem))
            outcome = partial(result.set_exception, error)
        with suppress(RuntimeError):  # the loop ended first
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=f"prefixd-{name}", daemon=True).start()
    return result


async def ended_within(within_s: float, steps: Sequence[Callable[[], None]]) -> bool:
    """Run blocking steps side by side. False: not all of them ended in time."""
    if not steps:
        return True
    ended = [on_thread("closing", step) for step in steps]
    done, pending = await asyncio.wait(ended, timeout=within_s)
    for one in done:
        one.result()
    return not pending
