"""The daemon's part in a fleet: fetches entries from the shared engine, and offers its own.

A fetched entry is saved as a client would save it, under a session of the daemon: it is reserved,
received into memory outside of the tiers, copied by the store, and published if its CRC32C is that
of its record. So a fetch follows every rule of a save, budgets and eviction included, and readers
that wait for a save in flight also wait for it.

An offered entry is copied first, and sent if it has not changed meanwhile: nothing is pinned while
the engine is slow.

Everything here belongs to the event loop; blocking calls run on threads of their own. The engine
may hang: a fetch ends at its deadline, and offers are dropped when too many wait.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from itertools import islice, takewhile
from time import monotonic
from typing import Final

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import LimitReached, PrefixdError
from ...proto.keys import Key
from ...proto.limits import DEFAULT_RESERVATION_TTL_MS, MAX_BATCH_KEYS
from ...proto.vocabulary import ClaimMode, SaveReason, SaveStatus
from ...tiers.store import Damaged, Store, StoreError, Usage
from ..core.effects import Opened, ReserveAnswer, WriteOrder
from ..core.entries import EntryState
from ..core.events import HeartbeatCame, KeyToSave, ReserveAsked, SessionLost, SessionOpened
from ..core.shares import Holder
from ..runtime.incoming import Incoming
from ..runtime.loop import Core
from ..runtime.quota import Quota
from ..runtime.supervision import ended_within
from ..runtime.writes import Piece
from .deletes import Deletes, Withdrawals
from .engine_link import (
    BATCH_BYTES,
    TOUCH_EVERY_MS,
    EngineLink,
    SharingConfig,
    What,
    WritePolicy,
    expiries_ms,
)
from .engine_store import NodeState, Offer, Outcome, SharedEntry, SharedStore, Wanted

log = structlog.get_logger("prefixd.sharing")

_HEARTBEAT_S: Final = 1.0
_CLOSED_WITHIN_S: Final = 2.0
_NUMBER: Final = re.compile(r"\d+")
#: The time between two checks of the engine's settings.
_SETTINGS_EVERY_S: Final = 60.0

#: Keys of all running fetches together, at most: beyond, a fetch returns at once.
MAX_FETCHED_KEYS: Final = 64 * MAX_BATCH_KEYS
#: The part of a fetch's time that is kept for copying and publishing: complete entries are
#: published even if others never arrive.
_PUBLISHING_SHARE: Final = 0.1
_PUBLISHING_AT_MOST_S: Final = 0.5
#: The part of the engine's time for looking keys up: a node that hangs must not use up the time in
#: which the others send payloads.
_FINDING_SHARE: Final = 0.5

#: Entries that may wait to be offered: each is a reference.
MAX_WAITING_OFFERS: Final = 65_536
#: How long the engine may take for a batch of offers, or of touches.
_OFFER_TIMEOUT_S: Final = 10.0
_HAPPENED: Final = {
    Outcome.DONE: What.OFFERED,
    Outcome.REFUSED: What.REFUSED,
    Outcome.UNAVAILABLE: What.NOT_OFFERED,
}


class Fetcher:
    """Fetches entries of other nodes that a search needs and this node does not have, under
    `session`, which is the daemon's own."""

    def __init__(
        self, core: Core, link: EngineLink, session: int, withdrawals: Withdrawals, deletes: Deletes
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
            items=tuple([KeyToSave(entry.key, entry.content) for entry in batch]),
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
                self._link.known.add(entry.key, 0)
        return len(saved)


class Offers:
    """Offers entries to other nodes in the background: those that were used, or all."""

    def __init__(
        self,
        core: Core,
        link: EngineLink,
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
        self._offers: dict[Key, tuple[EntryState, int]] = {}
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

    def published(self, entries: Sequence[EntryState]) -> None:
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
            assert isinstance(entry, EntryState)
            known_ms = known.get(entry.key)
            if known_ms is None:
                if usage.hits or entry.key in self._offers:
                    self._offer(entry, until_ms)
            elif until_ms - known_ms >= TOUCH_EVERY_MS:
                self._touches[entry.key] = until_ms
                known.add(entry.key, until_ms)
                self._work.set()

    def _expiries(self, uses: Sequence[tuple[int, int]]) -> list[int]:
        return expiries_ms(uses, self._link.config.life_ms)

    def _offer(self, entry: EntryState, until_ms: int) -> None:
        if self._link.store.needs_payloads and not self._fits(entry):
            return
        if len(self._offers) >= MAX_WAITING_OFFERS and entry.key not in self._offers:
            self._link.counters.offers_dropped += 1
            return
        self._offers[entry.key] = entry, until_ms
        self._work.set()

    def _fits(self, entry: EntryState) -> bool:
        return entry.payload_bytes <= self._link.config.memory_bytes

    def _room_of(self, entry: EntryState) -> int:
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
        some: list[tuple[EntryState, int]] = []
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

    async def _send(self, some: Sequence[tuple[EntryState, int]], copied: Set[Key]) -> None:
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
                    self._link.known.add(offer.entry.key, offer.expires_at_ms)
                if offer.entry.key not in self._deleted:
                    # It replaced what the engine had not dropped yet.
                    self._withdrawals.release([offer.entry.key])
            elif outcome is Outcome.REFUSED:
                self._link.counters.refused += 1
        unsent = len(some) - len(offers) + outcomes.count(Outcome.UNAVAILABLE)
        self._link.counters.offers_dropped += unsent

    async def _copies(self, entries: Sequence[EntryState]) -> dict[Key, bytes]:
        """Copies of the payloads that can be read, tier by tier, on the threads of its device."""
        core = self._core
        copies: dict[Key, bytes] = {}

        def copy(store: Store, some: Sequence[EntryState]) -> None:
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


class Sharing:
    """An `EntryListener`. Belongs to the event loop. Made by `begin`."""

    def __init__(self, core: Core, link: EngineLink, session: int) -> None:
        """`session` is the daemon's own."""
        self._core = core
        self._link = link
        self._withdrawals = Withdrawals(link)
        self._deletes = Deletes(core, link, self._withdrawals)
        link.store.allows = self._deletes.log.allows
        self._fetcher = Fetcher(core, link, session, self._withdrawals, self._deletes)
        self.fetch: Final = self._fetcher.fetch
        self._offers = Offers(core, link, self._fetcher, self._withdrawals, self._deletes)
        self.published: Final = self._offers.published
        self.used: Final = self._offers.used
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def begin(cls, core: Core, store: SharedStore, config: SharingConfig) -> Sharing:
        """Open the session, and begin to offer. Owns `store` from now on."""
        session = await _opened(core)
        memory = Quota("shared entries", config.memory_bytes, wait_s=math.inf)
        sharing = cls(core, EngineLink(store, config, core.clock, memory), session)
        core.entry_listener = sharing
        work = {
            "shared heartbeat": sharing._beat(),
            "shared offers": sharing._offers.run(),
            "shared withdrawals": sharing._withdrawals.run(),
            "shared deletes": sharing._deletes.run(),
            "shared engine": sharing._look_at_engine(),
        }
        sharing._tasks += [core.supervisor.task(name, each) for name, each in work.items()]
        return sharing

    async def close(self) -> None:
        """End everything. Waits only briefly for running calls to the engine."""
        self._link.closed = True
        self._core.entry_listener = None
        for task in self._tasks:
            task.cancel()  # before their threads end
        self._deletes.close()
        closings: list[Callable[[], None]] = [self._link.store.close, self._link.threads.shutdown]
        await ended_within(_CLOSED_WITHIN_S, closings)
        now_ns = self._core.clock.now_ns()
        self._core.post(SessionLost(self._fetcher.session, "the daemon stops", now_ns, closed=True))

    def deleting(self, keys: Sequence[Key], holder: Holder) -> None:
        """See `EntryListener`."""
        self._deletes.take_room(holder.tenant, len(keys))
        self._withdrawals.hold(keys, holder)
        self._fetcher.deleting(keys)
        self._offers.deleting(keys)

    async def deleted(
        self, keys: Sequence[Key], kept: Sequence[Key], deadline_s: float, *, announced: bool
    ) -> bool:
        """See `EntryListener`."""
        self._withdrawals.release(kept)
        told = not announced or await self._deletes.announce(keys, deadline_s)
        return await self._withdrawals.withdraw(keys, deadline_s) and told

    async def cleared(self, namespace: str, deadline_s: float) -> bool:
        """See `EntryListener`."""
        return await self._deletes.announce_clear(namespace, deadline_s)

    def counts(self) -> dict[str, int]:
        """The counters by name, with the numbers of waiting offers and of nodes. On any thread."""
        nodes = self._link.store.statuses()
        return {
            **asdict(self._link.counters),
            **self._link.store.counts(),
            "waiting_offers": self._offers.waiting,
            "waiting_withdrawals": len(self._withdrawals),
            "waiting_deletes": self._deletes.waiting,
            "unanswered": sum(node.unanswered for node in nodes),
            "nodes": len(nodes),
            "nodes_serving": sum(node.state is NodeState.SERVING for node in nodes),
        }

    def nodes(self) -> list[pb.SharedNode]:
        """The nodes of the engine. On any thread."""
        return [pb.SharedNode(**asdict(node)) for node in self._link.store.statuses()]

    def happened(self, beginning: bytes, most: int) -> list[pb.SharedEvent]:
        """The latest events of keys that begin so, the oldest first. Takes some milliseconds. On
        the loop."""
        events = [event for event in self._link.history if event.key.startswith(beginning)]
        return [
            pb.SharedEvent(key=key, what=what.value, node=node, at_unix_ns=at_ns)  # type: ignore[arg-type]
            for key, what, node, at_ns in events[-most:]
        ]

    async def _beat(self) -> None:
        core, fetcher = self._core, self._fetcher
        while not self._link.closed:
            if fetcher.session in core.state.tables.sessions:
                core.post(HeartbeatCame(fetcher.session, core.clock.now_ns()))
            else:  # the session was lost
                with suppress(PrefixdError):
                    fetcher.session = await _opened(core)
            await asyncio.sleep(_HEARTBEAT_S)

    async def _look_at_engine(self) -> None:
        """Keep the notices about the engine: its settings are checked from time to time, its nodes
        always."""
        notices = self._core.health.notices
        bad_settings: dict[str, str] = {}
        ask_at_s = 0.0
        while not self._link.closed:
            serving = all(n.state is NodeState.SERVING for n in self._link.store.statuses())
            if monotonic() >= ask_at_s and serving:
                ask_at_s = monotonic() + _SETTINGS_EVERY_S
                found = await self._link.call(self._link.store.problems)
                bad_settings = {problem.partition(" is ")[0]: problem for problem in found}
            problems = bad_settings | self._link.store.health()
            now = {f"shared {name}": why for name, why in problems.items()}
            for name in [n for n in notices if n.startswith("shared ") and n not in now]:
                del notices[name]
                log.info("shared_engine_recovered", node=name.removeprefix("shared "))
            for name, why in now.items():
                # Told anew where more has changed than a number.
                if _NUMBER.sub("", notices.get(name, "")) != _NUMBER.sub("", why):
                    log.warning("shared_engine", node=name.removeprefix("shared "), why=why)
                notices[name] = why
            await asyncio.sleep(_HEARTBEAT_S)


async def _opened(core: Core) -> int:
    """Open a session of the daemon. Raises PrefixdError."""
    question = SessionOpened(core.next_request(), "the shared engine", core.clock.now_ns())
    return (await core.ask(question, Opened)).session


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


def _shared(entry: EntryState, stamp: int) -> SharedEntry:
    return SharedEntry(
        entry.key,
        entry.content._replace(token_ids_bytes=0),
        entry.payload_crc32c,
        stamp,
    )
