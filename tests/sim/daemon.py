"""One start of a daemon in a simulated process: the real stores, index, core and services, without
the sockets in front of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from prefixd.proto.vocabulary import Tier
from prefixd.server import assembly
from prefixd.server.api.hand_over import Handoff
from prefixd.server.api.saves import Saves
from prefixd.server.api.service import CacheService
from prefixd.server.api.sessions import Sessions
from prefixd.server.config.budgets import Plan, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.config.machine import Machine
from prefixd.server.core.events import ArenaGrown
from prefixd.server.daemon import service_config
from prefixd.server.runtime import clock as clocks
from prefixd.server.runtime import recovery
from prefixd.server.runtime.loop import Core
from prefixd.server.runtime.staging import StagingPool
from prefixd.tiers.store import Store, StoreError
from tests.sim.files import Devices
from tests.sim.loop import SimLoop
from tests.sim.world import Process, SimExecutor, World

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
_DRAIN_S: Final = 5.0
_SECURE_AGAIN_S: Final = 1.0


def make_plan(devices: Devices, slabs: int) -> Plan:
    """The configuration of all starts in a run. `slabs`: of each tier."""
    flags = [
        *(f"--{tier.label}.budget={slabs * (SLAB + 256)}" for tier in Tier),
        *(f"--{tier.label}.slab={SLAB}" for tier in Tier),
        f"--server.address=unix:{devices.disk.parent / 's'}",
        f"--shm.directory={devices.shm}",
        f"--disk.directory={devices.disk}",
        f"--server.staging={STAGING_BYTES}",
        f"--server.staging_total={2 * STAGING_BYTES}",
        f"--server.stall_timeout={STALL_S}s",
        f"--sessions.heartbeat={HEARTBEAT_S}s",
        f"--sessions.claim_lease={LEASE_S}s",
        f"--sessions.reservation_ttl={TTL_S}s",
    ]
    return resolve(load_config(flags, {}), _MACHINE)


class SimDaemon:
    """See the module. `start` is called in any fiber; what is asked of it runs in its own."""

    def __init__(self, world: World, plan: Plan, oracle: Oracle, number: int) -> None:
        self.world = world
        self.process = Process(world, f"daemon{number}")
        self.incarnation = world.entropy.randbytes(16)
        self.serving = False
        self.ended = False
        #: why it did not start
        self.refused: str | None = None
        self.core: Core
        self.service: CacheService
        self.saves: Saves
        self.stagings: StagingPool
        self.sessions: Sessions
        self.handoff: Handoff
        self.loop: SimLoop
        #: calls that are being served
        self.calls: set[asyncio.Task[None]] = set()
        #: calls of clients, as they see them
        self.open_calls: set[Call] = set()
        self._plan = plan
        self._oracle = oracle
        self._stop: asyncio.Event
        self.process.when_dead.append(self._died)
        self.process.spawn("loop", self._main)

    @property
    def alive(self) -> bool:
        return not (self.process.dead or self.ended)

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

    async def _live(self, stores: dict[Tier, Store]) -> None:
        plan, world = self._plan, self.world
        clock = clocks.Clock()
        for tier, tier_plan in plan.tiers.items():
            stores[tier] = assembly.make_store(tier_plan, verify_at_start=True, sync=True)
        index = assembly.make_index(plan, self.incarnation)
        executor = SimExecutor(world, 2)
        state = assembly.make_state(plan, stores, clock.now_ns())
        self.core = core = Core(state, stores, index, executor, clock)
        self._oracle.watch(self)
        config = service_config(plan.config, self.incarnation)
        self.sessions = Sessions(self.incarnation)
        self.stagings = StagingPool(
            config.staging_bytes, config.staging_total_bytes, executor, clock
        )
        self.sessions.when_closed.append(self.stagings.close)
        self.service = CacheService(core, self.sessions, config)
        self.saves = Saves(core, self.sessions, self.stagings, config)
        self.handoff = Handoff(core, self.stagings)
        try:
            for tier, store in stores.items():
                core.post(ArenaGrown(tier, store.secured_bytes, clock.now_ns()))
            await recovery.recover(core, self.incarnation)
            self._oracle.recovered(self)
            securing = asyncio.ensure_future(self._secure(stores))
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
            securing.cancel()
            # As the servers do: calls that are still under way are ended.
            for task in list(self.calls):
                task.cancel()
            if self.calls:
                await asyncio.wait(self.calls, timeout=1)
            await asyncio.wait((securing,))
        finally:
            if not self.process.dead:
                await core.close()
                self._oracle.closed(self)
            executor.shutdown()

    async def _secure(self, stores: dict[Tier, Store]) -> None:
        core = self.core
        loop = asyncio.get_running_loop()
        for tier, store in stores.items():
            while True:
                segments = store.secure_segments(8 * SLAB)
                try:
                    while secured := await loop.run_in_executor(core.executor, next, segments, 0):
                        core.post(ArenaGrown(tier, secured, core.clock.now_ns()))
                    break
                except StoreError:
                    again = asyncio.Event()
                    loop.call_later(_SECURE_AGAIN_S, again.set)
                    await again.wait()
