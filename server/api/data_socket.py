"""The data socket: calls of clients on other hosts, and their payloads, without gRPC between
(proto.data).

A connection does nothing before it has proved a session, belongs to that one only, and ends with
it. Small calls are those of `service` and `saves`, what moves payloads is in `data_calls`. Of a
connection one request at a time is in the daemon's memory; a large one waits in the kernel until
there is room. Sockets don't block, and the loop waits for them.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog

from ...proto import data
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    InvalidSize,
    LimitReached,
    MalformedMessage,
    PrefixdError,
    UnknownSession,
)
from ..runtime.quota import Quota
from ..runtime.supervision import Supervisor
from .access import DATA_ROLES, Access, Tokens, bearer
from .calls import Process, error_of
from .data_calls import DataCalls
from .namespaces import check_same
from .saves import Saves
from .service import CacheService
from .sessions import ServiceConfig, Sessions
from .streams import Handshakes, SecuredStream, Stream, accepted, listening_at

log = structlog.get_logger("prefixd.data")

#: A new connection proves its session within this time.
_PATIENCE_S: Final = 5.0
#: Connections that may be about to.
_MAX_UNPROVED: Final = 64
#: When the process has no descriptor for another connection, it looks again so much later.
_CROWDED_S: Final = 1.0

_Method = Callable[..., Awaitable[Any]]


class _HungUp(Exception):  # no failure: clients may
    """The client closed its end between two requests."""


class DataServer:
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
        self.config: Final = config
        self.sessions: Final = sessions
        self._supervisor: Final = supervisor
        #: how a request that takes one answer is answered, by its kind
        self.methods: Final[dict[str, _Method]] = {
            "lookup": service.lookup,
            "claim": service.claim,
            "release": service.release,
            "reserve": saves.reserve,
            "cancel": saves.cancel,
        }
        #: the same of those that move payloads, which take the connection as well
        self.moving: Final[dict[str, _Method]] = {
            "read": calls.read,
            "fetch": calls.fetch,
            "save": calls.save,
        }
        self.connections: Final[set[_Connection]] = set()
        #: those of no session yet, the oldest first
        self.unproved: Final[dict[_Connection, None]] = {}
        #: by session
        self.attached: Final[dict[int, set[_Connection]]] = {}
        #: those above MAX_SMALL_REQUEST_BYTES, which come when there is room for all of them
        self.large: Final = Quota("requests", config.max_local_bytes, config.stall_timeout_s)
        #: connections that were refused: too many, or none that proved a session
        self.refusals = 0
        #: those of them that ended before TLS was there: another certificate, or none, or no TLS
        self.handshake_refusals = 0
        #: what puts connections under TLS; None: there is none
        self.handshakes: Handshakes | None = None
        #: who may do what; None: whoever has a session
        self.tokens: Tokens | None = None
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        sessions.when_closed.append(self._hang_up_all)

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
            connection = _Connection(self, stream)
            self.connections.add(connection)
            self.unproved[connection] = None
            await asyncio.sleep(0)  # others have their turn

    def forget_unproved(self, connection: _Connection) -> _Connection:
        """It has proved a session, or is about to end."""
        self.unproved.pop(connection, None)
        return connection

    def _hang_up_all(self, session: int) -> None:
        for connection in list(self.attached.get(session, ())):
            connection.hang_up()


class _Call:
    """The caller of one request (`calls.Caller`)."""

    process: Final[Process | None] = None

    def __init__(self, session: int, access: Access | None, traceparent: bytes) -> None:
        self._session = session
        self.access: Final = access
        self.traceparent = traceparent
        self._when_done: list[Callable[[bool], None]] = []

    def proved(self, session: int) -> None:
        """Raises UnknownSession for another session than the connection's, proved or not."""
        if session != self._session:
            raise UnknownSession(f"this connection does not belong to session {session}")

    def when_done(self, callback: Callable[[bool], None]) -> None:
        self._when_done.append(callback)

    def done(self, *, gone: bool) -> None:
        """The client has taken the answer, or (`gone`) never will."""
        callbacks, self._when_done = self._when_done, []
        for callback in callbacks:
            callback(gone)


class _Attaching:
    """The caller of `attach`."""

    process: Final[Process | None] = None

    def __init__(self, access: Access | None) -> None:
        self.access: Final = access

    def proved(self, session: int) -> None:
        """The connection looks at it itself."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        """Nothing was granted."""


class _Connection:
    """One client's connection: its requests, in order, one at a time (`data_calls.Line`)."""

    def __init__(self, server: DataServer, stream: Stream) -> None:
        self._server = server
        self.stream = stream
        self._loop = asyncio.get_running_loop()
        self._stall_s = server.config.stall_timeout_s
        #: what came and is not taken yet: `_came_bytes` of it
        self._buffer = memoryview(bytearray(data.HEAD.size + data.MAX_SMALL_REQUEST_BYTES))
        self._came_bytes = 0
        self._session: int | None = None
        self._access: Access | None = None
        #: what says who the client is; in no log
        self._authorization = ""
        self._call = _Call(0, None, b"")
        self.may_tell = self.in_step = True
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def hang_up(self) -> asyncio.Task[None]:
        """End the connection; what it was doing is over when the task is."""
        self._task.cancel()
        return self._task

    # ---- from the first byte to the last

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._secure()
                await self._attach()
            while True:
                await self._serve()
        except (_HungUp, OSError):
            pass  # clients come and go
        except Exception as problem:
            error = error_of("data", problem)
            if self._session is None:
                # Anybody could fill the log with these.
                self._server.refusals += 1
            else:
                log.warning("data_connection_ended", session=self._session, why=str(error))
            if self.may_tell:
                with suppress(OSError):
                    self.stream.send([_failure(error)])

    async def _secure(self) -> None:
        """Shake hands, if there is TLS. Raises OSError, TimeoutError."""
        stream, handshakes = self.stream, self._server.handshakes
        if handshakes is None:
            return
        assert isinstance(stream, SecuredStream)
        self.may_tell = done = False
        try:
            while not done:
                # The client begins. Whoever says nothing keeps no thread.
                await self._ready()
                with suppress(BlockingIOError):
                    await handshakes.step(stream)
                    done = True
        except OSError as problem:
            # Anybody could fill the log with these.
            log.debug("data_handshake_failed", why=str(problem))
            raise
        finally:
            self._server.handshake_refusals += not done
        self.may_tell = True

    async def _attach(self) -> None:
        """Take the first request, which says whose connection this is. Raises PrefixdError."""
        size_bytes = await self._head()
        if size_bytes > data.MAX_ATTACH_BYTES:
            raise InvalidSize("the first request proves a session, and is no longer than that")
        request = await self._small(size_bytes)
        if request.WhichOneof("kind") != "attach":
            raise MalformedMessage("the first request has to prove a session")
        server = self._server
        self._authorization = bearer(request.token)
        membership = server.sessions.prove(request.attach, _Attaching(self._permit("attach")))
        session = membership.number
        others = server.attached.setdefault(session, set())
        if len(others) >= server.config.max_connections_per_session:
            raise LimitReached(f"this session has {len(others)} connections already")
        others.add(self)
        self._session, self._access = session, membership.access
        server.forget_unproved(self)

    def _permit(self, kind: str) -> Access | None:
        """What the token gives, which is looked at for each request; None: none is asked for.
        Raises NotAuthenticated, NotPermitted."""
        if self._server.tokens is None:
            return None
        access = self._server.tokens.permit(DATA_ROLES[kind], self._authorization)
        if self._session is not None:
            check_same(access, self._access)
        return access

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        server = self._server
        server.connections.discard(self)
        server.forget_unproved(self)
        if self._session is not None:
            others = server.attached[self._session]
            others.discard(self)
            if not others:
                del server.attached[self._session]
        self.stream.close()
        # An answer that nothing came after was not taken.
        self._call.done(gone=True)

    # ---- requests

    async def _serve(self) -> None:
        """One request and its answer."""
        size_bytes = await self._head()
        if size_bytes <= data.MAX_SMALL_REQUEST_BYTES:
            await self._answer(await self._small(size_bytes))
            return
        if size_bytes > data.MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a message of {size_bytes} bytes, {data.MAX_MESSAGE_BYTES} is the most"
            )
        async with self._server.large.room(size_bytes, self._session):
            await self._answer(await self._large(size_bytes))

    async def _head(self) -> int:
        """The length of the next request, once that has begun. Raises _HungUp, OSError."""
        while self._came_bytes < data.HEAD.size:
            await self._more()
        (size_bytes,) = data.HEAD.unpack_from(self._buffer)
        return int(size_bytes)

    async def _small(self, size_bytes: int) -> pb.DataRequest:
        end = data.HEAD.size + size_bytes
        if self._came_bytes < end:
            with self._stalling():
                async with asyncio.timeout(self._stall_s):
                    while self._came_bytes < end:
                        await self._more()
        request = bytes(self._buffer[data.HEAD.size : end])
        left_bytes = self._came_bytes - end
        if left_bytes:
            self._buffer[:left_bytes] = bytes(self._buffer[end : self._came_bytes])
        self._came_bytes = left_bytes
        return data.request_of(request)

    async def _large(self, size_bytes: int) -> pb.DataRequest:
        request = bytearray(size_bytes)
        came_bytes = self._came_bytes - data.HEAD.size
        request[:came_bytes] = self._buffer[data.HEAD.size : self._came_bytes]
        self._came_bytes = 0
        with memoryview(request) as room, self._stalling():
            while came_bytes < size_bytes:
                async with asyncio.timeout(self._stall_s):
                    came_bytes += await self._receive(room[came_bytes:])
        return data.request_of(bytes(request))

    async def _more(self) -> None:
        self._came_bytes += await self._receive(self._buffer[self._came_bytes :])

    async def _receive(self, room: memoryview) -> int:
        """What comes next, however long that takes. Raises _HungUp, OSError."""
        while True:
            try:
                came_bytes = self.stream.receive([room])
            except BlockingIOError:
                await self._ready()
                continue
            if not came_bytes:
                raise _HungUp
            return came_bytes

    async def _answer(self, request: pb.DataRequest) -> None:
        """Raises where nothing that follows could be understood."""
        assert self._session is not None
        self._call.done(gone=False)  # a client that asks again has taken the answer before
        self._call = call = _Call(self._session, self._access, request.traceparent)
        kind = request.WhichOneof("kind")
        try:
            if kind not in (None, "attach", "give_back"):
                self._permit(kind)
            match kind:
                case "give_back":
                    with suppress(PrefixdError):  # of a claim that is gone
                        self._permit(kind)
                        await self._server.methods["release"](request.give_back, call)
                case "read" | "fetch":
                    await self._server.moving[kind](getattr(request, kind), call, self)
                case "save":
                    with self._watched(request.save.header.wait_ms):
                        await self._server.moving[kind](request.save, call, self)
                case None | "attach":
                    raise MalformedMessage("a request that has no place here")
                case _:
                    asked = getattr(request, kind)
                    with self._watched(_wait_ms(asked)):
                        answer = await self._server.methods[kind](asked, call)
                    await self.tell(pb.DataResponse(**{kind: answer}))
        except (OSError, _HungUp):
            raise
        except Exception as problem:
            if kind in (None, "attach") or not (self.in_step and self.may_tell):
                raise
            await self._send(_failure(error_of(kind, problem)))

    # ---- `data_calls.Line`

    async def tell(self, response: pb.DataResponse) -> None:
        await self._send(data.frame(response))

    async def until_ready(self) -> None:
        with self._stalling():
            async with asyncio.timeout(self._stall_s):
                await self._ready()

    async def _ready(self) -> None:
        """Wait for what the stream lacks, however long that takes."""
        loop, fd = self._loop, self.stream.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        reading = self.stream.lacks == select.POLLIN
        (loop.add_reader if reading else loop.add_writer)(fd, _set, ready)
        try:
            await ready
        finally:
            (loop.remove_reader if reading else loop.remove_writer)(fd)

    async def _send(self, frame: bytes) -> None:
        """Raises OSError, LimitReached."""
        rest = memoryview(frame)
        while True:
            with suppress(BlockingIOError):
                rest = rest[self.stream.send([rest]) :]
            self.may_tell = not rest
            if not rest:
                return
            await self.until_ready()

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise LimitReached(f"the client stood still for {self._stall_s:g} s") from None

    @contextmanager
    def _watched(self, wait_ms: int) -> Iterator[None]:
        """Around a call that may wait: it ends when its client hangs up."""
        if not wait_ms or self._came_bytes:
            yield
            return
        fd = self.stream.fileno()
        self._loop.add_reader(fd, self._look)
        try:
            yield
        finally:
            self._loop.remove_reader(fd)

    def _look(self) -> None:
        gone = self.stream.gone()
        if gone is False:
            return
        self._loop.remove_reader(self.stream.fileno())
        if gone:
            self._task.cancel()


def _wait_ms(request: Any) -> int:
    """How long a request may wait for others."""
    if isinstance(request, pb.ReserveRequest):
        return request.header.wait_ms
    return int(getattr(request, "wait_ms", 0))


def _failure(error: PrefixdError) -> bytes:
    failure = pb.Failure(error=error.name, message=str(error), retry=error.retryable)
    return data.frame(pb.DataResponse(failure=failure))


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
