"""What a client on this host is given to read and save in place: descriptors, and the reasons
why there are not more of them. One function for each feature."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, TypeAlias

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidBatch, UnknownStaging
from ...proto.vocabulary import Tier
from ...tiers.disk import DiskStore
from ...tiers.ram import RamStore
from ...tiers.shm import ShmStore
from ..runtime.loop import Core
from ..runtime.staging import StagingPool
from .namespaces import namespace_of
from .sessions import Membership

#: Names in one request. A newer client may know some that are none here.
_MAX_WANTED: Final = 64


class Handed(NamedTuple):
    """A descriptor, and what can be mapped of it."""

    fd: int
    size_bytes: int
    #: opened for this response only; closed once it is sent
    own: bool


class Missing(Exception):  # an answer: the feature is not there, and why
    """There is no such descriptor for this client."""


#: Gives the descriptor of one feature to a session. Raises Missing, UnknownStaging, OSError.
Feature: TypeAlias = Callable[[int], Handed]


class Package:
    """A response, and the descriptors that go with it."""

    def __init__(self) -> None:
        self.response: Final = pb.HandOverResponse()
        self.fds: Final[list[int]] = []
        self._own: Final[list[int]] = []

    def add(self, name: str, handed: Handed) -> None:
        self.response.descriptors.add(name=name, size_bytes=handed.size_bytes)
        self.fds.append(handed.fd)
        if handed.own:
            self._own.append(handed.fd)

    def close(self) -> None:
        """Close what was opened for it. Idempotent."""
        for fd in self._own:
            os.close(fd)
        self._own.clear()


class Handoff:
    """Makes packages for sessions that have been proved."""

    def __init__(self, core: Core, stagings: StagingPool) -> None:
        self._core = core
        self._stagings = stagings
        self._features: Final[dict[str, Feature]] = {
            frames.INDEX: self._index,
            frames.RAM: self._ram,
            frames.SHM: self._shm,
            frames.DISK: self._disk,
            frames.STAGING: self._staging,
        }

    def pack(self, membership: Membership, wanted: Collection[str] = ()) -> Package:
        """What this session wants of all that there is, which is everything if it names nothing.
        The caller closes it. Index and arenas have the entries of all namespaces: a session that is
        of one gets its staging memory only. Raises InvalidBatch."""
        if len(wanted) > _MAX_WANTED:
            raise InvalidBatch(f"{len(wanted)} names are wanted, at most {_MAX_WANTED} at once")
        session, bound = membership.number, namespace_of(membership.access) is not None
        package = Package()
        try:
            for name, give in self._features.items():
                if wanted and name not in wanted:
                    continue
                try:
                    if bound and name != frames.STAGING:
                        raise Missing(_OF_ALL)
                    package.add(name, give(session))
                except (Missing, UnknownStaging, OSError) as problem:
                    package.response.refused[name] = str(problem)
        except BaseException:
            package.close()
            raise
        return package

    def _index(self, _session: int) -> Handed:
        index = self._core.index
        if index.revoked:
            raise Missing("it is not kept any more: something failed that may have left it wrong")
        return Handed(index.open_reader(), index.size_bytes, own=True)

    def _ram(self, _session: int) -> Handed:
        store = self._core.stores.get(Tier.RAM)
        if not isinstance(store, RamStore):
            raise Missing(_SWITCHED_OFF)
        # The seals of the memfd protect it, whatever the mode of the descriptor is.
        return Handed(store.arena.fd, store.arena.max_bytes, own=False)

    def _shm(self, _session: int) -> Handed:
        store = self._core.stores.get(Tier.SHM)
        if not isinstance(store, ShmStore):
            raise Missing(_SWITCHED_OFF)
        return Handed(store.arena.open_reader(), store.arena.max_bytes, own=True)

    def _disk(self, _session: int) -> Handed:
        store = self._core.stores.get(Tier.DISK)
        if not isinstance(store, DiskStore):
            raise Missing(_SWITCHED_OFF)
        return Handed(store.arena.open_reader(), store.arena.max_bytes, own=True)

    def _staging(self, session: int) -> Handed:
        memory = self._stagings.open(session)
        return Handed(memory.fd, memory.size_bytes, own=False)


_SWITCHED_OFF: Final = "the tier is switched off"
_OF_ALL: Final = "it has the entries of all namespaces, and this session is of one"
