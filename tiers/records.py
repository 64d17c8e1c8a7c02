"""The records of a tier: which entries its arena holds. Only the daemon uses these files.

    records    row i (`tiers.rows`, 128 bytes) belongs to slab i of the arena: the record of the
               entry that begins there, or zeros. Row 0 belongs to the arena's header; probes
               write there. Kept in a `RowTable`: LMDB on disk, a flat file in shm.
    usage      row i (32 bytes): when and how often the entry that begins at slab i was used.

    usage row   offset  bytes  type  meaning
                ------  -----  ----  ------------------------------
                     0      8  u64   generation of the entry
                     8      8  i64   last used, wall-clock ns
                    16      8  u64   hits
                    24      4  raw   zeros
                    28      4  u32   CRC32C of bytes 0..27

Each row stands for itself: a damaged row costs one entry. Its room on the device is reserved
before the first entry is admitted to the slab, so that neither a full device nor the number of
entries matters afterwards. (On a copy-on-write file system overwriting takes room; an erasure may
have to wait for that, and is tried again.)

Usage is written without a sync and checked row by row: a damaged row is a lost hint. It is a flat
file in every tier: in LMDB each hint would copy a page, 128 times its size.

A start reads all records (`Survivors`) on a thread beside the event loop, and there may be a
million. Whatever the interpreter does in one piece stops the loop for as long as it takes:
measured, 376 ms for claims of other clients meanwhile. So nothing there is one piece:

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
from ..proto.payload import crc32c
from ..proto.vocabulary import Tier
from .files import HERE, FileCalls, cut_file, open_own_file, pwrite_all, secure_range, write_errors
from .rows import (
    KEY_SLICE,
    MARK_SLAB,
    Erasure,
    RowReader,
    RowRefused,
    RowTable,
    decode_checked,
    decode_entry,
    decode_mark,
    encode_mark,
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

    Owns `table`, which gets a row for each slab. Every method may be called from any thread; only
    `forget` and `unerased` never do I/O. Raises StoreError if the files can't be used.
    """

    def __init__(
        self,
        directory: Path,
        tier: Tier,
        slabs: int,
        slab_bytes: int,
        table: RowTable,
        calls: FileCalls = HERE,
    ) -> None:
        self._calls: Final = calls
        self.directory: Final = directory
        self.tier: Final = tier
        self.slabs: Final = slabs
        self.slab_bytes: Final = slab_bytes
        self.table: Final = table
        #: Held during I/O. `forget` never takes it.
        self._io = threading.Lock()
        self._unerased_lock = threading.Lock()
        #: Forgotten records that may still stand.
        self._unerased: set[Erasure] = set()
        self._secured_slabs = 0
        self._usage_fd = -1
        #: The newest generation that was ever recorded. 0: it is not known.
        self.newest = 0
        with write_errors(f"open the records in {directory}"):
            try:
                self._usage_fd = self._open_usage()
                self.newest = decode_mark(table.read(MARK_SLAB))
            except BaseException:
                self.close()
                raise

    def _open_usage(self) -> int:
        """A usage file that can't be used is renamed: lost hints must not stop the start."""
        path = self.directory / USAGE_FILE
        try:
            return open_own_file(path, 0o600, self._calls)
        except (OSError, StoreError):
            aside = (path.with_name(f"{USAGE_FILE}.damaged-{number}") for number in count(1))
            path.rename(next(name for name in aside if not os.path.lexists(name)))
            return open_own_file(path, 0o600, self._calls)

    def cut(self, slabs: int) -> None:
        """Give the room of the rows back whose slabs, from `slabs` on, are not there. Raises
        StoreError."""
        self.table.cut(slabs)
        with write_errors(f"shorten the records in {self.directory}"):
            cut_file(self._usage_fd, slabs * USAGE_BYTES, self._calls)

    def secure(self, slabs: int) -> None:
        """Reserve room for the rows of the first `slabs` slabs. Raises StoreFull, StoreError."""
        first, more = self._secured_slabs, slabs - self._secured_slabs
        if more <= 0:
            return
        self.table.secure(slabs)
        with write_errors(f"make room for records in {self.directory}"):
            at, length_bytes = first * USAGE_BYTES, more * USAGE_BYTES
            secure_range(self._usage_fd, at, length_bytes, self._calls)
        self._secured_slabs = slabs

    # ---- changes

    @property
    def unerased(self) -> int:
        """How many forgotten records may still stand."""
        return len(self._unerased)

    def forget(self, entries: Iterable[EntryRef]) -> None:
        """Erase these records with the next `flush` or `put`."""
        self._forget((entry.location[0] // self.slab_bytes, entry.generation) for entry in entries)

    def flush(self) -> None:
        """Erase what was forgotten, durably. Raises StoreError, StoreFull."""
        if self._unerased:
            self.put(())

    def put(self, entries: Sequence[Recorded]) -> None:
        """Erase what was forgotten, then write these records, durably.

        Raises StoreError, StoreFull. These records are forgotten then; everything else is as
        before.
        """
        with self._io:
            with self._unerased_lock:
                erased = list(self._unerased)
            try:
                rows = [row for entry in entries for row in encode_rows(entry, self.slab_bytes)]
                if entries:
                    self.newest = max(self.newest, *(entry.generation for entry in entries))
                    rows.append((MARK_SLAB, encode_mark(self.newest)))
                self.table.apply(erased, rows)
            except BaseException:
                # Some of them may be on the device, and their room goes to other entries now.
                self.forget(entries)
                raise
            with self._unerased_lock:
                self._unerased.difference_update(erased)

    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Write usage, without a sync. Raises StoreError, StoreFull."""
        with write_errors(f"record usage in {self.directory}"):
            for usage in usages:
                row = encode_usage(usage.entry.generation, usage.last_used_ns, usage.hits)
                slab = usage.entry.location[0] // self.slab_bytes
                pwrite_all(self._usage_fd, row, slab * USAGE_BYTES, self._calls)

    def probe(self) -> None:
        """Write the row that belongs to no entry, durably. Raises StoreError, StoreFull."""
        with self._io:
            self.table.probe(self.newest)

    def close(self) -> None:
        """May be called twice. Does not erase what was forgotten."""
        self.table.close()
        if self._usage_fd >= 0:
            os.close(self._usage_fd)
        self._usage_fd = -1

    def _forget(self, rows: Iterable[Erasure]) -> None:
        with self._unerased_lock:
            self._unerased.update(rows)

    # ---- reading

    def scan(self) -> Iterator[list[EntryRecord]]:
        """Every record that can be read and was not forgotten, in batches. Raises StoreError."""
        for _, rows in self.table.chunks():
            batch = []
            for slab, row in rows:
                generation = generation_of(row)
                if generation is not None and (slab, generation) not in self._unerased:
                    with suppress(RowRefused):
                        batch.append(decode_entry(row, slab, self.slab_bytes, self.table.read))
            if batch:
                yield batch

    def recover(self, arena_bytes: int) -> Iterator[RecoveryBatch]:
        """Every valid record, least recently used first, and what was dropped.

        A record has to lie within the `arena_bytes` that were found; see `Survivors` for the
        other rules, and for the memory that this takes. What is dropped is erased. Nothing here
        stops other threads for long. Raises StoreError.
        """
        survivors = Survivors(
            self.tier, self.slabs, self.slab_bytes, arena_bytes // self.slab_bytes, self.table.read
        )
        for first_slab, rows in self.table.chunks():
            survivors.read(rows, self._usages(first_slab, rows))
        survivors.settle()
        erasures = survivors.erasures
        for start in range(0, len(erasures), _BATCH_ENTRIES):
            self._forget(erasures[start : start + _BATCH_ENTRIES])
            # A failure shows again at the first write, which waits for these erasures.
            with suppress(StoreError):
                self.flush()
        if survivors.dropped:
            yield RecoveryBatch([], survivors.dropped, survivors.left)
        for batch in survivors.batches(_BATCH_ENTRIES):
            yield RecoveryBatch(batch, [], survivors.left)

    def _usages(self, first_slab: int, rows: list[tuple[int, bytes]]) -> UsageReader:
        """Looks up usage for these rows. It finds none if the file can't be read."""
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
    """`last_used_ns` and `hits`. None: the row is damaged, or belongs to another entry."""
    if len(row) != USAGE_BYTES:
        return None
    of_generation, last_used_ns, hits, expected_crc32c = _USAGE.unpack(row)
    if of_generation != generation or crc32c(row[: -_USAGE_CRC.size]) != expected_crc32c:
        return None
    return last_used_ns, hits


#: (slab, generation) -> `last_used_ns` and `hits` of that entry, if the usage file has them.
UsageReader = Callable[[int, int], tuple[int, int] | None]

#: The keys are spread over this many dicts, so that only a small one is resized at a time.
_SHARDS: Final = 2048
_SHARD_SHIFT: Final = 48
#: Numbers that are sorted at once. That takes a millisecond.
_SORTED_AT_ONCE: Final = 4096
#: Sampled numbers for each part of that size, and the largest sample.
_SAMPLES_A_PART: Final = 16
_MAX_SAMPLES: Final = 16384
#: The lower bits of a number to sort by are the position of its record.
_POSITION_BITS: Final = 32
_POSITION_MASK: Final = 2**_POSITION_BITS - 1


class Survivors:
    """The valid records of an arena of `arena_slabs` slabs, which may grow to `slabs`.

    `read` all chunks of rows, then `settle`, then take the `batches`. Where records overlap or
    have the same key, the newest is valid: the daemon ended before it erased the others. Takes
    about 450 bytes of memory for each entry while they are read, half of that afterwards.
    """

    def __init__(
        self, tier: Tier, slabs: int, slab_bytes: int, arena_slabs: int, read_row: RowReader
    ) -> None:
        self._tier: Final = tier
        self._slabs: Final = slabs
        self._slab_bytes: Final = slab_bytes
        self._arena_bytes: Final = arena_slabs * slab_bytes
        self._read_row: Final = read_row
        #: By position: the row of a record, or the record itself where it has several rows. None
        #: where it was dropped or handed out.
        self._rows: list[bytes | EntryRecord | None] = []
        self._row_slabs = array("I")
        self._hits = array("Q")
        #: Last use and position of each record, in parts.
        self._uses: list[list[int]] = []
        #: Positions by key.
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._taken = bytearray(slabs)
        self._overlap = False
        #: Valid records that were not handed out yet. Exact after `settle`.
        self.left = 0
        #: Invalid records with the reason, and the rows to erase for them.
        self.dropped: list[tuple[Key, str]] = []
        self.erasures: list[Erasure] = []

    def read(self, rows: Sequence[tuple[int, bytes]], usage_of: UsageReader) -> None:
        """Take the rows of one chunk. Raises StoreError if a continuation can't be read."""
        uses: list[int] = []
        kept, shards, slab_bytes = self._rows, self._shards, self._slab_bytes
        for slab, row in rows:
            if is_continuation(row):
                continue  # `decode_entry` reads it with its entry, if there is one
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
        """All rows were read. Completes `dropped` and `erasures`."""
        while self._shards:
            self._shards.pop()
        if self._overlap:
            self._drop_overlaps()
        self._taken = bytearray()

    def batches(self, entries: int) -> Iterator[list[StoredEntry]]:
        """The valid records, least recently used first, in lists of `entries`. Only once."""
        rows, hits = self._rows, self._hits
        for uses in sorted_parts(self._uses):
            for first in range(0, len(uses), entries):
                batch = []
                for use in uses[first : first + entries]:
                    position = use & _POSITION_MASK
                    if rows[position] is None:
                        continue
                    record = self._record(position)
                    rows[position] = None
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
        for offset, length in zip(location[::2], location[1::2], strict=True):
            end = offset + length
            if not offset or end > arena_bytes:
                raise RowRefused(f"{end} bytes are beyond the {arena_bytes} that the arena has")

    def _take(self, location: Location) -> bool:
        """Mark the slabs of a location. False, and nothing marked, if one of them is already."""
        taken, slab_bytes = self._taken, self._slab_bytes
        if len(location) == 2 and location[1] == slab_bytes:
            slab = location[0] // slab_bytes
            free = not taken[slab]
            taken[slab] = 1
            return free
        marked: list[tuple[int, int]] = []
        for offset, length in zip(location[::2], location[1::2], strict=True):
            start, slabs = offset // slab_bytes, length // slab_bytes
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
    """All numbers of `parts` in ascending order, in lists of some thousand. Empties `parts`.

    Equal numbers end up in one list, so there should be few of them.
    """
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
