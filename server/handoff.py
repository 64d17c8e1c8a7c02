"""What a client on this host is given to read and save in place: descriptors, and the reasons
why there are not more of them.

A client whose process number the kernel knows by another name gets nothing, because it lives in
another PID namespace: LMDB's table of readers would not protect it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..proto import local
from ..proto import prefixd_pb2 as pb
from ..proto.index import INDEX_DIRECTORY
from ..proto.vocabulary import Tier
from ..tiers.arena import Arena
from ..tiers.disk import DiskStore
from .building import arena_of
from .loop import Core
from .staging import Staging


@dataclass(slots=True)
class Package:
    """A response, and the descriptors that go with it."""

    response: pb.HandOverResponse = field(default_factory=pb.HandOverResponse)
    fds: list[int] = field(default_factory=list)
    #: opened for this response only; closed once they are sent
    own: list[int] = field(default_factory=list)

    def add(self, name: str, fd: int, *, own: bool = False) -> None:
        self.response.descriptors.append(name)
        self.fds.append(fd)
        if own:
            self.own.append(fd)

    def refuse(self, why: str) -> None:
        """Nothing for this client."""
        self.response = pb.HandOverResponse(refused=dict.fromkeys(local.FEATURES, why))

    def close(self) -> None:
        for fd in self.own:
            os.close(fd)


class Handoff:
    """Makes packages for the sessions of `core`."""

    def __init__(
        self, core: Core, incarnation: bytes, shm_directory: Path, staging_bytes: int
    ) -> None:
        self._core = core
        self._incarnation = incarnation
        self._shm_directory = shm_directory
        self._staging_bytes = staging_bytes

    def pack(self, request: pb.HandOverRequest, pid: int) -> Package:
        """For the process that the kernel calls `pid`. Whoever asks closes it. Raises OSError."""
        package = Package()
        session = request.session
        if session.incarnation != self._incarnation:
            package.refuse("the session belongs to another start of the daemon")
        elif session.session_id not in self._core.state.tables.sessions:
            package.refuse(f"session {session.session_id} ended or never was")
        elif request.pid != pid:
            package.refuse(
                f"the client calls itself process {request.pid}, the kernel knows it as {pid}: "
                "it lives in another PID namespace (in Kubernetes set shareProcessNamespace)"
            )
        else:
            try:
                self._fill(package, session.session_id)
            except BaseException:
                package.close()
                raise
        return package

    def _fill(self, package: Package, session: int) -> None:
        response = package.response

        def directory(name: str, path: Path) -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            package.add(name, fd, own=True)

        def give_arena(name: str, arena: Arena) -> None:
            if name == local.RAM:  # which its seals protect, whatever the descriptor's mode
                package.add(name, arena.fd)
            else:
                package.add(name, arena.open_reader(), own=True)
            setattr(response, f"{name}_arena_bytes", arena.size_bytes)

        def attempt(name: str, give: Callable[[], None]) -> None:
            try:
                give()
            except OSError as problem:
                response.refused[name] = str(problem)

        if self._core.index.revoked:
            response.refused[local.INDEX] = (
                f"it is not kept at the moment: {self._core.index.problem}"
            )
        else:
            index = self._shm_directory / INDEX_DIRECTORY
            attempt(local.INDEX, lambda: directory(local.INDEX, index))
        for tier, name in ((Tier.RAM, local.RAM), (Tier.SHM, local.SHM)):
            store = self._core.stores.get(tier)
            arena = None if store is None else arena_of(store)
            if arena is None:
                response.refused[name] = "the tier is switched off"
                continue
            attempt(name, partial(give_arena, name, arena))
        disk = self._core.stores.get(Tier.DISK)
        if isinstance(disk, DiskStore):
            attempt(local.DISK, lambda: directory(local.DISK, disk.directory))
        else:
            response.refused[local.DISK] = "the tier is switched off"

        def staging() -> None:
            memory = self._core.stagings.get(session)
            if memory is None:
                memory = self._core.stagings[session] = Staging(self._staging_bytes)
            package.add(local.STAGING, memory.fd)
            response.staging_bytes = memory.size_bytes

        attempt(local.STAGING, staging)
