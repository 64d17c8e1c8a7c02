"""How the daemon ends: when it is told to, in order, and within a bound.

A thread that waits for a device that hangs can't be ended by anything but the end of its process,
and Python, asyncio and gRPC all wait for the threads and tasks that they know of. So what does not
end is left behind with `os._exit`, which ends the process as a crash would: everything that was
acknowledged is stored already.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

import structlog

log = structlog.get_logger("prefixd")

#: A stop ends within the drain timeout and this time, a hurried one within this time alone.
STOPPED_WITHIN_S: Final = 10.0


class Stop:
    """What signals ask for: the first one to stop, the next not to wait for anybody."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        self._hurry = threading.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)

    def when_reloaded(self, reload: Callable[[], object]) -> None:
        """Call this when SIGHUP comes, on the loop; until now it was ignored."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def begin(self) -> None:
        """What the first signal does; nothing if it has come."""
        if not self.asked.is_set():
            self.signalled()

    def signalled(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
            self._hurry.set()
            return
        self.asked.set()
        threading.Thread(target=self._give_up, name="prefixd-stop", daemon=True).start()

    def _give_up(self) -> None:
        """On a thread: the loop itself may be what does not end."""
        self._hurry.wait(self._drain_timeout_s)
        threading.Event().wait(STOPPED_WITHIN_S)
        log.error("stop_forced", threads=running_threads())
        leave(1)


def running_threads() -> list[str]:
    """Ours, by their names."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("prefixd-"))


def leave(status: int) -> NoReturn:
    """End the process without waiting for anything in it."""
    with suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
