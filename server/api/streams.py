"""Connections of the data socket as bytes: accepted, plain or under TLS, and never blocking.

A call that can't go on raises BlockingIOError, and `lacks` says what it waits for. Under TLS that
may be either direction, whichever way the bytes go.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from ...proto import frames

T = TypeVar("T")

_BACKLOG: Final = 128
#: What one call moves at most under TLS: it is checksummed while it is in the cache.
_TURN_BYTES: Final = 256 * 2**10
#: What is in one record of TLS, at most.
_RECORD_BYTES: Final = 16 * 2**10


class Stream:
    """A connection without TLS."""

    def __init__(self, sock: socket.socket) -> None:
        """Owns `sock`."""
        sock.setblocking(False)
        self._sock = sock
        #: `select.POLLIN` or `select.POLLOUT`: what the last call did without
        self.lacks = select.POLLIN

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, buffers: Iterable[memoryview | bytes]) -> int:
        """Send as much as goes now. After a BlockingIOError the same bytes come first again.
        Raises BlockingIOError, OSError."""
        try:
            return self._sock.sendmsg(buffers)
        except BlockingIOError:
            self.lacks = select.POLLOUT
            raise

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, which are not empty, as far as bytes are there; 0: the client has hung
        up. Raises BlockingIOError, OSError."""
        try:
            return self._sock.recvmsg_into(buffers)[0]
        except BlockingIOError:
            self.lacks = select.POLLIN
            raise

    def wait(self, within_ms: int) -> bool:
        """Does it go on within this time? A socket that broke counts: the next call says how."""
        if not within_ms:
            return False
        waiting = select.poll()
        waiting.register(self._sock, self.lacks)
        return bool(waiting.poll(within_ms))

    def gone(self) -> bool | None:
        """Has the client hung up? None: it has not, and has sent something instead. Takes nothing
        of that."""
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
    """Under TLS. Nothing is sent or received before the handshake."""

    _sock: ssl.SSLSocket

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Owns `sock`, once it is made. Raises OSError."""
        super().__init__(sock)
        self._sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self) -> None:
        """Go on with the handshake; returns when it is over. Takes milliseconds of a processor, so
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
    """What goes into one record each: small buffers together, large ones in parts. Of the same
    buffers always the same, as what was refused has to be offered again."""
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


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for what a thread does, however often the call is cancelled meanwhile: it uses a stream,
    which is not closed under its hands."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as again:
            cancelled = again
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # nobody wants to know any more
        raise cancelled
    return future.result()


class Handshakes:
    """The handshakes of all connections: on one thread, a step at a time, so that one that stalls
    waits nowhere, and the event loop and the threads that copy never do."""

    def __init__(self, context: ssl.SSLContext) -> None:
        #: for connections that are accepted from now on
        self.context = context
        self._thread: Final = ThreadPoolExecutor(1, "prefixd-tls")

    async def step(self, stream: SecuredStream) -> None:
        """Call `SecuredStream.shake_hands` on the thread; not at all if cancelled before."""
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
        # What is accepted inherits them: bytes in flight are bounded, and the kernel's own.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, frames.SOCKET_BYTES)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, frames.SOCKET_BYTES)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def accepted(sock: socket.socket, stall_timeout_s: float, handshakes: Handshakes | None) -> Stream:
    """What a listening socket gave. Raises OSError when its client is gone already."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer that is gone, or takes nothing, is not waited for without end, answered or not.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stall_ms = max(1, round(stall_timeout_s * 1e3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    return Stream(sock) if handshakes is None else SecuredStream(sock, handshakes.context)
