"""One simulated machine: a clock, processes made of fibers, and who of them runs next.

A fiber is a greenlet that stands for a thread. It hands over to the next where it waits or where
something takes time (`World.operate`), and nowhere else. Which is next, and how long everything
takes, is drawn from the seed. So real code, threads and locks and all, runs in an order that the
seed alone decides.
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

#: What a step costs that takes no time worth speaking of.
STEP_NS: Final = 1_000
_UNWINDING_STEPS: Final = 20_000


class Killed(BaseException):
    """The process ended here. Not an Exception: nothing of it may go on."""


class Failure(BaseException):
    """A promise was broken."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise
        self.detail = detail

    def alone(self) -> Failure:
        """The same without what it was raised from, which is told in words."""
        told = Failure(self.promise, self.detail)
        if self.__cause__ is not None:
            told.add_note("".join(traceback.format_exception(self.__cause__)))
        return told


class Process:
    """Some fibers that live and die together. `ops` counts what it did: a number at which it can
    be killed."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.stopped_until_ns = 0
        self.ops = 0
        self.kill_at_op: int | None = None
        #: the same, counted in syncs that it asked a device for
        self.kill_at_sync: int | None = None
        self.stop_at_op: int | None = None
        self.stop_for_ns = 0
        self.fibers: list[Fiber] = []
        #: called in the moment of its death
        self.when_dead: list[Callable[[], None]] = []
        world.processes.append(self)

    def check(self) -> None:
        if self.dead:
            raise Killed

    def die(self) -> None:
        """At once: none of its fibers does anything more."""
        if self.dead:
            return
        self.dead = True
        for told in self.when_dead:
            told()
        for fiber in self.fibers:
            if fiber is not self.world.current:
                self.world.wake(fiber)

    def reap(self) -> None:
        """Wait until all its fibers have ended, as they do when it is dead."""
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
        #: changes whenever it runs: what was to wake it before then does not any more
        self.epoch = 0
        self.done = False
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
            world.found("nothing ends in silence", f"{self.name} ended with {problem!r}", problem)
        self.done = True
        for fiber in self.waiting_for_end:
            world.wake(fiber)
        world.current = world.following()
        # Where a greenlet goes on that has come to its end.
        self.greenlet.parent = world.current.greenlet


class World:
    """See the module. Who makes it is its first fiber, `main`."""

    def __init__(self, seed: int, *, yield_rate: float = 0.1) -> None:
        self.random = random.Random(seed)
        #: for what code under test asks the system for: keys, secrets
        self.entropy = random.Random(f"entropy {seed}")
        self.now_ns = 10**12
        #: the wall clock is so far ahead of the monotonic one
        self.wall_offset_ns = 17 * 10**17
        self.yield_rate = yield_rate
        self.failure: Failure | None = None
        self.unwinding = False
        #: changes with everything that is scheduled: equal for equal runs
        self.digest = 0
        self.switches = 0
        self.processes: list[Process] = []
        self._heap: list[tuple[int, float, int, Any, int]] = []
        self._number = 0
        process = Process(self, "world")
        self.main = Fiber(process, "main", None)
        self.current = self.main
        self._thread = threading.get_ident()

    # ---- what fibers do

    def here(self) -> bool:
        """Is this one of its fibers, and not a thread of something else?"""
        return self._thread == threading.get_ident()

    def operate(self, usual_ns: int = STEP_NS) -> None:
        """The current fiber does something that others could get in between of."""
        process = self.current.process
        process.check()
        process.ops += 1
        if process.kill_at_op is not None and process.ops >= process.kill_at_op:
            process.die()
            raise Killed
        self.now_ns += usual_ns
        if process.stop_at_op is not None and process.ops >= process.stop_at_op:
            process.stop_at_op = None
            process.stopped_until_ns = self.now_ns + process.stop_for_ns
            self.pass_time(1)
        if self.random.random() < self.yield_rate:
            self.pass_time(self.delay_ns())

    def synced(self) -> None:
        """A device has stored something for the current fiber: a moment to lose power at."""
        process = self.current.process
        if process.kill_at_sync is not None:
            process.kill_at_sync -= 1
            if process.kill_at_sync <= 0:
                process.die()
                raise Killed

    def delay_ns(self) -> int:
        """Mostly below a millisecond, sometimes much more."""
        draw = self.random.random()
        return int(10 ** (3 + 3 * draw)) if draw < 0.97 else int(self.random.random() * 3e8)

    def pass_time(self, for_ns: int) -> None:
        until_ns = self.now_ns + for_ns
        while self.now_ns < until_ns:
            self.block(until_ns)

    def block(self, until_ns: int | None = None) -> None:
        """The current fiber waits until it is woken, or until then. May return early."""
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
        """Have something called that takes no time and waits for nothing."""
        self._push(self.now_ns + in_ns, callback, -1)

    def _push(self, at_ns: int, what: Any, epoch: int) -> None:
        self._number += 1
        # What a dead process still does is seen by nobody.
        order = 0.0 if self.unwinding or self.current.process.dead else self.random.random()
        heapq.heappush(self._heap, (at_ns, order, self._number, what, epoch))

    # ---- who is next

    def hand_over(self, me: Fiber) -> None:
        """Let the next run; returns when it is this one's turn again."""
        following = self.following()
        if following is me:
            return
        self.current = following
        # To asyncio all fibers are one thread.
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        following.greenlet.switch()
        asyncio._set_running_loop(loop)

    def following(self) -> Fiber:
        """Who runs next."""
        while True:
            if self.failure is not None and not self.unwinding:
                self.main.epoch += 1
                return self.main
            if not self._heap:
                self.found("no wait without a bound", "nobody will ever run again")
                continue
            at_ns, _, _, what, epoch = heapq.heappop(self._heap)
            if not isinstance(what, Fiber):
                self.now_ns = max(self.now_ns, at_ns)
                what()
                continue
            if what.done or what.epoch != epoch:
                continue
            process = what.process
            if process.stopped_until_ns > max(at_ns, self.now_ns) and not process.dead:
                self._push(process.stopped_until_ns, what, epoch)
                continue
            self.now_ns = max(self.now_ns, at_ns)
            what.epoch += 1
            self.switches += 1
            self.digest = zlib.crc32(b"%d %s" % (self.now_ns, what.name.encode()), self.digest)
            return what

    # ---- what is found

    def found(self, promise: str, detail: str, cause: BaseException | None = None) -> None:
        """A promise is broken: nothing more happens than that the run ends."""
        if self.unwinding:
            return
        if self.failure is None:
            self.failure = Failure(promise, f"{detail} [at {self.now_ns / 1e9 - 1000:.6f} s]")
            self.failure.__cause__ = cause

    def fail(self, promise: str, detail: str) -> None:
        """The same; does not return to a fiber."""
        self.found(promise, detail)
        if self.current is self.main:
            self.raise_found()
        if not self.unwinding and self.here():
            self.block()

    def raise_found(self) -> None:
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """Kill everything. From `main`."""
        self.unwinding = True
        for process in self.processes:
            if process is not self.main.process:
                process.die()
        for process in self.processes:
            if process is not self.main.process:
                process.reap()
