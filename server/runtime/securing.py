"""Turns the arena of a tier into real memory, or real blocks, off the loop."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from ...proto.units import format_bytes
from ...tiers.store import Store, StoreFull
from ..core.events import ArenaGrown
from .loop import Core

log = structlog.get_logger("prefixd.securing")

#: What a device has no room for is asked for again this often.
SECURE_AGAIN_S: Final = 5.0


class Securing:
    """One arena, segment by segment.

    A device without room is no fault: the tier is as large as what was secured, a
    notice says so, and grows when there is room. An error of the device is a condition.
    """

    def __init__(self, core: Core, store: Store) -> None:
        self._core = core
        self._tier = store.tier
        self._store = store
        self._segments = store.secure_segments()
        self._part = f"{store.tier.label} arena"
        self._secured_bytes = store.secured_bytes
        self._grown(self._secured_bytes)

    def _grown(self, secured_bytes: int) -> None:
        self._secured_bytes = secured_bytes
        self._core.post(ArenaGrown(self._tier, secured_bytes, self._core.clock.now_ns()))

    async def secure_all(self) -> None:
        """Returns when all of it is there: what a device has no room for is asked for again.
        Where another task is at it already, that one does all of it."""
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
        """Secure up to `upto_bytes`, or all if it is None. False: they are not to be had now."""
        loop, executor = asyncio.get_running_loop(), self._core.devices.executor(self._tier)
        health = self._core.health
        try:
            while there_bytes := await loop.run_in_executor(executor, next, self._segments, 0):
                self._grown(there_bytes)
                if upto_bytes is not None and there_bytes >= upto_bytes:
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
        secured, wanted = format_bytes(self._secured_bytes), format_bytes(self._store.size_bytes)
        if isinstance(problem, StoreFull):
            if self._part not in health.notices:
                log.warning(
                    "arena_smaller",
                    tier=tier,
                    secured_bytes=self._secured_bytes,
                    error=str(problem),
                )
            health.notices[self._part] = f"{secured} of {wanted}: its device has no more room"
            health.conditions.pop(self._part, None)
        else:
            if self._part not in health.conditions:
                log.error("arena_not_secured", tier=tier, secured=secured, error=str(problem))
            health.conditions[self._part] = str(problem)
