"""Who may call what over TCP: tokens with roles, from a file that only the daemon's user can read.

On the Unix sockets the file system decides who may connect, and nothing here is asked.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hmac import compare_digest
from pathlib import Path
from typing import Final

from ...proto.errors import ConfigError, NotAuthenticated, NotPermitted
from ...proto.limits import MAX_NAMESPACES
from ...proto.namespaces import NAME, Namespace


class Role(IntEnum):
    """Each may do what those before it may, but for what WATCH may: that is for ADMIN only."""

    WATCH = 1
    """Learn which keys there are, and nothing else."""
    READ = 2
    """Find and restore what is there."""
    WRITE = 3
    """Save and delete, too."""
    ADMIN = 4
    """Everything that prefixctl does, too."""

    def allows(self, needed: Role) -> bool:
        """May this role do what takes `needed`? Who watches learns every key, and with a key
        anybody reads: so that no role below ADMIN may both."""
        if needed is Role.WATCH:
            return self in (Role.WATCH, Role.ADMIN)
        return self >= needed


#: Rpcs of the Admin service that take another role than ADMIN.
ADMIN_ROLES: Final = {"Watch": Role.WATCH}
#: The role that each rpc of the Cache service takes.
CACHE_ROLES: Final = {
    "Session": Role.READ,
    "Lookup": Role.READ,
    "Claim": Role.READ,
    "Release": Role.READ,
    "Read": Role.READ,
    "Reserve": Role.WRITE,
    "Write": Role.WRITE,
    "Save": Role.WRITE,
    "SaveWhole": Role.WRITE,
    "Cancel": Role.WRITE,
    "Delete": Role.WRITE,
    "Pull": Role.WRITE,
}
#: The role that each request on the data socket takes.
DATA_ROLES: Final = {
    "attach": Role.READ,
    "lookup": Role.READ,
    "claim": Role.READ,
    "release": Role.READ,
    "give_back": Role.READ,
    "read": Role.READ,
    "fetch": Role.READ,
    "reserve": Role.WRITE,
    "cancel": Role.WRITE,
    "save": Role.WRITE,
}
MIN_TOKEN_CHARS: Final = 32
MAX_TOKENS: Final = 1_000
_MAX_FILE_BYTES: Final = 2**20
_LINE: Final = re.compile(
    rf"(watch|read|write|admin) ([\w.-]{{1,64}}) ([!-~]{{32,512}})(?: +({NAME.pattern}|[*]))?"
)
_SCHEME: Final = "Bearer "
#: In the place of a namespace: for nodes, which have to do with the entries of all.
EVERY: Final = "*"


@dataclass(frozen=True, slots=True)
class Access:
    """What a token gives: the name it goes by, a role, and the namespace that it is of."""

    token: str
    role: Role
    #: the holder of the token reaches nothing outside of this namespace; None: it has none
    namespace: Namespace | None = None
    #: bound to every namespace at once: it names keys as the daemon has them
    every: bool = False
    #: the hash of the token, so that another one is another access
    digest: bytes = field(default=b"", repr=False)

    def check(self, needed: Role) -> None:
        """Raises NotPermitted where the role does not allow what needs this one."""
        if not self.role.allows(needed):
            raise NotPermitted(
                f"the token {self.token!r} has the role {self.role.name.lower()}, this takes "
                f"{needed.name.lower()}"
            )


class Tokens:
    """The tokens that are known, as hashes. Shows none of them, whatever is done with it."""

    def __init__(self, known: Iterable[tuple[Access, str]]) -> None:
        """`known`: what each gives, and the token itself."""
        self._known = [replace(access, digest=_digest(token)) for access, token in known]
        self._path: Path | None = None
        #: calls that were refused for want of a token, or of a role
        self.refusals = 0

    @classmethod
    def from_file(cls, path: Path) -> Tokens:
        """One a line: `ROLE NAME TOKEN [NAMESPACE]`; `#` begins a comment. Raises ConfigError,
        which names the line and not what stands there."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                    raise ConfigError(f"server.tokens: {path} is no file of at most a megabyte")
                if status.st_mode & 0o077:
                    raise ConfigError(
                        f"server.tokens: others than its owner may use {path}: chmod 600 it"
                    )
                lines = file.read().decode().splitlines()
        except OSError as problem:
            raise ConfigError(f"server.tokens: can't read {path}: {problem.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"server.tokens: {path} is not text") from None
        known: list[tuple[Access, str]] = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None:
                raise ConfigError(
                    f"server.tokens: line {number} of {path} is not `watch|read|write|admin NAME "
                    f"TOKEN [NAMESPACE]` with a token of at least {MIN_TOKEN_CHARS} characters"
                )
            role, namespace = Role[found[1].upper()], found[4]
            if (namespace and role is Role.ADMIN) or (namespace == EVERY and role is Role.WATCH):
                raise ConfigError(
                    f"server.tokens: line {number} of {path}: what operators do, and a watcher of "
                    "no namespace, concerns every namespace; a token that is of one is read, write "
                    "or watch"
                )
            every = namespace == EVERY or role is Role.ADMIN
            its_own = Namespace(namespace) if namespace and not every else None
            known.append((Access(found[2], role, its_own, every), found[3]))
        if not 0 < len(known) <= MAX_TOKENS:
            raise ConfigError(f"server.tokens: {path} has {len(known)} tokens, 1 to {MAX_TOKENS}")
        if len({token for _, token in known}) < len(known):
            raise ConfigError(f"server.tokens: {path} has a token twice")
        tokens = cls(known)
        if len(tokens.namespaces) > MAX_NAMESPACES:
            raise ConfigError(
                f"server.tokens: {path} names {len(tokens.namespaces)} namespaces, at most "
                f"{MAX_NAMESPACES}"
            )
        tokens._path = path
        return tokens

    @property
    def namespaces(self) -> frozenset[str]:
        """The names of those that tokens are of."""
        return frozenset(a.namespace.name for a in self._known if a.namespace is not None)

    def accesses(self) -> frozenset[Access]:
        """What all of them give."""
        return frozenset(self._known)

    def read(self) -> Tokens:
        """What the file says by now; these stay what they are. Raises ConfigError."""
        return self if self._path is None else Tokens.from_file(self._path)

    def use(self, newer: Tokens) -> None:
        """These hold for every call from here on."""
        self._known = newer._known

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"

    def permit(self, needed: Role, authorization: str) -> Access:
        """What the token in an `authorization` header gives, if its role allows what needs this
        one. As long for each that is wrong. Raises NotAuthenticated, NotPermitted."""
        given = _digest(authorization.removeprefix(_SCHEME))
        found = None
        for access in self._known:
            # All of them, whichever it is.
            if compare_digest(access.digest, given):
                found = access
        if found is None or not authorization.startswith(_SCHEME):
            self.refusals += 1
            raise NotAuthenticated("this daemon wants a token that it knows: $PREFIXD_TOKEN_FILE")
        try:
            found.check(needed)
        except NotPermitted:
            self.refusals += 1
            raise
        return found


def bearer(token: str) -> str:
    """A token as it is in an `authorization` header."""
    return f"{_SCHEME}{token}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
