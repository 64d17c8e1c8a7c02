"""Memory pressure: watches a source, makes room, and has the sessions told.

A *source* says how much memory is used, how much there is, and for which part of the last seconds
some process waited for memory. From the high watermark on, or when waits are as long as configured,
the machine is *under pressure*, until it is back at the low one. While it is,

- sessions hear so with each heartbeat's answer, so that an engine can save what it can do without
  (`evict` saves) and free memory of its own,
- the configured tiers evict as many bytes as the machine is above the low watermark, once: what
  that does not help is not helped by more of it. If the pressure grows, they evict what is more,
- staging memory that no save uses and free heap go back to the machine.

What a ram or shm tier evicts stays memory of the daemon (see `resizing`): it is room for the saves
of the engines, which are what gives memory back. The slabs of the disk tier are a file.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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

log = structlog.get_logger("prefixd.pressure")

#: Used bytes, bytes in all, and the part of the last seconds in which somebody waited for memory.
Source: TypeAlias = Callable[[], tuple[int, int, float]]

#: In the notices, and the name of its thread.
PART: Final = "pressure"


@dataclass(frozen=True, slots=True)
class Watermarks:
    """From when on, and until when. `high` and `low`: parts of the memory that there is."""

    high: float
    low: float
    #: part of the time that somebody waits for memory
    max_stalled: float


class PressureCounts(NamedTuple):
    """For metrics: what is, and what was since the start."""

    under: bool
    used_ratio: float
    stalled_ratio: float
    episodes: int
    evicted_entries: int
    freed_bytes: int
    source_failures: int


class Pressure:
    """Owned by the event loop. `tiers` evict in this order. `relieve`: what else gives memory back,
    called once an episode. `answered_within_s`: a source that takes longer has failed; it is not
    asked again before it has answered."""

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
        #: the highest part used since this episode began, and what was evicted for it
        self._peak = 0.0
        self._freed_bytes = 0
        self._asked: asyncio.Future[tuple[int, int, float]] | None = None
        self._counts = PressureCounts(False, 0.0, 0.0, 0, 0, 0, 0)

    def counts(self) -> PressureCounts:
        """On any thread."""
        return self._counts

    async def watch(self, interval_s: float) -> None:
        """Look again and again, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(interval_s)

    async def look(self) -> None:
        """One reading, and what comes of it. A source that fails says nothing: no pressure."""
        try:
            used_bytes, total_bytes, stalled = await self._read()
        except Exception as problem:
            self._failed(problem)
            return
        used = used_bytes / total_bytes
        marks = self._watermarks
        self._note(used_ratio=used, stalled_ratio=stalled)
        stalls = stalled >= marks.max_stalled
        if not self.under and (used >= marks.high or stalls):
            self._begin(used_bytes, total_bytes, stalled)
        elif self.under and used <= marks.low and not stalls:
            self._end(f"{used:.1%} of the memory in use")
        elif not self.under:
            self._core.health.notices.pop(PART, None)  # the source answers again
        if self.under:
            # Processes that wait for memory have too little of it, wherever the watermark is.
            self._peak = max(self._peak, used, marks.high if stalls else 0.0)
            await self._evict(round((self._peak - marks.low) * total_bytes) - self._freed_bytes)

    async def _read(self) -> tuple[int, int, float]:
        """Raises whatever the source raises, ValueError for what can't be, TimeoutError."""
        if self._asked is None:
            self._asked = _on_a_thread(self._source)
        try:
            reading = await asyncio.wait_for(
                asyncio.shield(self._asked), timeout=self._answered_within_s
            )
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._answered_within_s:g} s") from None
        finally:
            if self._asked.done():
                self._asked = None
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

    async def _evict(self, owed_bytes: int) -> None:
        for tier in self._tiers:
            if owed_bytes <= 0:
                return
            if self._core.devices.state(tier) is not TierState.SERVING:
                continue
            try:
                entries, freed = await evict(self._core, tier, owed_bytes, EvictionCause.PRESSURE)
            except PrefixdError as problem:  # it stops
                log.debug("pressure_not_evicted", tier=tier.label, problem=str(problem))
                return
            owed_bytes -= freed
            self._freed_bytes += freed
            self._note(
                evicted_entries=self._counts.evicted_entries + entries,
                freed_bytes=self._counts.freed_bytes + freed,
            )

    def _note(self, **changes: float) -> None:
        self._counts = self._counts._replace(**changes)  # type: ignore[arg-type]


def check_reading(reading: tuple[int, int, float]) -> tuple[int, int, float]:
    """Returns the reading, if it is a possible one. Raises ValueError, TypeError."""
    used_bytes, total_bytes, stalled = reading
    # Written so that nan is refused, too.
    if not (used_bytes >= 0 and total_bytes > 0 and 0 <= stalled <= 1):
        raise ValueError(f"{used_bytes} of {total_bytes} bytes, stalled {stalled}: that can't be")
    return used_bytes, total_bytes, stalled


def _on_a_thread(source: Source) -> asyncio.Future[tuple[int, int, float]]:
    """A thread of its own, which keeps no process: a source may hang."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[tuple[int, int, float]] = loop.create_future()

    def tell(reading: tuple[int, int, float] | None, problem: BaseException | None) -> None:
        if answered.cancelled():
            return
        if reading is None:
            answered.set_exception(problem or ValueError("it says nothing"))
            answered.exception()  # taken, or asyncio would log it
        else:
            answered.set_result(reading)

    def run() -> None:
        reading, problem = None, None
        try:
            reading = source()
        except BaseException as raised:
            # A StopIteration can't be set on a future.
            problem = RuntimeError(repr(raised)) if not isinstance(raised, Exception) else raised
            if isinstance(problem, StopIteration):
                problem = RuntimeError(repr(raised))
        with suppress(RuntimeError):  # the loop ended first
            loop.call_soon_threadsafe(tell, reading, problem)

    threading.Thread(target=run, name=f"prefixd-{PART}", daemon=True).start()
    return answered
