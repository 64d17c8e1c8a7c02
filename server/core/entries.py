"""Entries, and the table of the published ones by key.

One dict of a million entries takes tens of milliseconds to grow or to copy, and can't be iterated
while it changes. The table therefore has many small dicts, its shards. Every key belongs to one
shard for good: a walk takes a shard at a time, and the key of an entry alone tells whether the walk
has passed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from ...proto.entry import Content, HasContent
from ...proto.keys import Key
from ...proto.vocabulary import SaveReason, Tier
from ...tiers.order import Resident

SHARDS: Final = 2048
_MASK: Final = SHARDS - 1
#: Shards use the upper bits of the hash, because dicts use the lower ones.
_SHIFT: Final = 48


@dataclass(slots=True, eq=False)
class EntryState(Resident, HasContent):
    """A key that is published, or is being saved.

    `generation` and `last_used_ns` are stamps: the time of an event in nanoseconds, made unique and
    strictly increasing within one start of the daemon, so that they order entries exactly.
    `generation` is therefore also the time of creation.
    """

    tier: Tier
    reason: SaveReason
    generation: int
    last_used_ns: int
    content: Content
    payload_crc32c: int
    hits: int = 0
    #: Claims that pin it.
    pins: int = 0
    #: False until it is published, and again after it has left the table.
    published: bool = True
    #: The label of the client that saved it, one object for all entries of a label; empty if an
    #: earlier start did.
    label: str = ""

    @property
    def created_ns(self) -> int:
        return self.generation


def shard_of(key: Key) -> int:
    """The shard of a key. Clients choose keys, but not how Python hashes them in this process."""
    return hash(key) >> _SHIFT & _MASK


def by_tier(entries: Sequence[EntryState]) -> dict[Tier, Sequence[EntryState]]:
    """Entries by their tier, each in their order."""
    tiers = {entry.tier for entry in entries}
    if len(tiers) == 1:
        return {tiers.pop(): entries}
    return {tier: [entry for entry in entries if entry.tier is tier] for tier in tiers}


class EntryTable(MutableMapping[Key, EntryState]):
    """A mapping that is divided into `shards`: of a million entries, each has about 500."""

    __slots__ = ("_count", "shards")

    def __init__(self) -> None:
        self.shards: Final[tuple[dict[Key, EntryState], ...]] = tuple([{} for _ in range(SHARDS)])
        self._count = 0

    # Called for every key of every call, so these do without the indirections of the base class.

    def find(self, key: Key) -> EntryState | None:
        return self.shards[hash(key) >> _SHIFT & _MASK].get(key)

    def find_all(self, keys: Iterable[Key]) -> list[EntryState | None]:
        """`find` each key."""
        shards = self.shards
        return [shards[hash(key) >> _SHIFT & _MASK].get(key) for key in keys]

    def add(self, entries: Sequence[EntryState]) -> None:
        """Add entries whose keys are not in the table."""
        shards = self.shards
        for entry in entries:
            key = entry.key
            shards[hash(key) >> _SHIFT & _MASK][key] = entry
        self._count += len(entries)

    def drop(self, entries: Sequence[EntryState]) -> None:
        """Remove entries that are in the table."""
        shards = self.shards
        for entry in entries:
            key = entry.key
            del shards[hash(key) >> _SHIFT & _MASK][key]
        self._count -= len(entries)

    def __contains__(self, key: object) -> bool:
        return key in self.shards[hash(key) >> _SHIFT & _MASK]

    def __getitem__(self, key: Key) -> EntryState:
        return self.shards[hash(key) >> _SHIFT & _MASK][key]

    def __setitem__(self, key: Key, entry: EntryState) -> None:
        shard = self.shards[hash(key) >> _SHIFT & _MASK]
        before = len(shard)
        shard[key] = entry
        self._count += len(shard) - before

    def __delitem__(self, key: Key) -> None:
        del self.shards[hash(key) >> _SHIFT & _MASK][key]
        self._count -= 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self.shards)
