"""The local socket: calls of clients on this host, without gRPC between (proto.local).

The calls are those of `service.CacheService`; here they are only taken off the socket, one at a
time for each connection, and answered. The kernel says who is asking: another user is refused.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final, cast

import structlog

from ..proto import prefixd_pb2 as pb
from ..proto.errors import CallerError, LimitReached, MalformedMessage, PrefixdError
from ..proto.local import Frames, frame
from .handoff import Handoff
from .service import CacheService
from .wire import error_of

log = structlog.get_logger("prefixd.local")

_BACKLOG: Final = 128
#: A client that connected says what it wants within this time.
_PATIENCE_S: Final = 5.0
#: A client that sends more requests than this ahead of its answers is not read for a while.
_MAX_AHEAD: Final = 64
#: A client may leave so much of its answers unread.
_MAX_UNREAD_BYTES: Final = 64 * 2**20
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid

_Method = Callable[[Any, Any], Awaitable[Any]]


class LocalServer:
    """Listens on `path`; `start` and `close` belong to the event loop."""

    def __init__(self, path: str, service: CacheService, hand_over: Handoff) -> None:
        self.path = path
        self.hand_over: Final = hand_over
        self.service: Final = service
        #: how a request that takes one answer is answered, by its kind
        self.methods: Final[dict[str, _Method]] = {
            "lookup": service.Lookup,
            "claim": service.Claim,
            "release": service.Release,
            "reserve": service.Reserve,
            "cancel": service.Cancel,
        }
        self.connections: Final[set[_Connection]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen. The socket's directory is locked: what lies there is a leftover."""
        remove_leftover(Path(self.path))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(self.path)
            Path(self.path).chmod(0o600)
        except OSError:
            listening.close()
            raise
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self), sock=listening, backlog=_BACKLOG
        )

    async def close(self) -> None:
        """Nobody is served any more, not even who is being served."""
        if self._server is not None:
            self._server.close()
        Path(self.path).unlink(missing_ok=True)
        tasks = [connection.hang_up() for connection in list(self.connections)]
        await asyncio.gather(*tasks, return_exceptions=True)


def remove_leftover(path: Path) -> None:
    """What a daemon that was killed left at the path of its socket. Raises FileExistsError for
    anything but a socket."""
    if path.is_socket():
        path.unlink()
    elif path.exists():
        raise FileExistsError(f"{path} is there and is no socket; it is not replaced")


class _Call:
    """What a method of the service may ask of the call that it answers, as of gRPC's context."""

    def __init__(self) -> None:
        self._when_done: list[Callable[[_Call], None]] = []
        self._cancelled = False

    def add_done_callback(self, callback: Callable[[_Call], None]) -> None:
        self._when_done.append(callback)

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self, *, cancelled: bool) -> None:
        """The client has read the answer, or (`cancelled`) never will."""
        self._cancelled = cancelled
        for callback in self._when_done:
            callback(self)
        self._when_done.clear()


class _Connection(asyncio.Protocol):
    """One client's connection: its requests, in order, one at a time."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(pb.LocalRequest.FromString)
        self._requests: deque[pb.LocalRequest] = deque()
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]
        self._patience: asyncio.TimerHandle
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._call = _Call()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        raw = transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        self._pid, uid, _ = _CREDENTIALS.unpack(raw)
        self._patience = self._loop.call_later(_PATIENCE_S, self._transport.abort)
        self._task = self._loop.create_task(self._serve())
        if uid not in (os.geteuid(), 0):
            self._fail(CallerError(f"user {uid} is not the one that runs this daemon"))

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while (request := self._frames.next()) is not None:
                self._requests.append(request)
        except MalformedMessage as problem:
            self._fail(problem)
            return
        if len(self._requests) > _MAX_AHEAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self._requests and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, why: Exception | None) -> None:
        self._patience.cancel()
        self._server.connections.discard(self)
        self._task.cancel()
        # Of a client that hung up with an answer unread the kernel says so (ECONNRESET); any other
        # has read it, and what it claimed is held on: views may be looked at.
        self._call.done(cancelled=why is not None)

    def hang_up(self) -> asyncio.Task[None]:
        """End the connection; what it was doing is over when the task is."""
        self._transport.abort()
        self._task.cancel()
        return self._task

    # ---- serving

    async def _serve(self) -> None:
        try:
            while True:
                request = await self._next()
                self._patience.cancel()
                # Whoever asks again has read what it was answered before.
                self._call.done(cancelled=False)
                self._call = _Call()
                await self._answer(request)
        except Exception as problem:
            self._fail(problem)

    async def _next(self) -> pb.LocalRequest:
        while not self._requests:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._paused and len(self._requests) <= _MAX_AHEAD // 2:
            self._paused = False
            self._transport.resume_reading()
        return self._requests.popleft()

    async def _answer(self, request: pb.LocalRequest) -> None:
        """Raises PrefixdError where nothing that follows can be understood any more."""
        kind = request.WhichOneof("kind")
        match kind:
            case "hand_over":
                self._hand_over(request.hand_over)
            case "save_staged":
                await self._save_staged(request.save_staged)
            case "give_back":
                with suppress(PrefixdError):  # of a session that is over, it has been released
                    await self._server.methods["release"](request.give_back, self._call)
            case None:
                raise MalformedMessage("a request of no kind that this daemon knows")
            case _:
                try:
                    asked = getattr(request, kind)
                    answer = await self._server.methods[kind](asked, self._call)
                except Exception as problem:
                    self._send(_failure(kind, problem))
                else:
                    self._send(pb.LocalResponse(**{kind: answer}))

    async def _save_staged(self, first: pb.SaveStagedRequest) -> None:
        async def requests() -> AsyncGenerator[pb.SaveStagedRequest, None]:
            request = first
            yield request
            while not request.last:
                following = await self._next()
                if following.WhichOneof("kind") != "save_staged":
                    raise MalformedMessage("another request came before the end of a staged save")
                request = following.save_staged
                yield request

        try:
            async with aclosing(requests()) as following:
                await self._server.service.SaveStaged(following, self._tell_saved)
        except Exception as problem:
            self._send(_failure("save_staged", problem))
            # What else was sent of this save would be taken for a new one.
            raise LimitReached("a staged save ended early") from None

    def _hand_over(self, request: pb.HandOverRequest) -> None:
        if self._transport.get_write_buffer_size():
            raise LimitReached("answers have to be read before a hand-over")
        package = self._server.hand_over.pack(request, self._pid)
        try:
            # A dup: the transport's own socket is not for sending.
            with self._transport.get_extra_info("socket").dup() as own:
                response = frame(pb.LocalResponse(hand_over=package.response))
                socket.send_fds(own, [response], package.fds)
        finally:
            package.close()

    def _tell_saved(self, response: pb.SaveStagedResponse) -> None:
        self._send(pb.LocalResponse(save_staged=response))

    def _send(self, response: pb.LocalResponse) -> None:
        if self._transport.is_closing():  # and takes nothing more, without saying so
            self._call.done(cancelled=True)
            return
        self._transport.write(frame(response))
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            log.warning("local_client_does_not_read")
            self._transport.abort()

    def _fail(self, problem: Exception) -> None:
        """Say why, and hang up."""
        log.warning("local_connection_ended", why=str(problem))
        if isinstance(problem, PrefixdError):
            self._send(_failure("local", problem))
        self._transport.close()
        # That waits until the client has read what it was told.
        self._loop.call_later(_PATIENCE_S, self._transport.abort)


def _failure(name: str, problem: Exception) -> pb.LocalResponse:
    error = error_of(name, problem)
    failure = pb.Failure(error=error.name, message=str(error), retry=error.retryable)
    return pb.LocalResponse(failure=failure)
