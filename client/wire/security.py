"""TLS and tokens of a client, and gRPC channels that use them: over TCP, and never over a Unix
socket.

By default a client takes the names of the files from the environment:

| variable | a file with |
|---|---|
| `PREFIXD_TLS_CA` | the certificates that signed the daemon's, as PEM; switches TLS on |
| `PREFIXD_TLS_CERT`, `PREFIXD_TLS_KEY` | its own certificate and key, if the daemon asks |
| `PREFIXD_TOKEN_FILE` | the token, which is sent with every call, over TLS only |
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from ...proto.endpoints import admin_address, socket_path
from ...proto.errors import ConfigError

CA: Final = "PREFIXD_TLS_CA"
CERT: Final = "PREFIXD_TLS_CERT"
KEY: Final = "PREFIXD_TLS_KEY"
TOKEN: Final = "PREFIXD_TOKEN_FILE"


@dataclass(frozen=True, slots=True)
class Security:
    """Names of files, which are read for each new connection. Empty: there is no such file."""

    #: Switches TLS on.
    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""
    #: What error messages call them.
    names: tuple[str, str, str, str] = (CA, CERT, KEY, TOKEN)

    @classmethod
    def of_environment(cls) -> Security:
        ca, cert, key, token_file = (os.environ.get(name, "") for name in (CA, CERT, KEY, TOKEN))
        return cls(ca, cert, key, token_file)

    def check(self) -> None:
        """Raises ConfigError if there is a certificate or a token without TLS to send it over."""
        others = zip((self.cert, self.key, self.token_file), self.names[1:], strict=True)
        given = [name for file, name in others if file]
        if given and not self.ca:
            raise ConfigError(
                f"{' and '.join(given)} are for TLS: say with {self.names[0]} whom to trust"
            )

    def token(self) -> str:
        """Raises ConfigError."""
        return (_read(self.names[3], self.token_file) or b"").decode().strip()

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: without TLS. Raises ConfigError."""
        self.check()
        if not self.ca:
            return None
        ca, cert, key, _ = self.names
        credentials = grpc.ssl_channel_credentials(
            _read(ca, self.ca), _read(key, self.key), _read(cert, self.cert)
        )
        token = self.token()
        if token:
            call = grpc.access_token_call_credentials(token)
            credentials = grpc.composite_channel_credentials(credentials, call)
        return credentials

    def context(self) -> ssl.SSLContext | None:
        """For data sockets. None: without TLS. Raises ConfigError."""
        if not self.ca:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as problem:
            raise ConfigError(f"{self.names[0]}: these files make no TLS: {problem}") from None
        return context


def operators_of(address: str) -> str | None:
    """The address for operators of the daemon at `address`: the socket beside its own, or the same
    one if that is TCP with TLS. None: operators can't reach the daemon this way."""
    secured = socket_path(address) is None and bool(os.environ.get(CA))
    return admin_address(address) or (address if secured else None)


def open_channel(address: str, options: Any, security: Security | None = None) -> grpc.Channel:
    """Open a channel, which connects with the first call. `security` None: that of the environment.
    Raises ConfigError if it is wrong, so that no call or token goes over a weaker channel than
    requested."""
    if socket_path(address) is not None:
        return grpc.insecure_channel(address, options)
    credentials = (security or Security.of_environment()).channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def _read(variable: str, name: str) -> bytes | None:
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as problem:
        raise ConfigError(f"{variable}: can't read {name}: {problem.strerror}") from None
