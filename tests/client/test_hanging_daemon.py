"""A daemon that is stopped (SIGSTOP) or gone costs one call its deadline, and other calls nothing.

A call that waits longer fails here: its status is `deadline`, or its test takes `LONG_MS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prefixd.client import Client, MissReason, Namespace, ReserveItem, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.results import ReserveStatus
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon
from tests.support.fakes import PATIENCE_S, keys

NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)
TOKENS = list(range(30_000))
ONE, TWO, THREE, FOUR = (Key(key) for key in keys(4))
#: So long that a test fails when a call waits for it.
LONG_MS = round(PATIENCE_S * 1e3)
TERMS: dict[str, Any] = {"tier": Tier.RAM, "reason": SaveReason.EVICT}


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--sessions.heartbeat=400ms", ram="64MiB") as daemon:
        yield daemon


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def client(daemon: PrivateDaemon, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(daemon.address, local=request.param, deadline_ms=LONG_MS) as client:
        assert client.wait_connected()
        assert client.save(ONE, b"abc", **TERMS).ok
        yield client


@contextmanager
def stopped(daemon: PrivateDaemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def rpcs(client: Client) -> int:
    counted = client.counters["rpcs"]
    assert isinstance(counted, dict)
    return sum(counted.values())


def claims_again(client: Client) -> bool:
    with client.claim([ONE]) as hit:
        return hit.read(0) == b"abc"


def test_one_call_pays_and_no_other_is_made(daemon: PrivateDaemon, client: Client) -> None:
    hit = client.claim([ONE])
    with stopped(daemon):
        assert client.claim([ONE], deadline_ms=50).miss is MissReason.DEADLINE
        asked = rpcs(client)
        assert not client.connected
        for _ in range(3):
            assert client.claim([ONE]).miss is MissReason.UNAVAILABLE
            assert not client.longest_prefix(NAMESPACE, TOKENS)
            assert client.save(TWO, b"abc", **TERMS).status is SaveStatus.UNAVAILABLE
        (reservation,) = client.reserve([ReserveItem(TWO, 3)], **TERMS)
        assert reservation.status is ReserveStatus.FAILED
        hit.release()
        assert rpcs(client) <= asked + 1  # a release in place sends one, and does not wait
    assert client.wait_connected()
    assert claims_again(client)
    assert client.counters["sessions"] == 1


def test_heartbeats_end_a_call_that_would_wait_long(daemon: PrivateDaemon, client: Client) -> None:
    """The session ends, which ends its calls; later calls do not wait for the next session."""
    with stopped(daemon):
        outcome = client.save(TWO, b"abc", deadline_ms=LONG_MS, **TERMS)
        assert outcome.status is SaveStatus.UNAVAILABLE
        assert client.claim([ONE]).miss is MissReason.UNAVAILABLE
    assert client.wait_connected()
    assert claims_again(client)
    assert client.counters["sessions"] == 2


def test_a_daemon_that_hangs_from_the_start_costs_one_call(
    daemon: PrivateDaemon, client: Client
) -> None:
    with stopped(daemon), Client(daemon.address, local=client.connected) as late:
        assert late.claim([ONE], deadline_ms=50).miss is MissReason.DEADLINE
        assert late.claim([ONE], deadline_ms=LONG_MS).miss is MissReason.UNAVAILABLE


@pytest.mark.parametrize("payload_bytes", [3, 6 * 2**20])
def test_closing_waits_for_nothing(
    daemon: PrivateDaemon, client: Client, payload_bytes: int
) -> None:
    """Not for a running save, even if the connection is full of its bytes."""
    terms: dict[str, Any] = {"tier": Tier.RAM, "reason": SaveReason.COLD, "deadline_ms": LONG_MS}
    with stopped(daemon):
        data = bytes(payload_bytes)
        futures = [client.save_async(key, data, **terms) for key in (TWO, THREE, FOUR)]
        eventually(futures[0].running)
        client.close(deadline_ms=0)
        statuses = [future.result(PATIENCE_S).status for future in futures]
        assert statuses == [SaveStatus.UNAVAILABLE, SaveStatus.DROPPED, SaveStatus.DROPPED]


def test_closing_ends_a_call_that_waits_for_the_first_connection(daemon: PrivateDaemon) -> None:
    with stopped(daemon):
        client = Client(daemon.address, connect_timeout_ms=LONG_MS)
        found: list[MissReason | None] = []
        begun = threading.Event()

        def claim() -> None:
            begun.set()
            found.append(client.claim([ONE], deadline_ms=LONG_MS).miss)

        thread = threading.Thread(target=claim)
        thread.start()
        assert begun.wait(PATIENCE_S)
        eventually(lambda: client.counters["lookups"] or thread.is_alive())
        client.close(deadline_ms=0)
        thread.join(PATIENCE_S)
    # If the client was closed before the call began, the call raised, which ended the thread.
    assert found in ([MissReason.UNAVAILABLE], [])


#: Every method that calls the daemon, with its deadline.
CALLS: dict[str, Any] = {
    "claim": lambda client, ms: client.claim([ONE], deadline_ms=ms),
    "probe": lambda client, ms: client.probe([ONE], deadline_ms=ms),
    "exists": lambda client, ms: client.exists([ONE, TWO], deadline_ms=ms),
    "longest_prefix": lambda client, ms: client.longest_prefix(NAMESPACE, TOKENS, deadline_ms=ms),
    "longest_run": lambda client, ms: client.longest_run([ONE], deadline_ms=ms),
    "resume": lambda client, ms: client.resume(ONE, TOKENS, 0, namespace=NAMESPACE, deadline_ms=ms),
    "reserve": lambda client, ms: client.reserve([ReserveItem(TWO, 3)], deadline_ms=ms, **TERMS),
    "save": lambda client, ms: client.save(TWO, b"abc", deadline_ms=ms, **TERMS),
    "delete": lambda client, ms: client.delete([TWO], deadline_ms=ms),
    "flush": lambda client, ms: client.flush(deadline_ms=ms),
    "wait_connected": lambda client, ms: client.wait_connected(deadline_ms=ms),
}


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize("call", CALLS)
def test_the_first_call_ends_by_its_deadline(daemon: PrivateDaemon, call: str, local: bool) -> None:
    """The first call of a client, which has to connect, and the first of a connected one. A call
    that waited for anything else would take `LONG_MS`."""
    began_s = time.monotonic()
    options: dict[str, Any] = {
        "local": local,
        "deadline_ms": LONG_MS,
        "connect_timeout_ms": LONG_MS,
    }
    with Client(daemon.address, **options) as connected:
        assert connected.wait_connected()
        with stopped(daemon), Client(daemon.address, **options) as fresh:
            for client in (connected, fresh):
                CALLS[call](client, 20)
                client.close(deadline_ms=0)
    assert time.monotonic() - began_s < LONG_MS / 1e3


ENDING = """
import os, signal, sys
from prefixd.client import Client, SaveReason, Tier

address, pid, local = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "local"
client = Client(address, local=local, deadline_ms=3_600_000, save_timeout_ms=3_600_000)
terms = {"tier": Tier.RAM, "reason": SaveReason.EVICT}
assert client.save(b"e" * 32, b"abc", **terms).ok
hit = client.claim([b"e" * 32])
os.kill(pid, signal.SIGSTOP)
saving = client.save_async(b"f" * 32, b"abc", **terms)
"""


@pytest.mark.parametrize("local", ["local", "remote"])
def test_a_program_ends_beside_a_daemon_that_hangs(daemon: PrivateDaemon, local: str) -> None:
    """A program that has a hit and a running save, and does not close its client."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", ENDING, daemon.address, str(daemon.pid), local],
            timeout=PATIENCE_S,
            capture_output=True,
            text=True,
        )
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
def test_a_daemon_that_is_gone_costs_nothing(local: bool) -> None:
    with private_daemon() as daemon, Client(daemon.address, local=local) as client:
        assert client.save(ONE, b"abc", **TERMS).ok
        daemon.kill()
        eventually(lambda: not client.connected)
        asked = rpcs(client)
        for _ in range(3):
            assert not client.longest_prefix(NAMESPACE, TOKENS)
            assert client.claim([ONE]).miss in (MissReason.UNAVAILABLE, MissReason.ABSENT)
        assert rpcs(client) == asked
        daemon.start()
        assert client.wait_connected(deadline_ms=LONG_MS)
        assert client.save(ONE, b"abc", **TERMS).ok
