"""Saves through staging memory: many at once, and more than fit into it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prefixd.client import Client, Key, ReserveItem, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.wire import framed_calls
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.framed_connection import FramedConnection
from tests.support.daemon import eventually
from tests.support.entries import items_of, key_of, payload_of, restore, rpcs, save
from tests.support.small_staging import (
    STAGING_BYTES,
    admin_of,
    memory_of,
    small_staging_daemon,
    staging_client,
)

daemon = pytest.fixture(small_staging_daemon, scope="module")
admin = pytest.fixture(admin_of)
client = pytest.fixture(staging_client)
#: The payload of one item. Those of several don't fit into staging memory.
PAYLOAD_BYTES = 700_000


# ---- as clients save


@pytest.mark.parametrize("tier", Tier)
def test_payloads_larger_than_staging(client: Client, tier: Tier) -> None:
    """With small ones beside them: slot after slot, in one rpc."""
    large = items_of([f"large {tier} {n}" for n in range(3)], 5 * STAGING_BYTES + 13)
    small = items_of([f"small {tier} {n}" for n in range(5)], 1_001)
    items = [small[0], large[0], *small[1:3], large[1], large[2], *small[3:]]
    outcomes = client.save_many(items, tier=tier, reason=SaveReason.EVICT, deadline_ms=60_000)
    assert {outcome.status for outcome in outcomes} == {SaveStatus.SAVED}
    assert rpcs(client) == {"SaveStaged": 1}
    with client.claim([item.key for item in items]) as hit:
        assert restore(hit)[1] == [item.payload for item in items]


def test_many_threads_save_at_once(client: Client, admin: AdminConnection) -> None:
    """With one slot, which they take in turns."""
    names = [[f"thread {thread} {n}" for n in range(5)] for thread in range(8)]
    with ThreadPoolExecutor(8) as threads:
        saved = list(threads.map(lambda mine: save_patiently(client, mine), names))
    keys = [key for mine in saved for key in mine]
    with client.claim(keys) as hit:
        assert restore(hit)[1] == [payload_of(key, PAYLOAD_BYTES) for key in keys]
    assert admin.stats().reservations == 0
    assert memory_of(client).take(Deadline(0)) == 0, "and gave it back"


def save_patiently(client: Client, names: list[str]) -> list[Key]:
    items = items_of(names, PAYLOAD_BYTES)
    outcomes = client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT, deadline_ms=60_000)
    assert {outcome.status for outcome in outcomes} == {SaveStatus.SAVED}
    return [item.key for item in items]


def test_without_a_slot_a_synchronous_save_waits_its_bound(
    client: Client, admin: AdminConnection
) -> None:
    (item,) = items_of(["no slot"], PAYLOAD_BYTES)
    slot = memory_of(client).take(Deadline(0))
    (outcome,) = client.save_many([item], tier=Tier.RAM, reason=SaveReason.EVICT, deadline_ms=300)
    assert outcome.status is SaveStatus.DEADLINE
    memory_of(client).give(slot)
    eventually(lambda: admin.stats().reservations == 0)
    assert not client.exists([item.key])[0]
    assert client.wait_connected(), "the call without an answer made the session suspect"
    (outcome,) = client.save_many([item], tier=Tier.RAM, reason=SaveReason.EVICT)
    assert outcome.status is SaveStatus.SAVED


def test_without_a_slot_asynchronous_saves_are_dropped_and_counted(client: Client) -> None:
    """Those that don't fit into the queue are; the call never blocks."""
    items = items_of([f"waiting {n}" for n in range(5)], PAYLOAD_BYTES)
    slot = memory_of(client).take(Deadline(0))
    futures = [client.save_many_async([item], tier=Tier.RAM, deadline_ms=60_000) for item in items]
    assert [future.result()[0].status for future in futures[2:]] == [SaveStatus.DROPPED] * 3
    assert not any(future.done() for future in futures[:2])
    memory_of(client).give(slot)
    assert [future.result()[0].status for future in futures[:2]] == [SaveStatus.SAVED] * 2
    saves = client.counters["saves"]
    assert isinstance(saves, dict)
    assert (saves["dropped"], saves["saved"]) == (3, 2)


def test_what_is_there_already_is_not_saved_again(client: Client) -> None:
    items = items_of([f"twice {n}" for n in range(3)], PAYLOAD_BYTES)
    save_patiently(client, ["twice 1"])
    outcomes = client.save_many(items, tier=Tier.SHM, reason=SaveReason.EVICT, deadline_ms=60_000)
    saved, present = SaveStatus.SAVED, SaveStatus.PRESENT
    assert [outcome.status for outcome in outcomes] == [saved, present, saved]


def test_staging_of_a_session_that_ended_is_not_used(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the session is lost just before the call, the save goes over gRPC."""
    with Client(daemon.address) as client:
        memory_of(client)
        transport = client._transport
        assert isinstance(transport, LocalTransport)
        call = transport._call
        sessions = client.counters["sessions"]

        def lose_it_first(name: str, *rest: Any) -> object:
            if name != "SaveStaged":
                return call(name, *rest)
            link = transport.current
            assert link is not None
            transport._keeper.renew(link, "a test lost it")
            assert client.wait_connected(deadline_ms=60_000)
            return call(name, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(transport, "_call", lose_it_first)
            keys = save_patiently(client, ["lost session"])
        assert client.counters["sessions"] == sessions + 1  # type: ignore[operator]
        assert restore(client.longest_run(keys, claim=False))[1] == [
            payload_of(keys[0], PAYLOAD_BYTES)
        ]
        assert rpcs(client)["Save"] == 1


def test_small_saves_are_staged_as_well(client: Client) -> None:
    keys = save(client, ["small"], 1, Tier.RAM)
    assert rpcs(client) == {"SaveStaged": 1}
    assert restore(client.longest_run(keys, claim=False))[1] == [payload_of(keys[0], 1)]


def test_without_a_connection_to_be_had_saves_go_over_grpc(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(client)

    def refuse(*_: object) -> FramedConnection:
        raise OSError("no descriptors left")

    calls = client._transport._node.calls  # type: ignore[attr-defined]
    monkeypatch.setattr(calls, "_idle", [])
    monkeypatch.setattr(framed_calls, "FramedConnection", refuse)
    keys = save(client, ["no line"], PAYLOAD_BYTES, Tier.RAM)
    assert rpcs(client)["Save"] == 1
    with client.claim(keys) as hit:
        assert restore(hit)[1] == [payload_of(keys[0], PAYLOAD_BYTES)]


@pytest.mark.parametrize("tier", Tier)
def test_what_was_reserved_is_written_through_staging(client: Client, tier: Tier) -> None:
    """With one rpc; a reservation that was cancelled meanwhile is lost, and nothing else."""
    sizes = [1, PAYLOAD_BYTES, 2 * STAGING_BYTES + 13]
    keys = [key_of(f"reserved {tier} {number}") for number in range(len(sizes))]
    items = [ReserveItem(key, size) for key, size in zip(keys, sizes, strict=True)]
    reservations = client.reserve(items, tier=tier, reason=SaveReason.EVICT)
    holding = reservations[1]._holding
    assert holding is not None
    assert client._transport.cancel([holding], Deadline(60_000)) == [True]
    data = [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]
    outcomes = client.write(list(zip(reservations, data, strict=True)), deadline_ms=60_000)
    assert [outcome.status for outcome in outcomes] == [
        SaveStatus.SAVED,
        SaveStatus.LOST,
        SaveStatus.SAVED,
    ]
    assert rpcs(client) == {"Reserve": 1, "Cancel": 1, "SaveStaged": 1}
    with client.claim([keys[0], keys[2]]) as hit:
        assert restore(hit)[1] == [data[0], data[2]]
    assert not client.exists([keys[1]])[0]
