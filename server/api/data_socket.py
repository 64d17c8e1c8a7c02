"""The data socket: calls of clients on other hosts, and their payloads, without gRPC between
(proto.frames).

Small calls are those of `service` and `saves`, what moves payloads is in `data_calls`. Of a
connection (`data_connection`) one request at a time is in the daemon's memory (`data_frames`); a
large one waits in the kernel until there is room. Sockets don't block, and the loop waits for them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from typing import Final

import structlog

from ..runtime.supervision import Supervisor
from .access import Tokens
from .data_calls import DataCalls
from .data_connection import DataConnection, DataConnections
from .saves import Saves
from .service import CacheService
from .sessions import ServiceConfig, Sessions
from .streams import Handshakes, accepted, listening_at

log = structlog.get_logger("prefixd.data")

#: Connections that may be about to prove a session.
_MAX_UNPROVED: Final = 64
#: When to look again if the process had no descriptor for another connection.
_CROWDED_S: Final = 1.0


class DataServer(DataConnections):
    """Listens where `start` says; it and `close` belong to the event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        sessions: Sessions,
        service: CacheService,
        saves: Saves,
        calls: DataCalls,
        supervisor: Supervisor,
    ) -> None:
        super().__init__(config, sessions, service, saves, calls)
        self._supervisor: Final = supervisor
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def start(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        tokens: Tokens | None = None,
    ) -> int:
        """Bind and listen; the port, which sessions are told from now on. With a `context` there is
        nothing but TLS. Raises OSError."""
        listening = listening_at(host, port)
        self.tokens = tokens
        if context is not None:
            self.handshakes = Handshakes(context)
        self._listening = listening
        self._accepting = self._supervisor.task("data socket", self._accept(listening))
        bound: int = listening.getsockname()[1]
        self.sessions.data_port = bound
        return bound

    async def close(self) -> None:
        """Refuse new connections and end those that there are."""
        self.sessions.data_port = 0
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))
        if self._listening is not None:
            self._listening.close()
        tasks = [connection.hang_up() for connection in list(self.connections)]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.handshakes is not None:
            self.handshakes.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.error("connections_refused", why=str(problem))
                    await asyncio.sleep(_CROWDED_S)
                continue
            if len(self.connections) >= self.config.max_connections:
                self.refusals += 1
                sock.close()
                continue
            if len(self.unproved) >= _MAX_UNPROVED:
                # A client proves its session with its first bytes: the oldest is none.
                self.refusals += 1
                self.forget_unproved(next(iter(self.unproved))).hang_up()
            try:
                stream = accepted(sock, self.config.stall_timeout_s, self.handshakes)
            except OSError:
                sock.close()  # its client is gone already
                continue
            connection = DataConnection(self, stream)
            self.connections.add(connection)
            self.unproved[connection] = None
            await asyncio.sleep(0)  # others have their turn
