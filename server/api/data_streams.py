"""Connections of the local and the data socket as bytes, plain or under TLS, and as requests and
responses (proto.frames).

Nothing here blocks. A call that can't go on raises BlockingIOError, and `lacks` says what it waits
for. Under TLS that may be either direction, whichever way the bytes go.

What a client sends ahead waits in the kernel, except for one small request's worth of it. A client
that stands still in the middle of a request or of a response is given up after `stall_timeout`.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import ClassVar, Final

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import LimitReached, MalformedMessage
from ..core.shares import Holder
from ..runtime.quota import Pace, Quota
from .calls import Process, to_its_end
from .messages import parse

_HEAD: Final = frames.HEAD
#: Connections that may wait to be accepted.
BACKLOG: Final = 128
#: One call moves at most this much under TLS: its checksum is computed while it is in the cache.
_TURN_BYTES: Final = 256 * 2**10
#: Answers that a client may leave unread before its next request is taken, in bytes.
_UNREAD_BYTES: Final = 64 * 2**10
#: Most bytes in one TLS record.
_RECORD_BYTES: Final = 16 * 2**10


class Stream:
    """A connection without TLS."""

    #: Whether the bytes are also encrypted and decrypted, which takes far longer than to copy them.
    encrypted: ClassVar[bool] = False

    def __init__(self, sock: socket.socket, process: Process | None = None) -> None:
        """Owns `sock`. `process`: the one at the other end of a Unix socket."""
        sock.setblocking(False)
        self._sock = sock
        self.process: Final = process
        #: What the last call that blocked waits for: `select.POLLIN` or `select.POLLOUT`.
        self.lacks = select.POLLIN

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, buffers: Iterable[memoryview | bytes]) -> int:
        """Send as much as the socket takes now. After a BlockingIOError the next call has to begin
        with the same bytes. Raises BlockingIOError, OSError."""
        try:
            return self._sock.sendmsg(buffers)
        except BlockingIOError:
            self.lacks = select.POLLOUT
            raise

    def send_with(self, message: bytes, fds: list[int]) -> int:
        """Send the beginning of a message together with descriptors, to a process on this host;
        returns how many bytes. Raises BlockingIOError, OSError, and then neither was sent."""
        try:
            return socket.send_fds(self._sock, [message], fds)
        except BlockingIOError:
            self.lacks = select.POLLOUT
            raise

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, which are not empty, with the bytes that are there. Returns 0 when the
        client has hung up. Raises BlockingIOError, OSError."""
        try:
            return self._sock.recvmsg_into(buffers)[0]
        except BlockingIOError:
            self.lacks = select.POLLIN
            raise

    def wait(self, within_ms: int) -> bool:
        """Whether the stream can go on within this time. True also for a broken socket: the next
        call raises its error."""
        if not within_ms:
            return False
        poll = select.poll()
        poll.register(self._sock, self.lacks)
        return bool(poll.poll(within_ms))

    def gone(self) -> bool | None:
        """Whether the client has hung up. None: it has sent something, which stays unread."""
        try:
            # Not `self._sock.recv`: an SSLSocket can't peek.
            return None if socket.socket.recv(self._sock, 1, socket.MSG_PEEK) else True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._sock.close()


class SecuredStream(Stream):
    """A connection under TLS. Nothing is sent or received before the handshake."""

    encrypted: ClassVar[bool] = True

    _sock: ssl.SSLSocket

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Owns `sock`, unless this fails. Raises OSError."""
        super().__init__(sock)
        self._sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self) -> None:
        """Go on with the handshake; returns when it is complete. Takes milliseconds of CPU time, so
        it is called on a thread. Raises BlockingIOError, OSError."""
        try:
            self._sock.do_handshake()
        except ssl.SSLError as problem:
            raise self._blocked(problem) from None

    def send(self, buffers: Iterable[memoryview | bytes]) -> int:
        sent_bytes = 0
        for record in _records(buffers):
            try:
                done_bytes = self._sock.send(record)
            except ssl.SSLError as problem:
                error = self._blocked(problem)
                if sent_bytes and isinstance(error, BlockingIOError):
                    break
                raise error from None
            sent_bytes += done_bytes
            if done_bytes < len(record) or sent_bytes >= _TURN_BYTES:
                break
        return sent_bytes

    def receive(self, buffers: Sequence[memoryview]) -> int:
        came_bytes = 0
        for buffer in buffers:
            room = buffer
            while room:
                if came_bytes >= _TURN_BYTES:
                    return came_bytes
                try:
                    more_bytes = self._sock.recv_into(room)
                except ssl.SSLError as problem:
                    error = self._blocked(problem)
                    if came_bytes and isinstance(error, BlockingIOError):
                        return came_bytes
                    raise error from None
                if not more_bytes:
                    return came_bytes
                came_bytes += more_bytes
                room = room[more_bytes:]
        return came_bytes

    def _blocked(self, problem: ssl.SSLError) -> OSError:
        if isinstance(problem, ssl.SSLWantReadError):
            self.lacks = select.POLLIN
        elif isinstance(problem, ssl.SSLWantWriteError):
            self.lacks = select.POLLOUT
        else:
            return problem
        return BlockingIOError()


def _records(buffers: Iterable[memoryview | bytes]) -> Iterable[memoryview | bytes]:
    """Split buffers into TLS records: small ones together, large ones in parts. The same buffers
    always give the same records, because a record that was refused has to be offered again."""
    small = bytearray()
    for buffer in buffers:
        if small and len(small) + len(buffer) > _RECORD_BYTES:
            yield bytes(small)
            small.clear()
        if len(buffer) <= _RECORD_BYTES:
            small += buffer
            continue
        view = memoryview(buffer)
        for start in range(0, len(view), _RECORD_BYTES):
            yield view[start : start + _RECORD_BYTES]
    if small:
        yield bytes(small)


class Handshakes:
    """The handshakes of all connections, a step at a time on one thread. A client that stalls
    occupies no thread, and handshakes delay neither the event loop nor the threads that copy."""

    def __init__(self, context: ssl.SSLContext) -> None:
        #: Certificates of the connections that are accepted from now on.
        self.context = context
        self._thread: Final = ThreadPoolExecutor(1, "prefixd-tls")

    async def step(self, stream: SecuredStream) -> None:
        """Call `SecuredStream.shake_hands` on the thread, unless cancelled before it begins."""
        step = self._thread.submit(stream.shake_hands)
        waiting = asyncio.wrap_future(step)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not step.cancel():
                with suppress(OSError):
                    await to_its_end(waiting)
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def listening_at(host: str, port: int) -> socket.socket:
    """A socket that listens, and does not block. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these: they bound the bytes in flight, which the kernel holds.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, frames.SOCKET_BYTES)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, frames.SOCKET_BYTES)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def accepted(sock: socket.socket, stall_timeout_s: float, handshakes: Handshakes | None) -> Stream:
    """The stream of an accepted socket. Raises OSError when its client is gone already."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The kernel gives up a peer that is gone or takes nothing, whatever the connection does.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stall_ms = max(1, round(stall_timeout_s * 1e3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    return Stream(sock) if handshakes is None else SecuredStream(sock, handshakes.context)


class HungUp(Exception):  # no failure: a client may hang up
    """The client closed its end between two requests."""


class DataFrames:
    """Requests out of a stream, responses into it. Methods that end with `_now` never wait."""

    #: Whose memory large requests count to.
    holder = Holder()

    def __init__(self, stream: Stream, stall_timeout_s: float, quota: Quota) -> None:
        """`quota`: memory for large requests."""
        self.stream: Final = stream
        self._quota = quota
        self._stall_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        #: Received bytes that are not parsed yet lie from `_start` to `_end`.
        self._buffer = memoryview(bytearray(_HEAD.size + frames.SMALL_REQUEST_BYTES))
        self._start = self._end = 0
        #: Whether the last receive filled the buffer: TLS may then hold bytes that no poll reports.
        self.filled = False
        #: The part of the last response that the socket did not take.
        self._unsent = memoryview(b"")
        #: Whether the client would understand a message now. False in the middle of a part.
        self.may_tell = True
        #: Whether the next bytes would be a request. False in the middle of a save.
        self.in_step = True

    # ---- in

    @property
    def ahead_bytes(self) -> int:
        """Received bytes that are not parsed yet."""
        return self._end - self._start

    def receive_now(self) -> None:
        """Receive what is there. Raises BlockingIOError, HungUp, OSError."""
        self._make_room()
        self._came(self._received(self._buffer[self._end :]))

    def next_now(self) -> pb.FramedRequest | None:
        """The next request, if it is small and has arrived whole. Raises MalformedMessage."""
        start = self._start + _HEAD.size
        if start > self._end:
            return None
        end = start + int(_HEAD.unpack_from(self._buffer, self._start)[0])
        if end > self._end:
            return None
        raw = bytes(self._buffer[start:end])
        self._start = end
        return parse(pb.FramedRequest, raw)

    def next_small_now(self) -> pb.FramedRequest | None:
        """The next request, if it is small and has arrived whole, also when it was not received
        yet. None as well while the client leaves many answers unread. Raises MalformedMessage,
        HungUp, OSError."""
        if len(self._unsent) > _UNREAD_BYTES:
            return None
        request = self.next_now()
        if request is None and self.ahead_bytes <= _HEAD.size:
            with suppress(BlockingIOError):
                self.receive_now()
                request = self.next_now()
        return request

    async def head(self) -> int:
        """The length of the next request, however late that begins. Raises HungUp, OSError,
        LimitReached."""
        if not self.ahead_bytes:
            await self._more()
        await self._whole(_HEAD.size)
        return int(_HEAD.unpack_from(self._buffer, self._start)[0])

    async def small(self, size_bytes: int) -> pb.FramedRequest:
        """The next request, of SMALL_REQUEST_BYTES at most, after its `head`. Raises HungUp,
        OSError, LimitReached, MalformedMessage."""
        await self._whole(_HEAD.size + size_bytes)
        request = self.next_now()
        assert request is not None
        return request

    async def next(self, rooms: AsyncExitStack) -> pb.FramedRequest:
        """The next request, of any length. A large one has memory until `rooms` is closed. Raises
        HungUp, OSError, LimitReached, MalformedMessage."""
        if len(self._unsent) > _UNREAD_BYTES:
            await self.flush()
        size_bytes = await self.head()
        if size_bytes <= frames.SMALL_REQUEST_BYTES:
            return await self.small(size_bytes)
        if size_bytes > frames.MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a message of {size_bytes} bytes, {frames.MAX_MESSAGE_BYTES} is the most"
            )
        await rooms.enter_async_context(self._quota.room(size_bytes, self.holder))
        return await self._large(size_bytes)

    async def _large(self, size_bytes: int) -> pb.FramedRequest:
        """The next request, of any length, after its `head`. Raises as `small`."""
        request = bytearray(size_bytes)
        came_bytes = self.ahead_bytes - _HEAD.size
        request[:came_bytes] = self._buffer[self._start + _HEAD.size : self._end]
        self._start = self._end = 0
        pace = Pace(self._stall_s)
        with memoryview(request) as room:
            while came_bytes < size_bytes:
                with pace.waiting() as left_s:
                    async with asyncio.timeout(left_s):
                        more_bytes = await self._receive(room[came_bytes:])
                came_bytes += more_bytes
                pace.moved(more_bytes)
        return parse(pb.FramedRequest, bytes(request))

    async def _whole(self, size_bytes: int) -> None:
        """Wait until so many bytes of the next request are there. Raises HungUp, OSError,
        LimitReached."""
        if self.ahead_bytes < size_bytes:
            try:
                async with asyncio.timeout(self._stall_s):
                    while self.ahead_bytes < size_bytes:
                        await self._more()
            except TimeoutError:
                raise LimitReached(f"the client stood still for {self._stall_s:g} s") from None

    async def _more(self) -> None:
        self._make_room()
        self._came(await self._receive(self._buffer[self._end :]))

    def _came(self, came_bytes: int) -> None:
        self._end += came_bytes
        self.filled = self._end == len(self._buffer)

    def _make_room(self) -> None:
        """Move the bytes to the front of the buffer, so that a whole small request fits."""
        if self._start:
            left_bytes = self.ahead_bytes
            if left_bytes:
                self._buffer[:left_bytes] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, left_bytes

    async def _receive(self, room: memoryview) -> int:
        """Wait for bytes, however long that takes. Raises HungUp, OSError."""
        while True:
            with suppress(BlockingIOError):
                return self._received(room)
            await self.ready()

    def _received(self, room: memoryview) -> int:
        came_bytes = self.stream.receive([room])
        if not came_bytes:
            raise HungUp
        return came_bytes

    # ---- out

    def tell_now(self, response: pb.FramedResponse) -> bool:
        """Send as much of a response as the socket takes. False: the rest has to be flushed before
        anything else. Raises OSError."""
        rest = memoryview(frames.frame(response))
        with suppress(BlockingIOError):
            rest = rest[self.stream.send([rest]) :]
        self._unsent = rest
        self.may_tell = not rest
        return self.may_tell

    async def tell(self, response: pb.FramedResponse) -> None:
        """Send a response. Raises OSError, LimitReached."""
        if not self.tell_now(response):
            await self.flush()

    async def tell_with(self, response: pb.FramedResponse, fds: list[int]) -> None:
        """Send a response together with descriptors. Raises OSError, LimitReached."""
        await self.flush()
        data = frames.frame(response)
        while True:
            with suppress(BlockingIOError):
                self._unsent = memoryview(data)[self.stream.send_with(data, fds) :]
                break
            await self.until_ready()
        await self.flush()

    def tell_soon(self, response: pb.FramedResponse) -> None:
        """Send a response behind those that the socket has not taken yet. Never waits: what is
        left goes as soon as the socket takes it, also while the next request is awaited. Raises
        OSError."""
        if not self._unsent:
            if self.tell_now(response):
                return
            self._loop.add_writer(self.stream.fileno(), self._send_some)
        else:
            self._unsent = memoryview(bytes(self._unsent) + frames.frame(response))

    def _send_some(self) -> None:
        try:
            self._unsent = self._unsent[self.stream.send([self._unsent]) :]
        except BlockingIOError:
            return
        except OSError:
            self._loop.remove_writer(self.stream.fileno())  # the next call raises it
        if not self._unsent:
            self._loop.remove_writer(self.stream.fileno())
            self.may_tell = True

    async def flush(self) -> None:
        """Send what is left of the last responses. Raises OSError, LimitReached."""
        while self._unsent:
            await self.until_ready()
            with suppress(BlockingIOError):
                self._unsent = self._unsent[self.stream.send([self._unsent]) :]
        self.may_tell = True

    # ---- waiting

    def pace(self) -> Pace:
        """That of a transfer which begins now."""
        return Pace(self._stall_s)

    async def until_ready(self, pace: Pace | None = None) -> None:
        """Wait until the stream can go on. Raises LimitReached when the client reads or sends
        nothing for too long, or, in a transfer with a `pace`, too little."""
        with (self.pace() if pace is None else pace).waiting() as left_s:
            async with asyncio.timeout(left_s):
                await self.ready()

    async def ready(self) -> None:
        """Wait until the stream can go on, however long that takes."""
        loop, fd = self._loop, self.stream.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        reading = self.stream.lacks == select.POLLIN
        (loop.add_reader if reading else loop.add_writer)(fd, _set, ready)
        try:
            await ready
        finally:
            (loop.remove_reader if reading else loop.remove_writer)(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
