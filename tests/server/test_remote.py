"""A daemon over TCP, with TLS and tokens: real certificates, real clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.ctl.main import app
from prefixd.client.wire import security
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import ConfigError
from prefixd.proto.keys import Key
from prefixd.server.api.access import ADMIN_ROLES, CACHE_ROLES, Role
from prefixd.server.config.loading import load_config
from prefixd.server.credentials import certificates_of, tokens_of
from tests.support.certificates import Authority
from tests.support.daemon import private_daemon, tcp_address
from tests.support.event_loop import in_loop
from tests.support.running import Running, running

TOKENS = {role: f"{role.name.lower()}-" * 10 for role in Role}
KEY = Key(b"\xab" * 32)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def flags(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a daemon with TLS and tokens."""
    certificate, key = authority.sign("daemon")
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("".join(f"{r.name.lower()} a-{r.name} {t}\n" for r, t in TOKENS.items()))
    tokens.chmod(0o600)
    return [
        "--server.tcp=127.0.0.1:0",
        f"--server.tls_cert={certificate}",
        f"--server.tls_key={key}",
        f"--server.tokens={tokens}",
    ]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (security.CA, security.CERT, security.KEY, security.TOKEN):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def served(daemon: Running, flags: list[str]) -> AsyncIterator[str]:
    """Run the daemon's TCP server. Yields its address."""
    config = load_config(flags, {})
    server = daemon.front.remote(tokens_of(config))
    secured = certificates_of(config.server)
    assert secured is not None
    port = server.add_secure_port("127.0.0.1:0", secured.credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


def trusting(authority: Authority, token: str = "") -> grpc.ChannelCredentials:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    if not token:
        return credentials
    return grpc.composite_channel_credentials(
        credentials, grpc.access_token_call_credentials(token)
    )


async def refusal(stub: grpc.Channel, method: Any) -> str:
    """The error name of an rpc with an empty request, or "" without an error.

    On a thread, because the client of `grpc.aio` loses the status of a call that ends while it
    still has messages to send (`tests.fuzz.ends`).
    """
    return await asyncio.to_thread(_refusal, stub, method)


def _refusal(stub: grpc.Channel, method: Any) -> str:
    serialize = GetMessageClass(method.input_type).SerializeToString
    kinds = {
        (False, False): stub.unary_unary,
        (False, True): stub.unary_stream,
        (True, False): stub.stream_unary,
        (True, True): stub.stream_stream,
    }
    make: Any = kinds[method.client_streaming, method.server_streaming]
    call = make(f"/{method.containing_service.full_name}/{method.name}", serialize, bytes)
    request = GetMessageClass(method.input_type)()
    try:
        running = call(iter([request]) if method.client_streaming else request)
        if method.server_streaming:
            next(running, None)
            running.cancel()
    except grpc.RpcError as problem:
        metadata = dict(problem.trailing_metadata() or ())
        return str(metadata.get("prefixd-error", problem.code().name))
    return ""


@in_loop
async def test_every_rpc_with_every_role_is_as_the_table_says(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    services = pb.DESCRIPTOR.services_by_name
    async with running(tmp_path) as daemon, served(daemon, flags) as address:
        for role in (None, *Role):
            token = TOKENS[role] if role else "wrong-" * 10
            with grpc.secure_channel(address, trusting(authority, token)) as stub:
                for service in ("Cache", "Admin"):
                    for method in services[service].methods:
                        needed = (CACHE_ROLES | ADMIN_ROLES).get(method.name, Role.ADMIN)
                        found = await refusal(stub, method)
                        if role is None:
                            assert found == "not_authenticated", method.full_name
                        elif not role.allows(needed):
                            assert found == "not_permitted", method.full_name
                        else:
                            assert found not in ("not_permitted", "not_authenticated")
        (lookup,) = (m for m in services["Cache"].methods if m.name == "Lookup")
        with grpc.secure_channel(address, trusting(authority)) as stub:
            assert await refusal(stub, lookup) == "not_authenticated"
        async with grpc.aio.secure_channel(address, trusting(authority)) as stub:
            # Two headers, one of them valid.
            call = stub.unary_unary(f"/{lookup.containing_service.full_name}/Lookup")
            both = [("authorization", f"Bearer {TOKENS[Role.READ]}"), ("authorization", "Bearer x")]
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await call(b"", metadata=both)
        assert daemon.front.in_flight()["token_refusals"] > 30
        # An empty request to drain is valid, so the daemon drains.
        await daemon.admin.Drain(pb.DrainRequest(resume=True))
        await daemon.assert_sound()


@in_loop
async def test_clients_without_a_valid_certificate_are_refused(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    other = Authority(tmp_path / "other")
    methods = pb.DESCRIPTOR.services_by_name["Cache"].methods_by_name
    async with running(tmp_path) as daemon:
        async with served(daemon, flags) as address:
            with grpc.insecure_channel(address) as stub:
                assert await refusal(stub, methods["Lookup"]) == "UNAVAILABLE"
            with grpc.secure_channel(address, trusting(other)) as stub:
                assert await refusal(stub, methods["Lookup"]) == "UNAVAILABLE"
        expired, key = authority.sign("expired", days=-1)
        over = [*flags, f"--server.tls_cert={expired}", f"--server.tls_key={key}"]
        async with served(daemon, over) as address:
            with grpc.secure_channel(address, trusting(authority)) as stub:
                assert await refusal(stub, methods["Lookup"]) == "UNAVAILABLE"
        mutual = [*flags, f"--server.tls_client_ca={authority.certificate}"]
        async with served(daemon, mutual) as address:
            token = TOKENS[Role.READ]
            with grpc.secure_channel(address, trusting(authority, token)) as stub:
                assert await refusal(stub, methods["Lookup"]) == "UNAVAILABLE", (
                    "accepted without a certificate"
                )
            for who, good in ((other, False), (authority, True)):
                own, its_key = who.sign("client")
                credentials = grpc.composite_channel_credentials(
                    grpc.ssl_channel_credentials(
                        authority.certificate.read_bytes(), its_key.read_bytes(), own.read_bytes()
                    ),
                    grpc.access_token_call_credentials(token),
                )
                with grpc.secure_channel(address, credentials) as stub:
                    found = await refusal(stub, methods["Lookup"])
                    assert found == ("invalid_batch" if good else "UNAVAILABLE")


def test_a_client_and_an_operator_over_tls(
    authority: Authority, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private_daemon(*flags) as daemon:
        address = tcp_address(daemon)
        monkeypatch.setenv(security.CA, str(authority.certificate))
        token = tmp_path / "token"
        monkeypatch.setenv(security.TOKEN, str(token))
        token.write_text(TOKENS[Role.WRITE] + "\n")
        with Client(address) as client:
            assert client.wait_connected(deadline_ms=10_000)
            (saved,) = client.save_many([SaveItem(KEY, b"bytes", 5)], tier=Tier.RAM)
            assert saved.status.label == "saved"
            with client.claim([KEY]) as hit:
                assert hit
        token.write_text(TOKENS[Role.READ])
        with Client(address) as client:
            assert client.wait_connected(deadline_ms=10_000)
            with client.claim([KEY]) as hit:
                assert hit
            (saved,) = client.save_many([SaveItem(Key(b"\x01" * 32), b"bytes", 5)], tier=Tier.RAM)
            assert saved.status.label != "saved", "a reader could write"
        stats = ["stats", "--address", address]
        refused = CliRunner().invoke(app, stats)
        assert refused.exit_code == 1
        assert "has the role read" in refused.output
        watch = ["watch", "--once", "--address", address]
        refused = CliRunner().invoke(app, watch)
        assert refused.exit_code == 1
        assert "has the role read, this takes watch" in refused.output
        token.write_text(TOKENS[Role.WATCH])
        watched = CliRunner().invoke(app, watch)
        assert watched.exit_code == 0
        assert f"+ {KEY.hex()} ram" in watched.output
        assert CliRunner().invoke(app, stats).exit_code == 1, "a router could act as an operator"
        token.write_text("wrong-" * 10)
        with Client(address) as client:
            assert not client.wait_connected(deadline_ms=500)
            with client.claim([KEY]) as hit:
                assert not hit, "a wrong token is not a miss"
        token.write_text(TOKENS[Role.ADMIN])
        assert CliRunner().invoke(app, stats).exit_code == 0
        evict = ["evict", "--bytes", "4KiB", "--tier", "ram", "--address", address]
        assert CliRunner().invoke(app, evict).exit_code == 0
        log = daemon.log.read_text()
        assert "a-ADMIN" in log, "the log does not name the operator"
        assert not any(token in log for token in TOKENS.values())


@pytest.mark.parametrize("variable", [security.TOKEN, security.CERT, security.KEY])
def test_a_token_is_never_sent_without_tls(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=security.CA):
        security.open_channel("127.0.0.1:1", [])
    security.open_channel(f"unix:{tmp_path}/s", []).close()
    monkeypatch.setenv(security.CA, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="can't read"):
        security.open_channel("127.0.0.1:1", [])


def test_files_that_are_wrong_are_refused_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.sign("wrong")
    open_key = tmp_path / "open.key"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o644)
    text = tmp_path / "text"
    text.write_text("hello")

    def refused(*flags: str) -> Iterator[str]:
        with pytest.raises(ConfigError) as problem:
            certificates_of(load_config(["--tcp=127.0.0.1:0", *flags], {}).server)
        yield str(problem.value)

    both = (f"--server.tls_cert={certificate}", f"--server.tls_key={key}")
    (message,) = refused(both[0], f"--server.tls_key={open_key}")
    assert f"server.tls_key: {open_key} is no place for a secret: others than" in message
    (message,) = refused(f"--server.tls_cert={text}", both[1])
    assert "server.tls_cert" in message
    assert "no PEM" in message
    (message,) = refused(*both, f"--server.tls_client_ca={tmp_path / 'nothing'}")
    assert "server.tls_client_ca: can't read" in message


def test_shares_are_for_namespaces_that_tokens_are_of(flags: list[str], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read one {'x' * 32} team-a\n")
    tokens.chmod(0o600)
    over = [*flags, f"--server.tokens={tokens}", "--ram=8MiB"]
    found = tokens_of(load_config([*over, "--ram.shares=team-a=1MiB"], {}))
    assert found is not None
    assert found.namespaces == {"team-a"}
    with pytest.raises(ConfigError, match=r"^ram\.shares: no token in .* 'team-b'$"):
        tokens_of(load_config([*over, "--ram.shares=team-b=1MiB"], {}))
