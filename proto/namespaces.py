"""Namespaces of tenants: each has keys of its own, whatever keys its clients name.

The daemon puts another key in the place of each that a bound client names:

    offset  bytes
         0     24  the beginning of SHA-256("prefixd tenant key\\0" + name + "\\0" + its key)
        24      8  the beginning of SHA-256("prefixd tenant\\0" + name), the tag

So two namespaces can't meet in a key, and a key says whose it is: after a restart, on other nodes,
and without a byte more in any table or record. Nothing here is secret: whoever is bound can name
no key but its own, because the daemon does this to every key of every call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

from .keys import Key
from .limits import KEY_BYTES

TAG_BYTES: Final = 8
#: With both of these behind it a name is still a label (`proto.labels`).
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_HASH_BYTES: Final = KEY_BYTES - TAG_BYTES


def tag_of(name: str) -> bytes:
    """What every key of a namespace ends with."""
    return sha256(b"prefixd tenant\0" + name.encode()).digest()[:TAG_BYTES]


class Namespace:
    """The keys of one tenant. Immutable; equal to any other of its name."""

    __slots__ = ("_begun", "name", "tag")

    def __init__(self, name: str) -> None:
        """Raises ValueError for what can't be a name."""
        if not NAME.fullmatch(name):
            raise ValueError(f"a namespace has 1 to 32 letters, digits or ._-, not {name[:40]!r}")
        self.name: Final = name
        self.tag: Final = tag_of(name)
        self._begun: Final = sha256(b"prefixd tenant key\0" + name.encode() + b"\0")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"

    def stored(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Under which keys the daemon has what a client of this namespace calls these. A
        microsecond each."""
        begun, tag, found = self._begun, self.tag, []
        for key in keys:
            hashed = begun.copy()
            hashed.update(key)
            found.append(Key(hashed.digest()[:_HASH_BYTES] + tag))
        return tuple(found)

    def has(self, key: bytes) -> bool:
        """Is this key, as the daemon has it, one of this namespace?"""
        return key.endswith(self.tag)
