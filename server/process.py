"""The daemon as a process: its locks, what it tells systemd, and how it stops.

A lock keeps a second daemon off the directories and the socket of the first. The kernel holds it
(flock), so it is gone with its process however that ends, and a lock file that was left behind is
no obstacle. The note in the file is only for the error message of the second daemon.

A thread that waits for a hung device can only be ended with its process, and Python, asyncio and
gRPC all wait for the threads and tasks that they know of. So a stop that takes too long calls
`os._exit`, which ends the process as a crash would: everything acknowledged is stored already.
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

log = structlog.get_logger("prefixd")

LOCK_NAME: Final = "prefixd.lock"
_MAX_NOTE_BYTES: Final = 4096
#: Watchdog messages per interval that systemd allows.
_BEATS: Final = 3
#: A stop ends within the drain timeout and this time, a hurried one within this time alone.
STOPPED_WITHIN_S: Final = 10.0


# ---- locks


@contextmanager
def lock_directories(config: Config) -> Iterator[bool]:
    """Own the socket, and the directory of the shm tier unless that is off. True: a daemon has
    owned one of them before. The disk tier locks its own (`opening`), as its device may not answer.

    Missing directories are created, for this user only. Raises DirectoryInUse, which names the
    holder, or OSError, which names the option; then nothing stays locked.
    """
    address = config.server.address
    socket = socket_path(address)
    assert socket is not None
    # Sockets of several daemons may share a directory; the files of a tier may not.
    locks = [("server.address", socket.parent, f"{socket.name}.lock")]
    # A tier that is off has no files, so daemons without it may name the same directory.
    if config.shm.budget_bytes != 0:
        locks.append(("shm.directory", config.shm.directory, LOCK_NAME))
    with ExitStack() as stack:
        used_before = False
        for option, directory, name in locks:
            try:
                used_before |= stack.enter_context(lock_directory(directory, address, name))
            except OSError as problem:
                raise OSError(f"{option}: {problem}") from None
        yield used_before


@contextmanager
def lock_directory(directory: Path, address: str, name: str = LOCK_NAME) -> Iterator[bool]:
    """Own one directory or, with another `name`, one thing in it. `address` is for the note. True:
    a daemon has owned it before."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = directory.stat().st_uid
    if owner not in (0, os.geteuid()):
        # In /tmp any user can create the directory that this daemon is going to use.
        raise PermissionError(f"{directory} belongs to the user {owner}; it is not used")
    file = directory / name
    used_before = file.exists()
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = directory if name == LOCK_NAME else file.with_suffix("")
            raise DirectoryInUse(f"{what} is in use by {_holder(fd)}") from None
        note = {"pid": os.getpid(), "address": address, "started_unix_s": int(time.time())}
        # Cut afterwards, and never to nothing: ext4 takes a file that was emptied and written for a
        # replaced one, and allocates its blocks when it is closed. On a device that hangs, that
        # close, and with it the end of the process, would wait for ever.
        os.ftruncate(fd, os.pwrite(fd, json.dumps(note).encode(), 0))
        # The file stays. If it were removed, two processes could lock two files of one name. The
        # note stays too: emptying it is a write, and a device that hangs would hold the daemon.
        yield used_before
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


# ---- systemd


def notify(state: str) -> bool:
    """Send a state to systemd, at $NOTIFY_SOCKET. False if there is no such socket, or it can't
    be reached."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        # The daemon does not wait for a service manager that does not read.
        manager.setblocking(False)
        manager.connect(f"\0{address[1:]}" if address[0] == "@" else address)
        manager.send(state.encode())
        return True
    return False


def watchdog_interval_s() -> float:
    """How often to tell systemd that the daemon is alive; 0 without a watchdog."""
    try:
        pid, limit_us = os.environ.get("WATCHDOG_PID"), int(os.environ["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return 0.0
    return limit_us / 1e6 / _BEATS if pid in (None, str(os.getpid())) else 0.0


async def keep_alive() -> None:
    """Feed the watchdog from the event loop, because it is there to notice a stuck loop."""
    interval_s = watchdog_interval_s()
    while interval_s > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)


# ---- stopping


class Stop:
    """What signals request: the first one to stop, the next one not to wait for anything."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        self._hurry = threading.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)

    def when_reloaded(self, reload: Callable[[], object]) -> None:
        """Call this on the loop at each SIGHUP, which is ignored until then."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def begin(self) -> None:
        """Do what the first signal does, unless the stop has begun."""
        if not self.requested.is_set():
            self.signalled()

    def signalled(self) -> None:
        if self.requested.is_set():
            self.hurried.set()
            self._hurry.set()
            return
        self.requested.set()
        threading.Thread(target=self._give_up, name="prefixd-stop", daemon=True).start()

    def _give_up(self) -> None:
        """End the process after the deadline. On a thread, because the loop itself may hang."""
        self._hurry.wait(self._drain_timeout_s)
        threading.Event().wait(STOPPED_WITHIN_S)
        log.error("stop_forced", threads=running_threads())
        leave(1)


def running_threads() -> list[str]:
    """The names of the daemon's own threads."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("prefixd-"))


def leave(status: int) -> NoReturn:
    """End the process without waiting for anything in it."""
    with suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
