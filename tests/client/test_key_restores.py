"""Restores by key: when they look first. What they do otherwise is in tests/contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from prefixd.client import ClaimMode, Client, MissReason
from prefixd.client.counters import Counters
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.grpc_transport import GrpcTransport
from prefixd.proto.errors import DeadlineExceeded
from prefixd.proto.keys import Key
from tests.support.fake_clients import ALL, ONE, THREE, TWO, fake_daemon
from tests.support.fakes import FakeDaemon

daemon = pytest.fixture(fake_daemon)


class Noting(GrpcTransport):
    """Says what it was asked, and does it the long way."""

    shared = False
    fails: Exception | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: list[str] = []
        super().__init__(*args, **kwargs)

    @property
    def shares(self) -> bool:
        return self.shared

    def fetch_found(self, *_: Any) -> bool:
        self.asked.append("fetch_found")
        if self.fails is not None:
            raise self.fails
        return False

    def pull(
        self, keys: Sequence[Key], _mode: ClaimMode, _wait_ms: int, _deadline: Deadline
    ) -> int:
        self.asked.append(f"pull {len(keys)}")
        return 0


@pytest.fixture
def transport(daemon: FakeDaemon) -> Noting:
    return Noting(daemon.address, "me", counters=Counters())


@pytest.fixture
def client(transport: Noting) -> Iterator[Client]:
    with Client(transport=transport, counters=transport._counters) as client:
        yield client


def test_what_other_nodes_have_is_brought_before_bytes_move(
    daemon: FakeDaemon, transport: Noting, client: Client
) -> None:
    daemon.put(ONE, b"one")
    transport.shared = True
    buffers = [bytearray(3) for _ in ALL]
    result = client.restore_keys([ONE, TWO, THREE], buffers)
    assert result.misses == (None, MissReason.ABSENT, MissReason.ABSENT)
    assert transport.asked == ["pull 2"]
    # Pages are not brought, so that there is nothing to wait for.
    assert client.restore_keys([ONE], buffers[:1], mode=ClaimMode.ANY)
    assert transport.asked == ["pull 2", "fetch_found"]
    assert not daemon.claims


def test_what_fails_before_it_is_known_what_is_there_is_a_miss_of_all(
    transport: Noting, client: Client
) -> None:
    transport.fails = DeadlineExceeded("too late")
    result = client.restore_keys([ONE, TWO], [bytearray(3), bytearray(3)])
    assert result.misses == (MissReason.DEADLINE,) * 2
    assert transport.asked == ["fetch_found"]
    counted: Any = client.counters
    assert (counted["lookups"], counted["misses"]["deadline"]) == (1, 1)
    assert not any(counted["failures"].values()), "it is counted once"
