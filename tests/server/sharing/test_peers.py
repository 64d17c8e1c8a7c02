"""Reads from another node: one round trip, right bytes or none. Misses go to a second node."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.wire.security import Security
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.engine_store import Outcome, SharedEntry, Wanted
from prefixd.server.sharing.peers import DaemonPeer, PeerStore, ReadTimes
from tests.server.sharing.test_two_nodes import (
    evict_all,
    keys_of,
    lose,
    restored_blocks,
    save,
    wait_for_engine,
)
from tests.support.daemon import eventually, tcp_address, tcp_daemon
from tests.support.fake_redis import FakeRedis
from tests.support.fakes import PATIENCE_S
from tests.support.outside import RAM_ALONE, DaemonProcess, daemon_process
from tests.support.ports import free_ports


def read_of(key: Key, payload: bytes, *, crc: int | None = None) -> Wanted:
    expected = crc32c(payload) if crc is None else crc
    entry = SharedEntry(key, Content(len(payload), 1), expected)
    return Wanted(entry, memoryview(bytearray(len(payload))))


def test_one_round_trip_reads_payloads_independently() -> None:
    keys = [Key(os.urandom(32)) for _ in range(5)]
    payloads = [os.urandom(size) for size in (1, 5_000, 300_000, 7_000, 7_000)]
    with tcp_daemon(ram="64MiB") as daemon:
        with Client(daemon.address) as client:
            for key, payload in list(zip(keys, payloads, strict=True))[:4]:
                assert client.save(key, payload, tier=Tier.RAM, reason=SaveReason.EVICT).ok
        with closing(DaemonPeer(tcp_address(daemon), Security())) as peer:
            assert peer._client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
            reads = [
                read_of(keys[0], payloads[0]),
                read_of(keys[1], payloads[1][1:]),  # a wrong length
                read_of(keys[2], payloads[2]),
                read_of(keys[3], payloads[3], crc=0),  # a wrong checksum
                read_of(keys[4], payloads[4]),  # never saved
            ]
            outcomes = peer.read(reads, monotonic() + PATIENCE_S)
            done, absent = Outcome.DONE, Outcome.ABSENT
            assert outcomes == [done, absent, done, absent, absent]
            assert [bytes(reads[n].room) for n in (0, 2)] == [payloads[0], payloads[2]]
            rpcs = peer._client.counters["rpcs"]
            assert {name: count for name, count in rpcs.items() if count} == {"Fetch": 1}
            with daemon.admin() as admin:
                assert not list(admin.all_claims())
            daemon.kill()
            assert peer.read(reads[:1], monotonic() + PATIENCE_S) == [Outcome.UNAVAILABLE]
            assert peer.read(reads[:1], monotonic()) == [Outcome.UNAVAILABLE]


# ---- the second node


MIB = 2**20


@pytest.fixture
def three() -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    """Three nodes: the second has fetched all entries from the first, the third has none."""
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        daemons, clients, addresses = [], [], []
        for port in free_ports(3):
            address = f"127.0.0.1:{port}"
            addresses.append(address.encode())
            daemon = stack.enter_context(
                daemon_process(
                    *RAM_ALONE,
                    f"--shared.engine={engine.url}",
                    *("--shared.write=all", "--shared.payloads=nodes"),
                    *(f"--shared.address={address}", f"--server.tcp={address}"),
                )
            )
            daemon.start()
            daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=10_000, deadline_ms=60_000)
            clients.append(stack.enter_context(client))
        wait_for_engine(daemons)
        save(clients[0], range(12))
        eventually(lambda: len(engine.values) == 12)
        assert restored_blocks(clients[1]) == 12
        both = b" ".join((addresses[1], addresses[0]))
        eventually(lambda: all(value.endswith(both) for value, _ in engine.values.values()))
        yield engine, daemons, clients


def second_reads(daemon: DaemonProcess) -> tuple[int, int]:
    """The numbers of entries requested from a second node, and of those that it sent."""
    with daemon.admin() as admin:
        shared = admin.stats().shared
        return shared["second_asked"], shared["second_came"]


@pytest.mark.parametrize("how", ["killed", "stopped", "evicted"])
def test_entries_are_read_from_the_second_node(
    three: tuple[FakeRedis, list[DaemonProcess], list[Client]], how: str
) -> None:
    _, daemons, clients = three
    try:
        match how:
            case "killed":
                daemons[1].kill()
            case "stopped":
                os.kill(daemons[1].pid, signal.SIGSTOP)
            case _:
                evict_all(daemons[1])
        assert restored_blocks(clients[2]) == 12
    finally:
        if how == "stopped":
            os.kill(daemons[1].pid, signal.SIGCONT)
    assert second_reads(daemons[2]) == (12, 12)


def test_the_second_node_is_not_asked_for_entries_of_the_first(
    three: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    _, daemons, clients = three
    assert restored_blocks(clients[2]) == 12
    assert second_reads(daemons[2]) == (0, 0)


def test_entries_that_neither_node_has_are_forgotten(
    three: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, clients = three
    for daemon, client in zip(daemons[:2], clients[:2], strict=True):
        lose(daemon, client, 3)
    assert restored_blocks(clients[2]) == 3
    assert not any(keys_of(clients[2])[3].hex().encode() in name for name in engine.values)
    assert second_reads(daemons[2]) == (1, 0)


class Meeting:
    """Peers whose reads wait until as many nodes are read from at once."""

    def __init__(self, nodes: int) -> None:
        self.barrier = threading.Barrier(nodes)

    def peer(self, location: str) -> Any:
        return SimpleNamespace(read=self.read, pace=ReadTimes(), location=location)

    def read(self, wanted: list[Wanted], _deadline_s: float) -> list[Outcome]:
        self.barrier.wait(PATIENCE_S)
        return [Outcome.DONE] * len(wanted)


@pytest.mark.parametrize("nodes", [1, 2, 33])
def test_a_search_reads_from_all_its_nodes_at_once(nodes: int) -> None:
    meeting = Meeting(nodes)
    engine: Any = SimpleNamespace(close=lambda: None)
    with (
        closing(PeerStore(engine, "127.0.0.1:1", Security())) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(store, "_peer", meeting.peer)
        for _ in range(3):
            wanted = [
                replace(want, entry=replace(want.entry, location=f"127.0.0.1:{2 + number % nodes}"))
                for number in range(2 * nodes)
                for want in [read_of(Key(number.to_bytes(32, "big")), b"x")]
            ]
            assert store.get(wanted, monotonic() + PATIENCE_S) == [Outcome.DONE] * len(wanted)


@pytest.mark.parametrize("followed", [True, False])
def test_the_last_node_has_all_of_the_time_unless_a_bucket_follows(followed: bool) -> None:
    deadlines_s: list[float] = []

    def read(wanted: list[Wanted], deadline_s: float) -> list[Outcome]:
        deadlines_s.append(deadline_s)
        return [Outcome.UNAVAILABLE] * len(wanted)

    engine: Any = SimpleNamespace(close=lambda: None)
    with closing(PeerStore(engine, "127.0.0.1:1", Security())) as store:
        store._peer = lambda _: SimpleNamespace(read=read, pace=ReadTimes())  # type: ignore[assignment,method-assign,return-value]
        store.followed = lambda: followed
        want = read_of(Key(bytes(32)), b"x")
        want = replace(want, entry=replace(want.entry, location="127.0.0.1:2"))
        deadline_s = monotonic() + PATIENCE_S
        assert store.get([want], deadline_s) == [Outcome.UNAVAILABLE]
    (until_s,) = deadlines_s
    assert until_s < deadline_s - PATIENCE_S / 4 if followed else until_s >= deadline_s - 1e-3


def test_more_nodes_than_threads_are_read_in_turn() -> None:
    meeting = Meeting(1)
    engine: Any = SimpleNamespace(close=lambda: None)
    with (
        closing(PeerStore(engine, "127.0.0.1:1", Security())) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(store, "_peer", meeting.peer)
        entries = [
            SharedEntry(Key(n.to_bytes(32, "big")), Content(1, 1), 0, location=f"127.0.0.1:{n + 2}")
            for n in range(100)
        ]
        wanted = [Wanted(entry, memoryview(bytearray(1))) for entry in entries]
        assert store.get(wanted, monotonic() + PATIENCE_S) == [Outcome.DONE] * 100


def test_nothing_is_written_after_a_search_that_failed() -> None:
    """The reads of one search share its memory, which others get when it has ended."""
    written, failed = threading.Event(), threading.Event()
    rooms = [memoryview(bytearray(1)) for _ in range(2)]

    def read(wanted: list[Wanted], _deadline_s: float) -> list[Outcome]:
        if wanted[0].room is rooms[0]:
            failed.set()
            raise MemoryError
        assert failed.wait(PATIENCE_S)
        wanted[0].room[:] = b"x"
        written.set()
        return [Outcome.DONE]

    peer: Any = SimpleNamespace(read=read, pace=ReadTimes())
    engine: Any = SimpleNamespace(close=lambda: None)
    entries = [
        SharedEntry(Key(bytes(32)), Content(1, 1), 0, location=f"127.0.0.1:{port}")
        for port in range(2, 2 + 2)
    ]
    wanted = [Wanted(entry, room) for entry, room in zip(entries, rooms, strict=True)]
    with (
        closing(PeerStore(engine, "127.0.0.1:1", Security())) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(store, "_peer", lambda _location: peer)
        with pytest.raises(MemoryError):
            store.get(wanted, monotonic() + PATIENCE_S)
        assert written.is_set(), "it waited for the read that went on"


def test_a_peer_that_is_closed_meanwhile_is_unavailable() -> None:
    with closing(DaemonPeer("127.0.0.1:1", Security())) as peer:
        peer.close()
        reads = [read_of(Key(os.urandom(32)), b"x")]
        assert peer.read(reads, monotonic() + PATIENCE_S) == [Outcome.UNAVAILABLE]


def test_the_wait_follows_earlier_reads_and_is_half_the_time_at_most() -> None:
    pace = ReadTimes()
    assert pace.patience_s(MIB, 1.0) == 0.5, "no read was timed yet"
    for _ in range(64):
        pace.add(MIB, 0.05)
    assert pace.patience_s(MIB, 1.0) == pytest.approx(0.1)
    assert pace.patience_s(MIB, 0.1) == 0.05
    assert pace.patience_s(0, 1.0) == pytest.approx(0.02)
    assert 0.1 < pace.patience_s(2 * MIB, 1.0) < 0.2
    for _ in range(2):
        pace.add(MIB, 5.0)
    assert pace.patience_s(MIB, 1.0) == pytest.approx(0.1), "the slowest twentieth does not count"
