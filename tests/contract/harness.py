"""One way to drive every store: places entries as a daemon would, and remembers what it saved.

Kinds are `ram`, `shm`, `disk`, and each of them inside a `FaultyStore` as `faulty-...`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faulty import FaultyStore

from prefixd.proto.keys import Key
from prefixd.proto.record import RecordHead, crc32c
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.disk import DiskStore
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ram import RamStore
from prefixd.tiers.shm import ShmStore
from prefixd.tiers.store import EntryWriter, Location, Recovery, Store

SLAB = 4096
KINDS = ("ram", "shm", "disk")
SURVIVING = ("shm", "disk")


@dataclass(frozen=True)
class Saved:
    """What the twin knows of an entry."""

    head: RecordHead
    location: Location
    payload: bytes

    @property
    def crc(self) -> int:
        return crc32c(self.payload)


class Harness:
    """A store of `kind` with `budget_bytes`, its extents, and its twin: a plain dict."""

    def __init__(self, kind: str, *, budget_bytes: int = 64 * SLAB, sync: bool = False) -> None:
        self.kind = kind.removeprefix("faulty-")
        self.wrapped = kind.startswith("faulty-")
        self.budget_bytes = budget_bytes
        self.sync = sync
        parent = "/dev/shm" if self.kind == "shm" else None
        self.directory = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir=parent))
        self.saved: dict[Key, Saved] = {}
        self._generation = 0
        self.store = self._open()

    def _open(self) -> Store:
        store: Store
        match self.kind:
            case "ram":
                store = RamStore(self.budget_bytes, SLAB)
            case "shm":
                store = ShmStore(self.directory / "shm", self.budget_bytes, SLAB)
            case _:
                store = DiskStore(self.directory / "disk", self.budget_bytes, sync=self.sync)
        self.extents: ExtentAllocator | None = None
        if isinstance(store, RamStore | ShmStore):
            store.arena.secure()
            self.extents = ExtentAllocator(store.arena.secured_bytes, SLAB)
        return FaultyStore(store, seed=11) if self.wrapped else store

    @property
    def faulty(self) -> FaultyStore:
        assert isinstance(self.store, FaultyStore)
        return self.store

    def reopen(self) -> Recovery:
        """A new process: what survives comes back, and the twin forgets the rest."""
        directory = {key: saved.location for key, saved in self.saved.items()}
        self.store.close()
        self.store = self._open()
        recovery = self.store.recover(directory)
        if self.extents is not None:
            for entry in recovery.entries:
                self.extents.claim(entry.location)
        if self.kind == "ram":
            self.saved = {}
        return recovery

    def close(self) -> None:
        """May be called twice."""
        self.store.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # ---- the steps of a save

    def head(self, key: Key, payload_bytes: int, token_ids: bytes = b"") -> RecordHead:
        self._generation += 1
        return RecordHead(
            key=key,
            generation=self._generation,
            payload_bytes=payload_bytes,
            token_count=len(token_ids) // 4,
            layer_count=0,
            reason=1,
            tier={"ram": Tier.RAM, "shm": Tier.SHM, "disk": Tier.DISK}[self.kind],
            created_ns=1_000 + self._generation,
            token_ids=token_ids,
        )

    def place(self, head: RecordHead) -> Location:
        if self.extents is None:
            return ()
        return self.extents.allocate(
            self.store.stored_bytes(head.payload_bytes, len(head.token_ids))
        )

    def free(self, location: Location) -> None:
        if self.extents is not None:
            self.extents.free(location)

    def begin(self, key: Key, payload: bytes, token_ids: bytes = b"") -> EntryWriter:
        head = self.head(key, len(payload), token_ids)
        return self.store.writer(head, self.place(head))

    def write(self, writer: EntryWriter, payload: bytes, pieces: Sequence[int] = ()) -> int:
        """All of `payload`, cut at `pieces`, and sealed."""
        view, start = memoryview(payload), 0
        for end in (*sorted(pieces), len(payload)):
            writer.write(view[start:end])
            start = max(start, end)
        assert writer.written_bytes == len(payload)
        return writer.seal()

    def save(
        self, key: Key, payload: bytes, token_ids: bytes = b"", pieces: Sequence[int] = ()
    ) -> Saved:
        """Save one entry, in the place of one of the same key if there is one."""
        writer = self.begin(key, payload, token_ids)
        crc = self.write(writer, payload, pieces)
        erased = [key] if key in self.saved else []
        self.store.apply([writer], erased)
        saved = self.remember(writer, payload)
        assert crc == saved.crc
        return saved

    def remember(self, writer: EntryWriter, payload: bytes) -> Saved:
        """`apply` came back: the twin has the entry, and what was there before is gone."""
        key = writer.head.key
        self.forget(key)
        self.saved[key] = Saved(writer.head, writer.location, payload)
        return self.saved[key]

    def forget(self, key: Key) -> None:
        if key in self.saved:
            self.free(self.saved.pop(key).location)

    def erase(self, *keys: Key) -> None:
        self.store.apply([], keys)
        for key in keys:
            self.forget(key)

    # ---- reading back

    def read(self, saved: Saved, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        if length_bytes is None:
            length_bytes = len(saved.payload) - offset_bytes
        return b"".join(self.store.read(saved.head, saved.location, offset_bytes, length_bytes))

    def check(self) -> None:
        """Everything that was saved is there, byte for byte, and nothing else is."""
        for saved in self.saved.values():
            assert self.read(saved) == saved.payload
            token_ids = saved.head.token_ids
            assert self.store.token_ids(saved.head, saved.location, len(token_ids)) == token_ids
        held = self.store.held_keys()
        assert held is None or held == set(self.saved)
        if self.extents is not None:
            self.extents.check()
            used = sum(sum(saved.location[1::2]) for saved in self.saved.values())
            assert self.extents.capacity_bytes - self.extents.free_bytes == used
