"""A store that fails on purpose. It wraps a store that works.

Faults are drawn from a seed at given rates, or armed one by one. A fault affects one operation, and
has no effects but those that the contract allows. Nothing here sleeps or starts threads.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from prefixd.proto.entry import EntryRecord
from prefixd.proto.keys import Key
from prefixd.tiers.store import (
    SEGMENT_BYTES,
    Buffer,
    EntryRef,
    EntryWriter,
    Location,
    RecoveryBatch,
    Store,
    StoreError,
    StoreFull,
    Usage,
)


class Fault(Enum):
    """Each fault, and its effect."""

    SHORT_READ = "`read` returns fewer bytes than requested"
    FLIPPED_READ = "`read` returns the bytes with one bit flipped"
    READ_ERROR = "`read` fails"
    REFUSED_WRITE = "`write` fails"
    SEAL_ERROR = "`seal` fails"
    USAGE_ERROR = "`record_usage` fails"
    PROBE_ERROR = "`probe` fails"
    FLIPPED_WRITE = "one bit changes between `write` and what is stored"
    FULL = "`apply` has no room and does nothing"
    WRITE_ERROR = "`apply` fails and does nothing"
    CRASH_BEFORE = "the process ends before `apply` did anything"
    CRASH_AFTER = "the process ends after `apply` did its work"


#: The call that each fault affects.
OPERATIONS: Mapping[Fault, str] = {
    Fault.SHORT_READ: "read",
    Fault.FLIPPED_READ: "read",
    Fault.READ_ERROR: "read",
    Fault.REFUSED_WRITE: "write",
    Fault.SEAL_ERROR: "seal",
    Fault.USAGE_ERROR: "usage",
    Fault.PROBE_ERROR: "probe",
    Fault.FLIPPED_WRITE: "write",
    Fault.FULL: "apply",
    Fault.WRITE_ERROR: "apply",
    Fault.CRASH_BEFORE: "apply",
    Fault.CRASH_AFTER: "apply",
}
#: The operations that are reported to `on_call`.
ANNOUNCED = {"read", "write", "apply"}


class Crash(BaseException):
    """The process ends here. Not an Exception, so that nothing catches it and goes on."""


class FaultyStore(Store):
    """`inner` with faults. `on_call` is called with the name of every `write`, `apply` and `read`
    before it happens, on the caller's thread: a test can wait there, or move a clock."""

    def __init__(
        self,
        inner: Store,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        on_call: Callable[[str], None] | None = None,
    ) -> None:
        self.inner = inner
        self.tier = inner.tier  # type: ignore[misc]  # of the one store that this wraps
        self.blocking = inner.blocking  # type: ignore[misc]
        self.recorded = inner.recorded  # type: ignore[misc]
        self.slab_bytes = inner.slab_bytes
        self.header_bytes = inner.header_bytes
        self.on_call = on_call
        #: The faults that have happened, in order.
        self.happened: list[Fault] = []
        self._random = random.Random(seed)
        self._rates = dict(rates or {})
        self._armed: deque[Fault] = deque()

    def arm(self, fault: Fault) -> None:
        """Apply this fault to the next call that it affects."""
        self._armed.append(fault)

    def draw(self, operation: str) -> Fault | None:
        """The fault of this call, if any."""
        if self.on_call is not None and operation in ANNOUNCED:
            self.on_call(operation)
        for fault in self._armed:
            if OPERATIONS[fault] == operation:
                self._armed.remove(fault)
                self.happened.append(fault)
                return fault
        for fault, rate in self._rates.items():
            if OPERATIONS[fault] == operation and self._random.random() < rate:
                self.happened.append(fault)
                return fault
        return None

    def flip(self, data: Buffer) -> bytes:
        """A copy with one bit flipped."""
        copy = bytearray(data)
        bit = self._random.randrange(len(copy) * 8)
        copy[bit // 8] ^= 1 << bit % 8
        return bytes(copy)

    # ---- the contract

    @property
    def size_bytes(self) -> int:
        return self.inner.size_bytes

    @property
    def secured_bytes(self) -> int:
        return self.inner.secured_bytes

    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        return self.inner.stored_bytes(payload_bytes, token_ids_bytes)

    def secure_segments(self, segment_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
        return self.inner.secure_segments(segment_bytes)

    def arena_bytes_of(self, budget_bytes: int) -> int:
        return self.inner.arena_bytes_of(budget_bytes)

    def wants(self, arena_bytes: int) -> None:
        self.inner.wants(arena_bytes)

    def give_back(self, location: Location, *, at_start: bool = False) -> bool:
        return self.inner.give_back(location, at_start=at_start)

    @property
    def hole_bytes(self) -> int:
        return self.inner.hole_bytes

    @property
    def found_budget_bytes(self) -> int:
        return self.inner.found_budget_bytes

    def find_holes(self) -> Iterator[tuple[int, int]]:
        return self.inner.find_holes()

    def take_back(self, location: Location) -> None:
        self.inner.take_back(location)

    def set_incarnation(self, incarnation: bytes) -> None:
        self.inner.set_incarnation(incarnation)

    def writer(self, entry: EntryRecord, token_ids: bytes = b"") -> EntryWriter:
        return _FaultyWriter(self, self.inner.writer(entry, token_ids))

    def forget(self, entries: Iterable[EntryRef]) -> None:
        self.inner.forget(entries)

    def bury(self, keys: Sequence[Key], generation: int) -> None:
        self.inner.bury(keys, generation)

    def exhume(self) -> None:
        self.inner.exhume()

    @property
    def unerased(self) -> int:
        return self.inner.unerased

    def apply(self, sealed: Sequence[EntryWriter]) -> None:
        fault = self.draw("apply")
        if fault is Fault.FULL:
            raise StoreFull("no room, on purpose")
        if fault is Fault.WRITE_ERROR:
            raise StoreError("a failed write, on purpose")
        if fault is Fault.CRASH_BEFORE:
            raise Crash
        self.inner.apply(
            [writer.inner if isinstance(writer, _FaultyWriter) else writer for writer in sealed]
        )
        if fault is Fault.CRASH_AFTER:
            raise Crash

    def read(self, entry: EntryRef, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        fault = self.draw("read")
        if fault is Fault.READ_ERROR:
            raise StoreError("a failed read, on purpose")
        if fault is Fault.SHORT_READ:
            length_bytes = self._random.randrange(length_bytes)
        views = self.inner.read(entry, offset_bytes, length_bytes)
        if fault is Fault.FLIPPED_READ and views:
            views[-1] = memoryview(self.flip(views[-1]))
        return views

    def token_ids(self, entry: EntryRef) -> bytes:
        return self.inner.token_ids(entry)

    def recover(self) -> Iterator[RecoveryBatch]:
        return self.inner.recover()

    def scan(self) -> Iterator[list[EntryRecord]]:
        return self.inner.scan()

    def record_usage(self, usages: Sequence[Usage]) -> None:
        if self.draw("usage") is Fault.USAGE_ERROR:
            raise StoreError("usage that is not recorded, on purpose")
        self.inner.record_usage(usages)

    def probe(self) -> None:
        if self.draw("probe") is Fault.PROBE_ERROR:
            raise StoreError("a failed probe, on purpose")
        self.inner.probe()

    def close(self) -> None:
        self.inner.close()


class _FaultyWriter(EntryWriter):
    def __init__(self, store: FaultyStore, inner: EntryWriter) -> None:
        self.inner = inner
        self.entry = inner.entry
        self._store = store

    @property
    def written_bytes(self) -> int:
        return self.inner.written_bytes

    def write(self, data: Buffer) -> None:
        fault = self._store.draw("write")
        if fault is Fault.REFUSED_WRITE:
            raise StoreError("a refused write, on purpose")
        if fault is Fault.FLIPPED_WRITE and len(data):
            data = self._store.flip(data)
        self.inner.write(data)

    def seal(self) -> int:
        if self._store.draw("seal") is Fault.SEAL_ERROR:
            raise StoreError("a failed seal, on purpose")
        crc = self.inner.seal()
        self.entry = self.inner.entry
        return crc
