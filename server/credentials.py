"""The certificates of both TCP ports: read at the start and with each reload, put to use for new
connections, and watched: no client can connect with an expired one.

Connections that there are keep what they began with.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import grpc
import structlog

from ..proto.errors import ConfigError
from .api.access import Tokens
from .api.front import Front
from .config.options import Config, Server
from .config.values import parse_shares
from .reloading import FileChange, FilesRead
from .runtime.loop import Core

log = structlog.get_logger("prefixd.certificates")


#: One that ends within this time is a notice.
SOON_NS: Final = 7 * 24 * 3_600 * 10**9


_LOOK_EVERY_S: Final = 3_600.0


_MAX_FILE_BYTES: Final = 2**20


_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL
)


_CERT, _KEY, _CLIENT_CA = "server.tls_cert", "server.tls_key", "server.tls_client_ca"


@dataclass(frozen=True, slots=True)
class Material:
    """What the files said when they were read; each of it belongs to the rest."""

    #: for the data socket
    context: ssl.SSLContext
    #: for gRPC
    configuration: grpc.ServerCertificateConfiguration
    #: by option: when it ends, in Unix seconds
    ends_s: dict[str, int]
    #: by option: the SHA-256 of its file
    digests: dict[str, bytes]

    def describe(self, option: str) -> str:
        """Which one it is, without a secret."""
        name = f"sha256 {self.digests[option].hex()[:12]}"
        return f"{name}, until {_date(self.ends_s[option])}" if option in self.ends_s else name


class Certificates:
    """The certificates in use. `read` is for any thread, the rest for the event loop."""

    def __init__(self, files: Server) -> None:
        """`files`: `tls_cert` and `tls_key`, perhaps `tls_client_ca`. Raises ConfigError."""
        self._files: Final = files
        self.material = self.read()
        #: what gRPC has: read where it asks, one connection at a time
        self._given = self.material.configuration
        self._notices: dict[str, str] = {}
        #: told what is used from now on
        self.when_changed: Callable[[ssl.SSLContext], None] = lambda _context: None

    def read(self) -> Material:
        """What the files say now, checked as far as it can be; nothing has changed yet. Raises
        ConfigError, with the option's name."""
        files = self._files
        options = {_CERT: files.tls_cert, _KEY: files.tls_key, _CLIENT_CA: files.tls_client_ca}
        raw = {
            option: _read(option, name, secret=option == _KEY)
            for option, name in options.items()
            if name
        }
        context = _context(files)
        if roots := raw.get(_CLIENT_CA):
            try:
                context.load_verify_locations(cadata=roots.decode("ascii", "replace"))
            except (ssl.SSLError, ValueError) as problem:
                raise ConfigError(
                    f"{_CLIENT_CA}: {files.tls_client_ca} has no certificates: {problem}"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        for option, before in raw.items():
            # The context has read these files once more.
            if _read(option, options[option]) != before:
                raise ConfigError(f"{option}: {options[option]} changed while it was read")
        ends_s = {_CERT: min(_ends_s(raw[_CERT]), default=0)}
        if roots:
            # Some may have expired: clients are locked out when the last one has.
            ends_s[_CLIENT_CA] = max(_ends_s(roots), default=0)
        return Material(
            context,
            grpc.ssl_server_certificate_configuration([(raw[_KEY], raw[_CERT])], roots),
            ends_s,
            {option: hashlib.sha256(each).digest() for option, each in raw.items()},
        )

    def use(self, material: Material) -> None:
        """For each connection from here on."""
        self.material = material
        self.when_changed(material.context)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC's port."""
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            self._newer,  # type: ignore[arg-type]  # its stubs know no None
            require_client_authentication=_CLIENT_CA in self.material.digests,
        )

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks for with each connection, on threads of its own; None: what it has."""
        configuration = self.material.configuration
        if configuration is self._given:
            return None
        self._given = configuration
        return configuration

    def ends_s(self) -> dict[str, int]:
        """By option: when its certificate ends, in Unix seconds. On any thread."""
        return self.material.ends_s

    # ---- watching

    async def watch(self, core: Core) -> None:
        """Say in the log and in the notices what ends soon or is over, for as long as it is so."""
        while True:
            self.look(core)
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self, core: Core) -> None:
        """Do what `watch` does, once."""
        now_ns = core.clock.now_ns()
        found = {}
        for option, ends_s in self.material.ends_s.items():
            left_ns = ends_s * 10**9 - now_ns
            if left_ns < SOON_NS:
                how = "ended" if left_ns <= 0 else "ends"
                found[f"certificate {option}"] = f"it {how} at {_date(ends_s)}"
        for part, what in found.items():
            if self._notices.get(part) != what:
                log.warning("certificate_ends", part=part, problem=what)
            core.health.notices[part] = what
        for part in self._notices.keys() - found.keys():
            core.health.notices.pop(part, None)
        self._notices = found


def certificates_of(files: Server) -> Certificates | None:
    """TLS as it is configured; None: there is none. Raises ConfigError."""
    return Certificates(files) if files.tls_cert else None


def _context(files: Server) -> ssl.SSLContext:
    """Both ends of the data socket are prefixd's: TLS 1.3, and no tickets, so that the daemon
    remembers nothing of a connection that ended. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    try:
        # A password: else OpenSSL would ask for it on the terminal.
        context.load_cert_chain(files.tls_cert, files.tls_key, password="")
    except OSError as problem:
        raise ConfigError(f"{_CERT} and {_KEY}: these files make no TLS: {problem}") from None
    return context


def _read(option: str, name: str, *, secret: bool = False) -> bytes:
    try:
        with Path(name).open("rb") as file:
            if secret and os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"{option}: others than its owner may use {name}: chmod 600 it")
            data = file.read(_MAX_FILE_BYTES)
    except OSError as problem:
        raise ConfigError(f"{option}: can't read {name}: {problem.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{option}: {name} is no PEM file")
    return data


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _ends_s(pem: bytes) -> list[int]:
    """When each certificate ends of a file that OpenSSL takes; of one that it alone understands,
    nothing is known."""
    # 16 MB that only a daemon with TLS has to have.
    from cryptography import x509

    ends_s = []
    for found in _CERTIFICATE.findall(pem):
        with suppress(ValueError):
            certificate = x509.load_pem_x509_certificate(found)
            ends_s.append(int(certificate.not_valid_after_utc.timestamp()))
    return ends_s


def tokens_of(config: Config) -> Tokens | None:
    """Who may call over TCP; None: everybody who connects. Raises ConfigError, also for a share
    of a namespace that no token is bound to: nobody could use it."""
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


class RemoteFiles:
    """Tokens and certificates of a daemon that runs: either all of them are changed or none."""

    def __init__(self, core: Core, front: Front, certificates: Certificates | None) -> None:
        self._core = core
        self._front = front
        self._certificates = certificates

    def read(self) -> FilesRead:
        """What they say by now. On any thread. Raises ConfigError."""
        tokens = None if self._front.tokens is None else self._front.tokens.read()
        material = None if self._certificates is None else self._certificates.read()
        changes = (*self._changed_tokens(tokens), *self._changed_certificates(material))

        def use() -> None:
            if tokens is not None:
                self._front.use_tokens(tokens)
            if self._certificates is not None and material is not None:
                self._certificates.use(material)
                self._certificates.look(self._core)

        return FilesRead(changes, use)

    def _changed_tokens(self, now: Tokens | None) -> Iterator[FileChange]:
        running = self._front.tokens
        if running is None or now is None or now.accesses() == running.accesses():
            return
        new = len(now.accesses() - running.accesses())
        yield FileChange(
            "server.tokens", f"{len(running)} tokens", f"{len(now)}, {new} of them new"
        )

    def _changed_certificates(self, now: Material | None) -> Iterator[FileChange]:
        if self._certificates is None or now is None:
            return
        running = self._certificates.material
        for option, digest in now.digests.items():
            if digest != running.digests[option]:
                yield FileChange(option, running.describe(option), now.describe(option))
