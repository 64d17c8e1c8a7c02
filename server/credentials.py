"""The certificates and tokens of the TCP ports.

Their files are read at the start and at each reload. New certificates apply to new connections;
existing connections keep theirs. Certificates are watched, because no client can connect once one
has expired. No message contains a secret.
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
from ..proto.trust import why_no_secret
from .api.access import Tokens
from .api.front import Front
from .config.options import Config, ServerSection
from .config.values import parse_shares
from .reloading import FileChange, FilesRead
from .runtime.loop import Core

log = structlog.get_logger("prefixd.certificates")


#: A certificate that ends within this time is a notice.
SOON_NS: Final = 7 * 24 * 3_600 * 10**9


_CHECK_INTERVAL_S: Final = 3_600.0


_MAX_FILE_BYTES: Final = 2**20


_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL
)


_CERT, _KEY, _CLIENT_CA = "server.tls_cert", "server.tls_key", "server.tls_client_ca"


@dataclass(frozen=True, slots=True)
class Material:
    """The contents of the files, read together because they belong together."""

    #: For the data socket.
    context: ssl.SSLContext
    #: For gRPC.
    configuration: grpc.ServerCertificateConfiguration
    #: Option -> when its certificate ends, in Unix seconds.
    ends_s: dict[str, int]
    #: Option -> SHA-256 of its file.
    digests: dict[str, bytes]

    def describe(self, option: str) -> str:
        """Identify an option's file without revealing a secret."""
        name = f"sha256 {self.digests[option].hex()[:12]}"
        return f"{name}, until {_date(self.ends_s[option])}" if option in self.ends_s else name


class Certificates:
    """The certificates in use. `read` may run on any thread, the rest on the event loop."""

    def __init__(self, files: ServerSection) -> None:
        """`files`: `tls_cert` and `tls_key`, perhaps `tls_client_ca`. Raises ConfigError."""
        self._files: Final = files
        self.material = self.read()
        #: The configuration that gRPC uses. gRPC fetches it for one connection at a time.
        self._given = self.material.configuration
        self._notices: dict[str, str] = {}
        #: Called with the new context when it changes.
        self.when_changed: Callable[[ssl.SSLContext], None] = lambda _context: None

    def read(self) -> Material:
        """Read and check the files without using them yet. Raises ConfigError, which names the
        option."""
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
            # OpenSSL has read these files once more, for the context.
            if _read(option, options[option]) != before:
                raise ConfigError(f"{option}: {options[option]} changed while it was read")
        ends_s = {_CERT: min(_ends_s(raw[_CERT]), default=0)}
        if roots:
            # Clients are locked out only when the last of them has expired.
            ends_s[_CLIENT_CA] = max(_ends_s(roots), default=0)
        return Material(
            context,
            grpc.ssl_server_certificate_configuration([(raw[_KEY], raw[_CERT])], roots),
            ends_s,
            {option: hashlib.sha256(each).digest() for option, each in raw.items()},
        )

    def use(self, material: Material) -> None:
        """Use it for new connections."""
        self.material = material
        self.when_changed(material.context)

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials of gRPC's port."""
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            self._newer,  # type: ignore[arg-type]  # its stubs know no None
            require_client_authentication=_CLIENT_CA in self.material.digests,
        )

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each connection, on its own threads. None: nothing has changed."""
        configuration = self.material.configuration
        if configuration is self._given:
            return None
        self._given = configuration
        return configuration

    async def watch(self, core: Core) -> None:
        """Report certificates that end soon or have ended in the log and in the notices, until
        they are replaced."""
        while True:
            self.look(core)
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def look(self, core: Core) -> None:
        """Check once."""
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


def certificates_of(files: ServerSection) -> Certificates | None:
    """The configured certificates; None without TLS. Raises ConfigError."""
    return Certificates(files) if files.tls_cert else None


def _context(files: ServerSection) -> ssl.SSLContext:
    """TLS 1.3 only, because both ends of the data socket are prefixd's. No tickets, so that the
    daemon keeps no state of ended connections. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    try:
        # Without a password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(files.tls_cert, files.tls_key, password="")
    except OSError as problem:
        raise ConfigError(
            f"{_CERT} and {_KEY}: these files do not work for TLS: {problem}"
        ) from None
    return context


def _read(option: str, name: str, *, secret: bool = False) -> bytes:
    try:
        with Path(name).open("rb") as file:
            if secret and (why := why_no_secret(os.fstat(file.fileno()))):
                raise ConfigError(f"{option}: {name} is no place for a secret: {why}")
            data = file.read(_MAX_FILE_BYTES)
    except OSError as problem:
        raise ConfigError(f"{option}: can't read {name}: {problem.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{option}: {name} is no PEM file")
    return data


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _ends_s(pem: bytes) -> list[int]:
    """When each certificate in a PEM file ends, in Unix seconds. Certificates that OpenSSL accepts
    but this library does not are left out."""
    # Imported here: it takes 16 MB, which only a daemon with TLS needs.
    from cryptography import x509

    ends_s = []
    for found in _CERTIFICATE.findall(pem):
        with suppress(ValueError):
            certificate = x509.load_pem_x509_certificate(found)
            ends_s.append(int(certificate.not_valid_after_utc.timestamp()))
    return ends_s


def tls_problems(files: ServerSection) -> Iterator[str]:
    """What is wrong with the files of TLS: with each of them, or with how they fit together."""
    found = False
    options = ((_CERT, files.tls_cert), (_KEY, files.tls_key), (_CLIENT_CA, files.tls_client_ca))
    for option, name in options:
        try:
            if name:
                _read(option, name, secret=option == _KEY)
        except ConfigError as problem:
            found = True
            yield str(problem)
    if files.tls_cert and files.tls_key and not found:
        try:
            Certificates(files)
        except ConfigError as problem:
            yield str(problem)


def tokens_of(config: Config) -> Tokens | None:
    """The tokens for TCP; None if every client may call. Raises ConfigError, also for a share of a
    namespace without a token, because no client could use it."""
    if not config.server.tokens:
        return None
    tokens = Tokens.from_file(Path(config.server.tokens))
    for tier in ("ram", "shm", "disk"):
        for name in parse_shares(getattr(config, tier).shares):
            if name not in tokens.namespaces:
                raise ConfigError(
                    f"{tier}.shares: no token in {config.server.tokens} has the namespace {name!r}"
                )
    return tokens


def read_files(core: Core, front: Front, certificates: Certificates | None) -> FilesRead:
    """The tokens and certificates of a running daemon, read again; either all are put to use or
    none. On any thread. Raises ConfigError."""
    tokens = None if front.tokens is None else front.tokens.read()
    material = None if certificates is None else certificates.read()
    changes: list[FileChange] = []
    if front.tokens is not None and tokens is not None:
        changes += _changed_tokens(front.tokens, tokens)
    if certificates is not None and material is not None:
        running = certificates.material
        changes += [
            FileChange(option, running.describe(option), material.describe(option))
            for option, digest in material.digests.items()
            if digest != running.digests[option]
        ]

    def use() -> None:
        if tokens is not None:
            front.use_tokens(tokens)
        if certificates is not None and material is not None:
            certificates.use(material)
            certificates.look(core)

    return FilesRead(changes, use)


def _changed_tokens(running: Tokens, now: Tokens) -> Iterator[FileChange]:
    if now.accesses() != running.accesses():
        new = len(now.accesses() - running.accesses())
        yield FileChange(
            "server.tokens", f"{len(running)} tokens", f"{len(now)}, {new} of them new"
        )
