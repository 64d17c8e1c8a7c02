"""How the daemon ends: when it is told to, in order, and within a bound.

A thread that waits for a device that hangs can't be ended by anything but the end of its process,
and Python, asyncio and gRPC all wait for the threads and tasks that they know of. So what does not
end is left behind with `os._exit`, which ends the process as a crash would: everything that was
acknowledged is stored already.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import structlog

from ..proto.endpoints import socket_path
from ..proto.errors import DirectoryInUse
from .config.options import Config

LOCK_NAME: Final = "prefixd.lock"


_MAX_NOTE_BYTES: Final = 4096


@contextmanager
def lock_directories(config: Config) -> Iterator[None]:
    """Own the shm directory, the disk directory (if there is such a tier) and the socket.

    What does not exist is created, for this user only. Raises DirectoryInUse, which says who
    has it, or OSError, which names the option; then nothing stays locked.
    """
    address = config.server.address
    socket = socket_path(address)
    assert socket is not None
    # Sockets of several daemons may share a directory; the files of a tier may not.
    locks = [
        ("shm.directory", config.shm.directory, LOCK_NAME),
        ("server.address", socket.parent, f"{socket.name}.lock"),
    ]
    if config.disk.budget_bytes != 0:
        locks.append(("disk.directory", config.disk.directory, LOCK_NAME))
    with ExitStack() as stack:
        for option, directory, name in locks:
            try:
                stack.enter_context(lock_directory(directory, address, name))
            except OSError as problem:
                raise OSError(f"{option}: {problem}") from None
        yield


@contextmanager
def lock_directory(directory: Path, address: str, name: str = LOCK_NAME) -> Iterator[None]:
    """Own one directory, or with another `name` one thing in it. `address` is for the note."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = directory.stat().st_uid
    if owner not in (0, os.geteuid()):
        # In /tmp anybody can make the directory that this user will look for.
        raise PermissionError(f"{directory} belongs to the user {owner}; it is not used")
    file = directory / name
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = directory if name == LOCK_NAME else file.with_suffix("")
            raise DirectoryInUse(f"{what} is in use by {_holder(fd)}") from None
        note = {"pid": os.getpid(), "address": address, "started_unix_s": int(time.time())}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode(), 0)
        yield
        # The file stays: to remove it would let two processes lock two files of one name.
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _holder(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, _MAX_NOTE_BYTES, 0))
        pid, address = int(note["pid"]), str(note["address"])
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(note["started_unix_s"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        return "another daemon, which is just starting or stopping"
    return f"the daemon with pid {pid} at {address}, started {started}"


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
