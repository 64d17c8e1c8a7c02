"""Reading entries back: right bytes, wrong bytes, and none."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.core.entries import EntryState
from prefixd.server.runtime import incoming, verification
from prefixd.server.runtime.supervision import FAULT_SHOWN_NS
from prefixd.server.runtime.verification import Reading, Verdict
from prefixd.tiers.store import Damaged, Store
from tests.contract.faulty import Fault, FaultyStore
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import key, payload, running

DATA = payload(1)
SAVED = pb.SAVE_STATUS_SAVED

TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


def read_back(store: Store, entry: EntryState) -> Verdict:
    ((_, verdict),) = verification._Batch(store, [entry]).go_on(2**30)[1]
    return verdict


@TIERS
@in_loop
async def test_damage_is_told_from_failure(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path, wrap={tier: FaultyStore}) as daemon:
        session = await daemon.open()
        await session.save({key(1): payload(1, 300_000)}, tier)
        entry = daemon.tables.entries[key(1)]
        store = daemon.core.stores[tier]
        assert isinstance(store, FaultyStore)
        assert read_back(store, entry) == Verdict(Reading.GOOD)
        for fault in (Fault.FLIPPED_READ, Fault.SHORT_READ):
            store.arm(fault)
            verdict = read_back(store, entry)
            assert verdict.reading is Reading.DAMAGED
            assert "was saved" in verdict.why
        store.arm(Fault.READ_ERROR)
        failed = Verdict(Reading.FAILED, "a failed read, on purpose")
        assert read_back(store, entry) == failed
        assert read_back(store, entry) == Verdict(Reading.GOOD), "it was the reading"
        await daemon.assert_idle()


@in_loop
async def test_a_disk_file_that_was_cut_short_is_damage(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(number): payload(number) for number in range(3)}, Tier.DISK)
        entries = sorted(daemon.tables.entries.values(), key=lambda entry: entry.location)
        *whole, cut = entries
        os.truncate(tmp_path / "disk" / "arena", cut.location[0] + 100)
        found = await daemon.verify()
        (problem,) = found.problems
        assert problem.startswith(f"entry {cut.key.hex()}: ")
        assert (found.damaged_entries, found.unreadable_entries) == (1, 0)
        assert await daemon.presence(cut.key) == [pb.PRESENCE_ABSENT]
        assert daemon.tables.tier_counters[Tier.DISK].corrupt == 1
        assert set(daemon.tables.entries) == {entry.key for entry in whole}
        await daemon.assert_sound()


# ---- suspects


class Held:
    """A store whose reads wait for `may_go_on`."""

    def __init__(self) -> None:
        self.reads = 0
        self.may_go_on = threading.Event()

    def wrap(self, store: Store) -> FaultyStore:
        return FaultyStore(store, on_call=self._on_call)

    def _on_call(self, operation: str) -> None:
        if operation == "read":
            self.reads += 1
            assert self.may_go_on.wait(PATIENCE_S)


@in_loop
async def test_a_flood_of_suspects_is_verified_one_by_one_and_delays_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "_INLINE_BYTES", 0)
    monkeypatch.setattr(incoming, "_INLINE_SMALL_BYTES", 0)
    held = Held()
    async with running(tmp_path, wrap={Tier.RAM: held.wrap}) as daemon:
        session, verifications = await daemon.open(), daemon.core.verifications
        keys = [key(number) for number in range(20)]
        await session.save(dict.fromkeys(keys, DATA))
        for _ in range(50):
            await session.send(suspect=pb.Suspect(keys=keys))
        await session.beat()
        assert verifications.pending == 20
        # It needs a worker thread, and gets one.
        assert await session.save({key(100): bytes(300_000)}, Tier.SHM) == [SAVED]
        assert held.reads <= 1
        held.may_go_on.set()
        await daemon.until(lambda: not verifications.pending)
        assert held.reads == 20
        await daemon.assert_idle()


@in_loop
async def test_suspicions_beyond_a_bound_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "MAX_PENDING", 3)
    held = Held()
    async with running(tmp_path, wrap={Tier.RAM: held.wrap}) as daemon:
        session, verifications = await daemon.open(), daemon.core.verifications
        keys = [key(number) for number in range(10)]
        await session.save(dict.fromkeys(keys, DATA))
        await session.send(suspect=pb.Suspect(keys=keys))
        await session.beat()
        assert (verifications.pending, verifications.dropped) == (4, 6)
        held.may_go_on.set()
        await daemon.until(lambda: not verifications.pending)
        await daemon.assert_idle()


@TIERS
@in_loop
async def test_an_entry_that_cannot_be_read_now_stays_and_is_reported(
    tmp_path: Path, tier: Tier
) -> None:
    async with running(tmp_path, wrap={tier: FaultyStore}) as daemon:
        session, store = await daemon.open(), daemon.core.stores[tier]
        await session.save({key(1): DATA}, tier)
        assert isinstance(store, FaultyStore)
        store.arm(Fault.READ_ERROR)
        await session.send(suspect=pb.Suspect(keys=[key(1)]))
        await session.beat()
        await daemon.until(lambda: not daemon.core.verifications.pending)
        assert store.happened == [Fault.READ_ERROR]
        why = "a failed read, on purpose"
        assert daemon.core.unhealthy() == {f"{tier.label} reads": why}
        assert await session.restore(key(1)) == DATA
        assert daemon.tables.tier_counters[tier].corrupt == 0
        # An entry that can't be read back is reported, but not dropped.
        store.arm(Fault.READ_ERROR)
        found = await daemon.verify()
        (problem,) = found.problems
        assert (why in problem, found.unreadable_entries) == (True, 1)
        assert await daemon.presence(key(1)) == [pb.PRESENCE_PRESENT]
        daemon.forward(FAULT_SHOWN_NS / 1e9)
        await daemon.assert_idle()


@in_loop
async def test_an_entry_that_is_evicted_while_it_is_verified_is_no_damage(tmp_path: Path) -> None:
    held = Held()
    flags = (f"--ram.budget={2 * 4096}",)
    async with running(tmp_path, *flags, tiers=[Tier.RAM], wrap={Tier.RAM: held.wrap}) as daemon:
        session, core = await daemon.open(), daemon.core
        await session.save({key(1): DATA})
        entry = daemon.tables.entries[key(1)]
        core.verifications.request(entry)
        await session.save({key(2): payload(2)})
        held.may_go_on.set()
        await daemon.until(lambda: not core.verifications.pending)
        with pytest.raises(Damaged):  # as it found
            core.stores[Tier.RAM].verify(entry, entry.payload_crc32c)
        assert daemon.tables.tier_counters[Tier.RAM].corrupt == 0
        core.verifications.request(entry)
        await daemon.until(lambda: not core.verifications.pending)
        assert daemon.tables.tier_counters[Tier.RAM].corrupt == 0
        await daemon.assert_idle()


@in_loop
async def test_a_stop_waits_for_the_entry_that_is_being_read_and_no_longer(tmp_path: Path) -> None:
    held = Held()
    async with running(tmp_path, wrap={Tier.RAM: held.wrap}) as daemon:
        session = await daemon.open()
        keys = [key(number) for number in range(10)]
        await session.save(dict.fromkeys(keys, DATA))
        await session.send(suspect=pb.Suspect(keys=keys))
        await session.beat()
        closing = asyncio.ensure_future(daemon.core.close())
        await session.beat(2)
        assert not closing.done()
        held.may_go_on.set()
        await closing
        assert held.reads == 1
