"""A harness for every store. It places entries as a daemon would, and remembers what it saved.

Kinds are `ram`, `shm`, `disk`, and each of them inside a `FaultyStore` as `faulty-...`.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty import FaultyStore

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers.arena_stores import DiskStore, RamStore, ShmStore
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.store import EntryWriter, RecoveryBatch, Store, StoredEntry

SLAB = 4096
KINDS = ("ram", "shm", "disk")
SURVIVING = ("shm", "disk")
TIERS = {tier.label: tier for tier in Tier}
MIB = 2**20
ALL = (*KINDS, *(f"faulty-{kind}" for kind in KINDS))
SIZES = (
    *(1, 63, 64, SLAB - 1, SLAB, SLAB + 1, 10 * SLAB + 7),
    # Around what the process that writes to the disk takes at once.
    *(MIB - 1, MIB, MIB + 1, 5 * MIB + 3),
)


@dataclass(frozen=True)
class Saved:
    """The model of an entry."""

    entry: EntryRecord
    payload: bytes
    token_ids: bytes

    @property
    def crc(self) -> int:
        return crc32c(self.payload)


class Harness:
    """A store of `kind` with `slabs` slabs for entries, its extents, and its model: a dict."""

    def __init__(self, kind: str, *, slabs: int = 64, sync: bool = False) -> None:
        self.kind = kind.removeprefix("faulty-")
        self.wrapped = kind.startswith("faulty-")
        self.slabs = slabs
        self.sync = sync
        parent = "/dev/shm" if self.kind == "shm" else None
        self.directory = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir=parent))
        self.saved: dict[Key, Saved] = {}
        self._generation = 0
        self._starts = 0
        self.store = self._open()

    def _open(self) -> Store:
        store: Store
        slabs_bytes = (self.slabs + 1) * SLAB  # one slab is for the header
        match self.kind:
            case "ram":
                store = RamStore(self.slabs * SLAB, SLAB)
            case "shm":
                budget_bytes = slabs_bytes + ShmStore.record_bytes(self.slabs + 1)
                store = ShmStore(self.directory / "shm", budget_bytes, SLAB)
            case _:
                budget_bytes = slabs_bytes + DiskStore.record_bytes(self.slabs + 1)
                store = DiskStore(self.directory / "disk", budget_bytes, SLAB, sync=self.sync)
        self._starts += 1
        store.set_incarnation(self._starts.to_bytes(16, "big"))
        secured_bytes = [0, *store.secure_segments()][-1] or (self.slabs + 1) * SLAB
        self.extents = ExtentAllocator(secured_bytes, SLAB, store.header_bytes)
        assert self.extents.capacity_bytes == self.slabs * SLAB
        return FaultyStore(store, seed=11) if self.wrapped else store

    @property
    def faulty(self) -> FaultyStore:
        assert isinstance(self.store, FaultyStore)
        return self.store

    def reopen(self) -> RecoveryBatch:
        """Restart: entries that survive come back, and the model forgets the rest."""
        self.store.close()
        self.store = self._open()
        entries: list[StoredEntry] = []
        dropped: list[tuple[Key, str]] = []
        for batch in self.store.recover():
            entries += batch.entries
            dropped += batch.dropped
        for entry in entries:
            self.extents.claim(entry.record.location)
        if self.kind == "ram":
            self.saved = {}
        return RecoveryBatch(entries, dropped)

    def close(self) -> None:
        """May be called twice."""
        self.store.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # ---- the steps of a save

    def entry(self, key: Key, payload_bytes: int, token_ids: bytes = b"") -> EntryRecord:
        """The record of a new entry, with room allocated for it."""
        self._generation += 1
        stored_bytes = self.store.stored_bytes(payload_bytes, len(token_ids))
        return EntryRecord(
            key=key,
            tier=TIERS[self.kind],
            reason=SaveReason.COLD,
            generation=self._generation,
            created_ns=1_000 + self._generation,
            content=Content(payload_bytes, len(token_ids) // 4, len(token_ids)),
            location=self.extents.allocate(stored_bytes),
        )

    def give_up(self, writer: EntryWriter) -> None:
        """Abandon a save, and free its room."""
        self.extents.free(writer.entry.location)

    def begin(self, key: Key, payload: bytes, token_ids: bytes = b"") -> EntryWriter:
        return self.store.writer(self.entry(key, len(payload), token_ids), token_ids)

    def write(self, writer: EntryWriter, payload: bytes, pieces: Sequence[int] = ()) -> int:
        """Write `payload` in pieces, and seal it. Returns its checksum."""
        view, start = memoryview(payload), 0
        for end in (*sorted(pieces), len(payload)):
            writer.write(view[start:end])
            start = max(start, end)
        assert writer.written_bytes == len(payload)
        return writer.seal()

    def save(
        self, key: Key, payload: bytes, token_ids: bytes = b"", pieces: Sequence[int] = ()
    ) -> Saved:
        """Save one entry, which replaces one of the same key."""
        writer = self.begin(key, payload, token_ids)
        crc = self.write(writer, payload, pieces)
        if key in self.saved:
            self.store.forget([self.saved[key].entry])
        self.store.apply([writer])
        saved = self.remember(writer, payload, token_ids)
        assert crc == saved.crc == saved.entry.payload_crc32c
        return saved

    def remember(self, writer: EntryWriter, payload: bytes, token_ids: bytes = b"") -> Saved:
        """After `apply`: add the entry to the model, instead of an older one of the same key."""
        key = writer.entry.key
        self.free(key)
        self.saved[key] = Saved(writer.entry, payload, token_ids)
        return self.saved[key]

    def free(self, key: Key) -> None:
        """Remove an entry from the model, and free its room."""
        if key in self.saved:
            self.extents.free(self.saved.pop(key).entry.location)

    def forget(self, *keys: Key) -> None:
        """Have the store forget entries, and free their room at once."""
        self.store.forget([self.saved[key].entry for key in keys])
        for key in keys:
            self.free(key)

    def erase(self, *keys: Key) -> None:
        self.forget(*keys)
        self.store.apply([])
        assert self.store.unerased == 0

    # ---- reading back

    def read(self, saved: Saved, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        if length_bytes is None:
            length_bytes = len(saved.payload) - offset_bytes
        return b"".join(self.store.read(saved.entry, offset_bytes, length_bytes))

    def check(self) -> None:
        """Check that the store has exactly the saved entries, byte for byte."""
        for saved in self.saved.values():
            assert self.read(saved) == saved.payload
            assert self.store.token_ids(saved.entry) == saved.token_ids
            self.store.verify(saved.entry, saved.crc)
        if self.kind != "ram" and not self.store.unerased:
            held = [entry for batch in self.store.scan() for entry in batch]
            assert sorted(held, key=lambda entry: entry.key) == sorted(
                (saved.entry for saved in self.saved.values()), key=lambda entry: entry.key
            )
        self.extents.check()
        used = sum(sum(saved.entry.location[1::2]) for saved in self.saved.values())
        assert self.extents.capacity_bytes - self.extents.free_bytes == used


# ---- for test files


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def noise(length_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed * 10**9 + length_bytes).randbytes(length_bytes)


def new_harnesses() -> Iterator[Callable[..., Harness]]:
    """A fixture that makes harnesses, and checks and closes them at the end."""
    made: list[Harness] = []

    def make(kind: str, **options: int) -> Harness:
        made.append(Harness(kind, **options))
        return made[-1]

    try:
        yield make
        for harness in made:
            harness.check()
    finally:
        for harness in made:
            harness.close()


def opened(request: pytest.FixtureRequest, new: Callable[..., Harness]) -> Harness:
    return new(request.param)
