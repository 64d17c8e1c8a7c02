"""The hand-over socket: gives clients on this host what the local fast path needs.

One packet in, one packet with descriptors out (proto.handoff). The kernel says who is asking:
another user is refused, and so is a client whose process number the kernel knows by another
name, because it lives in another PID namespace: LMDB's table of readers would not protect it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from ..proto import handoff
from ..proto.errors import MalformedMessage
from ..proto.index import INDEX_DIRECTORY
from ..proto.vocabulary import Tier
from ..tiers.disk import DiskStore
from ..tiers.shm import ARENA_FILE, ShmStore
from .building import arena_of
from .loop import Core
from .staging import Staging

log = structlog.get_logger("prefixd.handoff")

_BACKLOG = 128
#: A client that connected says what it wants within this time.
_PATIENCE_S = 5.0
#: Without descriptors left nobody can be accepted; they are asked to wait this long.
_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(slots=True)
class _Package:
    """A reply in the making."""

    reply: handoff.Reply = field(default_factory=handoff.Reply)
    fds: list[int] = field(default_factory=list)
    #: opened for this reply only; closed once they are sent
    own: list[int] = field(default_factory=list)

    def add(self, name: str, fd: int, *, own: bool = False) -> None:
        self.reply.descriptors.append(name)
        self.fds.append(fd)
        if own:
            self.own.append(fd)

    def refuse(self, why: str) -> None:
        """Nothing for this client."""
        names = (handoff.RAM, handoff.SHM, handoff.INDEX, handoff.DISK, handoff.STAGING)
        self.reply = handoff.Reply(refused=dict.fromkeys(names, why))

    def close(self) -> None:
        for fd in self.own:
            os.close(fd)


class Handoff:
    """Listens on `path`; `start` and `close` belong to the event loop."""

    def __init__(
        self,
        core: Core,
        path: str,
        incarnation: bytes,
        shm_directory: Path,
        staging_bytes: int,
    ) -> None:
        self.path = path
        self._core = core
        self._incarnation = incarnation
        self._shm_directory = shm_directory
        self._staging_bytes = staging_bytes
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Bind and listen. The socket's directory is locked: what lies there is a leftover."""
        Path(self.path).unlink(missing_ok=True)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        Path(self.path).chmod(0o600)
        self._socket.listen(_BACKLOG)
        self._listen()

    def close(self) -> None:
        """Nobody is served any more, not even who is being served."""
        asyncio.get_running_loop().remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()

    def _listen(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # it went away again
        except OSError as problem:
            # Who waits is still there: the loop would come back at once, again and again.
            log.error("handoff_paused", why=str(problem))
            loop.remove_reader(self._socket)
            self._pause = loop.call_later(_PAUSE_S, self._listen)
            return
        task = loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not in the task: one that is cancelled before it began would not do it.
        task.add_done_callback(lambda _: connection.close())

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        package = _Package()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                packet = await loop.sock_recv(connection, handoff.PACKET_BYTES)
            self._pack(connection, packet, package)
            # A new connection has room for one packet: this never blocks.
            socket.send_fds(connection, [handoff.pack(package.reply)], package.fds)
        except (OSError, TimeoutError, MalformedMessage) as problem:
            log.warning("handoff_refused", why=str(problem))
        finally:
            package.close()

    def _pack(self, connection: socket.socket, packet: bytes, package: _Package) -> None:
        """Fill a package for whoever sent the packet. Raises MalformedMessage, OSError."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid not in (os.geteuid(), 0):
            raise MalformedMessage(f"user {uid} is not the one that runs this daemon")
        request = handoff.unpack(handoff.Request, packet)
        if request.incarnation != self._incarnation:
            package.refuse("the session belongs to another start of the daemon")
        elif not self._is_session(request.session):
            package.refuse(f"session {request.session} ended or never was")
        elif request.pid != pid:
            package.refuse(
                f"the client calls itself process {request.pid}, the kernel knows it as {pid}: "
                "it lives in another PID namespace (in Kubernetes set shareProcessNamespace)"
            )
        else:
            self._fill(package, request.session)

    def _is_session(self, number: object) -> bool:
        return isinstance(number, int) and number in self._core.state.tables.sessions

    def _fill(self, package: _Package, session: int) -> None:
        sizes = {"ram_bytes": 0, "shm_bytes": 0, "staging_bytes": 0}
        refused: dict[str, str] = {}

        def directory(name: str, path: Path) -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            package.add(name, fd, own=True)

        def attempt(name: str, give: Callable[[], None]) -> None:
            try:
                give()
            except OSError as problem:
                refused[name] = str(problem)

        if self._core.index.revoked:
            refused[handoff.INDEX] = f"it is not kept at the moment: {self._core.index.problem}"
        else:
            index = self._shm_directory / INDEX_DIRECTORY
            attempt(handoff.INDEX, lambda: directory(handoff.INDEX, index))
        for tier, name in ((Tier.RAM, handoff.RAM), (Tier.SHM, handoff.SHM)):
            store = self._core.stores.get(tier)
            arena = None if store is None else arena_of(store)
            if arena is None:
                refused[name] = "the tier is switched off"
                continue
            if isinstance(store, ShmStore):
                fd = os.open(store.directory / ARENA_FILE, os.O_RDONLY | os.O_CLOEXEC)
                package.add(name, fd, own=True)
            else:
                package.add(name, arena.fd)
            sizes[f"{name}_bytes"] = arena.size_bytes
        disk = self._core.stores.get(Tier.DISK)
        if isinstance(disk, DiskStore):
            attempt(handoff.DISK, lambda: directory(handoff.DISK, disk.directory))
        else:
            refused[handoff.DISK] = "the tier is switched off"

        def staging() -> None:
            memory = self._core.stagings.get(session)
            if memory is None:
                memory = self._core.stagings[session] = Staging(self._staging_bytes)
            package.add(handoff.STAGING, memory.fd)
            sizes["staging_bytes"] = memory.size_bytes

        attempt(handoff.STAGING, staging)
        package.reply = handoff.Reply(package.reply.descriptors, refused=refused, **sizes)
