"""What stores over an arena do alike, without records and with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from ..proto.arena_header import ARENA_HEADER_BYTES, decode_arena_header
from ..proto.entry import TOKEN_IDS_CRC_BYTES, EntryRecord, Recorded, content_bytes
from ..proto.errors import RecordError
from ..proto.keys import Key
from ..proto.payload import crc32c
from ..proto.units import format_bytes
from .arena import ArenaWriter, BaseArena, check_slab, whole_slabs
from .files import sync_parents, write_errors
from .records import USAGE_BYTES, USAGE_FILE, Records
from .row_table import RowTable
from .store import (
    SEGMENT_BYTES,
    SMALLEST_SEGMENT_BYTES,
    Buffer,
    Damaged,
    EntryRef,
    EntryWriter,
    Location,
    RecoveryBatch,
    Store,
    StoredEntry,
    StoreError,
    Usage,
)

ARENA_FILE: Final = "arena"


class ArenaStore(Store):
    """A store whose entries lie in the extents of an arena, and nowhere else."""

    arena: BaseArena
    #: the largest budget that it can have before a restart
    max_budget_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.arena.size_bytes

    @property
    def secured_bytes(self) -> int:
        return self.arena.secured_bytes

    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        return whole_slabs(content_bytes(payload_bytes, token_ids_bytes), self.slab_bytes)

    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        """On a device that is smaller than a segment, in halves of it: of a larger one less than
        a segment is left to others."""
        whole_bytes = segment_bytes
        while True:
            if (
                self.secured_bytes < whole_bytes
                and segment_bytes > SMALLEST_SEGMENT_BYTES
                and not self._fits(segment_bytes)
            ):
                segment_bytes //= 2
                continue
            self._secure_rows(self.secured_bytes + segment_bytes)
            step = next(self.arena.secure_segments(segment_bytes), None)
            if step is None:
                return
            yield step

    def _fits(self, more_bytes: int) -> bool:  # noqa: ARG002  # memory says so when it is asked for
        """Does the device say that it has so much more for the arena?"""
        return True

    def _secure_rows(self, upto_bytes: int) -> None:
        """Before so much of the arena: a slab without a place for its record is of no use."""

    def arena_bytes_of(self, budget_bytes: int) -> int:
        arena_bytes = self._arena_bytes_of(budget_bytes)
        if arena_bytes > self.arena.max_bytes:
            most = format_bytes(self.max_budget_bytes)
            raise ValueError(
                f"the daemon was started with room for {most} at most: set "
                f"{self.tier.label}.max_budget and restart it"
            )
        if arena_bytes < self.header_bytes + self.slab_bytes:
            least = format_bytes(self.slab_bytes)
            raise ValueError(f"so small a {self.tier.label} tier holds no slab of {least}")
        return arena_bytes

    def _arena_bytes_of(self, budget_bytes: int) -> int:
        """What of a budget is whole slabs, unchecked."""
        return budget_bytes - budget_bytes % self.slab_bytes

    def wants(self, arena_bytes: int) -> None:
        self.arena.size_bytes = max(self.arena.secured_bytes, arena_bytes)

    def give_back(self, location: Location) -> bool:
        return self.arena.give_back(location)

    def take_back(self, location: Location) -> None:
        self.arena.take_back(location)

    def writer(self, entry: Recorded, token_ids: bytes = b"") -> EntryWriter:
        return ArenaWriter(self.arena, entry, token_ids)

    def read(self, entry: EntryRef, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= entry.payload_bytes:
            raise ValueError(
                f"{length_bytes} bytes at {offset_bytes} of a payload of {entry.payload_bytes}"
            )
        return self.arena.views(entry.location, offset_bytes, length_bytes)

    def token_ids(self, entry: EntryRef) -> bytes:
        if not entry.token_ids_bytes:
            return b""
        stored = self.arena.gather(
            entry.location, entry.payload_bytes, entry.token_ids_bytes + TOKEN_IDS_CRC_BYTES
        )
        token_ids, crc = stored[:-TOKEN_IDS_CRC_BYTES], stored[-TOKEN_IDS_CRC_BYTES:]
        if crc32c(token_ids).to_bytes(TOKEN_IDS_CRC_BYTES, "little") != crc:
            raise Damaged(f"the token ids of {entry.key.hex()} do not match their checksum")
        return token_ids

    def close(self) -> None:
        self.arena.close()


class RecordedStore(ArenaStore):
    """An arena file with records beside it, in `directory`: what the shm and disk tiers are.

    Everything together takes `budget_bytes`: the arena, whose first slab is its header, and
    what `record_bytes` says. It can be given up to `max_budget_bytes` later. `verify_payloads`:
    `recover` compares the checksum of every payload. One process at a time: the daemon's lock
    file sees to it. Raises StoreError if there can't be such a store, or if the directory holds
    one of another layout.
    """

    recorded: ClassVar[bool] = True
    #: Files that only earlier versions made.
    _OLD_LAYOUTS: ClassVar[tuple[str, ...]]
    #: What the table of rows takes, whatever the budget is, and for each slab.
    _TABLE_FIXED_BYTES: ClassVar[int]
    _TABLE_SLAB_BYTES: ClassVar[int]

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        slab_bytes: int,
        *,
        sync: bool,
        verify_payloads: bool,
        max_budget_bytes: int = 0,
    ) -> None:
        check_slab(slab_bytes)
        self.directory: Final = directory
        self.slab_bytes = self.header_bytes = slab_bytes
        self.verify_payloads: Final = verify_payloads
        self.max_budget_bytes = max(budget_bytes, max_budget_bytes)
        slabs, max_slabs = self._slabs_of(budget_bytes), self._slabs_of(self.max_budget_bytes)
        if slabs < 2:
            raise StoreError(
                f"{budget_bytes} bytes hold no slab of {slab_bytes} beside the arena's header"
            )
        with write_errors(f"make the {self.tier.label} tier"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in self._OLD_LAYOUTS:
                if (directory / old).exists():
                    raise StoreError(
                        f"{directory} holds the cache of an earlier version of prefixd "
                        f"({old}), which this version can't read: remove it, or "
                        "configure another directory"
                    )
            self._check_slab_of(directory / ARENA_FILE)
            if sync:
                # Who made it may have been this start, or one that did not get further.
                sync_parents(directory)
        self.arena = self._open_arena(
            directory / ARENA_FILE, slabs * slab_bytes, max_slabs * slab_bytes
        )
        try:
            table = self._open_table(max_slabs, sync=sync)
            self._records: Final = Records(directory, self.tier, max_slabs, slab_bytes, table)
        except BaseException:
            self.arena.close()
            raise
        self._has_incarnation = False

    def _open_arena(self, path: Path, size_bytes: int, max_bytes: int) -> BaseArena:
        raise NotImplementedError

    def _open_table(self, slabs: int, *, sync: bool) -> RowTable:
        raise NotImplementedError

    @classmethod
    def record_bytes(cls, slabs: int) -> int:
        """What the records of so many slabs take."""
        return cls._TABLE_FIXED_BYTES + slabs * (cls._TABLE_SLAB_BYTES + USAGE_BYTES)

    def _slabs_of(self, budget_bytes: int) -> int:
        """Slabs that a budget has room for, records included."""
        return (budget_bytes - self._TABLE_FIXED_BYTES) // (
            self.slab_bytes + self._TABLE_SLAB_BYTES + USAGE_BYTES
        )

    def _arena_bytes_of(self, budget_bytes: int) -> int:
        """The records of what was ever secured keep their room."""
        slabs = self._slabs_of(budget_bytes)
        secured_slabs = self.arena.secured_bytes // self.slab_bytes
        if slabs < secured_slabs:
            slabs = (budget_bytes - self.record_bytes(secured_slabs)) // self.slab_bytes
        return slabs * self.slab_bytes

    def give_back(self, location: Location) -> bool:
        # Of an entry whose record stands its bytes have to be there.
        self._records.flush()
        return super().give_back(location)

    def _check_slab_of(self, path: Path) -> None:
        """Raises StoreError if an arena is there and divided otherwise, before anything of it is
        changed. A header that can't be read is no reason not to start: the records say the
        same, each for itself."""
        if not path.is_file():
            return
        with suppress(RecordError), path.open("rb") as file:
            found = decode_arena_header(file.read(ARENA_HEADER_BYTES))[1]
            if found != self.slab_bytes:
                raise StoreError(
                    f"{self.directory} was made with slabs of {found} bytes: configure these, or "
                    "remove the directory"
                )

    # ---- writing

    def _fits(self, more_bytes: int) -> bool:
        """With the records that belong to it. What an earlier start left is there already."""
        wanted_bytes = min(self.secured_bytes + more_bytes, self.size_bytes)
        held_bytes = 0
        with write_errors(f"look at {self.directory}"):
            device = os.statvfs(self.directory)
            for pattern in (ARENA_FILE, "records*", USAGE_FILE):
                for file in self.directory.glob(pattern):
                    with suppress(FileNotFoundError):  # LMDB has another one by now
                        held_bytes += file.stat().st_blocks * 512
        needed_bytes = wanted_bytes + self.record_bytes(wanted_bytes // self.slab_bytes)
        return needed_bytes - held_bytes <= device.f_bavail * device.f_frsize

    def _secure_rows(self, upto_bytes: int) -> None:
        self._records.secure(min(upto_bytes, self.arena.size_bytes) // self.slab_bytes)

    def set_incarnation(self, incarnation: bytes) -> None:
        self.arena.write_header(incarnation, self.slab_bytes)
        self._has_incarnation = True

    def writer(self, entry: Recorded, token_ids: bytes = b"") -> EntryWriter:
        if not self._has_incarnation:
            raise ValueError("set_incarnation comes before the first writer")
        return _RecordedWriter(self._records, self.arena, entry, token_ids)

    def forget(self, entries: Iterable[EntryRef]) -> None:
        self._records.forget(entries)

    @property
    def unerased(self) -> int:
        return self._records.unerased

    def apply(self, sealed: Sequence[EntryWriter]) -> None:
        writers: list[ArenaWriter] = []
        for writer in sealed:
            if not isinstance(writer, ArenaWriter) or not writer.sealed:
                raise ValueError("only sealed writers of this store can be applied")
            writers.append(writer)
        if writers:
            with self.step("sync"):
                self._sync_payloads(writers)
        with self.step("records"):
            self._records.put([writer.entry for writer in writers])

    def _sync_payloads(self, writers: Sequence[ArenaWriter]) -> None:
        """Make durable what these writers wrote. Raises StoreError."""

    def record_usage(self, usages: Sequence[Usage]) -> None:
        self._records.record_usage(usages)

    def probe(self) -> None:
        self._records.probe()

    # ---- reading

    def recover(self) -> Iterator[RecoveryBatch]:
        for batch in self._records.recover(self.arena.found_bytes):
            yield self._verified(batch) if self.verify_payloads else batch

    def _verified(self, batch: RecoveryBatch) -> RecoveryBatch:
        entries: list[StoredEntry] = []
        dropped: list[tuple[Key, str]] = list(batch.dropped)
        for entry in batch.entries:
            record = entry.record
            try:
                self.verify(record, record.payload_crc32c)
                entries.append(entry)
            except Damaged as problem:
                dropped.append((record.key, str(problem)))
                self._records.forget([record])
        return RecoveryBatch(entries, dropped, batch.following)

    def scan(self) -> Iterator[list[EntryRecord]]:
        return self._records.scan()

    def close(self) -> None:
        self._records.close()
        self.arena.close()


class _RecordedWriter(ArenaWriter):
    """Writes nothing before the records of the entries whose room it may have are erased."""

    def __init__(
        self, records: Records, arena: BaseArena, entry: Recorded, token_ids: bytes
    ) -> None:
        super().__init__(arena, entry, token_ids)
        self._records = records

    def write(self, data: Buffer) -> None:
        if not self.written_bytes:
            self._records.flush()
        super().write(data)

    def room(self, most_bytes: int) -> memoryview | None:
        if not self.written_bytes:
            self._records.flush()
        return super().room(most_bytes)
