"""A start after a resize, or with a smaller budget: it takes the files as large as they are, keeps
what fits by the eviction order, and gives the rest of the room back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime import resizing
from prefixd.tiers.arena_stores import DiskStore, RecordedStore
from prefixd.tiers.store import StoreError, StoreFull
from tests.server.runtime.test_resizing import MIB, fill, resize, stats_of
from tests.support.event_loop import in_loop
from tests.support.running import SLAB, Running, key, payload, running

ENTRY_BYTES = 3 * SLAB
#: So many fit into 3 MiB of either tier, and not into 1 MiB.
ENTRIES = 160
RECORDED = pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)


def present(daemon: Running, numbers: range) -> list[int]:
    return [number for number in numbers if key(number) in daemon.tables.entries]


def held_bytes(daemon: Running, tier: Tier) -> int:
    """What the arena occupies of its device."""
    arena: Any = daemon.core.stores[tier].arena  # type: ignore[attr-defined]
    return os.fstat(arena.fd).st_blocks * 512


async def enlarged(directory: Path, tier: Tier, entries: int) -> None:
    """A daemon of 1 MiB whose tier was enlarged to 3 MiB while it ran. It ends without a resize."""
    async with running(directory, f"--{tier.label}.max_budget=3MiB") as daemon:
        session = await daemon.open()
        await fill(session, tier, range(10))
        await resize(daemon, tier, 3 * MIB)
        await daemon.until(lambda: not daemon.core.devices.securing)
        await fill(session, tier, range(10, entries))
        # The first are the most recent ones now.
        claimed = (await session.claim([key(number) for number in range(5)])).claim_id
        await session.release(claimed)
        assert present(daemon, range(entries)) == list(range(entries))


@RECORDED
@in_loop
async def test_what_fits_is_kept_by_the_eviction_order(tmp_path: Path, tier: Tier) -> None:
    await enlarged(tmp_path, tier, ENTRIES)
    with capture_logs() as logs:
        async with running(tmp_path) as daemon:
            now = await stats_of(daemon, tier)
            kept = present(daemon, range(ENTRIES))
            assert now.budget_bytes == MIB
            assert now.published_bytes <= now.limit_bytes <= MIB
            assert now.limit_bytes - now.published_bytes < ENTRY_BYTES, "none too many left"
            assert kept == [*range(5), *range(ENTRIES + 5 - len(kept), ENTRIES)], (
                "the last that were used"
            )
            assert held_bytes(daemon, tier) <= MIB, "the rest is the device's again"
            session = await daemon.open()
            for number in kept:
                assert await session.restore(key(number)) == payload(number, ENTRY_BYTES)
            await fill(session, tier, range(300, 400))
            assert held_bytes(daemon, tier) <= MIB
            await daemon.assert_sound()
    (said,) = (line for line in logs if line["event"] == "tier_was_larger")
    assert (said["kept"], said["evicted"]) == (len(kept), ENTRIES - len(kept))
    assert not [line for line in logs if line["event"] == "entry_dropped"]
    (recovered,) = (
        line for line in logs if line["event"] == "tier_recovered" and line["tier"] == tier.label
    )
    assert (recovered["entries"], recovered["dropped"]) == (ENTRIES, 0)


@RECORDED
@in_loop
async def test_later_starts_keep_the_size_and_all_entries(tmp_path: Path, tier: Tier) -> None:
    await enlarged(tmp_path, tier, ENTRIES)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await fill(session, tier, range(300, 400))
        kept = present(daemon, range(400))
    for _ in range(2):
        with capture_logs() as logs:
            async with running(tmp_path) as daemon:
                assert present(daemon, range(400)) == kept
                assert held_bytes(daemon, tier) <= MIB
                await daemon.assert_sound()
        assert not [line for line in logs if line["event"] == "tier_was_larger"]
    # With the larger budget in the configuration the room comes back.
    async with running(tmp_path, f"--{tier.label}.budget=3MiB") as daemon:
        session = await daemon.open()
        assert present(daemon, range(400)) == kept
        now = await stats_of(daemon, tier)
        assert now.limit_bytes > 2 * MIB
        assert held_bytes(daemon, tier) > 2 * MIB
        await fill(session, tier, range(500, 700))
        assert len(present(daemon, range(700))) > 180
        await daemon.assert_sound()


@RECORDED
@in_loop
async def test_a_tier_without_evictions_only_gives_room_back(tmp_path: Path, tier: Tier) -> None:
    """What is there fits, but not where the file would end."""
    await enlarged(tmp_path, tier, 12)
    with capture_logs() as logs:
        async with running(tmp_path) as daemon:
            assert present(daemon, range(12)) == list(range(12))
            assert held_bytes(daemon, tier) <= MIB
            await daemon.assert_sound()
    assert not [line for line in logs if line["event"] == "tier_was_larger"]


@in_loop
async def test_the_records_of_a_much_larger_tier_do_not_take_the_budget(tmp_path: Path) -> None:
    """They keep their files, which alone are larger than the smallest budget."""
    async with running(tmp_path, "--disk.budget=32MiB") as daemon:
        session = await daemon.open()
        await fill(session, Tier.DISK, range(200))
    async with running(tmp_path) as daemon:
        kept = present(daemon, range(200))
        assert 10 < len(kept) < 200
        assert kept == list(range(200 - len(kept), 200))
        await daemon.assert_sound()


class Killed(BaseException):
    """No handler of the daemon takes it for a failure that it can deal with."""


@RECORDED
@in_loop
async def test_a_start_that_was_killed_in_the_middle_goes_on(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enlarged(tmp_path, tier, ENTRIES)
    shrink = resizing._Resize._ask
    asked = 0

    async def killed(self: Any, budget_bytes: int, arena_bytes: int) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise Killed
        return await shrink(self, budget_bytes, arena_bytes)

    monkeypatch.setattr(resizing, "EVICTED_AT_ONCE", 10)
    monkeypatch.setattr(resizing._Resize, "_ask", killed)
    with pytest.raises(Killed):
        async with running(tmp_path):
            pass
    monkeypatch.setattr(resizing._Resize, "_ask", shrink)
    async with running(tmp_path) as daemon:
        kept = present(daemon, range(ENTRIES))
        assert kept == [*range(5), *range(ENTRIES + 5 - len(kept), ENTRIES)]
        session = await daemon.open()
        for number in kept:
            assert await session.restore(key(number)) == payload(number, ENTRY_BYTES)
        await daemon.assert_sound()


async def copied_with_holes(directory: Path, *flags: str) -> int:
    """A directory with 40 entries on disk, whose arena was copied without its zeros. Returns what
    it occupied before."""
    async with running(directory, *flags) as daemon:
        session = await daemon.open()
        await fill(session, Tier.DISK, range(40))
        blocks = held_bytes(daemon, Tier.DISK)
    arena = directory / "disk" / "arena"
    data, mode = arena.read_bytes(), arena.stat().st_mode
    arena.unlink()
    with arena.open("wb") as file:
        for start in range(0, len(data), SLAB):
            if any(data[start : start + SLAB]):
                file.seek(start)
                file.write(data[start : start + SLAB])
        file.truncate(len(data))
    arena.chmod(mode)
    assert arena.stat().st_blocks * 512 < blocks
    return blocks


@in_loop
async def test_a_start_with_a_smaller_budget_and_no_room_serves_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holes are part of what fits, and their device is full. Nothing is evicted for that."""
    await copied_with_holes(tmp_path, "--disk.budget=3MiB")
    with capture_logs() as logs, monkeypatch.context() as patch:

        def no_room(*_: object) -> None:
            raise StoreFull("no room, on purpose")

        patch.setattr(DiskStore, "take_back", no_room)
        async with running(tmp_path, "--disk.budget=2MiB") as daemon:
            assert "tier_smaller_than_configured" in [line["event"] for line in logs]
            now = await stats_of(daemon, Tier.DISK)
            assert (now.budget_bytes, now.state) == (2 * MIB, pb.TIER_STATE_SERVING)
            assert 0 < now.published_bytes <= now.limit_bytes < MIB
            assert "its device had no room" in daemon.core.notices()["disk room"]
            assert present(daemon, range(40)) == list(range(40))
            session = await daemon.open()
            assert await session.restore(key(39)) == payload(39, ENTRY_BYTES)
            await fill(session, Tier.DISK, range(40, 45))
            await daemon.assert_sound()
            patch.undo()
            await resize(daemon, Tier.DISK, 2 * MIB)
            assert "disk room" not in daemon.core.notices()
            now = await stats_of(daemon, Tier.DISK)
            assert now.limit_bytes > MIB
            await fill(session, Tier.DISK, range(45, 60))
            assert present(daemon, range(40, 60)) == list(range(40, 60))
            await daemon.assert_sound()


@in_loop
async def test_a_copy_with_holes_is_served(tmp_path: Path) -> None:
    """Its entries are whole, and everything else has its blocks before it is used."""
    blocks = await copied_with_holes(tmp_path)
    async with running(tmp_path) as daemon:
        assert held_bytes(daemon, Tier.DISK) == blocks
        session = await daemon.open()
        assert await session.restore(key(39)) == payload(39, ENTRY_BYTES)
        await daemon.assert_sound()


@RECORDED
@in_loop
async def test_claims_that_hold_too_much_are_waited_for(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizing, "FIT_AGAIN_S", 0.01)
    async with running(tmp_path, f"--{tier.label}.budget=3MiB") as daemon:
        session = await daemon.open()
        await fill(session, tier, range(150))
        claim = (await session.claim([key(number) for number in range(120)])).claim_id
        store = daemon.core.stores[tier]
        # As at a start, while whose recovery a client claims.
        with capture_logs() as logs:
            fitting = asyncio.ensure_future(resizing.fit(daemon.core, store, MIB))
            await daemon.until(lambda: "tier_waits" in [line["event"] for line in logs])
            assert "claims" in daemon.core.notices()[f"{tier.label} tier"]
            assert len(present(daemon, range(150))) == 150
            await session.release(claim)
            await fitting
        now = await stats_of(daemon, tier)
        assert (now.budget_bytes, now.published_bytes <= MIB) == (MIB, True)
        (latest,) = present(daemon, range(1))
        assert await session.restore(key(latest)) == payload(latest, ENTRY_BYTES)
        await daemon.assert_sound()


@RECORDED
@in_loop
async def test_an_error_of_the_device_is_a_condition_until_it_is_over(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizing, "FIT_AGAIN_S", 0.01)
    async with running(tmp_path, f"--{tier.label}.budget=3MiB") as daemon:
        core, part = daemon.core, f"{tier.label} tier"
        broken = True

        def find_holes(_: RecordedStore) -> Iterator[tuple[int, int]]:
            if broken:
                raise StoreError("no answer, on purpose")
            return iter(())

        monkeypatch.setattr(RecordedStore, "find_holes", find_holes)
        fitting = asyncio.ensure_future(resizing.fit(core, core.stores[tier], MIB))
        await daemon.until(lambda: part in core.unhealthy())
        assert core.unhealthy()[part] == "no answer, on purpose; it is tried again"
        broken = False
        await fitting
        assert part not in core.unhealthy()
        assert daemon.tables.ledgers[tier].budget_bytes == MIB
        await daemon.assert_sound()


@RECORDED
@in_loop
async def test_a_tier_gets_its_size_after_a_recount(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that recounts its state refuses all questions meanwhile."""
    monkeypatch.setattr(resizing, "FIT_AGAIN_S", 0.01)
    async with running(tmp_path, f"--{tier.label}.budget=3MiB") as daemon:
        core, ledger = daemon.core, daemon.tables.ledgers[tier]
        store = core.stores[tier]
        for call, budget_bytes in ((resizing.fit, MIB), (resizing.enlarge, 3 * MIB)):
            with capture_logs() as logs:
                core.gate.recounting = True
                sizing = asyncio.ensure_future(call(core, store, budget_bytes))
                await daemon.until(lambda: "tier_waits" in [line["event"] for line in logs])
                core.gate.recounting = False
                await sizing
            assert ledger.budget_bytes == budget_bytes
        await daemon.assert_sound()
