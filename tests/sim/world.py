"""One simulated machine: a clock, processes made of fibers, and the scheduler that runs them.

A fiber is a greenlet that stands for a thread. It yields to another fiber only where it waits and
where an operation takes time (`World.operate`). The seed decides which fiber runs next and how
long operations take. So the seed alone determines the order in which the real code runs, threads
and locks included.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
import traceback
import zlib
from collections.abc import Callable
from typing import Any, Final

from greenlet import getcurrent, greenlet

#: The duration of an operation that takes next to no time.
STEP_NS: Final = 1_000
_UNWINDING_STEPS: Final = 20_000


class Killed(BaseException):
    """Raised in every fiber of a killed process. No Exception, so that no handler continues."""


class Failure(BaseException):
    """A promise of the daemon was broken."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise
        self.detail = detail

    def without_frames(self) -> Failure:
        """A copy that keeps its cause only as text, so that it refers to no frames of the run."""
        copy = Failure(self.promise, self.detail)
        if self.__cause__ is not None:
            copy.add_note("".join(traceback.format_exception(self.__cause__)))
        return copy


class Process:
    """Fibers that live and die together. `ops` counts the operations of the process, so that it
    can be killed or stopped at a given one."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.stopped_until_ns = 0
        self.ops = 0
        self.kill_at_op: int | None = None
        #: syncs of a device until it is killed
        self.kill_at_sync: int | None = None
        self.stop_at_op: int | None = None
        self.stop_for_ns = 0
        #: how often it was stopped
        self.stops = 0
        self.fibers: list[Fiber] = []
        #: called at the moment of its death
        self.when_dead: list[Callable[[], None]] = []
        world.processes.append(self)

    def check(self) -> None:
        if self.dead:
            raise Killed

    def die(self) -> None:
        """Kill the process: none of its fibers performs another operation."""
        if self.dead:
            return
        self.dead = True
        for callback in self.when_dead:
            callback()
        for fiber in self.fibers:
            if fiber is not self.world.current:
                self.world.wake(fiber)

    def reap(self) -> None:
        """Wait until all fibers have ended. Those of a dead process are woken to unwind."""
        for _ in range(_UNWINDING_STEPS):
            if all(fiber.done for fiber in self.fibers):
                self.fibers.clear()
                return
            for fiber in self.fibers:
                if self.dead:
                    self.world.wake(fiber)
            self.world.block(self.world.now_ns + (1 if self.dead else 1_000_000))
        raise AssertionError(f"{self.name} does not end: {[f.name for f in self.fibers]}")

    def spawn(self, name: str, target: Callable[[], None]) -> Fiber:
        fiber = Fiber(self, f"{self.name}/{name}", target)
        self.fibers.append(fiber)
        self.world.wake(fiber)
        return fiber


class Fiber:
    """See the module."""

    def __init__(self, process: Process, name: str, target: Callable[[], None] | None) -> None:
        self.process = process
        self.name = name
        #: changes whenever it runs, which makes earlier scheduled wake-ups void
        self.epoch = 0
        self.done = False
        #: How long it was kept from going on in operations, all of them together.
        self.delayed_ns = 0
        self.waiting_for_end: list[Fiber] = []
        self._target = target
        if target is None:
            self.greenlet = getcurrent()
        else:
            self.greenlet = greenlet(self._run, process.world.main.greenlet)

    def _run(self, *_: object) -> None:
        world, target = self.process.world, self._target
        assert target is not None
        try:
            if not self.process.dead:
                target()
        except Killed:
            pass
        except BaseException as problem:
            world.found(
                "no task or thread fails silently", f"{self.name} ended with {problem!r}", problem
            )
        self.done = True
        for fiber in self.waiting_for_end:
            world.wake(fiber)
        world.current = world.following()
        # A greenlet that ends switches to its parent.
        self.greenlet.parent = world.current.greenlet


class World:
    """See the module. Its creator becomes its first fiber, `main`."""

    def __init__(self, seed: int, *, yield_rate: float = 0.1) -> None:
        self.random = random.Random(seed)
        #: replaces the system's random source: keys and secrets come from it
        self.entropy = random.Random(f"entropy {seed}")
        self.now_ns = 10**12
        #: how far the wall clock is ahead of the monotonic clock
        self.wall_offset_ns = 17 * 10**17
        self.yield_rate = yield_rate
        self.failure: Failure | None = None
        self.unwinding = False
        #: a checksum of all scheduling decisions: equal runs have equal digests
        self.digest = 0
        self.switches = 0
        self.processes: list[Process] = []
        self._heap: list[tuple[int, float, int, Any, int]] = []
        self._number = 0
        process = Process(self, "world")
        self.main = Fiber(process, "main", None)
        self.current = self.main
        self._thread = threading.get_ident()

    # ---- called by fibers

    def here(self) -> bool:
        """Whether the caller is a fiber of this world rather than another thread."""
        return self._thread == threading.get_ident()

    def operate(self, usual_ns: int = STEP_NS) -> None:
        """The current fiber performs an operation, after which another fiber may run."""
        process = self.current.process
        process.check()
        process.ops += 1
        if process.kill_at_op is not None and process.ops >= process.kill_at_op:
            process.die()
            raise Killed
        self.now_ns += usual_ns
        if process.stop_at_op is not None and process.ops >= process.stop_at_op:
            process.stop_at_op = None
            process.stops += 1
            process.stopped_until_ns = self.now_ns + process.stop_for_ns
            self.pass_time(1)
        if self.random.random() < self.yield_rate:
            began_ns = self.now_ns
            self.pass_time(self.delay_ns())
            self.current.delayed_ns += self.now_ns - began_ns

    def synced(self) -> None:
        """A device completed a sync of the current fiber. The machine may lose power here."""
        process = self.current.process
        if process.kill_at_sync is not None:
            process.kill_at_sync -= 1
            if process.kill_at_sync <= 0:
                process.die()
                raise Killed

    def delay_ns(self) -> int:
        """A random delay: mostly below a millisecond, rarely up to 300 ms."""
        draw = self.random.random()
        return int(10 ** (3 + 3 * draw)) if draw < 0.97 else int(self.random.random() * 3e8)

    def pass_time(self, for_ns: int) -> None:
        until_ns = self.now_ns + for_ns
        while self.now_ns < until_ns:
            self.block(until_ns)

    def block(self, until_ns: int | None = None) -> None:
        """The current fiber waits until it is woken or the time comes. May return early."""
        me = self.current
        me.process.check()
        if until_ns is not None:
            self._push(until_ns, me, me.epoch)
        self.hand_over(me)
        me.process.check()
        if me is self.main and not self.unwinding:
            self.raise_found()

    def wake(self, fiber: Fiber) -> None:
        if not fiber.done:
            self._push(self.now_ns, fiber, fiber.epoch)

    def later(self, in_ns: int, callback: Callable[[], None]) -> None:
        """Schedule a callback that neither blocks nor takes time."""
        self._push(self.now_ns + in_ns, callback, -1)

    def _push(self, at_ns: int, target: Any, epoch: int) -> None:
        self._number += 1
        # Operations of a dead process have no visible effects, so they must not draw from the seed.
        order = 0.0 if self.unwinding or self.current.process.dead else self.random.random()
        heapq.heappush(self._heap, (at_ns, order, self._number, target, epoch))

    # ---- the scheduler

    def hand_over(self, me: Fiber) -> None:
        """Switch to the next fiber. Returns when this one is scheduled again."""
        following = self.following()
        if following is me:
            return
        self.current = following
        # asyncio sees all fibers as one thread, so each fiber restores its own running loop.
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        following.greenlet.switch()
        asyncio._set_running_loop(loop)

    def following(self) -> Fiber:
        """The fiber that runs next. Callbacks that are due before it are called."""
        while True:
            if self.failure is not None and not self.unwinding:
                self.main.epoch += 1
                return self.main
            if not self._heap:
                self.found("no wait without a bound", "no fiber can ever run again")
                continue
            at_ns, _, _, target, epoch = heapq.heappop(self._heap)
            if not isinstance(target, Fiber):
                self.now_ns = max(self.now_ns, at_ns)
                target()
                continue
            if target.done or target.epoch != epoch:
                continue
            process = target.process
            if process.stopped_until_ns > max(at_ns, self.now_ns) and not process.dead:
                self._push(process.stopped_until_ns, target, epoch)
                continue
            self.now_ns = max(self.now_ns, at_ns)
            target.epoch += 1
            self.switches += 1
            self.digest = zlib.crc32(b"%d %s" % (self.now_ns, target.name.encode()), self.digest)
            return target

    # ---- broken promises

    def found(self, promise: str, detail: str, cause: BaseException | None = None) -> None:
        """Record a broken promise. The run ends when `main` is scheduled, which is next."""
        if self.unwinding:
            return
        if self.failure is None:
            self.failure = Failure(promise, f"{detail} [at {self.now_ns / 1e9 - 1000:.6f} s]")
            self.failure.__cause__ = cause

    def fail(self, promise: str, detail: str) -> None:
        """Record a broken promise and end the run: does not return to a fiber of the world."""
        self.found(promise, detail)
        if self.current is self.main:
            self.raise_found()
        if not self.unwinding and self.here():
            self.block()

    def raise_found(self) -> None:
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Kill all processes and wait for their fibers. Called from `main`."""
        self.unwinding = True
        for process in self.processes:
            if process is not self.main.process:
                process.die()
        for process in self.processes:
            if process is not self.main.process:
                process.reap()
