"""What the daemon handed over to this session: its index, its arenas and staging memory.

Reading without a call is optimistic: look an entry up, copy its bytes, look it up again. The daemon
removes the row of an entry before anything else is written to its extents, and each start of a
daemon writes its incarnation into an arena before anything else. So when the row has the same
generation, and the arena the same incarnation, *after* the last byte was copied, the copy is good.
That holds however long the copy took, whatever happened to the session or the claim, and even if
the daemon has died.

Nothing is closed here: mappings and descriptors go with the last reference to them, so a thread
that reads never loses what it reads from.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, cast

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import RecordError
from ...proto.index import TIER_OFFSET, PackedRows, Placed, entry_of, packed_rows, place_of
from ...proto.index_reader import IndexReader
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from ..results import NO_ENTRIES, Entries, Entry
from ..wire.deadline import Deadline
from ..wire.framed_calls import FramedCalls
from ..wire.transport import Copied
from .arenas import FileArena, MappedArena, TierMemory, outcome_of
from .disk_reads import DiskReads
from .staging import StagingMemory

#: Where a search for each mode stops; see `IndexReader.find`.
_STOPS_AT: Final = {ClaimMode.RUN: False, ClaimMode.FIRST: True, ClaimMode.ANY: None}
_TIERS: Final = {int(tier): tier for tier in Tier}
_REASONS: Final = {int(reason): reason for reason in SaveReason}
#: `Entry._make` without a Python call, because there is one for every block.
_made: Final = partial(tuple.__new__, Entry)


class LocalNode:
    """Read access to the memory of one start of a daemon. Thread-safe."""

    def __init__(
        self,
        descriptors: Mapping[str, tuple[int, int]],
        refused: Mapping[str, str],
        ref: pb.SessionRef,
        calls: FramedCalls,
        reads: DiskReads,
    ) -> None:
        """`descriptors` by name, each with its size in bytes; closed here. `refused`: missing
        features, with the reasons. `ref`: the session that all was handed to. Takes over `calls`.
        `reads`: the client's, which outlives this node.
        """
        self._reads: Final = reads
        self.ref: Final = ref
        self.calls: Final = calls
        self.refused: Final[dict[str, str]] = {}
        self.index: IndexReader | None = None
        self.arenas: Final[dict[int, TierMemory]] = {}
        #: Handed over when a save first needs it.
        self.staging: StagingMemory | None = None
        #: Tiers with entries whose arenas were not handed over: their devices came later.
        self.lacking: set[int] = set()
        #: False once the daemon could not read memory that this process lent.
        self.lends = True
        self.take(descriptors, refused)

    def take(self, descriptors: Mapping[str, tuple[int, int]], refused: Mapping[str, str]) -> None:
        """Add what was handed over later, or replace what there was. Closes the descriptors."""
        self.refused.update(refused)
        for name, (fd, size_bytes) in descriptors.items():
            try:
                self._attach(name, fd, size_bytes)
            except (OSError, ValueError, RecordError) as problem:
                self.refused[name] = str(problem)
            else:
                self.refused.pop(name, None)
            finally:
                os.close(fd)

    def _attach(self, name: str, fd: int, size_bytes: int) -> None:
        match name:
            case frames.INDEX:
                index = IndexReader.attach(fd)
                if index.incarnation != self.ref.incarnation:
                    raise RecordError("the index is that of another start of the daemon")
                self.index = index
            case frames.RAM:
                self.arenas[Tier.RAM] = MappedArena(fd, size_bytes, outlives_daemon=False)
            case frames.SHM:
                self.arenas[Tier.SHM] = MappedArena(fd, size_bytes, outlives_daemon=True)
            case frames.DISK:
                self.arenas[Tier.DISK] = FileArena(fd, self._reads)
            case frames.STAGING:
                self.staging = StagingMemory(fd, size_bytes)
            case _:
                pass  # of a later version

    def let_go(self) -> None:
        """Forget index, arenas and staging memory: another session has taken their place. Hits that
        are still held refer to this node and would keep them; a view keeps what it shows."""
        self.index = self.staging = None
        self.arenas.clear()

    @property
    def indexed(self) -> bool:
        """Whether entries can be looked up here, at this moment."""
        index = self.index
        return index is not None and index.live

    # ---- search

    def find(self, keys: Iterable[Key], mode: ClaimMode) -> tuple[Sequence[int], Entries]:
        """The keys that a claim of this mode would get: positions and entries. Consumes only as
        many keys as it needs. None of them without an index."""
        index = self.index
        if index is None:
            return (), NO_ENTRIES
        if not isinstance(keys, Sequence):
            keys = list(keys)
        found = index.find_rows(keys, _STOPS_AT[mode])
        if found is None or not _known(found[0]):
            return self._find_odd(index.find(keys, _STOPS_AT[mode]), mode)
        rows, positions = found
        if not rows:
            return (), NO_ENTRIES
        entries = PackedEntries(rows, InPlace(self, rows))
        if isinstance(keys, list | tuple) and isinstance(positions, range):
            entries.keys = keys[: len(rows)]  # no need to make them again
        return positions, entries

    def _find_odd(
        self, found: Sequence[Placed | None], mode: ClaimMode
    ) -> tuple[Sequence[int], Entries]:
        """`find` where some entries lie in several pieces, or are of a later version."""
        positions: list[int] = []
        entries: list[Entry] = []
        placed: list[Placed] = []
        for position, each in enumerate(found):
            entry = None if each is None else _entry(each[1])
            if each is not None and entry is not None:
                positions.append(position)
                entries.append(entry)
                placed.append(each)
            elif mode is ClaimMode.RUN:
                break
        return positions, Entries(entries, InPlace(self, placed))

    # ---- copies

    def copy(
        self,
        entries: Entries,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[Copied]:
        """Copy whole payloads into `targets`, each exactly as long as its payload. What the disk
        does not give until the deadline is GONE.

        `check`: whether to compare the CRC32C, for each entry.
        """
        index = self.index
        if index is None:
            return [Copied.GONE] * len(entries)
        rows = self._rows(index, entries)
        hanging = index.hanging
        copies = None if hanging else self._copied_alike(entries, rows, targets, check, deadline)
        if copies is not None:
            return copies
        copies = [
            Copied.UNREADABLE
            if found is not None and hanging >> found[1][TIER_OFFSET] & 1
            else self._copied(entry, found, target, deadline, check=checked)
            for entry, found, target, checked in zip(entries, rows, targets, check, strict=True)
        ]
        copied = [
            found
            for found, outcome in zip(rows, copies, strict=True)
            if found is not None and outcome in (Copied.WHOLE, Copied.CORRUPT)
        ]
        return self._validated(copies, rows, copied, _tiers_of(copied), deadline)

    def _rows(self, index: IndexReader, entries: Entries) -> Sequence[Placed | None]:
        """The rows of entries: those that a search in this node found, or else those of now."""
        found = entries.in_place
        if isinstance(found, InPlace) and found.node is self:
            return found.placed
        return index.find(entries.keys)

    def _copied_alike(
        self,
        entries: Entries,
        rows: Sequence[Placed | None],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[Copied] | None:
        """Copy entries that lie in one tier and in one piece each, as nearly all do. None: they
        don't, or something about them is wrong."""
        located = self._located(entries, rows)
        if located is None:
            return None
        arena, placed = located
        try:
            failed = arena.read_all(placed, targets, check, deadline)
        except OSError:
            return None
        copies = [Copied.WHOLE] * len(entries)
        for position, outcome in failed:
            copies[position] = outcome
        return self._validated(copies, placed, placed, {placed.tiers[0]}, deadline)

    def _located(
        self, entries: Entries, rows: Sequence[Placed | None]
    ) -> tuple[TierMemory, PackedRows] | None:
        """Where entries of one tier, in one piece each, lie. None: they are not such entries."""
        packed: PackedRows | None
        if isinstance(entries, PackedEntries) and rows is entries.rows:
            packed = entries.rows
        else:
            placed = [found for found in rows if found is not None]
            packed = packed_rows(placed) if len(placed) == len(entries) else None
            if packed is None or packed.generations != list(entries.generations):
                return None
        if not packed or packed.tiers.count(packed.tiers[0]) < len(packed):
            return None
        arena = self._arena(packed.tiers[0])
        return None if arena is None else (arena, packed)

    def _arena(self, tier: int) -> TierMemory | None:
        arena = self.arenas.get(tier)
        if arena is None:
            self.lacking.add(tier)
        return arena

    def _located_one(
        self, entry: Entry, found: Placed | None
    ) -> tuple[TierMemory, tuple[int, ...]] | None:
        """The arena and the extents of an entry. None: it has gone, or its arena is not here."""
        if found is None:
            return None
        generation, tier, location = place_of(found[1])
        arena = self._arena(tier)
        return None if arena is None or generation != entry.generation else (arena, location)

    def _copied(
        self,
        entry: Entry,
        found: Placed | None,
        target: FlatBytes,
        deadline: Deadline,
        *,
        check: bool,
    ) -> Copied:
        """Copy any entry."""
        located = self._located_one(entry, found)
        if located is None:
            return Copied.GONE
        arena, location = located
        try:
            crc = arena.read_into(location, target, check=check, deadline=deadline)
        except OSError as problem:
            return outcome_of(problem)
        return Copied.WHOLE if crc in (None, entry.payload_crc32c) else Copied.CORRUPT

    def _validated(
        self,
        copies: list[Copied],
        rows: Sequence[Placed | None],
        copied: Collection[Placed],
        tiers: set[int],
        deadline: Deadline,
    ) -> list[Copied]:
        """The outcomes of finished copies: those of entries that left meanwhile become GONE.
        `copied`: the `rows` that were copied from, and their tiers."""
        if self._stand(copied, tiers, deadline):
            return copies
        return [
            outcome
            if outcome is Copied.UNREADABLE or (found is not None and self.stand([found], deadline))
            else Copied.GONE
            for outcome, found in zip(copies, rows, strict=True)
        ]

    # ---- views

    def read(
        self, entry: Entry, offset_bytes: int, length_bytes: int, deadline: Deadline
    ) -> bytes | None:
        """A range of a payload, without a checksum; None: it can't be read here."""
        index = self.index
        found = None if index is None else index.find([entry.key])[0]
        views = self._views(entry, found, offset_bytes, length_bytes)
        if found is None or views is None:
            return None
        data = b"".join(views)
        return data if self.stand([found], deadline) else None

    def views(self, entries: Entries) -> tuple[list[list[memoryview]], InPlace] | None:
        """The payloads of claimed entries where they lie: good as long as the rows stand, which are
        returned too. None: some payloads can't be reached."""
        index = self.index
        if index is None:
            return None
        rows = self._rows(index, entries)
        views: list[list[memoryview] | None] | list[list[memoryview]] | None = None
        located = self._located(entries, rows)
        if located is not None:
            arena, packed = located
            with suppress(OSError):
                views = arena.views_all(packed)
        if views is None:
            views = [
                self._views(entry, found, 0, entry.payload_bytes)
                for entry, found in zip(entries, rows, strict=True)
            ]
            if None in views:
                return None
        placed = cast("Sequence[Placed]", rows)
        return cast("list[list[memoryview]]", views), InPlace(self, placed)

    def _views(
        self, entry: Entry, found: Placed | None, offset_bytes: int, length_bytes: int
    ) -> list[memoryview] | None:
        located = self._located_one(entry, found)
        if located is None:
            return None
        arena, location = located
        try:
            return arena.views(location, offset_bytes, length_bytes)
        except OSError:
            return None

    # ---- validation

    def stand(self, rows: Collection[Placed], deadline: Deadline) -> bool:
        """Whether these rows still stand, and no later start of the daemon wrote to their arenas.

        True after a copy: the copied bytes are those that were saved.
        """
        return self._stand(rows, _tiers_of(rows), deadline)

    def _stand(self, rows: Collection[Placed], tiers: set[int], deadline: Deadline) -> bool:
        """`stand` for rows in these tiers."""
        index = self.index
        if index is None or not index.unchanged(rows):
            return False
        incarnation = self.ref.incarnation
        arenas = [self.arenas.get(tier) for tier in tiers]
        return all(arena and arena.written_by(incarnation, deadline) for arena in arenas)


@dataclass(frozen=True, slots=True)
class InPlace:
    """Rows of found or claimed entries: while they stand, bytes read with them are good."""

    node: LocalNode
    placed: Sequence[Placed]

    def stands(self, deadline: Deadline) -> bool:
        return self.node.stand(self.placed, deadline)


class PackedEntries(Entries):
    """Entries of packed rows, in one piece each: an `Entry` is made when somebody asks for it."""

    def __init__(self, rows: PackedRows, found: InPlace) -> None:
        """`rows`: those of `found`, all `_known`."""
        super().__init__((), found)
        self.rows = rows
        self.found = found
        self._count = len(rows)
        tiers = set(rows.tiers)
        self.tier = _TIERS[tiers.pop()] if len(tiers) == 1 else None
        # At once, as every search and restore needs these.
        self.payload_bytes = rows.payload_bytes
        self.token_counts = rows.token_counts

    @cached_property
    def generations(self) -> Sequence[int]:
        return self.rows.generations

    @cached_property
    def keys(self) -> Sequence[Key]:
        return self.rows.keys

    @cached_property
    def _entries(self) -> list[Entry]:
        rows = self.rows
        return list(
            map(
                _made,
                zip(
                    self.keys,
                    map(_TIERS.__getitem__, rows.tiers),
                    rows.contents,
                    rows.payload_crc32c,
                    rows.generations,
                    map(_REASONS.__getitem__, rows.reasons),
                    strict=True,
                ),
            )
        )

    def _picked(self, indices: Sequence[int]) -> Entries:
        if not indices:
            return NO_ENTRIES
        rows = self.rows.some(indices)
        return PackedEntries(rows, InPlace(self.found.node, rows))


def _tiers_of(rows: Iterable[Placed]) -> set[int]:
    if isinstance(rows, PackedRows):
        return set(rows.tiers)
    return {row[TIER_OFFSET] for _, row in rows}


def _known(rows: PackedRows) -> bool:
    """Are all tiers and reasons among those that this version knows?"""
    return _TIERS.keys() >= set(rows.tiers) and _REASONS.keys() >= set(rows.reasons)


def _entry(row: bytes) -> Entry | None:
    key, generation, content, payload_crc32c, tier, reason = entry_of(row)
    if tier not in _TIERS or reason not in _REASONS:
        return None
    return Entry(key, _TIERS[tier], content, payload_crc32c, generation, _REASONS[reason])
