"""Offers entries to other nodes in the background: those that were used, or all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Final

import structlog

from ...proto.errors import LimitReached
from ...proto.keys import Key
from ...proto.limits import MAX_BATCH_KEYS
from ...tiers.store import Damaged, Store, StoreError, Usage
from ..core.entries import Entry
from ..runtime.loop import Core
from .deletes import Deletes
from .fetcher import Fetcher
from .link import BATCH_BYTES, TOUCH_EVERY_MS, Link, What, WritePolicy, expiries_ms
from .store import Offer, Outcome, SharedEntry
from .withdrawals import Withdrawals

log = structlog.get_logger("prefixd.sharing")

#: Entries that may wait to be offered: each is a reference.
MAX_WAITING_OFFERS: Final = 65_536
#: How long the engine may take for a batch of offers, or of touches.
_OFFER_TIMEOUT_S: Final = 10.0
_HAPPENED: Final = {
    Outcome.DONE: What.OFFERED,
    Outcome.REFUSED: What.REFUSED,
    Outcome.UNAVAILABLE: What.NOT_OFFERED,
}


class Offers:
    """Offers entries that were published or used. Belongs to the event loop."""

    def __init__(
        self,
        core: Core,
        link: Link,
        fetcher: Fetcher,
        withdrawals: Withdrawals,
        deletes: Deletes,
    ) -> None:
        self._core = core
        self._link = link
        self._fetcher = fetcher
        self._withdrawals = withdrawals
        self._deletes = deletes
        #: Entries and their expiries, by key, in the order in which they are sent.
        self._offers: dict[Key, tuple[Entry, int]] = {}
        #: Keys of offers that are being sent, and those of them that were deleted meanwhile.
        self._sending: set[Key] = set()
        self._deleted: set[Key] = set()
        #: The new expiries of entries in the engine.
        self._touches: dict[Key, int] = {}
        self._work = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Entries that wait or are being sent. On any thread."""
        return len(self._offers) + len(self._sending)

    def deleting(self, keys: Sequence[Key]) -> None:
        """Do not offer these keys, or take them back once they were sent."""
        for key in keys:
            self._offers.pop(key, None)
            self._touches.pop(key, None)
        self._deleted.update(self._sending.intersection(keys))

    def published(self, entries: Sequence[Entry]) -> None:
        """See `EntryListener`: offers the entries if all are offered."""
        if self._link.config.write is not WritePolicy.ALL:
            return
        # They are in chain order, root first. A use of the chain stamps them leaf first.
        uses = [(entries[0].last_used_ns - depth, 0) for depth in range(len(entries))]
        for entry, until_ms in zip(entries, self._expiries(uses), strict=True):
            if not self._fetcher.keeps(entry.key):  # else the engine has it
                self._offer(entry, until_ms)

    def used(self, usages: Sequence[Usage]) -> None:
        """See `EntryListener`: offers the entries, or lets them live longer in the engine."""
        if self._link.config.write is WritePolicy.NONE:
            return
        known = self._link.known
        expiries = self._expiries([(usage.last_used_ns, usage.hits) for usage in usages])
        for usage, until_ms in zip(usages, expiries, strict=True):
            entry = usage.entry
            assert isinstance(entry, Entry)
            known_ms = known.until_ms(entry.key)
            if known_ms is None:
                if usage.hits or entry.key in self._offers:
                    self._offer(entry, until_ms)
            elif until_ms - known_ms >= TOUCH_EVERY_MS:
                self._touches[entry.key] = until_ms
                known.remember(entry.key, until_ms)
                self._work.set()

    def _expiries(self, uses: Sequence[tuple[int, int]]) -> list[int]:
        return expiries_ms(uses, self._link.config.life_ms)

    def _offer(self, entry: Entry, until_ms: int) -> None:
        if self._link.store.needs_payloads and not self._fits(entry):
            return
        if len(self._offers) >= MAX_WAITING_OFFERS and entry.key not in self._offers:
            self._link.counters.offers_dropped += 1
            return
        self._offers[entry.key] = entry, until_ms
        self._work.set()

    def _fits(self, entry: Entry) -> bool:
        return entry.payload_bytes <= self._link.config.memory_bytes

    def _room_of(self, entry: Entry) -> int:
        """The memory of this process that its copy takes; 0: it is offered without its payload."""
        copied = self._link.store.takes_payload(entry.key) and self._fits(entry)
        return entry.payload_bytes if copied else 0

    async def run(self) -> None:
        while not self._link.closed:
            await self._work.wait()
            self._work.clear()
            while (self._offers or self._touches) and not self._link.closed:
                await self._touch_some()
                await self._offer_some()

    async def _touch_some(self) -> None:
        some = list(islice(self._touches.items(), MAX_BATCH_KEYS))
        for key, _ in some:
            del self._touches[key]
        if some:
            deadline_s = monotonic() + _OFFER_TIMEOUT_S
            gone = await self._link.call(lambda: self._link.store.touch(some, deadline_s))
            for key in gone:
                self._link.known.forget(key)
            self._link.counters.touched += len(some) - len(gone)

    async def _offer_some(self) -> None:
        some: list[tuple[Entry, int]] = []
        copied: set[Key] = set()
        total_bytes = 0
        while self._offers and len(some) < MAX_BATCH_KEYS:
            entry, until_ms = next(iter(self._offers.values()))
            room_bytes = self._room_of(entry)
            if some and total_bytes + room_bytes > BATCH_BYTES:
                break
            del self._offers[entry.key]
            if not entry.published:
                self._link.counters.offers_dropped += 1
            elif entry.key not in self._link.known:
                some.append((entry, until_ms))
                total_bytes += room_bytes
                if room_bytes:
                    copied.add(entry.key)
        if not some:
            return
        self._sending = {entry.key for entry, _ in some}
        await self._link.memory.take(total_bytes)
        try:
            await self._send(some, copied)
        finally:
            self._sending = set()
            self._link.memory.give(total_bytes)
        if self._deleted:
            deleted, self._deleted = list(self._deleted), set()
            with suppress(LimitReached):  # it expires, then
                self._withdrawals.hold(deleted)
                await self._withdrawals.withdraw(deleted, monotonic() + _OFFER_TIMEOUT_S)

    async def _send(self, some: Sequence[tuple[Entry, int]], copied: Set[Key]) -> None:
        """Offer entries, those of the keys `copied` with their payloads."""
        stamp = self._deletes.stamp  # what is deleted after this may be in the copies
        copies = dict.fromkeys((entry.key for entry, _ in some if entry.key not in copied), b"")
        copies |= await self._copies([entry for entry, _ in some if entry.key in copied])
        # If an entry left its tier while it was copied, its room may hold another entry by now.
        offers = [
            Offer(_shared(entry, stamp), [memoryview(copies[entry.key])], until_ms)
            for entry, until_ms in some
            if entry.key in copies and entry.published
        ]
        deadline_s = monotonic() + _OFFER_TIMEOUT_S
        outcomes = await self._link.call(lambda: self._link.store.put(offers, deadline_s))
        for offer, outcome in zip(offers, outcomes, strict=True):
            self._link.note(_HAPPENED[outcome], offer.entry)
            if outcome is Outcome.DONE:
                self._link.counters.offered_entries += 1
                self._link.counters.offered_bytes += offer.entry.payload_bytes
                if self._deletes.log.allows(offer.entry.key, stamp):
                    self._link.known.remember(offer.entry.key, offer.expires_at_ms)
                if offer.entry.key not in self._deleted:
                    # It replaced what the engine had not dropped yet.
                    self._withdrawals.release([offer.entry.key])
            elif outcome is Outcome.REFUSED:
                self._link.counters.refused += 1
        unsent = len(some) - len(offers) + outcomes.count(Outcome.UNAVAILABLE)
        self._link.counters.offers_dropped += unsent

    async def _copies(self, entries: Sequence[Entry]) -> dict[Key, bytes]:
        """Copies of the payloads that can be read, tier by tier, on the threads of its device."""
        core = self._core
        copies: dict[Key, bytes] = {}

        def copy(store: Store, some: Sequence[Entry]) -> None:
            with core.devices.under_way(store.tier):
                for entry in some:
                    try:
                        copies[entry.key] = b"".join(store.read(entry, 0, entry.payload_bytes))
                    except (StoreError, Damaged) as problem:
                        log.debug("offer_unreadable", key=entry.key.hex(), why=str(problem))

        loop = asyncio.get_running_loop()
        for tier, store in core.stores.items():
            some = [entry for entry in entries if entry.tier is tier]
            if some:
                executor = core.devices.executor(tier) if store.blocking else self._link.threads
                await loop.run_in_executor(executor, copy, store, some)
        return copies


def _shared(entry: Entry, stamp: int) -> SharedEntry:
    return SharedEntry(
        entry.key,
        entry.content._replace(token_ids_bytes=0),
        entry.payload_crc32c,
        stamp,
    )
