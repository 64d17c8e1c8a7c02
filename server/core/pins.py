"""What the claims of one session hold: many small dicts once it is much.

A dict of a million entries takes 30 ms to grow, with everything standing still meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .entries import Entry

#: A session that holds so many has its entries in `_PARTS` dicts from then on.
SPLIT_AT: Final = 8_192
#: A power of two.
_PARTS: Final = 256


class Pins:
    """The entries that the claims of a session hold, and how many of its claims hold each.

    An entry is in `parts[hash(entry.key) & mask]`, which `pin` and `unpin` change without a call
    for each; `changed` follows.
    """

    __slots__ = ("changes", "mask", "parts")

    def __init__(self) -> None:
        self.parts: list[dict[Entry, int]] = [{}]
        self.mask = 0
        #: grows with every change
        self.changes = 0

    def changed(self) -> None:
        """After entries were added or removed."""
        self.changes += 1
        if not self.mask and len(self.parts[0]) >= SPLIT_AT:
            (one,) = self.parts
            self.parts = [{} for _ in range(_PARTS)]
            self.mask = _PARTS - 1
            for entry, count in one.items():
                self.parts[hash(entry.key) & self.mask][entry] = count

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[Entry]:
        for part in self.parts:
            yield from part

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.parts[hash(entry.key) & self.mask]
