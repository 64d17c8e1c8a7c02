"""The records of a tier: which entries its arena holds. Files of the daemon's alone.

    records    row i (`tiers.rows`, 128 bytes) belongs to slab i of the arena: the record of the
               entry that begins there, or zeros. Row 0 belongs to the arena's header: it is
               where probes write. Kept in a `RowTable`: LMDB on disk, a flat file in shm.
    usage      row i (32 bytes): use of the entry that begins at slab i.

    usage row   offset  bytes  type  meaning
                ------  -----  ----  ------------------------------
                     0      8  u64   generation of the entry
                     8      8  i64   last used, wall-clock ns
                    16      8  u64   hits
                    24      4  raw   zeros
                    28      4  u32   CRC32C of bytes 0..27

Every row speaks for itself: a bad one is one entry, whatever it says. It has its room on the
device before the first entry is admitted to the slab, so that neither a full device nor the
number of entries matters afterwards (on a copy-on-write file system, where overwriting takes
room, an erasure may have to wait for some; it is tried again).

Usage is written without a sync and checked row by row: what is damaged there is a lost hint. It
is a flat file in every tier: in LMDB each hint would copy a page, 128 times its size.

Which records of a table hold at a start, and in which order they become entries again.

All of it runs on a thread beside the event loop, and there may be a million records. What the
interpreter does in one piece stops the loop for as long as it takes: measured, 376 ms for claims
of others meanwhile. So nothing here is one piece:

- Records wait as their rows, which are bytes: nothing for the cycle collector to walk over. As
  objects they made it do that again and again, up to half a second each time.
- They are sorted, looked up and freed in parts of some thousand.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from ..proto.entry import EntryRecord, Location, Recorded
from ..proto.keys import Key
from ..proto.layout import crc32c
from ..proto.vocabulary import Tier
from .files import open_own_file, pwrite_all, secure_range
from .files import write_errors as errors
from .rows import (
    KEY_SLICE,
    Erasure,
    RowReader,
    RowRefused,
    RowTable,
    decode_checked,
    decode_entry,
    encode_rows,
    generation_of,
    is_continuation,
)
from .store import EntryRef, RecoveryBatch, StoredEntry, StoreError, Usage

USAGE_FILE: Final = "usage"

_USAGE: Final = struct.Struct("<QqQ4xI")
_USAGE_CRC: Final = struct.Struct("<I")
USAGE_BYTES: Final = _USAGE.size
_NO_USAGE: Final = bytes(USAGE_BYTES)
#: Entries in a batch of a recovery.
_BATCH_ENTRIES: Final = 4096


class Records:
    """The records of the tier in `directory`, for `slabs` slabs of `slab_bytes`.

    Takes over `table`, which gets a row for each slab. `forget` and `unerased` never do I/O;
    everything else does. All may be used from any thread. Raises StoreError if the files can't
    be used.
    """

    def __init__(
        self, directory: Path, tier: Tier, slabs: int, slab_bytes: int, table: RowTable
    ) -> None:
        self.directory: Final = directory
        self.tier: Final = tier
        self.slabs: Final = slabs
        self.slab_bytes: Final = slab_bytes
        self.table: Final = table
        #: held for I/O; never by `forget`
        self._io = threading.Lock()
        self._unerased_lock = threading.Lock()
        #: records that must not be found again
        self._unerased: set[Erasure] = set()
        self._secured_slabs = 0
        self._usage_fd = -1
        with errors(f"open the records in {directory}"):
            try:
                self._usage_fd = self._open_usage()
                if os.fstat(self._usage_fd).st_size > slabs * USAGE_BYTES:
                    os.ftruncate(self._usage_fd, slabs * USAGE_BYTES)
            except BaseException:
                self.close()
                raise

    def _open_usage(self) -> int:
        """A usage file that can't be used is set aside: hints are no reason not to start."""
        path = self.directory / USAGE_FILE
        try:
            return open_own_file(path, 0o600)
        except (OSError, StoreError):
            aside = (path.with_name(f"{USAGE_FILE}.damaged-{number}") for number in count(1))
            path.rename(next(name for name in aside if not os.path.lexists(name)))
            return open_own_file(path, 0o600)

    def secure(self, slabs: int) -> None:
        """Take room for the rows of the first `slabs` slabs. Raises StoreFull, StoreError."""
        first, more = self._secured_slabs, slabs - self._secured_slabs
        if more <= 0:
            return
        self.table.secure(slabs)
        with errors(f"make room for records in {self.directory}"):
            secure_range(self._usage_fd, first * USAGE_BYTES, more * USAGE_BYTES)
        self._secured_slabs = slabs

    # ---- changes

    @property
    def unerased(self) -> int:
        """Records that were forgotten and may still stand."""
        return len(self._unerased)

    def forget(self, entries: Iterable[EntryRef]) -> None:
        """Erase these records with the next `flush` or `put`."""
        self._forget((entry.location[0] // self.slab_bytes, entry.generation) for entry in entries)

    def flush(self) -> None:
        """Erase what was forgotten. Returns when it is durable. Raises StoreError, StoreFull."""
        if self._unerased:
            self.put(())

    def put(self, entries: Sequence[Recorded]) -> None:
        """Erase what was forgotten, then write these records. Returns when all is durable.

        Raises StoreError, StoreFull; then the records are forgotten, and the rest is as before.
        """
        with self._io:
            with self._unerased_lock:
                erased = list(self._unerased)
            try:
                rows = [row for entry in entries for row in encode_rows(entry, self.slab_bytes)]
                self.table.apply(erased, rows)
            except BaseException:
                # Some of them may be on the device; their room goes to other entries now.
                self.forget(entries)
                raise
            with self._unerased_lock:
                self._unerased.difference_update(erased)

    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Remember use, without a sync. Raises StoreError, StoreFull."""
        with errors(f"record usage in {self.directory}"):
            for usage in usages:
                row = encode_usage(usage.entry.generation, usage.last_used_ns, usage.hits)
                slab = usage.entry.location[0] // self.slab_bytes
                pwrite_all(self._usage_fd, row, slab * USAGE_BYTES)

    def probe(self) -> None:
        """Write the row that belongs to no entry, durably. Raises StoreError, StoreFull."""
        with self._io:
            self.table.probe()

    def close(self) -> None:
        """May be called twice. Does not wait for what was forgotten."""
        self.table.close()
        if self._usage_fd >= 0:
            os.close(self._usage_fd)
        self._usage_fd = -1

    def _forget(self, rows: Iterable[Erasure]) -> None:
        with self._unerased_lock:
            self._unerased.update(rows)

    # ---- what is there

    def scan(self) -> Iterator[list[EntryRecord]]:
        """Every record that can be read and was not forgotten, in batches. Raises StoreError."""
        for _, rows in self.table.chunks():
            batch = []
            for slab, row in rows:
                generation = generation_of(row)
                if generation is not None and (slab, generation) not in self._unerased:
                    with suppress(RowRefused):
                        batch.append(self._decode(slab, row))
            if batch:
                yield batch

    def recover(self, arena_bytes: int) -> Iterator[RecoveryBatch]:
        """Every record that holds, least recently used first, and what was dropped.

        A record has to lie within the `arena_bytes` that were found; see `Survivors` for what
        else holds, and for the memory that this takes. What is dropped is erased. Nothing here
        stops other threads for long. Raises StoreError.
        """
        survivors = Survivors(
            self.tier,
            self.slabs,
            self.slab_bytes,
            arena_bytes // self.slab_bytes,
            self.table.read,
        )
        for first_slab, rows in self.table.chunks():
            survivors.read(rows, self._usages(first_slab, rows))
        survivors.settle()
        erasures = survivors.erasures
        for start in range(0, len(erasures), _BATCH_ENTRIES):
            self._forget(erasures[start : start + _BATCH_ENTRIES])
            # A failure here shows again at the first write, which waits for it.
            with suppress(StoreError):
                self.flush()
        if survivors.dropped:
            yield RecoveryBatch([], survivors.dropped, survivors.left)
        for batch in survivors.batches(_BATCH_ENTRIES):
            yield RecoveryBatch(batch, [], survivors.left)

    def _decode(self, slab: int, row: bytes) -> EntryRecord:
        return decode_entry(row, slab, self.slab_bytes, self.table.read)

    def _usages(self, first_slab: int, rows: list[tuple[int, bytes]]) -> UsageReader:
        """What the usage file says of these rows; nothing if it can't be read."""
        count = rows[-1][0] + 1 - first_slab if rows else 0
        usages = b""
        with suppress(OSError):
            usages = os.pread(self._usage_fd, count * USAGE_BYTES, first_slab * USAGE_BYTES)

        def usage_of(slab: int, generation: int) -> tuple[int, int] | None:
            start = (slab - first_slab) * USAGE_BYTES
            row = usages[start : start + USAGE_BYTES]
            return None if row == _NO_USAGE else decode_usage(row, generation)

        return usage_of


def encode_usage(generation: int, last_used_ns: int, hits: int) -> bytes:
    """A row of the usage file."""
    row = _USAGE.pack(generation, last_used_ns, hits, 0)[: -_USAGE_CRC.size]
    return row + _USAGE_CRC.pack(crc32c(row))


def decode_usage(row: bytes, generation: int) -> tuple[int, int] | None:
    """`last_used_ns` and `hits`; None: the row is damaged, or tells of another entry."""
    if len(row) != USAGE_BYTES:
        return None
    of_generation, last_used_ns, hits, expected_crc32c = _USAGE.unpack(row)
    if of_generation != generation or crc32c(row[: -_USAGE_CRC.size]) != expected_crc32c:
        return None
    return last_used_ns, hits


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
