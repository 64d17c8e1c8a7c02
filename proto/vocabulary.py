"""The enumerations that every part shares; the numbers are those of the wire and of records."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """The three places where an entry can live."""

    RAM = 1
    SHM = 2
    DISK = 3

    @property
    def label(self) -> str:
        """The name that people write: `ram`, `shm`, `disk`."""
        return self.name.lower()


class SaveReason(IntEnum):
    """Why a state is saved."""

    COLD = 1
    """The trimmed prompt, right after its prefill."""
    CONTINUED = 2
    """A generation crossed another interval."""
    FINISH = 3
    """The request ended."""
    EVICT = 4
    """The engine is about to drop the state."""
    SHUTDOWN = 5
    """The engine is about to stop."""

    @property
    def label(self) -> str:
        """The name that people write: `cold`, `continued`, ..."""
        return self.name.lower()
