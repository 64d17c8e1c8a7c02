"""Changes the size of a tier while the daemon serves: evicts, resizes, and secures its arena.

A resize succeeds as a whole or changes nothing.

A smaller tier retires its slabs as victims free them. Retired slabs of the disk tier become holes
of its file at once. Those of the ram and shm tiers stay memory of the daemon until it restarts: the
seals of the ram arena, which keep clients from writing to it, also prevent holes, and a client that
still reads in place would fault at a hole of the shm arena.

A larger tier first restores its retired slabs, and then grows as it did at the start, up to the
size that it was started with room for (`max_budget`).

Securing turns an arena into real memory, or real blocks, off the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final, TypeVar

import structlog

from ...proto.errors import (
    DeviceFull,
    Draining,
    InvalidSize,
    LimitReached,
    PrefixdError,
    UnknownTier,
)
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from ...tiers.ledger import Ledger
from ...tiers.store import Location, Store, StoreError, StoreFull
from ..core.effects import EvictAnswer, ResizeAnswer
from ..core.events import (
    ArenaGrown,
    EvictAsked,
    ResizeAsked,
    RetireAsked,
    SlabsRestored,
    TierState,
)
from ..core.journal import EvictionCause
from .loop import Core
from .rounds import Slices

T = TypeVar("T")

log = structlog.get_logger("prefixd.resizing")

#: Entries that one event evicts: about a millisecond.
EVICTED_AT_ONCE: Final = 128
#: Bytes that one call restores.
_RESTORED_AT_ONCE: Final = 64 * 2**20
#: How long shrinking waits for saves under way, and how often it tries again.
_SAVES_WITHIN_S: Final = 10.0
_AGAIN_S: Final = 0.02
#: How often a tier that gets its size at a start tries again.
FIT_AGAIN_S: Final = 1.0
#: Ranges of one event that retires them.
_HOLES_AT_ONCE: Final = 512
#: How often securing tries again while the device has no room.
SECURE_AGAIN_S: Final = 5.0


async def evict(core: Core, tier: Tier, free_bytes: int, cause: EvictionCause) -> tuple[int, int]:
    """Evict from `tier` until `free_bytes` are free or no entry is left that may be evicted.
    Entries that are saved meanwhile may be among the victims, but never more than `free_bytes`
    require.

    Returns how many entries left, and their stored bytes. Raises UnknownTier, Draining.
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
    """The result of a resize: how many entries left, and their stored bytes."""

    budget_bytes: int
    entries: int = 0
    freed_bytes: int = 0


class Resizing:
    """The resizes of all tiers, one at a time for each tier. Belongs to the event loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._busy: set[Tier] = set()

    def kept_bytes(self, tier: Tier) -> int:
        """Memory that a tier does not use since it became smaller, and has not given back."""
        retired_bytes = self._core.state.tables.ledgers[tier].retired_bytes
        return max(0, retired_bytes - self._core.stores[tier].hole_bytes)

    async def resize(self, tier: Tier, budget_bytes: int) -> Resized:
        """Give a tier another budget. Runs to its end even if the caller is cancelled.

        Raises UnknownTier; InvalidSize for a size that the tier can't have; LimitReached if claims,
        saves under way or another resize prevent it; DeviceFull. A resize that fails restores the
        former size."""
        core = self._core
        if tier not in core.stores:
            raise UnknownTier(f"this daemon has no {tier.label} tier")
        if core.devices.state(tier) is not TierState.SERVING:
            raise LimitReached(f"the {tier.label} tier is {core.devices.state(tier)}")
        if tier in self._busy:
            raise LimitReached(f"the {tier.label} tier is being resized already")
        self._busy.add(tier)
        step = _Resize(core, core.stores[tier], budget_bytes)
        task = asyncio.get_running_loop().create_task(step.run())

        def ended(task: asyncio.Task[Resized]) -> None:
            self._busy.discard(tier)
            if not task.cancelled():
                task.exception()  # marks it as retrieved, or asyncio may log it

        task.add_done_callback(ended)
        return await asyncio.shield(task)


async def enlarge(core: Core, store: Store, budget_bytes: int) -> None:
    """Let the accounting of a tier whose store was opened late have the size that was found. Before
    its recovery. Waits while the daemon takes no questions."""
    while True:
        question = ResizeAsked(
            request=core.next_request(),
            tier=store.tier,
            budget_bytes=max(budget_bytes, store.found_budget_bytes),
            arena_bytes=store.size_bytes,
            max_entries=EVICTED_AT_ONCE,
            now_ns=core.clock.now_ns(),
        )
        try:
            await core.ask(question, ResizeAnswer)
        except Draining as problem:
            log.info("tier_waits", tier=store.tier.label, why=str(problem))
            await asyncio.sleep(FIT_AGAIN_S)
        else:
            return


async def fit(core: Core, store: Store, budget_bytes: int) -> None:
    """Give a tier that has just recovered the configured budget, before it serves.

    A start opens the files of an earlier one as they are, as the tier may have been enlarged while
    the daemon ran, or the configuration made it smaller. What does not fit is evicted, the next
    victim first, and its room goes back to the device. Waits while claims hold too much, and while
    the daemon takes no questions: where it stops, the next start goes on. An error of the device is
    a condition, and the tier waits for its end.
    """
    if not store.recorded:
        return
    step = _Resize(core, store, budget_bytes, at_start=True)
    part, health = f"{store.tier.label} tier", core.health
    while True:
        try:
            await step.fit()
            break
        except (LimitReached, Draining) as problem:
            if health.notices.get(part) != str(problem):
                log.info("tier_waits", tier=store.tier.label, why=str(problem))
            health.notices[part] = str(problem)  # `Recovery.end` removes it
        except StoreError as problem:
            if part not in health.conditions:
                log.error("tier_waits", tier=store.tier.label, why=str(problem))
            health.conditions[part] = f"{problem}; it is tried again"
        await asyncio.sleep(FIT_AGAIN_S)
    health.conditions.pop(part, None)


class _Resize:
    """One resize of one tier. `at_start`: it has recovered, and has not served yet."""

    def __init__(
        self, core: Core, store: Store, budget_bytes: int, *, at_start: bool = False
    ) -> None:
        self._at_start = at_start
        self._core = core
        self._store = store
        self._tier: Final = store.tier
        #: The notice of a start that had not enough of it.
        self._room: Final = f"{store.tier.label} room"
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
        try:
            await self._set_size(self._resized.budget_bytes, arena_bytes)
        except Exception:
            try:
                await self._set_size(*before)
            except (PrefixdError, StoreError) as problem:
                log.warning("not_as_before", tier=self._tier.label, error=str(problem))
            raise
        self._core.health.notices.pop(self._room, None)
        if store.secured_bytes < store.size_bytes:
            name = f"{self._tier.label} arena"
            self._core.supervisor.task(name, Securing(self._core, store).secure_all())
        return self._resized

    async def fit(self) -> None:
        """See the function. Raises LimitReached, Draining, StoreError: it may be tried again."""
        store, ledger, tier = self._store, self._ledger, self._tier.label
        budget_bytes, found_bytes = self._resized.budget_bytes, store.found_budget_bytes
        holes = await self._core.devices.run(self._tier, _holes_of, store)
        if not holes and ledger.budget_bytes <= budget_bytes:
            return
        try:
            arena_bytes = store.arena_bytes_of(budget_bytes)
        except ValueError:
            # The records of what was found take so much of the budget. They are not counted then.
            slab_bytes = store.slab_bytes
            share = ledger.arena_bytes * budget_bytes // ledger.budget_bytes
            arena_bytes = max(2, share // slab_bytes) * slab_bytes
        try:
            await self._retire_holes(holes)
            await self._set_size(budget_bytes, arena_bytes)
        except DeviceFull as problem:
            log.warning("tier_smaller_than_configured", tier=tier, error=str(problem))
            has, wanted = format_bytes(ledger.limit_bytes), format_bytes(ledger.budget_bytes)
            self._core.health.notices[self._room] = (
                f"{has} of {wanted}: its device had no room for the rest when the daemon started; "
                "when it has, resize the tier or restart the daemon"
            )
        resized = self._resized
        if resized.entries:
            log.warning(
                "tier_was_larger",
                tier=tier,
                found_bytes=found_bytes,
                budget_bytes=budget_bytes,
                kept=ledger.entries,
                evicted=resized.entries,
                evicted_bytes=resized.freed_bytes,
            )

    async def _retire_holes(self, holes: Sequence[Location]) -> None:
        """Use nothing of these ranges, and have none of their room. `_restore` undoes that."""
        core = self._core
        for ranges in holes:
            while True:
                now_ns = core.clock.now_ns()
                question = RetireAsked(core.next_request(), self._tier, ranges, now_ns)
                answer = await core.ask(question, ResizeAnswer)
                if not answer.retired:
                    break
                await self._give_back(answer.retired)

    async def _set_size(self, budget_bytes: int, arena_bytes: int) -> None:
        self._store.wants(arena_bytes)
        await self._shrink(budget_bytes, arena_bytes)
        await self._restore(arena_bytes)

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
        """Ask until the tier has the size. Raises LimitReached."""
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
            await self._on_thread(partial(store.give_back, at_start=self._at_start), location)
        except StoreError as problem:
            # No entry uses these slabs; all that is lost is room on the device.
            log.warning("not_given_back", tier=self._tier.label, error=str(problem))

    async def _restore(self, arena_bytes: int) -> None:
        """Restore retired slabs, up to the size. Raises DeviceFull, StoreError."""
        core, ledger = self._core, self._ledger
        target_bytes = arena_bytes - ledger.header_bytes
        slices = Slices()
        while missing_bytes := max(0, target_bytes - ledger.limit_bytes):
            location = ledger.next_restored(min(missing_bytes, _RESTORED_AT_ONCE))
            if not location:
                return
            try:
                await self._on_thread(self._store.take_back, location)
            except StoreFull as problem:
                raise DeviceFull(str(problem)) from None
            core.post(SlabsRestored(self._tier, location, core.clock.now_ns()))
            # A tier whose order was shuffled was retired in as many pieces as it had entries.
            await slices.pause()

    async def _on_thread(self, call: Callable[[Location], T], location: Location) -> T:
        if not self._store.blocking and not self._at_start:
            return call(location)
        return await self._core.devices.run(self._tier, call, location)


def _holes_of(store: Store) -> list[Location]:
    """On a thread: the ranges without room, some hundred together."""
    holes = list(store.find_holes())
    return [
        tuple(chain.from_iterable(holes[start : start + _HOLES_AT_ONCE]))
        for start in range(0, len(holes), _HOLES_AT_ONCE)
    ]


class Securing:
    """Secures one arena, segment by segment.

    A device without room is no fault: the tier is as large as its secured part, which a notice
    says, and grows when there is room. An error of the device is a condition.
    """

    def __init__(self, core: Core, store: Store) -> None:
        self._core = core
        self._store = store
        self._tier = store.tier
        self._segments = store.secure_segments()
        self._part = f"{store.tier.label} arena"
        self._secured_bytes = store.secured_bytes
        self._grown(self._secured_bytes)

    def _grown(self, secured_bytes: int) -> None:
        self._secured_bytes = secured_bytes
        self._core.post(ArenaGrown(self._tier, secured_bytes, self._core.clock.now_ns()))

    async def secure_all(self) -> None:
        """Returns when all of the arena is secured, and tries again while there is no room. Returns
        at once if another task is securing it."""
        securing = self._core.devices.securing
        if self._tier in securing:
            return
        securing.add(self._tier)
        try:
            while not await self.secure():
                await asyncio.sleep(SECURE_AGAIN_S)
        finally:
            securing.discard(self._tier)
        log.info("arena_secured", tier=self._tier.label, secured_bytes=self._secured_bytes)

    async def secure(self, upto_bytes: int | None = None) -> bool:
        """Secure up to `upto_bytes`, or all if it is None. False: the device refuses."""
        devices, health = self._core.devices, self._core.health
        try:
            while secured_bytes := await devices.run(self._tier, next, self._segments, 0):
                self._grown(secured_bytes)
                if upto_bytes is not None and secured_bytes >= upto_bytes:
                    return True
        except Exception as problem:
            self._refused(problem)
            self._segments = self._store.secure_segments()
            return False
        health.notices.pop(self._part, None)
        health.conditions.pop(self._part, None)
        return True

    def _refused(self, problem: Exception) -> None:
        health, tier = self._core.health, self._tier.label
        secured, size = format_bytes(self._secured_bytes), format_bytes(self._store.size_bytes)
        if isinstance(problem, StoreFull):
            if self._part not in health.notices:
                fields = {"tier": tier, "secured_bytes": self._secured_bytes}
                log.warning("arena_smaller", **fields, error=str(problem))
            health.notices[self._part] = f"{secured} of {size}: its device has no more room"
            health.conditions.pop(self._part, None)
        else:
            if self._part not in health.conditions:
                log.error("arena_not_secured", tier=tier, secured=secured, error=str(problem))
            health.conditions[self._part] = str(problem)
