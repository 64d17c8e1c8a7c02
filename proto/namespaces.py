"""Names that clients have: labels of their traffic, and the namespaces of tenants.

A label is a name under which the daemon adds up what a client counts. A namespace gives a tenant
keys of its own, whatever keys its clients name. The daemon replaces each key that a client bound to
a namespace names:

    offset  bytes
         0     24  the beginning of SHA-256("prefixd tenant key\\0" + name + "\\0" + client's key)
        24      8  the tag: the beginning of SHA-256("prefixd tenant\\0" + name)

So two namespaces never share a key, and a key tells its namespace: after a restart, on other nodes,
and without a byte more in any table or record. Nothing here is secret: a bound client can name only
keys of its own namespace, because the daemon replaces every key of every call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from .errors import InvalidSize
from .keys import Key
from .limits import KEY_BYTES, MAX_LABEL_CHARS

TAG_BYTES: Final = 8
#: Short enough that a label can begin with it (`check_label`).
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_HASH_BYTES: Final = KEY_BYTES - TAG_BYTES
_LABEL: Final = re.compile(rf"[A-Za-z0-9._:/@+-]{{1,{MAX_LABEL_CHARS}}}")


def check_label(label: str) -> str:
    """`label` itself. Raises InvalidSize if it can't be a label."""
    if not _LABEL.fullmatch(label):
        raise InvalidSize(
            f"a label has 1 ... {MAX_LABEL_CHARS} letters, digits or ._:/@+-, not {label[:80]!r}"
        )
    return label


def printable(text: str) -> str:
    """`text` with a `?` for each character that a terminal might take for a command. For what
    clients say of themselves, such as their names."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def tag_of(name: str) -> bytes:
    """The tag that every key of a namespace ends with."""
    return sha256(b"prefixd tenant\0" + name.encode()).digest()[:TAG_BYTES]


class TenantNamespace:
    """The keys of one tenant. Immutable; equal to any other of its name."""

    __slots__ = ("_begun", "name", "tag")

    def __init__(self, name: str) -> None:
        """Raises ValueError if `name` can't be a namespace's."""
        if not NAME.fullmatch(name):
            raise ValueError(f"a namespace has 1 to 32 letters, digits or ._-, not {name[:40]!r}")
        self.name: Final = name
        self.tag: Final = tag_of(name)
        self._begun: Final = sha256(b"prefixd tenant key\0" + name.encode() + b"\0")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TenantNamespace) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"

    def stored(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """The daemon's keys for these keys of a client of this namespace. Takes a microsecond
        each."""
        begun, tag, found = self._begun, self.tag, []
        for key in keys:
            hashed = begun.copy()
            hashed.update(key)
            found.append(Key(hashed.digest()[:_HASH_BYTES] + tag))
        return tuple(found)

    def has(self, key: bytes) -> bool:
        """Does this key of the daemon belong to this namespace?"""
        return key.endswith(self.tag)
