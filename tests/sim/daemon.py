"""One start of a daemon in a simulated process: the real stores, index, core and services, without
the sockets in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from prefixd.proto.vocabulary import Tier
from prefixd.server import assembly, opening
from prefixd.server.api.local_socket import Handoff
from prefixd.server.api.save_calls import Saves
from prefixd.server.api.service import CacheService
from prefixd.server.api.session_streams import Sessions
from prefixd.server.config.budgets import Plan, TierPlan, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.config.machine import Machine
from prefixd.server.runtime import clock as clocks
from prefixd.server.runtime.index import IndexWriter
from prefixd.server.runtime.loop import Core
from prefixd.server.runtime.resizing import Resizing
from prefixd.server.runtime.staging import StagingPool
from prefixd.tiers.arena_stores import DiskStore, ShmStore
from prefixd.tiers.files import pwrite_all, write_errors
from prefixd.tiers.rows import ROW_BYTES, Erasure, RowFile
from prefixd.tiers.store import RecoveryBatch, Store, StoreError
from tests.sim.loop import SimLoop
from tests.sim.threads import SimExecutor
from tests.sim.world import Killed, Process, World

if TYPE_CHECKING:
    from tests.sim.network import Call
    from tests.sim.oracle import Oracle

SLAB: Final = 4096
HEARTBEAT_S: Final = 2
LEASE_S: Final = 20
TTL_S: Final = 8
STALL_S: Final = 5
STAGING_BYTES: Final = 2**20
_MACHINE: Final = Machine(2**34, 2**34, 2**34, 2**34, 2**34, 0)
HUNG_S: Final = 3
_PROBE_S: Final = 4
_DRAIN_S: Final = 5.0


class _FlatRows(RowFile):
    """A flat file with the guarantees of the LMDB table: the rows that a recovery finds are durable
    even if syncs of an earlier start failed, and rows of a failed sync are written again."""

    _renewed = False

    def __init__(self, directory: Path, slabs: int, *, sync: bool) -> None:
        super().__init__(directory, slabs, sync=sync)
        #: slabs of rows that are in the file but may not be on the device
        self._failed: set[int] = set()

    def apply(self, erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        with write_errors("write rows again"):
            for slab in sorted(self._failed):
                pwrite_all(self._fd, self._pread(slab).ljust(ROW_BYTES, b"\0"), slab * ROW_BYTES)
        try:
            super().apply(erasures, rows)
        except StoreError:
            self._failed.update(slab for slab, _ in (*erasures, *rows))
            raise
        self._failed.clear()

    def chunks(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        if not self._renewed:
            self.apply((), [row for _, rows in super().chunks() for row in rows])
            self._renewed = True
        return super().chunks()


class SimShmStore(ShmStore):
    """The shm tier, with a recovery that takes simulated time."""

    pause: Callable[[], None]

    def recover(self) -> Iterator[RecoveryBatch]:
        return _slowly(super().recover(), self.pause)


class SimDiskStore(DiskStore):
    """The disk tier with its rows in a flat file, because LMDB runs in a process of its own, which
    the simulation can't run. Its recovery takes simulated time. All else is the real store."""

    _OLD_LAYOUTS: ClassVar[tuple[str, ...]] = ()
    _TABLE_FIXED_BYTES: ClassVar[int] = 0
    _TABLE_SLAB_BYTES: ClassVar[int] = ROW_BYTES

    def _open_table(self, slabs: int, *, sync: bool) -> RowFile:  # type: ignore[override]
        return _FlatRows(self.directory, slabs, sync=sync)

    pause: Callable[[], None]

    def recover(self) -> Iterator[RecoveryBatch]:
        return _slowly(super().recover(), self.pause)


def _slowly(batches: Iterator[RecoveryBatch], pause: Callable[[], None]) -> Iterator[RecoveryBatch]:
    pause()
    for batch in batches:
        yield batch
        pause()


def make_plan(directories: Mapping[Tier, Path], slabs: int) -> Plan:
    """The configuration of all starts in a run. `slabs`: of each tier."""
    plan = _plan_of(slabs)
    tiers = {
        tier: replace(tier_plan, directory=directories.get(tier))
        for tier, tier_plan in plan.all_tiers.items()
    }
    return replace(plan, all_tiers=tiers)


@cache
def _plan_of(slabs: int) -> Plan:
    """The configuration plan without directories. Cached, as it takes a tenth of a run."""
    flags = [
        *(f"--{tier.label}.budget={slabs * (SLAB + 256)}" for tier in Tier),
        *(f"--{tier.label}.max_budget={2 * slabs * (SLAB + 256)}" for tier in Tier),
        *(f"--{tier.label}.slab={SLAB}" for tier in Tier),
        "--server.address=unix:/nowhere/s",
        f"--disk.hung_after={HUNG_S}s",
        f"--disk.probe_interval={_PROBE_S}s",
        f"--server.staging={STAGING_BYTES}",
        f"--server.staging_total={2 * STAGING_BYTES}",
        f"--server.stall_timeout={STALL_S}s",
        f"--sessions.heartbeat={HEARTBEAT_S}s",
        f"--sessions.claim_lease={LEASE_S}s",
        f"--sessions.reservation_ttl={TTL_S}s",
    ]
    return resolve(load_config(flags, {}), _MACHINE)


class SimDaemon:
    """See the module. It can be created in any fiber; everything else runs in its own fibers."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        oracle: Oracle,
        number: int,
        *,
        head_start_s: float,
        batch_ms: int,
    ) -> None:
        """`head_start_s`: it serves after this time even if its tiers still recover; `batch_ms`:
        the duration of each recovery batch."""
        self.world = world
        self.process = Process(world, f"daemon{number}")
        self.incarnation = world.entropy.randbytes(16)
        self.serving = False
        self.ended = False
        #: why it refused to start
        self.refused: str | None = None
        self.core: Core
        self.service: CacheService
        self.saves: Saves
        self.stagings: StagingPool
        self.sessions: Sessions
        self.handoff: Handoff
        self.resizing: Resizing
        self.loop: SimLoop
        #: the tasks of the calls that it serves
        self.calls: set[asyncio.Task[None]] = set()
        #: the client side of all open calls
        self.open_calls: set[Call] = set()
        self._plan = plan
        self._head_start_s = head_start_s
        self._batch_ns = batch_ms * 1_000_000
        self._oracle = oracle
        self._stop: asyncio.Event
        self.process.when_dead.append(self._died)
        self.process.spawn("loop", self._main)

    @property
    def alive(self) -> bool:
        return not (self.process.dead or self.ended)

    def configured_bytes(self, tier: Tier) -> int:
        """The budget that a tier has after each start, whatever it was resized to before."""
        return self._plan.tiers[tier].budget_bytes

    def stop(self) -> None:
        """SIGTERM."""
        if self.alive and self.serving:
            self.loop.call_soon_threadsafe(self._stop.set)

    def _died(self) -> None:
        self._oracle.died(self)
        self._hang_up()

    def _hang_up(self) -> None:
        for call in sorted(self.open_calls, key=lambda call: call.number):
            call.broke("the daemon is gone")

    def _main(self) -> None:
        self.loop = SimLoop(self.world)
        self.loop.run(self._run())

    async def _run(self) -> None:
        stores: dict[Tier, Store] = {}
        try:
            await self._live(stores)
        except StoreError as problem:
            self.refused = str(problem)
        finally:
            self.serving = False
            with suppress(AttributeError):
                self.stagings.close_all()
                self.core.index.close()
            for store in stores.values():
                store.close()
            if not self.process.dead:
                self.ended = True
                self._hang_up()

    def _make_store(self, plan: TierPlan) -> Store:
        if plan.tier is Tier.RAM:
            return assembly.make_store(plan, verify_at_start=True, sync=True)
        assert plan.directory is not None
        make = SimShmStore if plan.tier is Tier.SHM else SimDiskStore
        store = make(
            plan.directory,
            plan.budget_bytes,
            plan.slab_bytes,
            max_budget_bytes=plan.max_budget_bytes,
        )
        store.pause = lambda: self.world.pass_time(self._batch_ns)
        return store

    async def _live(self, stores: dict[Tier, Store]) -> None:
        plan, world = self._plan, self.world
        clock = clocks.Clock()
        for tier, tier_plan in plan.tiers.items():
            stores[tier] = self._make_store(tier_plan)
        index = IndexWriter(self.incarnation, assembly.max_entries(plan, stores))
        executor = SimExecutor(world, 2)
        state = assembly.make_state(plan, stores, clock.now_ns())
        self.core = core = Core(state, stores, index, executor, clock)
        self._oracle.watch(self)
        self._watch_supervisor()
        disk = plan.config.disk
        core.devices.watch(
            core.supervisor,
            probe_interval_ns=disk.probe_interval_ns,
            hung_after_ns=disk.hung_after_ns,
        )
        server = plan.config.server
        self.sessions = Sessions(self.incarnation)
        self.stagings = StagingPool(
            server.staging_bytes, server.staging_total_bytes, executor, clock
        )
        self.sessions.when_closed.append(self.stagings.close)
        self.service = CacheService(core, self.sessions, plan.config)
        self.saves = Saves(core, self.sessions, self.stagings, plan.config)
        self.handoff = Handoff(core, self.stagings)
        self.resizing = Resizing(core)
        try:
            starts = opening.begin_tiers(core, plan, self.incarnation)
            await asyncio.wait(starts, timeout=self._head_start_s)
            await self.begin_sharing()
            self._stop = asyncio.Event()
            self.serving = True
            broken = asyncio.ensure_future(core.broken.wait())
            stop = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait((broken, stop), return_when=asyncio.FIRST_COMPLETED)
            if core.broken.is_set():
                world.found("the accounting is right at every moment", str(core.unhealthy()))
            await core.drain(_DRAIN_S)
            core.end_sessions()
            self.serving = False
            # The real servers cancel unfinished calls as well.
            for task in sorted(self.calls, key=self.loop.number_of):
                task.cancel()
            if self.calls:
                await asyncio.wait(self.calls, timeout=1)
            await self.end_sharing()
        finally:
            if not self.process.dead:
                await self._close()
            executor.shutdown()

    async def begin_sharing(self) -> None:
        """Do nothing: this node is alone."""

    async def end_sharing(self) -> None:
        pass

    async def _close(self) -> None:
        self.core.supervisor.cancel()
        if not await self.core.close():
            # Threads are stuck in I/O: the process exits without waiting for them.
            self._oracle.count("exits with stuck threads")
            self.process.die()
            raise Killed
        self._oracle.closed(self)

    def _watch_supervisor(self) -> None:
        """Report every background task that dies: device faults must not end one."""
        died = self.core.supervisor.died

        def task_died(name: str, problem: BaseException, *, vital: bool) -> None:
            if not self.process.dead:
                self.world.found(
                    "no task or thread fails silently", f"{name}: {problem!r}", problem
                )
            died(name, problem, vital=vital)

        self.core.supervisor.died = task_died  # type: ignore[method-assign]
