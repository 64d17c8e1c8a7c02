"""Reads published entries back and compares their checksums."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

import structlog

from ...proto.vocabulary import Tier
from ...tiers.store import Damaged, Store, StoreError
from ..core.entries import Entry
from .devices import Devices
from .health import Health


class Reading(Enum):
    """How reading an entry back ended."""

    GOOD = "good"
    #: its bytes are not those that were saved: it has to go
    DAMAGED = "damaged"
    #: the store could not read it: nothing is known of its bytes, and it stays
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why` is empty if the entry is good."""

    reading: Reading
    why: str = ""


log = structlog.get_logger("prefixd.verification")

#: Entries that wait to be verified. A client that suspects another one says so again when it meets
#: it again.
MAX_PENDING: Final = 4096


def read_back(store: Store, entry: Entry) -> Verdict:
    """Read a whole entry and compare its checksum. On a worker thread.

    Of an entry that was evicted meanwhile it says nothing: its room may be another's by now.
    """
    try:
        store.verify(entry, entry.payload_crc32c)
    except Damaged as problem:
        return Verdict(Reading.DAMAGED, str(problem))
    except StoreError as problem:
        return Verdict(Reading.FAILED, str(problem))
    return Verdict(Reading.GOOD)


def _read_back_all(stores: Mapping[Tier, Store], entries: Sequence[Entry]) -> list[Verdict]:
    return [read_back(stores[entry.tier], entry) for entry in entries]


class Verifications:
    """Verifies entries on worker threads, for the event loop.

    `damaged` is told, on the loop, of entries that have to go. One that its store could not read
    stays, and makes the reads of its tier unhealthy until one succeeds. What clients suspect is
    read once, one entry at a time, on a thread of its own: saves are not delayed however many
    there are.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        devices: Devices,
        health: Health,
        damaged: Callable[[Entry, str], None],
    ) -> None:
        self._stores = stores
        self._devices = devices
        self._health = health
        self._damaged = damaged
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "prefixd-verifier")
        self._waiting: deque[Entry] = deque()
        #: by generation: suspects that wait, and the one that is being read
        self._known: set[int] = set()
        self._reading = False
        #: suspicions that were not followed because too many waited
        self.dropped = 0

    async def verify(self, entry: Entry) -> Verdict | None:
        """Read a whole entry and compare its checksum. None: it left meanwhile, and nothing is
        known of it."""
        return (await self.verify_all([entry]))[0]

    async def verify_all(self, entries: Sequence[Entry]) -> list[Verdict | None]:
        """`verify` of several, read one after the other."""
        read = partial(_read_back_all, self._stores, entries)
        slowest = max((entry.tier for entry in entries), default=Tier.RAM)
        verdicts = await self._loop.run_in_executor(self._devices.executor(slowest), read)
        return [
            self._judged(entry, verdict) if entry.published else None
            for entry, verdict in zip(entries, verdicts, strict=True)
        ]

    def _judged(self, entry: Entry, verdict: Verdict) -> Verdict:
        reads = f"{entry.tier.label} reads"
        if verdict.reading is Reading.DAMAGED:
            self._damaged(entry, verdict.why)
        elif verdict.reading is Reading.FAILED:
            log.warning("entry_unreadable", key=entry.key.hex(), why=verdict.why)
            self._health.fault(reads, verdict.why)
        else:
            self._health.succeeded(reads)
        return verdict

    # ---- suspects

    @property
    def pending(self) -> int:
        return len(self._known)

    def request(self, entry: Entry) -> None:
        """Verify an entry, soon."""
        if entry.generation in self._known:
            return
        if len(self._waiting) >= MAX_PENDING:
            self.dropped += 1
            return
        self._known.add(entry.generation)
        self._waiting.append(entry)
        self._go_on()

    def close(self) -> None:
        """Wait for the entry that is being read, and forget the others."""
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)

    def _go_on(self) -> None:
        if self._reading or not self._waiting:
            return
        entry = self._waiting.popleft()
        if not entry.published:
            self._known.discard(entry.generation)
            self._loop.call_soon(self._go_on)
            return
        self._reading = True
        store = self._stores[entry.tier]
        reading = self._loop.run_in_executor(self._thread, read_back, store, entry)
        reading.add_done_callback(lambda read: self._read(entry, read))

    def _read(self, entry: Entry, read: asyncio.Future[Verdict]) -> None:
        self._reading = False
        self._known.discard(entry.generation)
        if not read.cancelled():
            failure = read.exception()
            if failure is not None:
                log.error("verification_failed", key=entry.key.hex(), error=repr(failure))
            elif entry.published:
                self._judged(entry, read.result())
        self._go_on()
