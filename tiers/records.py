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
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from ..proto.entry import EntryRecord, Recorded
from ..proto.payload import crc32c
from ..proto.vocabulary import Tier
from .files import open_own_file, pwrite_all, secure_range
from .files import write_errors as errors
from .row_table import Erasure, RowTable
from .rows import RowRefused, decode_entry, encode_rows, generation_of
from .store import EntryRef, RecoveryBatch, StoreError, Usage
from .survivors import Survivors, UsageReader

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
