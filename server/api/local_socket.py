"""The local socket: calls of clients on this host, without gRPC between (proto.frames).

The calls are those of `service` and `saves`. The kernel tells which process connects: another
user's is refused. What a connection may occupy of the daemon's memory is bounded: the socket is
not read while its requests or its answers wait.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

from ...proto import prefixd_pb2 as pb
from ...proto.errors import CallerError, InvalidSize, LimitReached, MalformedMessage, PrefixdError
from ...proto.frames import LOCAL_SMALL_REQUEST_BYTES, Frames, frame
from ..core.shares import Holder
from ..runtime.limited_log import LimitedLog
from .calls import Process, failure_of
from .connections import Connection, Connections, HangUpWatch, Turn
from .hand_over import Handoff
from .lent_saves import LentSaves
from .messages import parse
from .saves import Saves
from .service import CacheService
from .unix_sockets import UnixSocket

log = LimitedLog("prefixd.local")

_BACKLOG: Final = 128
#: How long a connection without a session may send no request before it is closed, and how long a
#: connection that is being closed gives its client to read why.
_PATIENCE_S: Final = 5.0
#: Requests of one connection that may wait behind the one that is being answered, at most, and
#: their bytes, which one more request may exceed.
_MAX_AHEAD: Final = 64
_MAX_AHEAD_BYTES: Final = 64 * 2**10
_RECEIVE_BYTES: Final = 64 * 2**10


class LocalServer(Connections["_Connection"]):
    """Listens on `ServiceConfig.local_socket`; `start` and `close` belong to the event loop."""

    def __init__(self, service: CacheService, saves: Saves, hand_over: Handoff) -> None:
        super().__init__(service, saves, service.config.max_connections)
        self.socket: Final = UnixSocket("server.address", Path(self.config.local_socket), 0o600)
        self.save_staged = saves.save_staged
        self.hand_over: Final = hand_over
        self.lent: Final = LentSaves(saves)
        self.methods["save_lent"] = self.lent.save
        #: Bytes of all requests that are not answered yet, complete or not.
        self.buffered_bytes = 0
        #: The buffer that the kernel fills, for one connection after the other.
        self.received: Final = memoryview(bytearray(_RECEIVE_BYTES))
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen; again if the socket is gone, for new connections: open ones stay. The
        daemon holds the lock of the socket. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(listening.bind)
        except OSError:
            listening.close()
            raise
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Connection(self), sock=listening, backlog=_BACKLOG
        )

    async def close(self) -> None:
        """Refuse new connections and end the open ones."""
        self.socket.remove()
        if self._server is not None:
            self._server.close()
        await self.hang_up_all()


class _Connection(Connection, asyncio.BufferedProtocol):
    """One client's connection: its requests, in order, one at a time."""

    _server: LocalServer

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server)
        self._stall_s = server.config.stall_timeout_s
        self._frames = Frames(lambda raw: parse(pb.LocalRequest, raw))
        #: Requests that wait to be answered, each with its size on the wire.
        self._requests: deque[tuple[pb.LocalRequest, int]] = deque()
        self._ahead_bytes = 0
        self._turn = Turn(self._loop, self._take_frames)
        #: This connection's part of the server's `buffered_bytes`.
        self._counted_bytes = 0
        self._answering_bytes = 0
        #: Set while a large request waits for memory or has it; done once it gives it back.
        self._large: asyncio.Future[None] | None = None
        #: Whether the large request has its memory, and may be parsed.
        self._large_admitted = False
        self._admitting: asyncio.Task[None] | None = None
        #: Whether the next request is a large one that has to wait.
        self._held_up = False
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]
        self._timer: asyncio.TimerHandle | None = None
        #: Checks whether the client is still there while the socket is not read.
        self._paused = HangUpWatch(self._loop)
        #: Whether the last request of the current staged save has come.
        self._staged_over = True
        #: Whether something else came in its place.
        self._out_of_step = False
        self._waiter: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # ---- what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        self.process = Process.behind(transport.get_extra_info("socket"))
        crowded = len(server.connections) >= server.max_connections
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
        self._leave()
        self._task.cancel()
        if self._admitting is not None:
            self._admitting.cancel()
        self._requests.clear()
        self._frames.clear()
        self._ahead_bytes = self._answering_bytes = 0
        self._count()
        # The kernel reports a client that closed with an unread answer (ECONNRESET). Any other
        # client has read it, and keeps its claim: it may have views of the entries.
        self._call.done(gone=exc is not None)
        left = {task for task in (self._task, self._admitting) if task is not None}

        def ended(task: asyncio.Task[None]) -> None:
            left.discard(task)
            if not left:
                # asyncio's transport keeps a method of its own in an attribute.
                vars(self._transport).pop("_read_ready_cb", None)
                self._let_go("_turn", "_task", "_admitting")

        for task in list(left):
            task.add_done_callback(ended)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def hang_up(self) -> asyncio.Task[None]:
        self._transport.abort()
        self._task.cancel()
        return self._task

    def attach(self, session: int) -> None:
        if self._session is not None:
            return
        try:
            self._join(session, self._server.sessions.access_of(session))
        except LimitReached:
            self._server.refusals += 1
            raise
        self._watch()

    def session_ended(self) -> None:
        self._leave()
        self._watch()

    # ---- taking requests

    def _take_frames(self) -> None:
        """Parse received bytes while more requests may wait, and decide whether to read on."""
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
        """Parse as many requests as may wait. Returns whether any request waits now."""
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
                self._large_admitted = False  # the next large one waits until this is answered
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
        with suppress(PrefixdError):  # the requests that follow fail with the same error
            self._server.sessions.prove(ref, self._call)

    def _admitted(self, size_bytes: int) -> bool:
        """Whether a large request has its memory. Begins to wait for it. Raises InvalidSize."""
        if self._session is None:
            raise InvalidSize(
                f"a request of {size_bytes} bytes on a connection of no session, which takes "
                f"{LOCAL_SMALL_REQUEST_BYTES}; attach it first"
            )
        if self._large is None:
            self._large = self._loop.create_future()
            self._large_admitted = False
            self._admitting = self._loop.create_task(
                self._hold_room(size_bytes, self.holder, self._large)
            )
        return self._large_admitted

    async def _hold_room(self, size_bytes: int, holder: Holder, over: asyncio.Future[None]) -> None:
        """Reserve memory for a large request, until `over` is done."""
        try:
            async with self._server.large.room(size_bytes, holder):
                self._large_admitted = True
                self._take_frames()
                await over
        except PrefixdError as problem:
            self._fail(problem)

    def _count(self) -> None:
        """Update the server's `buffered_bytes`."""
        held_bytes = self._frames.buffered_bytes + self._ahead_bytes + self._answering_bytes
        self._server.buffered_bytes += held_bytes - self._counted_bytes
        self._counted_bytes = held_bytes

    def _read_on(self) -> None:
        """Read the socket unless too many requests wait: of this connection, or of all connections
        together when this one has any."""
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
        """Abort the connection later, if the client owes a request or the rest of one."""
        self._unwatch()
        if self._answering_bytes or self._requests:
            return  # calls have time limits of their own
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
                await self._answer(request)
        except asyncio.CancelledError:
            return  # raised, its traceback would keep the answered request alive
        except Exception as problem:
            self._fail(problem)

    async def _next(self) -> pb.LocalRequest:
        """The next request, once the client has read most of its answers. Raises LimitReached when
        it does not."""
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
        """The next request, if one waits and the client reads its answers."""
        self._release()
        return self._pop() if self._requests and self._writable.is_set() else None

    def _pop(self) -> pb.LocalRequest:
        request, size_bytes = self._requests.popleft()
        self._ahead_bytes -= size_bytes
        self._answering_bytes = size_bytes
        self._take_frames()
        return request

    def _release(self) -> None:
        """The current request is answered, or needs no more memory: make room for others."""
        if self._large is not None and self._answering_bytes > LOCAL_SMALL_REQUEST_BYTES:
            self._large.set_result(None)
            self._large = None
        self._answering_bytes = 0
        self._take_frames()

    def _answer_at_once(self) -> None:
        """Answer requests that wait for nothing, while the task is idle."""
        while self._requests and self._writable.is_set():
            request, size_bytes = self._requests[0]
            # The task has to give back the memory of a large request.
            if size_bytes > LOCAL_SMALL_REQUEST_BYTES or not self._waits_for_nothing(request):
                return
            self._requests.popleft()
            self._ahead_bytes -= size_bytes
            self._answer_now(request)

    def _answer_now(self, request: pb.LocalRequest) -> None:
        response = self._answer_to(request, pb.LocalResponse)
        if response is not None:
            self._send(response)

    async def _answer(self, request: pb.LocalRequest) -> None:
        """Raises PrefixdError when the daemon could not understand another request."""
        if self._waits_for_nothing(request):
            self._answer_now(request)
            return
        call = self._begin_call(request)
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
                    answer = await self._server.methods[kind](getattr(request, kind), call)
                except Exception as problem:
                    self._send(_failed(kind, problem))
                else:
                    self._send(pb.LocalResponse(**{kind: answer}))

    async def _save_staged(self, first: pb.SaveStagedRequest) -> None:
        self._staged_over = first.last
        try:
            await self._server.save_staged(first, self, self._call, self._tell_saved)
        except Exception as problem:
            self._send(_failed("save_staged", problem))
            if self._out_of_step:
                raise LimitReached("a staged save ended early") from None
            await self._drop_staged()

    async def _drop_staged(self) -> None:
        """Drop the rest of a save that failed, which would be taken for a new one. Raises
        PrefixdError when it does not come, or something else does."""
        try:
            async with asyncio.timeout(self._stall_s):
                while not self._staged_over:
                    await self.wait_staged()
        except TimeoutError:
            raise LimitReached(f"the rest of a save did not come for {self._stall_s:g} s") from None

    # `saves.StagedRequests`

    def take_staged(self) -> pb.SaveStagedRequest | None:
        request = self._take_next()
        return None if request is None else self._staged(request)

    async def wait_staged(self) -> pb.SaveStagedRequest:
        return self._staged(await self._next())

    def _staged(self, request: pb.LocalRequest) -> pb.SaveStagedRequest:
        """The next part of a staged save. Raises MalformedMessage for anything else."""
        if request.WhichOneof("kind") != "save_staged":
            self._out_of_step = True
            raise MalformedMessage("another request came before the end of a staged save")
        self._staged_over = request.save_staged.last
        return request.save_staged

    def _hand_over(self, request: pb.HandOverRequest) -> None:
        if self._transport.get_write_buffer_size():
            raise LimitReached("answers have to be read before a hand-over")
        try:
            membership = self._server.sessions.prove(request.session, self._call)
            package = self._server.hand_over.pack(membership, request.wanted)
        except PrefixdError as problem:
            self._send(_failed("hand_over", problem))
            return
        try:
            # A duplicate, because asyncio forbids sending on the socket of a transport.
            with self._transport.get_extra_info("socket").dup() as own:
                response = frame(pb.LocalResponse(hand_over=package.response))
                socket.send_fds(own, [response], package.fds)
        finally:
            package.close()

    def _tell_saved(self, response: pb.SaveStagedResponse) -> None:
        self._send(pb.LocalResponse(save_staged=response))

    def _send(self, response: pb.LocalResponse) -> None:
        if self._transport.is_closing():  # it would drop the answer silently
            self._call.done(gone=True)
            return
        self._transport.write(frame(response))

    def _fail(self, problem: Exception) -> None:
        """Tell the client why, and hang up."""
        log.warning("local_connection_ended", why=str(problem))
        if isinstance(problem, PrefixdError):
            self._send(_failed("local", problem))
        self._transport.close()
        # `close` waits until the client has read the answer; this client may never do so.
        self._loop.call_later(_PATIENCE_S, self._transport.abort)


def _failed(kind: str, problem: Exception) -> pb.LocalResponse:
    return pb.LocalResponse(failure=failure_of(kind, problem))
