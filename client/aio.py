"""The asyncio client: the methods of the client as coroutines, and no logic of its own.

Each call runs on the synchronous client, in one of a few threads. That costs little: gRPC's
asyncio stack takes as long for a call as its synchronous one, most of a call is waiting, which
leaves other threads free to run (bytes are copied a chunk of 1 MiB at a time), and with one
implementation there is nothing to keep equal. Asynchronous saves use the threads that the client
has for them anyway.

Calls that wait (with `wait_ms`, for a synchronous save, for `flush`) have threads of their own,
64 at most, so that they delay no others. A call whose task is cancelled raises CancelledError at
once; in its thread it runs to its end, at the latest its deadline, and what it then has claimed
or reserved is given back. A restore is ended early: its CancelledError comes when its thread writes
into the buffers no more, which takes milliseconds. Nothing here blocks the loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from inspect import signature
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, overload

from ..proto.errors import CallerError, ClientClosed, InvalidSize
from ..proto.keys import Key, Namespace
from ..proto.limits import DEFAULT_BLOCK_TOKENS
from .arguments import instances
from .chains import BlockChain
from .claims import HitFacts
from .client import Client
from .context import Owner
from .counters import Snapshot
from .hits import Hit
from .identity import StateIdentity
from .policy import LoadSpeeds, SavePolicy
from .results import ReserveStatus, SaveOutcome
from .saves import Reservation, ReserveItem
from .thread_pool import ThreadPool, resolve
from .wire.deadline import ABANDONMENT, Abandonment

if TYPE_CHECKING:
    from ..proto.keys import Extras
    from ..proto.tokens import Tokens
    from .buffers import Payload

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

DEFAULT_MAX_CONCURRENCY: Final = 8
#: Threads for calls that wait, apart from those of other calls. When all are taken, a call waits
#: its turn.
MAX_WAITING_CALLS: Final = 64


# ---- from a method to a coroutine


class Runner:
    """Runs blocking calls in threads. Calls that may wait long have threads of their own.

    When the awaiting task is cancelled, a call that has begun runs to its end, and what it claimed
    or reserved is then given back. A call that has not begun is not made.
    """

    def __init__(self, max_concurrency: int, deadline_ms: int) -> None:
        """`deadline_ms`: for calls that are given none."""
        if max_concurrency < 1:
            raise InvalidSize(f"max_concurrency is at least 1, not {max_concurrency}")
        self._deadline_ms = deadline_ms
        self._owner = Owner()
        self._calls = ThreadPool("prefixd-aio", max_concurrency)
        #: For restores that may wait for a disk.
        self._disk_calls = ThreadPool("prefixd-aio-disk", max_concurrency)
        self._waiting_calls = ThreadPool("prefixd-aio-wait", MAX_WAITING_CALLS)

    async def run(
        self,
        call: partial[T],
        *,
        waits: bool = False,
        fills: bool = False,
        from_disk: bool = False,
    ) -> T:
        """`call()` in a thread, one for calls that wait if it `waits` or has a `wait_ms`, and one
        for reads of a disk, which may hang, if it reads `from_disk`. Its
        `deadline_ms`, if it takes one, counts from now and not from when a thread is free. A call
        that `fills` buffers of its caller has ended when this returns or raises. Raises
        ClientClosed."""
        self._owner.check()  # a fork has none of the threads
        given = call.keywords.get("deadline_ms")
        within_ms = given if isinstance(given, int) else self._deadline_ms
        since_s = monotonic()
        future: Future[T] = Future()
        context = copy_context()
        abandonment = Abandonment()
        if fills:
            context.run(ABANDONMENT.set, abandonment)

        def in_turn() -> T:
            if "deadline_ms" in call.keywords:
                waited_ms = round((monotonic() - since_s) * 1e3)
                call.keywords["deadline_ms"] = within_ms - waited_ms
            return context.run(call)

        threads = self._calls
        if waits or call.keywords.get("wait_ms"):
            threads = self._waiting_calls
        elif from_disk:
            threads = self._disk_calls
        if not threads.submit(lambda: resolve(future, in_turn)):
            raise ClientClosed("this client is closed")
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if fills:
                abandonment.abandon()
                await _ended(future)
            # In a thread even if the call has ended: giving back may block.
            future.add_done_callback(lambda done: self._calls.submit(partial(_give_back, done)))
            raise

    def close(self, within_s: float) -> None:
        """Take no more calls, and wait for the running ones. Not for the loop's thread."""
        until_s = monotonic() + within_s
        pools = (self._calls, self._disk_calls, self._waiting_calls)
        for threads in pools:
            threads.close()
        for threads in pools:
            threads.join(max(0.0, until_s - monotonic()))


async def _ended(future: Future[T]) -> None:
    """Wait until the call of this future has ended, however often this task is cancelled."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_done: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    while not ended.is_set():
        with suppress(asyncio.CancelledError):
            await ended.wait()


def _give_back(future: Future[T]) -> None:
    """Release or cancel the result of a call whose task was cancelled."""
    if future.cancelled() or future.exception() is not None:
        return
    result = future.result()
    try:
        if isinstance(result, Hit):
            result.release()
        elif isinstance(result, list):
            for each in result:
                if isinstance(each, Reservation):
                    each.cancel()
    except CallerError:
        pass  # the client was closed meanwhile, which gave everything back


class Pending(Coroutine[Any, Any, R]):
    """A coroutine that `async with` awaits by itself: without it, a forgotten `await` before a hit
    would be an error of the interpreter that says nothing."""

    __slots__ = ("_call", "_entered")

    def __init__(self, call: Coroutine[Any, Any, R]) -> None:
        self._call = call
        self._entered: Any = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a coroutine has no {name!r}: await the call first")

    def __bool__(self) -> bool:
        # It would be true, whatever the call finds. From Python 3.12 on, asyncio asks this of the
        # coroutine of a task, to show the task; `asyncio.run` does so, too.
        if sys._getframe(1).f_globals.get("__name__") == "asyncio.base_tasks":
            return True
        raise TypeError("a coroutine is neither true nor false: await the call first")

    def send(self, value: Any) -> Any:
        return self._call.send(value)

    def throw(self, *problem: Any) -> Any:
        return self._call.throw(*problem)

    def close(self) -> None:
        self._call.close()

    def __await__(self) -> Generator[Any, Any, R]:
        return self._call.__await__()

    async def __aenter__(self) -> R:
        result = await self._call
        if not isinstance(result, Asynchronous):
            raise CallerError(
                f"`async with` takes a hit or a reservation, and this call returns {result!r}"
            )
        self._entered = result
        await result.__aenter__()
        return result

    async def __aexit__(self, *problem: object) -> None:
        await self._entered.__aexit__(*problem)


class Asynchronous:
    """Stands for an object of the synchronous client, whose calls it runs in threads."""

    def __init__(self, sync: Any, runner: Runner) -> None:
        self._sync = sync
        self._runner = runner

    async def __aenter__(self) -> Self:
        return self


@overload
def coroutine(
    method: Callable[Concatenate[Any, P], T],
    *,
    waits: bool = False,
    saves: bool = False,
    fills: bool = False,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...


@overload
def coroutine(
    method: Callable[Concatenate[Any, P], T], wrap: Callable[[T, Runner], R], *, waits: bool = False
) -> Callable[Concatenate[Any, P], Pending[R]]: ...


def coroutine(
    method: Callable[..., Any],
    wrap: Callable[[Any, Runner], Any] | None = None,
    *,
    waits: bool = False,
    saves: bool = False,
    fills: bool = False,
) -> Callable[..., Any]:
    """The asynchronous form of a method of the synchronous client: the same parameters, and the
    same result, or what `wrap` makes of it.

    `waits`: the method waits for more than its own answer. `saves`: it does, with the deadline of
    saves. `fills`: it writes into buffers of its caller. With `in_place_only` a call waits for
    nothing, and needs no thread.
    """
    name = method.__name__
    has_deadline = "deadline_ms" in signature(method).parameters

    @wraps(method)
    async def call(self: Asynchronous, *args: Any, **kwargs: Any) -> Any:
        sync_call = getattr(self._sync, name)
        if kwargs.get("in_place_only"):
            return sync_call(*args, **kwargs)
        if has_deadline:
            kwargs.setdefault("deadline_ms", None)
        if saves and kwargs["deadline_ms"] is None:
            kwargs["deadline_ms"] = self._sync.save_timeout_ms
        sync_call = partial(sync_call, *args, **kwargs)
        from_disk = isinstance(self._sync, Hit) and self._sync._found.on_disk
        result = await self._runner.run(
            sync_call, waits=waits or saves, fills=fills, from_disk=fills and from_disk
        )
        return result if wrap is None else wrap(result, self._runner)

    if wrap is None:
        return call

    @wraps(method)
    def pending(self: Asynchronous, *args: Any, **kwargs: Any) -> Pending[Any]:
        return Pending(call(self, *args, **kwargs))

    return pending


def awaited(
    method: Callable[Concatenate[Any, P], Future[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A coroutine for a method that returns a future. The call is queued when its task starts; one
    that is cancelled before its turn is never made."""
    name = method.__name__

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(getattr(self._sync, name)(*args, **kwargs))

    return call


def same(name: str) -> Any:
    """A property that reads this attribute of the synchronous object."""
    return property(lambda self: getattr(self._sync, name), doc=f"As in the synchronous `{name}`.")


# ---- the asynchronous objects


class AsyncHit(HitFacts, Asynchronous):
    """`Hit` with coroutines. Release it with `async with`, or with `release`."""

    def __init__(self, hit: Hit, runner: Runner) -> None:
        """Made by the client."""
        Asynchronous.__init__(self, hit, runner)
        HitFacts.__init__(self, hit._pins, hit._found, hit.token_counts, hit.positions, hit.miss)
        self.hit = hit

    buffers: list[memoryview] | None = same("buffers")
    restore_into = coroutine(Hit.restore_into, fills=True)
    read = coroutine(Hit.read)
    views = coroutine(Hit.views)
    prefault = coroutine(Hit.prefault)
    layer = coroutine(Hit.layer)
    token_ids = coroutine(Hit.token_ids)
    release_some = coroutine(Hit.release_some)
    release = coroutine(Hit.release)

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncReservation(Asynchronous):
    """`Reservation` with coroutines; cancelled by the end of an `async with`."""

    item: ReserveItem = same("item")
    key: Key = same("key")
    status: ReserveStatus = same("status")
    owner: str = same("owner")
    age_ms: int = same("age_ms")
    message: str = same("message")
    granted: bool = same("granted")
    lost: bool = same("lost")

    def __init__(self, reservation: Reservation, runner: Runner) -> None:
        """Made by the client."""
        super().__init__(reservation, runner)
        self.reservation = reservation

    def __repr__(self) -> str:
        return f"<Async{repr(self.reservation)[1:]}"

    write = coroutine(Reservation.write)
    cancel = coroutine(Reservation.cancel)

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()


def _reservations(granted: list[Reservation], runner: Runner) -> list[AsyncReservation]:
    return [AsyncReservation(each, runner) for each in granted]


class AsyncClient(Asynchronous):
    """A `Client` with coroutines. Close it with `async with`, or with `close`."""

    def __init__(self, client: Client, *, max_concurrency: int = DEFAULT_MAX_CONCURRENCY) -> None:
        """Takes over `client` and closes it in the end; the methods of `client` stay usable.
        `max_concurrency`: calls running at a time, beside those that wait (see the module); others
        wait their turn, within their deadline. Raises InvalidSize below 1."""
        super().__init__(client, Runner(max_concurrency, client.deadline_ms))
        self.client = client

    def __repr__(self) -> str:
        return f"<Async{repr(self.client)[1:]}"

    # ---- looking for state

    longest_prefix = coroutine(Client.longest_prefix, AsyncHit)
    resume = coroutine(Client.resume, AsyncHit, waits=True)
    longest_run = coroutine(Client.longest_run, AsyncHit)
    claim = coroutine(Client.claim, AsyncHit)
    probe = coroutine(Client.probe)
    restore_keys = coroutine(Client.restore_keys, fills=True)
    exists = coroutine(Client.exists)
    exists_one = coroutine(Client.exists_one)
    leading_run = coroutine(Client.leading_run)
    touch = coroutine(Client.touch)
    delete = coroutine(Client.delete)

    def chain(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        *,
        include_partial: bool = False,
        extras: Extras = (),
    ) -> BlockChain:
        """`Client.chain`; no coroutine, because it makes no call."""
        return self.client.chain(
            namespace, tokens, block_tokens, include_partial=include_partial, extras=extras
        )

    # ---- restoring it

    async def release_many(
        self, hits: Sequence[AsyncHit], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """`Client.release_many`."""
        released = [each.hit for each in instances("hits", hits, AsyncHit)]
        call = partial(self.client.release_many, released, deadline_ms=deadline_ms)
        return await self._runner.run(call)

    # ---- saving it

    save = coroutine(Client.save, saves=True)
    save_async = awaited(Client.save_async)
    save_many = coroutine(Client.save_many, saves=True)
    save_many_async = awaited(Client.save_many_async)
    save_made_async = awaited(Client.save_made_async)
    reserve = coroutine(Client.reserve, _reservations)
    flush = coroutine(Client.flush, waits=True)

    def would_drop(self, payload_bytes: int = 0) -> bool:
        """`Client.would_drop`; no coroutine, because it makes no call."""
        return self.client.would_drop(payload_bytes)

    async def write(
        self, writes: Sequence[tuple[AsyncReservation, Payload]], *, deadline_ms: int | None = None
    ) -> list[SaveOutcome]:
        """`Client.write`."""
        payloads = [
            (each.reservation if isinstance(each, AsyncReservation) else each, payload)
            for each, payload in writes
        ]
        call = partial(self.client.write, payloads, deadline_ms=deadline_ms)
        return await self._runner.run(call)

    async def cancel(
        self, reservations: Sequence[AsyncReservation], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """`Client.cancel`."""
        given = instances("reservations", reservations, AsyncReservation)
        ended = [each.reservation for each in given]
        call = partial(self.client.cancel, ended, deadline_ms=deadline_ms)
        return await self._runner.run(call)

    # ---- this client

    in_place: bool = same("in_place")
    pending_saves: int = same("pending_saves")
    pending_save_bytes: int = same("pending_save_bytes")
    policy: SavePolicy = same("policy")
    speeds: LoadSpeeds = same("speeds")
    deadline_ms: int = same("deadline_ms")
    save_timeout_ms: int = same("save_timeout_ms")
    counters: Snapshot = same("counters")
    connected: bool = same("connected")
    under_pressure: bool = same("under_pressure")

    def announce(self, identity: StateIdentity) -> None:
        """`Client.announce`; no coroutine, because it waits for nothing."""
        self.client.announce(identity)

    wait_connected = coroutine(Client.wait_connected, waits=True)

    async def close(self, *, deadline_ms: int | None = None) -> None:
        """`Client.close`. Running calls end as misses."""
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()  # cancelling the task no longer stops it
        # In a thread of its own: those of the calls may all be waiting for the daemon.
        threading.Thread(
            target=self._close, args=(closed, deadline_ms), name="prefixd-aio-close", daemon=True
        ).start()
        await asyncio.wrap_future(closed)

    def _close(self, closed: Future[None], deadline_ms: int | None) -> None:
        until_s = monotonic() + (self.deadline_ms if deadline_ms is None else deadline_ms) / 1e3
        try:
            self.client.close(deadline_ms=deadline_ms)
            self._runner.close(max(0.0, until_s - monotonic()))
        except BaseException as problem:
            closed.set_exception(problem)
        else:
            closed.set_result(None)

    async def __aexit__(self, *_: object) -> None:
        await self.close()
