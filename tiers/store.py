"""The contract of every store: it moves bytes, and knows nothing of budgets or orders.

Where an entry lies is decided before a store is called (`tiers.ledger` owns the extents), and
an entry is visible only after the metadata server published it. A store therefore never has
to arbitrate: no two writers ever hold the same extent or the same key.

How an entry comes and goes:

1. `writer(entry)`, `write` and `seal` move the payload into its extents.
2. `apply([writer])` makes it durable: the payload first, then the record that names it.
3. `forget([entry])` ends it. The record is erased by the next `apply`, and at the latest before
   any writer writes its first byte: so no byte is written to an extent whose old record still
   stands. The caller has to call `forget` before it gives the extents to another entry, and
   nothing else; the order of the two on the device is the store's business.

Three ways to fail, which share no base class beyond Exception where they must not be confused:

`StoreError`
    Failure: an I/O error, no memory, a device that is gone. What is stored may be good: the
    entry stays, this read is a miss, and the tier is unhealthy.
`StoreFull`, a StoreError
    The device has no room although the budget has. The answer to this save, no illness.
`Damaged`
    The stored bytes are not those that were saved: a checksum does not match, or the file ends
    before them. The entry is lost and has to be dropped. Not a StoreError.

Threads: everything of a store with `blocking = False` may be called from the event loop. Of a
blocking store only `writer`, `forget`, `stored_bytes` and the attributes; everything else does
I/O and belongs on worker threads. Calls for different entries may run at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, TypeAlias

from ..proto.entry import EntryRecord, Recorded
from ..proto.entry import EntryRef as EntryRef
from ..proto.entry import Location as Location
from ..proto.keys import Key
from ..proto.payload import crc32c
from ..proto.vocabulary import Tier

#: Anything that exports a contiguous byte buffer.
Buffer: TypeAlias = bytes | bytearray | memoryview

#: What is secured at once: about 30 ms on a machine that has the memory at hand.
SEGMENT_BYTES: Final = 64 * 2**20
#: What is left of a device that has no room for a segment is taken in halves of it, down to this.
SMALLEST_SEGMENT_BYTES: Final = 2**20
#: How much of a payload is read at once to compute its checksum.
VERIFY_BYTES: Final = 2**20


class StoredEntry(NamedTuple):
    """An entry that survived a restart, and its use before."""

    record: EntryRecord
    last_used_ns: int
    hits: int


@dataclass(frozen=True, slots=True)
class RecoveryBatch:
    """A part of what a store found at start. `dropped`: entries that could not be adopted, each
    with the reason; the key is the one that a damaged record shows. `following`: entries in the
    batches after this one, where that is known."""

    entries: list[StoredEntry]
    dropped: list[tuple[Key, str]]
    following: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The part of an entry that changes after it was published."""

    entry: EntryRef
    last_used_ns: int
    hits: int


class StoreError(Exception):
    """The store could not do what it was told. What it holds may be good."""


class StoreFull(StoreError):
    """The device has no room left though the budget has."""


class Damaged(Exception):  # an answer about an entry; must not read like StoreError
    """The stored bytes of an entry are not those that were saved."""


class EntryWriter(ABC):
    """Takes the payload of one entry, in order, and keeps the CRC32C of what it stored.

    Not thread-safe; one thread at a time. A writer that is dropped before `apply` leaves
    nothing that can be found.
    """

    #: What is being saved. Complete, with its checksum, once it is sealed.
    entry: Recorded

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """Payload bytes taken so far."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Store the next bytes; `data` is not used after the call.

        Raises ValueError beyond `entry.payload_bytes`, StoreError, StoreFull. After a StoreError
        the writer can't go on.
        """

    def room(self, most_bytes: int) -> memoryview | None:  # noqa: ARG002  # for others
        """Where some of the next bytes may be written by the caller, who says with `filled` how
        many were; None: this store has to `write` them. Raises StoreError."""
        return None

    def filled(self, length_bytes: int) -> None:
        """The caller has written `length_bytes` into the last `room`."""
        raise NotImplementedError

    @abstractmethod
    def seal(self) -> int:
        """All bytes are there: return the CRC32C of the payload as it was stored.

        Raises ValueError if bytes are missing, StoreError, StoreFull.
        """


class Store(ABC):
    """One tier's bytes."""

    tier: ClassVar[Tier]
    #: True: most calls touch a disk and belong on worker threads; see the module.
    blocking: ClassVar[bool]
    #: True: an entry is there for good once `apply` has written its record. False: `apply` does
    #: nothing.
    recorded: ClassVar[bool]
    slab_bytes: int
    #: A context manager that is entered around each step of `apply`, by name: for timing.
    step: Callable[[str], AbstractContextManager[object]] = nullcontext
    #: Bytes at the start of the arena that belong to no entry: what `ExtentAllocator` has to
    #: leave out.
    header_bytes: int

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the arena once all of its room is there."""

    @property
    @abstractmethod
    def secured_bytes(self) -> int:
        """Bytes of the arena, from its start, whose room is there."""

    @abstractmethod
    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        """What an entry takes from the arena: whole slabs."""

    @abstractmethod
    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        """Get the arena's room from the device, segment by segment; yields the bytes from the
        arena's start that are there after each.

        Meant for a background thread. Raises StoreFull when the device has no more room; what
        was secured stays, and a later call goes on: less than a segment is left to the others
        who use the device. Raises StoreError.
        """

    @abstractmethod
    def arena_bytes_of(self, budget_bytes: int) -> int:
        """What of another budget is for the arena: whole slabs, its header included. Raises
        ValueError, with the sentence, for a budget that the tier can't have before a restart."""

    @abstractmethod
    def wants(self, arena_bytes: int) -> None:
        """The arena is to have `arena_bytes`, which `secure_segments` gets from now on. What was
        secured already stays."""

    @abstractmethod
    def give_back(self, location: Location) -> bool:
        """Let the device have the room of slabs that no entry has any more, and erase the records
        that named them before. False: it stays until a restart. Raises StoreError."""

    @abstractmethod
    def take_back(self, location: Location) -> None:
        """The opposite, before an entry may have them again. Raises StoreFull, StoreError."""

    @abstractmethod
    def set_incarnation(self, incarnation: bytes) -> None:
        """This start of the daemon begins to write to the arena: 16 random bytes that readers
        find in its header. Has to come before the first `writer`. Raises StoreError."""

    @abstractmethod
    def writer(self, entry: Recorded, token_ids: bytes = b"") -> EntryWriter:
        """Begin an entry in the room that it names. Cheap; no visible effect. The writer sets the
        checksum of `entry`, of which nothing else changes before it is durable.

        Raises ValueError if the token ids are not as long as the entry says.
        """

    @abstractmethod
    def forget(self, entries: Iterable[EntryRef]) -> None:
        """These entries are gone: their records are erased before their room is written again.

        Never does I/O in a blocking store, and never fails: what can't be erased is tried again
        by the next `apply`, and the next write of any entry waits for it. Forgetting what is
        not there, or was replaced, is no error.
        """

    @property
    @abstractmethod
    def unerased(self) -> int:
        """Entries that were forgotten and whose records may still stand."""

    @abstractmethod
    def apply(self, sealed: Sequence[EntryWriter]) -> None:
        """Erase what was forgotten, and make sealed entries durable.

        When it returns, the sealed entries survive whatever the tier survives. Raises StoreFull
        or StoreError: then none of them is saved, and what was forgotten is tried again later.
        """

    @abstractmethod
    def read(self, entry: EntryRef, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """A range of the payload, as read-only views in order.

        Views into a mapped arena stay valid as long as the entry is pinned; others own their
        bytes. Raises ValueError for a range outside of the payload, StoreError, Damaged.
        """

    @abstractmethod
    def token_ids(self, entry: EntryRef) -> bytes:
        """The token ids saved with an entry, checked. Raises StoreError, Damaged."""

    @abstractmethod
    def recover(self) -> Iterator[RecoveryBatch]:
        """What survived, in batches, least recently used first. Raises StoreError.

        To be consumed before the first `writer`. The records of what is dropped are erased.
        """

    @abstractmethod
    def scan(self) -> Iterator[list[EntryRecord]]:
        """What the records name now, in batches, for cross-checks. Raises StoreError."""

    @abstractmethod
    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Remember use for the next `recover`: hints, which a crash may lose. Raises StoreError."""

    @abstractmethod
    def probe(self) -> None:
        """A small real write, for a watchdog. Raises StoreError when it fails."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the system. What the tier survives is still there."""

    def verify(self, entry: EntryRef, payload_crc32c: int) -> None:
        """Read a whole entry. Raises Damaged unless its payload has this CRC32C and its token ids
        have theirs, StoreError if it can't be read."""
        for _ in self.verify_steps(entry, payload_crc32c):
            pass

    def verify_steps(self, entry: EntryRef, payload_crc32c: int) -> Iterator[int]:
        """`verify` in steps, so that a reader can pause or stop between them: yields the payload
        bytes that each has read, at most `VERIFY_BYTES`."""
        crc = 0
        for start in range(0, entry.payload_bytes, VERIFY_BYTES):
            length_bytes = min(VERIFY_BYTES, entry.payload_bytes - start)
            for view in self.read(entry, start, length_bytes):
                crc = crc32c(view, crc)
            yield length_bytes
        if crc != payload_crc32c:
            raise Damaged(f"the stored bytes have CRC32C {crc:08x}, {payload_crc32c:08x} was saved")
        self.token_ids(entry)
