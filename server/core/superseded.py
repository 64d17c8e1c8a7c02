"""Which keys had a later save or a delete that a tier, whose records are not all read yet, does not
know of: its older records of these keys must not come back.

The newest generation is kept for each key, for `MAX_KEYS` of them. A disk may be away for long, so
keys beyond are kept as bits (a Bloom filter) in a fixed amount of memory: all of their records are
dropped then, and now and then one of a key that was never there. No old bytes come back.
"""

from __future__ import annotations

from typing import Final

from ...proto.keys import Key

MAX_KEYS: Final = 65_536
#: Newer than any record.
DELETED: Final = 2**64 - 1
_BITS: Final = 2**24
#: Keys are digests, so parts of them are as good as hashes.
_PLACES: Final = (0, 3, 6, 9)


class Superseded:
    """The keys and generations, since the last `clear`."""

    def __init__(self) -> None:
        self._newest: dict[Key, int] = {}
        self._bits: bytearray | None = None

    def note(self, key: Key, generation: int) -> None:
        """Records of `key` up to this generation are out of date."""
        newest = self._newest
        if key in newest or len(newest) < MAX_KEYS:
            newest[key] = max(generation, newest.get(key, 0))
            return
        if self._bits is None:
            self._bits = bytearray(_BITS // 8)
        for place in _PLACES:
            bit = int.from_bytes(key[place : place + 3], "little")
            self._bits[bit >> 3] |= 1 << (bit & 7)

    def covers(self, key: Key, generation: int) -> bool:
        """Is a record of an earlier start, of this generation, out of date?"""
        if generation <= self._newest.get(key, -1):
            return True
        bits = self._bits
        return bits is not None and all(
            bits[bit >> 3] >> (bit & 7) & 1
            for bit in (int.from_bytes(key[place : place + 3], "little") for place in _PLACES)
        )

    def clear(self) -> None:
        """All records of all tiers are known."""
        self._newest.clear()
        self._bits = None

    def __len__(self) -> int:
        """How many keys are kept one by one."""
        return len(self._newest)
