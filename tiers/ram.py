"""The RAM tier: entries in a sealed memfd, gone with the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from ..proto.entry import EntryRecord
from ..proto.vocabulary import Tier
from .arena import DEFAULT_SLAB_BYTES, Arena, check_slab
from .arena_store import ArenaStore
from .store import EntryRef, EntryWriter, RecoveryBatch, Usage


class RamStore(ArenaStore):
    """An anonymous arena of `budget_bytes`, rounded down to whole slabs; it can be given up to
    `max_budget_bytes` later.

    It has no header and no records: readers of an earlier start have another memfd, so an entry
    whose payload is whole slabs costs exactly that. Raises StoreError if there can't be such an
    arena.
    """

    tier: ClassVar[Tier] = Tier.RAM
    blocking: ClassVar[bool] = False
    recorded: ClassVar[bool] = False
    arena: Arena
    header_bytes = 0

    def __init__(
        self,
        budget_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        *,
        max_budget_bytes: int = 0,
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
