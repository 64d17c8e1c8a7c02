"""Clients of the data socket that request more than they receive, or send more than the daemon
reads: its memory stays within its bounds, and other clients are served meanwhile."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest

from prefixd.client import Client, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.wire.link import Link
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.limits import MAX_BATCH_KEYS, MAX_MESSAGE_BYTES
from tests.hostile.test_floods import MIB, eager_daemon, pour, session_at, watching
from tests.support.daemon import eventually, tcp_address
from tests.support.ports import free_ports

LARGE: Final = os.urandom(8 * MIB)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    flags = (
        "--sessions.heartbeat=60s",
        "--server.stall_timeout=2s",
        "--server.max_local=16MiB",
        "--server.max_reads=16MiB",
        "--server.max_saves=16MiB",
        "--sessions.max_reserved_share=1",
    )
    (port,) = free_ports(1)
    with eager_daemon(f"--server.tcp=127.0.0.1:{port}", *flags, ram="128MiB") as daemon:
        yield daemon


def frame(**kind: Any) -> bytes:
    return frames.frame(pb.FramedRequest(**kind))


@contextmanager
def data_connections(
    link: Link, count: int, *, receive_bytes: int = 0
) -> Iterator[list[socket.socket]]:
    """Connections that are attached to the session."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            if receive_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.connect(("127.0.0.1", link.welcome.data_port))
            connection.sendall(frame(attach=link.ref))
            opened.append(connection)
        yield opened


@contextmanager
def good_client(daemon: PrivateDaemon) -> Iterator[Client]:
    """A client that saves and reads over the data socket before and after: it is unharmed."""
    with Client(tcp_address(daemon), local=False, name="good") as client:
        assert client.wait_connected()

        def moves() -> None:
            key = Key(os.urandom(32))
            payload = LARGE[:MIB]
            saved = client.save(key, payload, tier=Tier.RAM, reason=SaveReason.EVICT)
            assert saved.status is SaveStatus.SAVED
            with client.claim([key]) as hit:
                assert hit.read(0) == payload

        moves()
        yield client
        moves()


def test_large_requests_wait_in_the_kernel(daemon: PrivateDaemon) -> None:
    """Half of them name as many keys as a request may, and lack their last byte. The other half
    only announce the largest size."""
    request = frame(lookup=pb.LookupRequest(keys=[bytes(32)] * MAX_BATCH_KEYS))
    huge = frames.HEAD.pack(MAX_MESSAGE_BYTES)
    with (
        good_client(daemon) as client,
        session_at(daemon) as link,
        data_connections(link, 100) as flood,
        watching(daemon, 16 * MIB) as watch,
    ):
        for connection in flood[:50]:
            pour(connection, request[:-1], len(request) - 1)
        for connection in flood[50:]:
            connection.sendall(huge)
            connection.setblocking(False)
        assert not client.exists([Key(bytes(32))])[0]
        watch.end()
    assert watch.most["data_request_bytes"] <= 16 * MIB
    watch.assert_within_and_back()


def test_bytes_that_nobody_asked_for_stay_in_the_kernel(daemon: PrivateDaemon) -> None:
    """The daemon does not read a connection while its request waits."""
    with good_client(daemon), session_at(daemon) as link, data_connections(link, 8) as flood:
        (token,) = reserved(link, 1)
        waiting = frame(lookup=pb.LookupRequest(keys=[token], wait_ms=60_000))
        with watching(daemon, 0) as watch, ThreadPoolExecutor(len(flood)) as threads:
            for connection in flood:
                connection.sendall(waiting)
            sent = threads.map(lambda each: pour(each, LARGE, 64 * MIB), flood)
            assert max(sent) < 64 * MIB
    watch.assert_within_and_back()


def reserved(link: Link, count: int) -> list[bytes]:
    """Keys with a reservation of this session."""
    keys = [os.urandom(32) for _ in range(count)]
    header = pb.SaveHeader(
        session=link.ref,
        tier=pb.TIER_RAM,
        reason=pb.SAVE_REASON_COLD,
        keys=keys,
        payload_bytes=[1] * len(keys),
    )
    link.calls.call("Reserve", pb.ReserveRequest(header=header), pb.ReserveResponse, 60)
    return keys


@pytest.mark.parametrize("by_room", [False, True])
def test_readers_that_read_nothing_are_cut_off(daemon: PrivateDaemon, by_room: bool) -> None:
    key = Key(os.urandom(32))
    with good_client(daemon) as client, session_at(daemon) as link:
        assert client.save(key, LARGE, tier=Tier.DISK, reason=SaveReason.EVICT).status in (
            SaveStatus.SAVED,
            SaveStatus.TOO_LARGE,
        )
        assert client.save(key, LARGE, tier=Tier.RAM, reason=SaveReason.EVICT).ok
        (found,) = client.probe([key])
        assert found.entry is not None
        fetch = pb.FetchRequest(
            session=link.ref,
            keys=[key],
            generations=[found.entry.generation],
            ranges=[pb.ReadRange()] * 8,
        )
        if by_room:
            fetch = pb.FetchRequest(
                session=link.ref,
                keys=[key] * 8,
                room_bytes=[len(LARGE)] * 8,
                mode=pb.CLAIM_MODE_RUN,
            )
        with (
            data_connections(link, 20, receive_bytes=2**16) as flood,
            watching(daemon, 0) as watch,
        ):
            for connection in flood:
                connection.sendall(frame(fetch=fetch))
            with daemon.admin() as admin:
                eventually(lambda: admin.stats().in_flight["read_stream_bytes"])
                with client.claim([key]) as hit:
                    assert hit.read(0) == LARGE
                eventually(lambda: not admin.stats().in_flight["read_stream_bytes"])
                assert not list(admin.all_claims())
        assert 0 < watch.most["read_stream_bytes"] <= 16 * MIB
    watch.assert_within_and_back()


def test_savers_that_send_half_are_cut_off(daemon: PrivateDaemon) -> None:
    with good_client(daemon), session_at(daemon) as link:
        with data_connections(link, 12) as flood, watching(daemon, 0) as watch:
            for connection in flood:
                header = pb.SaveHeader(
                    session=link.ref,
                    tier=pb.TIER_RAM,
                    reason=pb.SAVE_REASON_COLD,
                    keys=[os.urandom(32)],
                    payload_bytes=[len(LARGE)],
                )
                connection.sendall(frame(save=pb.RawSaveRequest(header=header)))
            for connection in flood[:2]:  # both fit into the quota
                connection.sendall(LARGE[: len(LARGE) // 2])
            with daemon.admin() as admin:
                eventually(lambda: admin.stats().in_flight["save_stream_bytes"])
                eventually(lambda: not admin.stats().in_flight["save_stream_bytes"])
                assert not list(admin.all_reservations())
        assert watch.most["save_stream_bytes"] <= 16 * MIB
    watch.assert_within_and_back()


def test_connections_without_a_session_shut_no_client_out(daemon: PrivateDaemon) -> None:
    with good_client(daemon) as client, session_at(daemon) as link, ExitStack() as stack:
        port = link.welcome.data_port
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with Client(tcp_address(daemon), local=False) as late:
            assert late.wait_connected()
            assert late.exists([Key(bytes(32))]) == [False]
            assert late.counters["rpcs"]["Lookup"] == 1
        assert client.exists([Key(bytes(32))]) == [False]
        with daemon.admin() as admin:
            assert admin.stats().in_flight["data_connections"] < 200


def test_of_those_that_prove_nothing_the_host_that_has_most_loses_one(
    daemon: PrivateDaemon,
) -> None:
    """Half a request each, which no client leaves so for long."""
    with session_at(daemon) as link, ExitStack() as stack:
        place = ("127.0.0.1", link.welcome.data_port)
        request = frame(attach=link.ref)
        late = stack.enter_context(socket.create_connection(place, 60, ("127.0.0.2", 0)))
        late.sendall(request[:5])
        for _ in range(200):
            stranger = stack.enter_context(socket.create_connection(place))
            stranger.sendall(request[:5])
        late.sendall(request[5:] + frame(lookup=pb.LookupRequest(keys=[bytes(32)])))
        assert late.recv(2**16), "it is answered"


def test_with_all_places_taken_a_stranger_makes_room_for_a_client() -> None:
    flags = ("--server.tcp=127.0.0.1:0", "--server.max_connections=16")
    with eager_daemon(*flags) as running, ExitStack() as stack:
        (serving,) = running.logged("serving")
        address = serving["addresses"][-1]
        link = stack.enter_context(session_at(running))
        place = ("127.0.0.1", link.welcome.data_port)
        for _ in range(40):
            stack.enter_context(socket.create_connection(place))
        with Client(address, local=False) as late:
            assert late.wait_connected()
            assert late.exists([Key(bytes(32))]) == [False]
            assert late.counters["rpcs"]["Lookup"] == 1
            assert late.counters["data_fallbacks"] == 0
