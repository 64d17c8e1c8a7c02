"""Pressure: when it begins and ends, what it evicts, and who is informed. The source is fake."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prefixd.proto.vocabulary import Tier
from prefixd.server.core.journal import EvictionCause
from prefixd.server.runtime.pressure import PART, Pressure, Watermarks, check_reading
from tests.support.event_loop import in_loop
from tests.support.running import Running, key, payload, running

MARKS = Watermarks(high=0.9, low=0.8, max_stalled=0.5)
TOTAL = 1_000_000
BLOCK = 4096


class Memory:
    """A source that returns these values, or raises `problem`."""

    def __init__(self) -> None:
        self.used, self.stalled = 0.5, 0.0
        self.problem: BaseException | None = None
        self.asked = 0

    def __call__(self) -> tuple[int, int, float]:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        return round(self.used * TOTAL), TOTAL, self.stalled


async def filled(daemon: Running, *tiers: Tier, entries: int = 60) -> None:
    session = await daemon.open()
    for tier in tiers:
        for number in range(entries):
            of = key(1000 * tier + number)
            assert await session.save({of: payload(number, BLOCK)}, tier) == [1]


def entries(daemon: Running, tier: Tier) -> int:
    count: int = daemon.tables.ledgers[tier].entries
    return count


@in_loop
async def test_it_evicts_down_to_the_low_watermark_once(tmp_path: Path) -> None:
    async with running(tmp_path, "--disk.budget=0") as daemon:
        await filled(daemon, Tier.RAM, Tier.SHM)
        memory = Memory()
        pressure = Pressure(daemon.core, memory, MARKS, [Tier.RAM, Tier.SHM])
        await pressure.look()
        memory.used = 0.89
        await pressure.look()
        assert (pressure.under, entries(daemon, Tier.RAM)) == (False, 60)

        memory.used = 0.9
        await pressure.look()
        # 100,000 bytes are 25 blocks, not all of the last.
        assert (pressure.under, entries(daemon, Tier.RAM)) == (True, 35)
        await pressure.look()
        memory.used = 0.85
        await pressure.look()
        assert (pressure.under, entries(daemon, Tier.RAM)) == (True, 35), "more is of no use"
        memory.used = 0.91
        await pressure.look()
        assert entries(daemon, Tier.RAM) == 33, "what is more than before"

        memory.used = 0.8
        await pressure.look()
        assert not pressure.under
        assert entries(daemon, Tier.SHM) == 60
        counts = pressure.counts()
        assert (counts.under, counts.episodes, counts.evicted_entries) == (False, 1, 27)
        assert counts.freed_bytes == 27 * BLOCK
        ages = daemon.tables.eviction_ages[Tier.RAM, EvictionCause.PRESSURE]
        assert sum(ages.counts) == 27
        await daemon.assert_idle()


@in_loop
async def test_what_one_tier_does_not_have_the_next_one_evicts(tmp_path: Path) -> None:
    async with running(tmp_path, "--disk.budget=0") as daemon:
        await filled(daemon, Tier.RAM, entries=10)
        await filled(daemon, Tier.SHM)
        pinning = await daemon.open()
        held = await pinning.claim([key(1000 * Tier.RAM + n) for n in range(4)])
        memory = Memory()
        memory.used = 1.0
        # A tier that does not exist is skipped.
        await Pressure(daemon.core, memory, MARKS, [Tier.DISK, Tier.RAM, Tier.SHM]).look()
        assert entries(daemon, Tier.RAM) == 4, "what is claimed stays"
        # 200,000 bytes are 49 blocks.
        assert entries(daemon, Tier.SHM) == 60 - (49 - 6)
        await pinning.release(held.claim_id)
        await daemon.assert_idle()


@in_loop
async def test_waiting_for_memory_is_pressure_wherever_the_watermark_is(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        await filled(daemon, Tier.RAM)
        memory = Memory()
        memory.stalled = 0.5
        pressure = Pressure(daemon.core, memory, MARKS, [Tier.RAM])
        await pressure.look()
        assert (pressure.under, entries(daemon, Tier.RAM)) == (True, 35)
        memory.stalled = 0.49
        await pressure.look()
        assert not pressure.under


@in_loop
async def test_a_change_is_one_line_and_a_notice(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        memory, relieved = Memory(), []

        def fails() -> None:
            relieved.append("fails")
            raise OSError("no")

        relieve = (fails, lambda: relieved.append("works"))
        pressure = Pressure(daemon.core, memory, MARKS, [Tier.RAM], relieve=relieve)
        with capture_logs() as logs:
            for memory.used in (0.5, 0.95, 0.96, 0.93, 0.7, 0.6):
                await pressure.look()
                short = "memory is short" in daemon.core.notices().get(PART, "")
                assert short is pressure.under
        said = [line["event"] for line in logs if line["event"].startswith("pressure_")]
        assert said == ["pressure_began", "pressure_not_relieved", "pressure_ended"]
        assert relieved == ["fails", "works"]
        assert daemon.core.unhealthy() == {}, "the daemon serves"


@in_loop
async def test_every_session_hears_it_with_its_heartbeat(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        memory = Memory()
        pressure = Pressure(daemon.core, memory, MARKS, [])
        daemon.front.sessions.under_pressure = lambda: pressure.under
        session = await daemon.open()
        told = []
        for sequence, memory.used in enumerate((0.5, 0.95, 0.5), start=1):
            await pressure.look()
            await session.send(heartbeat={"sequence": sequence})
            told.append((await session.event()).heartbeat_ack.under_pressure)
        assert told == [False, True, False]


@in_loop
async def test_every_session_hears_of_a_change_at_once(tmp_path: Path) -> None:
    """Idle clients send few heartbeats."""
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        memory = Memory()
        pressure = Pressure(daemon.core, memory, MARKS, [])
        daemon.front.sessions.under_pressure = lambda: pressure.under
        pressure.when_changed = daemon.front.sessions.tell_pressure
        opened = [await daemon.open(f"client {number}") for number in range(20)]
        for memory.used in (0.5, 0.95, 0.96, 0.5, 0.5):
            await pressure.look()
        for session in opened:
            events = [(await session.event()).heartbeat_ack for _ in range(2)]
            assert [(ack.sequence, ack.under_pressure) for ack in events] == [(0, True), (0, False)]


@in_loop
async def test_a_source_that_fails_is_no_pressure(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        memory = Memory()
        pressure = Pressure(daemon.core, memory, MARKS, [Tier.RAM])
        memory.used = 0.95
        await pressure.look()
        assert pressure.under
        with capture_logs() as logs:
            for memory.problem in (OSError("gone"), OSError("gone"), StopIteration()):
                await pressure.look()
        assert not pressure.under
        failed = [line for line in logs if line["event"] == "pressure_source_failed"]
        assert [line["problem"] for line in failed] == ["gone", "StopIteration()"]
        assert pressure.counts().source_failures == 3
        assert "its source fails" in daemon.core.notices()[PART]
        memory.problem, memory.used = None, 0.5
        await pressure.look()
        assert PART not in daemon.core.notices()


@in_loop
async def test_a_source_that_hangs_stops_nobody_and_is_asked_once(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        asked, goes_on = [], threading.Event()

        def hangs() -> tuple[int, int, float]:
            asked.append(1)
            goes_on.wait(60)
            return 95, 100, 0.0

        pressure = Pressure(daemon.core, hangs, MARKS, [], answered_within_s=0.01)
        await pressure.look()
        await pressure.look()
        assert (len(asked), pressure.counts().source_failures) == (1, 2)
        assert "no answer within" in daemon.core.notices()[PART]
        assert await daemon.presence(key(1)) == [1], "others are served"
        goes_on.set()
        while not pressure.under:
            await pressure.look()
        assert len(asked) <= 2


@pytest.mark.parametrize(
    "reading",
    [(-1, 10, 0.0), (1, 0, 0.0), (1, 10, 1.1), (1, 10, float("nan")), (float("nan"), 1, 0.0)],
)
def test_what_can_not_be_is_no_reading(reading: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="can't be"):
        check_reading(reading)
