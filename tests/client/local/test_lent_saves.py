"""Saves that lend this process's memory: they are stored right, or go another way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from prefixd.client import Client, ReserveItem, SaveItem, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local import staging
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire.framed_connection import FramedConnection
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DeadlineExceeded, LimitReached, UnreadableMemory
from prefixd.proto.keys import Key
from prefixd.proto.payload import Pieces
from tests.support.daemon import private_daemon

PAYLOAD_BYTES = 300_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--server.staging=1MiB", ram="64MiB") as running:
        yield running


@pytest.fixture
def client(daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(staging, "LEND_BYTES", 1)
    with Client(daemon.address) as connected:
        assert connected.wait_connected()
        yield connected


def transport_of(client: Client) -> LocalTransport:
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    return transport


def lends(client: Client) -> bool:
    node = transport_of(client)._node
    assert node is not None
    return node.lends


def staged(client: Client) -> bool:
    """Whether anything was saved through staging memory."""
    node = transport_of(client)._node
    return node is not None and node.staging is not None


def items(count: int) -> list[SaveItem]:
    return [SaveItem(Key(os.urandom(32)), os.urandom(PAYLOAD_BYTES), 1) for _ in range(count)]


def assert_saved(client: Client, wanted: list[SaveItem]) -> None:
    with client.claim([item.key for item in wanted]) as hit:
        assert len(hit) == len(wanted)
        assert [hit.read(number) for number in range(len(hit))] == [i.payload for i in wanted]


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
def test_lent_payloads_are_found_and_take_no_staging_memory(client: Client, tier: Tier) -> None:
    wanted = items(5)
    outcomes = client.save_many(wanted, tier=tier)
    assert [outcome.status for outcome in outcomes] == [SaveStatus.SAVED] * 5
    assert_saved(client, wanted)
    assert lends(client)
    assert not staged(client)


def test_payloads_in_pieces_are_lent_too(client: Client) -> None:
    keys = [Key(os.urandom(32)) for _ in range(2)]
    data = os.urandom(PAYLOAD_BYTES)
    view = memoryview(data)
    pieces = [view[:10], view[10:11], view[11:200_000], view[200_000:]]
    wanted = [SaveItem(keys[0], pieces, 1), SaveItem(keys[1], data, 1)]
    outcomes = client.save_many(wanted, tier=Tier.RAM)
    assert [outcome.status for outcome in outcomes] == [SaveStatus.SAVED] * 2
    with client.claim(keys) as hit:
        assert [hit.read(number) for number in range(2)] == [data, data]
    assert not staged(client)


def test_a_reservation_is_written_from_where_its_payload_lies(client: Client) -> None:
    data = os.urandom(PAYLOAD_BYTES)
    key = Key(os.urandom(32))
    (reservation,) = client.reserve([ReserveItem(key, len(data))], tier=Tier.RAM)
    assert reservation.write(data).status is SaveStatus.SAVED
    with client.claim([key]) as hit:
        assert hit.read(0) == data
    assert not staged(client)


def test_few_bytes_and_very_many_pieces_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LEND_BYTES", 1_000)
    monkeypatch.setattr(staging, "MAX_LENT_PIECES", 10)
    assert not staging.can_lend([memoryview(bytes(500)), memoryview(bytes(499))])
    assert staging.can_lend([memoryview(bytes(500)), memoryview(bytes(500))])
    assert staging.can_lend([Pieces([memoryview(bytes(200))] * 10)])
    assert not staging.can_lend([Pieces([memoryview(bytes(200))] * 11)])


@pytest.mark.parametrize("problem", [UnreadableMemory, LimitReached])
def test_what_cant_be_lent_is_staged(
    client: Client, monkeypatch: pytest.MonkeyPatch, problem: type[Exception]
) -> None:
    """Lending is tried again if the daemon was busy, but not if it may not read this process."""
    asked = []

    real_send = FramedConnection.begin

    def send(line: FramedConnection, request: pb.FramedRequest, timeout_s: float) -> None:
        if request.HasField("save_lent"):
            asked.append(1)
            raise problem("no")
        real_send(line, request, timeout_s)

    monkeypatch.setattr(FramedConnection, "begin", send)
    for _ in range(2):
        wanted = items(2)
        outcomes = client.save_many(wanted, tier=Tier.RAM)
        assert [outcome.status for outcome in outcomes] == [SaveStatus.SAVED] * 2
        assert_saved(client, wanted)
    assert staged(client)
    assert lends(client) is (problem is LimitReached)
    assert len(asked) == (2 if problem is LimitReached else 1)


def test_memory_is_taken_back_before_a_save_that_gave_up_returns(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon reads the token again after its copy, and finds that the caller has the buffer."""
    lent: list[bytes] = []
    tokens: list[bytearray] = []
    real_send, real_address_of = FramedConnection.begin, staging.address_of

    def send(line: FramedConnection, request: pb.FramedRequest, timeout_s: float) -> None:
        if not request.HasField("save_lent"):
            real_send(line, request, timeout_s)
            return
        lent.append(request.save_lent.token)
        assert tokens == lent
        raise DeadlineExceeded("the daemon did not answer in time")

    def address_of(token: bytearray) -> AbstractContextManager[int]:
        tokens.append(token)
        return real_address_of(token)

    monkeypatch.setattr(FramedConnection, "begin", send)
    monkeypatch.setattr(staging, "address_of", address_of)
    (outcome,) = client.save_many(items(1), tier=Tier.RAM, reason=SaveReason.EVICT)
    assert outcome.status is SaveStatus.DEADLINE
    assert tokens == [bytearray(16)] != lent
