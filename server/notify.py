"""What systemd is told of a service of `Type=notify`: ready, stopping, alive."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Final

#: Signs of life within the time that the watchdog allows.
_BEATS: Final = 3


def notify(state: str) -> bool:
    """Send a state to systemd, at $NOTIFY_SOCKET. False: there is no such socket, or it can't be
    reached."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        # The service manager always reads; if it does not, the daemon does not wait for it.
        told.setblocking(False)
        told.connect(f"\0{address[1:]}" if address[0] == "@" else address)
        told.send(state.encode())
        return True
    return False


def watchdog_interval_s() -> float:
    """How often systemd wants to hear that the daemon lives; 0: it does not."""
    try:
        pid, limit_us = os.environ.get("WATCHDOG_PID"), int(os.environ["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return 0.0
    return limit_us / 1e6 / _BEATS if pid in (None, str(os.getpid())) else 0.0


async def keep_alive() -> None:
    """Say so from the event loop, whose standstill is what the watchdog is for."""
    interval_s = watchdog_interval_s()
    while interval_s > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)
