"""An asyncio event loop whose time is a world's, in one fiber of a simulated process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from tests.sim.threads import SimExecutor
from tests.sim.world import Killed, World


class _Selector:
    """What a loop waits in when it has nothing to do."""

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
    """Belongs to the fiber that makes it. When its process is killed, `run` lets what its tasks
    still do unwind, without anything of it being seen."""

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
        """In the order in which they were made: sets of tasks have none."""
        return self._numbers[task]

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: what comes from outside comes from other fibers."""

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
        what = f"{context.get('message')}: {problem!r}"
        self.world.found("nothing ends in silence", what, problem)

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]  # what BaseEventLoop calls again and again
        if self.process.dead and not self._unwinding:
            raise Killed

    _unwinding = False

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Until `main` ends, or the process."""
        try:
            self.run_until_complete(main)
        finally:
            self._unwinding = True
            if self.process.dead:
                self._let_the_others_end()
            self._unwind()
            if self._default is not None:
                self._default.shutdown()
            self.close()

    def _let_the_others_end(self) -> None:
        """What they were doing for this loop is over then."""
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
