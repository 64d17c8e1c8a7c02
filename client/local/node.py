"""What the daemon handed over: its index, its arenas and this session's staging memory.

Reading without asking is optimistic: look an entry up, copy its bytes, look it up again. The
daemon removes the row of an entry before anything else is written to its extents, and the next
start of a daemon writes its incarnation into an arena before anything else; a row of the same
generation, and the same incarnation, *after* the last byte was copied therefore say that the
copy is good. It does not matter how long that took, what became of the session or of the claim,
or whether the daemon still runs.

Nothing is closed here: mappings and descriptors go with the last reference to them, so a thread
that reads never loses what it reads from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import RecordError
from ...proto.index import TIER_OFFSET, Columns, columns_of, place_of
from ...proto.index_reader import IndexReader, Placed
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import Tier
from ..results import Entry
from ..wire.transport import Copied
from .arenas import Arena, FileArena, MappedArena
from .calls import LocalCalls
from .staging import StagingMemory

#: No rows.
NOTHING: Final[Mapping[Key, Placed]] = MappingProxyType({})


class LocalNode:
    """Read access to one start of a daemon. Thread-safe.

    `refused` says which feature is missing, and why.
    """

    def __init__(
        self,
        descriptors: Mapping[str, tuple[int, int]],
        refused: Mapping[str, str],
        ref: pb.SessionRef,
        calls: LocalCalls,
    ) -> None:
        """`descriptors`: what was handed over by name, each with its size in bytes; closed here.
        `ref`: the session that they were handed to. Takes over `calls`."""
        self.ref: Final = ref
        self.calls: Final = calls
        self.refused: Final = dict(refused)
        self.index: IndexReader | None = None
        self.arenas: Final[dict[int, Arena]] = {}
        #: handed over when a save needs it
        self.staging: StagingMemory | None = None
        #: The daemon can read what this process lends, for all that is known.
        self.lends = True
        self.take(descriptors)

    def take(
        self,
        descriptors: Mapping[str, tuple[int, int]],
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """More of it, or something in place of what there was; descriptors are closed here."""
        self.refused.update(refused)
        attach: dict[str, Callable[[int, int], None]] = {
            frames.INDEX: self._attach_index,
            frames.RAM: partial(self._attach_memory, Tier.RAM),
            frames.SHM: partial(self._attach_memory, Tier.SHM),
            frames.DISK: self._attach_disk,
            frames.STAGING: self._attach_staging,
        }
        for name, (fd, size_bytes) in descriptors.items():
            try:
                if name in attach:  # a later version may hand over more
                    attach[name](fd, size_bytes)
            except (OSError, ValueError, RecordError) as problem:
                self.refused[name] = str(problem)
            else:
                self.refused.pop(name, None)
            finally:
                os.close(fd)

    def _attach_index(self, fd: int, _size_bytes: int) -> None:
        index = IndexReader.attach(fd)
        if index.incarnation != self.ref.incarnation:
            raise RecordError("the index is that of another start of the daemon")
        self.index = index

    def _attach_memory(self, tier: Tier, fd: int, size_bytes: int) -> None:
        self.arenas[tier] = MappedArena(fd, size_bytes, outlives_daemon=tier is Tier.SHM)

    def _attach_disk(self, fd: int, _size_bytes: int) -> None:
        self.arenas[Tier.DISK] = FileArena(fd)

    def _attach_staging(self, fd: int, size_bytes: int) -> None:
        self.staging = StagingMemory(os.dup(fd), size_bytes)

    @property
    def indexed(self) -> bool:
        """Can entries be looked up here, at this moment?"""
        return self.index is not None and self.index.live

    # ---- copies

    def copy(
        self,
        entries: Sequence[Entry],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        known: Mapping[Key, Placed] = NOTHING,
    ) -> list[Copied]:
        """Copy whole payloads into `targets`, each exactly as long as its payload. `check`: whose
        CRC32C is compared. `known`: rows that need not be looked up."""
        index = self.index
        if index is None:
            return [Copied.GONE] * len(entries)
        keys = [entry.key for entry in entries]
        found = list(map(known.get, keys))
        rows = index.find(keys) if None in found else found
        copies = self._copied_alike(entries, rows, targets, check)
        if copies is not None:
            return copies
        return self._copied(entries, rows, targets, check)

    def _copied_alike(
        self,
        entries: Sequence[Entry],
        rows: Sequence[Placed | None],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
    ) -> list[Copied] | None:
        """The copies of entries that lie in one tier and in one piece each, as nearly all do. None:
        they don't, or something about them is not as it should be."""
        located = self._located(entries, rows)
        if located is None:
            return None
        arena, columns, placed = located
        try:
            crcs = arena.read_all(columns.offsets, columns.lengths, targets, check)
        except OSError:
            return None
        copies = [Copied.WHOLE] * len(entries)
        for number, crc in enumerate(crcs):
            if crc is not None and crc != entries[number].payload_crc32c:
                copies[number] = Copied.CORRUPT
        return self._validated(copies, placed, placed, {columns.tiers[0]})

    def _located(
        self, entries: Sequence[Entry], rows: Sequence[Placed | None]
    ) -> tuple[Arena, Columns, list[Placed]] | None:
        """Where entries lie that are of one tier and in one piece each. None: they are not."""
        placed = [found for found in rows if found is not None]
        columns = columns_of([row for _, row in placed]) if len(placed) == len(entries) else None
        if columns is None or columns.tiers.count(columns.tiers[0]) < len(entries):
            return None
        arena = self.arenas.get(columns.tiers[0])
        if arena is None or columns.generations != tuple([e.generation for e in entries]):
            return None
        return arena, columns, placed

    def _copied(
        self,
        entries: Sequence[Entry],
        rows: Sequence[Placed | None],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
    ) -> list[Copied]:
        """The same of any entries, one after the other."""
        arenas, gone, whole = self.arenas, Copied.GONE, Copied.WHOLE
        copies: list[Copied] = []
        copied: list[Placed] = []
        tiers: set[int] = set()
        for entry, found, target, checked in zip(entries, rows, targets, check, strict=True):
            outcome = gone
            if found is not None:
                generation, tier, location = place_of(found[1])
                arena = arenas.get(tier)
                if generation == entry.generation and arena is not None:
                    try:
                        crc = arena.read_into(location, target, check=checked)
                        wrong = crc is not None and crc != entry.payload_crc32c
                        outcome = Copied.CORRUPT if wrong else whole
                        copied.append(found)
                        tiers.add(tier)
                    except OSError:
                        outcome = gone  # the daemon knows more
            copies.append(outcome)
        return self._validated(copies, rows, copied, tiers)

    def _validated(
        self,
        copies: list[Copied],
        rows: Sequence[Placed | None],
        copied: Collection[Placed],
        tiers: set[int],
    ) -> list[Copied]:
        """The outcome of copies that are done: of an entry that left meanwhile, nothing counts.
        `copied`: those of `rows` that something was copied of, and their tiers."""
        if self._stand(copied, tiers):
            return copies
        return [
            outcome if found is not None and self.stand([found]) else Copied.GONE
            for outcome, found in zip(copies, rows, strict=True)
        ]

    def read(self, entry: Entry, offset_bytes: int, length_bytes: int) -> bytes | None:
        """A range of a payload, not checked; None: it can't be had here."""
        found = None if self.index is None else self.index.find([entry.key])[0]
        views = None if found is None else self._views(entry, found[1], offset_bytes, length_bytes)
        if found is None or views is None:
            return None
        data = b"".join(views)
        return data if self.stand([found]) else None

    def views(
        self, entries: Sequence[Entry], known: Mapping[Key, Placed]
    ) -> tuple[list[list[memoryview]], dict[Key, Placed]] | None:
        """The payloads of claimed entries where they lie, and the rows that they are good with:
        as long as those `stand`. `known`: rows that need not be looked up. None: some payloads
        can't be reached."""
        index = self.index
        if index is None:
            return None
        keys = [entry.key for entry in entries]
        found = list(map(known.get, keys))
        if None in found:
            found = [each or index.find((key,))[0] for key, each in zip(keys, found, strict=True)]
        located = self._located(entries, found)
        if located is not None:
            arena, columns, placed = located
            try:
                views = arena.views_all(columns.offsets, columns.lengths, columns.payload_bytes)
            except OSError:
                views = None
            if views is not None:
                return views, dict(zip(keys, placed, strict=True))
        return self._views_of(entries, found)

    def _views_of(
        self, entries: Sequence[Entry], found: Sequence[Placed | None]
    ) -> tuple[list[list[memoryview]], dict[Key, Placed]] | None:
        """The same of any entries, one after the other."""
        views: list[list[memoryview]] = []
        rows: dict[Key, Placed] = {}
        for entry, placed in zip(entries, found, strict=True):
            its_views = None if placed is None else self._views(entry, placed[1])
            if placed is None or its_views is None:
                return None
            views.append(its_views)
            rows[entry.key] = placed
        return views, rows

    def _views(
        self, entry: Entry, row: bytes, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> list[memoryview] | None:
        generation, tier, location = place_of(row)
        arena = self.arenas.get(tier)
        if generation != entry.generation or arena is None:
            return None
        try:
            whole = entry.payload_bytes if length_bytes is None else length_bytes
            return arena.views(location, offset_bytes, whole)
        except OSError:
            return None

    def stand(self, rows: Collection[Placed]) -> bool:
        """Do these rows still stand, and did no later start of the daemon write to their arenas?

        True after a copy: what was copied is what was saved.
        """
        return self._stand(rows, {row[TIER_OFFSET] for _, row in rows})

    def _stand(self, rows: Collection[Placed], tiers: set[int]) -> bool:
        """The same, of rows in these tiers."""
        index = self.index
        if index is None or not index.unchanged(rows):
            return False
        incarnation = self.ref.incarnation
        return all(self.arenas[tier].written_by(incarnation) for tier in tiers)


@dataclass(frozen=True, slots=True)
class InPlace:
    """A claim that was made from rows of the index: while they stand, its bytes are good."""

    node: LocalNode
    rows: Mapping[Key, Placed]

    def stands(self) -> bool:
        return self.node.stand(self.rows.values())
