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
from typing import Final

from ...proto import local
from ...proto import prefixd_pb2 as pb
from ...proto.errors import RecordError
from ...proto.index import IndexReader, Placed, place_of
from ...proto.keys import Key
from ...proto.pieces import FlatBytes
from ...proto.vocabulary import Tier
from ..results import Entry
from ..wire.transport import Copied
from .arenas import Arena, FileArena, MappedArena
from .calls import LocalCalls
from .staging import StagingMemory


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
        self.staging: StagingMemory | None = None
        attach: dict[str, Callable[[int, int], None]] = {
            local.INDEX: self._attach_index,
            local.RAM: partial(self._attach_memory, Tier.RAM),
            local.SHM: partial(self._attach_memory, Tier.SHM),
            local.DISK: self._attach_disk,
            local.STAGING: self._attach_staging,
        }
        for name, (fd, size_bytes) in descriptors.items():
            try:
                if name in attach:  # a later version may hand over more
                    attach[name](fd, size_bytes)
            except (OSError, ValueError, RecordError) as problem:
                self.refused[name] = str(problem)
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

    def take_index(self, descriptors: Mapping[str, tuple[int, int]]) -> None:
        """Of what was handed over again only the index is new; descriptors are closed here."""
        for name, (fd, size_bytes) in descriptors.items():
            try:
                if name == local.INDEX:
                    self._attach_index(fd, size_bytes)
            except (OSError, ValueError, RecordError) as problem:
                self.refused[name] = str(problem)
            else:
                self.refused.pop(name, None)
            finally:
                os.close(fd)

    @property
    def indexed(self) -> bool:
        """Can entries be looked up here, at this moment?"""
        return self.index is not None and self.index.live

    # ---- copies

    def copy(
        self, entries: Sequence[Entry], targets: Sequence[FlatBytes], check: Sequence[bool]
    ) -> list[Copied]:
        """Copy whole payloads into `targets`, each exactly as long as its payload. `check`: whose
        CRC32C is compared."""
        index = self.index
        if index is None:
            return [Copied.GONE] * len(entries)
        rows = list(index.find([entry.key for entry in entries]))
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
                        wrong = checked and crc != entry.payload_crc32c
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
        found = None if self.index is None else next(self.index.find([entry.key]))
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
        if self.index is None:
            return None
        views: list[list[memoryview]] = []
        rows: dict[Key, Placed] = {}
        for entry in entries:
            key = entry.key
            found = known.get(key) or next(self.index.find((key,)))
            its_views = None if found is None else self._views(entry, found[1])
            if found is None or its_views is None:
                return None
            views.append(its_views)
            rows[key] = found
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
        return self._stand(rows, {place_of(row)[1] for _, row in rows})

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
