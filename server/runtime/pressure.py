"""Memory pressure: watches a source, evicts, and informs the sessions.

A *source* says how much memory is used, how much there is, and for which part of the last seconds
some process waited for memory. From the high watermark on, or when waits are as long as configured,
the machine is *under pressure*, until its use is back at the low watermark. Meanwhile:

- Sessions are told at once, and with each answer to a heartbeat, so that an engine can save what
  it does not need at once (`evict` saves) and free its own memory.
- The configured tiers evict as many bytes as the machine uses above the low watermark, once: if
  that does not help, more of it does not either. If the pressure grows, they evict the difference.
- Idle staging memory and free heap go back to the machine.

The room that a ram or shm tier evicts remains memory of the daemon (see `resizing`): it takes the
saves of the engines, which then free memory. The slabs of the disk tier are a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import structlog

from ...proto.errors import PrefixdError
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from ..core.events import TierState
from ..core.journal import EvictionCause
from .loop import Core
from .resizing import evict
from .supervision import on_thread

log = structlog.get_logger("prefixd.pressure")

#: Used bytes, total bytes, and the part of the last seconds in which a process waited for memory.
Measurement: TypeAlias = tuple[int, int, float]
Source: TypeAlias = Callable[[], Measurement]

#: Its name among the notices, and the name of its thread.
PART: Final = "pressure"


@dataclass(frozen=True, slots=True)
class Watermarks:
    """When pressure begins and ends. `high` and `low`: used parts of the memory."""

    high: float
    low: float
    #: the part of the time in which a process waits for memory
    max_stalled: float


class PressureCounts(NamedTuple):
    """For metrics: the first three are current, the others count since the start."""

    under: bool
    used_ratio: float
    stalled_ratio: float
    episodes: int
    evicted_entries: int
    freed_bytes: int
    source_failures: int


class Pressure:
    """Belongs to the event loop. `tiers` evict in this order. `relieve`: other functions that give
    memory back, called once an episode. `answered_within_s`: a source that takes longer has failed;
    it is not called again before it returns."""

    def __init__(
        self,
        core: Core,
        source: Source,
        watermarks: Watermarks,
        tiers: Sequence[Tier],
        *,
        relieve: Sequence[Callable[[], object]] = (),
        answered_within_s: float = 5.0,
    ) -> None:
        self._core = core
        self._source = source
        self._watermarks = watermarks
        self._tiers = [tier for tier in tiers if tier in core.stores]
        self._relieve = relieve
        self._answered_within_s = answered_within_s
        self.under = False
        #: Called when `under` has changed.
        self.when_changed: Callable[[], Awaitable[None]] = _nothing
        #: the highest used part in this episode, and the bytes that were evicted in it
        self._peak = 0.0
        self._freed_bytes = 0
        self._reading: asyncio.Future[Measurement] | None = None
        self._counts = PressureCounts(False, 0.0, 0.0, 0, 0, 0, 0)

    def counts(self) -> PressureCounts:
        """On any thread."""
        return self._counts

    async def watch(self, interval_s: float) -> None:
        """Look every `interval_s`, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(interval_s)

    async def look(self) -> None:
        """Read the source once, and act on it. A source that fails ends the pressure."""
        before = self.under
        evict_bytes = await self._judge()
        if self.under != before:
            await self.when_changed()
        await self._evict(evict_bytes)

    async def _judge(self) -> int:
        """Returns how many bytes are to be evicted."""
        try:
            used_bytes, total_bytes, stalled = await self._read()
        except Exception as problem:
            self._failed(problem)
            return 0
        used = used_bytes / total_bytes
        marks = self._watermarks
        self._note(used_ratio=used, stalled_ratio=stalled)
        stalls = stalled >= marks.max_stalled
        if not self.under and (used >= marks.high or stalls):
            self._begin(used_bytes, total_bytes, stalled)
        elif self.under and used <= marks.low and not stalls:
            self._end(f"{used:.1%} of the memory in use")
        elif not self.under:
            self._core.health.notices.pop(PART, None)  # the source works again
        if not self.under:
            return 0
        # Processes that wait for memory lack it, even if use is below the watermark.
        self._peak = max(self._peak, used, marks.high if stalls else 0.0)
        return round((self._peak - marks.low) * total_bytes) - self._freed_bytes

    async def _read(self) -> Measurement:
        """Raises what the source raises, ValueError for an impossible reading, TimeoutError."""
        if self._reading is None:
            self._reading = on_thread(PART, self._source)
        try:
            within_s = self._answered_within_s
            reading = await asyncio.wait_for(asyncio.shield(self._reading), within_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {within_s:g} s") from None
        finally:
            if self._reading.done():
                self._reading = None
        return check_reading(reading)

    def _failed(self, problem: Exception) -> None:
        why = str(problem) or type(problem).__name__
        self._note(source_failures=self._counts.source_failures + 1)
        if self.under:
            self._end("its source failed")
        notice = f"its source fails: {why}"
        if self._core.health.notices.get(PART) != notice:
            log.warning("pressure_source_failed", problem=why)
        self._core.health.notices[PART] = notice

    def _begin(self, used_bytes: int, total_bytes: int, stalled: float) -> None:
        self.under, self._peak, self._freed_bytes = True, 0.0, 0
        self._note(under=True, episodes=self._counts.episodes + 1)
        used = f"{format_bytes(used_bytes)} of {format_bytes(total_bytes)}"
        self._core.health.notices[PART] = f"memory is short: {used} in use when it began"
        log.warning(
            "pressure_began",
            used_bytes=used_bytes,
            total_bytes=total_bytes,
            stalled=round(stalled, 3),
        )
        for relieve in self._relieve:
            try:
                relieve()
            except Exception as problem:
                log.warning("pressure_not_relieved", problem=repr(problem))

    def _end(self, why: str) -> None:
        self.under = False
        self._note(under=False)
        self._core.health.notices.pop(PART, None)
        log.info("pressure_ended", why=why, evicted_bytes=self._freed_bytes)

    async def _evict(self, free_bytes: int) -> None:
        for tier in self._tiers:
            if free_bytes <= 0:
                return
            if self._core.devices.state(tier) is not TierState.SERVING:
                continue
            try:
                entries, freed = await evict(self._core, tier, free_bytes, EvictionCause.PRESSURE)
            except PrefixdError as problem:  # the daemon stops
                log.debug("pressure_not_evicted", tier=tier.label, problem=str(problem))
                return
            free_bytes -= freed
            self._freed_bytes += freed
            self._note(
                evicted_entries=self._counts.evicted_entries + entries,
                freed_bytes=self._counts.freed_bytes + freed,
            )

    def _note(self, **changes: float) -> None:
        self._counts = self._counts._replace(**changes)  # type: ignore[arg-type]


async def _nothing() -> None:
    """For a daemon without sessions."""


def check_reading(reading: Measurement) -> Measurement:
    """Returns the reading if it is possible. Raises ValueError, TypeError."""
    used_bytes, total_bytes, stalled = reading
    # In this form nan is refused, too.
    if not (used_bytes >= 0 and total_bytes > 0 and 0 <= stalled <= 1):
        raise ValueError(f"{used_bytes} of {total_bytes} bytes, stalled {stalled}: that can't be")
    return used_bytes, total_bytes, stalled
