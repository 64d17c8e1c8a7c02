"""The descriptors that a client on this host is given to read and save in place, and for each that
it is not given the reason."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from typing import Final

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidBatch, UnknownStaging
from ...proto.vocabulary import Tier
from ...tiers.arena_stores import DiskStore, RamStore, ShmStore
from ..runtime.loop import Core
from ..runtime.staging import StagingPool
from .access import namespace_of
from .sessions import Membership

#: The tiers whose arenas clients can map, by the names of their descriptors.
_ARENAS: Final = {frames.RAM: Tier.RAM, frames.SHM: Tier.SHM, frames.DISK: Tier.DISK}
_NAMES: Final = (frames.INDEX, *_ARENAS, frames.STAGING)
#: Names in one request. A newer client may know some that this daemon does not.
_MAX_WANTED: Final = 64


class _Missing(Exception):  # an answer: its message says why
    """This client gets no such descriptor."""


class Package:
    """A response, and the descriptors that are sent with it."""

    def __init__(self) -> None:
        self.response: Final = pb.HandOverResponse()
        self.fds: Final[list[int]] = []
        self._opened = ExitStack()

    def add(self, name: str, fd: int, size_bytes: int, *, opened: bool = False) -> None:
        """Add a descriptor, and how much of it can be mapped. `opened`: for this package only, so
        that `close` closes it."""
        self.response.descriptors.add(name=name, size_bytes=size_bytes)
        self.fds.append(fd)
        if opened:
            self._opened.callback(os.close, fd)

    def close(self) -> None:
        """Close what was opened for it. Idempotent."""
        self._opened.close()


class Handoff:
    """Makes packages for sessions that have been proved."""

    def __init__(self, core: Core, stagings: StagingPool) -> None:
        self._core = core
        self._stagings = stagings

    def pack(self, membership: Membership, wanted: Collection[str] = ()) -> Package:
        """The wanted descriptors, or all if none is named. The caller closes the package. A session
        that is bound to a namespace gets its staging memory only: index and arenas hold the entries
        of all namespaces. Raises InvalidBatch."""
        if len(wanted) > _MAX_WANTED:
            raise InvalidBatch(f"{len(wanted)} names are wanted, at most {_MAX_WANTED} at once")
        bound = namespace_of(membership.access) is not None
        package = Package()
        try:
            for name in _NAMES:
                if wanted and name not in wanted:
                    continue
                try:
                    if name == frames.STAGING:
                        memory = self._stagings.open(membership.number)
                        package.add(name, memory.fd, memory.size_bytes)
                    elif bound:
                        raise _Missing(
                            "it has the entries of all namespaces, and this session is of one"
                        )
                    elif name == frames.INDEX:
                        self._add_index(package)
                    else:
                        self._add_arena(package, name)
                except (_Missing, UnknownStaging, OSError) as problem:
                    package.response.refused[name] = str(problem)
        except BaseException:
            package.close()
            raise
        return package

    def _add_index(self, package: Package) -> None:
        index = self._core.index
        if index.revoked:
            raise _Missing("it is not kept any more: something failed that may have left it wrong")
        package.add(frames.INDEX, index.open_reader(), index.size_bytes, opened=True)

    def _add_arena(self, package: Package, name: str) -> None:
        store = self._core.stores.get(_ARENAS[name])
        if store is not None and not store.is_open:
            raise _Missing("the tier could not be opened yet")
        match store:
            case RamStore():
                # The seals of the memfd protect it, although the descriptor is writable.
                package.add(name, store.arena.fd, store.arena.max_bytes)
            case ShmStore() | DiskStore():
                package.add(name, store.arena.open_reader(), store.arena.max_bytes, opened=True)
            case _:
                raise _Missing("the tier is switched off")
