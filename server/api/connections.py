"""The connections of the local socket and of the data socket, which speak one protocol
(proto.frames).

Small calls are those of `service` and `save_calls`; those that move payloads are in
`data_transfers`. A connection does nothing before it has proved a session, belongs to that one
only, and ends with it. It answers its requests in order, one at a time: those that wait for nothing
in the callback that reads them, which spares a task its wake-up, the rest in the task of the
connection.

Of each connection one request at a time is in the daemon's memory; a large one waits in the kernel
until there is room. Sockets don't block: the loop waits for them. All of it belongs to the event
loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    CallerError,
    InvalidSize,
    LimitReached,
    MalformedMessage,
    PrefixdError,
    UnknownSession,
)
from ...proto.frames import MAX_ATTACH_BYTES, frame
from ..core.arrivals import Arrivals
from ..core.shares import Holder, Shares
from ..runtime.limited_log import LimitedLog
from ..runtime.loop import Core
from ..runtime.quota import Quota
from .access import DATA_ROLES, Access, Tokens, bearer, check_same
from .calls import Caller, cut_off, error_of, failure_of
from .data_streams import DataFrames, Handshakes, HungUp, SecuredStream, Stream
from .data_transfers import DataCalls
from .save_calls import Saves
from .service import CacheService
from .session_streams import Membership

log = LimitedLog("prefixd.connections")

#: Requests of one connection that are taken before other connections have their turn.
AT_ONCE: Final = 64
#: A new connection proves its session within this time.
_PATIENCE_S: Final = 5.0
#: Connections that may be about to prove a session.
_MAX_UNPROVED: Final = 64
#: How long the daemon accepts nothing after it had no file descriptor left for a connection.
_CROWDED_S: Final = 1.0


class Connections(ABC):
    """A listening socket: its connections, and the methods that answer their requests."""

    #: Which socket it is, for the log.
    name: str
    #: Makes the TLS handshakes. None: there is no TLS.
    handshakes: Handshakes | None = None
    #: What each token grants. None: every session may do everything.
    tokens: Tokens | None = None

    def __init__(
        self, core: Core, service: CacheService, saves: Saves, max_connections: int
    ) -> None:
        self.config: Final = service.config.server
        self.max_connections: Final = max_connections
        self.sessions: Final = service.sessions
        self._supervisor: Final = core.supervisor
        #: Answer requests, by kind. May wait.
        self.methods: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
            "lookup": service.lookup,
            "claim": service.claim,
            "reserve": saves.reserve,
            "cancel": saves.cancel,
        }
        #: Answer requests that wait for nothing, by kind.
        self.at_once: Final[dict[str, Callable[..., Any]]] = {
            "lookup": service.lookup_now,
            "claim": service.claim_now,
            "release": service.release_now,
            "give_back": service.release_now,
        }
        calls = DataCalls(core, service, saves)
        #: Answer requests with more than one message, by kind. They take the stream as well.
        self.streaming: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
            "read": calls.read,
            "fetch": calls.fetch,
            "save": calls.save,
        }
        self.connections: Final[set[ClientConnection]] = set()
        #: Connections that have not proved a session yet.
        self.unproved: Final[Arrivals[ClientConnection]] = Arrivals()
        #: The connections of each session.
        self.attached: Final[dict[int, set[ClientConnection]]] = {}
        #: Connections that belong to a session.
        self.places: Final = Shares("connections (max_connections)", max_connections)
        #: Memory for large requests (`proto.frames`): none is received before it has some.
        self.large: Final = Quota(
            "requests", self.config.max_local_bytes, self.config.stall_timeout_s
        )
        #: Connections that were refused.
        self.refusals = 0
        #: Refused connections whose handshake failed: a wrong certificate, none, or no TLS.
        self.handshake_refusals = 0
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.sessions.when_closed.append(self._session_ended)

    @abstractmethod
    def _accepted(self, sock: socket.socket) -> tuple[Stream, str]:
        """The stream of an accepted socket, and where it comes from, as unproved ones are counted
        by it. Raises OSError when its client is gone already."""

    def _accept_at(self, listening: socket.socket) -> None:
        """Accept the connections of this socket, which does not block, and of no other one."""
        self._stop_accepting()
        self._listening = listening
        self._accepting = self._supervisor.task(f"{self.name} socket", self._accept(listening))

    def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._listening.close()
        self._accepting = self._listening = None

    async def close(self) -> None:
        """Refuse new connections, end the open ones, and wait until what they were doing is
        over."""
        self._stop_accepting()
        tasks = [connection.hang_up() for connection in list(self.connections)]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.handshakes is not None:
            self.handshakes.close()

    def _refuse(self, sock: socket.socket) -> None:
        """Close a connection for which there is no place. Tells the client why, unless that took a
        handshake."""
        with sock, suppress(OSError):
            if self.handshakes is None:
                problem = LimitReached(f"there are {len(self.connections)} connections already")
                sock.setblocking(False)
                sock.send(frame(_refusal(self.name, problem)))

    def _session_ended(self, session: int) -> None:
        for connection in list(self.attached.get(session, ())):
            connection.session_ended()

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
            full = len(self.connections) >= self.max_connections
            if full and not self.unproved:
                self.refusals += 1
                self._refuse(sock)
                continue
            if full or len(self.unproved) >= _MAX_UNPROVED:
                # Clients prove their session with the first bytes, so it is hardly one of them.
                self.refusals += 1
                self.unproved.take_worst().give_way()
            try:
                stream, origin = self._accepted(sock)
            except OSError:
                sock.close()  # its client is gone already
                continue
            connection = ClientConnection(self, stream)
            self.connections.add(connection)
            self.unproved.add(connection, origin)
            del connection, stream, sock  # they end long before the next ones come
            await asyncio.sleep(0)  # other connections have their turn


class ClientConnection:
    """One client's connection: its requests, in order, one at a time."""

    #: What the token of its session grants.
    access: Access | None = None
    #: Whose share of everything its requests count to.
    holder = Holder()

    def __init__(self, server: Connections, stream: Stream) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        #: The process at the other end, where the kernel tells it.
        self.process: Final = stream.process
        self._session: int | None = None
        #: The latest request, as the services see it.
        self._call = ConnectionCall(self)
        self._frames = DataFrames(stream, server.config.stall_timeout_s, server.large)
        #: The token that the client showed; never logged.
        self._authorization = ""
        #: Set while the task has nothing to do; it waits for this.
        self._idle: asyncio.Future[None] | None = None
        #: A request that a callback has read and the task has to answer.
        self._next: pb.FramedRequest | None = None
        #: What ends the connection. A callback sets it, the task raises it.
        self._problem: Exception | None = None
        #: Whether a callback is scheduled that answers the rest of the received requests.
        self._going_on = False
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def hang_up(self) -> asyncio.Task[None]:
        """End the connection; what it was doing is over when the task is."""
        self._task.cancel()
        return self._task

    def give_way(self) -> None:
        """End a connection that has proved nothing: another one needs its place."""
        self._tell_last(LimitReached("there are too many connections"), refused=True)
        self.hang_up()

    def session_ended(self) -> None:
        """The session that the connection belongs to has ended."""
        cut_off(self._task, UnknownSession(f"session {self._session} has ended"))

    def attach(self, session: int) -> None:
        """A request has proved this session. Raises UnknownSession if it is another one."""
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
        except HungUp:
            # The kernel reports an error for a client that closed a Unix socket with an answer
            # unread. This one has read it, and keeps its claim: it may have views of the entries.
            if self.process is not None:
                self._call.done(gone=False)
        except OSError:
            pass  # clients come and go
        except asyncio.CancelledError as cancelled:
            # Not raised again: its traceback would keep the request and this connection alive.
            if cancelled.args and isinstance(cancelled.args[0], PrefixdError):
                self._tell_last(cancelled.args[0])
        except Exception as problem:
            error = error_of(self._server.name, problem)
            if self._session is None:
                # Not logged: anybody could fill the log with these.
                self._server.refusals += 1
            else:
                log.warning(
                    "connection_ended",
                    socket=self._server.name,
                    session=self._session,
                    why=str(error),
                )
            full = self._session is None and isinstance(error, LimitReached)
            self._tell_last(error, refused=full)
            del error  # it refers to this frame, which would refer to it

    def _tell_last(self, error: PrefixdError, *, refused: bool = False) -> None:
        """Tell the client why the connection ends, if it would understand that now. `refused`: it
        did nothing."""
        if self._frames.may_tell:
            with suppress(OSError):
                self._frames.tell_now(_refusal(self._server.name, error, refused=refused))

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
                self._server.unproved.spoke(self)
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
        process = self.process
        if process is not None and process.uid not in (os.geteuid(), 0):
            raise CallerError(f"user {process.uid} is not the one that runs this daemon")
        size_bytes = await self._frames.head()
        self._server.unproved.spoke(self)
        if size_bytes > MAX_ATTACH_BYTES:
            raise InvalidSize("the first request proves a session, and is no longer than that")
        request = await self._frames.small(size_bytes)
        if request.WhichOneof("kind") != "attach":
            raise MalformedMessage("the first request has to prove a session")
        self._authorization = bearer(request.token)
        caller = Caller(self._permit("attach"), process=process)
        membership = self._server.sessions.prove(request.attach, caller)
        self._join(membership)
        self._server.unproved.remove(self)

    def _join(self, membership: Membership) -> None:
        """Belong to this session from now on. Raises LimitReached."""
        session, server = membership.number, self._server
        others = server.attached.get(session, set())
        if len(others) >= server.config.max_connections_per_session:
            raise LimitReached(f"this session has {len(others)} connections already")
        server.places.take(membership.holder)
        server.attached.setdefault(session, others).add(self)
        self._session, self.access = session, membership.access
        self.holder = self._frames.holder = membership.holder

    def _permit(self, kind: str) -> Access | None:
        if self._server.tokens is None:
            return None
        access = self._server.tokens.permit(DATA_ROLES[kind], self._authorization)
        if self._session is not None:
            check_same(access, self.access)
        return access

    def _ended(self, _task: asyncio.Task[None]) -> None:
        """Called also for a task that was cancelled before it began."""
        server, session = self._server, self._session
        server.connections.discard(self)
        server.unproved.remove(self)
        if session is not None:
            others = server.attached[session]
            others.discard(self)
            if not others:
                del server.attached[session]
            server.places.give(self.holder)
        self._stream.close()
        # No request followed the last answer: the client may not have read it.
        self._call.done(gone=True)
        # An exception refers to the frames that it passed, and so to this connection.
        self._problem = None
        # What is left refers to this connection no more, so reference counting frees it. The cycle
        # collector may never: it does not look at what was alive when the daemon hid its entries
        # from it (`runtime.process_memory`).
        del self._task, self._call

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

    def _answer_now(self, request: pb.FramedRequest) -> bool:
        """False: the socket did not take the whole answer."""
        kind = request.WhichOneof("kind")
        assert kind is not None
        call = self._begin_call(request)
        try:
            self._permit(kind)
            answer = self._server.at_once[kind](getattr(request, kind), call)
        except Exception as problem:
            if kind != "give_back":
                failure = failure_of(kind, problem)
                return self._frames.tell_now(pb.FramedResponse(failure=failure))
            if not isinstance(problem, PrefixdError):
                raise
            return True  # the session is over, and its claims were released with it
        if kind == "give_back":
            return True
        return self._frames.tell_now(pb.FramedResponse(**{kind: answer}))

    def _waits_for_nothing(self, request: pb.FramedRequest) -> bool:
        kind = request.WhichOneof("kind")
        if kind not in self._server.at_once:
            return False
        # Only these of them can wait.
        return kind not in ("claim", "lookup") or not getattr(request, kind).wait_ms

    def _begin_call(self, request: pb.FramedRequest) -> ConnectionCall:
        """The caller of a new request. A client that sends one has read the answer before it."""
        self._call.done(gone=False)
        self._call = call = ConnectionCall(self, request.traceparent)
        return call

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
        async with AsyncExitStack() as rooms:
            await self._answer(await frames.next(rooms))

    async def _answer(self, request: pb.FramedRequest) -> None:
        """Raises when the client could not understand another response, or the daemon another
        request."""
        assert self._session is not None
        kind, frames = request.WhichOneof("kind"), self._frames
        if self._waits_for_nothing(request):
            self._answer_now(request)
            await frames.flush()
            return
        call = self._begin_call(request)
        method = self._server.methods.get(kind or "")
        streaming = self._server.streaming.get(kind or "")
        if kind is None or (method is None and streaming is None):
            raise MalformedMessage("a request that has no place here")
        try:
            self._permit(kind)
            message = getattr(request, kind)
            with self._watched(_wait_ms(message)):
                if streaming is not None:
                    await streaming(message, call, frames)
                else:
                    assert method is not None
                    answer = await method(message, call)
                    await frames.tell(pb.FramedResponse(**{kind: answer}))
        except (OSError, HungUp):
            raise
        except Exception as problem:
            if not (frames.in_step and frames.may_tell):
                raise
            await frames.tell(pb.FramedResponse(failure=failure_of(kind, problem)))

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


def _refusal(name: str, error: PrefixdError, *, refused: bool = True) -> pb.FramedResponse:
    failure = failure_of(name, error)
    failure.refused = refused
    return pb.FramedResponse(failure=failure)


def _wake(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)


def _wait_ms(request: Any) -> int:
    """How long a request may wait for the saves of others."""
    return int(getattr(getattr(request, "header", request), "wait_ms", 0))


class ConnectionCall(Caller):
    """The caller of one request on a connection, which has one at a time."""

    __slots__ = ("_connection", "_when_done", "traceparent")

    def __init__(self, connection: ClientConnection, traceparent: bytes = b"") -> None:
        super().__init__(connection.access, connection.holder.tenant, connection.process)
        self._connection = connection
        self._when_done: list[Callable[[bool], None]] = []
        #: The client's trace span.
        self.traceparent: Final = traceparent

    def proved(self, session: int) -> None:
        self._connection.attach(session)

    def when_done(self, callback: Callable[[bool], None]) -> None:
        self._when_done.append(callback)

    def done(self, *, gone: bool) -> None:
        """The client has read the answer, or (`gone`) never will."""
        for callback in self._when_done:
            callback(gone)
        self._when_done.clear()
