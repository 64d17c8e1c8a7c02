"""The local socket: calls of clients on this host, without gRPC between (proto.frames).

The calls are those of `service` and `saves`, taken off the socket one at a time, and answered. The
kernel says which process asks: another user is refused. What a connection may have in the daemon's
memory is bounded: it is not read while its requests or its answers wait.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import CallerError, InvalidSize, LimitReached, MalformedMessage, PrefixdError
from ...proto.frames import LOCAL_SMALL_REQUEST_BYTES, Frames, frame
from ..runtime.quota import Quota
from .access import Access
from .calls import Caller, ConnectionCall, Process, failure_of, remove_leftover, staged_of
from .hand_over import Handoff
from .hang_up import HangUpWatch
from .lent_saves import LentSaves
from .parsing import parse
from .saves import Saves
from .service import CacheService
from .sessions import ServiceConfig, Sessions
from .turns import Turn

log = structlog.get_logger("prefixd.local")

_BACKLOG: Final = 128
#: How long a connection without a session may send no request before it is closed, and how long a
#: connection that is being closed gives its client to read why.
_PATIENCE_S: Final = 5.0
#: Requests of one connection that may wait behind the one that is being answered, at most, and
#: their bytes, which one more request may exceed.
_MAX_AHEAD: Final = 64
_MAX_AHEAD_BYTES: Final = 64 * 2**10
_RECEIVE_BYTES: Final = 64 * 2**10

_Method = Callable[[Any, Caller], Awaitable[Any]]


class LocalServer:
    """Listens on `config.local_socket`; `start` and `close` belong to the event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        sessions: Sessions,
        service: CacheService,
        saves: Saves,
        hand_over: Handoff,
    ) -> None:
        self.config: Final = config
        self.path: Final = config.local_socket
        self.sessions: Final = sessions
        self.save_staged = saves.save_staged
        self.hand_over: Final = hand_over
        self.lent: Final = LentSaves(saves)
        #: how a request that takes one answer is answered, by its kind
        self.methods: Final[dict[str, _Method]] = {
            "lookup": service.lookup,
            "claim": service.claim,
            "reserve": saves.reserve,
            "cancel": saves.cancel,
            "save_lent": self.lent.save,
        }
        #: how requests are answered that wait for nothing
        self.at_once: Final[dict[str, Callable[[Any, Caller], Any]]] = {
            "claim": service.claim_now,
            "release": service.release_now,
            "give_back": service.release_now,
        }
        self.connections: Final[set[_Connection]] = set()
        #: by session
        self.attached: Final[dict[int, set[_Connection]]] = {}
        #: of requests that are not answered yet, complete or not
        self.buffered_bytes = 0
        #: room for requests above MAX_SMALL_REQUEST_BYTES, which are received once they have it
        self.large: Final = Quota("requests", config.max_local_bytes, config.stall_timeout_s)
        #: connections that were refused because there were too many
        self.refusals = 0
        #: what the kernel gives is here for a moment only, whichever connection it is of
        self.received: Final = memoryview(bytearray(_RECEIVE_BYTES))
        self._server: asyncio.Server | None = None
        sessions.when_closed.append(self._detach_all)

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
        """Refuse new connections and end those that there are."""
        if self._server is not None:
            self._server.close()
        Path(self.path).unlink(missing_ok=True)
        tasks = [connection.hang_up() for connection in list(self.connections)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _detach_all(self, session: int) -> None:
        for connection in self.attached.pop(session, ()):
            connection.detach()


class _Connection(asyncio.BufferedProtocol):
    """One client's connection: its requests, in order, one at a time."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._stall_s = server.config.stall_timeout_s
        self._frames = Frames(lambda raw: parse(pb.LocalRequest, raw))
        #: what waits to be answered, each with the bytes that it came in
        self._requests: deque[tuple[pb.LocalRequest, int]] = deque()
        self._ahead_bytes = 0
        self._turn = Turn(self._loop, self._take_frames)
        #: what is counted in the server's `buffered_bytes`
        self._counted_bytes = 0
        self._answering_bytes = 0
        #: set while a large request waits for room or has it; done once it gives the room back
        self._large: asyncio.Future[None] | None = None
        #: the large request has room, and may be parsed
        self._large_admitted = False
        self._admitting: asyncio.Task[None] | None = None
        #: what comes next is a large request that has to wait
        self._held_up = False
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]
        self._timer: asyncio.TimerHandle | None = None
        #: while it is not read: looks whether the client is still there
        self._paused = HangUpWatch(self._loop)
        self._waiter: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._session: int | None = None
        self.access: Access | None = None
        self._call = ConnectionCall(self)
        self.process: Process | None = None

    # ---- what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        self.process = Process.behind(transport.get_extra_info("socket"))
        crowded = len(server.connections) >= server.config.max_connections
        server.connections.add(self)
        self._task = self._loop.create_task(self._serve())
        self._watch()
        if self.process.uid not in (os.geteuid(), 0):
            self._fail(CallerError(f"user {self.process.uid} is not the one that runs this daemon"))
        elif crowded:
            server.refusals += 1
            self._fail(LimitReached(f"there are {len(server.connections) - 1} connections already"))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # asyncio's signature
        return self._server.received

    def buffer_updated(self, nbytes: int) -> None:
        self._frames.feed(self._server.received[:nbytes])
        self._take_frames()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._paused.end()
        self._turn.end()
        self._server.connections.discard(self)
        self.detach()
        self._task.cancel()
        if self._admitting is not None:
            self._admitting.cancel()
        self._requests.clear()
        self._frames.clear()
        self._ahead_bytes = self._answering_bytes = 0
        self._count()
        # The kernel reports a client that closed with an unread answer (ECONNRESET). Any other has
        # read it, and holds what it claimed: it may have views of it.
        self._call.done(gone=exc is not None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def hang_up(self) -> asyncio.Task[None]:
        """End the connection; what it was doing is over when the task is."""
        self._transport.abort()
        self._task.cancel()
        return self._task

    def attach(self, session: int) -> None:
        """A request on it has proved this session. Raises LimitReached."""
        if self._session is not None:
            return
        server = self._server
        others = server.attached.setdefault(session, set())
        if len(others) >= server.config.max_connections_per_session:
            server.refusals += 1
            raise LimitReached(f"this session has {len(others)} connections already")
        others.add(self)
        self._session, self.access = session, server.sessions.access_of(session)
        self._watch()

    def detach(self) -> None:
        """The session has ended: the connection belongs to none any more."""
        if self._session is None:
            return
        others = self._server.attached.get(self._session)
        if others is not None:
            others.discard(self)
            if not others:
                del self._server.attached[self._session]
        self._session = self.access = None
        self._watch()

    # ---- taking requests

    def _take_frames(self) -> None:
        """Parse the received bytes, as far as requests may wait, and decide whether to read on."""
        try:
            while self._parse() and self._waiter is not None and not self._waiter.done():
                self._answer_at_once()
                if self._requests:
                    self._waiter.set_result(None)
        except Exception as problem:
            self._fail(problem)
            return
        self._count()
        self._read_on()
        self._watch()

    def _parse(self) -> bool:
        """Are there requests now?"""
        self._held_up = False
        while self._may_take() and not self._turn.over:
            size_bytes = self._frames.next_bytes
            large = size_bytes > LOCAL_SMALL_REQUEST_BYTES
            if large and not self._admitted(size_bytes):
                self._held_up = True
                break
            request = self._frames.next()
            if request is None:
                break
            if large:
                self._large_admitted = False  # another one waits until this is answered
            self._turn.took()
            if request.HasField("attach"):
                self._attach(request.attach)
                continue
            self._requests.append((request, size_bytes))
            self._ahead_bytes += size_bytes
        return bool(self._requests)

    def _may_take(self) -> bool:
        return len(self._requests) < _MAX_AHEAD and self._ahead_bytes < _MAX_AHEAD_BYTES

    def _attach(self, ref: pb.SessionRef) -> None:
        with suppress(PrefixdError):  # the requests that follow are told so
            self._server.sessions.prove(ref, self._call)

    def _admitted(self, size_bytes: int) -> bool:
        """Is there room for a large request? If not yet, it is asked for. Raises InvalidSize."""
        if self._session is None:
            raise InvalidSize(
                f"a request of {size_bytes} bytes on a connection of no session, which takes "
                f"{LOCAL_SMALL_REQUEST_BYTES}; attach it first"
            )
        if self._large is None:
            self._large = self._loop.create_future()
            self._large_admitted = False
            self._admitting = self._loop.create_task(
                self._hold_room(size_bytes, self._session, self._large)
            )
        return self._large_admitted

    async def _hold_room(self, size_bytes: int, session: int, over: asyncio.Future[None]) -> None:
        try:
            async with self._server.large.room(size_bytes, session):
                self._large_admitted = True
                self._take_frames()
                await over
        except PrefixdError as problem:
            self._fail(problem)

    def _count(self) -> None:
        """Keep the server's sum true."""
        held_bytes = self._frames.buffered_bytes + self._ahead_bytes + self._answering_bytes
        self._server.buffered_bytes += held_bytes - self._counted_bytes
        self._counted_bytes = held_bytes

    def _read_on(self) -> None:
        """Read the socket unless too much waits: of this connection, or, if it has something to
        wait for, of all together."""
        server = self._server
        crowded = server.buffered_bytes > server.config.max_local_bytes
        if not self._may_take() or self._held_up or (crowded and self._requests):
            self._transport.pause_reading()
            self._paused.begin(self._transport)
        elif self._turn.over:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
            self._paused.end()

    # ---- timers

    def _watch(self) -> None:
        """Hang up when nothing happens where something has to."""
        self._unwatch()
        if self._answering_bytes or self._requests:
            return  # what it waits for has its own bound
        if self._session is None:
            self._timer = self._loop.call_later(_PATIENCE_S, self._transport.abort)
        elif self._frames.buffered_bytes:
            self._timer = self._loop.call_later(self._stall_s, self._transport.abort)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- serving

    async def _serve(self) -> None:
        try:
            while True:
                request = await self._next()
                # A client that asks again has read the answer before.
                self._call.done(gone=False)
                self._call = ConnectionCall(self)
                await self._answer(request)
        except asyncio.CancelledError:
            return  # its traceback, kept by the task, would keep the request that was answered
        except Exception as problem:
            self._fail(problem)

    async def _next(self) -> pb.LocalRequest:
        """The next request, once the client has read its answers but for a few. Raises
        LimitReached of one that does not."""
        request = self._take_next()
        if request is not None:
            return request
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._writable.wait()
            except TimeoutError:
                self._transport.abort()
                raise LimitReached(f"the client read no answer for {self._stall_s:g} s") from None
        while not self._requests:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._pop()

    def _take_next(self) -> pb.LocalRequest | None:
        """The next request, if it is there and may be taken."""
        self._release()
        return self._pop() if self._requests and self._writable.is_set() else None

    def _pop(self) -> pb.LocalRequest:
        request, size_bytes = self._requests.popleft()
        self._ahead_bytes -= size_bytes
        self._answering_bytes = size_bytes
        self._take_frames()
        return request

    def _release(self) -> None:
        """What was taken is answered, or in other hands."""
        if self._large is not None and self._answering_bytes > LOCAL_SMALL_REQUEST_BYTES:
            self._large.set_result(None)
            self._large = None
        self._answering_bytes = 0
        self._take_frames()

    def _answer_at_once(self) -> None:
        """While the task has nothing to do: what waits for nothing, which spares it a turn."""
        while self._requests and self._writable.is_set():
            request, size_bytes = self._requests[0]
            # What is large has room that the task gives back.
            if size_bytes > LOCAL_SMALL_REQUEST_BYTES or not self._waits_for_nothing(request):
                return
            self._requests.popleft()
            self._ahead_bytes -= size_bytes
            self._call.done(gone=False)
            self._call = ConnectionCall(self)
            self._answer_now(request)

    def _waits_for_nothing(self, request: pb.LocalRequest) -> bool:
        kind = request.WhichOneof("kind")
        return kind in self._server.at_once and not (kind == "claim" and request.claim.wait_ms)

    def _answer_now(self, request: pb.LocalRequest) -> None:
        kind = request.WhichOneof("kind")
        assert kind is not None
        self._call.traceparent = request.traceparent
        try:
            answer = self._server.at_once[kind](getattr(request, kind), self._call)
        except Exception as problem:
            if kind != "give_back":
                self._send(failure_of(kind, problem))
            elif not isinstance(problem, PrefixdError):  # a session that is over: it was released
                raise
        else:
            if kind != "give_back":
                self._send(pb.LocalResponse(**{kind: answer}))

    async def _answer(self, request: pb.LocalRequest) -> None:
        """Raises PrefixdError where nothing that follows can be understood any more."""
        if self._waits_for_nothing(request):
            self._answer_now(request)
            return
        self._call.traceparent = request.traceparent
        kind = request.WhichOneof("kind")
        match kind:
            case "hand_over":
                self._hand_over(request.hand_over)
            case "save_staged":
                await self._save_staged(request.save_staged)
            case None:
                raise MalformedMessage("a request of no kind that this daemon knows")
            case _:
                try:
                    asked = getattr(request, kind)
                    answer = await self._server.methods[kind](asked, self._call)
                except Exception as problem:
                    self._send(failure_of(kind, problem))
                else:
                    self._send(pb.LocalResponse(**{kind: answer}))

    async def _save_staged(self, first: pb.SaveStagedRequest) -> None:
        try:
            await self._server.save_staged(first, self, self._call, self._tell_saved)
        except Exception as problem:
            self._send(failure_of("save_staged", problem))
            # What else was sent of this save would be taken for a new one.
            raise LimitReached("a staged save ended early") from None

    # `saves.StagedRequests`

    def take_staged(self) -> pb.SaveStagedRequest | None:
        request = self._take_next()
        return None if request is None else staged_of(request)

    async def wait_staged(self) -> pb.SaveStagedRequest:
        return staged_of(await self._next())

    def _hand_over(self, request: pb.HandOverRequest) -> None:
        if self._transport.get_write_buffer_size():
            raise LimitReached("answers have to be read before a hand-over")
        try:
            membership = self._server.sessions.prove(request.session, self._call)
            package = self._server.hand_over.pack(membership, request.wanted)
        except PrefixdError as problem:
            self._send(failure_of("hand_over", problem))
            return
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
            self._call.done(gone=True)
            return
        self._transport.write(frame(response))

    def _fail(self, problem: Exception) -> None:
        """Say why, and hang up."""
        log.warning("local_connection_ended", why=str(problem))
        if isinstance(problem, PrefixdError):
            self._send(failure_of("local", problem))
        self._transport.close()
        # `close` waits until the client has read the answer.
        self._loop.call_later(_PATIENCE_S, self._transport.abort)
