"""Resizing the tiers of a running daemon: their memory, their files, and refused sizes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.core.events import TierState
from prefixd.tiers.store import Location, StoreFull
from tests.contract.faulty import FaultyStore
from tests.support.event_loop import in_loop
from tests.support.running import (
    SLAB,
    OpenSession,
    Refused,
    Running,
    answer,
    item,
    key,
    payload,
    running,
)

MIB = 2**20
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


async def resize(daemon: Running, tier: Tier, budget_bytes: int) -> Any:
    request = pb.ResizeRequest(tier=tier, budget_bytes=budget_bytes)
    return await answer(daemon.admin.Resize(request))


async def fill(session: OpenSession, tier: Tier, numbers: range) -> None:
    for number in numbers:
        data = payload(number, 3 * SLAB)
        assert await session.save({key(number): data}, tier) == [pb.SAVE_STATUS_SAVED]


async def stats_of(daemon: Running, tier: Tier) -> pb.TierStats:
    stats = await answer(daemon.admin.Stats(pb.StatsRequest()))
    (found,) = (each for each in stats.tiers if each.tier == tier)
    assert isinstance(found, pb.TierStats)
    return found


@TIERS
@in_loop
async def test_down_and_up_again(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await fill(session, tier, range(120))
        before = await stats_of(daemon, tier)
        small = await resize(daemon, tier, MIB // 2)
        now = await stats_of(daemon, tier)
        assert small.budget_bytes == now.budget_bytes == now.secured_bytes == MIB // 2
        assert small.entries == before.entries - now.entries > 10
        assert now.published_bytes <= now.limit_bytes <= MIB // 2
        assert now.limit_bytes - now.published_bytes < 3 * SLAB, "none too many left"
        await daemon.assert_sound()
        last = [number for number in range(120) if key(number) in daemon.tables.entries]
        assert last == list(range(120 - now.entries, 120)), "the most recent ones stay"
        assert await session.restore(key(119)) == payload(119, 3 * SLAB)
        await fill(session, tier, range(200, 300))
        large = await resize(daemon, tier, MIB)
        assert (large.entries, large.kept_bytes) == (0, 0)
        await fill(session, tier, range(300, 400))
        again = await stats_of(daemon, tier)
        assert (again.budget_bytes, again.limit_bytes) == (MIB, before.limit_bytes)
        assert again.entries >= before.entries
        await daemon.assert_sound()


@in_loop
async def test_the_disk_has_its_room_back_and_memory_is_said_to_stay(tmp_path: Path) -> None:
    async with running(tmp_path, "--disk.budget=4MiB") as daemon:
        session = await daemon.open()
        for tier in Tier:
            await fill(session, tier, range(tier * 1000, tier * 1000 + 70))
        arena = daemon.core.stores[Tier.DISK].arena  # type: ignore[attr-defined]
        before_bytes = os.fstat(arena.fd).st_blocks * 512
        assert (await resize(daemon, Tier.DISK, 2 * MIB)).kept_bytes == 0
        assert before_bytes - os.fstat(arena.fd).st_blocks * 512 >= 2 * MIB - SLAB
        for tier in (Tier.RAM, Tier.SHM):
            kept_bytes = (await resize(daemon, tier, MIB // 2)).kept_bytes
            assert kept_bytes == (await stats_of(daemon, tier)).kept_bytes
            assert MIB // 2 <= kept_bytes < MIB // 2 + 16 * SLAB
        await resize(daemon, Tier.DISK, 4 * MIB)
        assert os.fstat(arena.fd).st_blocks * 512 == before_bytes
        await daemon.assert_sound()


@TIERS
@in_loop
async def test_a_tier_grows_as_far_as_it_was_started_for(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path, f"--{tier.label}.max_budget=3MiB") as daemon:
        session = await daemon.open()
        await resize(daemon, tier, 2 * MIB)
        await daemon.until(lambda: not daemon.core.devices.securing)
        now = await stats_of(daemon, tier)
        assert now.budget_bytes == now.secured_bytes == 2 * MIB
        await fill(session, tier, range(150))
        assert (await stats_of(daemon, tier)).published_bytes > MIB
        with pytest.raises(Refused, match=rf"invalid_size .*3MiB.*{tier.label}\.max_budget"):
            await resize(daemon, tier, 3 * MIB + 64 * SLAB)
        assert (await stats_of(daemon, tier)).budget_bytes == 2 * MIB
        await daemon.assert_sound()
    async with running(tmp_path, f"--{tier.label}.budget=2MiB") as daemon:
        kept = (await stats_of(daemon, tier)).entries
        assert kept == 0 if tier is Tier.RAM else kept > 100
        await daemon.assert_sound()


@in_loop
async def test_what_is_claimed_is_said_and_nothing_changes(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await fill(session, Tier.RAM, range(60))
        await session.claim([key(number) for number in range(10, 60)])
        with pytest.raises(Refused, match=r"limit_reached retry=1.* pin 614400 bytes"):
            await resize(daemon, Tier.RAM, MIB // 2)
        now = await stats_of(daemon, Tier.RAM)
        assert (now.budget_bytes, now.limit_bytes, now.entries) == (MIB, MIB, 60)
        for wrong in (0, 1, SLAB - 1, 2**63):
            with pytest.raises(Refused, match="invalid_size"):
                await resize(daemon, Tier.RAM, wrong)
        with pytest.raises(Refused, match="unknown_tier"):
            await resize(daemon, 7, MIB)  # type: ignore[arg-type]
        assert (await stats_of(daemon, Tier.RAM)).budget_bytes == MIB
        await daemon.assert_sound()


@in_loop
async def test_a_tier_that_does_not_serve_is_not_resized(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        daemon.core.devices.recovering(Tier.SHM, True)
        assert daemon.core.devices.state(Tier.SHM) is TierState.RECOVERING
        with pytest.raises(Refused, match=r"limit_reached .* the shm tier is recovering"):
            await resize(daemon, Tier.SHM, MIB // 2)


@in_loop
async def test_a_device_that_became_full_leaves_the_size_as_it_was(tmp_path: Path) -> None:
    class Full(FaultyStore):
        full = False

        def take_back(self, location: Location) -> None:
            if self.full:
                raise StoreFull("no room to grow into, on purpose")
            super().take_back(location)

    async with running(tmp_path, wrap={Tier.DISK: Full}) as daemon:
        session = await daemon.open()
        await fill(session, Tier.DISK, range(60))
        await resize(daemon, Tier.DISK, MIB // 2)
        store = daemon.core.stores[Tier.DISK]
        assert isinstance(store, Full)
        store.full = True
        with pytest.raises(Refused, match="device_full"):
            await resize(daemon, Tier.DISK, MIB)
        assert (await stats_of(daemon, Tier.DISK)).budget_bytes == MIB // 2
        await daemon.assert_sound()
        store.full = False
        await resize(daemon, Tier.DISK, MIB)
        await daemon.assert_sound()


@in_loop
async def test_one_at_a_time_and_to_its_end_when_its_caller_goes(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await fill(session, Tier.RAM, range(80))
        tokens = await session.granted([item(key(1000), bytes(MIB // 2))])
        resizing = daemon.front.admin.resizing
        first = asyncio.ensure_future(resizing.resize(Tier.RAM, MIB // 4))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="being resized already"):
            await resize(daemon, Tier.RAM, MIB // 2)
        first.cancel()
        await answer(daemon.cache.Cancel(pb.CancelRequest(session=session.ref, tokens=tokens)))
        await daemon.until(lambda: not resizing._busy)
        assert (await stats_of(daemon, Tier.RAM)).budget_bytes == MIB // 4
        await daemon.assert_sound()
