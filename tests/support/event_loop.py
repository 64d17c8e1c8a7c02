"""One event loop for every asynchronous test of a process.

gRPC has one poller per process. It delivers the end of each operation to the loop that began it,
and wakes every loop that it has ever seen. With a loop for each test, the loop of an operation that
ends after its test no longer exists: the poller raises in the loop of a later test, and does not
deliver its other events. A shared loop always exists.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: How long a test waits before it fails.
PATIENCE_S: Final = 60.0


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but in the shared loop: ends the tasks, timers and `asyncio.to_thread`
    threads that `main` leaves. Fails if an exception in the loop was not handled."""
    loop = shared_loop()
    unhandled: list[dict[str, Any]] = []
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
    loop.set_default_executor(executor)

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    try:
        result = loop.run_until_complete(bounded())
    finally:
        loop.run_until_complete(_end_tasks_and_threads(executor))
        loop.set_exception_handler(None)
    assert not unhandled, f"unhandled in the loop: {unhandled}"
    return result


async def _end_tasks_and_threads(executor: ThreadPoolExecutor) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    # asyncio has no public list of them. Those of TLS connections outlive their transports.
    for timer in loop._scheduled:  # type: ignore[attr-defined]
        timer.cancel()

    def shut_down() -> None:
        executor.shutdown()
        loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=shut_down)
    thread.start()
    await ended.wait()
    thread.join()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn a coroutine function into a test that runs in the shared loop."""

    @functools.wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return run_test
