"""A client's side of a connection to the data socket, which a test drives message by message."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime.incoming import Incoming, Turn
from tests.support.columns import Item
from tests.support.running import OpenSession, Refused, Running, payload, running

HOST: Final = "127.0.0.1"
MIB: Final = 2**20
#: More than both sockets' buffers hold, and more than the daemon moves in one turn.
LARGE: Final = payload(7) * (20 * MIB // 5000)


class DataConnection:
    """One connection to the data socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, **kind: Any) -> None:
        await self.send_bytes(frames.frame(pb.FramedRequest(**kind)))

    async def send_bytes(self, raw: bytes) -> None:
        await self._loop.sock_sendall(self.sock, raw)

    async def ask(self, **kind: Any) -> pb.FramedResponse:
        await self.send(**kind)
        return await self.response()

    async def response(self) -> pb.FramedResponse:
        """The next response. Raises Refused, EOFError, ConnectionError."""
        (size_bytes,) = frames.HEAD.unpack(await self.exactly(frames.HEAD.size))
        response = frames.response_of(await self.exactly(size_bytes))
        if response.HasField("failure"):
            raise Refused(response.failure)
        return response

    async def exactly(self, size_bytes: int) -> bytes:
        """Read exactly this many bytes. Raises EOFError, ConnectionError."""
        received = b""
        while len(received) < size_bytes:
            chunk = await self._loop.sock_recv(self.sock, size_bytes - len(received))
            if not chunk:
                raise EOFError
            received += chunk
        return received

    async def part(self) -> tuple[pb.RawPart, bytes] | None:
        """The next part of a read, or None at its end. Raises what `response` raises."""
        response = await self.response()
        if response.HasField("read_end"):
            return None
        return response.part, await self.exactly(response.part.length_bytes)

    async def parts(self, count: int, *, begun: bool = False) -> list[bytes]:
        """The bytes of `count` ranges. `begun`: the first parts have been read already, and the
        rest is returned."""
        found = [b""] * count
        while (received := await self.part()) is not None:
            part, raw = received
            assert part.status == pb.READ_STATUS_OK
            assert begun or part.offset_bytes == len(found[part.range])
            found[part.range] += raw
        return found

    async def payloads(self, *payloads: bytes) -> None:
        for raw in payloads:
            await self.send_bytes(raw + frames.CRC.pack(crc32c(raw)))

    async def save(
        self,
        session: OpenSession,
        items: Sequence[Item],
        payloads: Sequence[bytes],
        tier: Tier = Tier.RAM,
    ) -> list[int]:
        """Save these items, sending the payloads that the daemon wants. Returns the statuses."""
        response = await self.ask(save=pb.RawSaveRequest(header=session.header(items, tier)))
        if response.HasField("save_ready"):
            await self.payloads(*(payloads[item] for item in response.save_ready.items))
            response = await self.response()
        return [result.status for result in response.save.results]

    async def hung_up(self) -> None:
        """Wait until the daemon closes the connection. Discards what it still sends."""
        try:
            while await self._loop.sock_recv(self.sock, 2**16):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self.sock.close()


class SecuredConnection(DataConnection):
    """A connection under TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send_bytes(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def exactly(self, size_bytes: int) -> bytes:
        return await self._reader.readexactly(size_bytes)

    async def hung_up(self) -> None:
        with suppress(ConnectionError):
            await self._reader.read()

    def close(self) -> None:
        self._writer.transport.abort()


@asynccontextmanager
async def secured_connection(
    port: int, context: ssl.SSLContext, session: OpenSession | None = None, token: str = ""
) -> AsyncIterator[SecuredConnection]:
    """A connection under TLS, attached to `session` if there is one. Raises OSError if the
    handshake fails."""
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context, limit=2**24)
    connection = SecuredConnection(reader, writer)
    try:
        if session is not None:
            await connection.send_bytes(
                frames.frame(pb.FramedRequest(attach=session.ref, token=token))
            )
        yield connection
    finally:
        connection.close()


@asynccontextmanager
async def data_connection(
    daemon: Running,
    session: OpenSession | None = None,
    *,
    receive_bytes: int = 0,
    local: bool = False,
) -> AsyncIterator[DataConnection]:
    """A connection, attached to `session` if there is one. `receive_bytes`: limits the kernel's
    receive buffer on this side. `local`: to the local socket instead."""
    address: Any = daemon.config.server.local_socket
    if not local:
        address = HOST, daemon.front.sessions.data_port or daemon.front.data.start(HOST, 0)
    with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        connection = DataConnection(sock)
        if session is not None:
            await connection.send(attach=session.ref)
        yield connection


@asynccontextmanager
async def daemon_for_large(path: Path, *flags: str) -> AsyncIterator[tuple[Running, OpenSession]]:
    async with running(path, *(f"--{tier.label}.budget=32MiB" for tier in Tier), *flags) as daemon:
        yield daemon, await daemon.open()


def fetch_of(session: OpenSession, *entries: tuple[bytes, int]) -> pb.FetchRequest:
    return pb.FetchRequest(
        session=session.ref,
        keys=[of for of, _ in entries],
        generations=[generation for _, generation in entries],
        ranges=[pb.ReadRange(index=index) for index in range(len(entries))],
    )


async def generation_of(daemon: Running, of: bytes) -> int:
    (found,) = await daemon.lookup(of)
    return found.entry.generation


def recorded_turns(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each turn in which bytes of a save are received from now on: whether it is taken on the
    event loop."""
    turns: list[bool] = []
    take_turn = Incoming.take_turn

    async def recorded(self: Incoming, turn: Turn, *, inline: bool) -> None:
        turns.append(inline)
        await take_turn(self, turn, inline=inline)

    monkeypatch.setattr(Incoming, "take_turn", recorded)
    return turns
