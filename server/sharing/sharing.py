"""The daemon's part in a fleet: brings entries from the shared engine, and offers its own.

What is brought goes the way of any save, under a session of the daemon's own: it is reserved,
received into memory that is nobody's room, copied by the store, and published if its CRC32C is
that of its record. So a fetch follows every rule that a client's save does, budgets and eviction
included, and readers who wait for a save in flight wait for it as well.

What is offered is copied first, and sent if the entry is still the same after the copy: nothing
is pinned while an engine takes its time.

Everything here belongs to the event loop; what blocks runs on threads of its own. The engine may
hang as long as it likes: a fetch ends with its deadline, and offers are dropped when too many wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import Enum
from time import monotonic
from typing import Final, NamedTuple, TypeVar

import structlog

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.limits import DEFAULT_RESERVATION_TTL_MS, MAX_BATCH_KEYS
from ...proto.vocabulary import SaveReason, Tier
from ...tiers.store import Damaged, StoreError, Usage
from ..core.answers import Opened, ReserveAnswer, WriteOrder
from ..core.entries import Entry
from ..core.events import (
    ClaimMode,
    HeartbeatCame,
    ReserveAsked,
    SaveItem,
    SaveOutcome,
    SessionLost,
    SessionOpened,
)
from ..runtime.incoming import Incoming, Piece
from ..runtime.loop import Core
from ..runtime.threads import ended_within
from .store import Offer, Outcome, SharedEntry, SharedStore, Wanted

log = structlog.get_logger("prefixd.sharing")

T = TypeVar("T")

#: What is received or sent in one go.
BATCH_BYTES: Final = 32 * 2**20
#: Calls to the engine at one time, each on a thread.
THREADS: Final = 4
#: Offers that wait, in entries: each is a reference.
MAX_WAITING_OFFERS: Final = 65_536
#: Keys that are known to be in the engine: about 150 bytes each.
MAX_KNOWN: Final = 262_144
#: An entry that is used lives on in the engine: it is told so again after this part of its life.
_TOUCHES_A_LIFE: Final = 8
#: What the engine may take for a batch of offers, or of touches.
_OFFER_TIMEOUT_S: Final = 10.0
_HEARTBEAT_S: Final = 1.0
_CLOSED_WITHIN_S: Final = 2.0


class WritePolicy(Enum):
    """Which entries are offered to others."""

    NONE = "none"
    """None: this node only reads."""
    SECOND_USE = "second-use"
    """Those that were read after they were saved."""
    ALL = "all"
    """Every one."""


@dataclass(frozen=True, slots=True)
class SharingConfig:
    """`[shared]`, for the daemon."""

    #: Where what is brought goes.
    tier: Tier
    write: WritePolicy
    #: How long an entry stays in the engine after its last use, at most.
    life_ms: int
    #: What fetches and offers may hold of this process' memory, together.
    memory_bytes: int


@dataclass(slots=True)
class SharingCounters:
    """Since the start."""

    fetches: int = 0
    fetched_entries: int = 0
    fetched_bytes: int = 0
    #: Found, but did not come: no answer in time, or no room here.
    unavailable: int = 0
    damaged: int = 0
    offered_entries: int = 0
    offered_bytes: int = 0
    refused: int = 0
    #: Not offered: too many waited, the engine did not answer, or they left before their turn.
    offers_dropped: int = 0
    touched: int = 0


class _Waiting(NamedTuple):
    entry: Entry
    generation: int
    last_used_ns: int


class _Memory:
    """Bytes that may be in use, given to whoever waits in turn."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._used_bytes = 0
        self._changed = asyncio.Condition()

    async def take(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._used_bytes + count <= self.total_bytes)
            self._used_bytes += count

    async def give_back(self, count: int) -> None:
        async with self._changed:
            self._used_bytes -= count
            self._changed.notify_all()


@dataclass(slots=True)
class Sharing:
    """Owned by the event loop. `store` is closed by `close`."""

    core: Core
    store: SharedStore
    config: SharingConfig
    counters: SharingCounters = field(default_factory=SharingCounters)
    _session: int = 0
    #: Keys that a fetch is busy with.
    _fetching: dict[Key, asyncio.Future[None]] = field(default_factory=dict)
    #: Keys that the engine has had, and when that was said last (ms).
    _known: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    _offers: deque[_Waiting] = field(default_factory=deque)
    _touches: list[tuple[Key, int]] = field(default_factory=list)
    #: Offers that are on their way.
    _sending: int = 0
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, "prefixd-shared")
    )
    _memory: _Memory = field(init=False)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._memory = _Memory(self.config.memory_bytes)

    async def start(self) -> None:
        """Open the session; begin to offer what is used."""
        core = self.core
        opened = await core.ask(
            SessionOpened(core.next_request(), "the shared tier", core.clock.now_ns()), Opened
        )
        self._session = opened.session
        core.entry_listener = self
        core.supervisor.task("shared heartbeat", self._beat())
        core.supervisor.task("shared offers", self._offer_all())
        core.supervisor.task("shared engine", self._look_at_engine())

    async def close(self) -> None:
        """End it all. Calls to the engine that are under way are not waited for, for long."""
        self._closed = True
        self.core.entry_listener = None
        closings: list[Callable[[], None]] = [self.store.close, self._threads.shutdown]
        await ended_within(_CLOSED_WITHIN_S, closings)
        now_ns = self.core.clock.now_ns()
        self.core.post(SessionLost(self._session, "the daemon stops", now_ns, closed=True))

    def counts(self) -> dict[str, int]:
        """The counters by name, and how many offers wait. On any thread."""
        return {**asdict(self.counters), "waiting_offers": len(self._offers) + self._sending}

    # ---- bringing

    async def fetch(self, keys: Sequence[Key], mode: ClaimMode, deadline_s: float) -> int:
        """Bring what `mode` wants of `keys` and is not here. Returns how many entries came until
        `deadline_s` (`time.monotonic()`). Raises nothing but CancelledError."""
        entries = self.core.state.tables.entries
        self.counters.fetches += 1
        busy = [self._fetching[key] for key in keys if key in self._fetching]
        if busy:
            await asyncio.wait(busy, timeout=deadline_s - monotonic())
        missing = _wanted_after(keys, mode, lambda key: entries.find(key) is not None)
        missing = [key for key in missing if key not in self._fetching][:MAX_BATCH_KEYS]
        if not missing or self._closed:
            return 0
        done = asyncio.get_running_loop().create_future()
        self._fetching |= dict.fromkeys(missing, done)
        try:
            async with asyncio.timeout(deadline_s - monotonic()):
                return await self._fetch(missing, mode, deadline_s)
        except TimeoutError:
            return 0
        except PrefixdError as problem:
            log.debug("fetch_refused", why=str(problem))
            return 0
        finally:
            for key in missing:
                del self._fetching[key]
            done.set_result(None)

    async def _fetch(self, keys: Sequence[Key], mode: ClaimMode, deadline_s: float) -> int:
        found = await self._on_thread(lambda: self.store.find(keys, deadline_s))
        brought = 0
        before: list[Key] = []
        for batch in _batches(_found(found, mode), self.config.memory_bytes):
            count = await self._bring(batch, before, deadline_s)
            brought += count
            if count < len(batch):
                break  # what comes after a hole is of no use to a run
            before += [entry.key for entry in batch]
        return brought

    async def _bring(
        self, batch: Sequence[SharedEntry], before: Sequence[Key], deadline_s: float
    ) -> int:
        """Reserve, receive and publish; returns how many are there now that were not."""
        core = self.core
        total_bytes = sum(entry.payload_bytes for entry in batch)
        await self._memory.take(total_bytes)
        try:
            with core.working():
                answer = await core.ask(self._reservation(batch, before), ReserveAnswer)
                granted = [
                    (entry, order)
                    for entry, order in zip(batch, answer.results, strict=True)
                    if isinstance(order, WriteOrder)
                ]
                self.counters.unavailable += len(batch) - len(granted)
                return await self._receive(granted, deadline_s) if granted else 0
        finally:
            await self._memory.give_back(total_bytes)

    def _reservation(self, batch: Sequence[SharedEntry], before: Sequence[Key]) -> ReserveAsked:
        core = self.core
        now_ns = core.clock.now_ns()
        return ReserveAsked(
            request=core.next_request(),
            session=self._session,
            tier=self.config.tier,
            reason=SaveReason.COLD,
            items=tuple(
                SaveItem(entry.key, entry.payload_bytes, entry.token_count, entry.layer_count)
                for entry in batch
            ),
            ancestors=tuple(before[-MAX_BATCH_KEYS:]),
            begin=True,
            ttl_ns=DEFAULT_RESERVATION_TTL_MS * 1_000_000,
            wait_until_ns=now_ns,
            now_ns=now_ns,
        )

    async def _receive(
        self, granted: Sequence[tuple[SharedEntry, WriteOrder]], deadline_s: float
    ) -> int:
        incoming = Incoming(self.core)
        for number, (_, order) in enumerate(granted):
            incoming.add(number, self.core.begin_write(order))
        memory = memoryview(bytearray(sum(entry.payload_bytes for entry, _ in granted)))
        wanted = []
        for entry, _ in granted:
            wanted.append(Wanted(entry, memory[: entry.payload_bytes]))
            memory = memory[entry.payload_bytes :]
        async with incoming.to_the_end():
            outcomes = await self._on_thread(lambda: self.store.get(wanted, deadline_s))
            await incoming.feed(
                [
                    Piece(number, want.room, True, want.entry.payload_crc32c)
                    for number, (want, outcome) in enumerate(zip(wanted, outcomes, strict=True))
                    if outcome is Outcome.DONE
                ]
            )
        ended = await incoming.ended()
        self.counters.damaged += outcomes.count(Outcome.DAMAGED)
        saved = [granted[n][0] for n, end in ended.items() if end.outcome is SaveOutcome.SAVED]
        self.counters.unavailable += len(granted) - len(saved)
        self.counters.fetched_entries += len(saved)
        self.counters.fetched_bytes += sum(entry.payload_bytes for entry in saved)
        for entry in saved:
            self._remember(entry.key)
        return len(saved)

    # ---- offering

    def published(self, entry: Entry) -> None:
        """`EntryListener`: offered at once, if everything is."""
        if self.config.write is WritePolicy.ALL and entry.key not in self._fetching:
            self._offer(entry, entry.last_used_ns)

    def used(self, usages: Sequence[Usage]) -> None:
        """`EntryListener`: what was used is offered, or lives on in the engine."""
        if self.config.write is WritePolicy.NONE:
            return
        stale_ms = self._now_ms() - self.config.life_ms // _TOUCHES_A_LIFE
        for usage in usages:
            entry = usage.entry
            assert isinstance(entry, Entry)
            said_ms = self._known.get(entry.key)
            if said_ms is None:
                if usage.hits:
                    self._offer(entry, usage.last_used_ns)
            elif said_ms < stale_ms:
                self._touches.append((entry.key, usage.last_used_ns))
                self._remember(entry.key)
                self._work.set()

    def _offer(self, entry: Entry, last_used_ns: int) -> None:
        if entry.payload_bytes > self.config.memory_bytes:
            return
        if len(self._offers) >= MAX_WAITING_OFFERS:
            self.counters.offers_dropped += 1
            return
        self._offers.append(_Waiting(entry, entry.generation, last_used_ns))
        self._work.set()

    async def _offer_all(self) -> None:
        while not self._closed:
            await self._work.wait()
            self._work.clear()
            while (self._offers or self._touches) and not self._closed:
                await self._touch_some()
                await self._offer_some()

    async def _touch_some(self) -> None:
        some, self._touches = self._touches[:MAX_BATCH_KEYS], self._touches[MAX_BATCH_KEYS:]
        if some:
            expiries = self._expiries([used_ns for _, used_ns in some])
            pairs = [(key, until) for (key, _), until in zip(some, expiries, strict=True)]
            deadline_s = monotonic() + _OFFER_TIMEOUT_S
            await self._on_thread(lambda: self.store.touch(pairs, deadline_s))
            self.counters.touched += len(some)

    async def _offer_some(self) -> None:
        some: list[_Waiting] = []
        total_bytes = 0
        while self._offers and len(some) < MAX_BATCH_KEYS:
            entry = self._offers[0].entry
            if some and total_bytes + entry.payload_bytes > BATCH_BYTES:
                break
            offer = self._offers.popleft()
            if _unchanged(offer) and entry.key not in self._known:
                some.append(offer)
                total_bytes += entry.payload_bytes
            else:
                self.counters.offers_dropped += not _unchanged(offer)
        if not some:
            return
        self._sending = len(some)
        await self._memory.take(total_bytes)
        try:
            await self._send(some)
        finally:
            self._sending = 0
            await self._memory.give_back(total_bytes)

    async def _send(self, some: Sequence[_Waiting]) -> None:
        copies = await self._copies(some)
        # Whatever left its tier while it was copied may be somebody else's bytes.
        ready = [
            (offer, copy)
            for offer, copy in zip(some, copies, strict=True)
            if copy is not None and _unchanged(offer)
        ]
        expiries = self._expiries([offer.last_used_ns for offer, _ in ready])
        offers = [
            Offer(_shared(offer.entry), [memoryview(copy)], until_ms)
            for (offer, copy), until_ms in zip(ready, expiries, strict=True)
        ]
        deadline_s = monotonic() + _OFFER_TIMEOUT_S
        outcomes = await self._on_thread(lambda: self.store.put(offers, deadline_s))
        for offer_, outcome in zip(offers, outcomes, strict=True):
            if outcome is Outcome.DONE:
                self.counters.offered_entries += 1
                self.counters.offered_bytes += offer_.entry.payload_bytes
                self._remember(offer_.entry.key)
            elif outcome is Outcome.REFUSED:
                self.counters.refused += 1
        unsent = len(some) - len(offers) + outcomes.count(Outcome.UNAVAILABLE)
        self.counters.offers_dropped += unsent

    async def _copies(self, some: Sequence[_Waiting]) -> list[bytes | None]:
        """Payloads, each as it was while it was copied; tier by tier, on the threads of its
        device."""
        core = self.core
        copies: dict[int, bytes | None] = {}

        def copy(tier: Tier, numbers: Sequence[int]) -> None:
            store = core.stores[tier]
            with core.devices.under_way(tier):
                for number in numbers:
                    entry = some[number].entry
                    try:
                        copies[number] = b"".join(store.read(entry, 0, entry.payload_bytes))
                    except (StoreError, Damaged) as problem:
                        log.debug("offer_unreadable", key=entry.key.hex(), why=str(problem))
                        copies[number] = None

        for tier in core.stores:
            numbers = [n for n, offer in enumerate(some) if offer.entry.tier is tier]
            if numbers:
                blocking = core.stores[tier].blocking
                executor = core.devices.executor(tier) if blocking else self._threads
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(executor, copy, tier, numbers)
        return [copies[number] for number in range(len(some))]

    def _expiries(self, last_used_ns: Sequence[int]) -> list[int]:
        """When entries that were used then may go. A chain is used leaf first and root last, all
        within a moment: a millisecond apart, the engine drops its leaves before its root."""
        order = sorted(range(len(last_used_ns)), key=lambda n: -last_used_ns[n])
        until_ms = self._now_ms() + self.config.life_ms
        expiries = [0] * len(order)
        for depth, number in enumerate(order):
            expiries[number] = until_ms - depth
        return expiries

    # ----

    def _remember(self, key: Key) -> None:
        self._known[key] = self._now_ms()
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _now_ms(self) -> int:
        return self.core.clock.now_ns() // 1_000_000

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _beat(self) -> None:
        while not self._closed:
            self.core.post(HeartbeatCame(self._session, self.core.clock.now_ns()))
            await asyncio.sleep(_HEARTBEAT_S)

    async def _look_at_engine(self) -> None:
        """Say what is wrong with the engine: its settings once, its nodes all the time."""
        notices = self.core.health.notices
        told: dict[str, str] = {}
        asked = False
        while not self._closed:
            if not asked and not self.store.health():
                asked = True
                for problem in await self._on_thread(self.store.problems):
                    log.warning("shared_engine_setting", problem=problem)
                    told[problem.partition(" is ")[0]] = problem
            now = {f"shared {name}": why for name, why in (told | self.store.health()).items()}
            for name in [n for n in notices if n.startswith("shared ") and n not in now]:
                del notices[name]
                log.info("shared_engine_recovered", node=name.removeprefix("shared "))
            for name, why in now.items():
                if name not in notices:
                    log.warning("shared_engine", node=name.removeprefix("shared "), why=why)
                notices[name] = why
            await asyncio.sleep(_HEARTBEAT_S)


def _wanted_after(keys: Sequence[Key], mode: ClaimMode, here: Callable[[Key], bool]) -> list[Key]:
    """The keys that would give a claim of `mode` more than what is here."""
    match mode:
        case ClaimMode.FIRST:
            wanted = []
            for key in keys:
                if here(key):
                    break
                wanted.append(key)
            return wanted
        case _:
            return [key for key in keys if not here(key)]


def _found(found: Sequence[SharedEntry | None], mode: ClaimMode) -> list[SharedEntry]:
    """What `mode` wants of what there is."""
    wanted: list[SharedEntry] = []
    for entry in found:
        if entry is not None:
            wanted.append(entry)
            if mode is ClaimMode.FIRST:
                break
        elif mode is ClaimMode.RUN:
            break
    return wanted


def _batches(entries: Sequence[SharedEntry], most_bytes: int) -> Iterator[list[SharedEntry]]:
    """Cut into what is received in one go, up to the first that is too large at all."""
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


def _unchanged(offer: _Waiting) -> bool:
    return offer.entry.published and offer.entry.generation == offer.generation


def _shared(entry: Entry) -> SharedEntry:
    return SharedEntry(
        entry.key, entry.payload_bytes, entry.token_count, entry.layer_count, entry.payload_crc32c
    )
