"""What operators see is true, and what they order happens as previewed and is safe."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.lab.workloads import generate
from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.api.admin import AdminService
from prefixd.server.api.admin_views import AdminViews
from prefixd.server.api.recording import Recording
from prefixd.server.api.watching import Watching
from prefixd.tiers.arena_stores import ARENA_FILE
from prefixd.tiers.eviction import POLICIES
from prefixd.tiers.store import Store
from tests.contract.faulty import Fault, FaultyStore
from tests.support.event_loop import in_loop
from tests.support.incoming import Gate
from tests.support.lengths import pairs, times
from tests.support.running import (
    ManualClock,
    OpenSession,
    Refused,
    Running,
    answer,
    item,
    key,
    payload,
    running,
)

DATA = payload(1)
SLAB = 4096
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


def test_the_service_is_what_the_contract_describes() -> None:
    """gRPC would answer an rpc without a method with UNIMPLEMENTED."""
    methods = pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name
    own = vars(AdminService).keys() | vars(AdminViews).keys()
    own |= vars(Watching).keys() | vars(Recording).keys()
    assert {re.sub("(?<!^)(?=[A-Z])", "_", name).lower() for name in methods} <= own


def keys_of(store: Store) -> set[Key]:
    """The keys in the records of a store."""
    return {record.key for batch in store.scan() for record in batch}


async def fill(session: OpenSession, tier: Tier, count: int, start: int = 0) -> list[Key]:
    """Save entries of one slab each (on disk about as much), one by one."""
    keys = [key(number) for number in range(start, start + count)]
    for one in keys:
        assert await session.save({one: bytes(3000)}, tier) == [pb.SAVE_STATUS_SAVED]
    return keys


# ---- what there is


@in_loop
async def test_stats_are_those_of_the_tables(tmp_path: Path) -> None:
    async with running(tmp_path, "--ram.max_entries=100") as daemon:
        session = await daemon.open()
        for tier in Tier:
            await fill(session, tier, 3, start=10 * tier)
        claim = (await session.claim([key(10)])).claim_id
        await session.read(claim)
        await session.granted([item(key(99), DATA)])
        waiting = asyncio.ensure_future(daemon.lookup(key(99), wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)
        daemon.forward(1.5)
        stats = await answer(daemon.admin.Stats(pb.StatsRequest()))
        assert stats.incarnation == daemon.front.sessions.incarnation
        assert stats.uptime_ms == 1500
        assert (stats.sessions, stats.claims, stats.reservations, stats.waiters) == (1, 1, 1, 1)
        assert stats.health == "serving"
        ram, shm, on_disk = stats.tiers
        assert [tier.tier for tier in stats.tiers] == list(Tier)
        assert ram.policy == pb.EVICTION_POLICY_LRU
        assert (ram.max_entries, ram.budget_bytes) == (100, 2**20)
        assert (ram.entries, ram.pinned_entries, ram.payload_bytes) == (3, 1, 9000)
        assert (ram.published_bytes, ram.pinned_bytes) == (3 * SLAB, SLAB)
        assert (ram.reserved_bytes, ram.secured_bytes) == (2 * SLAB, 2**20)
        assert (ram.hits, ram.hit_tokens, ram.saves) == (1, 16, 3)
        assert (ram.saved_bytes, ram.read_bytes) == (9000, 3000)
        assert shm.entries == on_disk.entries == 3
        assert stats.counters["prefixd_claims_total"] == 1
        waiting.cancel()


# ---- what would happen, and does


async def preview(daemon: Running, tier: Tier, payload_bytes: int, entries: int) -> Any:
    request = pb.PreviewRequest(tier=tier, payload_bytes=payload_bytes, entries=entries)
    return await answer(daemon.admin.Preview(request))


@pytest.mark.parametrize(("tier", "max_entries", "policy"), pairs(Tier, [0, 9], sorted(POLICIES)))
@in_loop
async def test_a_preview_is_what_a_save_then_does(
    tmp_path: Path, tier: Tier, max_entries: int, policy: str
) -> None:
    """In every kind of state: empty, full, claimed, hit; for one new entry or several."""
    flags = (
        # The table of records of the disk tier occupies 264 KiB even when it is empty.
        f"--{tier.label}.budget={'340KiB' if tier is Tier.DISK else '64KiB'}",
        f"--{tier.label}.max_entries={max_entries}",
        f"--{tier.label}.policy={policy}",
    )
    chance = random.Random(f"{tier} {max_entries} {policy}")
    seen = set()
    async with running(tmp_path, *flags, tiers=[tier]) as daemon:
        session = await daemon.open()
        claims: list[int] = []
        number = 0
        for _ in range(times(25, 60)):
            payload_bytes = chance.choice([1, 3000, 9000, 40_000, 70_000])
            entries = chance.choice([1, 1, 2, 3])
            before = set(daemon.tables.entries)
            foretold = await preview(daemon, tier, payload_bytes, entries)
            again = await preview(daemon, tier, payload_bytes, entries)
            assert foretold == again
            assert set(daemon.tables.entries) == before, "looking changes nothing"
            data = bytes(payload_bytes)
            keys = [key(number + n) for n in range(entries)]
            number += entries
            results = await session.save(dict.fromkeys(keys, data), tier)
            fits = all(result == pb.SAVE_STATUS_SAVED for result in results)
            assert fits == foretold.admissible
            gone = before - set(daemon.tables.entries)
            if fits:
                assert foretold.evicted_bytes == sum(v.stored_bytes for v in foretold.victims)
                assert not foretold.retryable
                assert gone == {victim.key for victim in foretold.victims}
            elif entries == 1:
                assert not gone
                no_room = results == [pb.SAVE_STATUS_NO_ROOM]
                assert foretold.retryable == no_room
            seen.add((fits, bool(gone), foretold.retryable))
            present = sorted(daemon.tables.entries)
            if present and chance.random() < 0.5:
                claims.append((await session.claim([chance.choice(present)])).claim_id)
            while len(claims) > 3 or (claims and chance.random() < 0.2):
                await session.release(claims.pop(0))
        assert seen >= {(True, False, False), (True, True, False), (False, False, False)}
        await daemon.assert_sound()


@in_loop
async def test_a_preview_counts_what_is_whose(tmp_path: Path) -> None:
    async with running(tmp_path, "--ram.budget=40KiB", tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        keys = await fill(session, Tier.RAM, 6)
        await session.claim(keys[:2])
        await session.granted([item(key(99), bytes(SLAB))])
        seen = await preview(daemon, Tier.RAM, SLAB, 4)
        assert (seen.free_bytes, seen.unpinned_bytes) == (3 * SLAB, 4 * SLAB)
        assert (seen.pinned_bytes, seen.reserved_bytes) == (2 * SLAB, SLAB)
        assert (seen.needed_bytes, seen.evicted_bytes) == (4 * SLAB, SLAB)
        assert "after evicting" in seen.message
        seen = await preview(daemon, Tier.RAM, SLAB, 3)
        assert (seen.admissible, list(seen.victims)) == (True, [])
        seen = await preview(daemon, Tier.RAM, SLAB, 8)
        assert (seen.admissible, seen.retryable) == (False, True)
        assert "retrying may help" in seen.message
        seen = await preview(daemon, Tier.RAM, 40 * 2**10 + 1, 1)
        assert (seen.admissible, seen.retryable) == (False, False)
        assert "can't help" in seen.message


@TIERS
@in_loop
async def test_an_eviction_frees_at_least_what_is_asked_and_little_more(
    tmp_path: Path, tier: Tier
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        keys = await fill(session, tier, 20)
        await session.claim(keys[:5])
        before = daemon.tables.ledgers[tier].published_bytes
        size = daemon.tables.entries[keys[0]].stored_bytes
        for asked in (1, size, 2 * size, 3 * size - 1, 3 * size + 1):
            request = pb.EvictRequest(free_bytes=asked, tiers=[tier])
            (result,) = (await answer(daemon.admin.Evict(request))).results
            assert result.tier == tier
            assert asked <= result.freed_bytes < asked + size
            assert result.entries * size == result.freed_bytes
            before -= result.freed_bytes
            assert daemon.tables.ledgers[tier].published_bytes == before
        everything = pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers)
        results = (await answer(daemon.admin.Evict(everything))).results
        assert [one.tier for one in results] == list(Tier)
        assert set(daemon.tables.entries) == set(keys[:5]), "what is claimed stays"
        await daemon.assert_sound()


# ---- the curve


@in_loop
async def test_the_curve_is_what_the_tier_did_and_never_falls(tmp_path: Path) -> None:
    """A generated trace through a tier of 100 blocks: at the tier's own budget the estimate is what
    was hit, at larger budgets it is more."""
    blocks = 100
    async with running(tmp_path, f"--ram.budget={blocks * SLAB}", tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        for request in generate("multi-turn", requests=120, seed=5):
            chain = [key(block_id) for block_id in request.hash_ids][:30]
            claimed = await session.claim(chain)
            hits = sum(result.claimed for result in claimed.results)
            rest = {one: bytes(SLAB) for one in chain[hits:]}
            if rest:
                await session.save(rest, ancestors=chain[:hits])
            if claimed.claim_id:
                await session.release(claimed.claim_id)
        own = blocks * SLAB
        budgets = [own * percent // 100 for percent in (0, 10, 50, 90, 100, 150, 300, 1000)]
        curve = await answer(
            daemon.admin.Curve(pb.CurveRequest(tier=Tier.RAM, budget_bytes=budgets))
        )
        points = [point.hit_tokens for point in curve.points]
        assert [point.budget_bytes for point in curve.points] == budgets
        assert points == sorted(points)
        assert points[0] == 0
        assert points[-1] > points[4] > 0
        assert curve.budget_bytes == own
        assert curve.hit_tokens == daemon.tables.tier_counters[Tier.RAM].hit_tokens
        assert points[4] == pytest.approx(curve.hit_tokens, rel=0.05)
        assert curve.hit_tokens <= curve.total_tokens == curve.sampled_tokens
        usual = await answer(daemon.admin.Curve(pb.CurveRequest(tier=Tier.RAM)))
        assert [point.budget_bytes * 4 // own for point in usual.points] == [1, 2, 4, 8, 16]
        many = pb.CurveRequest(tier=Tier.RAM, budget_bytes=range(limits.MAX_BATCH_KEYS + 1))
        with pytest.raises(Refused, match="invalid_size"):
            await answer(daemon.admin.Curve(many))
        await daemon.assert_idle()


# ---- damage


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit of the one place in a file that holds `needle`."""
    data = path.read_bytes()
    assert data.count(needle) == 1
    place = data.index(needle)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([needle[0] ^ 1]))


async def spoil(daemon: Running, directory: Path, tier: Tier, number: int) -> None:
    """Flip a bit of a published entry of an arena."""
    if tier is not Tier.RAM:
        flip(directory / tier.label / ARENA_FILE, payload(number))
        return
    arena = daemon.core.stores[tier].arena  # type: ignore[attr-defined]
    start = daemon.tables.entries[key(number)].location[0]
    arena.writable(start + 7, 1)[0] ^= 1


@TIERS
@pytest.mark.parametrize("how", ["inspect", "verify"])
@in_loop
async def test_damage_is_named_dropped_and_told(tmp_path: Path, tier: Tier, how: str) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2)}, tier)
        claim = (await session.claim([key(1), key(2)])).claim_id
        good = await answer(daemon.admin.Inspect(pb.InspectRequest(key=key(1), verify=True)))
        assert (good.verified, good.problem) == (True, "")
        assert good.entry.info.payload_bytes == len(DATA)
        await spoil(daemon, tmp_path, tier, 1)
        unread = await answer(daemon.admin.Inspect(pb.InspectRequest(key=key(1))))
        assert (unread.verified, unread.problem) == (False, "")
        if how == "inspect":
            bad = await answer(daemon.admin.Inspect(pb.InspectRequest(key=key(1), verify=True)))
            assert "CRC32C" in bad.problem
            assert bad.verified
        else:
            found = await daemon.verify()
            (problem,) = found.problems
            assert key(1).hex() in problem
            assert (found.entries, found.damaged_entries) == (2, 1)
        # The claim no longer finds it; the other entries of the claim are unchanged.
        request = pb.ReadRequest(
            session=session.ref,
            claim_id=claim,
            ranges=[pb.ReadRange(index=0), pb.ReadRange(index=1)],
        )
        (response,) = await answer(daemon.cache.Read(request))
        gone, there = response.parts
        assert (gone.status, gone.data) == (pb.READ_STATUS_UNREADABLE, b"")
        assert (there.status, there.data) == (pb.READ_STATUS_OK, payload(2))
        assert await session.release(claim) == [pb.RELEASE_STATUS_LOST]
        with pytest.raises(Refused, match="unknown_entry"):
            await answer(daemon.admin.Inspect(pb.InspectRequest(key=key(1))))
        assert await session.restore(key(2)) == payload(2)
        # The key is free: the right bytes can be saved again.
        assert await session.save({key(1): payload(1)}, tier) == [pb.SAVE_STATUS_SAVED]
        await daemon.assert_sound()


@in_loop
async def test_damage_done_while_the_daemon_was_away_is_found_by_a_check(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2, 3)}, Tier.DISK)
        await session.save({key(n): payload(n) for n in (11, 12)}, Tier.SHM)
    flip(tmp_path / "disk" / ARENA_FILE, payload(2))
    flip(tmp_path / "shm" / ARENA_FILE, payload(11))
    async with running(tmp_path) as daemon:
        # In memory an entry is verified when it is recovered, on disk when it is read.
        assert daemon.tables.tier_counters[Tier.SHM].dropped_at_start == 1
        assert set(daemon.tables.entries) == {key(1), key(2), key(3), key(12)}
        found = await daemon.verify()
        (problem,) = found.problems
        assert key(2).hex() in problem
        assert found.payload_bytes == 4 * len(DATA)
        assert set(daemon.tables.entries) == {key(1), key(3), key(12)}
        await daemon.assert_sound()
        garbage = await answer(daemon.admin.Gc(pb.GcRequest()))
        assert garbage == pb.GcResponse()


@in_loop
async def test_an_entry_that_is_evicted_during_its_verification_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    """Nor is it called verified: its place holds the bytes of another entry by then."""
    gate = Gate("read")
    flags = {"wrap": {Tier.RAM: gate.wrap}, "tiers": [Tier.RAM]}
    async with running(tmp_path, "--ram.budget=8KiB", **flags) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        inspecting = asyncio.ensure_future(
            answer(daemon.admin.Inspect(pb.InspectRequest(key=key(1), verify=True)))
        )
        verifying = asyncio.ensure_future(daemon.verify())
        await gate.entered()
        await session.save({key(2): payload(2)})
        gate.open()
        seen, found = await inspecting, await verifying
        assert (seen.verified, seen.problem) == (False, "it left while it was read")
        assert seen.entry.key == key(1)
        assert list(found.problems) == []
        assert daemon.tables.tier_counters[Tier.RAM].corrupt == 0
        await daemon.assert_idle()


@pytest.mark.parametrize("how", ["inspect", "verify"])
@in_loop
async def test_an_entry_that_its_store_cannot_read_stays(tmp_path: Path, how: str) -> None:
    """An error of the device proves nothing about the bytes."""
    async with running(tmp_path, wrap={Tier.DISK: FaultyStore}) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.DISK)
        store = daemon.core.stores[Tier.DISK]
        assert isinstance(store, FaultyStore)
        store.arm(Fault.READ_ERROR)
        if how == "inspect":
            seen = await answer(daemon.admin.Inspect(pb.InspectRequest(key=key(1), verify=True)))
            assert (seen.verified, seen.problem) == (False, "a failed read, on purpose")
        else:
            found = await daemon.verify()
            assert (found.entries, found.unreadable_entries) == (0, 1)
            assert len(found.problems) == 1
        assert daemon.core.unhealthy() == {"disk reads": "a failed read, on purpose"}
        assert await session.restore(key(1)) == DATA
        assert daemon.tables.tier_counters[Tier.DISK].corrupt == 0
        daemon.forward(60)
        await daemon.assert_idle()


# ---- order


@in_loop
async def test_gc_reaps_what_is_expired_and_sweeps_out_what_nobody_owns(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.DISK)
        await session.save({key(2): DATA}, Tier.SHM)
        await session.claim([key(2)], lease_ms=1_000)
        await session.granted([item(key(3), DATA)], ttl_ms=1_000)
        # A record and rows that the core does not know.
        store, index = daemon.core.stores[Tier.DISK], daemon.core.index
        extents = daemon.tables.ledgers[Tier.DISK].extents
        assert extents is not None
        room = extents.allocate(store.stored_bytes(len(DATA), 0))
        record = EntryRecord(
            key=key(9),
            tier=Tier.DISK,
            reason=SaveReason.COLD,
            generation=1,
            created_ns=1,
            content=Content(len(DATA), 1),
            location=room,
        )
        writer = store.writer(record)
        writer.write(DATA)
        writer.seal()
        store.apply([writer])
        extents.free(room)
        for number in (20, 21):
            index.put(replace(record, key=key(number)))
        assert isinstance(daemon.core.clock, ManualClock)
        daemon.core.clock.forward(1)
        swept = await answer(daemon.admin.Gc(pb.GcRequest()))
        assert (swept.expired_claims, swept.expired_reservations) == (1, 1)
        assert (swept.orphan_records, swept.orphan_index_rows) == (1, 2)
        assert len(index) == 2
        # Commits come after the erasure, which is ordered already.
        await session.save({key(4): DATA}, Tier.DISK)
        assert keys_of(store) == {key(1), key(4)}
        await daemon.assert_idle()
        assert await answer(daemon.admin.Gc(pb.GcRequest())) == pb.GcResponse()


@in_loop
async def test_gc_leaves_saves_in_flight_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()

        async def save(number: int) -> None:
            assert await session.save({key(number): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]

        async def sweep() -> None:
            for _ in range(10):
                swept = await answer(daemon.admin.Gc(pb.GcRequest()))
                assert swept.orphan_records == 0

        await asyncio.gather(sweep(), *(save(number) for number in range(30)))
        assert keys_of(daemon.core.stores[Tier.DISK]) == {key(n) for n in range(30)}
        await daemon.assert_idle()


@in_loop
async def test_a_check_names_what_the_index_gets_wrong(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): DATA for n in (1, 2)}, Tier.SHM)
        await session.claim([key(1)])
        index = daemon.core.index
        good, other = (daemon.tables.entries[key(n)] for n in (2, 1))
        index.delete(key(2))
        problems = list((await answer(daemon.admin.Check(pb.CheckRequest()))).problems)
        assert problems == ["the index lacks 1 entries"]
        record = EntryRecord(
            key=key(3),
            tier=Tier.SHM,
            reason=SaveReason.COLD,
            generation=1,
            created_ns=1,
            content=Content(1, 1),
            location=(4096, 4096),
        )
        index.put(record)
        index.put(replace(record, key=other.key))
        problems = list((await answer(daemon.admin.Check(pb.CheckRequest()))).problems)
        assert sorted(problems) == sorted(
            [
                f"the index lists {key(3).hex()}, which is not there",
                f"the index has something else for {other.key.hex()}",
            ]
        )
        index.delete(key(3))
        for entry in (good, other):
            index.put(entry)
        await daemon.assert_sound()
