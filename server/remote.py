"""The TCP ports: the files that decide who may connect, read at the start and with each reload.
Secrets are in no message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..proto.errors import ConfigError
from .api.access import Tokens
from .api.front import Front
from .certificates import Certificates, Material
from .config.options import Config
from .config.values import parse_shares
from .reloading import FileChange, FilesRead
from .runtime.loop import Core


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
