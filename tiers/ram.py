"""The RAM tier: entries in a sealed memfd, gone with the daemon.

An entry is its payload and, right behind it, its token ids. There is no header: nothing is
recovered from here, and an entry whose payload is whole slabs costs exactly that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

from ..proto.keys import Key
from ..proto.record import RecordHead
from ..proto.vocabulary import Tier
from .arena import DEFAULT_SLAB_BYTES, Arena, ArenaWriter, check_slab, whole_slabs
from .store import EntryWriter, Location, Recovery, Store, StoreError, Usage


class RamStore(Store):
    """An anonymous arena of `budget_bytes`, rounded down to whole slabs.

    Its pages are secured by whoever made it (`arena.secure_segments`) before entries are placed
    in them. Raises StoreError if there can't be such an arena.
    """

    tier: ClassVar[Tier] = Tier.RAM
    blocking: ClassVar[bool] = False

    def __init__(self, budget_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES) -> None:
        check_slab(slab_bytes)
        self.slab_bytes: Final = slab_bytes
        self.arena: Final = Arena.anonymous(budget_bytes - budget_bytes % slab_bytes)

    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        return whole_slabs(payload_bytes + token_ids_bytes, self.slab_bytes)

    def payload_offset(self, token_ids_bytes: int) -> int:  # noqa: ARG002  # as in other arenas
        """Where in an entry's extents its payload begins."""
        return 0

    def writer(self, head: RecordHead, location: Location) -> EntryWriter:
        return ArenaWriter(
            self.arena, head, location, before=b"", after=lambda _crc: head.token_ids
        )

    def apply(self, sealed: Sequence[EntryWriter], erased: Iterable[Key]) -> None:
        """Nothing to do: the bytes are where they belong, and nothing survives."""

    def read(
        self, head: RecordHead, location: Location, offset_bytes: int, length_bytes: int
    ) -> list[memoryview]:
        if offset_bytes < 0 or offset_bytes + length_bytes > head.payload_bytes:
            raise StoreError(f"a payload of {head.payload_bytes} bytes does not reach so far")
        return self.arena.views(location, offset_bytes, length_bytes)

    def token_ids(self, head: RecordHead, location: Location, token_ids_bytes: int) -> bytes:
        return self.arena.gather(location, head.payload_bytes, token_ids_bytes)

    def recover(self, directory: Mapping[Key, Location]) -> Recovery:
        return Recovery(
            entries=[], dropped=[(key, "the RAM tier survives nothing") for key in directory]
        )

    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Nothing to remember."""

    def held_keys(self) -> set[Key] | None:
        return None

    def close(self) -> None:
        self.arena.close()
