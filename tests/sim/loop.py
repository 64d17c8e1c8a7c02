"""An asyncio event loop on simulated time. It runs in one fiber of a simulated process."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from tests.sim.threads import SimExecutor
from tests.sim.world import Killed, World


class _Selector:
    """Blocks the fiber while the loop is idle."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        loop, world = self._loop, self._loop.world
        if loop.process.dead:
            return []
        if timeout is None:
            world.block()
        elif timeout <= 0:
            world.operate()
        else:
            world.block(world.now_ns + math.ceil(timeout * 1e9))
        return []


class SimLoop(asyncio.BaseEventLoop):
    """Belongs to the fiber that creates it. When its process is killed, `run` unwinds the remaining
    tasks without visible effects."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.fiber = world.current
        self.process = world.current.process
        self._selector = _Selector(self)
        self._clock_resolution = 1e-9
        self._default: SimExecutor | None = None
        self._numbers: dict[asyncio.Task[Any], int] = {}

    def time(self) -> float:
        return self.world.now_ns / 1e9

    def create_task(self, coro: Any, **named: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **named)
        self._numbers[task] = len(self._numbers)
        return task

    def number_of(self, task: asyncio.Task[Any]) -> int:
        """The creation number of a task. Sorting by it gives sets of tasks a fixed order."""
        return self._numbers[task]

    def _process_events(self, event_list: list[Any]) -> None:
        """There is no I/O to poll: events come from other fibers."""

    def _write_to_self(self) -> None:
        if self.world.current is not self.fiber:
            self.world.wake(self.fiber)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        if executor is None:
            if self._default is None:
                self._default = SimExecutor(self.world, name="default")
            executor = self._default
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, Killed) or self.process.dead:
            return
        detail = f"{context.get('message')}: {problem!r}"
        self.world.found("no task or thread fails silently", detail, problem)

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]  # BaseEventLoop calls it for each iteration
        if self.process.dead and not self._unwinding:
            raise Killed

    _unwinding = False

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run until `main` or the process ends."""
        try:
            # It would keep those of another process's loop, in a cycle that is never collected.
            sys.set_asyncgen_hooks(None, None)
            self.run_until_complete(main)
        finally:
            self._unwinding = True
            if self.process.dead:
                self._end_other_fibers()
            self._unwind()
            if self._default is not None:
                self._default.shutdown()
            self.close()

    def _end_other_fibers(self) -> None:
        """Let the other fibers of the dead process unwind, so that no job of this loop is left."""
        for _ in range(1000):
            others = [f for f in self.process.fibers if not (f.done or f is self.fiber)]
            if not others:
                return
            for fiber in others:
                self.world.wake(fiber)
            self.world.wake(self.fiber)
            self.world.hand_over(self.fiber)

    def _unwind(self) -> None:
        for _ in range(200):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in sorted(tasks, key=self.number_of):
                task.cancel()
            self.call_soon(self.stop)
            self.run_forever()
