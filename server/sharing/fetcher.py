"""Fetches entries of other nodes that a search needs and this node does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import takewhile
from time import monotonic
from typing import Final

import structlog

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.limits import DEFAULT_RESERVATION_TTL_MS, MAX_BATCH_KEYS
from ...proto.vocabulary import ClaimMode, SaveReason, SaveStatus
from ..core.effects import ReserveAnswer, WriteOrder
from ..core.events import ReserveAsked, SaveItem
from ..runtime.incoming import Incoming
from ..runtime.loop import Core
from ..runtime.writes import Piece
from .deletes import Deletes
from .link import BATCH_BYTES, Link, What
from .store import Outcome, SharedEntry, Wanted
from .withdrawals import Withdrawals

log = structlog.get_logger("prefixd.sharing")

#: Keys of all running fetches together, at most: beyond, a fetch returns at once.
MAX_FETCHED_KEYS: Final = 64 * MAX_BATCH_KEYS
#: The part of a fetch's time that is kept for copying and publishing: complete entries are
#: published even if others never arrive.
_PUBLISHING_SHARE: Final = 0.1
_PUBLISHING_AT_MOST_S: Final = 0.5
#: The part of the engine's time for looking keys up: a node that hangs must not use up the time in
#: which the others send payloads.
_FINDING_SHARE: Final = 0.5


class Fetcher:
    """Fetches under `session`, which is the daemon's own. Belongs to the event loop."""

    def __init__(
        self, core: Core, link: Link, session: int, withdrawals: Withdrawals, deletes: Deletes
    ) -> None:
        self._core = core
        self._link = link
        self._withdrawals = withdrawals
        self._deletes = deletes
        #: Replaced when it has ended.
        self.session = session
        #: Keys of running fetches, and futures that are done when the fetches end.
        self._fetching: dict[Key, asyncio.Future[None]] = {}
        #: Keys of running fetches that were deleted meanwhile.
        self._deleted: set[Key] = set()
        #: Keys of running fetches that were received, and that the engine still has.
        self._kept: set[Key] = set()

    def keeps(self, key: Key) -> bool:
        """Whether the key is being fetched from an engine that keeps it."""
        return key in self._kept

    def deleting(self, keys: Sequence[Key]) -> None:
        """Running fetches do not save these keys, if they have not begun to."""
        self._deleted.update(self._fetching.keys() & keys)

    async def fetch(self, keys: Sequence[Key], mode: ClaimMode, deadline_s: float) -> int:
        """Fetch the keys that a claim of `mode` needs and this node does not have. Returns how many
        entries arrived by `deadline_s` (`time.monotonic()`). Raises nothing but CancelledError.

        Asks nobody where the time is too short for an answer: a client gives no more of it than
        the missing tokens take to compute."""
        if not self._link.trips.pays(deadline_s - monotonic()):
            self._link.counters.too_short += 1
            return 0
        self._link.counters.fetches += 1
        busy = [self._fetching[key] for key in keys if key in self._fetching]
        if busy:
            await asyncio.wait(busy, timeout=deadline_s - monotonic())
        missing = [key for key in self._missing(keys, mode) if key not in self._fetching]
        missing = missing[:MAX_BATCH_KEYS]
        if not missing or self._link.closed or len(self._fetching) >= MAX_FETCHED_KEYS:
            return 0
        done = asyncio.get_running_loop().create_future()
        self._fetching |= dict.fromkeys(missing, done)
        try:
            async with asyncio.timeout(deadline_s - monotonic()):
                if not await self._deletes.ready():
                    return 0
                return await self._fetch(missing, mode, deadline_s)
        except TimeoutError:
            return 0
        except PrefixdError as problem:
            log.debug("fetch_refused", why=str(problem))
            return 0
        finally:
            for key in missing:
                del self._fetching[key]
            self._deleted.difference_update(missing)
            self._kept.difference_update(missing)
            done.set_result(None)

    def _missing(self, keys: Sequence[Key], mode: ClaimMode) -> list[Key]:
        """The keys with which a claim of `mode` would get more than this node has."""
        find = self._core.state.tables.entries.find
        if mode is ClaimMode.FIRST:
            return list(takewhile(lambda key: find(key) is None, keys))
        return [key for key in keys if find(key) is None]

    async def _fetch(self, keys: Sequence[Key], mode: ClaimMode, deadline_s: float) -> int:
        deadline_s, find_by_s = _engine_deadlines(monotonic(), deadline_s)
        began_s = monotonic()
        found = await self._link.call(lambda: self._link.store.find(keys, find_by_s))
        now_s = monotonic()
        trip_s = self._link.store.trip_s(now_s - began_s)
        if trip_s is not None and now_s < find_by_s:
            self._link.trips.took(trip_s, len(keys))
        wanted = [entry and self._wanted(entry) for entry in found]
        for key, entry, usable in zip(keys, found, wanted, strict=True):
            if usable is None:  # it is offered again once it is saved here
                self._link.known.forget(key)
                self._link.counters.unvouched += entry is not None
        fetched = 0
        ancestors: list[Key] = []
        for batch in _batches(_needed(wanted, mode), self._link.config.memory_bytes):
            count = await self._fetch_batch(batch, ancestors, deadline_s)
            fetched += count
            if count < len(batch):
                break  # a run has no use for what follows a hole
            ancestors += [entry.key for entry in batch]
        return fetched

    def _wanted(self, entry: SharedEntry) -> SharedEntry | None:
        """The entry, unless its key was deleted and this may be what it was before."""
        key = entry.key
        if key in self._deleted or key in self._withdrawals:
            return None
        return entry if self._deletes.allows(key, entry.stamp) else None

    async def _fetch_batch(
        self, batch: Sequence[SharedEntry], ancestors: Sequence[Key], deadline_s: float
    ) -> int:
        """Reserve, receive and publish. Returns how many entries were published."""
        core = self._core
        total_bytes = sum(entry.payload_bytes for entry in batch)
        await self._link.memory.take(total_bytes)
        try:
            with core.working():
                batch = [entry for entry in batch if self._wanted(entry)]
                if not batch:
                    return 0
                answer = await core.ask(self._reservation(batch, ancestors), ReserveAnswer)
                granted = [
                    (entry, order)
                    for entry, order in zip(batch, answer.results, strict=True)
                    if isinstance(order, WriteOrder)
                ]
                self._link.counters.unavailable += len(batch) - len(granted)
                return await self._receive(granted, deadline_s) if granted else 0
        finally:
            self._link.memory.give(total_bytes)

    def _reservation(self, batch: Sequence[SharedEntry], ancestors: Sequence[Key]) -> ReserveAsked:
        now_ns = self._core.clock.now_ns()
        return ReserveAsked(
            request=self._core.next_request(),
            session=self.session,
            tier=self._link.config.tier,
            reason=SaveReason.COLD,
            items=tuple([SaveItem(entry.key, entry.content) for entry in batch]),
            ancestors=tuple(ancestors[-MAX_BATCH_KEYS:]),
            begin=True,
            ttl_ns=DEFAULT_RESERVATION_TTL_MS * 1_000_000,
            wait_until_ns=now_ns,
            now_ns=now_ns,
        )

    async def _receive(
        self, granted: Sequence[tuple[SharedEntry, WriteOrder]], deadline_s: float
    ) -> int:
        incoming = Incoming(self._core)
        begin_write = self._core.begin_write
        incoming.add({number: begin_write(order) for number, (_, order) in enumerate(granted)})
        memory = memoryview(bytearray(sum(entry.payload_bytes for entry, _ in granted)))
        wanted = []
        for entry, _ in granted:
            wanted.append(Wanted(entry, memory[: entry.payload_bytes]))
            memory = memory[entry.payload_bytes :]
        async with incoming.to_the_end():
            outcomes = await self._link.call(lambda: self._link.store.get(wanted, deadline_s))
            came = [
                entry
                for (entry, _), outcome in zip(granted, outcomes, strict=True)
                if outcome is Outcome.DONE
            ]
            self._kept.update(entry.key for entry in came if self._link.store.keeps(entry))
            await incoming.feed(
                [
                    Piece(number, want.room, True, want.entry.payload_crc32c)
                    for number, (want, outcome) in enumerate(zip(wanted, outcomes, strict=True))
                    if outcome is Outcome.DONE
                ]
            )
        ended = await incoming.ended()
        self._link.counters.damaged += outcomes.count(Outcome.DAMAGED)
        saved = [granted[n][0] for n, end in ended.items() if end.outcome is SaveStatus.SAVED]
        for number, outcome in enumerate(outcomes):
            what = What.DAMAGED if outcome is Outcome.DAMAGED else What.NOT_FETCHED
            fetched = ended[number].outcome is SaveStatus.SAVED
            self._link.note(What.FETCHED if fetched else what, granted[number][0])
        self._link.counters.unavailable += len(granted) - len(saved)
        self._link.counters.fetched_entries += len(saved)
        self._link.counters.fetched_bytes += sum(entry.payload_bytes for entry in saved)
        for entry in saved:
            if entry.key in self._kept:
                self._link.known.remember(entry.key)
        return len(saved)


def _engine_deadlines(now_s: float, deadline_s: float) -> tuple[float, float]:
    """Until when a fetch that ends at `deadline_s` waits for payloads, and for the look-up."""
    left_s = max(0.0, deadline_s - now_s)
    get_s = left_s - min(_PUBLISHING_SHARE * left_s, _PUBLISHING_AT_MOST_S)
    return now_s + get_s, now_s + _FINDING_SHARE * get_s


def _needed(found: Sequence[SharedEntry | None], mode: ClaimMode) -> list[SharedEntry]:
    """The found entries that a claim of `mode` needs."""
    if mode is ClaimMode.RUN and None in found:
        found = found[: found.index(None)]
    there = [entry for entry in found if entry is not None]
    return there[:1] if mode is ClaimMode.FIRST else there


def _batches(entries: Sequence[SharedEntry], most_bytes: int) -> Iterator[list[SharedEntry]]:
    """Cut into batches that are received in one go, up to the first entry that is too large."""
    batch: list[SharedEntry] = []
    batch_bytes = 0
    for entry in entries:
        if entry.payload_bytes > most_bytes:
            break
        if batch and batch_bytes + entry.payload_bytes > min(BATCH_BYTES, most_bytes):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(entry)
        batch_bytes += entry.payload_bytes
    if batch:
        yield batch
