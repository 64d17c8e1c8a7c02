"""The recency stack of a trace: how large an LRU cache must be for each block reference to hit.

`tiers.eviction.stack_distance` knows the same of any stream of keys, one key after the other. Here
the whole trace is there in columns, and a prompt has many blocks in a row that an earlier prompt
had in a row, too: such a row is found, measured and moved as one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final, TypeAlias

from .trace import TraceColumns

#: So many references share one sum, as bits to shift by, and so many sums one of the next level.
_LEAF_BITS: Final = 8
_SUM_BITS: Final = 4
_LAST_SUM: Final = (1 << _SUM_BITS) - 1
#: A reference has so many bytes.
_BYTES: Final = 4


#: Blocks of a request that were last referenced in a row, too: the place of the first of them in
#: the request, their number, and how large a cache must be to hold the first. With the root most
#: recent, each further block takes one more; else each takes one less.
Row: TypeAlias = tuple[int, int, int]


class RecencyStack:
    """The blocks of a trace by their last reference, from request to request.

    `root_mru`: a request touches its blocks in reverse, so that its first one ends up as the most
    recent. Memory: about 1.1 bytes for each reference and 8 for each different block, beside the
    trace.
    """

    def __init__(self, trace: TraceColumns, *, root_mru: bool) -> None:
        self._bytes = memoryview(trace.references).cast("B")
        self._ends = trace.ends
        self._root_mru = root_mru
        #: The last reference of each block.
        self._last = array("Q", bytes(8 * trace.unique_blocks))
        #: Blocks that were referenced: their numbers are below it.
        self._known = 0
        #: 1 for the last reference of each block so far, else 0.
        self._live = bytearray(trace.blocks)
        #: The sums of `_live`, then sums of sums, up to one.
        self._levels: list[list[int]] = []
        size, bits = trace.blocks, _LEAF_BITS
        while size:
            size = size >> bits
            self._levels.append([0] * (size + 1))
            bits = _SUM_BITS

    def reference(self, index: int, blocks: list[int]) -> list[Row]:
        """Reference the blocks of request `index`; the requests come in order, each of them once.
        Returns what was known of its beginning; blocks after the first new one are in no row."""
        start = self._ends[index - 1] if index else 0
        if len(set(blocks)) < len(blocks):
            return self._repeated(start, blocks)
        last, known, live = self._last, self._known, self._live
        count = len(blocks)
        rows: list[Row] = []
        first = 0
        while first < count and (block := blocks[first]) < known:
            place = last[block]
            distance, most = self._distance(place)
            if most > count - first:
                most = count - first
            later = live.find(0, place, place + most)
            if later >= 0:
                most = later - place
            if most > 1:
                most = self._same(place, start + first, most)
            rows.append((first, most, distance))
            first += most
        if first < count:
            # New blocks are numbered on: if the last one has this number, all of them are new.
            if blocks[-1] - known != count - first - 1:
                for block in blocks[first:]:
                    if block < known:
                        self._forget(last[block], 1)
            self._known = max(known, max(blocks) + 1)
        for first, most, _ in rows:
            self._forget(last[blocks[first]], most)
        for place, block in enumerate(blocks, start):
            last[block] = place
        live[start : start + count] = b"\1" * count
        self._count(start, count, 1)
        return rows

    def _distance(self, place: int) -> tuple[int, int]:
        """How large a cache must be to hold the block last referenced at `place`, and how many
        references from there on are moved alike."""
        if not self._root_mru:
            return self._from(place), len(self._live)
        owner = bisect_right(self._ends, place)
        end = self._ends[owner]
        before = self._ends[owner - 1] if owner else 0
        return self._from(end) + self._live.count(1, before, place + 1), end - place

    def _same(self, place: int, start: int, most: int) -> int:
        """How many of `most` blocks from `start` on are those from `place` on."""
        ours = self._bytes[place * _BYTES : (place + most) * _BYTES]
        its = self._bytes[start * _BYTES : (start + most) * _BYTES]
        if ours == its:
            return most
        # The lowest bit in which they differ.
        other = int.from_bytes(ours, "little") ^ int.from_bytes(its, "little")
        return ((other & -other).bit_length() - 1) // (8 * _BYTES)

    def _repeated(self, start: int, blocks: list[int]) -> list[Row]:
        """The same for a request that has a block twice."""
        last, known = self._last, self._known
        rows: list[Row] = []
        for first, block in enumerate(blocks):
            if block >= known:
                break
            rows.append((first, 1, self._distance(last[block])[0]))
        for block in {block for block in blocks if block < known}:
            self._forget(last[block], 1)
        places = list(enumerate(blocks, start))
        # The last touch of a repeated block counts: with the root most recent, its first place.
        for place, block in reversed(places) if self._root_mru else places:
            last[block] = place
        for block in set(blocks):
            self._live[last[block]] = 1
            self._count(last[block], 1, 1)
        self._known = max(known, max(blocks) + 1)
        return rows

    def _from(self, place: int) -> int:
        """How many blocks have their last reference at `place` or later."""
        index = (place >> _LEAF_BITS) + 1
        found = self._live.count(1, place, index << _LEAF_BITS)
        for sums in self._levels:
            last = index | _LAST_SUM
            found += sum(sums[index : last + 1])
            index = (last >> _SUM_BITS) + 1
        return found

    def _forget(self, place: int, count: int) -> None:
        """These references are not the last of their blocks any more."""
        self._live[place : place + count] = bytes(count)
        self._count(place, count, -1)

    def _count(self, place: int, count: int, sign: int) -> None:
        """Count so many references in the sums, or no more."""
        while count:
            leaf = place >> _LEAF_BITS
            some = ((leaf + 1) << _LEAF_BITS) - place
            if some > count:
                some = count
            place += some
            count -= some
            some *= sign
            for sums in self._levels:
                sums[leaf] += some
                leaf >>= _SUM_BITS
