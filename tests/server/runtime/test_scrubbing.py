"""Reading back in the background: all entries, at the configured rate, delaying no call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime.scrubbing import (
    _FAILED_S,
    _GIVE_WAY_S,
    MIN_PASS_S,
    SCRUBBED,
    Scrubber,
    ScrubPace,
)
from prefixd.server.runtime.verification import ENTRY_BYTES
from tests.contract.faulty import Fault, FaultyStore
from tests.support.columns import Item
from tests.support.event_loop import in_loop
from tests.support.running import ManualClock, Running, answer, key, part, payload, running

MIB = 2**20


class Time:
    """The sleeps of the scrubber, which are recorded and end when the test says so."""

    def __init__(self, daemon: Running) -> None:
        clock = daemon.core.clock
        assert isinstance(clock, ManualClock)
        self._clock = clock
        self.slept_s: list[float] = []
        self._may_go_on = asyncio.Event()
        self._asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self._asleep.set()
        await self._may_go_on.wait()
        self._may_go_on.clear()
        self._clock.forward_monotonic(seconds)

    async def asleep(self) -> float:
        """Wait until the scrubber sleeps. Returns for how long."""
        await self._asleep.wait()
        return self.slept_s[-1]

    async def pass_by(self) -> float:
        """End this sleep, and wait for the next."""
        self._asleep.clear()
        self._may_go_on.set()
        return await self.asleep()


@asynccontextmanager
async def scrubbing(
    daemon: Running, tier: Tier, bytes_per_second: int = MIB
) -> AsyncIterator[tuple[Scrubber, Time]]:
    """One tier alone, so that its sleeps are in order."""
    time = Time(daemon)
    others = {t: store for t, store in daemon.core.stores.items() if t is not tier}
    for other in others:
        del daemon.core.stores[other]
    scrubber = Scrubber(daemon.core, bytes_per_second, time.sleep)
    daemon.core.stores.update(others)
    scrubber.start()
    try:
        yield scrubber, time
    finally:
        await scrubber.close()


async def whole_pass(time: Time) -> None:
    """Go on to the pause between two passes."""
    while await time.pass_by() < MIN_PASS_S / 2:
        pass


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


@pytest.mark.parametrize("tier", SCRUBBED, ids=lambda tier: tier.label)
@in_loop
async def test_a_pass_reads_everything_and_drops_what_is_damaged(
    tmp_path: Path, tier: Tier, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        keys = [key(number) for number in range(50)]
        await session.save({one: payload(number) for number, one in enumerate(keys)}, tier)
        await session.save({key(99): payload(99)}, Tier.RAM)
        bad = daemon.tables.entries[keys[7]]
        (arena,) = (tmp_path / tier.label).glob("arena")
        arena.chmod(0o600)
        flip_a_bit(arena, bad.location[0] + 100)
        async with scrubbing(daemon, tier) as (scrubber, time):
            await time.asleep()
            await whole_pass(time)
            scrub = scrubber.scrubs[tier]
            assert (scrub.entries, scrub.payload_bytes) == (50, 50 * len(payload(0)))
            assert (scrub.damaged_entries, scrub.unreadable_entries) == (1, 0)
            assert (scrub.passes, scrub.progress) == (1, 1.0)
            assert scrub.last_pass_unix_ns == daemon.core.clock.now_ns()
            # The rate, and the pause until the next pass may begin.
            cost_bytes = 50 * (len(payload(0)) + ENTRY_BYTES)
            assert sum(time.slept_s) == pytest.approx(MIN_PASS_S, rel=1e-6)
            assert time.slept_s[-1] == pytest.approx(MIN_PASS_S - cost_bytes / MIB, rel=0.01)
            await whole_pass(time)
            assert (scrub.entries, scrub.passes) == (99, 2)
        assert await daemon.presence(keys[7]) == [pb.PRESENCE_ABSENT]
        assert daemon.tables.tier_counters[tier].corrupt == 1
        assert keys[7].hex() in capsys.readouterr().out
        await daemon.assert_idle()


@in_loop
async def test_a_pass_covers_what_stays_while_everything_else_comes_and_goes(
    tmp_path: Path,
) -> None:
    read: list[bytes] = []

    class Watched(FaultyStore):
        def read(self, entry, offset_bytes, length_bytes):  # type: ignore[no-untyped-def]
            read.append(entry.key)
            return super().read(entry, offset_bytes, length_bytes)

    async with running(tmp_path, wrap={Tier.SHM: Watched}) as daemon:
        session = await daemon.open()
        staying = [key(number) for number in range(40)]
        claim_all = dict.fromkeys(staying, payload(1))
        await session.save(claim_all, Tier.SHM)
        await session.claim(staying)
        async with scrubbing(daemon, Tier.SHM) as (scrubber, time):
            await time.asleep()
            number = 1_000
            while not scrubber.scrubs[Tier.SHM].passes:
                # The tier is full of other entries: each save evicts some of them.
                await session.save(
                    {key(n): payload(n, 4_000) for n in range(number, number + 60)}, Tier.SHM
                )
                number += 60
                await time.pass_by()
            assert scrubber.scrubs[Tier.SHM].damaged_entries == 0
        assert daemon.tables.tier_counters[Tier.SHM].evictions > 0
        assert [read.count(one) for one in staying] == [1] * len(staying)
        assert daemon.tables.ledgers[Tier.SHM].pinned_entries == len(staying), "nothing else"
        await daemon.assert_idle()


@in_loop
async def test_a_store_that_fails_is_no_damage_and_is_left_alone_for_a_while(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, wrap={Tier.DISK: FaultyStore}) as daemon:
        session, store = await daemon.open(), daemon.core.stores[Tier.DISK]
        assert isinstance(store, FaultyStore)
        await session.save({key(1): payload(1)}, Tier.DISK)
        store.arm(Fault.READ_ERROR)
        async with scrubbing(daemon, Tier.DISK) as (scrubber, time):
            assert await time.asleep() == _FAILED_S
            scrub = scrubber.scrubs[Tier.DISK]
            assert (scrub.unreadable_entries, scrub.damaged_entries, scrub.entries) == (1, 0, 0)
            assert daemon.core.unhealthy() == {"disk reads": "a failed read, on purpose"}
            await whole_pass(time)
            await whole_pass(time)
            assert scrub.entries == 1, "the next pass found it good"
        assert daemon.core.unhealthy() == {}
        assert await session.restore(key(1)) == payload(1)
        await daemon.assert_idle()


@in_loop
async def test_it_gives_way_to_saves_and_not_for_ever(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): payload(1)}, Tier.SHM)
        (token,) = await session.granted(
            [Item(key=key(2), payload_bytes=5_000, token_count=1)], Tier.SHM
        )
        saving = daemon.cache.Save()
        first = part(0, payload(2)[:100], last=False)
        await saving.write(pb.SaveRequest(reserved=session.reserved(token), parts=[first]))
        await daemon.until(lambda: daemon.core.writes)
        async with scrubbing(daemon, Tier.SHM) as (scrubber, time):
            await time.asleep()
            assert scrubber.scrubs[Tier.SHM].entries == 1
            await whole_pass(time)
            put_off_s = sum(time.slept_s[:-1]) - (5_000 + ENTRY_BYTES) / MIB
            assert put_off_s == pytest.approx(2 * _GIVE_WAY_S, rel=0.1), "once for each step"
        saving.cancel()
        await daemon.assert_idle()


@in_loop
async def test_a_bug_ends_it_and_is_shown(tmp_path: Path) -> None:
    class Broken(FaultyStore):
        def verify_steps(self, *_args: object) -> Iterator[int]:
            raise ZeroDivisionError

    async with running(tmp_path, wrap={Tier.SHM: Broken}) as daemon:
        session = await daemon.open()
        await session.save({key(1): payload(1)}, Tier.SHM)
        async with scrubbing(daemon, Tier.SHM):
            await daemon.until(daemon.core.unhealthy)
        assert daemon.core.unhealthy() == {"shm scrubber": "it failed: ZeroDivisionError()"}
        assert await session.restore(key(1)) == payload(1)


@in_loop
async def test_it_can_be_switched_off_and_does_not_look_at_ram(tmp_path: Path) -> None:
    async with running(tmp_path, "--server.scrub_rate=0") as daemon:
        assert daemon.front.scrubber.scrubs == {}
        daemon.front.scrubber.start()
        stats = await answer(daemon.admin.Stats(pb.StatsRequest()))
        assert not any(tier.HasField("scrub") for tier in stats.tiers)
    async with running(tmp_path) as daemon:
        assert set(daemon.front.scrubber.scrubs) == {Tier.SHM, Tier.DISK}
        daemon.front.scrubber.scrubs[Tier.DISK].payload_bytes = 7
        stats = await answer(daemon.admin.Stats(pb.StatsRequest()))
        ram, shm, disk = stats.tiers
        assert (ram.HasField("scrub"), shm.HasField("scrub")) == (False, True)
        assert disk.scrub.payload_bytes == 7


def test_the_pace_is_kept_on_average_and_little_is_caught_up() -> None:
    second = 1_000_000_000
    pace = ScrubPace(100)
    assert pace.wait_s(100, 10 * second) == 0, "it begins a second late"
    assert pace.wait_s(50, 10 * second) == 0.5
    assert pace.wait_s(50, 10 * second) == 1.0
    # A device took five seconds: one of them is caught up.
    assert pace.wait_s(100, 16 * second) == 0
    assert pace.wait_s(100, 16 * second) == 1.0
