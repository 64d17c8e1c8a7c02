"""LMDB environments that this process has open for reading.

py-lmdb refuses to open one environment twice in a process, and several clients may talk to one
daemon: they share what is open, and the last to leave closes it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import lmdb

_lock = threading.Lock()
_open: dict[tuple[int, int], _Shared] = {}


@dataclass(slots=True)
class _Shared:
    environment: lmdb.Environment
    table: Any
    users: int = 0


class Environment:
    """One user's hold on a shared environment: `lmdb` is the environment, `table` the handle of
    the one table of it that is read (None: the unnamed one)."""

    def __init__(self, directory_fd: int, table: bytes | None = None) -> None:
        """Opens the environment in the directory that `directory_fd` refers to, which may be
        closed afterwards. Raises lmdb.Error, OSError."""
        # Not the directory: the writer replaces a file that was damaged, and as long as it is
        # open here nothing else gets its number.
        found = os.stat("data.mdb", dir_fd=directory_fd)
        self._place = found.st_dev, found.st_ino
        self._pid = os.getpid()
        with _lock:
            shared = _open.get(self._place)
            if shared is None:
                shared = _open[self._place] = _shared(directory_fd, table)
            shared.users += 1
            self.lmdb = shared.environment
            self.table = shared.table

    def close(self) -> None:
        """Give it back. Idempotent; nothing happens in a process that was forked off."""
        with _lock:
            shared = _open.get(self._place)
            if shared is None or self.lmdb is not shared.environment or os.getpid() != self._pid:
                return
            shared.users -= 1
            if not shared.users:
                del _open[self._place]
                shared.environment.close()
            self._place = (-1, -1)


def _shared(directory_fd: int, table: bytes | None) -> _Shared:
    opened = lmdb.open(
        # Through /proc: the directory may be out of reach by name, in a container.
        f"/proc/self/fd/{directory_fd}",
        readonly=True,
        # The writer's own: a smaller one would not show what it adds.
        map_size=0,
        # For a reader LMDB counts only the tables that it opens.
        max_dbs=0 if table is None else 1,
        readahead=True,
    )
    try:
        # Once for everybody: tables can't be opened by several threads at once.
        return _Shared(opened, None if table is None else opened.open_db(table, create=False))
    except lmdb.Error:
        opened.close()
        raise
