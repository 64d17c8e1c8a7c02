"""The connections of the data socket: the requests of each, in order, one at a time.

A connection does nothing before it has proved a session, belongs to that one only, and ends with
it. What waits for nothing is answered by the callback that reads it, the rest by a task.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    InvalidSize,
    LimitReached,
    MalformedMessage,
    PrefixdError,
    UnknownSession,
)
from ...proto.frames import DATA_SMALL_REQUEST_BYTES, MAX_ATTACH_BYTES, MAX_MESSAGE_BYTES
from ..runtime.quota import Quota
from .access import DATA_ROLES, Access, Tokens, bearer
from .calls import ConnectionCall, PlainCaller, Process, error_of, failure_message
from .data_calls import DataCalls
from .data_frames import DataFrames, HungUp
from .namespaces import check_same
from .saves import Saves
from .service import CacheService
from .sessions import ServiceConfig, Sessions
from .streams import Handshakes, SecuredStream, Stream

log = structlog.get_logger("prefixd.data")

#: A new connection proves its session within this time.
_PATIENCE_S: Final = 5.0
#: Requests of one connection that are answered before others have their turn.
_AT_ONCE: Final = 64

_Method = Callable[..., Awaitable[Any]]


class DataConnections:
    """All open connections, and the methods that answer their requests. The event loop's."""

    def __init__(
        self,
        config: ServiceConfig,
        sessions: Sessions,
        service: CacheService,
        saves: Saves,
        calls: DataCalls,
    ) -> None:
        self.config: Final = config
        self.sessions: Final = sessions
        #: how a request that takes one answer is answered, by its kind
        self.methods: Final[dict[str, _Method]] = {
            "lookup": service.lookup,
            "claim": service.claim,
            "reserve": saves.reserve,
            "cancel": saves.cancel,
        }
        #: how requests are answered that wait for nothing
        self.at_once: Final[dict[str, Callable[..., Any]]] = {
            "lookup": service.lookup_now,
            "claim": service.claim_now,
            "release": service.release_now,
            "give_back": service.release_now,
        }
        #: how requests are answered that move payloads: these methods take the stream as well
        self.moving: Final[dict[str, _Method]] = {
            "read": calls.read,
            "fetch": calls.fetch,
            "save": calls.save,
        }
        self.connections: Final[set[DataConnection]] = set()
        #: connections that have not proved a session yet, the oldest first
        self.unproved: Final[dict[DataConnection, None]] = {}
        #: by session
        self.attached: Final[dict[int, set[DataConnection]]] = {}
        #: room for requests above DATA_SMALL_REQUEST_BYTES, which are received once they have it
        self.large: Final = Quota("requests", config.max_local_bytes, config.stall_timeout_s)
        #: connections that were refused: too many, or none that proved a session
        self.refusals = 0
        #: refused connections whose handshake failed: a wrong certificate, none, or no TLS
        self.handshake_refusals = 0
        #: makes the TLS handshakes; None: there is no TLS
        self.handshakes: Handshakes | None = None
        #: what each token allows; None: every session may do everything
        self.tokens: Tokens | None = None
        sessions.when_closed.append(self._hang_up_all)

    def forget_unproved(self, connection: DataConnection) -> DataConnection:
        """A connection has proved a session, or is about to end."""
        self.unproved.pop(connection, None)
        return connection

    def _hang_up_all(self, session: int) -> None:
        for connection in list(self.attached.get(session, ())):
            connection.hang_up()


class DataConnection:
    """One client's connection: its requests, in order, one at a time."""

    #: nobody says whose it is (`calls.Connected`)
    process: Process | None = None

    def __init__(self, server: DataConnections, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._frames = DataFrames(stream, server.config.stall_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._session: int | None = None
        self.access: Access | None = None
        #: the token that the client showed; never logged
        self._authorization = ""
        self._call = ConnectionCall(self)
        #: set while the task has nothing to do; it waits for this
        self._idle: asyncio.Future[None] | None = None
        #: a request that a callback has read and the task has to answer
        self._next: pb.DataRequest | None = None
        #: what ends the connection; the task raises it
        self._problem: Exception | None = None
        #: a callback is scheduled that answers the rest of the requests that came
        self._going_on = False
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def hang_up(self) -> asyncio.Task[None]:
        """End the connection; what it was doing is over when the task is."""
        self._task.cancel()
        return self._task

    def attach(self, session: int) -> None:
        """Raises UnknownSession for another session than its own, proved or not."""
        if session != self._session:
            raise UnknownSession(f"this connection does not belong to session {session}")

    # ---- from the first byte to the last

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._secure()
                await self._prove()
            while True:
                await self._until_asked()
                await self._serve()
        except (HungUp, OSError):
            pass  # clients come and go
        except Exception as problem:
            error = error_of("data", problem)
            if self._session is None:
                # Anybody could fill the log with these.
                self._server.refusals += 1
            else:
                log.warning("data_connection_ended", session=self._session, why=str(error))
            if self._frames.may_tell:
                with suppress(OSError):
                    self._frames.tell_now(_failure(error))

    async def _secure(self) -> None:
        """Shake hands, if there is TLS. Raises OSError, TimeoutError."""
        stream, handshakes = self._stream, self._server.handshakes
        if handshakes is None:
            return
        assert isinstance(stream, SecuredStream)
        self._frames.may_tell = done = False
        try:
            while not done:
                # The client begins. One that says nothing keeps no thread busy.
                await self._frames.ready()
                with suppress(BlockingIOError):
                    await handshakes.step(stream)
                    done = True
        except OSError as problem:
            # Anybody could fill the log with these.
            log.debug("data_handshake_failed", why=str(problem))
            raise
        finally:
            self._server.handshake_refusals += not done
        self._frames.may_tell = True

    async def _prove(self) -> None:
        """Take the first request, which says whose connection this is. Raises PrefixdError."""
        size_bytes = await self._frames.head()
        if size_bytes > MAX_ATTACH_BYTES:
            raise InvalidSize("the first request proves a session, and is no longer than that")
        request = await self._frames.small(size_bytes)
        if request.WhichOneof("kind") != "attach":
            raise MalformedMessage("the first request has to prove a session")
        server = self._server
        self._authorization = bearer(request.token)
        membership = server.sessions.prove(request.attach, PlainCaller(self._permit("attach")))
        session = membership.number
        others = server.attached.setdefault(session, set())
        if len(others) >= server.config.max_connections_per_session:
            raise LimitReached(f"this session has {len(others)} connections already")
        others.add(self)
        self._session, self.access = session, membership.access
        server.forget_unproved(self)

    def _permit(self, kind: str) -> Access | None:
        """What the token gives, which is looked at for each request; None: none is asked for.
        Raises NotAuthenticated, NotPermitted."""
        if self._server.tokens is None:
            return None
        access = self._server.tokens.permit(DATA_ROLES[kind], self._authorization)
        if self._session is not None:
            check_same(access, self.access)
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
        self._stream.close()
        # An answer that nothing came after was not taken.
        self._call.done(gone=True)

    # ---- requests that wait for nothing: answered where they are read

    async def _until_asked(self) -> None:
        """Until the task has something to do: any request but these, or what is left of an
        answer. Raises HungUp, OSError, and what nothing that follows could be understood after."""
        idle = self._idle = self._loop.create_future()
        try:
            self._answer_ahead(idle)
            if idle.done():
                # A client that sends ahead could keep the loop busy: other connections have their
                # turn.
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
            self._answer_ahead(idle)

    def _answer_ahead(self, idle: asyncio.Future[None]) -> None:
        """Answer what is there, as far as it waits for nothing."""
        try:
            for _ in range(_AT_ONCE):
                request = self._frames.next_now()
                if request is None:
                    if self._frames.ahead_bytes:
                        _wake(idle)  # the rest of it has to come in time
                        return
                    if not self._frames.filled:
                        return
                    break  # there may be more, which no poll tells of
                kind = request.WhichOneof("kind")
                if kind is None or not self._waits_for_nothing(kind, request):
                    self._next = request
                    _wake(idle)
                    return
                if not self._answer_now(kind, request):
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
            self._answer_ahead(idle)
        else:
            self._take()

    def _waits_for_nothing(self, kind: str, request: pb.DataRequest) -> bool:
        if kind == "lookup" or kind == "claim":
            return not getattr(request, kind).wait_ms
        return kind in self._server.at_once

    def _answer_now(self, kind: str, request: pb.DataRequest) -> bool:
        """False: not all of the answer could be sent."""
        asked = self._begun(request)
        try:
            self._permit(kind)
            answer = self._server.at_once[kind](getattr(request, kind), asked)
        except Exception as problem:
            if kind != "give_back":
                return self._frames.tell_now(_failure(error_of(kind, problem)))
            if not isinstance(problem, PrefixdError):  # of a claim that is gone
                raise
        else:
            if kind != "give_back":
                return self._frames.tell_now(pb.DataResponse(**{kind: answer}))
        return True

    def _begun(self, request: pb.DataRequest) -> ConnectionCall:
        """A client that asks again has taken the answer before."""
        self._call.done(gone=False)
        self._call = call = ConnectionCall(self)
        call.traceparent = request.traceparent
        return call

    # ---- other requests

    async def _serve(self) -> None:
        """One request and its answer."""
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
        async with self._server.large.room(size_bytes, self._session):
            await self._answer(await frames.large(size_bytes))

    async def _answer(self, request: pb.DataRequest) -> None:
        """Raises where nothing that follows could be understood."""
        assert self._session is not None
        kind, frames = request.WhichOneof("kind"), self._frames
        if kind is not None and self._waits_for_nothing(kind, request):
            self._answer_now(kind, request)
            await frames.flush()
            return
        call = self._begun(request)
        try:
            if kind is None or kind == "attach":
                raise MalformedMessage("a request that has no place here")
            self._permit(kind)
            asked = getattr(request, kind)
            with self._watched(_wait_ms(asked)):
                if kind in self._server.moving:
                    await self._server.moving[kind](asked, call, frames)
                else:
                    answer = await self._server.methods[kind](asked, call)
                    await frames.tell(pb.DataResponse(**{kind: answer}))
        except (OSError, HungUp):
            raise
        except Exception as problem:
            if kind is None or kind == "attach" or not (frames.in_step and frames.may_tell):
                raise
            await frames.tell(_failure(error_of(kind, problem)))

    @contextmanager
    def _watched(self, wait_ms: int) -> Iterator[None]:
        """Around a call that may wait: it ends when its client hangs up."""
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
    """How long a request may wait for others."""
    if isinstance(request, pb.ReserveRequest | pb.RawSaveRequest):
        return request.header.wait_ms
    return int(getattr(request, "wait_ms", 0))


def _failure(error: PrefixdError) -> pb.DataResponse:
    return pb.DataResponse(failure=failure_message(error))
