"""Whose keys a call may name: between the keys that clients know and those that the daemon has.

Here, and nowhere behind it, the keys of a bound session become those of its namespace
(`proto.namespaces`). A tenant finds only what is in its own namespace, whatever keys it names; a
caller without a namespace finds only what is in none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import NotPermitted
from ...proto.keys import Key
from ...proto.namespaces import TAG_BYTES, Namespace, tag_of
from .access import Access


class Namespaces:
    """The namespaces of tokens and of shares. `learn` is callable on any thread."""

    def __init__(self) -> None:
        #: names by tags; replaced as a whole
        self._names: dict[bytes, str] = {}

    def learn(self, names: Iterable[str]) -> None:
        """Add these. None is ever forgotten: its entries may still be there."""
        self._names = self._names | {tag_of(name): name for name in names}

    def __contains__(self, name: object) -> bool:
        return name in self._names.values()

    def name_of(self, key: bytes) -> str:
        """The namespace of a key as the daemon has it; empty: of none."""
        return self._names.get(key[-TAG_BYTES:], "")

    def keys(self, access: Access | None, keys: Sequence[Key]) -> tuple[Key, ...]:
        """Under which keys the daemon has what a caller calls these. Raises NotPermitted for those
        of a namespace, where the caller's token is of none. On a Unix socket every key may be
        named: a process that may open the socket is trusted with everything that is cached."""
        if access is None or access.every:
            return tuple(keys)
        if access.namespace is not None:
            return access.namespace.stored(keys)
        names = self._names
        if names:
            for number, key in enumerate(keys):
                if key[-TAG_BYTES:] in names:
                    raise NotPermitted(
                        f"key {number} is of the namespace {self.name_of(key)!r}, and this caller "
                        "is of none"
                    )
        return tuple(keys)

    def hide(self, access: Access | None, misses: Iterable[pb.AbsentMiss]) -> None:
        """Do the same to the keys of misses that a client tells of."""
        for miss in misses:
            keys = self.keys(access, [Key(key) for key in miss.keys])
            del miss.keys[:]
            miss.keys.extend(keys)

    def label(self, access: Access | None, label: str) -> str:
        """Under which label a session counts that asks for this one: a tenant's is its namespace,
        or begins with it and a slash. Raises NotPermitted for that of another namespace."""
        namespace = namespace_of(access)
        first: Final = label.partition("/")[0]
        if namespace is None:
            if first in self:
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


def namespace_of(access: Access | None) -> Namespace | None:
    """The namespace that this access is bound to; None: it is bound to none."""
    return None if access is None else access.namespace


def check_same(access: Access | None, of_session: Access | None) -> None:
    """Raises NotPermitted for a caller of one namespace with a session of another."""
    if of_session is None and namespace_of(access) is None:
        return  # opened on a Unix socket: such a process may share it with these callers
    mine, its = _reach(access), _reach(of_session)
    if mine != its:
        raise NotPermitted(f"this caller is of {mine}, and the session that it names of {its}")


def _reach(access: Access | None) -> str:
    """In words: the namespaces whose keys a caller with this access may name."""
    if access is None or access.every:
        return "every namespace"
    namespace = access.namespace
    return "no namespace" if namespace is None else f"the namespace {namespace.name!r}"
