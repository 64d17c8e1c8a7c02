"""The contract of every store: it moves bytes, and knows nothing of budgets or orders.

Where an entry lies is decided before a store is asked (`tiers.ledger` owns the extents), and
an entry is visible only after the metadata server published it. A store therefore never has
to arbitrate anything: no two writers ever hold the same extent or the same key.

Threads: `writer()` and the stores with `blocking = False` may be used from the event loop;
`apply`, `read`, `usage` and `recover` of a blocking store only from worker threads. Calls for
different entries may run at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ..proto.keys import Key
from ..proto.record import RecordHead
from ..proto.vocabulary import Tier

#: Where an entry lies in an arena: offset, length, offset, length ... in bytes. Lengths are
#: multiples of the slab. Empty in stores that are addressed by key.
Location: TypeAlias = tuple[int, ...]

#: Anything that exports a contiguous byte buffer.
Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """What a store gives back of an entry that survived a restart."""

    head: RecordHead
    location: Location
    payload_crc32c: int
    last_used_ns: int
    hits: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a store found at start, least recently used first. `dropped` names what could not be
    adopted, with the reason."""

    entries: list[StoredEntry]
    dropped: list[tuple[Key, str]]


@dataclass(frozen=True, slots=True)
class Usage:
    """The part of an entry that changes after it was published."""

    key: Key
    last_used_ns: int
    hits: int


class StoreError(Exception):
    """The store could not do what it was told; what it held before is unchanged."""


class StoreFull(StoreError):
    """The device has no space left though the budget has."""


class EntryWriter(ABC):
    """Takes the payload of one entry, in order, and keeps the CRC32C of what it took.

    Not thread-safe; one thread at a time. A writer that is dropped before `seal` leaves
    nothing that anyone could see.
    """

    head: RecordHead
    location: Location

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """Payload bytes taken so far."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Take the next bytes. A store may keep a reference to `data` until `apply`: the
        caller does not change it. Raises ValueError beyond `head.payload_bytes`."""

    @abstractmethod
    def seal(self) -> int:
        """All bytes are there: return the CRC32C of the payload as it was stored.

        Raises ValueError if bytes are missing.
        """


class Store(ABC):
    """One tier's bytes."""

    tier: ClassVar[Tier]
    #: True: `apply`, `read`, `usage` and `recover` touch a disk and belong on worker threads.
    blocking: ClassVar[bool]

    @abstractmethod
    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        """What an entry costs of the tier's budget, everything included."""

    @abstractmethod
    def writer(self, head: RecordHead, location: Location) -> EntryWriter:
        """Begin an entry. Cheap; no visible effect."""

    @abstractmethod
    def apply(self, sealed: Sequence[EntryWriter], erased: Iterable[Key]) -> None:
        """Make sealed entries durable and forget erased keys, in one step.

        When it returns, the sealed entries survive whatever the tier survives. Erasures come
        first: a key may be erased and sealed again in one call. Erasing an unknown key is no
        error. Raises StoreFull or StoreError; then nothing of the call happened.
        """

    @abstractmethod
    def read(
        self, head: RecordHead, location: Location, offset_bytes: int, length_bytes: int
    ) -> list[memoryview]:
        """A range of the payload, as read-only views in order (one per extent or chunk).

        Views into an arena stay valid as long as the entry is pinned; others own their bytes.
        Of `head.token_ids` the length has to be right, for where a payload begins depends on it.
        Raises StoreError if the bytes are not there.
        """

    @abstractmethod
    def token_ids(self, head: RecordHead, location: Location, token_ids_bytes: int) -> bytes:
        """The token ids saved with an entry. Raises StoreError."""

    @abstractmethod
    def recover(self, directory: Mapping[Key, Location]) -> Recovery:
        """What survived. `directory` is what the index in /dev/shm remembers of this tier;
        stores that keep their own directory ignore it."""

    @abstractmethod
    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Remember use, in one batch, for the next `recover`. May lose the latest at a crash."""

    @abstractmethod
    def held_keys(self) -> set[Key] | None:
        """The keys that the store itself holds, for cross-checks; None: it keeps no directory."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the system. What the tier survives is still there."""
