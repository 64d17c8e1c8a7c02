"""The shm tier: a mapped arena in /dev/shm, which survives a restart of the daemon."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from ..proto.vocabulary import Tier
from .arena import DEFAULT_SLAB_BYTES, Arena
from .arena_store import RecordedStore
from .row_table import RowFile
from .rows import ROW_BYTES
from .store import EntryRef, StoreError


class ShmStore(RecordedStore):
    """The store in `directory`, below /dev/shm. `mode` is that of the arena; the rest is as in
    every `RecordedStore`."""

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
        mode: int = 0o640,
        max_budget_bytes: int = 0,
    ) -> None:
        self._mode = mode
        # Nothing here outlives the memory that it is in.
        super().__init__(
            directory,
            budget_bytes,
            slab_bytes,
            sync=False,
            verify_payloads=verify_payloads,
            max_budget_bytes=max_budget_bytes,
        )

    def _open_arena(self, path: Path, size_bytes: int, max_bytes: int) -> Arena:
        return Arena.file(path, size_bytes, self._mode, max_bytes=max_bytes)

    def _open_table(self, slabs: int, *, sync: bool) -> RowFile:
        return RowFile(self.directory, slabs, sync=sync)

    def forget(self, entries: Iterable[EntryRef]) -> None:
        """Erases the records at once: that is memory too."""
        super().forget(entries)
        with suppress(StoreError):
            self._records.flush()
