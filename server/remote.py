"""The TCP port: what the files say that decide who may connect. Secrets are in no message."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import grpc

from ..proto.errors import ConfigError
from .api.access import Tokens
from .config.options import Config
from .config.values import parse_shares


def tokens_of(config: Config) -> Tokens | None:
    """Who may call over TCP; None: whoever connects. Raises ConfigError, also for shares of a
    namespace that no token is of: they would be kept for nobody."""
    if not config.server.tokens:
        return None
    tokens = Tokens.from_file(Path(config.server.tokens))
    for tier in ("ram", "shm", "disk"):
        for name in parse_shares(getattr(config, tier).shares):
            if name not in tokens.namespaces:
                raise ConfigError(
                    f"{tier}.shares: no token in {config.server.tokens} is of the namespace "
                    f"{name!r}"
                )
    return tokens


def credentials_of(config: Config) -> grpc.ServerCredentials | None:
    """TLS as it is configured; None: there is none. Raises ConfigError."""
    server = config.server
    if not server.tls_cert:
        return None
    key = _read("server.tls_key", server.tls_key, secret=True)
    chain = _read("server.tls_cert", server.tls_cert)
    roots = None
    if server.tls_client_ca:
        roots = _read("server.tls_client_ca", server.tls_client_ca)
    return grpc.ssl_server_credentials([(key, chain)], roots, require_client_auth=roots is not None)


def tls_context_of(config: Config) -> ssl.SSLContext | None:
    """The same for the data socket. Both of its ends are prefixd's: TLS 1.3, and no tickets, so
    that the daemon remembers nothing of a connection that ended. Raises ConfigError."""
    server = config.server
    if not server.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key)
        if server.tls_client_ca:
            context.load_verify_locations(server.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as problem:
        raise ConfigError(f"server.tls_cert: these files make no TLS: {problem}") from None
    return context


def _read(option: str, name: str, *, secret: bool = False) -> bytes:
    try:
        with Path(name).open("rb") as file:
            if secret and os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"{option}: others than its owner may use {name}: chmod 600 it")
            data = file.read(2**20)
    except OSError as problem:
        raise ConfigError(f"{option}: can't read {name}: {problem.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{option}: {name} is no PEM file")
    return data
