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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...proto import local
from ...proto import prefixd_pb2 as pb
from ...proto.errors import RecordError
from ...proto.index import IndexReader, unpack_row
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
        keys = [entry.key for entry in entries]
        rows = index.get(keys)
        copies = [
            self._copy(entry, row, target, checked)
            for entry, row, target, checked in zip(entries, rows, targets, check, strict=True)
        ]
        return self._validated(keys, rows, copies)

    def _copy(self, entry: Entry, row: bytes | None, target: FlatBytes, check: bool) -> Copied:
        if row is None:
            return Copied.GONE
        found = unpack_row(row)
        arena = self.arenas.get(found.tier)
        if found.generation != entry.generation or arena is None:
            return Copied.GONE
        try:
            crc = arena.read_into(found.location, target, check=check)
        except OSError:
            return Copied.GONE  # the daemon knows more
        return Copied.CORRUPT if check and crc != found.payload_crc32c else Copied.WHOLE

    def _validated(
        self, keys: Sequence[Key], rows: Sequence[bytes | None], copies: list[Copied]
    ) -> list[Copied]:
        """The outcome of copies that are done: of an entry that left meanwhile, nothing counts."""
        looked = [n for n, outcome in enumerate(copies) if outcome is not Copied.GONE]
        found: list[tuple[Key, bytes]] = [(keys[n], rows[n] or b"") for n in looked]
        if self.stand(found):
            return copies
        for number, pair in zip(looked, found, strict=True):
            if not self.stand([pair]):
                copies[number] = Copied.GONE
        return copies

    def read(self, entry: Entry, offset_bytes: int, length_bytes: int) -> bytes | None:
        """A range of a payload, not checked; None: it can't be had here."""
        (row,) = self.index.get([entry.key]) if self.index is not None else (None,)
        views = None if row is None else self._views(entry, row, offset_bytes, length_bytes)
        if row is None or views is None:
            return None
        data = b"".join(views)
        return data if self.stand([(entry.key, row)]) else None

    def views(
        self, entries: Sequence[Entry]
    ) -> tuple[list[list[memoryview]], list[tuple[Key, bytes]]] | None:
        """The payloads of claimed entries where they lie, and the rows that they are good with:
        as long as those `stand`. None: some can't be reached."""
        if self.index is None:
            return None
        rows = self.index.get([entry.key for entry in entries])
        views: list[list[memoryview]] = []
        standing: list[tuple[Key, bytes]] = []
        for entry, row in zip(entries, rows, strict=True):
            found = None if row is None else self._views(entry, row, 0, entry.payload_bytes)
            if row is None or found is None:
                return None
            views.append(found)
            standing.append((entry.key, row))
        return views, standing

    def _views(
        self, entry: Entry, row: bytes, offset_bytes: int, length_bytes: int
    ) -> list[memoryview] | None:
        found = unpack_row(row)
        arena = self.arenas.get(found.tier)
        if found.generation != entry.generation or arena is None:
            return None
        try:
            return arena.views(found.location, offset_bytes, length_bytes)
        except OSError:
            return None

    def stand(self, rows: Sequence[tuple[Key, bytes]]) -> bool:
        """Do these rows still stand, and did no later start of the daemon write to their arenas?

        True after a copy: what was copied is what was saved.
        """
        index = self.index
        if index is None or not index.live:
            return False
        if not index.unchanged([key for key, _ in rows], [row for _, row in rows]):
            return False
        incarnation = self.ref.incarnation
        return all(
            self.arenas[t].written_by(incarnation)
            for t in {unpack_row(row).tier for _, row in rows}
        )


@dataclass(frozen=True, slots=True)
class InPlace:
    """A claim that was made from rows of the index: while they stand, its bytes are good."""

    node: LocalNode
    rows: Sequence[tuple[Key, bytes]]

    def stands(self) -> bool:
        return self.node.stand(self.rows)
