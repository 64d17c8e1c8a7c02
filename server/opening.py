"""The beginning of each tier: its store is opened, recovers, gets its size, and serves.

A disk may be missing, not mounted, read-only, or give no answer. That is its state at the moment
and no mistake of the configuration, so the daemon starts without the tier, says why in its health,
and tries again until it can be opened. What its records name is recovered then, as at any start.

Only what a person has to decide ends the start: the directory is in use by another daemon, belongs
to another user, or holds files of another layout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from ..proto.errors import DirectoryInUse
from ..proto.vocabulary import Tier
from ..tiers.device import NO_ANSWER, Asking
from ..tiers.store import OtherLayout, Store, StoreError
from . import assembly
from .config.budgets import Plan, TierPlan
from .process import LOCK_NAME, lock_directory
from .runtime.loop import Core
from .runtime.recovery import Recovery
from .runtime.resizing import Securing, enlarge, fit
from .runtime.supervision import on_thread

log = structlog.get_logger("prefixd.opening")

#: How long an attempt may take before its device counts as hung.
_ANSWER_S: Final = 1.0
#: How often a tier that could not be opened is tried again.
AGAIN_S: Final = 5.0
#: The part of an arena that is allocated before its tier serves. The rest follows in the
#: background.
_SECURED_BEFORE_SERVING_BYTES = 256 * 2**20
#: What ends a start. Later it is a condition like any other.
_FOR_A_PERSON: Final = (DirectoryInUse, OtherLayout, PermissionError)


class Opening:
    """Opens the store of one tier, and keeps its directory locked. Belongs to the event loop."""

    def __init__(self, plan: TierPlan, store: Store, address: str, mount: str) -> None:
        assert plan.directory is not None
        self._directory: Final[Path] = plan.directory
        self._store: Final = store
        self._address: Final = address
        self._mount: Final = mount
        self._held = ExitStack()
        self._asking: Asking | None = None
        self._closed = False
        #: why the store could not be opened so far; empty: nothing is known to be wrong
        self.problem: str = plan.problem
        #: called with each `problem`
        self.failed: Callable[[str], None] = lambda _: None

    async def run(self) -> None:
        """Returns when the store is open. Raises what ends a start, if that is found at once."""
        tier = self._store.tier.label
        while True:
            attempt = on_thread(f"{tier} open", self._attempt)
            done, _ = await asyncio.wait([attempt], timeout=_ANSWER_S)
            if not done:
                self._fail(NO_ANSWER)
            try:
                await attempt
            except (StoreError, DirectoryInUse, OSError) as problem:
                if not self.problem and isinstance(problem, _FOR_A_PERSON):
                    raise
                self._fail(str(problem))
            else:
                if self.problem:
                    log.warning("tier_opened", tier=tier)
                self.problem = ""
                return
            await asyncio.sleep(AGAIN_S)

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            log.error("tier_unavailable", tier=self._store.tier.label, problem=problem)
        self.problem = problem
        self.failed(problem)

    def _attempt(self) -> None:
        """On a thread. Another process goes first: this thread might wait for ever, and the daemon
        could not end."""
        self._asking = asking = Asking(self._directory, self._mount, lock_name=LOCK_NAME)
        try:
            answer = None
            while answer is None and not self._closed:
                answer = asking.answer(AGAIN_S)
        finally:
            asking.close()
        if answer or self._closed:
            raise StoreError(answer or "the daemon stops")
        with ExitStack() as held:
            held.enter_context(lock_directory(self._directory, self._address))
            self._store.open()
            held.callback(self._store.close)
            self._held = held.pop_all()

    def close(self) -> None:
        """Close the store, and unlock its directory. Idempotent."""
        self._closed = True
        if self._asking is not None:
            self._asking.end()  # its thread closes it, which may be reading its answer
        self._held.close()


def begin_tiers(
    core: Core,
    plan: Plan,
    incarnation: bytes,
    openings: Mapping[Tier, tuple[Opening, asyncio.Task[None]]] | None = None,
) -> list[asyncio.Task[None]]:
    """Let every tier recover, allocate memory and serve; returns tasks that end when it does.
    `openings`: of the stores that may not be open yet, with the tasks that open them. The
    accounting was made without them."""
    recovery = Recovery(core, incarnation)
    openings = openings or {}
    starts = []
    for tier, store in core.stores.items():
        securing = None if tier in openings else Securing(core, store)
        start = _begin_tier(core, plan, recovery, store, securing, openings.get(tier))
        starts.append(core.supervisor.task(f"{tier.label} start", start))
    return starts


async def _begin_tier(
    core: Core,
    plan: Plan,
    recovery: Recovery,
    store: Store,
    securing: Securing | None,
    opening: tuple[Opening, asyncio.Task[None]] | None,
) -> None:
    budget_bytes = plan.tiers[store.tier].budget_bytes
    if securing is None:
        assert opening is not None
        if not await _opened(core, store.tier, *opening):
            return
        await enlarge(core, store, budget_bytes)
        core.index_holds(assembly.max_entries(plan, core.stores))
        securing = Securing(core, store)
    await recovery.recover(store)
    await fit(core, store, budget_bytes)
    await securing.secure(_SECURED_BEFORE_SERVING_BYTES)
    await recovery.end(store)
    core.supervisor.task(f"{store.tier.label} arena", securing.secure_all())


async def _opened(core: Core, tier: Tier, opening: Opening, task: asyncio.Task[None]) -> bool:
    """Wait until the store is open. False: the daemon can't go on with what was found."""
    opening.failed = partial(core.devices.unavailable, tier)
    if opening.problem:
        opening.failed(opening.problem)
    try:
        await task
    except _FOR_A_PERSON as problem:
        core.give_up(str(problem))
        return False
    core.devices.unavailable(tier, "")
    return True
