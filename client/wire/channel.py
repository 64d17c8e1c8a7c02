"""How a channel to a daemon is opened: plainly over a Unix socket, over TCP with TLS if the
environment names what it needs.

| variable | a file with |
|---|---|
| `PREFIXD_TLS_CA` | the certificates that signed the daemon's, as PEM: asks for TLS |
| `PREFIXD_TLS_CERT`, `PREFIXD_TLS_KEY` | this client's own, where the daemon asks for one |
| `PREFIXD_TOKEN_FILE` | the token, which goes with every call, and over TLS only |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import grpc

from ...proto.endpoints import admin_address, socket_path
from ...proto.errors import ConfigError

CA: Final = "PREFIXD_TLS_CA"
CERT: Final = "PREFIXD_TLS_CERT"
KEY: Final = "PREFIXD_TLS_KEY"
TOKEN: Final = "PREFIXD_TOKEN_FILE"


def is_secured(address: str) -> bool:
    """Will the channel to it use TLS?"""
    return socket_path(address) is None and bool(os.environ.get(CA))


def operators_of(address: str) -> str | None:
    """Where the operators of the daemon at `address` are served: beside its socket, or over TCP
    with TLS. None: not from here."""
    return admin_address(address) or (address if is_secured(address) else None)


def open_channel(address: str, options: Any) -> grpc.Channel:
    """Connects with the first call. Raises ConfigError where the environment is wrong: a token is
    never sent, nor a call made, over less than was asked for."""
    if socket_path(address) is not None:
        return grpc.insecure_channel(address, options)
    if not os.environ.get(CA):
        given = [name for name in (CERT, KEY, TOKEN) if os.environ.get(name)]
        if given:
            raise ConfigError(f"{' and '.join(given)} are for TLS: say with {CA} whom to trust")
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(_read(CA), _read(KEY), _read(CERT))
    token = _read(TOKEN)
    if token is not None:
        call = grpc.access_token_call_credentials(token.decode().strip())
        credentials = grpc.composite_channel_credentials(credentials, call)
    return grpc.secure_channel(address, credentials, options)


def _read(variable: str) -> bytes | None:
    name = os.environ.get(variable)
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as problem:
        raise ConfigError(f"{variable}: can't read {name}: {problem.strerror}") from None
