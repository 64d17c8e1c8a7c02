"""The client as a whole: what a request costs, threads, restarts, the beginning and the end."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import (
    Client,
    MissReason,
    Namespace,
    ReserveItem,
    SaveItem,
    SaveReason,
    Tier,
)
from prefixd.client.counters import ClientCounters
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.session import Backoff
from prefixd.proto.endpoints import ADDRESS_VARIABLE
from prefixd.proto.errors import CallerError, ClientClosed, ConfigError, InvalidSize
from prefixd.proto.keys import Key
from tests.support.fakes import PATIENCE_S, FakeDaemon, keys, payloads

NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)
ONE = Key(keys(1)[0])


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d.sock"


@pytest.fixture
def daemon(address: str) -> Iterator[FakeDaemon]:
    with FakeDaemon(address) as daemon:
        yield daemon


def rpcs(client: Client) -> dict[str, int]:
    counted = client.counters["rpcs"]
    assert isinstance(counted, dict)
    return {name: number for name, number in counted.items() if number}


# ---- what a request costs


def test_a_request_of_64_blocks_costs_one_rpc_of_each_kind(daemon: FakeDaemon) -> None:
    with Client(daemon.address, local=False) as client:
        chain = client.chain(NAMESPACE, list(range(64 * 16)), 16)
        data = payloads([4_096] * 64)
        for key, payload in zip(chain[:40], data, strict=False):
            daemon.put(key, payload)
        with client.longest_run(chain) as hit:
            targets = [bytearray(4_096) for _ in hit.entries]
            assert hit.restore_into(targets)
            saving = client.save_many_async(
                [
                    SaveItem(key, payload, 16)
                    for key, payload in zip(chain[40:], data[40:], strict=True)
                ],
                tier=Tier.RAM,
                reason=SaveReason.FINISH,
                ancestors=chain[:40],
            )
        assert all(outcome.ok for outcome in saving.result(PATIENCE_S))
        assert targets == data[:40]
        assert rpcs(client) == {"Claim": 1, "Read": 1, "Save": 1, "Release": 1}
        assert {name: daemon.rpcs[name] for name in rpcs(client)} == rpcs(client)
        assert not daemon.rpcs["Lookup"]


def test_a_miss_costs_an_rpc_for_4096_keys(daemon: FakeDaemon) -> None:
    with Client(daemon.address, local=False) as client:
        assert not client.longest_prefix(NAMESPACE, list(range(30_000)))
        assert rpcs(client) == {"Claim": 8}
        assert not client.longest_prefix(NAMESPACE, list(range(30_000)), stride_tokens=2_048)
        assert rpcs(client) == {"Claim": 9}


# ---- threads


def test_threads_share_a_client(daemon: FakeDaemon) -> None:
    with Client(daemon.address, local=False) as client, ThreadPoolExecutor(8) as threads:

        def work(number: int) -> bool:
            key, payload = Key(keys(1, number)[0]), payloads([50_000], number)[0]
            outcome = client.save(key, payload, tier=Tier.RAM, reason=SaveReason.EVICT)
            buffer = bytearray(50_000)
            with client.claim([key]) as hit:
                return outcome.ok and bool(hit.restore_into([buffer])) and buffer == payload

        assert all(threads.map(work, range(60)))
    assert client.counters["hits"] == client.counters["saved_entries"] == 60
    daemon.wait_until(lambda: not daemon.sessions)


# ---- restarts


def make_client(address: str, **options: Any) -> Client:
    """A client that reconnects almost at once."""
    counters = ClientCounters()
    transport = RemoteTransport(address, counters=counters, backoff=Backoff(1, 4), wire="grpc")
    return Client(transport=transport, counters=counters, **options)


def test_a_client_outlives_the_daemon(address: str) -> None:
    daemon = FakeDaemon(address).start()
    with make_client(address) as client:
        assert client.save(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
        held = client.claim([ONE])
        (reservation,) = client.reserve(
            [ReserveItem(Key(b"r" * 32), 3)], tier=Tier.RAM, reason=SaveReason.COLD
        )
        daemon.stop()
        assert client.claim([ONE]).miss in (MissReason.UNAVAILABLE, MissReason.DEADLINE)
        assert not client.save(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
        daemon.start(forget=True)
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        assert client.claim([ONE]).miss is MissReason.ABSENT
        assert client.save(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
        with client.claim([ONE]) as hit:
            assert hit.read(0) == b"abc"
        assert held.lost
        assert held.restore_into([bytearray(3)]).miss is MissReason.LOST
        assert not held.release()
        assert reservation.lost
        assert not reservation.write(b"abc").ok
        assert client.counters["sessions"] == 2
    daemon.stop()


# ---- the beginning and the end


def test_the_default_address_is_that_of_the_daemon(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, daemon.address)
    with Client(name="by default") as client:
        assert client.wait_connected()
        assert client.connected
    assert daemon.hellos[0].client_name == "by default"


def test_waiting_for_a_connection_is_bounded(address: str) -> None:
    with Client(address) as client:
        assert not client.wait_connected(deadline_ms=5)
        assert not client.connected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"address": "nonsense"}, ConfigError),
        ({"name": "n" * 200}, InvalidSize),
        ({"deadline_ms": 0}, InvalidSize),
        ({"connect_timeout_ms": 0}, InvalidSize),
        ({"save_timeout_ms": -1}, InvalidSize),
        ({"lease_ms": 3_600_001}, InvalidSize),
        ({"max_pending_saves": -1}, InvalidSize),
        ({"prefill_tokens_per_s": 0}, InvalidSize),
        ({"min_benefit_ms": -1}, InvalidSize),
        ({"verify": "sometimes"}, CallerError),
    ],
)
def test_settings_are_checked_and_leave_no_thread(
    address: str, options: dict[str, Any], error: type[CallerError]
) -> None:
    with pytest.raises(error):
        Client(**{"address": address, **options})
    assert not [t for t in threading.enumerate() if t.name.startswith("prefixd-")]


def test_a_closed_client_says_so(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, local=False)
    (reservation,) = client.reserve(
        [ReserveItem(Key(b"r" * 32), 3)], tier=Tier.RAM, reason=SaveReason.COLD
    )
    client.close()
    client.close()
    assert not client.connected
    uses: list[Any] = [
        lambda: client.claim([ONE]),
        lambda: client.probe([ONE]),
        lambda: client.longest_prefix(NAMESPACE, [1]),
        lambda: client.save(ONE, b"a", tier=Tier.RAM, reason=SaveReason.COLD),
        lambda: client.reserve([ReserveItem(ONE, 1)], tier=Tier.RAM, reason=SaveReason.COLD),
        lambda: client.write([(reservation, b"abc")]),
        lambda: client.cancel([reservation]),
        lambda: client.flush(),
        lambda: client.wait_connected(),
    ]
    for use in uses:
        with pytest.raises(ClientClosed):
            use()
    assert client.counters["sessions"] == 1


def test_closing_leaves_no_thread_and_no_session(daemon: FakeDaemon) -> None:
    before = set(threading.enumerate())
    with Client(daemon.address, local=False) as client:
        saving = client.save_async(ONE, b"abc", tier=Tier.RAM)
        assert saving.result(PATIENCE_S).ok
        with client.claim([ONE]) as hit:
            assert hit.read(0) == b"abc"
    daemon.wait_until(lambda: not daemon.sessions)
    ours = [t for t in set(threading.enumerate()) - before if "fake-daemon" not in t.name]
    for thread in ours:
        thread.join(PATIENCE_S)  # threads of gRPC, which end with the channel
    assert not [thread for thread in ours if thread.is_alive()]


def test_a_dropped_client_leaves_with_a_warning(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, local=False)
    assert client.wait_connected()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del client
        gc.collect()
    assert [str(each.message) for each in warned] == ["a client was never closed"]
    daemon.wait_until(lambda: not daemon.sessions)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefixd-")]


def test_closing_ends_the_calls_of_other_threads(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, local=False)
    daemon.hold("Claim")
    with ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(client.claim, [ONE])
        daemon.wait_until(lambda: daemon.rpcs["Claim"])
        client.close()
        assert claiming.result(PATIENCE_S).miss is MissReason.UNAVAILABLE
