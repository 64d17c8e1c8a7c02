"""Which records of a table hold at a start, and in which order they become entries again.

All of it runs on a thread beside the event loop, and there may be a million records. What the
interpreter does in one piece stops the loop for as long as it takes: measured, 376 ms for claims
of others meanwhile. So nothing here is one piece:

- Records wait as their rows, which are bytes: nothing for the cycle collector to walk over. As
  objects they made it do that again and again, up to half a second each time.
- They are sorted, looked up and freed in parts of some thousand.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ..proto.entry import EntryRecord, Location
from ..proto.keys import Key
from ..proto.vocabulary import Tier
from .row_table import Erasure
from .rows import KEY_SLICE, RowReader, RowRefused, decode_checked, decode_entry, is_continuation
from .store import StoredEntry

#: What a usage file says of the entry of this generation at a slab: `last_used_ns` and `hits`.
UsageReader = Callable[[int, int], tuple[int, int] | None]

#: Dicts that the keys lie in, by the upper bits of their hash: one grows at a time.
_SHARDS: Final = 2048
_SHARD_SHIFT: Final = 48
#: Sorted at once: a millisecond.
_SORTED_AT_ONCE: Final = 4096
#: Numbers of a sample for each part of that size, and of the sample at most.
_SAMPLES_A_PART: Final = 16
_MAX_SAMPLES: Final = 16384
#: A number to sort by, with the position of its record below.
_POSITION_BITS: Final = 32
_POSITION_MASK: Final = 2**_POSITION_BITS - 1


class Survivors:
    """The records that hold of an arena of `arena_slabs` slabs, of at most `slabs`.

    `read` all chunks of rows, then `settle`, then take the `batches`. Of records that overlap or
    have the same key the newest holds: the others were to be erased when the daemon ended.
    About 450 bytes of memory for each entry while they are read, half of it afterwards.
    """

    def __init__(
        self, tier: Tier, slabs: int, slab_bytes: int, arena_slabs: int, read_row: RowReader
    ) -> None:
        self._tier: Final = tier
        self._slabs: Final = slabs
        self._slab_bytes: Final = slab_bytes
        self._arena_bytes: Final = arena_slabs * slab_bytes
        self._read_row: Final = read_row
        #: by position: the row of a record; the record itself where it takes several rows, None
        #: where it was dropped or handed out
        self._rows: list[bytes | EntryRecord | None] = []
        self._row_slabs = array("I")
        self._hits = array("Q")
        #: last use and position of each, in parts
        self._uses: list[list[int]] = []
        #: the positions by key
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._taken = bytearray(slabs)
        self._overlap = False
        #: how many hold that were not handed out; right once it is settled
        self.left = 0
        #: what does not hold, with the reason, and what is to be erased for it
        self.dropped: list[tuple[Key, str]] = []
        self.erasures: list[Erasure] = []

    def read(self, rows: Sequence[tuple[int, bytes]], usage_of: UsageReader) -> None:
        """Take the rows of one chunk. Raises StoreError if a row that one names can't be read."""
        uses: list[int] = []
        kept, shards, slab_bytes = self._rows, self._shards, self._slab_bytes
        for slab, row in rows:
            if is_continuation(row):
                continue  # read with the entry that it belongs to, if there is one
            try:
                record = decode_entry(row, slab, slab_bytes, self._read_row)
                self._check_place(record)
            except RowRefused as problem:
                self.dropped.append((Key(row[KEY_SLICE]), str(problem)))
                self.erasures.append((slab, None))
                continue
            location, generation = record.location, record.generation
            if not self._take(location):
                self._overlap = True
            position = len(kept)
            kept.append(row if len(location) == 2 else record)
            self._row_slabs.append(slab)
            last_used_ns, hits = usage_of(slab, generation) or (record.created_ns, 0)
            self._hits.append(hits)
            uses.append(last_used_ns << _POSITION_BITS | position)
            shard = shards[hash(record.key) >> _SHARD_SHIFT & _SHARDS - 1]
            self.left += 1
            other = shard.setdefault(record.key, position)
            if other != position:
                self._keep_newer(shard, record, position, other)
        self._uses.append(uses)

    def settle(self) -> None:
        """All rows were read: `dropped` and `erasures` are complete afterwards."""
        while self._shards:
            self._shards.pop()
        if self._overlap:
            self._drop_overlaps()
        self._taken = bytearray()

    def batches(self, entries: int) -> Iterator[list[StoredEntry]]:
        """What holds, least recently used first, `entries` in a list. Can be taken once."""
        rows, hits, slab_bytes = self._rows, self._hits, self._slab_bytes
        for uses in sorted_parts(self._uses):
            for first in range(0, len(uses), entries):
                batch = []
                for use in uses[first : first + entries]:
                    position = use & _POSITION_MASK
                    row = rows[position]
                    if row is None:
                        continue
                    rows[position] = None
                    record = decode_checked(row, slab_bytes) if isinstance(row, bytes) else row
                    batch.append(StoredEntry(record, use >> _POSITION_BITS, hits[position]))
                if batch:
                    self.left -= len(batch)
                    yield batch

    def _record(self, position: int) -> EntryRecord:
        row = self._rows[position]
        assert row is not None
        return decode_checked(row, self._slab_bytes) if isinstance(row, bytes) else row

    def _check_place(self, record: EntryRecord) -> None:
        if record.tier is not self._tier:
            raise RowRefused(f"the record is of the {record.tier.label} tier")
        location, arena_bytes = record.location, self._arena_bytes
        if len(location) == 2 and location[0] and location[0] + location[1] <= arena_bytes:
            return  # nearly every one
        for index in range(0, len(location), 2):
            end = location[index] + location[index + 1]
            if not location[index] or end > arena_bytes:
                raise RowRefused(f"{end} bytes are beyond the {arena_bytes} that the arena has")

    def _take(self, location: Location) -> bool:
        """Mark the slabs of a location, unless one of them is marked."""
        taken, slab_bytes = self._taken, self._slab_bytes
        if len(location) == 2 and location[1] == slab_bytes:
            slab = location[0] // slab_bytes
            free = not taken[slab]
            taken[slab] = 1
            return free
        marked: list[tuple[int, int]] = []
        for index in range(0, len(location), 2):
            start = location[index] // slab_bytes
            slabs = location[index + 1] // slab_bytes
            end = start + slabs
            if taken.find(1, start, end) != -1:
                for begin, stop in marked:
                    taken[begin:stop] = bytes(stop - begin)
                return False
            taken[start:end] = b"\1" * slabs
            marked.append((start, end))
        return True

    def _keep_newer(
        self, shard: dict[bytes, int], record: EntryRecord, position: int, other: int
    ) -> None:
        why = "it was saved again later"
        if record.generation > self._record(other).generation:
            shard[record.key] = position
            self._drop(other, why)
        else:
            self._drop(position, why)

    def _drop_overlaps(self) -> None:
        self._taken = bytearray(self._slabs)
        parts: list[list[int]] = []
        for uses in self._uses:
            part = []
            for use in uses:
                position = use & _POSITION_MASK
                if self._rows[position] is not None:
                    # The newest first.
                    age = -self._record(position).generation
                    part.append(age << _POSITION_BITS | position)
            parts.append(part)
        for ages in sorted_parts(parts):
            for age in ages:
                position = age & _POSITION_MASK
                if not self._take(self._record(position).location):
                    self._drop(position, "its room was given to a later entry")

    def _drop(self, position: int, why: str) -> None:
        record = self._record(position)
        self._rows[position] = None
        self.left -= 1
        self.dropped.append((record.key, why))
        self.erasures.append((self._row_slabs[position], record.generation))


def sorted_parts(parts: list[list[int]]) -> Iterator[list[int]]:
    """All numbers of `parts`, the smallest first, in lists of some thousand; `parts` is empty
    then. Numbers that are equal should be few: they are sorted at once."""
    count = sum(map(len, parts))
    samples = min(_MAX_SAMPLES, count * _SAMPLES_A_PART // _SORTED_AT_ONCE)
    step = max(1, count // max(1, samples))
    sample = sorted([number for part in parts for number in part[::step]])
    bounds = sample[_SAMPLES_A_PART::_SAMPLES_A_PART]
    found: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    while parts:
        for number in parts.pop():
            found[bisect(bounds, number)].append(number)
    found.reverse()
    while found:
        part = found.pop()
        part.sort()
        if part:
            yield part
