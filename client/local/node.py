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
from functools import partial
from typing import Final, cast

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import RecordError
from ...proto.index import TIER_OFFSET, Columns, columns_of, entry_of, place_of, unpacked
from ...proto.index_reader import IndexReader, Placed
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from ..results import Entry
from ..wire.deadline import Deadline
from ..wire.transport import Copied
from .arenas import Arena, FileArena, MappedArena
from .disk_reads import DeviceHangs, DiskReads
from .local_socket import LocalCalls
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
        calls: LocalCalls,
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
        self.arenas: Final[dict[int, Arena]] = {}
        #: Handed over when a save first needs it.
        self.staging: StagingMemory | None = None
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
                self.staging = StagingMemory(os.dup(fd), size_bytes)
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

    def find(
        self, keys: Iterable[Key], mode: ClaimMode
    ) -> tuple[Sequence[int], list[Entry], list[Placed]]:
        """The keys that a claim of this mode would get: positions, entries and their rows. Consumes
        only as many keys as it needs. None of them without an index."""
        index = self.index
        found = [] if index is None else index.find(keys, _STOPS_AT[mode])
        placed = [each for each in found if each is not None]
        if not placed:
            return (), [], placed
        entries = _entries([row for _, row in placed])
        if None not in entries:
            known = cast("list[Entry]", entries)
            if mode is ClaimMode.FIRST:
                return (len(found) - 1,), known, placed
            if mode is ClaimMode.RUN or len(placed) == len(found):
                return range(len(placed)), known, placed
        positions: list[int] = []
        known = []
        rows: list[Placed] = []
        remaining = iter(entries)
        for position, each in enumerate(found):
            entry = None if each is None else next(remaining)
            if each is not None and entry is not None:
                positions.append(position)
                known.append(entry)
                rows.append(each)
            elif mode is ClaimMode.RUN:
                break
        return positions, known, rows

    # ---- copies

    def copy(
        self,
        entries: Sequence[Entry],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
        known: Mapping[Key, Placed] | None = None,
    ) -> list[Copied]:
        """Copy whole payloads into `targets`, each exactly as long as its payload. What the disk
        does not give until the deadline is GONE.

        `check`: whether to compare the CRC32C, for each entry. `known`: rows that need not be
        looked up.
        """
        index = self.index
        if index is None:
            return [Copied.GONE] * len(entries)
        keys = [entry.key for entry in entries]
        rows: Sequence[Placed | None] = list(map((known or {}).get, keys))
        if None in rows:
            rows = index.find(keys)
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

    def _copied_alike(
        self,
        entries: Sequence[Entry],
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
        arena, columns, placed = located
        try:
            crcs = arena.read_all(columns.offsets, columns.lengths, targets, check, deadline)
        except OSError:
            return None
        copies = [Copied.WHOLE] * len(entries)
        for number, crc in enumerate(crcs):
            if crc is not None and crc != entries[number].payload_crc32c:
                copies[number] = Copied.CORRUPT if isinstance(crc, int) else _failed(crc)
        return self._validated(copies, placed, placed, {columns.tiers[0]}, deadline)

    def _located(
        self, entries: Sequence[Entry], rows: Sequence[Placed | None]
    ) -> tuple[Arena, Columns, list[Placed]] | None:
        """Where entries of one tier, in one piece each, lie. None: they are not such entries."""
        placed = [found for found in rows if found is not None]
        columns = columns_of([row for _, row in placed]) if len(placed) == len(entries) else None
        if columns is None or columns.tiers.count(columns.tiers[0]) < len(entries):
            return None
        arena = self.arenas.get(columns.tiers[0])
        if arena is None or columns.generations != tuple([e.generation for e in entries]):
            return None
        return arena, columns, placed

    def _located_one(
        self, entry: Entry, found: Placed | None
    ) -> tuple[Arena, tuple[int, ...]] | None:
        """The arena and the extents of an entry. None: it has gone, or its arena is not here."""
        if found is None:
            return None
        generation, tier, location = place_of(found[1])
        arena = self.arenas.get(tier)
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
            return _failed(problem)
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

    def views(
        self, entries: Sequence[Entry], known: Mapping[Key, Placed]
    ) -> tuple[list[list[memoryview]], dict[Key, Placed]] | None:
        """The payloads of claimed entries where they lie, and their rows: the views are good as
        long as those `stand`. `known`: rows that need not be looked up. None: some payloads can't
        be reached."""
        index = self.index
        if index is None:
            return None
        keys = [entry.key for entry in entries]
        rows = list(map(known.get, keys))
        if None in rows:
            rows = [row or index.find((key,))[0] for key, row in zip(keys, rows, strict=True)]
        views: list[list[memoryview] | None] | list[list[memoryview]] | None = None
        located = self._located(entries, rows)
        if located is not None:
            arena, columns, _ = located
            with suppress(OSError):
                views = arena.views_all(columns.offsets, columns.lengths, columns.payload_bytes)
        if views is None:
            views = [
                self._views(entry, found, 0, entry.payload_bytes)
                for entry, found in zip(entries, rows, strict=True)
            ]
            if None in views:
                return None
        placed = cast("list[Placed]", rows)
        return cast("list[list[memoryview]]", views), dict(zip(keys, placed, strict=True))

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

    def in_place(self, entries: Sequence[Entry], rows: Sequence[Placed]) -> InPlace:
        """Entries that were found with their rows, for later copies and views."""
        return InPlace(self, dict(zip([entry.key for entry in entries], rows, strict=True)))


@dataclass(frozen=True, slots=True)
class InPlace:
    """Rows of found or claimed entries: while they stand, bytes read with them are good."""

    node: LocalNode
    rows: Mapping[Key, Placed]

    def stands(self, deadline: Deadline) -> bool:
        return self.node.stand(self.rows.values(), deadline)


def _failed(problem: OSError) -> Copied:
    """What became of a copy that this ended."""
    if isinstance(problem, DeviceHangs):
        return Copied.UNREADABLE
    return Copied.GONE  # a call to the daemon will say more, if there is time left


def _tiers_of(rows: Iterable[Placed]) -> set[int]:
    return {row[TIER_OFFSET] for _, row in rows}


def _entries(rows: Sequence[bytes]) -> list[Entry | None]:
    """The entries of rows. None: of a tier or a reason that this version does not know."""
    tiers, reasons = _TIERS, _REASONS
    try:
        return [
            _made((key, tiers[tier], size, tokens, crc, layers, ids, generation, reasons[reason]))
            for key, generation, size, _, _, tokens, crc, ids, layers, tier, reason, _ in unpacked(
                rows
            )
        ]
    except (KeyError, ValueError):
        return list(map(_entry, rows))


def _entry(row: bytes) -> Entry | None:
    key, generation, size, tokens, crc, ids, layers, tier, reason = entry_of(row)
    if tier not in _TIERS or reason not in _REASONS:
        return None
    return Entry(key, _TIERS[tier], size, tokens, crc, layers, ids, generation, _REASONS[reason])
