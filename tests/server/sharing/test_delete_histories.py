"""Random histories of two real daemons: no node serves what was deleted, once the bound is over.

Each history has a prompt of its own, and each save of it other bytes. The engine loses connections
and all that it has, and nodes are killed meanwhile.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from time import monotonic
from unittest.mock import patch

import pytest

from prefixd.client import Client, DeleteStatus, Key, SaveItem, Tier

from ...support.daemon import eventually
from ...support.fake_redis import FakeRedis
from ...support.lengths import times
from ...support.outside import DaemonProcess, daemon_process
from ...support.ports import free_ports
from ...support.running import payload
from ...support.s3 import moto_s3
from .test_two_nodes import NAMESPACE, wait_for_engine

HISTORIES = times(25, 100)
STEPS = 8
BLOCKS = 3
BLOCK_TOKENS = 16
BLOCK_BYTES = 3_000
#: What the documents promise.
BOUND_S = 5.0


@dataclass
class History:
    """What was saved under each block of a prompt, and when it was deleted."""

    tokens: list[int]
    #: By block and version: when its save ended.
    saved_s: dict[tuple[int, int], float] = field(default_factory=dict)
    #: By block: when each delete began, and when it was answered.
    deleted_s: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def dead_since_s(self, block: int, version: int) -> float | None:
        """When a client was told that this version is gone."""
        saved_s = self.saved_s[block, version]
        later = [told for began, told in self.deleted_s.get(block, []) if began > saved_s]
        return min(later, default=None)


class Nodes:
    """Two daemons, with all tiers, and a client of each."""

    def __init__(self, engine: FakeRedis, stack: ExitStack, *flags: str, served: int) -> None:
        """`served`: nodes of the engine, and the bucket behind it."""
        self.engine = engine
        self.served = served
        self.daemons: list[DaemonProcess] = []
        self.clients: list[Client] = []
        self.calm_s = 0.0
        for port in free_ports(2):
            address = f"127.0.0.1:{port}"
            daemon = stack.enter_context(
                daemon_process(
                    f"--shared.engine={engine.url}",
                    "--shared.write=all",
                    "--disk.budget=0",
                    *(each.format(address=address) for each in flags),
                )
            )
            daemon.start()
            self.daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=5_000, deadline_ms=20_000)
            self.clients.append(stack.enter_context(client))
        wait_for_engine(self.daemons, served)

    def disturb(self, draw: random.Random) -> None:
        logged = bool(self.engine.streams)
        match draw.choice(["hang up", "empty", "kill", *(["evict"] if self.served > 1 else [])]):
            case "hang up":
                self.engine.hang_up()
            case "evict":  # what is left is in the bucket
                self.engine.values.clear()
                for daemon in self.daemons:
                    with daemon.admin() as admin:
                        admin.evict(2**30, [Tier.RAM, Tier.SHM])
            case "empty":
                self.engine.values.clear()
                self.engine.streams.clear()
            case _:
                daemon = draw.choice(self.daemons)
                daemon.kill()
                daemon.start()
        wait_for_engine(self.daemons, self.served)
        if logged:  # who knows a delete must not die before the engine has it again
            eventually(lambda: self.engine.streams)
        self.wait_until_done()
        self.calm_s = monotonic()

    def shared(self) -> Iterator[dict[str, int]]:
        """The counters of each node."""
        for daemon in self.daemons:
            with daemon.admin() as admin:
                yield admin.stats().shared

    def wait_until_done(self) -> None:
        for daemon in self.daemons:
            with daemon.admin() as admin:
                eventually(lambda admin=admin: not admin.stats().shared["waiting_deletes"])


@contextmanager
def nodes(*flags: str, bucket: bool) -> Iterator[Nodes]:
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        capacity = []
        if bucket:
            url, variables = stack.enter_context(moto_s3())
            stack.enter_context(patch.dict(os.environ, variables))
            capacity.append(f"--shared.capacity={url}")
        yield Nodes(engine, stack, *flags, *capacity, served=2 if bucket else 1)


def keys_of(client: Client, history: History) -> list[Key]:
    return client.chain(NAMESPACE, history.tokens, BLOCK_TOKENS).keys


def version_of(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def bytes_of(version: int) -> bytes:
    return version.to_bytes(8, "little") + payload(version % 251, BLOCK_BYTES - 8)


def read(client: Client, history: History, calm_s: float) -> None:
    """Search and restore, and check every block that comes."""
    began_s = monotonic()
    hit = client.longest_run(client.chain(NAMESPACE, history.tokens, BLOCK_TOKENS))
    if not hit:
        return
    buffers = [bytearray(BLOCK_BYTES) for _ in hit.keys]
    restored = hit.restore_into(buffers).restored
    hit.release()
    for block, (good, buffer) in enumerate(zip(restored, buffers, strict=True)):
        if not good:
            continue
        version = version_of(buffer)
        assert bytes(buffer) == bytes_of(version)
        dead_s = history.dead_since_s(block, version)
        assert dead_s is None or began_s < max(dead_s, calm_s) + BOUND_S, (
            f"block {block} was deleted {began_s - dead_s:.1f} s before it was read"
        )


AT_NODES = ("--shared.payloads=nodes", "--shared.address={address}", "--server.tcp={address}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "bucket"),
    [((), False), (AT_NODES, False), (AT_NODES, True)],
    ids=["engine", "nodes", "nodes before a bucket"],
)
def test_no_node_serves_what_was_deleted(flags: tuple[str, ...], bucket: bool) -> None:
    draw = random.Random(7)
    histories = [History([n] * BLOCK_TOKENS * BLOCKS) for n in range(HISTORIES)]
    versions = iter(range(1, 10**9))
    steps = [history for history in histories for _ in range(STEPS)]
    draw.shuffle(steps)
    deletes = 0
    with nodes(*flags, bucket=bucket) as fleet:
        for number, history in enumerate(steps):
            client = draw.choice(fleet.clients)
            keys = keys_of(client, history)
            match draw.choice(["save", "save", "read", "read", "delete"]):
                case "save":
                    written = [next(versions) for _ in keys]
                    tier = draw.choice([Tier.RAM, Tier.SHM])
                    items = [
                        SaveItem(key, bytes_of(version), BLOCK_TOKENS)
                        for key, version in zip(keys, written, strict=True)
                    ]
                    client.save_many(items, tier=tier)
                    for block, version in enumerate(written):
                        history.saved_s[block, version] = monotonic()
                case "read":
                    read(client, history, fleet.calm_s)
                case _:
                    began_s = monotonic()
                    block = draw.randrange(BLOCKS)
                    (status,) = client.delete(keys[block : block + 1])
                    if status in (DeleteStatus.DELETED, DeleteStatus.ABSENT):
                        history.deleted_s.setdefault(block, []).append((began_s, monotonic()))
                        deletes += 1
            if number % 40 == 39:
                fleet.disturb(draw)
        fleet.calm_s = monotonic()
        turns = cycle(histories)
        polls = count()

        def over() -> bool:
            """Reads go on until the bound is over, with pauses between them: others use the
            processor, too."""
            if next(polls) % 5 == 0:
                read(draw.choice(fleet.clients), next(turns), fleet.calm_s)
            return monotonic() > fleet.calm_s + BOUND_S

        eventually(over)
        for history in histories:
            for client in fleet.clients:
                read(client, history, fleet.calm_s)
        assert deletes > HISTORIES
        if bucket:
            assert sum(shared["bucket_fetched"] for shared in fleet.shared()), "it was not tried"
        fleet.wait_until_done()
