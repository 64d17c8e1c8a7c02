"""One run: a machine with a daemon and clients, a nemesis that harms them, and final checks of all
promises."""

from __future__ import annotations

import gc
import itertools
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import structlog

from prefixd.client.local import arenas
from prefixd.proto.vocabulary import Tier
from prefixd.server import opening
from prefixd.server.api import save_calls
from prefixd.server.core import checking, entries
from prefixd.server.runtime import clock, devices, incoming, recovery, verification
from prefixd.tiers import arena, records
from prefixd.tiers.arena_stores import ArenaStore, RecordedStore
from prefixd.tiers.rows import ROW_BYTES
from tests.sim import oracle as promises
from tests.sim.client import BOUND_S, SimClient
from tests.sim.daemon import HEARTBEAT_S, LEASE_S, SLAB, STALL_S, TTL_S, SimDaemon, make_plan
from tests.sim.files import Devices, Fault
from tests.sim.oracle import Oracle, name_of
from tests.sim.plan import NEMESIS, Plan, Step
from tests.sim.system import installed
from tests.sim.world import Failure, World

_SECOND: Final = 1_000_000_000
#: The longest that a start may take without faults.
_START_S: Final = 60
#: Everything that an ended client held is released within this time.
_GONE_S: Final = 3 * HEARTBEAT_S + max(TTL_S, STALL_S) + LEASE_S
#: The longest that all clients may take for all their steps.
_CLIENTS_S: Final = 3_000
#: Files of runs are in memory if possible, because syncs are simulated anyway.
_MEMORY: Final = Path("/dev/shm")
_PULSE_NS: Final = 2_000_000_000
_SHARDS: Final = 16


@dataclass
class Outcome:
    """The result of a run. `digest`: a checksum of all scheduling decisions."""

    plan: Plan
    failure: Failure | None
    counts: dict[str, int]
    digest: int
    switches: int
    events: int


class Run:
    """See the module."""

    def __init__(self, plan: Plan, world: World, devices: Devices) -> None:
        self.plan = plan
        self.world = world
        self.devices = devices
        self.oracle = Oracle(world, devices)
        self.oracle.reads_lie = plan.lies
        self._plan = make_plan({Tier.SHM: devices.shm, Tier.DISK: devices.disk}, plan.slabs)
        self._starts = 0
        self._pids = itertools.count(100)
        self._random = random.Random(f"nemesis {plan.seed}")
        self.daemon = self._new_daemon()
        self.clients: list[SimClient] = []

    def next_pid(self) -> int:
        return next(self._pids)

    # ---- the daemon

    def _new_daemon(self) -> SimDaemon:
        self._starts += 1
        return SimDaemon(
            self.world,
            self._plan,
            self.oracle,
            self._starts,
            head_start_s=self.plan.head_start_s,
            batch_ms=self.plan.batch_ms,
        )

    def _until(self, condition: Callable[[], object], within_s: float) -> bool:
        until_ns = self.world.now_ns + int(within_s * _SECOND)
        while not condition():
            if self.world.now_ns >= until_ns:
                return False
            self.world.block(self.world.now_ns + 100_000_000)
        return True

    def start(self) -> None:
        """Start daemons until one serves. If faults make a start fail, they are removed."""
        if not self.daemon.alive:
            self.daemon.process.reap()
            self.daemon = self._new_daemon()
        daemon = self.daemon
        if not self._until(lambda: daemon.serving or not daemon.alive, _START_S):
            self.world.fail(promises.BOUND, f"a start takes longer than {_START_S} s")
        if daemon.serving:
            return
        if daemon.refused is not None and not self.devices.faults:
            self.world.fail(promises.SURVIVES, f"a daemon does not start: {daemon.refused}")
        self.devices.faults.clear()
        self.start()

    def _recovered(self) -> None:
        """Wait until the daemon serves and all its tiers have recovered."""
        if not (self.daemon.alive and self.daemon.serving):
            self.start()
        if not self._until(lambda: not self.oracle.expected, _START_S):
            self.world.fail(promises.BOUND, f"a recovery takes longer than {_START_S} s")

    def _kill(self, args: Mapping[str, Any]) -> None:
        process = self.daemon.process
        if args["syncs"]:
            process.kill_at_sync = args["syncs"]
        else:
            process.kill_at_op = process.ops + args["ops"]
        self._until(lambda: process.dead or self.daemon.ended, 2)
        process.die()
        process.reap()
        self.oracle.count("killed")

    # ---- the nemesis

    def harm(self, step: Step) -> None:
        self.world.pass_time(1 + step.args["pause_ms"] * 1_000_000)
        args, daemon = step.args, self.daemon
        match step.kind:
            case "kill":
                self._kill(args)
                self._restart(args)
            case "lose power":
                self._kill(args)
                self._lose_power()
                self._restart(args)
            case "end":
                self._end()
                self._restart(args)
            case "stop daemon":
                daemon.process.stopped_until_ns = self.world.now_ns + args["for_ms"] * 1_000_000
            case "set clock":
                self.world.wall_offset_ns += args["by_ms"] * 1_000_000
            case "fault":
                until_ns = self.world.now_ns + args["for_ms"] * 1_000_000
                fault = Fault(args["fault"], args["part"], until_ns, args["rate"], args["times"])
                self.devices.faults.append(fault)
                # With read errors, a recovery may not find all entries.
                self.oracle.order = None
            case "flip":
                for _ in range(args["bits"]):
                    self._flip(args["tier"], args["file"])

    def _lose_power(self) -> None:
        """End all clients and lose unsynced data. New clients continue later."""
        for client in list(self.clients):
            if not client.done:
                client.process.die()
                client.process.reap()
        self.devices.lose_power()
        self.oracle.power_lost()
        self.oracle.count("power lost")

    def _restart(self, args: Mapping[str, Any]) -> None:
        self.world.pass_time(1 + args["down_ms"] * 1_000_000)
        if args["start_ops"]:
            # This start is killed early.
            self.daemon.process.reap()
            self.daemon = daemon = self._new_daemon()
            process = daemon.process
            process.kill_at_op = args["start_ops"]
            self._until(lambda: not daemon.alive or daemon.serving, _START_S)
            process.die()
            process.reap()
            self.oracle.count("killed while it started")
            if args["start_ops"] % 2 and self._random.random() < 0.5:
                self._lose_power()
        self.start()

    def _end(self) -> None:
        daemon = self.daemon
        daemon.stop()
        if not self._until(lambda: not daemon.alive, BOUND_S):
            self.world.fail(promises.BOUND, f"a daemon does not end within {BOUND_S} s")

    def _flip(self, tier: str, name: str) -> None:
        """Flip one bit of a published entry, in its bytes in the arena or in its record."""
        of_tier = Tier[tier.upper()]
        published = [one for one in self.oracle.durable.values() if one.tier is of_tier]
        path = (self.devices.shm if tier == "shm" else self.devices.disk) / name
        if not published or not path.exists():
            return
        entry = self._random.choice(published)
        self.oracle.tainted.add(entry.generation)
        if name == "arena":
            most_bytes, offset = min(entry.payload_bytes, SLAB), entry.location[0]
        else:
            most_bytes, offset = ROW_BYTES, entry.location[0] // SLAB * ROW_BYTES
        offset += self._random.randrange(most_bytes)
        mode = path.stat().st_mode
        path.chmod(0o600)
        fd = os.open(path, os.O_RDWR)
        try:
            byte = os.pread(fd, 1, offset)[0] ^ 1 << self._random.randrange(8)
            os.pwrite(fd, bytes([byte]), offset)
        finally:
            os.close(fd)
            path.chmod(mode)
        self.oracle.count("flipped")

    # ---- the run

    def go(self) -> None:
        self.start()
        for number in range(self.plan.clients):
            name = f"client{number}"
            self.clients.append(SimClient(self, name, self.plan.of(name)))
        for step in self.plan.of(NEMESIS):
            self.harm(step)
        if not self._until(self._all_done, _CLIENTS_S):
            self.world.fail(promises.BOUND, "clients do not finish their steps")
        self.devices.faults.clear()
        self._check_nothing_held()
        self._check_everything_readable(True, False)
        self._end()
        self.start()
        self._recovered()
        self._check_everything_readable(True)

    def _all_done(self) -> bool:
        # A client that died is missing in the list until its successor starts.
        return len(self.clients) == self.plan.clients and all(c.done for c in self.clients)

    def _check_nothing_held(self) -> None:
        self._recovered()
        self.world.pass_time(_GONE_S * _SECOND)
        self.oracle.check_nothing_held(self.daemon)
        for tier, directory in ((Tier.SHM, self.devices.shm), (Tier.DISK, self.devices.disk)):
            # Of an arena that was larger, the rest is holes. In /dev/shm a client that still reads
            # there by the index of an earlier start makes pages of zeros of them.
            used_bytes = sum(
                path.stat().st_size for path in directory.iterdir() if path.name != "arena"
            )
            store = self.daemon.core.stores[tier]
            used_bytes += store.secured_bytes - store.hole_bytes
            budget_bytes = self.daemon.core.state.tables.ledgers[tier].budget_bytes
            if used_bytes > budget_bytes + self.daemon.resizing.kept_bytes(tier):
                self.world.fail(promises.BUDGETS, f"{tier.label}: {used_bytes} bytes of files")

    def _check_everything_readable(self, *places: bool) -> None:
        """Read every key that was ever saved, in place or over the wire, and check all bytes."""
        keys = sorted(self.oracle.attempts)
        self.plan = replace(self.plan, lost_rate=0)
        shared = {"claim": True, "check": True, "stale": False, "wait_ms": 0}
        shared |= {"hold_ms": 0, "stop_in": 0, "pieces": 1}
        steps = [
            Step(2000 + n, "reader", "restore", shared | {"keys": [number], "place": place})
            for n, (number, place) in enumerate(
                (int.from_bytes(key, "big"), place) for place in places for key in keys
            )
        ]
        reader = SimClient(self, "reader", steps)
        self.clients.append(reader)
        if not self._until(lambda: reader.done, _CLIENTS_S):
            self.world.fail(promises.BOUND, "the final reader does not finish")
        self.clients.remove(reader)
        self.world.pass_time(_SECOND)
        entries = self.daemon.core.state.tables.entries
        for key, published in self.oracle.durable.items():
            entry = entries.get(key)
            if entry is None or entry.generation != published.generation:
                self.oracle.fail(promises.SURVIVES, f"{name_of(key)} is gone")
            elif self.oracle.true_crc(self.daemon, entry) != entry.payload_crc32c:
                if entry.generation in self.oracle.tainted:
                    detail = f"{name_of(key)} is damaged, was read, and is still found"
                    self.oracle.fail(promises.DAMAGE, detail)
                self.oracle.fail(promises.SURVIVES, f"{name_of(key)} lost its bytes")


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable logs and automatic garbage collection, and make units of work smaller."""
    before = structlog.get_config()
    collecting = gc.isenabled()
    gc.disable()
    # Objects that exist already are excluded from the collection after each run. They are never
    # unfrozen, as checking which are frozen would take as long.
    gc.freeze()
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    try:
        with (
            warnings.catch_warnings(),
            # Each pulse is a step of the simulation, and idle time should be cheap.
            mock.patch.object(clock, "PULSE_NS", _PULSE_NS),
            # With smaller limits, work that is usually done at once takes several steps.
            mock.patch.object(devices, "_LOOK_S", 1.0),
            mock.patch.object(arenas, "RELEASE_BYTES", 1),
            mock.patch.object(arenas, "_PIECE_BYTES", SLAB),
            # The kernel copies in one piece, and reads without `os`, where the faults are.
            mock.patch.object(arenas, "native", None),
            mock.patch.object(arena, "RELEASE_BYTES", 1),
            mock.patch.multiple(
                incoming,
                RELEASE_BYTES=SLAB,
                _INLINE_BYTES=2 * SLAB,
                _INLINE_SMALL_BYTES=SLAB,
                _SEALED_BYTES=5 * SLAB,
                _TURN_MESSAGES=2,
            ),
            mock.patch.object(save_calls, "MAX_WAITING_MESSAGES", 1),
            mock.patch.object(records, "_BATCH_ENTRIES", 2),
            mock.patch.object(recovery, "_ADOPTED_AT_ONCE", 1),
            mock.patch.object(opening, "_SECURED_BEFORE_SERVING_BYTES", 3 * SLAB),
            mock.patch.object(ArenaStore.secure_segments, "__defaults__", (4 * SLAB,)),
            mock.patch.object(RecordedStore.secure_segments, "__defaults__", (4 * SLAB,)),
            mock.patch.object(verification, "SHARDS", _SHARDS),
            # Fewer shards make recounts faster.
            mock.patch.multiple(entries, SHARDS=_SHARDS, _MASK=_SHARDS - 1),
            mock.patch.object(checking, "SHARDS", _SHARDS),
        ):
            # Killed daemons leave tasks and coroutines that never finish.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                yield
            finally:
                gc.collect()
    finally:
        if collecting:
            gc.enable()
        structlog.configure(**before)


def run(plan: Plan) -> Outcome:
    """Run a plan to its end, or until it breaks a promise."""
    root = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="sim-", dir=root) as directory, _quiet():
        return _run(plan, Path(directory))


def _run(plan: Plan, directory: Path) -> Outcome:
    world = World(plan.seed, yield_rate=plan.yield_rate)
    devices = Devices(world, directory)
    devices.cold = plan.cold
    with installed(world, devices):
        one: Run | None = None
        try:
            one = Run(plan, world, devices)
            one.go()
        except Failure:
            assert world.failure is not None
        finally:
            world.end()
    return Outcome(
        plan=plan,
        # The original exception would keep everything that ran alive.
        failure=world.failure and world.failure.without_frames(),
        counts=dict(sorted(one.oracle.counts.items())) | devices.happened if one else {},
        digest=world.digest,
        switches=world.switches,
        events=one.oracle.events if one else 0,
    )
