"""The journal: what happened to entries, in a ring of small records. Pure.

No decision depends on it. It tells operators why an entry is not there, and tells misses of evicted
entries from misses of entries that were never saved. It ends with the daemon.

A record, 40 bytes, little-endian:

| offset | type | |
|---|---|---|
| 0 | 16 bytes | the first half of the key |
| 16 | i64 | when, in nanoseconds |
| 24 | u32 | the session that did it, or whose save caused it; 0: none |
| 28 | u32 | the number of the previous record in its bucket, plus 1; 0: none |
| 32 | u8 | what: `Happening` |
| 33 | u8 | tier |
| 34 | u8 | save reason |
| 35 | 5 bytes | zeros |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, StrEnum
from struct import Struct
from typing import Final, NamedTuple

from ...proto.kernel import native
from ...proto.vocabulary import SaveReason, Tier
from .entries import EntryState

_RECORD: Final = Struct("<16sqIIBBB5x")
#: What a search along a bucket needs of a record: key, time, number of the previous one, and what.
_LOOK: Final = Struct("<16sq4xIB")
_EVER_NS: Final = 2**63 - 1
RECORD_BYTES: Final = _RECORD.size
KEY_BYTES: Final = 16
#: The memory of a record, with its share of the buckets.
_COST_BYTES: Final = RECORD_BYTES + 4
#: Beside its records, a journal has this part of their memory for `LeftKeys`.
LEFT_PART: Final = 4
#: Records of a bucket that `fate` looks at, as there may be many.
_MOST_LOOKS: Final = 64
#: Records that one step of `newest_of` looks at. Takes less than a millisecond.
_LOOKED_AT_ONCE: Final = 2_048
_MASK_32: Final = 2**32 - 1
#: Sessions whose owners are remembered, ended ones included.
_MOST_SESSIONS: Final = 4096


class Happening(IntEnum):
    """What a record says."""

    SAVED = 1
    EVICTED_FOR_SAVE = 2
    EVICTED_BY_OPERATOR = 3
    EVICTED_BY_RESIZE = 4
    DELETED = 5
    DAMAGED = 6
    #: The recovery of another tier found a copy that survives longer.
    REPLACED = 7
    EVICTED_UNDER_PRESSURE = 8


_SAVED: Final = Happening.SAVED


class EvictionCause(StrEnum):
    """Why an entry was evicted. A StrEnum, because the hash of a string takes no Python call."""

    SAVE = "save"
    """A save needed its room."""
    OPERATOR = "operator"
    """An operator asked for room."""
    RESIZE = "resize"
    """An operator made the tier smaller."""
    PRESSURE = "pressure"
    """Memory was short."""


#: How the journal records an eviction.
HAPPENINGS: Final = {
    EvictionCause.SAVE: Happening.EVICTED_FOR_SAVE,
    EvictionCause.OPERATOR: Happening.EVICTED_BY_OPERATOR,
    EvictionCause.RESIZE: Happening.EVICTED_BY_RESIZE,
    EvictionCause.PRESSURE: Happening.EVICTED_UNDER_PRESSURE,
}
CAUSES: Final = {happening: cause for cause, happening in HAPPENINGS.items()}


class Happened(NamedTuple):
    """One record. `key` is the first half of the key."""

    key: bytes
    at_ns: int
    session: int
    what: Happening
    tier: Tier
    reason: SaveReason


class LeftKeys:
    """Which keys left a tier, for longer than there are records of them: two Bloom filters. When
    one has as many keys as it can tell apart, the older one is emptied and takes the next ones."""

    def __init__(self, size_bytes: int) -> None:
        # A power of two, so that a mask finds the bit.
        bits = 8 << max(0, (size_bytes // 2).bit_length() - 1)
        self._mask: Final = bits - 1
        #: With two bits a key, one in a hundred others seems to be in a full filter.
        self.most: Final = bits // 20
        # Their pages take no memory until they are written.
        self._new = bytearray(bits // 8)
        self._old = bytearray(bits // 8)
        self._count = 0

    def add(self, key: bytes) -> None:
        self.add_all((key,))

    def add_all(self, keys: Iterable[bytes]) -> None:
        mask, bits, count = self._mask, self._new, self._count
        for key in keys:
            if count >= self.most:
                self._old = bits
                self._new = bits = bytearray(len(bits))
                count = 0
            count += 1
            hashed = hash(key)
            first, second = hashed & mask, hashed >> 32 & mask
            bits[first >> 3] |= 1 << (first & 7)
            bits[second >> 3] |= 1 << (second & 7)
        self._count = count

    def room_for(self, entries: Sequence[EntryState]) -> bytearray | None:
        """The filter in which the caller marks the keys of these entries. None: they are added
        already, as they are too many for one."""
        if self._count + len(entries) > self.most:
            self.add_all([entry.key for entry in entries])
            return None
        self._count += len(entries)
        return self._new

    def has(self, key: bytes) -> bool:
        hashed, mask = hash(key), self._mask
        first, second = hashed & mask, hashed >> 32 & mask
        for bits in (self._new, self._old):
            if bits[first >> 3] >> (first & 7) & 1 and bits[second >> 3] >> (second & 7) & 1:
                return True
        return False


class Journal:
    """The latest records that fit into `size_bytes`. 0: nothing is recorded."""

    def __init__(self, size_bytes: int, started_ns: int = 0, unsure_ns: int = 0) -> None:
        """`unsure_ns`: for how long after the start a key without a record may be of an earlier
        one."""
        self.most: Final = size_bytes // _COST_BYTES
        self._left: Final = LeftKeys(size_bytes // LEFT_PART)
        self.started_ns: Final = started_ns
        self.unsure_until_ns: Final = started_ns + unsure_ns
        #: Records that were written since the start.
        self.written = 0
        #: Owners and labels of the latest sessions.
        self._owners: dict[int, tuple[str, str]] = {}
        # The pages of a new bytearray take no memory until they are written.
        self._ring = bytearray(self.most * RECORD_BYTES)
        buckets = 1 << max(0, self.most.bit_length() - 1)
        self._mask: Final = buckets - 1
        #: By bucket: the number of its last record plus 1, modulo 2**32.
        self._last = array("I", bytes(4 * buckets)) if self.most else array("I")
        self._pack = _RECORD.pack_into

    def __len__(self) -> int:
        """The number of records that are kept."""
        return min(self.written, self.most)

    def know(self, session: int, owner: str, label: str) -> None:
        """Remember the owner and label of a session, also after it ends."""
        self._owners[session] = owner, label
        if len(self._owners) > _MOST_SESSIONS:
            del self._owners[next(iter(self._owners))]

    def who(self, session: int) -> tuple[str, str]:
        """The owner and label of a session; empty if they are no longer known."""
        return self._owners.get(session, ("", ""))

    def note(
        self,
        what: Happening,
        entries: Sequence[EntryState],
        now_ns: int,
        session: int = 0,
    ) -> None:
        """Record that `what` happened to these entries, in this order.

        A save waits for it, so in Python, too, it looks up no attribute twice and makes no call
        that it can do without.
        """
        most, number = self.most, self.written
        if not most:
            return
        ring, last = self._ring, self._last
        if native:
            left = None if what is _SAVED else self._left.room_for(entries)
            native.note(ring, last, number, now_ns, session, what, entries, left)
            self.written = number + len(entries)
            return
        if what is not _SAVED:
            self._left.add_all([entry.key for entry in entries])
        pack, mask = self._pack, self._mask
        for entry in entries:
            key = entry.key
            bucket = hash(key) & mask
            place = number % most * 40
            # `pack` cuts the key off at the size of its field.
            pack(ring, place, key, now_ns, session, last[bucket], what, entry.tier, entry.reason)
            number += 1
            last[bucket] = number & _MASK_32
        self.written = number

    def newest_of(self, beginning: bytes) -> Iterator[Happened | None]:
        """Records of keys with this beginning, the newest first. Yields None after each step, and
        records may be written between two steps. Those that they overwrite are left out."""
        beginning = beginning[:KEY_BYTES]
        ring, end = self._ring, self.written
        while end > (oldest := self.written - len(self)):
            # Only records that are contiguous in the ring.
            first = max(oldest, end - _LOOKED_AT_ONCE, (end - 1) // self.most * self.most)
            place = first % self.most * RECORD_BYTES
            stop = place + (end - first) * RECORD_BYTES
            places: list[int] = []
            while (found := ring.find(beginning, place, stop)) >= 0:
                # A match inside of a record means nothing, and rules that record out.
                inside = found % RECORD_BYTES
                if not inside:
                    places.append(found)
                place = found + RECORD_BYTES - inside
            yield from [self._record(place)[0] for place in reversed(places)]
            yield None
            end = first

    def fate(self, key: bytes, before_ns: int = _EVER_NS) -> Happened | None:
        """The latest record of how a key left; if there is none, that of its save (SAVED); None if
        nothing is known. Records after `before_ns` don't count. The time does not depend on the
        number of records."""
        if not self.written:
            return None
        link = self._last[hash(key) & self._mask]
        beginning, ring = key[:KEY_BYTES], self._ring
        found: int | None = None
        # A client may name a thousand keys with many records each, so only one becomes an object.
        for _ in range(_MOST_LOOKS):
            # Record numbers are kept modulo 2**32; the distance from the newest one is unique.
            back = (self.written - (link - 1)) & _MASK_32
            if not link or not 0 < back <= len(self):
                break
            place = (self.written - back) % self.most * RECORD_BYTES
            name, at_ns, link, what = _LOOK.unpack_from(ring, place)
            if name == beginning and at_ns <= before_ns:
                found = place
                if what != _SAVED:
                    break
        return None if found is None else self._record(found)[0]

    def has_left(self, key: bytes) -> bool:
        """Did this key leave a tier since the start? Wrongly True for at most two keys in a
        hundred. When more keys left than there is room for, the first of them are forgotten."""
        return self._left.has(key)

    def since_ns(self) -> int:
        """The time of the oldest record that is kept; 0 if there is none."""
        if not self.written:
            return 0
        oldest = (self.written - len(self)) % self.most
        return self._record(oldest * RECORD_BYTES)[0].at_ns

    def _record(self, place: int) -> tuple[Happened, int]:
        key, at_ns, session, previous, what, tier, reason = _RECORD.unpack_from(self._ring, place)
        happened = Happened(key, at_ns, session, Happening(what), Tier(tier), SaveReason(reason))
        return happened, previous
