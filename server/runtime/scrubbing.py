"""Reads stored entries back in the background, slowly, to find damage before a client does.

It makes pass after pass over the shm and disk tiers, each at the configured rate. A pass covers
every entry that is there from its beginning to its end; an entry that is saved meanwhile is covered
by the next pass at the latest. Nothing is pinned, and damaged entries are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import structlog

from ...proto.vocabulary import Tier
from .loop import Core
from .verification import ENTRY_BYTES

log = structlog.get_logger("prefixd.scrubbing")

#: The tiers whose bytes outlive the daemon that wrote them.
SCRUBBED: Final = (Tier.SHM, Tier.DISK)
#: Bytes that are read at once: a part of a millisecond from memory.
_STEP_BYTES: Final = 2**20
#: The shortest time between the beginnings of two passes: a small tier is not read all the time.
MIN_PASS_S: Final = 600.0
#: How long a step is put off at most while saves arrive: every pass comes to its end.
_GIVE_WAY_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.05
#: How much of the delay of a slow device is caught up at most.
_CATCH_UP_NS: Final = 1_000_000_000
#: How long to wait before a store that failed is tried again.
_FAILED_S: Final = 5.0


@dataclass(slots=True)
class Scrub:
    """Statistics of the scrubbing of one tier, since the start of the daemon."""

    entries: int = 0
    payload_bytes: int = 0
    damaged_entries: int = 0
    unreadable_entries: int = 0
    #: completed passes
    passes: int = 0
    #: when the last pass ended; 0: none has
    last_pass_unix_ns: int = 0
    #: the part of the tier that the current pass has covered, from 0 to 1
    progress: float = 0.0


class ScrubPace:
    """Decides when the next bytes may be read, for an average of `bytes_per_second`."""

    def __init__(self, bytes_per_second: int) -> None:
        self.bytes_per_second = bytes_per_second
        self._due_ns = 0

    def wait_s(self, read_bytes: int, now_ns: int) -> float:
        """How long to wait before the next read, now that `read_bytes` were read."""
        due_ns = max(self._due_ns, now_ns - _CATCH_UP_NS)
        self._due_ns = due_ns + read_bytes * 1_000_000_000 // self.bytes_per_second
        return max(0, self._due_ns - now_ns) / 1e9


class Scrubber:
    """Belongs to the event loop. `scrubs` has the statistics of each tier; empty when switched
    off."""

    def __init__(
        self,
        core: Core,
        bytes_per_second: int,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`bytes_per_second`: for each tier, where each entry counts `ENTRY_BYTES` beside its
        payload. 0: nothing is scrubbed."""
        self._core = core
        #: may be changed, but neither from nor to 0
        self.bytes_per_second = bytes_per_second
        self._sleep = sleep
        tiers = [tier for tier in SCRUBBED if tier in core.stores and bytes_per_second]
        self.scrubs: Final[Mapping[Tier, Scrub]] = {tier: Scrub() for tier in tiers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, once the daemon serves."""
        self._tasks = [asyncio.create_task(self._scrub(tier)) for tier in self.scrubs]

    async def close(self) -> None:
        """Stop. A thread ends its current read by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _scrub(self, tier: Tier) -> None:
        clock = self._core.clock
        try:
            while True:
                began_ns = clock.monotonic_ns()
                await self._pass(tier)
                took_s = (clock.monotonic_ns() - began_ns) / 1e9
                await self._sleep(max(0.0, MIN_PASS_S - took_s))
        except Exception as problem:
            # A bug. Everything else goes on, and health shows that this does not.
            log.critical("scrubber_failed", tier=tier.label, exc_info=problem)
            self._core.health.conditions[f"{tier.label} scrubber"] = f"it failed: {problem!r}"

    async def _pass(self, tier: Tier) -> None:
        core, scrub = self._core, self.scrubs[tier]
        pace = ScrubPace(self.bytes_per_second)
        entries = core.state.tables.entries
        async with aclosing(core.verifications.sweep(entries, tier, _STEP_BYTES)) as steps:
            async for swept in steps:
                scrub.progress = swept.share
                failed = swept.count_in(scrub)
                pace.bytes_per_second = self.bytes_per_second
                cost_bytes = swept.read_bytes + ENTRY_BYTES * len(swept.judged)
                wait_s = pace.wait_s(cost_bytes, core.clock.monotonic_ns())
                await self._sleep(max(wait_s, _FAILED_S if failed else 0.0))
                await self._give_way()
        scrub.passes += 1
        scrub.last_pass_unix_ns = core.clock.now_ns()

    async def _give_way(self) -> None:
        waited_s = 0.0
        while self._core.writes and waited_s < _GIVE_WAY_S:
            await self._sleep(_LOOK_AGAIN_S)
            waited_s += _LOOK_AGAIN_S
