"""Reads published entries back and compares their checksums."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, Final, NamedTuple

from ...proto.vocabulary import Tier
from ...tiers.store import Damaged, Store, StoreError
from ..core.entries import SHARDS, EntryState, EntryTable
from .devices import Devices
from .limited_log import LimitedLog
from .rounds import Slices
from .supervision import Health

log = LimitedLog("prefixd.verification")

#: Suspected entries that may wait. A client reports an entry again when it meets it again.
MAX_PENDING: Final = 4096
#: Bytes that are read in one go, which takes some milliseconds; others wait for the thread.
READ_AT_ONCE_BYTES: Final = 4 * 2**20
#: Reading an entry takes about as long as reading this many bytes, however small it is.
ENTRY_BYTES: Final = 2**14


class Reading(Enum):
    """How reading an entry back ended."""

    GOOD = "good"
    #: its bytes are not those that were saved: the entry is dropped
    DAMAGED = "damaged"
    #: the store could not read it: nothing is known of its bytes, and it stays
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why` is empty if the entry is good."""

    reading: Reading
    why: str = ""


class _Batch:
    """Entries of one tier that are read back one after the other, a bounded part at a time."""

    def __init__(self, store: Store, entries: Iterable[EntryState]) -> None:
        self._store = store
        self._left = deque(entries)
        #: the reading of the first entry, once it has begun
        self._steps: Iterator[int] | None = None

    def __bool__(self) -> bool:
        return bool(self._left)

    def go_on(self, most_bytes: int) -> tuple[int, list[tuple[EntryState, Verdict]]]:
        """Read about `most_bytes`, each entry counting `ENTRY_BYTES` beside its payload. On a
        worker thread. Returns the payload bytes that were read, and the entries that were read to
        their end."""
        read_bytes = 0
        read: list[tuple[EntryState, Verdict]] = []
        while self._left and read_bytes + ENTRY_BYTES * len(read) < most_bytes:
            entry = self._left[0]
            verdict = None
            # An evicted entry is not read further: its room may be reused by now.
            if entry.published:
                try:
                    if self._steps is None:
                        self._steps = self._store.verify_steps(entry, entry.payload_crc32c)
                    step_bytes = next(self._steps, None)
                    if step_bytes is not None:
                        read_bytes += step_bytes
                        continue
                    verdict = Verdict(Reading.GOOD)
                except Damaged as problem:
                    verdict = Verdict(Reading.DAMAGED, str(problem))
                except StoreError as problem:
                    verdict = Verdict(Reading.FAILED, str(problem))
            self._left.popleft()
            self._steps = None
            if verdict is not None:
                read.append((entry, verdict))
        return read_bytes, read


class Swept(NamedTuple):
    """One step of reading a whole tier back."""

    #: The part of the tier that has been read, from 0 to 1.
    share: float
    read_bytes: int
    #: Entries that were read to their end and are still published.
    judged: list[tuple[EntryState, Verdict]]

    def count_in(self, totals: Any) -> int:
        """Add it to the totals of a `Scrub` or a `VerifyResponse`, which have the same fields.
        Returns how many entries the store failed to read."""
        readings = [verdict.reading for _, verdict in self.judged]
        failed = readings.count(Reading.FAILED)
        totals.payload_bytes += self.read_bytes
        totals.entries += len(readings) - failed
        totals.damaged_entries += readings.count(Reading.DAMAGED)
        totals.unreadable_entries += failed
        return failed


class Verifications:
    """Verifies entries, for the event loop, on one thread for each tier: saves and reads are not
    delayed, and a tier whose device hangs delays no other.

    `damaged` is called, on the loop, with entries that are to be dropped. An entry that its store
    could not read stays, and makes the reads of its tier unhealthy until one succeeds. An entry
    that clients suspect is read once, one entry at a time. Nothing is pinned: an entry that is
    evicted while it is read gets no verdict.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        devices: Devices,
        health: Health,
        damaged: Callable[[EntryState, str], None],
    ) -> None:
        self._stores = stores
        self._devices = devices
        self._health = health
        self._damaged = damaged
        self._loop = asyncio.get_running_loop()
        self._threads = {
            tier: ThreadPoolExecutor(1, f"prefixd-verify-{tier.label}") for tier in stores
        }
        #: tiers whose last read failed, which is logged once
        self._failing: set[Tier] = set()
        #: by generation, in the order in which they are read
        self._suspects: dict[int, EntryState] = {}
        self._reading: asyncio.Task[None] | None = None
        self._closed = False
        #: suspects that were not read because too many waited
        self.dropped = 0

    async def verify(self, entry: EntryState) -> Verdict | None:
        """Read a whole entry and compare its checksums. None: it was evicted meanwhile."""
        batch = _Batch(self._stores[entry.tier], [entry])
        while batch:
            for _, verdict in (await self._go_on_with(batch, entry.tier, READ_AT_ONCE_BYTES))[1]:
                return verdict
        return None

    async def sweep(
        self, entries: EntryTable, tier: Tier, most_bytes: int = READ_AT_ONCE_BYTES
    ) -> AsyncGenerator[Swept, None]:
        """Read a whole tier back, about `most_bytes` a step. An entry that is there from the first
        step to the last is read exactly once, whatever is saved and evicted meanwhile. Reads
        nothing until the next step is requested."""
        slices = Slices()
        # Nearly all shards of a small table are empty: `compress` skips them in C.
        for number in compress(range(SHARDS), entries.shards):
            shard = entries.shards[number]
            batch = _Batch(self._stores[tier], (e for e in shard.values() if e.tier is tier))
            while batch:
                read_bytes, judged = await self._go_on_with(batch, tier, most_bytes)
                yield Swept((number + (not batch)) / SHARDS, read_bytes, judged)
            await slices.pause()
        yield Swept(1.0, 0, [])

    async def _go_on_with(
        self, batch: _Batch, tier: Tier, most_bytes: int
    ) -> tuple[int, list[tuple[EntryState, Verdict]]]:
        def go_on() -> tuple[int, list[tuple[EntryState, Verdict]]]:
            with self._devices.under_way(tier):
                return batch.go_on(most_bytes)

        read_bytes, read = await self._loop.run_in_executor(self._threads[tier], go_on)
        return read_bytes, [(e, self._judged(e, verdict)) for e, verdict in read if e.published]

    def _judged(self, entry: EntryState, verdict: Verdict) -> Verdict:
        tier = entry.tier
        reads = f"{tier.label} reads"
        match verdict.reading:
            case Reading.DAMAGED:
                self._damaged(entry, verdict.why)
            case Reading.FAILED:
                # A device that is gone fails for every entry: logged once, until a read succeeds.
                if tier not in self._failing:
                    log.warning("entry_unreadable", key=entry.key.hex(), why=verdict.why)
                self._failing.add(tier)
                self._health.fault(reads, verdict.why)
            case Reading.GOOD:
                self._failing.discard(tier)
                self._health.succeeded(reads)
        return verdict

    # ---- suspects

    @property
    def pending(self) -> int:
        return len(self._suspects)

    def request(self, entry: EntryState) -> None:
        """Verify an entry, soon."""
        if entry.generation in self._suspects:
            return
        if len(self._suspects) > MAX_PENDING:
            self.dropped += 1
            return
        self._suspects[entry.generation] = entry
        if self._reading is None:
            self._reading = self._loop.create_task(self._read_suspects())

    async def _read_suspects(self) -> None:
        while self._suspects and not self._closed:
            generation, entry = next(iter(self._suspects.items()))
            try:
                await self.verify(entry)
            except Exception as problem:
                log.error("verification_failed", key=entry.key.hex(), error=repr(problem))
            del self._suspects[generation]
        self._reading = None

    def close(self) -> None:
        """Wait for what is being read, and forget the others. Blocks."""
        self._closed = True
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
