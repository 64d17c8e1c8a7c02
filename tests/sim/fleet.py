"""Runs of a fleet: several nodes on one engine, each a simulated daemon with the real sharing.

    python -m tests.sim --fleet --seed 17 --runs 1000

Clients save, search, restore and delete on any node, and clear a namespace. The nemesis kills and
stops nodes, cuts them off from the engine or from each other, freezes the engine, empties it, and
lets a replica take over that does not have the latest writes, with a clock that is behind. Payloads
are in the engine, or at the nodes. Every second fleet has a bucket behind that, which is frozen, or
out of reach for a node, when something else happens.

The promise is that of `docs/share-between-nodes.md`: within `BOUND_S` of the answer to a delete, or
of its return, no node has what was saved before. Every save has other bytes, so that it is known
which save is read.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import DeleteStatus, Tier
from prefixd.server.api import admin, service
from prefixd.server.api.admin import AdminService
from prefixd.server.runtime import recovery
from prefixd.server.sharing import behind, deletes, peers, sharing
from prefixd.server.sharing.behind import Behind
from prefixd.server.sharing.engine_link import SharingConfig, WritePolicy
from prefixd.server.sharing.engine_store import Outcome, SharedStore, Wanted
from prefixd.server.sharing.peers import PeerStore, ReadTimes
from prefixd.server.sharing.sharing import Sharing
from tests.sim import oracle as promises
from tests.sim.client import SimClient
from tests.sim.daemon import SimDaemon, make_plan
from tests.sim.engine import Bucket, Locations, Payloads, SimEngine
from tests.sim.files import Devices
from tests.sim.oracle import GONE_FOR_EVER, Oracle, key_of, name_of
from tests.sim.plan import NEMESIS, Plan, Step
from tests.sim.run import _MEMORY, _quiet
from tests.sim.run import Outcome as RunOutcome
from tests.sim.system import installed
from tests.sim.world import Failure, World

T = TypeVar("T")
U = TypeVar("U")

REACHES: Final = "a delete reaches every node within its bound"
#: From the answer, or from when the node has recovered and reaches the engine again.
BOUND_S: Final = 5
NODES: Final = 3
_SECOND: Final = 1_000_000_000
_START_S: Final = 60
_CLIENTS_S: Final = 3_000
_HOUR_MS: Final = 3_600_000
TENANT: Final = TenantNamespace("tenant")
#: Of them, every third belongs to the tenant.
KEYS: Final = 6
_CLOCKS: Final = (
    admin,
    behind,
    deletes,
    peers,
    sharing,
    service,
    recovery,
)


def fleet_key(number: int) -> Key:
    """A key of a run; it may belong to the tenant."""
    return TENANT.stored([key_of(number)])[0] if number % 3 == 2 else key_of(number)


def fleet_plan_of(seed: int, steps: int = 14) -> Plan:
    """Draw a plan with this many client steps, and some of the nemesis."""
    draw = random.Random(f"fleet {seed}")
    drawn: list[Step] = []
    tiers = draw.sample(["ram", "shm", "disk"], draw.randint(1, 2))
    for number in range(steps):
        kind = draw.choices(["save", "search", "delete", "clear", "evict"], [30, 34, 22, 4, 4])[0]
        keys = draw.sample(range(KEYS), draw.choice([1, 1, 2, 3]))
        args: dict[str, Any] = {"pause_ms": draw.choice([0, 0, 20, 300, 1500, 4000])}
        match kind:
            case "save":
                args |= {"keys": keys, "tier": draw.choice(tiers)}
                args |= {"sizes": [draw.choice([500, 4096, 9000]) for _ in keys]}
            case "search":
                args |= {"keys": keys, "hold_ms": draw.choice([0, 0, 0, 2000])}
                args |= {"wait_ms": draw.choice([500, 3000])}
            case "delete":
                args |= {"keys": keys}
            case "evict":
                args |= {"tier": draw.choice(tiers), "entries": draw.choice([1, 99])}
        drawn.append(Step(number, f"client{draw.randrange(NODES)}", kind, args))
    drawn += [_harm(draw, 1000 + number) for number in range(draw.choice([0, 2, 4, 6]))]
    return Plan(
        seed=seed,
        steps=tuple(drawn),
        clients=NODES,
        slabs=20,
        yield_rate=draw.choice([0.02, 0.1]),
        lost_rate=draw.choice([0, 0.1]),
        head_start_s=0.5,
        batch_ms=draw.choice([0, 0, 1000]),
        lies=False,
        flips=False,
    )


def _harm(draw: random.Random, number: int) -> Step:
    kind = draw.choices(
        ["kill", "end", "cut off", "part", "freeze", "fail over", "empty"], [5, 2, 5, 2, 3, 5, 2]
    )[0]
    args: dict[str, Any] = {"pause_ms": draw.choice([0, 10, 300, 1500, 4000])}
    match kind:
        case "kill" | "end":
            args |= {"node": draw.randrange(NODES), "down_ms": draw.choice([0, 1000, 6000])}
            args |= {"ops": draw.choice([1, 20, 200])}
        case "cut off" | "part":
            args |= {"node": draw.randrange(NODES), "for_ms": draw.choice([500, 3000, 9000])}
        case "freeze":
            args |= {"for_ms": draw.choice([500, 4000])}
        case "fail over":
            args |= {"lag_ms": draw.choice([0, 50, 1000]), "behind_ms": draw.choice([0, 0, 5000])}
            args |= {"down_ms": draw.choice([0, 2000])}
    return Step(number, NEMESIS, kind, args)


# ---- what clients did


@dataclass
class Save:
    """Bytes that a client saved under a key. `ended_ns`: when it was told that they are."""

    key: Key
    ended_ns: int | None = None


@dataclass
class Deleted:
    """A delete of one key, whose client was told that it is gone."""

    key: Key
    begun_ns: int
    ended_ns: int
    #: Records of it that the engine took before.
    ids: set[bytes]
    #: The engine lost its record at some time, and those who know it had to put it back ...
    lost: bool = False
    #: ... but nobody knew it any more.
    forgotten: bool = False


class NodeOracle(Oracle):
    """The promises of one node, whose entries may be what clients saved on another."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.world, fleet.devices)
        self._fleet = fleet
        self.attempts = fleet.attempts
        self.counts = fleet.counts

    def attempted(self, key: Key, payload: bytes) -> None:
        super().attempted(key, payload)
        self._fleet.saves[crc32c(payload)] = Save(key)

    def acknowledged(self, key: Key, payload: bytes, incarnation: bytes) -> None:
        super().acknowledged(key, payload, incarnation)
        self._fleet.saves[crc32c(payload)].ended_ns = self.world.now_ns


class FleetDaemon(SimDaemon):
    """A daemon that shares."""

    node: Node
    admin: AdminService
    sharing: Sharing | None = None

    async def begin_sharing(self) -> None:
        self.admin = AdminService(self.core, self.sessions, dict, {})
        fleet = self.node.fleet
        self.sharing = await Sharing.begin(
            self.core,
            fleet.store_of(self.node),
            SharingConfig(Tier.RAM, fleet.write, _HOUR_MS, 2**20),
        )
        self.service.fetcher = self.sharing.fetch

    async def end_sharing(self) -> None:
        if self.sharing is not None:
            await self.sharing.close()

    @property
    def knows(self) -> set[bytes]:
        """The ids of the deletes that it would put back."""
        if not self.alive or self.sharing is None:
            return set()
        log = self.sharing._deletes.log
        return {each.id for _, each in log._records if each is not None} | log._missing.keys()


class SimPeer:
    """Stands in for `DaemonPeer`: reads from the memory of another node."""

    def __init__(self, fleet: Fleet, address: str, reader: Any) -> None:
        self._fleet = fleet
        self._address, self._reader = address, reader
        self.pace = ReadTimes()
        self.problem = ""

    def read(self, wanted: list[Wanted], deadline_s: float) -> list[Outcome]:
        fleet, world = self._fleet, self._fleet.world
        node = fleet.by_address[self._address]
        until_ns = int(deadline_s * 1e9)
        world.pass_time(20_000 + world.delay_ns())
        daemon = node.daemon
        there = node.name not in fleet.parted and self._reader not in fleet.parted
        if not (there and daemon.alive and daemon.serving):
            world.pass_time(max(0, until_ns - world.now_ns))
            return [Outcome.UNAVAILABLE] * len(wanted)
        outcomes = []
        for want in wanted:
            entry = daemon.core.state.tables.entries.find(want.entry.key)
            if entry is None or entry.payload_bytes != len(want.room):
                outcomes.append(Outcome.ABSENT)
                continue
            data = b"".join(bytes(v) for v in _bytes_of(daemon, entry))
            same = crc32c(data) == want.entry.payload_crc32c
            if same:
                want.room[:] = data
            outcomes.append(Outcome.DONE if same else Outcome.ABSENT)
        world.pass_time(20_000 + world.delay_ns())
        return outcomes

    def close(self) -> None:
        pass


def _bytes_of(daemon: SimDaemon, entry: Any) -> list[bytes]:
    arena: Any = daemon.core.stores[entry.tier].arena  # type: ignore[attr-defined]
    left, pieces = entry.payload_bytes, []
    for start, length in zip(entry.location[::2], entry.location[1::2], strict=True):
        pieces.append(os.pread(arena.fd, min(left, length), start))
        left -= len(pieces[-1])
    return pieces


class FleetClient(SimClient):
    """Performs steps on one node."""

    run: Any

    def _search(self, args: dict[str, Any]) -> None:
        session = self.open_session()
        keys = [fleet_key(number) for number in args["keys"]]
        request = pb.PullRequest(
            session=session.ref, keys=keys, mode=pb.CLAIM_MODE_RUN, wait_ms=args["wait_ms"]
        )
        pulled = self.ask(session.daemon, "pull", request).pulled
        self.oracle.counts["pulled"] = self.oracle.counts.get("pulled", 0) + pulled
        begun_ns = self.world.now_ns
        claim, entries = self._claim(session, keys, 0)
        if not claim:
            return
        for number, entry in enumerate(entries):
            data = bytearray(entry.payload_bytes)
            request = pb.ReadRequest(
                session=session.ref, claim_id=claim, ranges=[pb.ReadRange(index=number)]
            )
            call = self.begin(session.daemon, "read")
            call.send(request)
            good = True
            while self.wait_response(call):
                for part in call.responses.popleft().parts:
                    good = good and part.status == pb.READ_STATUS_OK
                    data[part.offset_bytes : part.offset_bytes + len(part.data)] = part.data
            if good:
                self.oracle.read(
                    entry.key,
                    bytes(data),
                    incarnation=session.ref.incarnation,
                    generation=entry.generation,
                    checked=True,
                    begun_ns=begun_ns,
                )
                self.run.fleet.read(self.run, crc32c(bytes(data)), begun_ns)
        if args["hold_ms"]:
            self.world.pass_time(args["hold_ms"] * 1_000_000)
        self._release(session, claim)

    def _save_here(self, args: dict[str, Any]) -> None:
        numbers = [int.from_bytes(fleet_key(number), "big") for number in args["keys"]]
        well = {"how": "save", "behaves": "well", "together": 99, "quiet": False, "wait_ms": 0}
        SimClient._methods["save"](self, args | well | {"keys": numbers})

    def _delete(self, args: dict[str, Any]) -> None:
        session, fleet = self.open_session(), self.run.fleet
        keys = [fleet_key(number) for number in args["keys"]]
        begun_ns = self.world.now_ns
        answer = self.ask(
            session.daemon, "delete", pb.DeleteRequest(session=session.ref, keys=keys)
        )
        for key, status in zip(keys, answer.results, strict=True):
            self.oracle.count(f"delete: {pb.DeleteStatus.Name(status)}")
            if DeleteStatus(status) in GONE_FOR_EVER:
                fleet.deleted(key, begun_ns, lambda record, k=key: k in record.keys)

    def _clear(self, _args: dict[str, Any]) -> None:
        session, fleet = self.open_session(), self.run.fleet
        begun_ns = self.world.now_ns
        answer = self.ask(session.daemon, "clear", pb.ClearRequest(namespace=TENANT.name))
        if answer.erasing:
            return
        for number in range(KEYS):
            key = fleet_key(number)
            if TENANT.has(key):
                fleet.deleted(key, begun_ns, lambda record: record.namespace == TENANT.name)

    _methods: Final[dict[str, Any]] = SimClient._methods | {
        "save": _save_here,
        "search": _search,
        "delete": _delete,
        "clear": _clear,
    }


class Node:
    """A machine of the fleet: what a `SimClient` knows as its run."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.name = f"node{number}"
        self.address = f"{self.name}:1"
        self.world, self.plan = fleet.world, fleet.plan
        self.oracle = NodeOracle(fleet)
        directories = {
            Tier.SHM: fleet.devices.shm / self.name,
            Tier.DISK: fleet.devices.disk / self.name,
        }
        for directory in directories.values():
            directory.mkdir()
        self._plan = make_plan(directories, fleet.plan.slabs)
        #: The last moment at which it did not run, had not recovered, or did not reach the engine.
        self.disturbed_ns = 0
        self.clients: list[SimClient] = []
        self.daemon = self._start()

    def next_pid(self) -> int:
        return next(self.fleet.pids)

    def _start(self) -> FleetDaemon:
        daemon = FleetDaemon(
            self.world,
            self._plan,
            self.oracle,
            next(self.fleet.starts),
            head_start_s=self.plan.head_start_s,
            batch_ms=self.plan.batch_ms,
        )
        daemon.node = self
        return daemon

    def restart(self) -> None:
        self.daemon.process.reap()
        self.daemon = self._start()

    def disturbed(self) -> bool:
        """Whether a delete can't be expected to reach it now."""
        serves = self.daemon.alive and self.daemon.serving and not self.oracle.expected
        engine = self.fleet.engine
        frozen = engine.frozen_until_ns >= self.world.now_ns
        return not serves or frozen or self.name in engine.cut_off


class SimBehind(Behind):
    """Its threads would be none of the simulation's: one call follows the other."""

    fleet: Fleet

    def _both(self, one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
        return one(), other()

    def _pays(self, deadline_s: float, _key: Key) -> bool:
        return behind.monotonic() < deadline_s

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        before = self._counts["bucket_fetched"]
        outcomes = super().get(wanted, deadline_s)
        if self._counts["bucket_fetched"] > before:
            self.fleet.count("read from the bucket")
        return outcomes


@dataclass
class Fleet:
    """See the module."""

    plan: Plan
    world: World
    devices: Devices
    attempts: dict[Key, dict[int, bytes]] = field(default_factory=dict)
    saves: dict[int, Save] = field(default_factory=dict)
    deletes: list[Deleted] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    #: Nodes that other nodes don't reach.
    parted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        draw = random.Random(f"fleet of {self.plan.seed}")
        self.pids, self.starts = itertools.count(100), itertools.count(1)
        self.engine = SimEngine(self.world, draw.choice([5, 10_000, 10_000]))
        self.at_nodes = draw.random() < 0.5
        self.write = draw.choice([WritePolicy.ALL, WritePolicy.ALL, WritePolicy.SECOND_USE])
        self.bucket = SimEngine(self.world, 1) if draw.random() < 0.5 else None
        self.bucket_harms = random.Random(f"bucket of {self.plan.seed}")
        self.by_address: dict[str, Node] = {}
        self.nodes = [Node(self, number) for number in range(NODES)]
        self.by_address |= {node.address: node for node in self.nodes}

    def store_of(self, node: Node) -> SharedStore:
        near = self._near_of(node)
        if self.bucket is None:
            return near
        store = SimBehind(near, Bucket(self.bucket, node.name))  # type: ignore[arg-type]
        store.fleet = self
        return store

    def _near_of(self, node: Node) -> SharedStore:
        if not self.at_nodes:
            return Payloads(self.engine, node.name)
        locations: Any = Locations(self.engine, node.name)
        store = PeerStore(locations, node.address, node.name)  # type: ignore[arg-type]
        # Its threads wait for each other in a way that the simulation does not know.
        while store._idle.acquire(blocking=False):
            pass
        return store

    # ---- what clients tell

    def deleted(self, key: Key, begun_ns: int, of: Callable[[Any], bool]) -> None:
        """A client was told that a key is gone."""
        ids = {
            each.record.id
            for each in self.engine.logged
            if each.at_ns >= begun_ns and of(each.record)
        }
        self.deletes.append(Deleted(key, begun_ns, self.world.now_ns, ids))
        if not ids:
            self.world.fail(REACHES, f"{name_of(key)} was deleted, and the engine does not know")
        self.records_lost()

    def read(self, node: Node, crc: int, begun_ns: int) -> None:
        """A client has read these bytes on a node, in a search that began then."""
        stale = self._stale(crc)
        if stale is None:
            return
        since_ns = max(stale.ended_ns, node.disturbed_ns)
        if stale.lost:
            since_ns = max(since_ns, *(each.disturbed_ns for each in self.nodes))
        if begun_ns > since_ns + BOUND_S * _SECOND:
            self._fail(stale, f"was read on {node.name}")

    def _stale(self, crc: int) -> Deleted | None:
        """The delete that came after the save of these bytes."""
        save = self.saves[crc]
        if save.ended_ns is None:
            return None
        for each in self.deletes:
            if each.key == save.key and each.begun_ns > save.ended_ns and not each.forgotten:
                return each
        return None

    def _fail(self, stale: Deleted, how: str) -> None:
        ago_s = (self.world.now_ns - stale.ended_ns) / 1e9
        self.world.fail(REACHES, f"{name_of(stale.key)} {how} {ago_s:.1f} s after its delete")

    def records_lost(self) -> None:
        """Note which deletes the engine does not have, and which nobody has."""
        known = set().union(*(node.daemon.knows for node in self.nodes))
        trimmed = self.engine.state.trimmed
        for each in self.deletes:
            if trimmed or any(self.engine.has(id_) for id_ in each.ids):
                continue
            each.lost = True
            if not each.ids & known:
                each.forgotten = True
                self.count("deletes that nobody remembers")

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    # ---- the run

    def _watch(self) -> None:
        """Keep the moments of the last disturbance."""
        for node in self.nodes:
            if node.disturbed():
                node.disturbed_ns = self.world.now_ns
        self.world.later(50_000_000, self._watch)

    def until(self, condition: Callable[[], object], within_s: float, what: str) -> None:
        until_ns = self.world.now_ns + int(within_s * _SECOND)
        while not condition():
            if self.world.now_ns >= until_ns:
                self.world.fail(promises.BOUND, what)
            self.world.block(self.world.now_ns + 100_000_000)

    def harm(self, step: Step) -> None:
        args, world, engine = step.args, self.world, self.engine
        world.pass_time(1 + args["pause_ms"] * 1_000_000)
        self.count(f"nemesis: {step.kind}")
        match step.kind:
            case "kill" | "end":
                self._stop(self.nodes[args["node"]], args, kill=step.kind == "kill")
            case "cut off" | "part":
                cut = engine.cut_off if step.kind == "cut off" else self.parted
                name = self.nodes[args["node"]].name
                cut.add(name)
                world.later(args["for_ms"] * 1_000_000, lambda: cut.discard(name))
            case "freeze":
                engine.frozen_until_ns = world.now_ns + args["for_ms"] * 1_000_000
            case "fail over":
                engine.frozen_until_ns = world.now_ns + args["down_ms"] * 1_000_000
                engine.fail_over(args["lag_ms"], args["behind_ms"])
            case "empty":
                engine.restart_empty()
        if self.bucket is not None:
            self._harm_bucket(self.bucket)
        for node in self.nodes:
            if step.kind in ("freeze", "fail over", "empty"):
                node.disturbed_ns = world.now_ns
        self.records_lost()

    def _harm_bucket(self, bucket: SimEngine) -> None:
        draw, world = self.bucket_harms, self.world
        for_ns = draw.choice([500, 3000, 9000]) * 1_000_000
        match draw.choice(["nothing", "freeze", "cut off"]):
            case "freeze":
                bucket.frozen_until_ns = world.now_ns + for_ns
            case "cut off":
                name = draw.choice(self.nodes).name
                bucket.cut_off.add(name)
                world.later(for_ns, lambda: bucket.cut_off.discard(name))

    def _stop(self, node: Node, args: dict[str, Any], *, kill: bool) -> None:
        daemon = node.daemon
        if kill:
            process = daemon.process
            process.kill_at_op = process.ops + args["ops"]
            until_ns = self.world.now_ns + 2 * _SECOND
            while not (process.dead or daemon.ended) and self.world.now_ns < until_ns:
                self.world.block(self.world.now_ns + 100_000_000)
            process.die()
        elif daemon.serving:
            daemon.stop()
            self.until(lambda: not daemon.alive, 90, "a daemon does not end")
        else:
            return
        self.records_lost()
        daemon.process.reap()
        self.world.pass_time(1 + args["down_ms"] * 1_000_000)
        node.restart()

    def go(self) -> None:
        self._watch()
        self._all_serve()
        for number, node in enumerate(self.nodes):
            steps = self.plan.of(f"client{number}")
            node.clients.append(FleetClient(node, f"client{number}", steps))  # type: ignore[arg-type]
        for step in self.plan.of(NEMESIS):
            self.harm(step)
        self.until(
            lambda: all(client.done for node in self.nodes for client in node.clients),
            _CLIENTS_S,
            "clients do not finish their steps",
        )
        self._check_the_end()

    def _all_serve(self) -> None:
        self.until(
            lambda: not any(node.disturbed() for node in self.nodes) and not self.parted,
            _START_S,
            "a node does not serve",
        )

    def _check_the_end(self) -> None:
        """No node has anything that was deleted, nor does a search bring it there."""
        self._all_serve()
        self.world.pass_time(BOUND_S * _SECOND)
        self.records_lost()
        for node in self.nodes:
            for entry in list(_entries(node.daemon)):
                stale = self._stale(node.oracle.true_crc(node.daemon, entry))
                if stale is not None:
                    self._fail(stale, f"is on {node.name}")
        searches = [
            Step(2000 + n, "reader", "search", {"keys": [n], "hold_ms": 0, "wait_ms": 3000})
            for n in range(KEYS)
        ]
        readers = [FleetClient(node, "reader", searches) for node in self.nodes]  # type: ignore[arg-type]
        for node, reader in zip(self.nodes, readers, strict=True):
            node.clients.append(reader)
        self.until(lambda: all(reader.done for reader in readers), _CLIENTS_S, "no end of reading")
        for node in self.nodes:
            node.oracle.recount(node.daemon)


def _entries(daemon: SimDaemon) -> Iterator[Any]:
    for shard in daemon.core.state.tables.entries.shards:
        yield from shard.values()


@contextmanager
def _simulated(fleet: list[Fleet], world: World) -> Iterator[None]:
    """Give sharing the world's clock, and the peers of the fleet."""

    def monotonic() -> float:
        return world.now_ns / 1e9

    with ExitStack() as stack:
        for module in _CLOCKS:
            stack.enter_context(mock.patch.object(module, "monotonic", monotonic))
        make = lambda address, reader: SimPeer(fleet[0], address, reader)  # noqa: E731
        stack.enter_context(mock.patch.object(peers, "DaemonPeer", make))
        stack.enter_context(mock.patch.object(peers, "_ADDRESS", _Anything()))
        yield


class _Anything:
    """Stands in for a pattern: simulated addresses are right."""

    def fullmatch(self, _text: bytes) -> bool:
        return True


def run_fleet(plan: Plan) -> RunOutcome:
    """Run a plan to its end, or until it breaks a promise."""
    root = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="sim-", dir=root) as directory, _quiet():
        return _run(plan, Path(directory))


def _run(plan: Plan, directory: Path) -> RunOutcome:
    world = World(plan.seed, yield_rate=plan.yield_rate)
    devices = Devices(world, directory)
    fleets: list[Fleet] = []
    # Each loop puts back what it found, but they don't end in the order of their beginnings.
    hooks = sys.get_asyncgen_hooks()
    with _simulated(fleets, world), installed(world, devices):
        try:
            fleets.append(Fleet(plan, world, devices))
            fleets[0].go()
        except Failure:
            assert world.failure is not None
        finally:
            world.end()
            sys.set_asyncgen_hooks(*hooks)
    return RunOutcome(
        plan=plan,
        failure=world.failure and world.failure.without_frames(),
        counts=dict(sorted(fleets[0].counts.items())) if fleets else {},
        digest=world.digest,
        switches=world.switches,
        events=sum(node.oracle.events for node in fleets[0].nodes) if fleets else 0,
    )
