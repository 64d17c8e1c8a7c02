"""The data socket: calls of clients on other hosts, and their payloads, without gRPC between
(proto.frames).

Small calls are those of `service` and `saves`; those that move payloads are in `data_calls`. A
connection does nothing before it has proved a session, belongs to that one only, and ends with it.
Of each connection one request at a time is in the daemon's memory; a large one waits in the kernel
until there is room. Sockets don't block: the loop waits for them.
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

from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidSize, MalformedMessage, UnknownSession
from ...proto.frames import DATA_SMALL_REQUEST_BYTES, MAX_ATTACH_BYTES
from ...proto.limits import MAX_MESSAGE_BYTES
from ..runtime.limited_log import LimitedLog
from ..runtime.loop import Core
from .access import DATA_ROLES, Access, Tokens, bearer, check_same
from .calls import PlainCaller, error_of, failure_of
from .connections import AT_ONCE, Connection, Connections
from .data_calls import DataCalls
from .data_streams import (
    DataFrames,
    Handshakes,
    HungUp,
    SecuredStream,
    Stream,
    accepted,
    listening_at,
)
from .saves import Saves
from .service import CacheService

log = LimitedLog("prefixd.data")

#: A new connection proves its session within this time.
_PATIENCE_S: Final = 5.0
#: Connections that may be about to prove a session.
_MAX_UNPROVED: Final = 64
#: How long the daemon accepts nothing after it had no file descriptor left for a connection.
_CROWDED_S: Final = 1.0


class DataServer(Connections["DataConnection"]):
    """Listens where `start` says; it and `close` belong to the event loop."""

    def __init__(self, core: Core, service: CacheService, saves: Saves) -> None:
        super().__init__(service, saves, service.config.max_remote)
        self.at_once["lookup"] = service.lookup_now
        self._supervisor: Final = core.supervisor
        calls = DataCalls(core, service, saves)
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        #: Answer requests that move payloads, by kind. They take the stream as well.
        self.moving: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
            "read": calls.read,
            "fetch": calls.fetch,
            "save": calls.save,
        }
        #: Connections that have not proved a session yet, the oldest first.
        self.unproved: Final[dict[DataConnection, None]] = {}
        #: Refused connections whose handshake failed: a wrong certificate, none, or no TLS.
        self.handshake_refusals = 0
        #: Makes the TLS handshakes. None: there is no TLS.
        self.handshakes: Handshakes | None = None
        #: What each token grants. None: every session may do everything.
        self.tokens: Tokens | None = None

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
        self._listening = listening
        self._accepting = self._supervisor.task("data socket", self._accept(listening))
        bound: int = listening.getsockname()[1]
        self.sessions.data_port = bound
        return bound

    async def close(self) -> None:
        """Refuse new connections and end the open ones."""
        self.sessions.data_port = 0
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait((self._accepting,))
        if self._listening is not None:
            self._listening.close()
        await self.hang_up_all()
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
            if len(self.connections) >= self.max_connections:
                self.refusals += 1
                sock.close()
                continue
            if len(self.unproved) >= _MAX_UNPROVED:
                # Clients prove their session with the first bytes: the oldest is no client.
                self.refusals += 1
                oldest = next(iter(self.unproved))
                del self.unproved[oldest]
                oldest.hang_up()
            try:
                stream = accepted(sock, self.config.stall_timeout_s, self.handshakes)
            except OSError:
                sock.close()  # its client is gone already
                continue
            connection = DataConnection(self, stream)
            self.connections.add(connection)
            self.unproved[connection] = None
            del connection, stream, sock  # they end long before the next ones come
            await asyncio.sleep(0)  # other connections have their turn


class DataConnection(Connection):
    """One client's connection: its requests, in order, one at a time."""

    _server: DataServer

    def __init__(self, server: DataServer, stream: Stream) -> None:
        super().__init__(server)
        self._stream = stream
        self._frames = DataFrames(stream, server.config.stall_timeout_s)
        #: The token that the client showed; never logged.
        self._authorization = ""
        #: Set while the task has nothing to do; it waits for this.
        self._idle: asyncio.Future[None] | None = None
        #: A request that a callback has read and the task has to answer.
        self._next: pb.DataRequest | None = None
        #: What ends the connection. A callback sets it, the task raises it.
        self._problem: Exception | None = None
        #: Whether a callback is scheduled that answers the rest of the received requests.
        self._going_on = False
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def hang_up(self) -> asyncio.Task[None]:
        self._task.cancel()
        return self._task

    def session_ended(self) -> None:
        self.hang_up()

    def attach(self, session: int) -> None:
        if session != self._session:
            raise UnknownSession(f"this connection does not belong to session {session}")

    # ---- from the first byte to the last

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._secure()
                await self._prove()
            while True:
                await self._until_needed()
                await self._serve()
        except (HungUp, OSError):
            pass  # clients come and go
        except Exception as problem:
            error = error_of("data", problem)
            if self._session is None:
                # Not logged: anybody could fill the log with these.
                self._server.refusals += 1
            else:
                log.warning("data_connection_ended", session=self._session, why=str(error))
            if self._frames.may_tell:
                with suppress(OSError):
                    self._frames.tell_now(pb.DataResponse(failure=failure_of("data", error)))
            del error  # it refers to this frame, which would refer to it

    async def _secure(self) -> None:
        """Make the TLS handshake, if there is TLS. Raises OSError, TimeoutError."""
        stream, handshakes = self._stream, self._server.handshakes
        if handshakes is None:
            return
        assert isinstance(stream, SecuredStream)
        self._frames.may_tell = done = False
        try:
            while not done:
                # The client begins. One that sends nothing occupies no thread.
                await self._frames.ready()
                with suppress(BlockingIOError):
                    await handshakes.step(stream)
                    done = True
        except OSError as problem:
            # No warning: anybody could fill the log with these.
            log.debug("data_handshake_failed", why=str(problem))
            raise
        finally:
            self._server.handshake_refusals += not done
        self._frames.may_tell = True

    async def _prove(self) -> None:
        """Take the first request, which proves a session. Raises PrefixdError."""
        size_bytes = await self._frames.head()
        if size_bytes > MAX_ATTACH_BYTES:
            raise InvalidSize("the first request proves a session, and is no longer than that")
        request = await self._frames.small(size_bytes)
        if request.WhichOneof("kind") != "attach":
            raise MalformedMessage("the first request has to prove a session")
        self._authorization = bearer(request.token)
        caller = PlainCaller(self._permit("attach"))
        membership = self._server.sessions.prove(request.attach, caller)
        self._join(membership.number, membership.access)
        self._server.unproved.pop(self, None)

    def _permit(self, kind: str) -> Access | None:
        if self._server.tokens is None:
            return None
        access = self._server.tokens.permit(DATA_ROLES[kind], self._authorization)
        if self._session is not None:
            check_same(access, self.access)
        return access

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Called also for a task that was cancelled before it began."""
        self._server.connections.discard(self)
        self._server.unproved.pop(self, None)
        self._leave()
        self._stream.close()
        # No request followed the last answer: the client may not have read it.
        self._call.done(gone=True)
        # An exception refers to the frames that it passed, and so to this connection.
        self._problem = None
        self._let_go("_task")

    # ---- requests that wait for nothing: answered by the callback that reads them

    async def _until_needed(self) -> None:
        """Wait until the task has something to do: a request that may wait, or the rest of an
        answer. Raises HungUp, OSError, and what ends the connection."""
        idle = self._idle = self._loop.create_future()
        try:
            self._answer_received(idle)
            if idle.done():
                # Other connections have their turn: this client may have sent much ahead.
                await asyncio.sleep(0)
            else:
                self._loop.add_reader(self._stream.fileno(), self._take)
            await idle
        finally:
            self._idle = None
            self._loop.remove_reader(self._stream.fileno())
        if self._problem is not None:
            raise self._problem

    def _take(self) -> None:
        """Receive requests, and answer those that wait for nothing."""
        idle = self._idle
        if idle is None or idle.done() or self._going_on:
            return
        try:
            self._frames.receive_now()
        except BlockingIOError:
            if self._stream.lacks != select.POLLIN:
                _wake(idle)  # TLS has something to send first, which the task waits for
        except Exception as problem:
            self._problem = problem
            _wake(idle)
        else:
            self._answer_received(idle)

    def _answer_received(self, idle: asyncio.Future[None]) -> None:
        """Answer the received requests up to the first one that may wait."""
        try:
            for _ in range(AT_ONCE):
                request = self._frames.next_now()
                if request is None:
                    if self._frames.ahead_bytes:
                        _wake(idle)  # the rest of it has to come in time
                        return
                    if not self._frames.filled:
                        return
                    break  # TLS may hold more, which no poll reports
                if not self._waits_for_nothing(request):
                    self._next = request
                    _wake(idle)
                    return
                if not self._answer_now(request):
                    _wake(idle)
                    return
        except Exception as problem:
            self._problem = problem
            _wake(idle)
            return
        self._going_on = True
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        idle = self._idle
        if idle is None or idle.done():
            return
        if self._frames.ahead_bytes:
            self._answer_received(idle)
        else:
            self._take()

    def _answer_now(self, request: pb.DataRequest) -> bool:
        """False: the socket did not take the whole answer."""
        response = self._answer_to(request, pb.DataResponse)
        return response is None or self._frames.tell_now(response)

    # ---- other requests

    async def _serve(self) -> None:
        """Answer one request, or send the rest of an answer."""
        frames = self._frames
        if not frames.may_tell:
            await frames.flush()
            return
        request, self._next = self._next, None
        if request is not None:
            await self._answer(request)
            return
        size_bytes = await frames.head()
        if size_bytes <= DATA_SMALL_REQUEST_BYTES:
            await self._answer(await frames.small(size_bytes))
            return
        if size_bytes > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a message of {size_bytes} bytes, {MAX_MESSAGE_BYTES} is the most"
            )
        async with self._server.large.room(size_bytes, self.holder):
            await self._answer(await frames.large(size_bytes))

    async def _answer(self, request: pb.DataRequest) -> None:
        """Raises when the client could not understand another response, or the daemon another
        request."""
        assert self._session is not None
        kind, frames = request.WhichOneof("kind"), self._frames
        if self._waits_for_nothing(request):
            self._answer_now(request)
            await frames.flush()
            return
        call = self._begin_call(request)
        if kind is None or kind == "attach":
            raise MalformedMessage("a request that has no place here")
        try:
            self._permit(kind)
            message = getattr(request, kind)
            with self._watched(_wait_ms(message)):
                if kind in self._server.moving:
                    await self._server.moving[kind](message, call, frames)
                else:
                    answer = await self._server.methods[kind](message, call)
                    await frames.tell(pb.DataResponse(**{kind: answer}))
        except (OSError, HungUp):
            raise
        except Exception as problem:
            if not (frames.in_step and frames.may_tell):
                raise
            await frames.tell(pb.DataResponse(failure=failure_of(kind, problem)))

    @contextmanager
    def _watched(self, wait_ms: int) -> Iterator[None]:
        """Around a call that may wait: ends it when its client hangs up."""
        if not wait_ms or self._frames.ahead_bytes:
            yield
            return
        fd = self._stream.fileno()
        self._loop.add_reader(fd, self._look)
        try:
            yield
        finally:
            self._loop.remove_reader(fd)

    def _look(self) -> None:
        gone = self._stream.gone()
        if gone is False:
            return
        self._loop.remove_reader(self._stream.fileno())
        if gone:
            self._task.cancel()


def _wake(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)


def _wait_ms(request: Any) -> int:
    """How long a request may wait for the saves of others."""
    if isinstance(request, pb.ReserveRequest | pb.RawSaveRequest):
        return request.header.wait_ms
    return int(getattr(request, "wait_ms", 0))
