"""Where the bytes of a read go: to a function, or straight into memory that is named beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...proto.payload import FlatBytes

#: Takes the bytes of a read as they arrive: the number of the range, the offset from its start, and
#: the bytes. None in place of the bytes: the daemon could not read that entry.
Sink: TypeAlias = Callable[[int, int, "bytes | memoryview | None"], None]


class Rooms(ABC):
    """A `Sink` that also names the memory for the next bytes, for transports that can receive
    directly into it."""

    @abstractmethod
    def __call__(self, number: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        """See `Sink`."""

    @abstractmethod
    def room(self, number: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        """The memory for these bytes of a range. Raises PrefixdError unless they are the next
        ones."""

    @abstractmethod
    def filled(self, number: int, length_bytes: int) -> None:
        """The next `length_bytes` of the memory that `room` returned last for this range are
        there."""


class _Renumbered(Rooms):
    def __init__(self, rooms: Rooms, numbers: Sequence[int]) -> None:
        self._rooms = rooms
        self._numbers = numbers

    def __call__(self, number: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        self._rooms(self._numbers[number], offset_bytes, data)

    def room(self, number: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        return self._rooms.room(self._numbers[number], offset_bytes, length_bytes)

    def filled(self, number: int, length_bytes: int) -> None:
        self._rooms.filled(self._numbers[number], length_bytes)


def renumbered(sink: Sink, numbers: Sequence[int]) -> Sink:
    """A sink that hands on range `i` as range `numbers[i]` of `sink`."""
    if isinstance(sink, Rooms):
        return _Renumbered(sink, numbers)
    return lambda number, offset_bytes, data: sink(numbers[number], offset_bytes, data)
