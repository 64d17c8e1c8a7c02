"""The data socket: the framed protocol (proto.frames) over TCP, for clients on other hosts."""

from __future__ import annotations

import socket
import ssl

from .access import Tokens
from .connections import Connections
from .data_streams import Handshakes, Stream, accepted, listening_at
from .grpc_connections import network_of


class DataServer(Connections):
    """Listens where `start` says; it and `close` belong to the event loop."""

    name = "data"

    def start(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        tokens: Tokens | None = None,
    ) -> int:
        """Bind and listen, with TLS only if there is a `context`. Returns the port, which new
        sessions are told from now on. Raises OSError."""
        listening = listening_at(host, port)
        self.tokens = tokens
        if context is not None:
            self.handshakes = Handshakes(context)
        self._accept_at(listening)
        bound: int = listening.getsockname()[1]
        self.sessions.data_port = bound
        return bound

    async def close(self) -> None:
        self.sessions.data_port = 0
        await super().close()

    def _accepted(self, sock: socket.socket) -> tuple[Stream, str]:
        origin = network_of(sock.getpeername()[0])
        return accepted(sock, self.config.stall_timeout_s, self.handshakes), origin
