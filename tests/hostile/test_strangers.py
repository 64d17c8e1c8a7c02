"""Clients that prove nothing hold nothing, and others no more than they leave free."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import NotAuthenticated
from prefixd.proto.limits import MAX_LABELS
from prefixd.proto.namespaces import TenantNamespace
from prefixd.server.api import grpc_adapter, grpc_connections
from prefixd.server.api.access import Access, Role, Tokens
from prefixd.server.api.grpc_adapter import Door
from prefixd.server.api.grpc_connections import (
    MAX_REFUSALS,
    GrpcConnections,
    Place,
    WorkersConnections,
    network_of,
    plain_host,
)
from prefixd.server.api.usage import UsageBook
from prefixd.server.core.shares import HOST
from tests.support.certificates import Authority
from tests.support.event_loop import in_loop
from tests.support.running import Outside, Refused, Running, in_ram, key, payload

TOKENS = {name: f"token-of-{name}-".ljust(40, "x") for name in ("a", "b")}
KNOWN = [(Access(name, Role.WRITE, TenantNamespace(name)), token) for name, token in TOKENS.items()]


class Caller(Outside):
    """A client over TCP, with a token or without one."""

    def __init__(self, port: int, token: str = "") -> None:
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        super().__init__(f"127.0.0.1:{port}", None)

    def begin(self, rpc: str, **more: Any) -> Any:
        """Begin an rpc, and send no message."""
        return self.channel.stream_stream(f"/prefixd.v1.Cache/{rpc}")(
            metadata=self._metadata, **more
        )

    async def enter(self) -> Any:
        """Open a session. Raises grpc.aio.AioRpcError."""
        call = self.begin("Session")
        await call.write(pb.SessionRequest(hello=pb.Hello(pid=1)).SerializeToString())
        await call.read()
        return call


@asynccontextmanager
async def reached(daemon: Running) -> AsyncIterator[int]:
    """The daemon's port for clients with tokens. TLS adds nothing to what is tested here."""
    server = daemon.front.remote(Tokens(KNOWN))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=0)


@in_loop
async def test_a_call_without_a_token_ends_before_its_first_message(tmp_path: Path) -> None:
    async with in_ram(tmp_path, "--server.max_rpcs=16") as daemon, reached(daemon) as port:
        stranger = Caller(port)
        for rpc in ("Lookup", "Save", "Session", "Read"):
            calls = [stranger.begin(rpc) for _ in range(100)]
            for call in calls:
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert daemon.front.calls.used == 0
        assert daemon.front.sessions.places.used == 0
        await stranger.close()


@in_loop
async def test_a_call_without_a_message_holds_its_place_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tenant has only its share of the places, so others find one meanwhile."""
    async with in_ram(tmp_path, "--server.max_rpcs=16") as daemon, reached(daemon) as port:
        silent, other = Caller(port, TOKENS["a"]), Caller(port, TOKENS["b"])
        calls = [silent.begin("Lookup") for _ in range(50)]
        await daemon.until(lambda: daemon.front.calls.refusals == 50 - 7)
        assert daemon.front.calls.used == 7
        lookup = other.begin("Lookup")
        await lookup.write(pb.LookupRequest(keys=[key(1)]).SerializeToString())
        assert pb.LookupResponse.FromString(await lookup.read()).results
        here = await daemon.open()
        assert await here.save({key(1): payload(1)}) == [pb.SAVE_STATUS_SAVED]
        for call in calls:
            call.cancel()
        await daemon.until(lambda: daemon.front.calls.used == 0)
        monkeypatch.setattr(grpc_adapter, "MESSAGE_WITHIN_S", 0.01)
        late = silent.begin("Lookup")
        assert await late.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no message came within" in await late.details()
        await silent.close()
        await other.close()


def test_a_connection_on_which_nothing_is_read_is_closed() -> None:
    connections = GrpcConnections(8)
    peer, other = ("10.0.0.1", 4711), ("10.0.0.1", 4712)
    connections.proved(peer, "a")
    assert connections.looked({peer: True, other: True}) == set()
    connections.hang_up(peer)
    assert connections.looked({peer: True, other: True}) == {peer}
    assert connections.looked({other: True}) == set()
    assert connections.closed == 1


@in_loop
async def test_a_message_that_is_compressed_is_not_expanded(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon, reached(daemon) as port:
        for path in (f"127.0.0.1:{port}", daemon.address):
            async with grpc.aio.insecure_channel(path, compression=grpc.Compression.Gzip) as one:
                bomb = one.unary_unary("/prefixd.v1.Cache/Lookup")
                authorization = (("authorization", f"Bearer {TOKENS['a']}"),)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await bomb(bytes(15 * 2**20), metadata=authorization)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@in_loop
async def test_health_takes_few_places_and_reflection_is_off(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon, reached(daemon) as port:
        stranger = Caller(port)
        watches = [
            stranger.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(100)
        ]
        public = daemon.front.public_calls
        await daemon.until(lambda: public.refusals == 100 - 28)
        assert public.used == 28, "half of what is not for this host"
        here = daemon.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await here(b"") == b"\x08\x01", "a probe on this host finds a place"
        for watch in watches:
            watch.cancel()
        await daemon.until(lambda: public.used == 0)
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        asked = stranger.channel.stream_stream(reflection)()
        assert await asked.code() is grpc.StatusCode.UNIMPLEMENTED
        await stranger.close()


@in_loop
async def test_a_tenant_leaves_sessions_to_others(tmp_path: Path) -> None:
    async with in_ram(tmp_path, "--sessions.max_sessions=16") as daemon, reached(daemon) as port:
        greedy, other = Caller(port, TOKENS["a"]), Caller(port, TOKENS["b"])
        sessions = [await greedy.enter() for _ in range(7)]
        with pytest.raises(grpc.aio.AioRpcError, match="7 of the 16 sessions"):
            await greedy.enter()
        assert not (await other.enter()).done()
        here = [await daemon.open() for _ in range(8)]
        assert len(daemon.tables.sessions) == 16, "all that was left"
        with pytest.raises((Refused, grpc.aio.AioRpcError), match="sessions"):
            await daemon.open()
        for session in sessions:
            session.cancel()
        await daemon.until(lambda: daemon.front.sessions.places.used == 9)
        assert len(here) == 8
        await greedy.close()
        await other.close()


def test_a_tenant_leaves_labels_to_others() -> None:
    book = UsageBook()
    with ExitStack() as sessions:

        def names(label: str, tenant: str) -> set[str]:
            """The names under which so many sessions of a tenant are counted."""
            begun = (book.session(f"{label}{n}", tenant) for n in range(3 * MAX_LABELS))
            return {sessions.enter_context(each).name for each in begun}

        of_a, of_b = names("a/", "namespace a"), names("b/", "namespace b")
        here = names("model-", HOST)
        assert "other" in of_a & of_b & here
        assert (len(of_a), len(of_b)) == (29, 15)
        assert "model-0" in here
        assert len(list(book.items())) == MAX_LABELS


# ---- connections

#: A gRPC server with TLS, to which somebody says what is no TLS.
NO_TLS = """
import asyncio, socket, sys
import prefixd.server, grpc
pair = tuple(open(path, "rb").read() for path in sys.argv[1:])

def say(port):
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        while stranger.recv(100):
            pass

async def main():
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    await asyncio.to_thread(say, port)
    await server.stop(0)

asyncio.run(main())
"""


def test_a_failed_handshake_leaves_no_line(tmp_path: Path) -> None:
    """In an interpreter of its own, which has not imported gRPC yet."""
    certificate, private = Authority(tmp_path / "ours").sign("daemon")
    told = subprocess.run(
        [sys.executable, "-c", NO_TLS, str(private), str(certificate)],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
    )
    assert (told.stdout, told.stderr) == ("", "")


def test_connections_that_proved_nothing_have_what_the_others_leave() -> None:
    """Beyond that the host that has most loses one, the oldest that sent nothing first."""
    connections = GrpcConnections(8)
    assert (connections.most_unproved, connections.most_open) == (8, 12)
    silent = [("10.0.0.1", port) for port in range(2)]
    spoke = [("10.0.0.1", port) for port in range(2, 8)]
    found = dict.fromkeys(silent, False) | dict.fromkeys(spoke, True)
    assert connections.looked(found) == set()
    for port in range(3):
        connections.proved(("10.0.0.2", port), "namespace a")
        found["10.0.0.2", port] = True
    assert connections.most_unproved == 5
    late = ("10.0.0.3", 1)
    found[late] = False
    unwanted = {*silent, *spoke[:2]}
    assert connections.looked(found) == unwanted
    assert connections.looked(found) == set(), "they are about to end"
    found = {peer: spoke for peer, spoke in found.items() if peer not in unwanted}
    assert connections.looked(found) == set()
    assert (connections.closed, connections.open, connections.places.used) == (4, 8, 3)
    assert connections.looked({}) == set()
    assert connections.places.used == 0


def test_a_connection_that_proves_itself_while_one_looks_stays() -> None:
    connections = GrpcConnections(4)
    late = ("10.0.0.1", 1)
    connections.proved(late, "namespace a")
    assert connections.looked({}) == set(), "it was not open yet when the look began"
    assert connections.places.used == 1
    others = dict.fromkeys((("10.0.0.2", port) for port in range(3)), True)
    assert connections.looked({late: True} | others) == set()
    assert connections.looked({}) == set()
    assert connections.places.used == 0


def test_a_connection_whose_calls_are_refused_again_and_again_is_closed() -> None:
    connections = GrpcConnections(16)
    known, stranger = ("10.0.0.1", 1), ("10.0.0.2", 2)
    connections.proved(known, "namespace a")
    for _ in range(MAX_REFUSALS):
        connections.refused(known)
        connections.refused(stranger)
    found = {known: True, stranger: True}
    assert connections.looked(found) == {stranger}
    assert connections.looked(found) == set(), "it is about to end"


def test_a_connection_with_a_refused_call_goes_before_those_without() -> None:
    connections = GrpcConnections(2)
    first, second, third = (("10.0.0.1", port) for port in range(3))
    connections.refused(second)
    found = {first: False, second: True}
    assert connections.looked(found) == set()
    assert connections.looked({**found, third: False}) == {second}


def test_addresses_have_one_form() -> None:
    forms = ("127.0.0.1", "::ffff:127.0.0.1", "::1", "fe80::1%eth0", "2001:DB8::1")
    assert [plain_host(each) for each in forms] == [
        "127.0.0.1", "127.0.0.1", "::1", "fe80::1", "2001:db8::1",
    ]  # fmt: skip


def test_a_network_with_ipv6_is_one_client() -> None:
    here = ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2")
    assert {network_of(each) for each in here} == {"2001:db8:0:1::/64"}
    assert network_of("2001:db8:0:2::1") == "2001:db8:0:2::/64"
    assert [network_of(each) for each in ("::ffff:10.0.0.1", "10.0.0.2")] == [
        "10.0.0.1",
        "10.0.0.2",
    ]


@in_loop
async def test_a_call_whose_connection_has_ended_is_refused(tmp_path: Path) -> None:
    """gRPC then names no other end."""

    class Gone:
        def peer(self) -> str:
            return "unknown"

        def invocation_metadata(self) -> None:
            return None

    context: Any = Gone()
    async with in_ram(tmp_path) as daemon:
        door = Door(daemon.front.calls, 30.0, Tokens(KNOWN), daemon.front.connections)
        with pytest.raises(NotAuthenticated, match="has ended"), door.enter(Role.READ, context):
            pass
        door.hang_up(context)
        assert daemon.front.calls.used == 0


def test_of_too_many_connections_to_the_workers_socket_the_greediest_process_loses_some() -> None:
    connections = WorkersConnections(2)
    total = connections.total
    honest = {Place(fd, fd): 1 for fd in range(3)}
    greedy = [Place(fd, fd) for fd in range(100, 100 + total)]
    found = honest | dict.fromkeys(greedy[:-3], 2)
    assert connections.looked(found) == set()
    found |= dict.fromkeys(greedy, 2) | {Place(1_000, 1_000): 3}
    unwanted = connections.looked(found)
    assert unwanted == set(greedy[-4:]), "its newest, and nobody else's"
    left = {place: process for place, process in found.items() if place not in unwanted}
    assert connections.looked(left) == set()
    assert connections.closed == 4


@in_loop
async def test_idle_connections_to_the_workers_socket_are_closed_when_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_connections, "_LOOK_S", 0.01)
    # A second look would find those that the first one hung up: nobody here closes the other ends.
    monkeypatch.setattr(grpc_connections, "_LOOK_OFTEN_S", 3600)
    async with in_ram(tmp_path, "--sessions.max_sessions=2") as daemon:
        connections = daemon.front.workers_connections
        path = str(tmp_path / "greedy.sock")
        connections.names.add(path)
        with ThreadPoolExecutor(1) as looking, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen(200)
            idle, accepted = [], []
            for _ in range(connections.total + 5):
                idle.append(socket.socket(socket.AF_UNIX))
                idle[-1].connect(path)
                accepted.append(listening.accept()[0])
            daemon.front.descriptors.looked(10_000)
            watching = asyncio.ensure_future(connections.watch(looking, daemon.front.descriptors))
            hung_up = select.poll()
            for each in idle:
                hung_up.register(each, 0)
            await daemon.until(lambda: len(hung_up.poll(0)) >= 5)
            assert (connections.closed, len(hung_up.poll(0))) == (5, 5)
            watching.cancel()
            for each in (*idle, *accepted):
                each.close()


@in_loop
async def test_reports_of_usage_are_taken_at_a_pace(tmp_path: Path) -> None:
    async with in_ram(tmp_path, "--sessions.heartbeat=60s") as daemon:
        session = await daemon.open()
        for sequence in range(40):
            beat = pb.Heartbeat(sequence=sequence, usage=pb.Usage(lookups=1, hits=1))
            await session.send(heartbeat=beat)
        acknowledged = [(await session.event()).heartbeat_ack.sequence for _ in range(9)]
        assert acknowledged == list(range(9))
        reported = daemon.front.sessions.usage.sessions[session.ref.session_id]
        assert await daemon.lookup(key(1)), "others are served meanwhile"
        assert reported.lookups == 9


@in_loop
async def test_strangers_push_out_none_that_comes_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is slow to prove itself, and meanwhile they fill all places, again and again."""
    monkeypatch.setattr(grpc_connections, "_LOOK_S", 0.01)
    monkeypatch.setattr(grpc_connections, "_LOOK_OFTEN_S", 0.01)
    async with (
        in_ram(tmp_path, "--server.max_connections=8") as daemon,
        reached(daemon) as port,
    ):
        connections, ended = daemon.front.connections, set[tuple[str, int]]()
        connections.port, looked, looks = port, connections.looked, 0

        def noted(found: Mapping[tuple[str, int], bool]) -> set[tuple[str, int]]:
            nonlocal looks
            looks += 1
            unwanted = looked(found)
            ended.update(unwanted)
            return unwanted

        monkeypatch.setattr(connections, "looked", noted)
        with ThreadPoolExecutor(1) as looking, ExitStack() as stack:
            watching = asyncio.ensure_future(connections.watch(looking))
            slow = Caller(port, TOKENS["b"])
            await slow.channel.channel_ready()
            while len(ended) < 20:
                for _ in range(8):
                    stranger = socket.create_connection(("127.0.0.1", port), 60, ("127.0.0.2", 0))
                    stack.enter_context(stranger).sendall(b"PRI * HTTP/2.0")
                before = looks
                await daemon.until(lambda: looks > before)  # noqa: B023  # it ends before the next
            assert not (await slow.enter()).done()
            assert {host for host, _ in ended} == {"127.0.0.2"}
            await slow.close()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@in_loop
async def test_idle_connections_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sockets: as many as there may be, and a client that comes later."""
    monkeypatch.setattr(grpc_connections, "_LOOK_S", 0.01)
    monkeypatch.setattr(grpc_connections, "_LOOK_OFTEN_S", 0.01)
    flags = ("--server.max_connections=16",)
    async with in_ram(tmp_path, *flags) as daemon, reached(daemon) as port:
        connections = daemon.front.connections
        connections.port = port
        with ThreadPoolExecutor(1) as looking:
            watching = asyncio.ensure_future(connections.watch(looking))
            early = Caller(port, TOKENS["a"])
            session = await early.enter()
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
            await daemon.until(lambda: connections.closed >= 8)
            late = Caller(port, TOKENS["b"])
            while True:
                try:
                    await late.enter()
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0)
            assert not session.done(), "who has proved itself stays"
            assert connections.places.used == 2
            assert connections.open <= 16 + 8
            for each in idle:
                each.close()
            await early.close()
            await late.close()
            await daemon.until(lambda: connections.places.used <= 1)  # gRPC may keep one
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
