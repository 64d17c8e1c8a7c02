"""Replacements for `threading` and `ThreadPoolExecutor` in a simulated process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tests.sim.world import Fiber, Killed, World


class SimLock:
    """Stands in for `threading.Lock`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiting: deque[Fiber] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        until_ns = world.now_ns + int(timeout * 1e9) if timeout >= 0 else None
        while self._held:
            if not blocking or (until_ns is not None and world.now_ns >= until_ns):
                return False
            self._waiting.append(world.current)
            world.block(until_ns)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        while self._waiting:
            self._world.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """Stands in for `threading.Condition`."""

    def __init__(self, world: World, lock: Any = None) -> None:
        self._world = world
        self._lock = lock or SimLock(world)
        self._waiting: list[tuple[Fiber, list[bool]]] = []

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        until_ns = None
        if timeout is not None:
            # At least a nanosecond, or a wait for less would end at once and for ever.
            until_ns = world.now_ns + (int(timeout * 1e9) or 1)
        notified = [False]
        waiting = (world.current, notified)
        self._waiting.append(waiting)
        self._lock.release()
        try:
            while not notified[0] and (until_ns is None or world.now_ns < until_ns):
                world.block(until_ns)
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            self._lock.acquire()
        return notified[0]

    def wait_for(self, condition: Callable[[], Any], timeout: float | None = None) -> Any:
        until_ns = None if timeout is None else self._world.now_ns + int(timeout * 1e9)
        while not (result := condition()):
            left_s = None if until_ns is None else (until_ns - self._world.now_ns) / 1e9
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        for fiber, notified in self._waiting[:n]:
            notified[0] = True
            self._world.wake(fiber)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    """Stands in for `threading.Event`."""

    def __init__(self, world: World) -> None:
        self._condition = SimCondition(world)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            self._condition.wait_for(self.is_set, timeout)
        return self._set


class SimThread:
    """Stands in for `threading.Thread`: a fiber of the process that starts it."""

    def __init__(
        self,
        group: None = None,  # noqa: ARG002  # threading.Thread has it
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        world: World,
    ) -> None:
        self._world = world
        self._target = target
        self._args, self._kwargs = args, kwargs or {}
        self.name = name or "thread"
        self.daemon = daemon
        self._fiber: Fiber | None = None

    def start(self) -> None:
        target = self._target
        assert target is not None
        self._fiber = self._world.current.process.spawn(
            self.name, lambda: target(*self._args, **self._kwargs) and None
        )

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.done

    def join(self, timeout: float | None = None) -> None:
        world, fiber = self._world, self._fiber
        assert fiber is not None
        until_ns = None if timeout is None else world.now_ns + int(timeout * 1e9)
        while not fiber.done and (until_ns is None or world.now_ns < until_ns):
            fiber.waiting_for_end.append(world.current)
            world.block(until_ns)


class SimExecutor(Executor):
    """Stands in for `ThreadPoolExecutor`: its workers are fibers of the process that creates it."""

    def __init__(self, world: World, max_workers: int = 2, name: str = "worker") -> None:
        self._world = world
        self._process = world.current.process
        self._max_workers = max_workers
        self._name = name
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers: list[Fiber] = []
        self._idle: list[Fiber] = []
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        if self._process.dead:
            future.set_exception(RuntimeError("the process died"))
            return future
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        if self._idle:
            self._world.wake(self._idle.pop())
        elif len(self._workers) < self._max_workers:
            name = f"{self._name}{len(self._workers) + 1}"
            self._workers.append(self._process.spawn(name, self._work))
        return future

    def _work(self) -> None:
        world = self._world
        try:
            while True:
                while not self._jobs:
                    if self._is_shut_down:
                        return
                    self._idle.append(world.current)
                    world.block()
                future, job = self._jobs.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    world.operate()
                    result = job()
                except Killed:
                    future.set_exception(RuntimeError("the process died"))
                    raise
                except BaseException as problem:
                    future.set_exception(problem)
                else:
                    future.set_result(result)
        finally:
            if self._process.dead:
                self._fail_jobs()

    def _fail_jobs(self) -> None:
        while self._jobs:
            future = self._jobs.popleft()[0]
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError("the process died"))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        world = self._world
        self._is_shut_down = True
        if cancel_futures or self._process.dead:
            while self._jobs:
                self._jobs.popleft()[0].cancel()
        while self._idle:
            world.wake(self._idle.pop())
        for worker in self._workers:
            while wait and not (worker.done or self._process.dead):
                worker.waiting_for_end.append(world.current)
                world.block()
