"""A store that does not answer blocks only its own threads, and is reported as hung."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import Draining
from prefixd.proto.vocabulary import Tier
from prefixd.server.core.events import TierState
from prefixd.server.runtime import recovery
from prefixd.server.runtime.devices import _THREADS
from prefixd.tiers import records
from prefixd.tiers.store import RecoveryBatch, StoreError
from tests.contract.faulty import Fault, FaultyStore
from tests.support.data_client import data_connection
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import ManualClock, Running, answer, key, payload, running

DATA = payload(1)
BOUND_NS = 10_000_000_000


class Gate:
    """Calls of the disk store wait while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)

    def __call__(self, _operation: str) -> None:
        if not self.open.is_set():
            self.entered.release()
            assert self.open.wait(PATIENCE_S)


@asynccontextmanager
async def with_gate(directory: Path) -> AsyncIterator[tuple[Running, Gate, ManualClock]]:
    gate, clock = Gate(), ManualClock()
    wrap = {Tier.DISK: lambda store: FaultyStore(store, on_call=gate)}
    async with running(directory, wrap=wrap, clock=clock) as daemon:
        try:
            yield daemon, gate, clock
        finally:
            gate.open.set()


@in_loop
async def test_what_is_under_way_for_too_long_closes_its_tier_until_it_ends(
    tmp_path: Path,
) -> None:
    async with with_gate(tmp_path) as (daemon, gate, clock):
        devices, session = daemon.core.devices, await daemon.open()
        assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
        claim = (await session.claim([key(1)])).claim_id
        gate.open.clear()
        reading = asyncio.ensure_future(session.read(claim))
        await daemon.until(lambda: gate.entered.acquire(blocking=False))
        clock.stall(10)
        devices.look(BOUND_NS)
        assert devices.state(Tier.DISK) is TierState.SERVING, "not beyond the bound yet"
        clock.stall(1)
        devices.look(BOUND_NS)
        assert devices.state(Tier.DISK) is TierState.HUNG
        assert "not answered for 11 s" in daemon.core.unhealthy()["disk device"]
        assert await session.save({key(2): DATA}, Tier.DISK) == [pb.SAVE_STATUS_NO_ROOM]
        assert (await session.claim([key(1)])).claim_id == 0
        assert daemon.core.index.get(key(1)) is None, "searches in place pass over it"
        assert not reading.done(), "what waits goes on to wait"
        gate.open.set()
        assert await reading == [DATA]
        devices.look(BOUND_NS)
        assert daemon.core.unhealthy() == {}
        assert daemon.core.index.get(key(1)) is not None
        assert await session.save({key(2): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
        await session.release(claim)
        await daemon.assert_idle()


@in_loop
async def test_no_read_of_a_tier_that_hangs_begins(tmp_path: Path) -> None:
    """Not under a claim from before either, on any transport: it is unreadable at once, though all
    threads of the tier wait. Other entries of the claim are read."""
    async with with_gate(tmp_path) as (daemon, gate, clock):
        session = await daemon.open()
        await session.save({key(1): DATA}, Tier.DISK)
        await session.save({key(2): DATA}, Tier.RAM)
        claim = (await session.claim([key(1), key(2)])).claim_id
        request = pb.ReadRequest(
            session=session.ref,
            claim_id=claim,
            ranges=[pb.ReadRange(index=number) for number in range(2)],
        )
        gate.open.clear()
        waiting = [asyncio.ensure_future(session.read(claim)) for _ in range(_THREADS)]
        for _ in waiting:
            await daemon.until(lambda: gate.entered.acquire(blocking=False))
        clock.stall(11)
        daemon.core.devices.look(BOUND_NS)
        parts = [part for one in await answer(daemon.cache.Read(request)) for part in one.parts]
        assert [part.status for part in parts] == [pb.READ_STATUS_UNREADABLE, pb.READ_STATUS_OK]
        assert parts[1].data == DATA
        async with data_connection(daemon, session) as line:
            await line.send(read=request)
            received = [await line.part() for _ in range(3)]
            statuses = [(part[0].status, part[1]) for part in received if part is not None]
            assert statuses == [(pb.READ_STATUS_UNREADABLE, b""), (pb.READ_STATUS_OK, DATA)]
        assert not any(one.done() for one in waiting)
        gate.open.set()
        assert await asyncio.gather(*waiting) == [[DATA]] * _THREADS
        daemon.core.devices.look(BOUND_NS)
        assert await session.read(claim) == [DATA]
        await session.release(claim)
        await daemon.assert_idle()


@in_loop
async def test_a_tier_that_hangs_while_it_recovers_recovers_again_afterwards(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as daemon:
        devices = daemon.core.devices
        assert devices.executor(Tier.RAM) is daemon.core.executor
        devices.recovering(Tier.DISK, True)
        with devices.under_way(Tier.DISK):
            devices.look(-1)
            assert daemon.tables.closed == {Tier.DISK: TierState.HUNG}
        devices.look(BOUND_NS)
        assert daemon.tables.closed == {Tier.DISK: TierState.RECOVERING}
        devices.recovering(Tier.DISK, False)
        assert daemon.tables.closed == {}


@in_loop
async def test_a_probe_that_fails_is_a_condition_until_one_succeeds(tmp_path: Path) -> None:
    async with running(tmp_path, wrap={Tier.DISK: FaultyStore}) as daemon:
        core, store = daemon.core, daemon.core.stores[Tier.DISK]
        assert isinstance(store, FaultyStore)
        store.arm(Fault.PROBE_ERROR)
        core.devices.watch(core.supervisor, probe_interval_ns=1, hung_after_ns=BOUND_NS)
        await daemon.until(lambda: Fault.PROBE_ERROR in store.happened)
        await daemon.until(lambda: not core.unhealthy())


@in_loop
async def test_a_watchdog_that_dies_is_named(tmp_path: Path) -> None:
    """An error outside of the contract of stores is a bug, which must be reported."""

    class Broken(FaultyStore):
        def probe(self) -> None:
            raise KeyError("a bug")

    async with running(tmp_path, wrap={Tier.DISK: Broken}) as daemon:
        core = daemon.core
        core.devices.watch(core.supervisor, probe_interval_ns=1, hung_after_ns=BOUND_NS)
        await daemon.until(lambda: "disk probe" in core.unhealthy())
        assert "died: KeyError('a bug')" in core.unhealthy()["disk probe"]
        assert not core.broken.is_set(), "everything else goes on"


@in_loop
async def test_a_deleted_directory_takes_no_saves_and_health_says_so(tmp_path: Path) -> None:
    """Everything that is written there is lost, even if each write succeeds. Other tiers go on."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
        shutil.rmtree(tmp_path / "disk")
        assert await session.save({key(2): DATA}, Tier.DISK) == [pb.SAVE_STATUS_FAILED]
        await daemon.until(lambda: "was deleted" in daemon.core.unhealthy().get("disk commit", ""))
        assert await session.restore(key(1)) == DATA, "its file is open"
        assert await session.save({key(2): DATA}) == [pb.SAVE_STATUS_SAVED]


@in_loop
async def test_who_asks_when_the_threads_have_ended_is_told_that_the_daemon_stops(
    tmp_path: Path,
) -> None:
    """For example an operator's command that goes on between two steps while the daemon closes."""
    async with running(tmp_path) as daemon:
        core = daemon.core
        assert await core.devices.run(Tier.DISK, len, b"abc") == 3
        core.devices.close()
        with pytest.raises(Draining, match="is stopping"):
            await recovery.collect_garbage(core)


@in_loop
async def test_a_recovery_that_fails_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the device is no damage: no entry is dropped, and no save takes its room."""
    monkeypatch.setattr(recovery, "_AGAIN_S", 0.0)
    monkeypatch.setattr(records, "_BATCH_ENTRIES", 1)

    class FailsOnce(FaultyStore):
        failed = False

        def recover(self) -> Iterator[RecoveryBatch]:
            for number, batch in enumerate(super().recover()):
                if number == 1 and not self.failed:
                    self.failed = True
                    raise StoreError("a failed read, on purpose")
                yield batch

    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for number in range(3):
            await session.save({key(number): payload(number)}, Tier.DISK)
    async with running(tmp_path, wrap={Tier.DISK: FailsOnce}) as daemon:
        session = await daemon.open()
        for number in range(3):
            assert await session.restore(key(number)) == payload(number)
        counters = daemon.tables.tier_counters[Tier.DISK]
        assert (counters.recovered_entries, counters.dropped_at_start) == (3, 0)
        await daemon.assert_idle()
