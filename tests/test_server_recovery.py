"""A start on what an earlier one left: everything that is whole, in its order, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.effects import IndexPut
from prefixd.server.index import Index, IndexChange, IndexFailed
from prefixd.server.verifying import head_of
from prefixd.tiers.shm import ARENA_FILE

from .running import (
    CLAIM_LEASE_MS,
    ManualClock,
    OpenSession,
    Running,
    answer,
    in_loop,
    item,
    key,
    payload,
    running,
)

DATA = payload(1)
SURVIVING = pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)


def crashed(directory: Path) -> Path:
    """What a daemon that runs on `directory` would leave if it were killed now: its files."""
    copy = directory.with_name(directory.name + "-left")
    shutil.copytree(directory / "shm", copy / "shm")
    shutil.copytree(directory / "disk", copy / "disk")
    return copy


async def listed(daemon: Running, tier: Tier) -> list[pb.EntryDetail]:
    """The entries of a tier, next victim first."""
    return list((await answer(daemon.admin.ListEntries(pb.ListEntriesRequest(tier=tier)))).entries)


async def fill(session: OpenSession) -> None:
    """Five entries in every tier, used in another order than they were saved in."""
    for tier in Tier:
        for number in range(5):
            await session.save({key(10 * tier + number): payload(number)}, tier)
        for number in (3, 1, 1):
            await session.restore(key(10 * tier + number))


@pytest.mark.parametrize("how", ["in order", "killed"])
@in_loop
async def test_what_survives_is_what_it_was(tmp_path: Path, how: str) -> None:
    """The same bytes, in the same order of eviction, as often used."""
    directory = tmp_path / "first"
    directory.mkdir()
    async with running(directory) as daemon:
        await fill(await daemon.open())
        daemon.core._flush()
        before = {tier: await listed(daemon, tier) for tier in Tier}
        # The disk's use is recorded by its committer; the next save is behind it.
        session = await daemon.open()
        await session.save({key(99): DATA}, Tier.DISK)
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[Tier.RAM]))
        incarnation = daemon.config.incarnation
        if how == "killed":
            directory = crashed(directory)
    async with running(directory) as daemon:
        assert daemon.config.incarnation != incarnation
        assert await listed(daemon, Tier.RAM) == []
        for tier in (Tier.SHM, Tier.DISK):
            after = [one for one in await listed(daemon, tier) if one.key != key(99)]
            assert [one.key for one in after] == [one.key for one in before[tier]]
            assert [one.info for one in after] == [one.info for one in before[tier]]
            assert [one.hits for one in after] == [one.hits for one in before[tier]]
            counters = daemon.tables.tier_counters[tier]
            assert counters.recovered_entries == len(await listed(daemon, tier))
            assert counters.dropped_at_start == 0
        session = await daemon.open()
        for tier in (Tier.SHM, Tier.DISK):
            for number in range(5):
                assert await session.restore(key(10 * tier + number)) == payload(number)
        await daemon.assert_idle()


@in_loop
async def test_the_start_says_what_came_back(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        await fill(await daemon.open())
    with capture_logs() as logs:
        async with running(tmp_path) as daemon:
            counters = daemon.tables.tier_counters
    said = {line["tier"]: line for line in logs if line["event"] == "tier_recovered"}
    length = sum(len(payload(number)) for number in range(5))
    for tier, entries in ((Tier.RAM, 0), (Tier.SHM, 5), (Tier.DISK, 5)):
        line = said[tier.label]
        assert (line["entries"], line["dropped"]) == (entries, 0)
        assert line["payload_bytes"] == (length if entries else 0)
        assert line["entries"] == counters[tier].recovered_entries
        assert line["payload_bytes"] == counters[tier].recovered_bytes


@SURVIVING
@in_loop
async def test_what_does_not_fit_any_more_goes_least_recent_first(
    tmp_path: Path, tier: Tier
) -> None:
    flags = f"--{tier.label}.max_entries=3"
    async with running(tmp_path) as daemon:
        await fill(await daemon.open())
        order = [one.key for one in await listed(daemon, tier)]
    async with running(tmp_path, flags) as daemon:
        assert [one.key for one in await listed(daemon, tier)] == order[-3:]
        assert daemon.tables.tier_counters[tier].dropped_at_start == 2
        session = await daemon.open()
        await session.save({key(99): DATA}, Tier.DISK)
        store = daemon.core.stores[tier]
        assert store.held_keys() in (None, {*order[-2:], key(99)}, {*order[-3:], key(99)})
        await daemon.assert_idle()
    async with running(tmp_path) as daemon:
        assert daemon.tables.tier_counters[tier].dropped_at_start == 0
        await daemon.assert_idle()


@in_loop
async def test_stamps_go_on_behind_those_that_came_back_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    """Somebody set it back between two starts."""
    late = ManualClock()
    late.forward(1e6)
    async with running(tmp_path, clock=late) as daemon:
        await fill(await daemon.open())
        newest = max(entry.last_used_ns for entry in daemon.tables.entries.values())
    async with running(tmp_path) as daemon:
        assert daemon.core.clock.now_ns() < newest
        session = await daemon.open()
        await session.save({key(99): DATA}, Tier.SHM)
        assert daemon.tables.entries[key(99)].generation > newest
        assert [one.key for one in await listed(daemon, Tier.SHM)][-1] == key(99)
        await daemon.assert_idle()


# ---- what is not whole


@in_loop
async def test_a_record_that_was_committed_and_not_published_is_whole(tmp_path: Path) -> None:
    """Killed between the fsync and the answer: it may come back, and then it is right."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.DISK)
        store, entry = daemon.core.stores[Tier.DISK], daemon.tables.entries[key(1)]
        writer = store.writer(
            replace(head_of(entry), key=key(2), generation=entry.generation + 1), ()
        )
        writer.write(DATA)
        writer.seal()
        store.apply([writer], [])
        assert await daemon.presence(key(2)) == [pb.PRESENCE_ABSENT]
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        assert await session.restore(key(2)) == DATA
        await daemon.assert_idle()


@in_loop
async def test_bytes_that_were_written_and_not_published_are_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "first"
    directory.mkdir()
    async with running(directory) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.SHM)
        call = daemon.cache.Save()
        header = session.header([item(key(2), payload(2))], Tier.SHM)
        half = pb.WritePart(data=payload(2)[:4000])
        await call.write(pb.SaveRequest(header=header, parts=[half]))
        await daemon.until(
            lambda: [w.writer.written_bytes for w in daemon.core.writes.values()] == [4000]
        )
        left = crashed(directory)
        call.cancel()
    async with running(left) as daemon:
        assert set(daemon.tables.entries) == {key(1)}
        session = await daemon.open()
        assert await session.restore(key(1)) == DATA
        assert await session.save({key(2): payload(2)}, Tier.SHM) == [pb.SAVE_STATUS_SAVED]
        await daemon.assert_idle()


@in_loop
async def test_a_damaged_record_is_dropped_and_said_so(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2)}, Tier.SHM)
    arena = tmp_path / "shm" / ARENA_FILE
    data = bytearray(arena.read_bytes())
    data[data.index(payload(2)) + 99] ^= 1
    arena.write_bytes(data)
    with capture_logs() as logs:
        async with running(tmp_path) as daemon:
            assert set(daemon.tables.entries) == {key(1)}
            assert daemon.core.index.keys() == {key(1)}
            assert daemon.tables.tier_counters[Tier.SHM].dropped_at_start == 1
            await daemon.assert_sound()
    (dropped,) = [line for line in logs if line["event"] == "entry_dropped"]
    assert dropped["key"] == key(2).hex()
    assert "checksum" in dropped["why"]


@in_loop
async def test_a_row_is_believed_only_if_its_record_agrees(tmp_path: Path) -> None:
    """Rows for a key that lies elsewhere, for room beyond the arena, and for another's room."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.SHM)
        entry, index = daemon.tables.entries[key(1)], daemon.core.index
        beyond = (2**30, entry.stored_bytes)
        nothing = (2**19, entry.stored_bytes)
        for number, location in ((2, entry.location), (3, beyond), (4, nothing)):
            index.apply([IndexPut(replace(entry, key=key(number), location=location))])
        index._put(key(5), b"no row")
    async with running(tmp_path) as daemon:
        # Of 1 and 2, which claim one place, the record says which it is.
        assert set(daemon.tables.entries) <= {key(1)}
        assert daemon.core.index.keys() == set(daemon.tables.entries)
        assert daemon.tables.tier_counters[Tier.SHM].dropped_at_start >= 3
        await daemon.assert_idle()


@in_loop
async def test_a_key_in_two_tiers_comes_back_once(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.SHM)
        entry, store = daemon.tables.entries[key(1)], daemon.core.stores[Tier.DISK]
        writer = store.writer(replace(head_of(entry), tier=Tier.DISK), ())
        writer.write(DATA)
        writer.seal()
        store.apply([writer], [])
    async with running(tmp_path) as daemon:
        assert daemon.tables.entries[key(1)].tier is Tier.SHM
        assert daemon.tables.tier_counters[Tier.DISK].dropped_at_start == 1
        session = await daemon.open()
        await session.save({key(2): DATA}, Tier.DISK)
        assert daemon.core.stores[Tier.DISK].held_keys() == {key(2)}
        assert await session.restore(key(1)) == DATA
        await daemon.assert_idle()


@in_loop
async def test_an_index_that_cannot_be_brought_up_to_date_is_believed_by_nobody(
    tmp_path: Path,
) -> None:
    """It may list what did not come back. The daemon serves all the same."""

    class FailingIndex(Index):
        fails = True

        def apply(self, changes: Iterable[IndexChange]) -> None:
            if self.fails:
                raise IndexFailed("no room, on purpose")
            super().apply(changes)

    async with running(tmp_path) as daemon:
        await (await daemon.open()).save({key(1): DATA}, Tier.SHM)
    async with running(tmp_path, make_index=FailingIndex) as daemon:
        index = daemon.core.index
        assert isinstance(index, FailingIndex)
        assert index.revoked
        assert daemon.core.ill() == {"index": "no room, on purpose"}
        session = await daemon.open()
        assert await session.restore(key(1)) == DATA
        index.fails = False
        daemon.core._flush()
        assert not index.revoked
        await daemon.assert_idle()


# ---- claims of before


@in_loop
async def test_what_was_claimed_in_shm_stays_where_it_is_until_the_longest_lease_is_over(
    tmp_path: Path,
) -> None:
    """A reader of before may still look at its bytes in place; it has no session any more."""
    directory = tmp_path / "first"
    directory.mkdir()
    small = "--shm.budget=24KiB"
    async with running(directory, small) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2)}, Tier.SHM)
        await session.save({key(9): payload(9)}, Tier.DISK)
        await session.claim([key(1), key(9)], pb.CLAIM_MODE_ANY)
        left = crashed(directory)
    async with running(left, small) as daemon:
        (claim,) = (await answer(daemon.admin.ListClaims(pb.ListClaimsRequest()))).claims
        assert claim.owner == "readers from before the restart"
        assert list(claim.keys) == [key(1)], "only shm outlives a daemon in mapped memory"
        assert claim.lease_left_ms == CLAIM_LEASE_MS
        session = await daemon.open()
        preview = pb.PreviewRequest(tier=Tier.SHM, payload_bytes=20_000)
        assert not (await answer(daemon.admin.Preview(preview))).admissible
        assert await session.save({key(3): payload(3)}, Tier.SHM) == [pb.SAVE_STATUS_SAVED]
        assert await session.save({key(4): payload(4)}, Tier.SHM) == [pb.SAVE_STATUS_SAVED]
        assert set(daemon.tables.entries) >= {key(1)}
        assert await session.restore(key(1)) == payload(1)

        for seconds in (CLAIM_LEASE_MS / 1e3 - 0.001, 0.001):
            assert daemon.tables.entries[key(1)].pins
            daemon.forward(seconds)
        assert not daemon.tables.entries[key(1)].pins
        assert not daemon.tables.claims
        assert (await answer(daemon.admin.Preview(preview))).admissible
        await daemon.assert_idle()
        assert daemon.core.index.claimed() == set()


@in_loop
async def test_claims_that_ended_in_order_are_not_inherited(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.SHM)
        await session.claim([key(1)])
        await session.close()
    async with running(tmp_path) as daemon:
        assert not daemon.tables.claims
        assert not daemon.tables.sessions
        await daemon.assert_idle()


@in_loop
async def test_claims_are_inherited_through_several_crashes(tmp_path: Path) -> None:
    directory = tmp_path / "first"
    directory.mkdir()
    async with running(directory) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.SHM)
        await session.claim([key(1)])
        left = crashed(directory)
    for _ in range(2):
        async with running(left) as daemon:
            assert daemon.tables.entries[key(1)].pins == 1
            left = crashed(left)
    async with running(left) as daemon:
        daemon.forward(CLAIM_LEASE_MS / 1e3)
        await daemon.assert_idle()
        left = crashed(left)
    async with running(left) as daemon:
        assert daemon.tables.entries[key(1)].pins == 0
