"""The words that every part shares; the numbers are those of the wire and of records."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

from .errors import InvalidSize
from .limits import MAX_LABEL_CHARS

_LABEL: Final = re.compile(rf"[A-Za-z0-9._:/@+-]{{1,{MAX_LABEL_CHARS}}}")


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


def check_label(label: str) -> str:
    """The same label, under which traffic is added up. Raises InvalidSize for what can't be one."""
    if not _LABEL.fullmatch(label):
        raise InvalidSize(
            f"a label has 1 ... {MAX_LABEL_CHARS} letters, digits or ._:/@+-, not {label[:80]!r}"
        )
    return label
