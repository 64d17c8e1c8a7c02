"""LMDB environments that this process has open for reading.

py-lmdb refuses to open one environment twice in a process, and several clients may talk to one
daemon: they share what is open, and the last to leave closes it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import lmdb

_lock = threading.Lock()
_open: dict[tuple[int, int], _Shared] = {}


@dataclass(slots=True)
class _Shared:
    environment: lmdb.Environment
    users: int


class Environment:
    """One user's hold on a shared environment; `lmdb` is the environment itself."""

    def __init__(self, directory_fd: int, max_tables: int = 0) -> None:
        """Opens the environment in the directory that `directory_fd` refers to, which may be
        closed afterwards. Raises lmdb.Error."""
        found = os.fstat(directory_fd)
        self._place = found.st_dev, found.st_ino
        self._pid = os.getpid()
        with _lock:
            shared = _open.get(self._place)
            if shared is None:
                # Through /proc: the directory may be out of reach by name, in a container.
                opened = lmdb.open(
                    f"/proc/self/fd/{directory_fd}",
                    readonly=True,
                    # The writer's own: a smaller one would not show what it adds.
                    map_size=0,
                    max_dbs=max_tables,
                    readahead=True,
                )
                shared = _open[self._place] = _Shared(opened, 0)
            shared.users += 1
            self.lmdb = shared.environment

    def close(self) -> None:
        """Give it back. Idempotent; nothing happens in a process that was forked off."""
        with _lock:
            shared = _open.get(self._place)
            if shared is None or self.lmdb is not shared.environment or os.getpid() != self._pid:
                return
            self._place = (-1, -1)
            shared.users -= 1
            if not shared.users:
                _open.pop(next(p for p, s in _open.items() if s is shared))
                shared.environment.close()
