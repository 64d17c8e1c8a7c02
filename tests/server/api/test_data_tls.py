"""The data socket under TLS: which clients it accepts, that a handshake that stalls delays no
others, and what a client does that can't use the socket."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.counters import ClientCounters
from prefixd.client.wire import security
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.security import Security
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.server.api import connections
from prefixd.server.api.access import DATA_ROLES, Role
from prefixd.server.config.loading import load_config
from prefixd.server.credentials import certificates_of, tokens_of
from tests.support.certificates import Authority
from tests.support.data_client import (
    HOST,
    SecuredConnection,
    data_connection,
    recorded_turns,
    secured_connection,
)
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Refused, Running, item, key, payload, running

TOKENS = {role: f"{role.name.lower()}-" * 10 for role in Role}
DATA = payload(1)
MIB = 2**20
#: More than two sockets buffer, and than one turn moves.
LARGE = payload(7) * (20 * MIB // 5000)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (security.CA, security.CERT, security.KEY, security.TOKEN):
        monkeypatch.delenv(name, raising=False)


def flags_of(authority: Authority, name: str = "daemon", *more: str) -> list[str]:
    certificate, secret = authority.sign(name)
    tls = [f"--server.tls_cert={certificate}", f"--server.tls_key={secret}"]
    return ["--server.tcp=127.0.0.1:0", *tls, *more]


def served(daemon: Running, flags: list[str]) -> int:
    """Start the data socket as a daemon with these flags would. Returns its port."""
    config = load_config(flags, {})
    certificates = certificates_of(config.server)
    assert certificates is not None
    return daemon.front.data.start(HOST, 0, certificates.material.context, tokens_of(config))


def trusting(authority: Authority, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    cert, secret = map(str, own) if own else ("", "")
    context = Security(str(authority.certificate), cert, secret).context()
    assert context is not None
    return context


@asynccontextmanager
async def secured(
    tmp_path: Path, authority: Authority, *more: str, large: bool = False
) -> AsyncIterator[tuple[Running, OpenSession, int]]:
    budgets = [f"--{tier.label}.budget=64MiB" for tier in Tier] if large else []
    async with running(tmp_path, *budgets) as daemon:
        session = await daemon.open()
        yield daemon, session, served(daemon, flags_of(authority, "daemon", *more))


async def works(line: SecuredConnection, session: OpenSession, number: int, raw: bytes) -> None:
    """Save and read back."""
    assert await line.save(session, [item(key(number), raw)], [raw]) == [pb.SAVE_STATUS_SAVED]
    claim = await line.ask(
        claim=pb.ClaimRequest(session=session.ref, keys=[key(number)], mode=pb.CLAIM_MODE_RUN)
    )
    read = pb.ReadRequest(
        session=session.ref, claim_id=claim.claim.claim_id, ranges=[pb.ReadRange()]
    )
    await line.send(read=read)
    assert await line.parts(1) == [raw]


@in_loop
async def test_bytes_go_in_and_out(tmp_path: Path, authority: Authority) -> None:
    """Many small payloads and a few large ones, ahead and byte by byte. Claims are released."""
    async with secured(tmp_path, authority, large=True) as (daemon, session, port):
        async with secured_connection(port, trusting(authority), session) as line:
            await works(line, session, 1, LARGE)
            many = {key(n): payload(n, 3000 + n) for n in range(10, 110)}
            statuses = await line.save(
                session, [item(of, raw) for of, raw in many.items()], [*many.values()]
            )
            assert set(statuses) == {pb.SAVE_STATUS_SAVED}
            claim = await line.ask(
                claim=pb.ClaimRequest(session=session.ref, keys=[*many], mode=pb.CLAIM_MODE_RUN)
            )
            ranges = [pb.ReadRange(index=index) for index in range(100)]
            read = pb.ReadRequest(session=session.ref, claim_id=claim.claim.claim_id, ranges=ranges)
            await line.send(read=read)
            assert await line.parts(100) == [*many.values()]
            for byte in frames.frame(pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)]))):
                await line.send_bytes(bytes([byte]))
            assert (await line.response()).lookup.results
            # More than one receive takes: no poll reports the bytes that TLS holds back.
            asked = frames.frame(
                pb.FramedRequest(lookup=pb.LookupRequest(keys=[key(1)], brief=True))
            )
            ahead = 3 * frames.SMALL_REQUEST_BYTES // len(asked)
            await line.send_bytes(asked * ahead)
            for _ in range(ahead):
                assert (await line.response()).lookup.presences == [pb.PRESENCE_PRESENT]
        await daemon.until(lambda: not daemon.front.data.connections)
        assert not daemon.front.data.handshake_refusals
        # The next request shows that the client has read the last answer and what it grants.
        await session.release(claim.claim.claim_id)


@in_loop
async def test_threads_decrypt_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    """But for the last of it. The event loop has others to serve."""
    turns = recorded_turns(monkeypatch)
    async with (
        secured(tmp_path, authority, large=True) as (_, session, port),
        secured_connection(port, trusting(authority), session) as line,
    ):
        raw = LARGE[: MIB // 2]
        saved = await line.save(session, [item(key(1), raw)], [raw])
        assert saved == [pb.SAVE_STATUS_SAVED]
    assert not turns[0]


@in_loop
async def test_a_slow_reader_gets_it_all(tmp_path: Path, authority: Authority) -> None:
    """TLS records that the kernel took in part are offered again unchanged."""
    async with (
        secured(tmp_path, authority, large=True) as (_, session, port),
        secured_connection(port, trusting(authority), session) as line,
    ):
        await works(line, session, 1, LARGE)
        claim = await line.ask(
            claim=pb.ClaimRequest(session=session.ref, keys=[key(1)], mode=pb.CLAIM_MODE_RUN)
        )
        read = pb.ReadRequest(
            session=session.ref, claim_id=claim.claim.claim_id, ranges=[pb.ReadRange()]
        )
        line._writer.transport.pause_reading()
        await line.send(read=read)
        lookup = pb.LookupRequest(keys=[key(1)])
        async with secured_connection(port, trusting(authority), session) as other:
            for _ in range(20):
                assert (await other.ask(lookup=lookup)).lookup.results
        line._writer.transport.resume_reading()
        assert await line.parts(1) == [LARGE]


@in_loop
async def test_each_request_takes_its_role(tmp_path: Path, authority: Authority) -> None:
    kinds = [field.name for field in pb.FramedRequest.DESCRIPTOR.oneofs_by_name["kind"].fields]
    local = {"hand_over", "save_staged", "save_lent"}  # another client finds no place for these
    assert sorted({*kinds} - local) == sorted(DATA_ROLES)
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{r.name.lower()} a-{r.name} {t}\n" for r, t in TOKENS.items()))
    tokens.chmod(0o600)
    async with secured(tmp_path, authority, f"--server.tokens={tokens}") as (
        daemon,
        session,
        port,
    ):
        trusted = trusting(authority)
        for token in ("", "wrong-" * 10):
            async with secured_connection(port, trusted, session, token) as line:
                with pytest.raises(Refused) as refused:
                    await line.response()
                assert refused.value.name == "not_authenticated"
                await line.hung_up()
        async with secured_connection(port, trusted, session, TOKENS[Role.WATCH]) as line:
            with pytest.raises(Refused, match="has the role watch"):
                await line.response()
            await line.hung_up()
        for role in (Role.READ, Role.WRITE, Role.ADMIN):
            async with secured_connection(port, trusted, session, TOKENS[role]) as line:
                for kind, needed in DATA_ROLES.items():
                    if kind in ("attach", "give_back"):
                        continue
                    field = pb.FramedRequest.DESCRIPTOR.fields_by_name[kind]
                    asked = getattr(pb, field.message_type.name)()
                    with pytest.raises(Refused) as refused:
                        await line.ask(**{kind: asked})
                    assert (refused.value.name == "not_permitted") == (role < needed), kind
        # A token that is removed is not accepted for another request.
        async with secured_connection(port, trusted, session, TOKENS[Role.READ]) as line:
            lookup = pb.LookupRequest(keys=[key(1)])
            assert (await line.ask(lookup=lookup)).lookup.results
            tokens.write_text(f"write other {'n' * 40}\n")
            server_tokens = daemon.front.data.tokens
            assert server_tokens is not None
            server_tokens.use(server_tokens.read())
            with pytest.raises(Refused, match="wants a token"):
                await line.ask(lookup=lookup)
            await line.send(give_back=pb.ReleaseRequest(session=session.ref))
            with pytest.raises(Refused, match="wants a token"):
                await line.ask(lookup=lookup)  # the answers still match the requests
        assert server_tokens.refusals > 5


@in_loop
async def test_who_does_not_get_through_tls_is_counted(
    tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    mutual = f"--server.tls_client_ca={authority.certificate}"
    async with secured(tmp_path, authority, mutual) as (daemon, session, port):
        front = daemon.front.data
        good = authority.sign("client")
        async with secured_connection(port, trusting(authority, good), session) as line:
            await works(line, session, 1, DATA)
        wrong = {
            "no certificate": trusting(authority),
            "one of somebody else": trusting(authority, stranger.sign("client")),
            "one that is over": trusting(authority, authority.sign("late", days=-1)),
            "a daemon of somebody else": trusting(stranger, good),
        }
        for counted, (what, context) in enumerate(wrong.items(), 1):
            with pytest.raises((OSError, EOFError)):
                async with secured_connection(port, context, session) as line:
                    await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))
            await daemon.until(lambda counted=counted: front.handshake_refusals == counted)
            assert not front.attached, what
        # Without TLS even the right secret gets no answer.
        async with data_connection(daemon, session) as plain:
            with pytest.raises((EOFError, ConnectionError)):
                await plain.response()
        old = trusting(authority, good)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match=r"(?i)version"):
            async with secured_connection(port, old, session):
                pass
        await daemon.until(lambda: front.handshake_refusals == len(wrong) + 2)
        await daemon.until(lambda: not front.connections)
        assert daemon.front.in_flight()["data_handshake_refusals"] == len(wrong) + 2


@in_loop
async def test_handshakes_that_stall_wait_for_nobody_and_end(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that are silent, that stop within their hello, or that stop after its answer."""
    monkeypatch.setattr(connections, "_PATIENCE_S", 2.0)
    loop = asyncio.get_running_loop()
    async with secured(tmp_path, authority) as (daemon, session, port):
        front = daemon.front.data
        hello = client_hello(authority)
        stalled = []
        for number in range(connections._MAX_UNPROVED - 1):
            sock = socket.socket()
            stalled.append(sock)
            sock.setblocking(False)
            await loop.sock_connect(sock, (HOST, port))
            await loop.sock_sendall(sock, (b"", hello[:40], hello)[number % 3])
        await daemon.until(lambda: len(front.unproved) == len(stalled))
        async with secured_connection(port, trusting(authority), session) as line:
            await works(line, session, 1, DATA)
        for sock in stalled:
            with suppress(ConnectionError):
                while await loop.sock_recv(sock, 2**16):
                    pass
            sock.close()
        await daemon.until(lambda: not front.connections)
        assert front.handshake_refusals == len(stalled)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("prefixd-tls") for name in names) == 1


def client_hello(authority: Authority) -> bytes:
    """The first message of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    half = trusting(authority).wrap_bio(incoming, outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


@in_loop
async def test_a_client_that_hangs_up_while_it_waits_is_noticed(
    tmp_path: Path, authority: Authority
) -> None:
    async with secured(tmp_path, authority) as (daemon, session, port):
        (token,) = await session.granted([item(key(5), DATA)])
        async with secured_connection(port, trusting(authority), session) as line:
            await line.send(lookup=pb.LookupRequest(keys=[key(5)], wait_ms=60_000))
            await daemon.until(lambda: daemon.tables.waiting)
        await daemon.until(lambda: not daemon.front.data.attached)
        assert not daemon.tables.waiting
        assert token


# ---- what clients do


@pytest.fixture
def client_side(authority: Authority) -> Security:
    cert, secret = authority.sign("worker")
    return Security(str(authority.certificate), str(cert), str(secret))


def moves(client: Client) -> None:
    of = Key(os.urandom(32))
    raw = os.urandom(3 * MIB + 5)
    assert client.save(of, raw, tier=Tier.RAM, reason=SaveReason.EVICT).ok
    with client.claim([of]) as hit:
        assert hit.read(0) == raw
    assert client.longest_run([of], claim=False).read(0) == raw
    assert client.exists([of]) == [True]


@asynccontextmanager
async def over_tcp(daemon: Running, flags: list[str]) -> AsyncIterator[str]:
    config = load_config(flags, {})
    server = daemon.front.remote(None)
    certificates = certificates_of(config.server)
    assert certificates is not None
    port = server.add_secure_port(f"{HOST}:0", certificates.credentials())
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(grace=0)


@pytest.mark.parametrize(
    "data_side", ["as gRPC", "somebody else's", "over", "trusts others", "for another address"]
)
@in_loop
async def test_a_client_that_cannot_have_it_goes_over_grpc_and_counts(
    tmp_path: Path,
    authority: Authority,
    stranger: Authority,
    client_side: Security,
    data_side: str,
) -> None:
    """With the right files on both sides it uses the data socket."""
    flags = flags_of(authority, "daemon", f"--server.tls_client_ca={authority.certificate}")
    cert, secret = {
        "somebody else's": lambda: stranger.sign("daemon"),
        "over": lambda: authority.sign("late", days=-1),
        "for another address": lambda: authority.sign("there", address="127.0.0.9"),
    }.get(data_side, lambda: authority.sign("daemon"))()
    trusted = stranger if data_side == "trusts others" else authority
    of_data = [
        "--server.tcp=127.0.0.1:0",
        f"--server.tls_cert={cert}",
        f"--server.tls_key={secret}",
        f"--server.tls_client_ca={trusted.certificate}",
    ]
    budgets = [f"--{tier.label}.budget=64MiB" for tier in Tier]
    async with running(tmp_path, *budgets) as daemon:
        served(daemon, of_data)
        async with over_tcp(daemon, flags) as address:
            counters = ClientCounters()

            def use() -> None:
                transport = RemoteTransport(address, counters=counters, security=client_side)
                with Client(transport=transport, counters=counters) as client:
                    assert client.wait_connected(deadline_ms=30_000)
                    moves(client)

            await asyncio.to_thread(use)
            counted = counters.snapshot()
            good = data_side == "as gRPC"
            assert bool(counted["data_fallbacks"]) == (not good)
            assert bool(daemon.front.data.handshake_refusals) == (not good)
            assert not any(counters.snapshot()["misses"].values())  # type: ignore[union-attr]


@in_loop
async def test_a_certificate_that_is_wrong_everywhere_is_a_miss_with_its_reason(
    tmp_path: Path, authority: Authority, client_side: Security
) -> None:
    late, secret = authority.sign("late", days=-1)
    wrong = replace(client_side, cert=str(late), key=str(secret))
    flags = flags_of(authority, "daemon", f"--server.tls_client_ca={authority.certificate}")
    async with running(tmp_path) as daemon:
        served(daemon, flags)
        async with over_tcp(daemon, flags) as address:

            def use() -> None:
                transport = RemoteTransport(
                    address, security=wrong, counters=(counters := ClientCounters())
                )
                with Client(transport=transport, counters=counters) as client:
                    assert not client.wait_connected(deadline_ms=2_000)
                    assert transport.why_down
                    assert not client.claim([Key(key(1))])
                    misses = counters.snapshot()["misses"]
                    assert misses["unavailable"] == 1  # type: ignore[index]

            await asyncio.to_thread(use)
        assert not daemon.tables.sessions
