"""How a method of the synchronous client becomes a coroutine: it runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial, wraps
from inspect import signature
from time import monotonic
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, overload

from ..proto.errors import CallerError, ClientClosed, InvalidSize
from .hits import Hit
from .owner import Owner
from .saves import Reservation
from .thread_pool import ThreadPool

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

#: The threads at most of calls that wait, for saves in flight or for their own: they are apart
#: from those of other calls. Where all of them are taken, a call waits its turn.
MAX_WAITING_CALLS: Final = 64


class Runner:
    """Runs blocking calls in threads. Calls that may wait long have threads of their own.

    A call whose awaiting task is cancelled goes on to its end if it has begun, and what it claims
    or reserves is given back then; if it has not begun, it is not done.
    """

    def __init__(self, max_concurrency: int, deadline_ms: int, owner: Owner) -> None:
        """`deadline_ms` is that of calls which have none of their own."""
        if max_concurrency < 1:
            raise InvalidSize(f"max_concurrency is at least 1, not {max_concurrency}")
        self._deadline_ms = deadline_ms
        self._owner = owner
        self._calls = ThreadPool("prefixd-aio", max_concurrency)
        self._waiting_calls = ThreadPool("prefixd-aio-wait", MAX_WAITING_CALLS)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`call(...)` in a thread; with a `wait_ms` it is one that waits. Its `deadline_ms`, where
        it has one, counts from now and not from when a thread is free. Raises ClientClosed."""
        threads = self._waiting_calls if kwargs.get("wait_ms") else self._calls
        return await self._run(threads, partial(call, *args, **kwargs))

    async def run_waiting(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`run`, for a call that waits though it has no `wait_ms`: in a thread for such calls."""
        return await self._run(self._waiting_calls, partial(call, *args, **kwargs))

    async def _run(self, threads: ThreadPool, call: partial[T]) -> T:
        self._owner.check()  # a fork has none of the threads
        given = call.keywords.get("deadline_ms")
        within_ms = given if isinstance(given, int) else self._deadline_ms
        since_s = monotonic()
        future: Future[T] = Future()
        context = copy_context()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if "deadline_ms" in call.keywords:
                waited_ms = round((monotonic() - since_s) * 1e3)
                call.keywords["deadline_ms"] = within_ms - waited_ms
            try:
                future.set_result(context.run(call))
            except BaseException as problem:
                future.set_exception(problem)

        if not threads.submit(work):
            raise ClientClosed("this client is closed")
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # In a thread, whether the call has ended or not: giving back may block.
            future.add_done_callback(lambda done: self._calls.submit(partial(_give_back, done)))
            raise

    def close(self, within_s: float) -> None:
        """Take no more calls, and wait for those that are under way. Not in the loop's thread."""
        until_s = monotonic() + within_s
        for threads in (self._calls, self._waiting_calls):
            threads.close()
        for threads in (self._calls, self._waiting_calls):
            threads.join(max(0.0, until_s - monotonic()))


def _give_back(future: Future[T]) -> None:
    """The result of this call is not wanted any more."""
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


class Asynchronous:
    """Stands for an object of the synchronous client, whose calls it runs in threads."""

    def __init__(self, sync: Any, runner: Runner) -> None:
        self._sync = sync
        self._runner = runner


@overload
def coroutine(
    method: Callable[Concatenate[Any, P], T], *, waits: bool = False, saves: bool = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...


@overload
def coroutine(
    method: Callable[Concatenate[Any, P], T],
    made: Callable[[T, Runner], R],
    *,
    waits: bool = False,
    saves: bool = False,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]: ...


def coroutine(
    method: Callable[..., Any],
    made: Callable[[Any, Runner], Any] | None = None,
    *,
    waits: bool = False,
    saves: bool = False,
) -> Callable[..., Any]:
    """A method of the synchronous client as one of the `Asynchronous` object that stands for it:
    the same parameters and the same result, or what is `made` of that.

    `waits`: it waits for something else than its own answer. `saves`: so it does, and its deadline
    is that of saves. With `in_place_only` it waits for nothing, and no thread is asked.
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
        run = self._runner.run_waiting if waits or saves else self._runner.run
        result = await run(sync_call, *args, **kwargs)
        return result if made is None else made(result, self._runner)

    return call


def awaited(
    method: Callable[Concatenate[Any, P], Future[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A coroutine in the place of a method that returns a future. A call joins the queue when its
    task starts, and one that is cancelled before its turn is never made."""
    name = method.__name__

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(getattr(self._sync, name)(*args, **kwargs))

    return call


def same(name: str) -> Any:
    """An attribute of the synchronous object, read from there whenever it is asked for."""
    return property(lambda self: getattr(self._sync, name), doc=f"As in the synchronous `{name}`.")
