"""What takes the bytes of a read: as they come, or where it says that it wants them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...proto.payload import FlatBytes

#: Takes what arrives of a read: the position of the range, the offset from its start, and the
#: bytes; or None instead of them, for an entry that the daemon could not read.
Sink: TypeAlias = Callable[[int, int, "bytes | memoryview | None"], None]


class Rooms(ABC):
    """A `Sink` that can say where bytes are wanted, for those who can receive them there."""

    @abstractmethod
    def __call__(self, number: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        """See `Sink`."""

    @abstractmethod
    def room(self, number: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        """Where these bytes of a range are to be put. Raises PrefixdError unless they are the
        next ones."""

    @abstractmethod
    def filled(self, number: int, length_bytes: int) -> None:
        """So many bytes were put into what `room` said last for this range, or into the next part
        of it."""


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
    """A sink for ranges that are `numbers` of those that `sink` knows."""
    if isinstance(sink, Rooms):
        return _Renumbered(sink, numbers)
    return lambda number, offset_bytes, data: sink(numbers[number], offset_bytes, data)
