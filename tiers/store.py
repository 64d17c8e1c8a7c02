"""The contract of every store: it moves bytes, and knows nothing of budgets or eviction.

Before a store is called, the ledger has decided where the entry lies (`tiers.ledger` owns the
extents), and an entry is visible only after the metadata server has published it. So a store never
has to arbitrate: no two writers ever have the same extent or the same key.

How an entry comes and goes:

1. `writer(entry)`, `write` and `seal` move the payload into its extents.
2. `apply([writer])` makes it durable: the payload first, then the record that names it.
3. `forget([entry])` ends it. The next `apply` erases the record, or the first write of any entry
   if that comes earlier: no byte is written to an extent whose old record still stands. The caller
   only has to call `forget` before it gives the extents to another entry; the store takes care of
   the order on the device.

A store fails in three ways:

`StoreError`
    An I/O error, no memory, a device that is gone. The stored bytes may be good: the entry stays,
    this read is a miss, and the tier is unhealthy.
`StoreFull`, a StoreError
    The device has no room although the budget has. This save is refused; the tier is healthy.
`Damaged`
    The stored bytes are not those that were saved: a checksum does not match, or the file is too
    short. The entry is lost and has to be dropped. Not a StoreError, which must not be taken for
    it.

Threads: a store with `blocking = False` may be called from the event loop. Of a blocking store only
`writer`, `forget`, `stored_bytes` and the attributes may; everything else does I/O and belongs on
worker threads. Calls for different entries may run at the same time.
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

#: What is secured at once: about 30 ms on a machine with enough free memory.
SEGMENT_BYTES: Final = 64 * 2**20
#: On a device without room for a whole segment, segments are halved down to this size.
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
    """A part of what a store found at start.

    `dropped`: (key, reason) of entries that could not be adopted; the key is as in the damaged
    record. `following`: entries in the batches after this one, where that is known.
    """

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
    """The store could not do what it was told. The stored entries may be good."""


class StoreFull(StoreError):
    """The device has no room left though the budget has."""


class OtherLayout(StoreError):
    """The files are those of another version or of other slabs: only a person can decide."""


class Damaged(Exception):  # the entry is bad, not the store: so no StoreError
    """The stored bytes of an entry are not those that were saved."""


class EntryWriter(ABC):
    """Takes the payload of one entry, in order, and keeps the CRC32C of what it stored.

    Not thread-safe; one thread at a time. A writer that is dropped before `apply` leaves
    nothing that can be found.
    """

    #: The entry that is being saved. It has its checksum once the writer is sealed.
    entry: Recorded
    #: `seal` has succeeded.
    sealed: bool = False

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """Payload bytes taken so far."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Store the next bytes. `data` is not used after the call.

        Raises ValueError beyond `entry.payload_bytes`, StoreError, StoreFull. After a StoreError
        the writer can't go on.
        """

    def resume(self, payload_crc32c: int, failed_syncs: int) -> None:
        """Go on behind the payload, which `Store.write_whole` has stored."""
        raise NotImplementedError

    def room(self, most_bytes: int) -> memoryview | None:  # noqa: ARG002  # for others
        """Memory into which the caller may write some of the next bytes, and then call `filled`.
        None: this store needs `write`. Raises StoreError."""
        return None

    def filled(self, length_bytes: int) -> None:
        """The caller has written `length_bytes` into the last `room`."""
        raise NotImplementedError

    @abstractmethod
    def seal(self) -> int:
        """Finish the payload, and return its CRC32C as it was stored.

        Raises ValueError if bytes are missing, StoreError, StoreFull.
        """


class Whole(NamedTuple):
    """What `Store.write_whole` has stored: the CRC32C of each payload, and for `resume` how many
    syncs had failed before."""

    payload_crc32c: Sequence[int]
    failed_syncs: int


class Store(ABC):
    """One tier's bytes."""

    tier: ClassVar[Tier]
    #: Whether most calls do I/O and belong on worker threads; see the module.
    blocking: ClassVar[bool]
    #: Whether `apply` writes records, which make entries durable. If not, it does nothing.
    recorded: ClassVar[bool]
    slab_bytes: int
    #: Makes a context manager around each step of `apply`, by its name. For timing.
    step: Callable[[str], AbstractContextManager[object]] = nullcontext
    #: Bytes at the start of the arena that `ExtentAllocator` must not give to entries.
    header_bytes: int

    @property
    def is_open(self) -> bool:
        """Whether `open` has succeeded. Before that, everything that needs the device raises
        StoreError, `size_bytes` is the configured one, and nothing is secured."""
        return True

    def open(self) -> None:  # noqa: B027  # RAM has nothing to open
        """Open, or make, the files of a store that was made without them. Does I/O. Raises
        StoreError, and may be called again then."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the arena once all of it is secured."""

    @property
    def newest(self) -> int:
        """The newest generation that this store ever recorded, of this start or an earlier one. 0:
        it is not known."""
        return 0

    @property
    @abstractmethod
    def secured_bytes(self) -> int:
        """Bytes from the start of the arena whose room is reserved on the device."""

    @abstractmethod
    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        """What an entry takes of the arena, in whole slabs."""

    @abstractmethod
    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        """Reserve the arena's room on the device, segment by segment. Yields `secured_bytes` after
        each.

        Meant for a background thread. Raises StoreFull when the device has no more room: less than
        a segment is left to its other users. What was secured stays, and a later call continues.
        Raises StoreError.
        """

    @abstractmethod
    def arena_bytes_of(self, budget_bytes: int) -> int:
        """The arena's part of another budget: whole slabs, its header included. Raises ValueError,
        with the sentence for the user, if the tier can't have this budget before a restart."""

    @abstractmethod
    def wants(self, arena_bytes: int) -> None:
        """Set how large `secure_segments` makes the arena. What was secured already stays."""

    @abstractmethod
    def give_back(self, location: Location, *, at_start: bool = False) -> bool:
        """Give the room of unused slabs back to the device, after erasing the records that named
        them. False: the arena keeps it until a restart. `at_start`: the tier has not served yet.
        Raises StoreError."""

    @property
    @abstractmethod
    def hole_bytes(self) -> int:
        """What was given back and not taken back."""

    @property
    @abstractmethod
    def found_budget_bytes(self) -> int:
        """The budget that the files of an earlier start need. More than the configured budget:
        `size_bytes` is as large as they are, and `recover` returns all of their entries."""

    @abstractmethod
    def find_holes(self) -> Iterator[tuple[int, int]]:
        """Ranges of the arena, start and length, that may have no room on the device although an
        earlier start secured them. Some may belong to entries. Raises StoreError."""

    @abstractmethod
    def take_back(self, location: Location) -> None:
        """Undo `give_back`, before entries use the slabs again. Raises StoreFull, StoreError."""

    @abstractmethod
    def set_incarnation(self, incarnation: bytes) -> None:
        """Write the incarnation, 16 random bytes of this start of the daemon, into the arena's
        header for readers. Has to come before the first `writer`. Raises StoreError."""

    @abstractmethod
    def writer(self, entry: Recorded, token_ids: bytes = b"") -> EntryWriter:
        """Begin to write an entry at its location. Cheap; no visible effect. The writer sets the
        checksum of `entry`; nothing else of it may change before it is durable.

        Raises ValueError if the token ids are not as long as the entry says.
        """

    def write_whole(
        self,
        entries: Sequence[Recorded],  # noqa: ARG002  # for others
        payloads: Sequence[Buffer],  # noqa: ARG002
    ) -> Whole | None:
        """Store the whole payloads of these different entries in one call, without their writers.
        An entry that has token ids, and any entry of a store with records, needs its writer
        afterwards (`EntryWriter.resume`). None: this store can't, or something about the entries is
        not as usual; what was written of them then is to be written again."""
        return None

    @abstractmethod
    def forget(self, entries: Iterable[EntryRef]) -> None:
        """Have the records of these entries erased before their room is written again.

        Does no I/O in a blocking store, and never fails: what can't be erased is tried again by
        the next `apply`, and the next write of any entry waits for it. Forgetting an entry that is
        not there, or was replaced, is no error.
        """

    @property
    @abstractmethod
    def unerased(self) -> int:
        """How many forgotten entries may still have a record."""

    @abstractmethod
    def apply(self, sealed: Sequence[EntryWriter]) -> None:
        """Erase what was forgotten, and make sealed entries durable.

        Afterwards the sealed entries survive whatever the tier survives. Raises StoreFull or
        StoreError. None of them is saved then, and the erasures are tried again later.
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
        """The entries that survived, in batches, least recently used first. Raises StoreError.

        Consume it before the first `writer`. The records of dropped entries are erased.
        """

    def bury(self, keys: Sequence[Key], generation: int) -> None:  # noqa: B027  # RAM has no records
        """Note durably that records of these keys, up to this generation, are deleted, though
        `recover` has not read them yet. Raises StoreError, StoreFull."""

    def exhume(self) -> None:  # noqa: B027
        """Forget what `bury` noted: after `recover`, when what it dropped is erased. Raises
        StoreError."""

    def follow(self, mark: bytes) -> None:  # noqa: B027  # RAM starts empty
        """Note durably that the deletes of a fleet are done up to this mark, of at most 255 bytes.
        Raises StoreError, StoreFull."""

    def followed(self) -> bytes:
        """The last mark of `follow`; empty: there is none. Raises StoreError."""
        return b""

    @abstractmethod
    def scan(self) -> Iterator[list[EntryRecord]]:
        """The entries that have records now, in batches, for cross-checks. Raises StoreError."""

    @abstractmethod
    def record_usage(self, usages: Sequence[Usage]) -> None:
        """Store usage for the next `recover`. A crash may lose it. Raises StoreError."""

    @abstractmethod
    def probe(self) -> None:
        """Do a small real write, for a watchdog. Raises StoreError when it fails."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Durable entries stay."""

    def verify(self, entry: EntryRef, payload_crc32c: int) -> None:
        """Read a whole entry. Raises Damaged unless its payload has this CRC32C and its token ids
        have theirs, StoreError if it can't be read."""
        for _ in self.verify_steps(entry, payload_crc32c):
            pass

    def verify_steps(self, entry: EntryRef, payload_crc32c: int) -> Iterator[int]:
        """`verify` in steps, so that a caller can pause or stop between them. Yields the payload
        bytes that each step has read, at most `VERIFY_BYTES`."""
        crc = 0
        for start in range(0, entry.payload_bytes, VERIFY_BYTES):
            length_bytes = min(VERIFY_BYTES, entry.payload_bytes - start)
            for view in self.read(entry, start, length_bytes):
                crc = crc32c(view, crc)
            yield length_bytes
        if crc != payload_crc32c:
            raise Damaged(f"the stored bytes have CRC32C {crc:08x}, {payload_crc32c:08x} was saved")
        self.token_ids(entry)
