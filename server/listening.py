"""The addresses of a running daemon.

A Unix socket is reached by its name only, and names get lost: the last logout removes
$XDG_RUNTIME_DIR, cleaners empty /tmp, a volume is made again. The daemon would serve, and nobody
could reach it. So it looks for its sockets each second, and binds those again that are gone: its
entries are worth more than a restart, and what was connected stays connected. If another daemon has
taken the place meanwhile, this one ends: clients find the other one, and would never come back.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import structlog

from ..proto.endpoints import UNIX_SCHEME, socket_path
from ..proto.errors import DirectoryInUse
from .api.front import Front
from .api.unix_sockets import UnixSocket, identity
from .config.options import Config, ServerSection
from .credentials import Certificates, tokens_of
from .process import lock_directory
from .runtime.loop import Core

log = structlog.get_logger("prefixd")

_LOOK_EVERY_S: Final = 1.0
#: Each time leaves a gRPC server that listens nowhere. Whatever removes sockets so often is not
#: cured by more of them.
_MAX_BOUND_AGAIN: Final = 100
_CONDITION: Final = "sockets"


@dataclass(slots=True)
class _Listener:
    socket: UnixSocket
    #: Binds the socket and serves there.
    listen: Callable[[], Awaitable[None]]


class Sockets:
    """The Unix sockets for workers, in-place clients and operators, and their lock. Belongs to the
    event loop."""

    def __init__(self, core: Core, server: ServerSection, front: Front) -> None:
        self._core = core
        self._address: Final = server.address
        self._front = front
        path, operators = (path_of(each) for each in (server.address, server.operators()))
        self._lock_path: Final = path.with_name(f"{path.name}.lock")
        self._lock = identity(self._lock_path)
        #: Locks that were taken again.
        self._locks = ExitStack()
        self._servers: list[grpc.aio.Server] = []
        workers = UnixSocket("server.address", path, server.socket_mode)
        admin = UnixSocket("server.admin_address", operators, 0o600)
        self._listeners = [
            _Listener(workers, lambda: self._serve(workers, front.more_workers)),
            _Listener(admin, lambda: self._serve(admin, front.more_operators)),
            _Listener(front.local.socket, front.local.start),
        ]
        self._bound_again = 0
        self.addresses: Final = [server.address, server.operators()]

    async def bind(self) -> None:
        """Listen everywhere. Raises OSError, which names the option."""
        workers, admin, local = self._listeners
        # A client that finds the workers' socket looks for the local one at once.
        await local.listen()
        await self._serve(admin.socket, lambda: self._front.operators)
        await self._serve(workers.socket, lambda: self._front.workers)

    async def watch(self) -> None:
        """Look after the sockets until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Look once, and bind again what is gone. While that is not possible it is a condition."""
        gone = [each for each in self._listeners if not each.socket.present]
        if not gone and identity(self._lock_path) == self._lock:
            return
        conditions = self._core.health.conditions
        try:
            self._lock_again()
            for listener in gone:
                self._bound_again += 1
                await listener.listen()
        except DirectoryInUse as problem:
            self._core.give_up(f"another daemon has taken this one's place: {problem}")
            return
        except OSError as problem:
            why = f"clients can't reach this daemon: {problem}"
            if conditions.get(_CONDITION) != why:
                log.error("sockets_lost", problem=why)
            conditions[_CONDITION] = why
            return
        conditions.pop(_CONDITION, None)
        log.warning("sockets_bound_again", paths=[str(each.socket.path) for each in gone])
        if self._bound_again > _MAX_BOUND_AGAIN:
            self._core.give_up(f"its sockets were removed {self._bound_again} times")

    async def close(self) -> None:
        """Remove what was bound here, and serve nobody any more."""
        for listener in self._listeners:
            listener.socket.remove()
        await asyncio.gather(*(server.stop(grace=1.0) for server in self._servers))
        self._locks.close()

    def _lock_again(self) -> None:
        """Own the place again, if its lock file is gone. Raises DirectoryInUse, OSError."""
        if identity(self._lock_path) == self._lock:
            return
        lock = lock_directory(self._lock_path.parent, self._address, self._lock_path.name)
        self._locks.enter_context(lock)
        self._lock = identity(self._lock_path)

    async def _serve(self, where: UnixSocket, make: Callable[[], grpc.aio.Server]) -> None:
        server = make()
        where.bind(lambda path: server.add_insecure_port(f"{UNIX_SCHEME}{path}"))
        if where.option == "server.address":
            self._front.workers_connections.names.add(where.bound_path)
        self._servers.append(server)
        await server.start()


def listen_on_tcp(
    front: Front, config: Config, certificates: Certificates | None
) -> tuple[list[str], list[grpc.aio.Server]]:
    """Bind the TCP addresses; returns them, and the server, which is not started yet. Raises
    OSError, which names the option, and ConfigError."""
    server = config.server
    addresses: list[str] = []
    if not server.tcp:
        return [], []
    host, _, port = server.tcp.rpartition(":")
    with _listening("server.tcp", server.tcp):
        _check_free(host.strip("[]"), int(port))
    tokens = tokens_of(config)
    remote = front.remote(tokens)
    if server.data_address():
        data_host, _, data_port = server.data_address().rpartition(":")
        context = certificates.material.context if certificates else None
        with _listening("server.data", server.data_address()):
            bound = front.data.start(data_host.strip("[]"), int(data_port), context, tokens)
        addresses.append(f"{data_host}:{bound} (data)")
    with _listening("server.tcp", server.tcp):
        if certificates is not None:
            bound = remote.add_secure_port(server.tcp, certificates.credentials())
        else:
            bound = remote.add_insecure_port(server.tcp)
    front.connections.port = bound
    addresses.append(f"{host}:{bound}")
    return addresses, [remote]


@contextmanager
def _listening(option: str, address: str) -> Iterator[None]:
    """Turns an error of listening into an OSError that names the option."""
    try:
        yield
    except (OSError, RuntimeError) as problem:
        why = getattr(problem, "strerror", problem)
        raise OSError(f"{option}: can't listen on {address}: {why}") from None


def _check_free(host: str, port: int) -> None:
    """Raises OSError if the port is taken. gRPC itself would log to stderr."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        attempt.bind((host, port))
        attempt.listen(1)


def path_of(address: str) -> Path:
    """The path of an address of the configuration that has to be a Unix socket."""
    path = socket_path(address)
    assert path is not None, "the configuration allows Unix sockets only"
    return path
