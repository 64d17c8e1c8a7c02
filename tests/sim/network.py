"""Calls of simulated clients to a simulated daemon, with message delays, broken connections and
callers that hang up."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final
from weakref import finalize

from prefixd.proto.errors import PrefixdError
from prefixd.server.api.access import Access
from prefixd.server.api.calls import CallerGone, Process, cut_off_with, error_of
from prefixd.server.core.effects import EvictAnswer
from prefixd.server.core.events import EvictAsked
from prefixd.server.core.shares import HOST
from prefixd.server.runtime import recovery
from prefixd.server.runtime.verification import Reading
from tests.sim.daemon import SimDaemon
from tests.sim.world import Fiber, World

#: Queued after the last request of a stream, and when its connection breaks.
_END: Final = object()
_BROKEN: Final = object()
#: Numbers calls, so that sets of calls can be sorted.
_NUMBERS: Final = itertools.count()


class Unreachable(Exception):
    """No daemon serves, or the connection broke. The request may still have been carried out."""


class Refused(Exception):
    """The daemon returned an error."""

    def __init__(self, error: PrefixdError) -> None:
        super().__init__(f"{error.name}: {error}")
        self.error = error


class Caller:
    """Stands in for `prefixd.server.api.calls.Caller`."""

    tenant: Final = HOST

    def __init__(self, process: Process | None) -> None:
        self.process = process
        self.access: Access | None = None
        self._callbacks: list[Callable[[bool], None]] = []
        self._gone: bool | None = None

    def proved(self, session: int) -> None:
        """Do nothing: a connection may carry calls of any number of sessions."""

    def lasts(self) -> None:
        """Do nothing: calls are not counted here."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        if self._gone is None:
            self._callbacks.append(callback)
        else:
            callback(self._gone)

    def done(self, gone: bool) -> None:
        if self._gone is None:
            self._gone = gone
            for callback in self._callbacks:
                callback(gone)


class Call:
    """One call: any number of requests, then any number of responses.

    `method` is a key of `_SERVED`. `lost`: where the connection breaks ("": nowhere).
    """

    def __init__(
        self,
        world: World,
        daemon: SimDaemon,
        method: str,
        *,
        caller: Process | None = None,
        lost: str = "",
    ) -> None:
        self.world = world
        self.daemon = daemon
        self.method = method
        self.number = next(_NUMBERS)
        self.responses: deque[Any] = deque()
        self.ended = False
        #: why it failed; None while it runs or when it succeeded
        self.error: Exception | None = None
        self.begun_ns = world.now_ns
        self._lost = lost
        #: messages that are still delivered before a connection breaks in the middle of the call
        self._left = world.random.randrange(1, 4)
        self._client = world.current.process
        self._waiter: Fiber | None = None
        self._caller = Caller(caller)
        self._requests: asyncio.Queue[Any]
        self._task: asyncio.Task[None] | None = None
        #: arrival times of the last message each way: messages of one direction stay in order
        self._last_out_ns = self._last_in_ns = world.now_ns
        self._client.when_dead.append(self.hang_up)
        daemon.open_calls.add(self)
        self._out(self._begin)

    # ---- the client's side

    def send(self, request: Any) -> None:
        self._out(partial(self._arrived, request))

    def end(self) -> None:
        """End the stream of requests."""
        self._out(partial(self._arrived, _END))

    def hang_up(self) -> None:
        """The client abandons the call."""
        if not self.ended:
            self.broke("hung up")
            self._hung_up()

    def wait(self, until_ns: int) -> bool:
        """Wait for a response or the end of the call. False: the deadline passed first."""
        world = self.world
        while not (self.responses or self.ended):
            if world.now_ns >= until_ns:
                return False
            self._waiter = world.current
            world.block(until_ns)
        return True

    # ---- on the network

    def _delay_ns(self) -> int:
        return 20_000 + self.world.delay_ns()

    def _out(self, deliver: Callable[[], None]) -> None:
        self._last_out_ns = max(self._last_out_ns + 1, self.world.now_ns + self._delay_ns())
        self.world.later(self._last_out_ns - self.world.now_ns, partial(self._deliver, deliver))

    def _deliver(self, deliver: Callable[[], None]) -> None:
        """Hand a message to the daemon's loop, or break the connection."""
        if not self.daemon.alive or (not self.daemon.serving and self._task is None):
            self.broke("no daemon is there")
        elif self._lost == "request":
            self.broke("the connection broke")
        elif self._lost == "middle" and self._left <= 0:
            self.broke("the connection broke")
            self._on_daemon(self._caller_gone)
        else:
            self._left -= 1
            self.daemon.loop.call_soon_threadsafe(deliver)

    def _in(self, response: Any, *, over: bool) -> None:
        self._last_in_ns = max(self._last_in_ns + 1, self.world.now_ns + self._delay_ns())
        self.world.later(
            self._last_in_ns - self.world.now_ns, partial(self._received, response, over)
        )

    def _received(self, response: Any, over: bool) -> None:
        if self.ended:
            return
        if self._lost == "response":
            self.broke("the connection broke")
            self._hung_up()
            return
        if isinstance(response, Exception):
            self.error = response
        elif response is not None:
            self.responses.append(response)
        self.ended = over
        if over:
            self.daemon.open_calls.discard(self)
            self._on_daemon(partial(self._caller.done, False))
        if self._waiter is not None:
            self.world.wake(self._waiter)

    def broke(self, why: str) -> None:
        """End the call because its connection broke."""
        self.daemon.open_calls.discard(self)
        if not self.ended:
            self.ended, self.error = True, Unreachable(why)
            if self._waiter is not None:
                self.world.wake(self._waiter)

    def _hung_up(self) -> None:
        self._out(self._caller_gone)

    def _on_daemon(self, callback: Callable[[], None]) -> None:
        if self.daemon.alive:
            self.daemon.loop.call_soon_threadsafe(callback)

    # ---- the daemon's side, on its loop

    def _begin(self) -> None:
        self._requests = asyncio.Queue()
        self._task = self.daemon.loop.create_task(self._serve())
        self.daemon.calls.add(self._task)
        self._task.add_done_callback(self.daemon.calls.discard)

    def _arrived(self, request: Any) -> None:
        if self._task is not None:
            self._requests.put_nowait(request)

    def _caller_gone(self) -> None:
        self._caller.done(True)
        if self._task is not None and not self._task.done():
            self._requests.put_nowait(_BROKEN)
            self._task.cancel()

    async def _serve(self) -> None:
        try:
            await _SERVED[self.method](self)
        except asyncio.CancelledError as cancelled:
            try:
                error: Exception = cut_off_with(cancelled)
            except asyncio.CancelledError:
                self._in(Unreachable("the call was ended"), over=True)
                raise
        except CallerGone:
            return
        except Exception as problem:
            if self.daemon.process.dead:
                return
            error = error_of(self.method, problem)
            if error.name == "internal" and not isinstance(problem, PrefixdError):
                self.world.found("no call fails without a reason", repr(problem), problem)
        else:
            self._in(None, over=True)
            return
        self._in(Refused(error), over=True)

    async def _unary(self, service: str) -> None:
        request = await self._requests.get()
        method = getattr(getattr(self.daemon, service), self.method)
        self._in(await method(request, self._caller), over=False)

    async def _upload(self) -> None:
        method = getattr(self.daemon.saves, self.method)
        self._in(await method(_Requests(self._requests), self._caller), over=False)

    async def _staged(self) -> None:
        following = _Requests(self._requests)
        await self.daemon.saves.save_staged(
            await following.wait_staged(),
            following,
            self._caller,
            lambda response: self._in(response, over=False),
        )

    async def _session(self) -> None:
        requests = _Requests(self._requests)
        async with aclosing(self.daemon.service.session(requests, self._caller)) as events:
            async for event in events:
                self._in(event, over=False)

    async def _read(self) -> None:
        request = await self._requests.get()
        async with aclosing(self.daemon.service.read(request, self._caller)) as responses:
            async for response in responses:
                self._in(response, over=False)

    async def _evict(self) -> None:
        """Evict entries, as for an operator."""
        tier, entries = await self._requests.get()
        core = self.daemon.core
        question = EvictAsked(core.next_request(), tier, 2**40, entries, core.clock.now_ns())
        self._in(await core.ask(question, EvictAnswer), over=False)

    async def _resize(self) -> None:
        """Resize a tier to a part of its configured budget, as for an operator."""
        tier, part = await self._requests.get()
        budget_bytes = self.daemon.configured_bytes(tier)
        resized = await self.daemon.resizing.resize(tier, int(part * budget_bytes))
        self._in(resized.budget_bytes, over=False)

    async def _scrub(self) -> None:
        """Verify a tier, as for an operator or as the daemon does in the background."""
        tier = await self._requests.get()
        core = self.daemon.core
        bad = 0
        async with aclosing(core.verifications.sweep(core.state.tables.entries, tier)) as steps:
            async for swept in steps:
                bad += sum(verdict.reading is Reading.DAMAGED for _, verdict in swept.judged)
        self._in(bad, over=False)

    async def _gc(self) -> None:
        await self._requests.get()
        self._in(await recovery.collect_garbage(self.daemon.core), over=False)

    async def _hand_over(self) -> None:
        """Hand descriptors to the client, which owns its copies."""
        request = await self._requests.get()
        membership = self.daemon.sessions.prove(request.session, self._caller)
        package = self.daemon.handoff.pack(membership)
        try:
            self._in(Handed(package), over=False)
        finally:
            package.close()


class _Requests:
    """A stream of requests, with the interface that the daemon expects."""

    def __init__(self, arrived: asyncio.Queue[Any]) -> None:
        self._arrived = arrived

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        request = await self._arrived.get()
        if request is _BROKEN:
            raise CallerGone
        if request is _END:
            raise StopAsyncIteration
        return request

    # the interface of `prefixd.server.api.save_calls.StagedRequests`

    def take_staged(self) -> Any:
        if self._arrived.empty():
            return None
        request = self._arrived.get_nowait()
        if request is _BROKEN or request is _END:
            raise CallerGone
        return request

    async def wait_staged(self) -> Any:
        request = await self._arrived.get()
        if request is _BROKEN or request is _END:
            raise CallerGone
        return request


class Handed:
    """The package of a `Handoff`, with duplicated descriptors that outlive the daemon."""

    def __init__(self, package: Any) -> None:
        names = [(each.name, each.size_bytes) for each in package.response.descriptors]
        self.descriptors = {
            name: (os.dup(fd), size_bytes)
            for (name, size_bytes), fd in zip(names, package.fds, strict=True)
        }
        self.refused = dict(package.response.refused)
        # Closes them if the client is gone before they arrive.
        finalize(self, _close_all, self.descriptors)

    def take(self) -> dict[str, tuple[int, int]]:
        """Pass the descriptors to the caller, who has to close them."""
        taken = dict(self.descriptors)
        self.descriptors.clear()
        return taken


def _close_all(descriptors: dict[str, tuple[int, int]]) -> None:
    for fd, _ in descriptors.values():
        os.close(fd)


_SERVED: Final[dict[str, Callable[[Call], Any]]] = {
    "lookup": partial(Call._unary, service="service"),
    "claim": partial(Call._unary, service="service"),
    "release": partial(Call._unary, service="service"),
    "delete": partial(Call._unary, service="service"),
    "pull": partial(Call._unary, service="service"),
    "clear": partial(Call._unary, service="admin"),
    "reserve": partial(Call._unary, service="saves"),
    "cancel": partial(Call._unary, service="saves"),
    "save": Call._upload,
    "save_staged": Call._staged,
    "session": Call._session,
    "read": Call._read,
    "evict": Call._evict,
    "resize": Call._resize,
    "gc": Call._gc,
    "scrub": Call._scrub,
    "hand_over": Call._hand_over,
}
