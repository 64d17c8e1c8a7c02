"""Clients with tokens of two namespaces or of none, and a daemon that they reach over TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.vocabulary import Tier
from prefixd.server.api.access import Role
from prefixd.server.config.loading import load_config
from prefixd.server.credentials import certificates_of, tokens_of
from tests.support.certificates import Authority
from tests.support.running import OpenSession, Outside, Running, key, running

NAMESPACES = ("a", "b", "")
#: A key that exists in every namespace, and a key of each namespace that exists only there.
COMMON = key(1)
OWN = {"a": key(11), "b": key(12), "": key(13)}
#: A key that exists nowhere, for tests to delete.
MISSING = key(14)
#: 4 KiB for each namespace, which begin with its mark.
MARKS = {name: f"<of {name or 'nobody'}>".encode() for name in NAMESPACES}
DATA = {name: mark.ljust(4096, b".") for name, mark in MARKS.items()}


class Identity(NamedTuple):
    """The role and the namespace of a token."""

    role: Role
    name: str  # of the namespace; empty: no namespace, *: every namespace

    @property
    def token(self) -> str:
        return f"{self.role.name}-{self.reach}-".lower().ljust(40, "x")

    @property
    def line(self) -> str:
        role = self.role.name.lower()
        return f"{role} {role}-{self.reach} {self.token} {self.name}".strip()

    @property
    def of(self) -> str:
        """The namespace of the keys in its requests: a token of all namespaces uses stored keys."""
        return "" if self.name == "*" else self.name

    @property
    def reach(self) -> str:
        return "every" if self.name == "*" or self.role is Role.ADMIN else self.name or "none"


#: The tokens that may open a session.
IDENTITIES = [Identity(role, name) for role in (Role.READ, Role.WRITE) for name in NAMESPACES]
IDENTITIES += [Identity(Role.ADMIN, ""), Identity(Role.WRITE, "*")]
#: The tokens that may only watch, and open no session.
WATCHERS = [Identity(Role.WATCH, name) for name in NAMESPACES]


def flags_of(directory: Path, authority: Authority) -> list[str]:
    """The flags of a daemon with TLS that knows all tokens."""
    certificate, private = authority.sign("daemon")
    tokens = directory / "tokens"
    tokens.write_text("".join(f"{identity.line}\n" for identity in (*IDENTITIES, *WATCHERS)))
    tokens.chmod(0o600)
    return [
        "--server.tcp=127.0.0.1:0",
        f"--server.tls_cert={certificate}",
        f"--server.tls_key={private}",
        f"--server.tokens={tokens}",
    ]


class Tenant(Outside):
    """A client with a token, over TCP."""

    def __init__(self, identity: Identity, channel: grpc.aio.Channel) -> None:
        self.identity = identity
        self.address, self.other_events = "", []
        self.channel = self.admin_channel = channel
        self.cache: Any = rpc.CacheStub(channel)
        self.admin: Any = rpc.AdminStub(channel)


@asynccontextmanager
async def tenants(
    daemon: Running, authority: Authority, flags: list[str]
) -> AsyncIterator[dict[Identity, Tenant]]:
    """A client for each token, over TLS."""
    config = load_config(flags, {})
    server = daemon.front.remote(tokens_of(config))
    secured = certificates_of(config.server)
    assert secured is not None
    port = server.add_secure_port("127.0.0.1:0", secured.credentials())
    await server.start()
    root = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, grace=0)
        found = {}
        for identity in (*IDENTITIES, *WATCHERS):
            credentials = grpc.composite_channel_credentials(
                root, grpc.access_token_call_credentials(identity.token)
            )
            channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials)
            stack.push_async_callback(channel.close)
            found[identity] = Tenant(identity, channel)
        yield found


@asynccontextmanager
async def shared(
    directory: Path,
    authority: Authority,
    flags: list[str],
    *more: str,
    tiers: Sequence[Tier] = (Tier.RAM,),
) -> AsyncIterator[tuple[Running, dict[Identity, Tenant]]]:
    """A daemon of several tenants, and a client for each token. `more`: flags beside those of
    `flags_of`."""
    async with (
        running(directory, *flags, *more, tiers=tiers) as daemon,
        tenants(daemon, authority, flags) as clients,
    ):
        yield daemon, clients


async def writer(clients: dict[Identity, Tenant], name: str) -> OpenSession:
    """A session that saves in this namespace."""
    return await clients[Identity(Role.WRITE, name)].open()


def stored(name: str, of: Key) -> Key:
    return TenantNamespace(name).stored([of])[0] if name else of


#: Room for everything that a test saves, with shares for both namespaces.
ROOM = ("--ram.budget=16MiB", "--ram.shares=a=4MiB, b=4MiB")
