"""Real daemons before a bucket: it has what the nodes, and the engine, have lost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import obstore
import pytest
from obstore.store import from_url

from prefixd.client import Client, DeleteStatus, Tier
from tests.server.sharing.test_two_nodes import (
    BLOCK_TOKENS,
    NAMESPACE,
    evict_all,
    keys_of,
    prefixctl,
    restored_blocks,
    save,
    wait_for_engine,
)
from tests.support.daemon import eventually
from tests.support.fake_redis import FakeRedis
from tests.support.outside import RAM_ALONE, DaemonProcess, daemon_process
from tests.support.ports import free_ports
from tests.support.s3 import S3_URL, moto_s3

BLOCKS = 12


@dataclass
class Fleet:
    """Two daemons, a client of each, the engine, and the bucket behind it."""

    engine: FakeRedis
    bucket: Any
    daemons: list[DaemonProcess]
    clients: list[Client]

    #: Whether the nodes have the payloads, else the engine.
    nodes: bool
    #: How many blocks of other prompts each node has given to the bucket.
    primed: list[int] = field(default_factory=list)

    def objects(self) -> int:
        """How many blocks of the prompt the bucket has."""
        names = {each["path"][-64:] for batch in obstore.list(self.bucket, "1/") for each in batch}
        return len(names & {key.hex() for key in keys_of(self.clients[0])})

    def listed(self) -> dict[bytes, bytes]:
        """What the engine has of the prompt."""
        keys = [key.hex().encode() for key in keys_of(self.clients[0])]
        values = dict(self.engine.values)
        return {k: v for k, (v, _) in values.items() if any(key in k for key in keys)}

    def prime(self) -> None:
        """Wait until each node vouches for what it offers, which the bucket requires."""
        numbers = itertools.count(10_000)
        for number, client in enumerate(self.clients):

            def vouched(number: int = number, client: Client = client) -> bool:
                tokens = [next(numbers)] * BLOCK_TOKENS
                (key,) = client.chain(NAMESPACE, tokens, BLOCK_TOKENS).keys
                client.save(key, b"anything", tier=Tier.RAM)
                return self.shared(number)["bucket_offered"] > 0

            eventually(vouched)
            eventually(lambda number=number: not self.shared(number)["waiting_offers"])
        self.primed = [self.shared(number)["bucket_offered"] for number in range(2)]

    def shared(self, number: int) -> dict[str, int]:
        """The counters of a node."""
        with self.daemons[number].admin() as admin:
            return admin.stats().shared


@pytest.fixture(params=["moto", *(["s3"] if S3_URL in os.environ else [])])
def bucket_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "s3":
        yield os.environ[S3_URL]
        return
    with moto_s3() as (url, variables), patch.dict(os.environ, variables):
        yield url


@pytest.fixture(params=["nodes", "engine"])
def fleet(request: pytest.FixtureRequest, bucket_url: str) -> Iterator[Fleet]:
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        bucket = from_url(bucket_url, client_options={"allow_http": True})
        daemons, clients = [], []
        for port in free_ports(2):
            address = f"127.0.0.1:{port}"
            nodes = (
                "--shared.payloads=nodes",
                f"--shared.address={address}",
                f"--server.tcp={address}",
            )
            daemon = stack.enter_context(
                daemon_process(
                    *RAM_ALONE,
                    f"--shared.engine={engine.url}",
                    f"--shared.capacity={bucket_url}",
                    "--shared.write=all",
                    *(nodes if request.param == "nodes" else ()),
                )
            )
            daemon.start()
            daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=30_000, deadline_ms=60_000)
            clients.append(stack.enter_context(client))
        wait_for_engine(daemons, 2)
        fleet = Fleet(engine, bucket, daemons, clients, request.param == "nodes")
        fleet.prime()
        yield fleet
        for batch in obstore.list(bucket):
            obstore.delete(bucket, [each["path"] for each in batch])


def save_all(fleet: Fleet) -> None:
    """Save on the first node, and wait until the engine and the bucket have all blocks."""
    save(fleet.clients[0], range(BLOCKS))
    eventually(lambda: fleet.objects() == len(fleet.listed()) == BLOCKS)


def test_a_node_reads_from_the_bucket_what_is_gone_with_another(fleet: Fleet) -> None:
    save_all(fleet)
    second = fleet.clients[1]
    fleet.daemons[0].kill()
    if not fleet.nodes:
        fleet.engine.values.clear()  # it had the payloads
    before = set(fleet.listed().values())
    assert restored_blocks(second) == BLOCKS, "it also compares the bytes"
    shared = fleet.shared(1)
    assert shared["bucket_fetched"] == BLOCKS
    assert shared["bucket_offered"] == fleet.primed[1], "the bucket has them already"
    assert "objects" in prefixctl(fleet.daemons[1], "why", keys_of(second)[3].hex())

    def refilled() -> bool:
        now = fleet.listed()
        return restored_blocks(second) == len(now) == BLOCKS and not before & set(now.values())

    eventually(refilled)


def test_a_node_reads_from_another_node_what_both_have(fleet: Fleet) -> None:
    save_all(fleet)
    assert restored_blocks(fleet.clients[1]) == BLOCKS
    assert fleet.shared(1)["bucket_fetched"] == 0
    if fleet.nodes:  # this one offers them, too
        eventually(lambda: fleet.shared(1)["offered_entries"] >= fleet.primed[1] + BLOCKS)
    assert fleet.shared(1)["bucket_offered"] == fleet.primed[1], "who saved them gave them to it"


def test_what_was_evicted_everywhere_comes_back_and_what_was_deleted_does_not(
    fleet: Fleet,
) -> None:
    save_all(fleet)
    keys = keys_of(fleet.clients[0])
    assert fleet.clients[1].delete(keys[7:8]) == [DeleteStatus.ABSENT]
    assert fleet.objects() == BLOCKS - 1
    eventually(lambda: restored_blocks(fleet.clients[0]) == 7)
    evict_all(fleet.daemons[0])
    fleet.engine.values.clear()
    assert restored_blocks(fleet.clients[1]) == 7
    assert fleet.shared(1)["bucket_fetched"] == 7
    fleet.engine.values.clear()
    fleet.engine.streams.clear()
    eventually(lambda: fleet.engine.streams)
    for client in fleet.clients:
        assert restored_blocks(client) <= 7
