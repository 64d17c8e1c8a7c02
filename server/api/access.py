"""Who may call what over TCP, and whose keys a call may name.

Tokens with roles come from a file that only the daemon's user can read. On the Unix sockets the
file system decides who may connect, and no token is asked for.

A token may be bound to a namespace. Here, and nowhere behind it, the keys that such a caller names
become those of its namespace (`proto.namespaces`). So a tenant finds only what is in its own
namespace, whatever keys it names, and a caller without a namespace finds only what is in none.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hmac import compare_digest
from pathlib import Path
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import ConfigError, NotAuthenticated, NotPermitted
from ...proto.keys import Key
from ...proto.limits import MAX_NAMESPACES
from ...proto.namespaces import NAME, TAG_BYTES, TenantNamespace, tag_of
from ...proto.trust import why_no_secret


class Role(IntEnum):
    """Each role may do what those before it may, except that only ADMIN may also do what WATCH
    may."""

    WATCH = 1
    """Learn which keys are cached, and nothing else."""
    READ = 2
    """Find and restore entries."""
    WRITE = 3
    """Save and delete, too."""
    ADMIN = 4
    """Everything that prefixctl does, too."""

    def allows(self, needed: Role) -> bool:
        """Whether this role covers what takes `needed`. A watcher learns every key, and anybody
        with a key can read its entry: no role below ADMIN may do both."""
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
    "Save": Role.WRITE,
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
#: Stands in the place of a namespace for nodes, which handle the entries of all namespaces.
EVERY: Final = "*"


@dataclass(frozen=True, slots=True)
class Access:
    """What a token grants: the name that logs show, a role and a namespace."""

    token: str
    role: Role
    #: The token reaches nothing outside this namespace. None: it is bound to no namespace.
    namespace: TenantNamespace | None = None
    #: It reaches every namespace: it names keys as the daemon stores them.
    every: bool = False
    #: Hash of the token: two tokens never give equal accesses.
    digest: bytes = field(default=b"", repr=False)

    def check(self, needed: Role) -> None:
        """Raises NotPermitted when the role does not allow what takes `needed`."""
        if not self.role.allows(needed):
            raise NotPermitted(
                f"the token {self.token!r} has the role {self.role.name.lower()}, this takes "
                f"{needed.name.lower()}"
            )


class Tokens:
    """The known tokens, as hashes. No method and no repr shows a token."""

    def __init__(self, known: Iterable[tuple[Access, str]]) -> None:
        """`known`: what each token grants, and the token itself."""
        self._known = [replace(access, digest=_digest(token)) for access, token in known]
        self._path: Path | None = None
        #: Calls refused for a missing or wrong token, or for a role that does not suffice.
        self.refusals = 0

    @classmethod
    def from_file(cls, path: Path) -> Tokens:
        """Read `ROLE NAME TOKEN [NAMESPACE]` from each line; `#` begins a comment. Raises
        ConfigError, which names the line but never quotes it."""
        known = list(_accesses(path))
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
        """Names of the namespaces that tokens are bound to."""
        return frozenset(a.namespace.name for a in self._known if a.namespace is not None)

    def accesses(self) -> frozenset[Access]:
        """What the tokens grant."""
        return frozenset(self._known)

    def read(self) -> Tokens:
        """The tokens that the file holds now; `self` stays as it is. Raises ConfigError."""
        return self if self._path is None else Tokens.from_file(self._path)

    def use(self, newer: Tokens) -> None:
        """Accept the tokens of `newer`, and no others, from the next call on."""
        self._known = newer._known

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"

    def permit(self, needed: Role, authorization: str) -> Access:
        """What the token in an `authorization` header grants, if its role allows `needed`. Takes
        the same time for every wrong token. Raises NotAuthenticated, NotPermitted."""
        given = _digest(authorization.removeprefix(_SCHEME))
        found = None
        for access in self._known:
            # Compare with all of them, so that the time does not tell which one matched.
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


def _accesses(path: Path) -> Iterator[tuple[Access, str]]:
    """What each token of the file grants, and the token itself. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"server.tokens: {path} is no file of at most a megabyte")
            if why := why_no_secret(status):
                raise ConfigError(f"server.tokens: {path} is no place for a secret: {why}")
            lines = file.read().decode().splitlines()
    except OSError as problem:
        raise ConfigError(f"server.tokens: can't read {path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"server.tokens: {path} is not text") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
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
        bound = TenantNamespace(namespace) if namespace and not every else None
        yield Access(found[2], role, bound, every), found[3]


def bearer(token: str) -> str:
    """The `authorization` header that carries a token."""
    return f"{_SCHEME}{token}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


class Namespaces:
    """The namespaces of tokens and shares, and the way from a caller's keys to stored ones.
    `learn` may be called on any thread."""

    def __init__(self) -> None:
        #: Names by their tags. Replaced as a whole, so that readers need no lock.
        self._names: dict[bytes, str] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Add these names. None is ever forgotten: its entries may still be cached."""
        self._names = self._names | {tag_of(name): name for name in names}

    def name_of(self, key: bytes) -> str:
        """The namespace of a stored key; empty: it is of none."""
        return self._names.get(key[-TAG_BYTES:], "")

    def keys(self, access: Access | None, keys: Sequence[Key]) -> tuple[Key, ...]:
        """The stored keys for the keys that a caller names. Raises NotPermitted when a caller
        without a namespace names a key of one. Callers on a Unix socket may name every key: a
        process that may open the socket is trusted with everything that is cached."""
        if access is None or access.every:
            return tuple(keys)
        if access.namespace is not None:
            return access.namespace.stored(keys)
        if self._names:
            for number, key in enumerate(keys):
                name = self.name_of(key)
                if name:
                    raise NotPermitted(
                        f"key {number} is of the namespace {name!r}, and this caller is of none"
                    )
        return tuple(keys)

    def hide(self, access: Access | None, misses: Iterable[pb.AbsentMiss]) -> None:
        """Replace the keys of reported misses by the stored ones, in place."""
        for miss in misses:
            keys = self.keys(access, [Key(key) for key in miss.keys])
            del miss.keys[:]
            miss.keys.extend(keys)

    def label(self, access: Access | None, label: str) -> str:
        """The label under which a session that asks for `label` is counted. That of a tenant is
        its namespace, or begins with it and a slash. Raises NotPermitted for the label of another
        namespace."""
        namespace = namespace_of(access)
        first = label.partition("/")[0]
        if namespace is None:
            if first in self._names.values():
                raise NotPermitted(
                    f"the label {label!r} is of the namespace {first!r}, and this caller is of none"
                )
            return label
        if label and first != namespace.name:
            raise NotPermitted(
                f"the label {label!r} is not of the namespace of this token, {namespace.name!r}: "
                f"use that, or {namespace.name + '/...'!r}"
            )
        return label or namespace.name


def namespace_of(access: Access | None) -> TenantNamespace | None:
    """The namespace that an access is bound to; None when it is bound to none."""
    return None if access is None else access.namespace


def tenant_of(access: Access | None, host: str) -> str:
    """The tenant (`core.shares`) of a caller over TCP: its namespace, its token if that has none,
    or the address of its host where no token is asked for."""
    if access is None:
        return f"host {host}"
    if access.namespace is not None:
        return f"namespace {access.namespace.name}"
    return f"token {access.token}"


def check_same(access: Access | None, of_session: Access | None) -> None:
    """Raises NotPermitted when a caller of one namespace uses a session of another."""
    if of_session is None and namespace_of(access) is None:
        # The session was opened on a Unix socket: such a process may share it with these callers.
        return
    mine, its = _reach(access), _reach(of_session)
    if mine != its:
        raise NotPermitted(f"this caller is of {mine}, and the session that it names of {its}")


def _reach(access: Access | None) -> str:
    """The namespaces whose keys a caller with this access may name, in words."""
    if access is None or access.every:
        return "every namespace"
    namespace = access.namespace
    return "no namespace" if namespace is None else f"the namespace {namespace.name!r}"
