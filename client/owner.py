"""The process that a client belongs to."""

from __future__ import annotations

import os

from ..proto.errors import CallerError


class Owner:
    """Remembers the process that made it.

    A fork has copies of the client, its hits and its locks, but neither its threads nor a
    connection of its own: nothing of it can be used there.
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Is this still that process?"""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises CallerError in a fork of that process."""
        if not self.is_here:
            raise CallerError(
                f"this client belongs to process {self._pid}, of which this one is a fork: make "
                "a client in each process, and spawn workers rather than fork them"
            )
