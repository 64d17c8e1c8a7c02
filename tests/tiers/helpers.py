"""Entries of a recorded store. Their bytes are derived from their numbers."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason
from prefixd.tiers.arena_stores import DiskStore, RecordedStore, ShmStore
from prefixd.tiers.eviction.base import NotYet
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger
from prefixd.tiers.order import Resident
from prefixd.tiers.rows import RECORDS_FILE
from prefixd.tiers.store import (
    SEGMENT_BYTES,
    EntryWriter,
    Location,
    RecoveryBatch,
    StoredEntry,
    StoreFull,
)

SLAB = 4096
PAYLOAD = 5 * SLAB
#: Slabs of an LMDB table.
ROWS_SLABS = 2_000
#: For child processes that import this module.
HERE = str(Path(__file__).parent)


def budget(slabs: int, kind: type[RecordedStore]) -> int:
    """The budget for this many slabs, the header's included."""
    return slabs * SLAB + kind.record_bytes(slabs)


def records_file(directory: Path) -> Path:
    """The file with the rows of a store: the flat one, or the current LMDB file."""
    found = list(directory.glob("records-*.mdb"))
    if not found:
        return directory / RECORDS_FILE
    return max(found, key=lambda path: int(path.stem.partition("-")[2]))


def place_of(directory: Path, row: bytes) -> int:
    """The offset of the only copy of a row in its file."""
    data = records_file(directory).read_bytes()
    assert data.count(row) == 1
    return data.index(row)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


@functools.lru_cache(maxsize=512)
def payload_of(number: int, payload_bytes: int = PAYLOAD) -> bytes:
    return random.Random(number).randbytes(payload_bytes)


class Placed:
    """A store of `slabs` slabs, ready for writing, with an allocator for its entries."""

    segment_bytes = SEGMENT_BYTES

    def __init__(
        self,
        kind: type[ShmStore] | type[DiskStore],
        directory: Path,
        slabs: int = 64,
        **options: bool,
    ) -> None:
        self.store: RecordedStore = kind(directory, budget(slabs, kind), SLAB, **options)
        try:
            self.store.set_incarnation(bytes(16))
            for _ in self.store.secure_segments(self.segment_bytes):
                pass
        except StoreFull:
            self.close_unfilled()
            raise
        self.extents = ExtentAllocator(
            self.store.arena.secured_bytes, SLAB, self.store.header_bytes
        )

    def close_unfilled(self) -> None:
        """Called when the device lacks room for the whole store."""
        self.store.close()

    def entry(
        self, number: int, payload_bytes: int = PAYLOAD, location: Location | None = None
    ) -> EntryRecord:
        """An entry with room. Its number is also its number of token ids."""
        stored_bytes = self.store.stored_bytes(payload_bytes, 4 * number % 4000)
        return EntryRecord(
            key=key(number),
            tier=self.store.tier,
            reason=SaveReason.FINISH,
            generation=number + 1,
            created_ns=1_000 + number,
            content=Content(payload_bytes, number, 4 * number % 4000),
            location=self.extents.allocate(stored_bytes) if location is None else location,
        )

    def written(self, entry: EntryRecord) -> EntryWriter:
        number = entry.generation - 1
        writer = self.store.writer(entry, b"abcd" * (entry.token_ids_bytes // 4))
        writer.write(payload_of(number, entry.payload_bytes))
        writer.seal()
        return writer

    def save(self, *numbers: int, payload_bytes: int = PAYLOAD) -> list[EntryRecord]:
        """Save entries in one batch."""
        writers = [self.written(self.entry(number, payload_bytes)) for number in numbers]
        self.store.apply(writers)
        return [writer.entry for writer in writers]

    def erase(self, *entries: EntryRecord) -> None:
        self.store.forget(entries)
        self.store.apply([])
        for entry in entries:
            self.extents.free(entry.location)

    def recover(self) -> RecoveryBatch:
        """All batches of `recover` in one."""
        entries: list[StoredEntry] = []
        dropped: list[tuple[Key, str]] = []
        for batch in self.store.recover():
            entries += batch.entries
            dropped += batch.dropped
        for entry in entries:
            self.extents.claim(entry.record.location)
        return RecoveryBatch(entries, dropped)

    def is_whole(self, entry: EntryRecord) -> bool:
        number = entry.generation - 1
        found = b"".join(self.store.read(entry, 0, entry.payload_bytes))
        return found == payload_of(number, entry.payload_bytes) and self.store.token_ids(
            entry
        ) == b"abcd" * (entry.token_ids_bytes // 4)

    def numbers(self) -> set[int]:
        """The numbers of the entries that have records."""
        return {entry.generation - 1 for batch in self.store.scan() for entry in batch}


def numbers_of(entries: Sequence[StoredEntry]) -> list[int]:
    return [entry.record.generation - 1 for entry in entries]


def next_victim(ledger: Ledger, coming: Resident | None = None, **how: bool) -> Key | None:
    """The next victim, however many calls it takes."""
    while True:
        try:
            return ledger.next_victim(coming, **how)
        except NotYet:
            continue
