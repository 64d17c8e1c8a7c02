"""Which keys had a later save or a delete that a tier, whose records are not all read yet, does not
know of: its older records of these keys must not come back.

The newest generation is kept for each key, for `MAX_KEYS` of them. A disk may be away for long, so
keys beyond are kept as bits (a Bloom filter) in a fixed amount of memory: all of their records are
dropped then, and now and then one of a key that was never there: about one in 5,000 after four
million keys, one in 40 after `MOST_BITS_OF`. So a client may not delete any number of keys that are
not there, which costs it nothing and others their records. No old bytes come back.
"""

from __future__ import annotations

from typing import Final

from ...proto.keys import Key

MAX_KEYS: Final = 65_536
#: Newer than any record.
DELETED: Final = 2**64 - 1
#: Keys in the filter from which on deletes are refused.
MOST_BITS_OF: Final = 2**24
#: 16 MiB, whose pages take no memory until they are written.
_BITS: Final = 2**27
#: Keys are digests, so parts of them are as good as hashes.
_PLACES: Final = (0, 4, 8, 12)


class Superseded:
    """The keys and generations, since the last `clear`."""

    def __init__(self) -> None:
        self._newest: dict[Key, int] = {}
        self._bits: bytearray | None = None
        self._bits_of = 0

    def note(self, key: Key, generation: int) -> None:
        """Records of `key` up to this generation are out of date."""
        newest = self._newest
        if key in newest or len(newest) < MAX_KEYS:
            newest[key] = max(generation, newest.get(key, 0))
            return
        if self._bits is None:
            self._bits = bytearray(_BITS // 8)
        places = _bits_of(key)
        self._bits_of += not all(self._bits[bit >> 3] >> (bit & 7) & 1 for bit in places)
        for bit in places:
            self._bits[bit >> 3] |= 1 << (bit & 7)

    def covers(self, key: Key, generation: int) -> bool:
        """Is a record of an earlier start, of this generation, out of date?"""
        if generation <= self._newest.get(key, -1):
            return True
        bits = self._bits
        return bits is not None and all(bits[bit >> 3] >> (bit & 7) & 1 for bit in _bits_of(key))

    @property
    def crowded(self) -> bool:
        """Whether so many keys are noted that more of them would cost others their records."""
        return self._bits_of >= MOST_BITS_OF

    def clear(self) -> None:
        """All records of all tiers are known."""
        self._newest.clear()
        self._bits = None
        self._bits_of = 0

    def __len__(self) -> int:
        """How many keys are kept one by one."""
        return len(self._newest)


def _bits_of(key: Key) -> list[int]:
    return [int.from_bytes(key[at : at + 4], "little") % _BITS for at in _PLACES]
