"""Makes room in a tier, or gives it another budget, while the daemon serves: step by step.

A resize is done as a whole or not at all.

A smaller tier takes its slabs out of use as the victims leave them. Those of the disk tier become
holes of its file at once. Those of the ram and shm tiers stay memory of the daemon until it is
started again: the seals of the ram arena, which keep clients from writing to it, refuse holes too,
and under a reader in place that comes late, a hole of the shm arena would be a fault.

A larger tier has back first what it had before, and then grows as it did at the start, up to
what it was started with room for (`max_budget`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from ...proto.errors import DeviceFull, InvalidSize, LimitReached, PrefixdError, UnknownTier
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from ...tiers.ledger import Ledger
from ...tiers.store import Location, Store, StoreError, StoreFull
from ..core.effects import EvictAnswer, ResizeAnswer
from ..core.events import EvictAsked, ResizeAsked, SlabsRestored, TierState
from ..core.journal import EvictionCause
from .loop import Core
from .securing import Securing
from .slices import Slices

T = TypeVar("T")

log = structlog.get_logger("prefixd.resizing")

#: Entries that one event evicts, about a millisecond.
EVICTED_AT_ONCE: Final = 128
#: What the device gives again in one call.
_RESTORED_AT_ONCE: Final = 64 * 2**20
#: How long a smaller size waits for saves under way, and how often it looks.
_SAVES_WITHIN_S: Final = 10.0
_AGAIN_S: Final = 0.02


async def evict(core: Core, tier: Tier, free_bytes: int, cause: EvictionCause) -> tuple[int, int]:
    """The next victims of `tier`, until `free_bytes` of them are free or nothing is left that may
    go. Entries that are saved meanwhile may be among them, but never more than was asked for.

    Returns how many left, and their stored bytes. Raises UnknownTier, Draining.
    """
    slices = Slices()
    entries = freed_bytes = 0
    more = True
    while more and freed_bytes < free_bytes:
        question = EvictAsked(
            request=core.next_request(),
            tier=tier,
            free_bytes=free_bytes - freed_bytes,
            max_entries=EVICTED_AT_ONCE,
            now_ns=core.clock.now_ns(),
            cause=cause,
        )
        answer = await core.ask(question, EvictAnswer)
        entries += answer.entries
        freed_bytes += answer.freed_bytes
        more = answer.more
        await slices.pause()
    return entries, freed_bytes


@dataclass(slots=True)
class Resized:
    """What a resize did: the entries that left, and their stored bytes."""

    budget_bytes: int
    entries: int = 0
    freed_bytes: int = 0


class Resizing:
    """The resizes of all tiers, one at a time each. The event loop's."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._busy: set[Tier] = set()
        #: by tier: bytes of retired slabs that went back to the device
        self._holes = dict.fromkeys(core.stores, 0)

    def kept_bytes(self, tier: Tier) -> int:
        """What a tier does not use since it became smaller, and the system does not have back."""
        retired_bytes = self._core.state.tables.ledgers[tier].retired_bytes
        return max(0, retired_bytes - self._holes[tier])

    async def resize(self, tier: Tier, budget_bytes: int) -> Resized:
        """Give a tier another budget. Goes on to its end when the caller is cancelled.

        Raises UnknownTier; InvalidSize for what the tier can't have; LimitReached where claims,
        saves under way or another resize stand against it; DeviceFull. What is refused leaves the
        tier the size that it had."""
        core = self._core
        if tier not in core.stores:
            raise UnknownTier(f"this daemon has no {tier.label} tier")
        if core.devices.state(tier) is not TierState.SERVING:
            raise LimitReached(f"the {tier.label} tier is {core.devices.state(tier).value}")
        if tier in self._busy:
            raise LimitReached(f"the {tier.label} tier is being resized already")
        self._busy.add(tier)
        step = _Resize(core, core.stores[tier], budget_bytes, self._holes)
        task = asyncio.get_running_loop().create_task(step.run())

        def ended(task: asyncio.Task[Resized]) -> None:
            self._busy.discard(tier)
            if not task.cancelled():
                task.exception()  # taken, or asyncio would log it

        task.add_done_callback(ended)
        return await asyncio.shield(task)


class _Resize:
    """One resize of one tier."""

    def __init__(self, core: Core, store: Store, budget_bytes: int, holes: dict[Tier, int]) -> None:
        self._holes = holes
        self._core = core
        self._store = store
        self._tier: Final = store.tier
        self._resized: Final = Resized(budget_bytes)

    @property
    def _ledger(self) -> Ledger:
        return self._core.state.tables.ledgers[self._tier]

    async def run(self) -> Resized:
        ledger, store = self._ledger, self._store
        before = (ledger.budget_bytes, ledger.arena_bytes)
        try:
            arena_bytes = store.arena_bytes_of(self._resized.budget_bytes)
        except ValueError as problem:
            size = format_bytes(self._resized.budget_bytes)
            raise InvalidSize(f"{self._tier.label} can't have {size}: {problem}") from None
        store.wants(arena_bytes)
        try:
            await self._shrink(self._resized.budget_bytes, arena_bytes)
            await self._restore(arena_bytes)
        except Exception:
            await self._as_before(*before)
            raise
        if store.secured_bytes < store.size_bytes:
            name = f"{self._tier.label} arena"
            self._core.supervisor.task(name, Securing(self._core, store).secure_all())
        return self._resized

    async def _as_before(self, budget_bytes: int, arena_bytes: int) -> None:
        """Give the tier its former size after a resize that failed."""
        try:
            self._store.wants(arena_bytes)
            await self._shrink(budget_bytes, arena_bytes)
            await self._restore(arena_bytes)
        except (PrefixdError, StoreError) as problem:
            log.warning("not_as_before", tier=self._tier.label, error=str(problem))

    async def _ask(self, budget_bytes: int, arena_bytes: int) -> ResizeAnswer:
        core = self._core
        question = ResizeAsked(
            request=core.next_request(),
            tier=self._tier,
            budget_bytes=budget_bytes,
            arena_bytes=arena_bytes,
            max_entries=EVICTED_AT_ONCE,
            now_ns=core.clock.now_ns(),
        )
        answer = await core.ask(question, ResizeAnswer)
        self._resized.entries += answer.entries
        self._resized.freed_bytes += answer.freed_bytes
        return answer

    async def _shrink(self, budget_bytes: int, arena_bytes: int) -> None:
        """Until the tier has the size, or it is known that it can't."""
        slices = Slices()
        patience = round(_SAVES_WITHIN_S / _AGAIN_S)
        while True:
            answer = await self._ask(budget_bytes, arena_bytes)
            if answer.retired:
                await self._give_back(answer.retired)
            if answer.done:
                return
            if answer.retired or answer.more:
                await slices.pause()
                continue
            patience -= 1
            if not patience:
                held_bytes = self._ledger.reserved_bytes + self._ledger.pinned_bytes
                raise LimitReached(
                    f"claims and saves under way hold {held_bytes} bytes of the "
                    f"{self._tier.label} tier; try again"
                )
            await asyncio.sleep(_AGAIN_S)

    async def _give_back(self, location: Location) -> None:
        store = self._store
        try:
            if await self._on_thread(store.give_back, location):
                self._holes[self._tier] += sum(location[1::2])
        except StoreError as problem:
            # No entry uses these slabs; the only loss is that their device keeps the room.
            log.warning("not_given_back", tier=self._tier.label, error=str(problem))

    async def _restore(self, arena_bytes: int) -> None:
        """What was retired before, up to the size. Raises DeviceFull, StoreError."""
        core, ledger = self._core, self._ledger
        target_bytes = arena_bytes - ledger.header_bytes
        while missing_bytes := max(0, target_bytes - ledger.limit_bytes):
            location = ledger.next_restored(min(missing_bytes, _RESTORED_AT_ONCE))
            if not location:
                return
            try:
                await self._on_thread(self._store.take_back, location)
            except StoreFull as problem:
                raise DeviceFull(str(problem)) from None
            self._holes[self._tier] = max(0, self._holes[self._tier] - location[1])
            core.post(SlabsRestored(self._tier, location, core.clock.now_ns()))

    async def _on_thread(self, call: Callable[[Location], T], location: Location) -> T:
        if not self._store.blocking:
            return call(location)
        return await self._core.devices.run(self._tier, call, location)
