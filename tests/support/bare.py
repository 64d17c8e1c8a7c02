"""A raw client of the local socket, for requests that prefixd's own client never makes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from tests.support.framing import Frames
from tests.support.running import OpenSession, Running, key


class Bare:
    """A client's raw socket: it is read only when a test asks for a response."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._frames = Frames(pb.FramedResponse.FromString)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def response(self) -> pb.FramedResponse:
        """The next response. Raises EOFError."""
        while (response := self._frames.next()) is None:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.socket, 2**16)
            except ConnectionResetError:  # the daemon closed it with requests unread
                data = b""
            if not data:
                raise EOFError
            self._frames.feed(data)
        return response

    async def rest(self) -> list[pb.FramedResponse]:
        """Every response until the daemon closes the connection."""
        responses = []
        try:
            while True:
                responses.append(await self.response())
        except EOFError:
            return responses

    def close(self) -> None:
        self.socket.close()


@contextmanager
def bare(
    daemon: Running, session: OpenSession | None = None, *, attach: bool = True
) -> Iterator[Bare]:
    """`attach`: the connection belongs to `session`, or to the one that was opened last."""
    session = session or daemon.latest
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(daemon.config.server.local_socket)
        if attach and session is not None:
            connection.sendall(frame(attach=session.ref))
        connection.setblocking(False)
        yield Bare(connection)


def frame(**kind: Any) -> bytes:
    return frames.frame(pb.FramedRequest(**kind))


def served(daemon: Running) -> Any:
    """The daemon's side of the only open connection."""
    (connection,) = daemon.local_server.connections
    return connection


def claim_of(session: OpenSession, *numbers: int, **fields: Any) -> pb.ClaimRequest:
    keys = [key(number) for number in numbers]
    fields = {"mode": pb.CLAIM_MODE_RUN} | fields
    return pb.ClaimRequest(session=session.ref, keys=keys, **fields)


def make_staging(daemon: Running, session: OpenSession) -> None:
    daemon.front.stagings.open(session.number)
