"""The stores of the three tiers: entries in the extents of an arena.

RAM
    A sealed memfd. It is gone with the daemon.
shm
    A mapped file in /dev/shm, with records beside it. It survives a restart of the daemon.
disk
    A file with records beside it. It survives power loss. A save costs two syncs, whatever the
    size of its batch: one for the payloads, one for the records. Where a save takes the room of
    evicted entries, a third one before makes their erasure durable.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from ..proto.arena_header import ARENA_HEADER_BYTES, decode_arena_header
from ..proto.entry import TOKEN_IDS_CRC_BYTES, EntryRecord, Recorded, content_bytes
from ..proto.errors import RecordError
from ..proto.keys import Key
from ..proto.payload import crc32c
from ..proto.units import format_bytes
from ..proto.vocabulary import Tier
from .arena import (
    ARENA_FILE,
    DEFAULT_SLAB_BYTES,
    Arena,
    ArenaWriter,
    BaseArena,
    DiskArena,
    NoArena,
    check_slab,
    whole_slabs,
)
from .files import HERE, FileCalls, sync_parents, write_errors
from .graves import Graves
from .lmdb_rows import TABLE_FIXED_BYTES, TABLE_SLAB_BYTES, LmdbRows
from .records import USAGE_BYTES, USAGE_FILE, Records
from .rows import ROW_BYTES, RowFile, RowTable
from .store import (
    SEGMENT_BYTES,
    SMALLEST_SEGMENT_BYTES,
    Buffer,
    Damaged,
    EntryRef,
    EntryWriter,
    Location,
    OtherLayout,
    RecoveryBatch,
    Store,
    StoredEntry,
    StoreError,
    Usage,
    Whole,
)


class ArenaStore(Store):
    """A store whose entries lie in the extents of an arena, and nowhere else."""

    arena: BaseArena
    #: The largest budget that the store can have before a restart.
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
        """Where the device lacks room for the first whole segment, halves of it are tried."""
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

    def _fits(self, more_bytes: int) -> bool:  # noqa: ARG002 (memory can't be asked before)
        """Whether the device reports room for this much more of the arena."""
        return True

    def _secure_rows(self, upto_bytes: int) -> None:
        """Secure the records for this much of the arena, before the arena itself: a slab without
        a place for its record is of no use."""

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
            raise ValueError(f"a {self.tier.label} tier of this size holds no slab of {least}")
        return arena_bytes

    def _arena_bytes_of(self, budget_bytes: int) -> int:
        """The whole slabs of a budget, unchecked."""
        return budget_bytes - budget_bytes % self.slab_bytes

    def wants(self, arena_bytes: int) -> None:
        self.arena.size_bytes = max(self.arena.secured_bytes, arena_bytes)

    def give_back(self, location: Location, *, at_start: bool = False) -> bool:
        # As long as an entry's record stands, its bytes have to be there.
        self._erase_forgotten()
        return self.arena.give_back(location, at_start=at_start)

    @property
    def hole_bytes(self) -> int:
        return self.arena.hole_bytes

    @property
    def found_budget_bytes(self) -> int:
        return 0

    def find_holes(self) -> Iterator[tuple[int, int]]:
        return self.arena.find_holes()

    def take_back(self, location: Location) -> None:
        self.arena.take_back(location)

    def writer(self, entry: Recorded, token_ids: bytes = b"") -> EntryWriter:
        return ArenaWriter(self.arena, entry, token_ids, self._erase_forgotten)

    def write_whole(self, entries: Sequence[Recorded], payloads: Sequence[Buffer]) -> Whole | None:
        if not self.arena.puts_all:
            return None
        starts: list[int] = []
        for entry, payload in zip(entries, payloads, strict=True):
            location = entry.location
            if len(location) != 2 or len(payload) > location[1]:
                return None  # in several pieces
            starts.append(location[0])
        try:
            self._erase_forgotten()
            failed_syncs = self.arena.failed_syncs
            return Whole(self.arena.put_all(starts, payloads), failed_syncs)
        except (StoreError, MemoryError):
            return None  # to be met again, by each of their writers

    def _erase_forgotten(self) -> None:
        """Erase the records of forgotten entries, if there are records. Raises StoreError."""

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
    """An arena file with records beside it, in `directory`: the shm and disk tiers.

    All files together take `budget_bytes`: the arena, whose first slab is its header, and
    `record_bytes`. Larger files of an earlier start are opened as they are. The budget can grow to
    `max_budget_bytes` later. With `sync`, writes wait for the device. With `verify_payloads`,
    `recover` compares the checksum of every payload. Only one process may use a directory at a
    time; the daemon's lock file sees to that. Raises StoreError if there can't be such a store, or
    if the directory holds one of another layout (OtherLayout).
    """

    recorded: ClassVar[bool] = True
    #: Files that only earlier versions of prefixd made.
    _OLD_LAYOUTS: ClassVar[tuple[str, ...]]
    #: What the table of rows takes: a fixed part, and a part for each slab.
    _TABLE_FIXED_BYTES: ClassVar[int]
    _TABLE_SLAB_BYTES: ClassVar[int]

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        *,
        sync: bool = True,
        verify_payloads: bool = False,
        max_budget_bytes: int = 0,
        later: bool = False,
        calls: FileCalls = HERE,
    ) -> None:
        """`later`: touch no file before `open` is called. `calls`: those that may wait for the
        device; the store closes them."""
        self._calls: Final = calls
        check_slab(slab_bytes)
        self.directory: Final = directory
        self.slab_bytes = self.header_bytes = slab_bytes
        self._sync: Final = sync
        self.verify_payloads: Final = verify_payloads
        self.max_budget_bytes = max(budget_bytes, max_budget_bytes)
        slabs, max_slabs = self._slabs_of(budget_bytes), self._slabs_of(self.max_budget_bytes)
        if budget_bytes < self.least_budget_bytes(slab_bytes):
            raise StoreError(
                f"{budget_bytes} bytes hold no slab of {slab_bytes} beside the arena's header"
            )
        self.arena = NoArena(slabs * slab_bytes, max_slabs * slab_bytes)
        self._opened: Records | None = None
        self._graves: Final = Graves(directory, sync=sync, calls=calls)
        self._found_slabs = 0
        self._has_incarnation = False
        #: Slabs whose records were given room, or are being given.
        self._recorded_slabs = 0
        if not later:
            self.open()

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    def open(self) -> None:
        directory, slab_bytes, sync = self.directory, self.slab_bytes, self._sync
        with write_errors(f"make the {self.tier.label} tier"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in self._OLD_LAYOUTS:
                if (directory / old).exists():
                    raise OtherLayout(
                        f"{directory} holds the cache of an earlier version of prefixd "
                        f"({old}), which this version can't read: remove it, or "
                        "configure another directory"
                    )
            self._check_slab_of(directory / ARENA_FILE)
            if sync:
                # Also where it is there: the start that made it may have got no further.
                sync_parents(directory, self._calls)
        slabs, max_slabs = self.arena.size_bytes // slab_bytes, self.arena.max_bytes // slab_bytes
        arena = self._open_arena(directory / ARENA_FILE, slabs * slab_bytes, max_slabs * slab_bytes)
        try:
            # What an earlier start left may be larger, and not in whole slabs if it was harmed.
            found_slabs = arena.size_bytes // slab_bytes
            arena.size_bytes = found_slabs * slab_bytes
            max_slabs = max(max_slabs, found_slabs)
            table = self._open_table(max_slabs, sync=sync)
            records = Records(directory, self.tier, max_slabs, slab_bytes, table, self._calls)
            # A larger tier that was killed before it used its slabs has left records only.
            records.cut(found_slabs)
        except BaseException:
            arena.close()
            raise
        self._found_slabs = found_slabs if found_slabs > slabs else 0
        self.arena, self._opened = arena, records

    @property
    def newest(self) -> int:
        return 0 if self._opened is None else self._opened.newest

    @property
    def _records(self) -> Records:
        """Raises StoreError before `open`."""
        if self._opened is None:
            raise StoreError(f"the files in {self.directory} are not open")
        return self._opened

    @abstractmethod
    def _open_arena(self, path: Path, size_bytes: int, max_bytes: int) -> BaseArena: ...

    @abstractmethod
    def _open_table(self, slabs: int, *, sync: bool) -> RowTable: ...

    @classmethod
    def record_bytes(cls, slabs: int) -> int:
        """What the records of this many slabs take."""
        return cls._TABLE_FIXED_BYTES + slabs * (cls._TABLE_SLAB_BYTES + USAGE_BYTES)

    @classmethod
    def least_budget_bytes(cls, slab_bytes: int) -> int:
        """The smallest budget: one slab and the arena's header, with their records."""
        return 2 * slab_bytes + cls.record_bytes(2)

    def _slabs_of(self, budget_bytes: int) -> int:
        """The slabs that a budget has room for, with their records."""
        return (budget_bytes - self._TABLE_FIXED_BYTES) // (
            self.slab_bytes + self._TABLE_SLAB_BYTES + USAGE_BYTES
        )

    @property
    def found_budget_bytes(self) -> int:
        slabs = self._found_slabs
        return slabs * self.slab_bytes + self.record_bytes(slabs) if slabs else 0

    def _arena_bytes_of(self, budget_bytes: int) -> int:
        """The records of all slabs that were ever secured, or are being, keep their room."""
        slabs = self._slabs_of(budget_bytes)
        secured_slabs = max(self.arena.secured_bytes // self.slab_bytes, self._recorded_slabs)
        if slabs < secured_slabs:
            slabs = (budget_bytes - self.record_bytes(secured_slabs)) // self.slab_bytes
        return slabs * self.slab_bytes

    def _check_slab_of(self, path: Path) -> None:
        """Raises StoreError if there is an arena with other slabs, before anything of it is
        changed. A header that can't be read does not stop the start: each record says the slab
        size too."""
        if not path.is_file():
            return
        with suppress(RecordError), path.open("rb") as file:
            found = decode_arena_header(file.read(ARENA_HEADER_BYTES))[1]
            if found != self.slab_bytes:
                raise OtherLayout(
                    f"{self.directory} was made with slabs of {found} bytes: configure these, or "
                    "remove the directory"
                )

    # ---- writing

    def _fits(self, more_bytes: int) -> bool:
        """Counts the records too. What an earlier start left is there already."""
        arena_bytes = min(self.secured_bytes + more_bytes, self.size_bytes)
        held_bytes = 0
        with write_errors(f"look at {self.directory}"):
            device = os.statvfs(self.directory)
            for pattern in (ARENA_FILE, "records*", USAGE_FILE):
                for file in self.directory.glob(pattern):
                    with suppress(FileNotFoundError):  # LMDB replaces its files
                        held_bytes += file.stat().st_blocks * 512
        needed_bytes = arena_bytes + self.record_bytes(arena_bytes // self.slab_bytes)
        return needed_bytes - held_bytes <= device.f_bavail * device.f_frsize

    def _secure_rows(self, upto_bytes: int) -> None:
        slabs = min(upto_bytes, self.arena.size_bytes) // self.slab_bytes
        self._recorded_slabs = max(self._recorded_slabs, slabs)
        self._records.secure(slabs)

    def set_incarnation(self, incarnation: bytes) -> None:
        self.arena.write_header(incarnation, self.slab_bytes)
        self._has_incarnation = True

    def writer(self, entry: Recorded, token_ids: bytes = b"") -> EntryWriter:
        if not self._has_incarnation:
            raise ValueError("set_incarnation comes before the first writer")
        return super().writer(entry, token_ids)

    def _erase_forgotten(self) -> None:
        self._records.flush()

    def forget(self, entries: Iterable[EntryRef]) -> None:
        self._records.forget(entries)

    @property
    def unerased(self) -> int:
        return 0 if self._opened is None else self._opened.unerased

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
        """Make durable what these writers wrote, where that takes a call. Raises StoreError."""

    def record_usage(self, usages: Sequence[Usage]) -> None:
        self._records.record_usage(usages)

    def probe(self) -> None:
        self._records.probe()

    # ---- reading

    def recover(self) -> Iterator[RecoveryBatch]:
        graves = self._graves.read()
        for batch in self._records.recover(self.arena.found_bytes):
            left = self._without_buried(batch, graves) if graves else batch
            yield self._verified(left) if self.verify_payloads else left

    def _without_buried(self, batch: RecoveryBatch, graves: Mapping[Key, int]) -> RecoveryBatch:
        entries: list[StoredEntry] = []
        dropped = list(batch.dropped)
        for entry in batch.entries:
            record = entry.record
            if record.generation > graves.get(record.key, 0):
                entries.append(entry)
            else:
                dropped.append((record.key, "it was deleted while its record was not read yet"))
                self._records.forget([record])
        return RecoveryBatch(entries, dropped, batch.following)

    def bury(self, keys: Sequence[Key], generation: int) -> None:
        self._graves.add(keys, generation)

    def exhume(self) -> None:
        self._graves.clear()

    def follow(self, mark: bytes) -> None:
        self._graves.mark(mark)

    def followed(self) -> bytes:
        return self._graves.marked()

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
        if self._opened is not None:
            self._opened.close()
        self.arena.close()
        self._calls.close()


class RamStore(ArenaStore):
    """An anonymous arena of `budget_bytes`, rounded down to whole slabs; the budget can grow to
    `max_budget_bytes` later.

    It needs no header, because readers of an earlier start have another memfd, and no records. So
    an entry whose payload is whole slabs costs exactly that. Raises StoreError if there can't be
    such an arena.
    """

    tier: ClassVar[Tier] = Tier.RAM
    blocking: ClassVar[bool] = False
    recorded: ClassVar[bool] = False
    arena: Arena
    header_bytes = 0

    def __init__(
        self, budget_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES, *, max_budget_bytes: int = 0
    ) -> None:
        check_slab(slab_bytes)
        self.slab_bytes = slab_bytes
        self.max_budget_bytes = max(budget_bytes, max_budget_bytes)
        sizes = (budget_bytes, self.max_budget_bytes)
        size_bytes, max_bytes = (each - each % slab_bytes for each in sizes)
        self.arena = Arena.anonymous(size_bytes, max_bytes=max_bytes)

    def set_incarnation(self, incarnation: bytes) -> None:
        """Nothing to do: every start has an arena of its own."""

    def forget(self, entries: Iterable[EntryRef]) -> None:
        """Nothing to forget."""

    @property
    def unerased(self) -> int:
        return 0

    def apply(self, sealed: Sequence[EntryWriter]) -> None:
        """Nothing to do: the bytes are where they belong, and nothing survives."""

    def recover(self) -> Iterator[RecoveryBatch]:
        return iter(())

    def scan(self) -> Iterator[list[EntryRecord]]:
        return iter(())

    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Nothing to remember."""

    def probe(self) -> None:
        """Nothing that could fail."""


class ShmStore(RecordedStore):
    """The store in `directory`, below /dev/shm. It never syncs: nothing here outlives the memory
    that it is in."""

    tier: ClassVar[Tier] = Tier.SHM
    blocking: ClassVar[bool] = False
    _OLD_LAYOUTS: ClassVar[tuple[str, ...]] = ("usage/data.mdb",)
    _TABLE_FIXED_BYTES: ClassVar[int] = 0
    _TABLE_SLAB_BYTES: ClassVar[int] = ROW_BYTES
    arena: Arena

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        *,
        verify_payloads: bool = True,
        max_budget_bytes: int = 0,
    ) -> None:
        super().__init__(
            directory,
            budget_bytes,
            slab_bytes,
            sync=False,
            verify_payloads=verify_payloads,
            max_budget_bytes=max_budget_bytes,
        )

    def _open_arena(self, path: Path, size_bytes: int, max_bytes: int) -> Arena:
        return Arena.file(path, size_bytes, max_bytes=max_bytes)

    def _open_table(self, slabs: int, *, sync: bool) -> RowFile:
        return RowFile(self.directory, slabs, sync=sync)

    def forget(self, entries: Iterable[EntryRef]) -> None:
        """Also erases the records: that is a write to memory."""
        super().forget(entries)
        with suppress(StoreError):
            self._erase_forgotten()


class DiskStore(RecordedStore):
    """The store in `directory`. Without `sync`, power loss may take what `apply` acknowledged.
    Payloads are not verified at start by default, because every reader verifies them."""

    tier: ClassVar[Tier] = Tier.DISK
    blocking: ClassVar[bool] = True
    _OLD_LAYOUTS: ClassVar[tuple[str, ...]] = ("data.mdb", "records")
    _TABLE_FIXED_BYTES: ClassVar[int] = TABLE_FIXED_BYTES
    _TABLE_SLAB_BYTES: ClassVar[int] = TABLE_SLAB_BYTES
    arena: DiskArena

    def _open_arena(self, path: Path, size_bytes: int, max_bytes: int) -> DiskArena:
        return DiskArena(path, size_bytes, sync=self._sync, max_bytes=max_bytes, calls=self._calls)

    def _open_table(self, slabs: int, *, sync: bool) -> LmdbRows:
        return LmdbRows(self.directory, slabs, sync=sync, calls=self._calls)

    def _sync_payloads(self, writers: Sequence[ArenaWriter]) -> None:
        self.arena.sync()
        if any(writer.failed_syncs != self.arena.failed_syncs for writer in writers):
            raise StoreError(
                f"a sync of {self.arena.path} failed since the payload was begun: it is not "
                "known to be stored"
            )

    def probe(self) -> None:
        self.arena.probe()
        super().probe()
