"""Connections that have proved nothing yet, and which of them goes when there are too many. Pure.

They may have the places that nobody needs who has proved something. When these run out, the host
that has most loses one: of those on which a call was refused; if there are none, of those that have
sent nothing, which no client leaves so; then of the rest. Each time it is the oldest, which had its
time. So strangers take no place from others than each other, and few of a host's when many come
from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Final, Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Sign(IntEnum):
    """What an arrival is known by. The first ones go first."""

    REFUSED = 0
    SILENT = 1
    SPOKE = 2


class Arrivals(Generic[C]):
    """Connections by host. Not thread-safe."""

    def __init__(self) -> None:
        self._where: dict[C, tuple[str, Sign]] = {}
        #: By host, then by sign: the oldest first.
        self._hosts: dict[str, tuple[dict[C, None], ...]] = {}
        #: How many each host has.
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, connection: object) -> bool:
        return connection in self._where

    def __iter__(self) -> Iterator[C]:
        return iter(self._where)

    def add(self, connection: C, host: str) -> None:
        """It has come, and sent nothing yet."""
        self._where[connection] = host, Sign.SILENT
        self._hosts.setdefault(host, tuple({} for _ in Sign))[Sign.SILENT][connection] = None
        self._held[host] = self._held.get(host, 0) + 1

    def spoke(self, connection: C) -> None:
        """It has sent something. Idempotent."""
        self._sign(connection, Sign.SPOKE, only_if=Sign.SILENT)

    def refused(self, connection: C) -> None:
        """What it sent proves nothing. Idempotent."""
        self._sign(connection, Sign.REFUSED)

    def _sign(self, connection: C, sign: Sign, only_if: Sign | None = None) -> None:
        found = self._where.get(connection)
        if found is None or found[1] is sign or (only_if is not None and found[1] is not only_if):
            return
        host, before = found
        del self._hosts[host][before][connection]
        self._hosts[host][sign][connection] = None
        self._where[connection] = host, sign

    def remove(self, connection: C) -> None:
        """It has proved something, or is gone. Idempotent."""
        found = self._where.pop(connection, None)
        if found is None:
            return
        host, sign = found
        del self._hosts[host][sign][connection]
        self._held[host] -= 1
        if not self._held[host]:
            del self._held[host], self._hosts[host]

    def take_worst(self) -> C:
        """Remove the one that is to go. There has to be one."""
        host = max(self._held, key=self._held.__getitem__)
        worst = next(next(iter(held)) for held in self._hosts[host] if held)
        self.remove(worst)
        return worst


#: Unproved connections have a share of this part (1/n) at least, whatever others hold.
_LEAST_PART: Final = 8


def places_for_arrivals(total: int, proved: int) -> int:
    """How many connections may have proved nothing, while so many of `total` have proved
    something."""
    return max(1, total // _LEAST_PART, total - proved)
