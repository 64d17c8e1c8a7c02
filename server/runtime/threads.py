"""Waiting for threads, but not for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress


async def ended_within(within_s: float, steps: Sequence[Callable[[], None]]) -> bool:
    """Run blocking steps beside each other. False: not all of them ended in time; the
    threads that they wait for are daemon threads, which keep no process."""
    loop = asyncio.get_running_loop()
    ended = [_begin(loop, step) for step in steps]
    if not ended:
        return True
    done, pending = await asyncio.wait(ended, timeout=within_s)
    for one in done:
        one.result()
    return not pending


def _begin(loop: asyncio.AbstractEventLoop, step: Callable[[], None]) -> asyncio.Future[None]:
    ended: asyncio.Future[None] = loop.create_future()

    def tell(problem: BaseException | None) -> None:
        if ended.done():
            return
        if problem is None:
            ended.set_result(None)
        else:
            ended.set_exception(problem)

    def run() -> None:
        problem = None
        try:
            step()
        except BaseException as raised:
            problem = raised
        with suppress(RuntimeError):  # the loop ended first
            loop.call_soon_threadsafe(tell, problem)

    threading.Thread(target=run, name="prefixd-closing", daemon=True).start()
    return ended
