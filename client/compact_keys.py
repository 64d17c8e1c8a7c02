"""A set of keys in few bytes, for routers that follow many nodes.

A key is represented by its mark: its first 8 bytes, a number in little-endian (0 counts as 1). Keys
are SHA-256, so two keys of a node with the same mark are as likely as a collision of 64 random
bits: of 32,768 keys and one that is not among them, 1.8e-15. Such a key would count as resident, or
leave with the other one. For routing that is exact enough, because the node checks the whole key.

The marks lie in one array, hashed by division, with linear probing. Removing moves later marks
back, so nothing is left behind. The array has 4/3 to 2 slots for each key, which is at most 16
bytes a key (and 128 bytes at least).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

#: Of a key, the bytes that its mark is made of.
MARK_BYTES: Final = 8
_LEAST_SLOTS: Final = 16


def mark_of(key: bytes) -> int:
    """The mark of a key: 1 ... 2**64 - 1."""
    return int.from_bytes(key[:MARK_BYTES], "little") or 1


class CompactKeys:
    """A set of keys, by their marks. One thread at a time may change it. `in` may run on others
    meanwhile, and then miss a key that is there."""

    __slots__ = ("_count", "_slots")

    def __init__(self) -> None:
        #: Marks; 0: an empty slot. At least one slot is empty.
        self._slots = array("Q", bytes(8 * _LEAST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """The memory of the array."""
        return len(self._slots) * self._slots.itemsize

    def __contains__(self, mark: object) -> bool:
        """Whether the key with this mark is in the set."""
        if not isinstance(mark, int):
            return False
        slots = self._slots
        room = len(slots)
        at = mark % room
        while held := slots[at]:
            if held == mark:
                return True
            at = at + 1 if at + 1 < room else 0
        return False

    def add(self, marks: Iterable[int]) -> None:
        """Add keys by their marks."""
        slots, count = self._slots, self._count
        room = len(slots)
        for mark in marks:
            at = mark % room
            while held := slots[at]:
                if held == mark:
                    break
                at = at + 1 if at + 1 < room else 0
            else:
                slots[at] = mark
                count += 1
                if 4 * count > 3 * room:
                    room = 2 * count
                    slots = self._moved_to(room)
        self._count = count

    def discard(self, marks: Iterable[int]) -> None:
        """Remove those of these keys that are in the set."""
        for mark in marks:
            self._discard(mark)

    def _discard(self, mark: int) -> None:
        slots = self._slots
        room = len(slots)
        at = mark % room
        while (held := slots[at]) != mark:
            if not held:
                return
            at = at + 1 if at + 1 < room else 0
        # Fill the gap with a later mark that may lie there, then the gap that this leaves.
        gap = at
        while True:
            at = at + 1 if at + 1 < room else 0
            held = slots[at]
            if not held:
                break
            if (at - held) % room >= (at - gap) % room:
                slots[gap] = held
                gap = at
        slots[gap] = 0
        self._count -= 1
        if 2 * self._count < room and room > _LEAST_SLOTS:
            self._moved_to(max(_LEAST_SLOTS, 3 * self._count // 2))

    def _moved_to(self, room: int) -> array[int]:
        """New slots, with the same marks."""
        slots = array("Q", bytes(8 * room))
        for mark in self._slots:
            if mark:
                at = mark % room
                while slots[at]:
                    at = at + 1 if at + 1 < room else 0
                slots[at] = mark
        self._slots = slots
        return slots
