"""What happened to entries, as far back as it fits: a ring of small records. Pure.

Nothing depends on it: it answers people who ask why an entry is not there, and tells misses of
what was evicted from misses of what was never saved. It dies with the daemon.

A record, 40 bytes, little-endian:

| offset | type | |
|---|---|---|
| 0 | 16 bytes | the first half of the key |
| 16 | i64 | when, in nanoseconds |
| 24 | u32 | the session that did it, or for which it was done; 0: none |
| 28 | u32 | the number of the record before it in its bucket, plus 1; 0: there is none |
| 32 | u8 | what: `Happening` |
| 33 | u8 | tier |
| 34 | u8 | save reason |
| 35 | 5 bytes | zeros |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from struct import Struct
from typing import Final, NamedTuple

from ...proto.vocabulary import SaveReason, Tier
from .entries import Entry

_RECORD: Final = Struct("<16sqIIBBB5x")
RECORD_BYTES: Final = _RECORD.size
KEY_BYTES: Final = 16
#: What a record takes with its share of the buckets.
_COST_BYTES: Final = RECORD_BYTES + 4
#: Those of one bucket may be many.
_MOST_LOOKS: Final = 64
#: When everything is looked for: below a millisecond.
_LOOKED_AT_ONCE: Final = 2_048
_MASK_32: Final = 2**32 - 1
#: Sessions whose owners are known, those that ended included.
_MOST_SESSIONS: Final = 4096


class Happening(IntEnum):
    """What a record says."""

    SAVED = 1
    EVICTED_FOR_SAVE = 2
    EVICTED_BY_OPERATOR = 3
    EVICTED_BY_RESIZE = 4
    DELETED = 5
    DAMAGED = 6
    #: a better copy of it was found in another tier while that recovered
    REPLACED = 7
    EVICTED_UNDER_PRESSURE = 8


class EvictionCause(StrEnum):
    """For what an entry was evicted. Of strings, whose hash takes no call in Python."""

    SAVE = "save"
    """A save needed its room."""
    OPERATOR = "operator"
    """An operator asked for room."""
    RESIZE = "resize"
    """An operator made the tier smaller."""
    PRESSURE = "pressure"
    """Memory was short."""

    @property
    def happening(self) -> Happening:
        """What the journal says of it."""
        return _HAPPENINGS[self]


_HAPPENINGS: Final = {
    EvictionCause.SAVE: Happening.EVICTED_FOR_SAVE,
    EvictionCause.OPERATOR: Happening.EVICTED_BY_OPERATOR,
    EvictionCause.RESIZE: Happening.EVICTED_BY_RESIZE,
    EvictionCause.PRESSURE: Happening.EVICTED_UNDER_PRESSURE,
}
CAUSES: Final = {happening: cause for cause, happening in _HAPPENINGS.items()}


class Happened(NamedTuple):
    """One record. `key`: the first half."""

    key: bytes
    at_ns: int
    session: int
    what: Happening
    tier: Tier
    reason: SaveReason


class Journal:
    """The last of what happened, in at most `size_bytes`; 0: nothing is remembered."""

    def __init__(self, size_bytes: int) -> None:
        self.most: Final = size_bytes // _COST_BYTES
        #: records that were ever written
        self.written = 0
        #: the owners and labels of the last sessions
        self._owners: dict[int, tuple[str, str]] = {}
        # Zeros that nobody wrote to take no memory.
        self._ring = bytearray(self.most * RECORD_BYTES)
        buckets = 1 << max(0, self.most.bit_length() - 1)
        self._mask: Final = buckets - 1
        #: by bucket: the number of its last record plus 1, modulo 2**32
        self._last = array("I", bytes(4 * buckets)) if self.most else array("I")
        self._pack = _RECORD.pack_into

    def __len__(self) -> int:
        """Records that are remembered."""
        return min(self.written, self.most)

    def know(self, session: int, owner: str, label: str) -> None:
        """Whose session that is, also after it ended."""
        self._owners[session] = owner, label
        if len(self._owners) > _MOST_SESSIONS:
            del self._owners[next(iter(self._owners))]

    def who(self, session: int) -> tuple[str, str]:
        """The owner and the label of a session; empty if that is not known any more."""
        return self._owners.get(session, ("", ""))

    def note(
        self,
        what: Happening,
        entries: Iterable[Entry],
        now_ns: int,
        session: int = 0,
    ) -> None:
        """Remember that it happened to these, in this order. A save has to wait for it: half a
        microsecond each, so that it takes no attribute twice and no call more than it needs."""
        most, number = self.most, self.written
        if not most:
            return
        pack, ring, last, mask = self._pack, self._ring, self._last, self._mask
        for entry in entries:
            key = entry.key
            bucket = hash(key) & mask
            place = number % most * 40
            # Of the key as much as fits is taken.
            pack(ring, place, key, now_ns, session, last[bucket], what, entry.tier, entry.reason)
            number += 1
            last[bucket] = number & _MASK_32
        self.written = number

    def newest_of(self, beginning: bytes) -> Iterator[Happened | None]:
        """What happened to keys that begin so, the newest first. None: a step that looked at some
        more records, after which others may write. What they overwrite is left out."""
        beginning = beginning[:KEY_BYTES]
        ring, end = self._ring, self.written
        while end > (oldest := self.written - len(self)):
            # As many as lie one behind the other.
            first = max(oldest, end - _LOOKED_AT_ONCE, (end - 1) // self.most * self.most)
            place = first % self.most * RECORD_BYTES
            stop = place + (end - first) * RECORD_BYTES
            places: list[int] = []
            while (found := ring.find(beginning, place, stop)) >= 0:
                # In the middle of a record it says nothing, and nothing more of that record does.
                inside = found % RECORD_BYTES
                if not inside:
                    places.append(found)
                place = found + RECORD_BYTES - inside
            yield from [self._record(place)[0] for place in reversed(places)]
            yield None
            end = first

    def fate(self, key: bytes) -> Happened | None:
        """How a key left the last time, and where it was; SAVED: it came, and never left; None:
        nothing is known. Takes no longer the more there is."""
        if not self.written:
            return None
        link = self._last[hash(key) & self._mask]
        fate: Happened | None = None
        for _ in range(_MOST_LOOKS):
            # Numbers are kept modulo 2**32: how far it is back says which is meant.
            back = (self.written - (link - 1)) & _MASK_32
            if not link or not 0 < back <= len(self):
                break
            place = (self.written - back) % self.most * RECORD_BYTES
            record, link = self._record(place)
            if record.key == key[:KEY_BYTES]:
                fate = record
                if record.what is not Happening.SAVED:
                    break
        return fate

    @property
    def reaches_back(self) -> bool:
        """Is everything remembered that happened since the start?"""
        return self.most > 0 and self.written <= self.most

    def since_ns(self) -> int:
        """When the oldest that is remembered happened; 0: nothing is."""
        if not self.written:
            return 0
        oldest = (self.written - len(self)) % self.most
        return self._record(oldest * RECORD_BYTES)[0].at_ns

    def _record(self, place: int) -> tuple[Happened, int]:
        key, at_ns, session, previous, what, tier, reason = _RECORD.unpack_from(self._ring, place)
        happened = Happened(key, at_ns, session, Happening(what), Tier(tier), SaveReason(reason))
        return happened, previous
