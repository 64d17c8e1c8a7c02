"""A start on the files of an earlier one: all whole entries, in their order, and nothing else."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.arena_header import ARENA_HEADER_BYTES, decode_arena_header
from prefixd.proto.index import Listed
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.core.events import TierState
from prefixd.server.runtime import recovery, reindexing
from prefixd.server.runtime.index import IndexWriter
from prefixd.server.runtime.rounds import Slices
from prefixd.tiers import records, rows
from prefixd.tiers.arena_stores import ARENA_FILE
from prefixd.tiers.rows import RECORDS_FILE, ROW_BYTES
from prefixd.tiers.store import Location, RecoveryBatch, Store, StoredEntry
from tests.contract.faulty import Fault, FaultyStore
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import (
    SLAB,
    ManualClock,
    OpenSession,
    Running,
    answer,
    item,
    key,
    payload,
    running,
)
from tests.support.stores import held, record_of, sealed

DATA = payload(1)
SURVIVING = pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)


def crashed(directory: Path) -> Path:
    """A copy of the files that a daemon on `directory` would leave if it were killed now."""
    copy = directory.with_name(directory.name + "-left")
    shutil.copytree(directory / "shm", copy / "shm")
    shutil.copytree(directory / "disk", copy / "disk")
    return copy


async def listed(daemon: Running, tier: Tier) -> list[pb.EntryDetail]:
    """The entries of a tier, next victim first."""
    request = pb.ListEntriesRequest(tier=tier, next_victims=True)
    return list((await answer(daemon.admin.ListEntries(request))).entries)


def put(daemon: Running, tier: Tier, of: Key, generation: int) -> None:
    """A record without an entry, and its bytes, in free room."""
    store, extents = daemon.core.stores[tier], daemon.tables.ledgers[tier].extents
    room = extents.allocate(store.stored_bytes(len(DATA), 0))
    put_at(store, of, generation, room)
    extents.free(room)


def put_at(store: Store, of: Key, generation: int, location: Location) -> None:
    store.apply([sealed(store, record_of(store, of, len(DATA), generation, location), DATA)])


async def fill(session: OpenSession) -> None:
    """Five entries in every tier, not used in the order in which they were saved."""
    for tier in Tier:
        for number in range(5):
            await session.save({key(10 * tier + number): payload(number)}, tier)
        for number in (3, 1, 1):
            await session.restore(key(10 * tier + number))


@pytest.mark.parametrize("how", ["in order", "killed"])
@in_loop
async def test_what_survives_is_what_it_was(tmp_path: Path, how: str) -> None:
    """Asserts the same bytes, the same eviction order and the same numbers of uses."""
    directory = tmp_path / "first"
    directory.mkdir()
    async with running(directory) as daemon:
        await fill(await daemon.open())
        daemon.core._flush()
        before = {tier: await listed(daemon, tier) for tier in Tier}
        # The committer of each tier records usage after the saves of its batch, so the second save
        # from here on comes after the record.
        session = await daemon.open()
        late = [key(number) for number in range(96, 100)]
        for of, tier in zip(late, 2 * (Tier.SHM, Tier.DISK), strict=True):
            await session.save({of: DATA}, tier)
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[Tier.RAM]))
        incarnation = daemon.front.sessions.incarnation
        if how == "killed":
            directory = crashed(directory)
    async with running(directory) as daemon:
        assert daemon.front.sessions.incarnation != incarnation
        assert await listed(daemon, Tier.RAM) == []
        for tier in (Tier.SHM, Tier.DISK):
            after = [one for one in await listed(daemon, tier) if one.key not in late]
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


@pytest.mark.parametrize("hangs", [False, True])
@in_loop
async def test_what_is_found_on_disk_waits_for_a_save_to_shm_and_takes_its_place(
    tmp_path: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is being committed can't be cancelled; once published, it is replaced. Otherwise
    a client that saves the same key again during a recovery would move the entry to a tier that
    survives less. A device that hangs does not delay the recovery of another."""
    committing, go_on = threading.Event(), threading.Event()

    def hold(operation: str) -> None:
        if operation == "apply" and threading.current_thread() is not threading.main_thread():
            committing.set()
            assert go_on.wait(PATIENCE_S)

    wrap = {Tier.SHM: lambda store: FaultyStore(store, on_call=hold)}
    async with running(tmp_path, wrap=wrap) as daemon:
        core, session = daemon.core, await daemon.open()
        shm = core.stores[Tier.SHM]
        assert isinstance(shm, FaultyStore)
        shm.arm(Fault.WRITE_ERROR)  # so that its thread commits it again, which the test holds up
        saving = asyncio.ensure_future(session.save({key(1): DATA}, Tier.SHM))
        await asyncio.to_thread(committing.wait, PATIENCE_S)
        store = core.stores[Tier.DISK]
        room = daemon.tables.ledgers[Tier.DISK].extents.allocate(store.stored_bytes(len(DATA), 0))
        put_at(store, key(1), 77, room)
        daemon.tables.ledgers[Tier.DISK].extents.free(room)
        record = next(record for batch in store.scan() for record in batch)
        found = RecoveryBatch([StoredEntry(record, 1, 0)], [], 0)
        adopting = asyncio.ensure_future(recovery._adopt(core, Tier.DISK, found, Slices()))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not adopting.done()
        assert key(1) not in daemon.tables.entries
        if hangs:
            state = dict.fromkeys(Tier, TierState.SERVING) | {Tier.SHM: TierState.HUNG}
            monkeypatch.setattr(core.devices, "state", state.__getitem__)
            await adopting
        go_on.set()
        await adopting
        assert await saving == [pb.SAVE_STATUS_SAVED]
        assert daemon.tables.entries[key(1)].tier is (Tier.SHM if hangs else Tier.DISK)
        assert await session.restore(key(1)) == DATA
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
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the entries come in several batches."""
    monkeypatch.setattr(records, "_BATCH_ENTRIES", 2)
    monkeypatch.setattr(recovery, "_ADOPTED_AT_ONCE", 1)
    async with running(tmp_path) as daemon:
        await fill(await daemon.open())
        order = [one.key for one in await listed(daemon, tier)]
    async with running(tmp_path, f"--{tier.label}.max_entries=3") as daemon:
        assert [one.key for one in await listed(daemon, tier)] == order[-3:]
        assert daemon.tables.tier_counters[tier].dropped_at_start == 2
        store = daemon.core.stores[tier]
        await daemon.until(lambda: held(store).keys() == set(order[-3:]))
        await daemon.assert_idle()
    async with running(tmp_path) as daemon:
        assert daemon.tables.tier_counters[tier].dropped_at_start == 0
        await daemon.assert_idle()


@SURVIVING
@in_loop
async def test_a_start_goes_on_in_batches_and_answers_in_between(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BATCH_ENTRIES", 2)
    sizes = []

    class Watched(FaultyStore):
        def recover(self) -> Iterator[RecoveryBatch]:
            for batch in super().recover():
                sizes.append(len(batch.entries))
                yield batch

    async with running(tmp_path) as daemon:
        await fill(await daemon.open())
        before = [one.key for one in await listed(daemon, tier)]
    async with running(tmp_path, wrap={tier: Watched}) as daemon:
        assert sizes == [2, 2, 1]
        assert [one.key for one in await listed(daemon, tier)] == before
        assert daemon.tables.tier_counters[tier].recovered_entries == 5
        await daemon.assert_idle()


@in_loop
async def test_stamps_go_on_behind_those_that_came_back_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    """The system time was set back between two starts."""
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


@SURVIVING
@in_loop
async def test_stamps_begin_above_what_was_recorded_and_has_left(
    tmp_path: Path, tier: Tier
) -> None:
    """The system time was set back: what is saved before a tier is read counts as later than every
    record there may be."""
    late = ManualClock()
    late.forward(1e6)
    async with running(tmp_path, clock=late) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, tier)
        newest = daemon.tables.entries[key(1)].generation
        await daemon.cache.Delete(pb.DeleteRequest(session=session.ref, keys=[key(1)]))
        begun = daemon.tables.stamp_ns
    async with running(tmp_path) as daemon:
        assert daemon.core.clock.now_ns() < newest <= daemon.tables.stamp_ns < begun
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.RAM)
        assert daemon.tables.entries[key(1)].generation > newest
        await daemon.assert_idle()


# ---- what is not whole


@SURVIVING
@in_loop
async def test_a_record_that_was_committed_and_not_published_is_whole(
    tmp_path: Path, tier: Tier
) -> None:
    """Killed between the sync and the answer: the entry may survive, and then it is right."""
    async with running(tmp_path) as daemon:
        put(daemon, tier, key(2), 7)
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
async def test_damaged_bytes_and_damaged_records_are_dropped_and_said_so(tmp_path: Path) -> None:
    """The other entries survive."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2, 3)}, Tier.SHM)
        slab = daemon.tables.entries[key(3)].location[0] // SLAB
    flip(tmp_path / "shm" / RECORDS_FILE, slab * ROW_BYTES + 9)
    arena = tmp_path / "shm" / ARENA_FILE
    flip(arena, arena.read_bytes().index(payload(2)) + 99)
    with capture_logs() as logs:
        async with running(tmp_path) as daemon:
            assert set(daemon.tables.entries) == {key(1)}
            assert len(daemon.core.index) == 1
            assert daemon.tables.tier_counters[Tier.SHM].dropped_at_start == 2
            store = daemon.core.stores[Tier.SHM]
            await daemon.until(lambda: held(store).keys() == {key(1)})
            await daemon.assert_sound()
    dropped = [line for line in logs if line["event"] == "entry_dropped"]
    assert len(dropped) == 2
    assert key(2).hex() in {line["key"] for line in dropped}
    assert any("was saved" in line["why"] for line in dropped)


def flip(file: Path, offset_bytes: int) -> None:
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(offset_bytes)
        (byte,) = opened.read(1)
        opened.seek(offset_bytes)
        opened.write(bytes([byte ^ 1]))


@in_loop
async def test_a_key_in_two_tiers_comes_back_once(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.SHM)
        put(daemon, Tier.DISK, key(1), 1)
    async with running(tmp_path) as daemon:
        assert daemon.tables.entries[key(1)].tier is Tier.DISK
        assert daemon.tables.tier_counters[Tier.DISK].dropped_at_start == 0
        await daemon.until(lambda: not held(daemon.core.stores[Tier.SHM]))
        session = await daemon.open()
        assert await session.restore(key(1)) == DATA
        await daemon.assert_idle()


@in_loop
async def test_an_index_that_cannot_be_filled_is_handed_to_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon serves nevertheless."""
    monkeypatch.setattr(reindexing, "FIRST_S", 3_600.0)

    class FailingIndex(IndexWriter):
        def put_all(self, entries: Sequence[Listed]) -> None:  # noqa: ARG002  # of every index
            raise OSError("no room, on purpose")

    async with running(tmp_path) as daemon:
        await (await daemon.open()).save({key(1): DATA}, Tier.SHM)
    async with running(tmp_path, make_index=FailingIndex) as daemon:
        assert daemon.core.index.revoked
        assert "no room, on purpose" in daemon.core.unhealthy()["index"]
        session = await daemon.open()
        assert await session.restore(key(1)) == DATA
        assert daemon.core.state.check() == []


# ---- readers of before


@SURVIVING
@in_loop
async def test_an_arena_shows_whose_it_is_before_anything_is_written_to_it(
    tmp_path: Path, tier: Tier
) -> None:
    """It shows a reader of an earlier start that the bytes may belong to another entry. So entries
    that were claimed before need not stay pinned."""
    file = tmp_path / tier.label / ARENA_FILE
    recovered: list[bytes] = []

    class Watched(FaultyStore):
        def set_incarnation(self, incarnation: bytes) -> None:
            recovered.append(incarnation_of(file))
            super().set_incarnation(incarnation)

    async with running(tmp_path) as daemon:
        first = daemon.front.sessions.incarnation
        session = await daemon.open()
        await session.save({key(1): DATA}, tier)
        await session.claim([key(1)])
        assert incarnation_of(file) == first
    async with running(tmp_path, wrap={tier: Watched}) as daemon:
        assert recovered == [first]
        assert incarnation_of(file) == daemon.front.sessions.incarnation != first
        assert not daemon.tables.claims
        assert daemon.tables.entries[key(1)].pins == 0
        await daemon.assert_idle()


def incarnation_of(file: Path) -> bytes:
    with file.open("rb") as opened:
        return decode_arena_header(opened.read(ARENA_HEADER_BYTES))[0]


# ---- orphans


@in_loop
async def test_orphans_are_swept_out_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_SLABS", 8)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(10 * tier + n): payload(n) for n in range(3)}, tier)
        entries = dict(daemon.tables.entries)
        for tier in (Tier.SHM, Tier.DISK):
            put(daemon, tier, key(100 + tier), 7 + tier)
        daemon.core.index.put(orphan_row(daemon, 200))
        swept = await answer(daemon.admin.Gc(pb.GcRequest()))
        assert (swept.orphan_records, swept.orphan_index_rows) == (2, 1)
        assert daemon.tables.entries == entries
        for tier in (Tier.SHM, Tier.DISK):
            owned = {of: entry.generation for of, entry in entries.items() if entry.tier is tier}
            await daemon.until(lambda store=daemon.core.stores[tier], o=owned: held(store) == o)
        swept = await answer(daemon.admin.Gc(pb.GcRequest()))
        assert (swept.orphan_records, swept.orphan_index_rows) == (0, 0)
        for tier in Tier:
            for number in range(3):
                assert await session.restore(key(10 * tier + number)) == payload(number)
        await daemon.assert_idle()


def orphan_row(daemon: Running, number: int) -> Listed:
    return record_of(daemon.core.stores[Tier.RAM], key(number), 1, 1, (0, SLAB))


@in_loop
async def test_a_save_that_is_being_committed_is_no_orphan(tmp_path: Path) -> None:
    """Its record is written, and the daemon has no result yet."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        core, store = daemon.core, daemon.core.stores[Tier.DISK]
        (token,) = await session.granted([item(key(1), DATA)], Tier.DISK)
        entry = daemon.tables.reservations[token].entry
        put_at(store, key(1), entry.generation, entry.location)
        assert await recovery.collect_garbage(core) == (0, 0)
        store.apply([])
        assert held(store) == {key(1): entry.generation}
        await session.close()
