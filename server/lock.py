"""Keeps a second daemon off the directories and the socket of the first.

The kernel holds the lock (flock), so it is gone with its process however that ends, and a
lock file that was left behind is no obstacle. What the file says of its holder is for the
sentence that the second daemon refuses with, and for nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

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
