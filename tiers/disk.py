"""The disk tier: an arena file and its records, which survive power loss.

A save costs two syncs, whatever the size of its batch: the payloads', then the records'. Where
it takes the room of evicted entries there is a third one before, of their erasure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ..proto.vocabulary import Tier
from .arena import DEFAULT_SLAB_BYTES, ArenaWriter
from .arena_store import RecordedStore
from .disk_arena import DiskArena
from .lmdb_rows import TABLE_FIXED_BYTES, TABLE_SLAB_BYTES, LmdbRows
from .store import StoreError


class DiskStore(RecordedStore):
    """The store in `directory`. `sync=False`: `apply` does not wait for the device, and power
    loss may take what it acknowledged. The rest is as in every `RecordedStore`.

    Payloads are not verified at start by default: every reader does it.
    """

    tier: ClassVar[Tier] = Tier.DISK
    blocking: ClassVar[bool] = True
    _OLD_LAYOUTS: ClassVar[tuple[str, ...]] = ("data.mdb", "records")
    _TABLE_FIXED_BYTES: ClassVar[int] = TABLE_FIXED_BYTES
    _TABLE_SLAB_BYTES: ClassVar[int] = TABLE_SLAB_BYTES
    arena: DiskArena

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        *,
        sync: bool = True,
        verify_payloads: bool = False,
        max_budget_bytes: int = 0,
    ) -> None:
        self._sync = sync
        super().__init__(
            directory,
            budget_bytes,
            slab_bytes,
            sync=sync,
            verify_payloads=verify_payloads,
            max_budget_bytes=max_budget_bytes,
        )

    def _open_arena(self, path: Path, size_bytes: int, max_bytes: int) -> DiskArena:
        return DiskArena(path, size_bytes, sync=self._sync, max_bytes=max_bytes)

    def _open_table(self, slabs: int, *, sync: bool) -> LmdbRows:
        return LmdbRows(self.directory, slabs, sync=sync)

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
