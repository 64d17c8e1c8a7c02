"""A connection that speaks the framed protocol (proto.frames), over TCP or a Unix socket: small
calls, and payloads that are sent from, and received into, the caller's memory without a copy in
between.

The sockets block, and the kernel watches the deadline, so a payload of any size takes few system
calls.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    MalformedMessage,
    PrefixdError,
    from_name,
)
from ...proto.payload import FlatBytes, crc32c, views_of
from .greenlets import sockets_switch
from .reach import connect
from .security import Security
from .trace_context import TRACEPARENT
from .transport import Sink

#: Size of the buffer that messages, and perhaps the bytes behind them, are received into.
_AHEAD_BYTES: Final = 16 * 2**10
#: Received or sent between two checks of the deadline, and checksummed while in the CPU cache.
_PIECE_BYTES: Final = 2**20
#: Sends of so few bytes are tried without waiting first.
_SMALL_BYTES: Final = 16 * 2**10
#: Buffers that one system call takes.
_GATHER: Final = 64
_KEEPALIVE_S: Final = 30
_TIMEVAL: Final = struct.Struct("ll")
#: The beginning of the kernel's `struct tcp_info`, up to and with `tcpi_min_rtt`.
_TCP_INFO_BYTES: Final = 152
_MIN_RTT: Final = struct.Struct("I")
#: The kernel's own timeout of a socket, in parts of the time that is left. It comes early, because
#: Linux lets it end up to an eighth late (its timer wheel: 32 ms of 300); the rest is waited for to
#: the millisecond. It is set anew only where the one of an earlier call is too short or too long.
_TIMEOUT: Final = 0.8
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 0.5, 0.875
_LEAST_TIMEOUT_S: Final = 0.001
#: Most that one TLS record carries.
_RECORD_BYTES: Final = 16 * 2**10


T = TypeVar("T")


class NoConnection(OSError):
    """No connection could be made, and no request was sent."""


class Wire:
    """A socket that blocks until a deadline, which the kernel watches."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`, which is connected."""
        self._socket = sock
        self._socket.settimeout(None)
        #: The timeout that the kernel has, by direction.
        self._timeouts_s = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}

    def send(self, buffers: Sequence[memoryview], until_s: float) -> int:
        """Send some of the bytes; returns how many. `until_s`: on the monotonic clock. Raises
        TimeoutError at the deadline, OSError."""
        send = self._socket.sendmsg
        if len(buffers) == 1 and len(buffers[0]) <= _SMALL_BYTES:
            try:  # nearly always there is room, and no timeout need be set
                return send(buffers, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
        return self._by(until_s, socket.SO_SNDTIMEO, lambda flags: send(buffers, (), flags))

    def receive(self, room: memoryview, until_s: float, *, whole: bool) -> int:
        """Receive into `room`; returns how many bytes. `whole`: wait until it is full, if possible.
        0: the other side has closed the connection. Raises as `send` does."""
        receive = partial(self._socket.recv_into, room, len(room))
        return self._by(until_s, socket.SO_RCVTIMEO, receive, socket.MSG_WAITALL if whole else 0)

    def receive_with(self, most_bytes: int, until_s: float) -> tuple[bytes, list[int]]:
        """Receive some bytes, and the descriptors that come with the first of them, which the
        caller then owns. Raises as `send` does."""
        receive = partial(socket.recv_fds, self._socket, most_bytes, frames.MAX_DESCRIPTORS)
        data, fds, _, _ = self._by(until_s, socket.SO_RCVTIMEO, receive)
        for fd in fds:
            os.set_inheritable(fd, False)  # Python 3.11 does not pass on MSG_CMSG_CLOEXEC
        return data, fds

    def _by(self, until_s: float, direction: int, call: Callable[[int], T], flags: int = 0) -> T:
        """The result of a call of the socket, which takes flags. Raises TimeoutError, OSError."""
        self._set_timeout(direction, until_s)
        try:
            return call(flags)
        except BlockingIOError:
            pass  # the kernel's timeout, which is the earlier one
        poll = select.poll()
        poll.register(
            self._socket, select.POLLIN if direction == socket.SO_RCVTIMEO else select.POLLOUT
        )
        while True:
            poll.poll(_left_s(until_s) * 1e3)
            with suppress(BlockingIOError):
                return call(socket.MSG_DONTWAIT)

    def _set_timeout(self, direction: int, until_s: float) -> None:
        left_s = _left_s(until_s)
        shortest_s, longest_s = _SHORTEST_TIMEOUT * left_s, _LONGEST_TIMEOUT * left_s
        if shortest_s <= self._timeouts_s[direction] <= longest_s:
            return
        timeout_s = self._timeouts_s[direction] = max(_TIMEOUT * left_s, _LEAST_TIMEOUT_S)
        packed = _TIMEVAL.pack(*divmod(int(timeout_s * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, direction, packed)

    @property
    def round_trip_s(self) -> float:
        """The shortest round trip that the kernel has seen; 0: it does not know."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:
            return 0.0
        shortest_us: int = _MIN_RTT.unpack_from(info, _TCP_INFO_BYTES - _MIN_RTT.size)[0]
        return shortest_us / 1e6

    def shut_down(self) -> None:
        """Make the call in progress fail. Callable from another thread."""
        with suppress(OSError):
            # Not `SSLSocket.shutdown`, which drops the TLS layer: the rest would go in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TimedWire(Wire):
    """A socket whose deadline Python watches: one under TLS, or one that gevent has replaced. It
    sends and receives one TLS record of at most 16 KiB at a time."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`, whose handshake is done."""
        self._socket = sock

    def send(self, buffers: Sequence[memoryview], until_s: float) -> int:
        first, sent_bytes = buffers[0], 0
        if len(first) >= _RECORD_BYTES or len(buffers) == 1:
            while sent_bytes < len(first):
                self._socket.settimeout(_left_s(until_s))
                sent_bytes += self._socket.send(first[sent_bytes:])
            return sent_bytes
        self._socket.settimeout(_left_s(until_s))
        record = bytearray()
        for buffer in buffers:
            record += buffer[: _RECORD_BYTES - len(record)]
        return self._socket.send(record)

    def _set_timeout(self, direction: int, until_s: float) -> None:  # noqa: ARG002  # it has one
        self._socket.settimeout(_left_s(until_s))

    def receive(self, room: memoryview, until_s: float, *, whole: bool) -> int:
        received_bytes = 0
        while True:
            self._socket.settimeout(_left_s(until_s))
            more_bytes = self._socket.recv_into(room[received_bytes:])
            received_bytes += more_bytes
            if not whole or not more_bytes or received_bytes == len(room):
                return received_bytes


class FramedEndpoint(Protocol):
    """Where a daemon speaks the framed protocol."""

    @property
    def local(self) -> bool:
        """Whether the daemon is on this host, so that it can hand over memory."""

    @property
    def again_after_s(self) -> float:
        """After a failed attempt to connect, the next one waits this long."""

    @property
    def secured(self) -> bool:
        """Whether connections are under TLS."""

    def connect(self, within_s: float) -> Wire:
        """Raises OSError when no daemon listens there, or it can't be trusted; ConfigError when a
        file that the client was told to use is wrong."""

    def greeting(self) -> pb.FramedRequest:
        """The first request, which has no response. Contains secrets. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class TcpPlace:
    """The address of a data socket, and what a connection identifies itself with."""

    host: str
    port: int
    session: pb.SessionRef
    #: Its files are read again for each connection, because they may have been replaced.
    security: Security = field(default_factory=Security)

    local = False
    again_after_s = 5.0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def secured(self) -> bool:
        return bool(self.security.ca)

    def connect(self, within_s: float) -> Wire:
        context = self.security.context()
        until_s = time.monotonic() + within_s
        sock = socket.create_connection((self.host, self.port), within_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # So that no firewall drops an idle connection unnoticed.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            if context is None:
                return _wire(sock)
            sock.settimeout(_left_s(until_s))  # for the whole handshake
            return TimedWire(context.wrap_socket(sock, server_hostname=self.host))
        except BaseException:
            sock.close()
            raise

    def greeting(self) -> pb.FramedRequest:
        return pb.FramedRequest(attach=self.session, token=self.security.token())


@dataclass(frozen=True, slots=True)
class UnixPlace:
    """The path of a local socket. A daemon that may not be relied on gets no connection: what it
    hands over is read as it is."""

    path: str
    session: pb.SessionRef

    local = True
    again_after_s = 0.0  # an attempt takes no time
    secured = False

    def __str__(self) -> str:
        return self.path

    def connect(self, within_s: float) -> Wire:
        return _wire(connect(self.path, within_s))

    def greeting(self) -> pb.FramedRequest:
        return pb.FramedRequest(attach=self.session)


def _wire(sock: socket.socket) -> Wire:
    return TimedWire(sock) if sockets_switch() else Wire(sock)


class FramedConnection:
    """One connection. Not thread-safe. Calls raise PrefixdError, also for a failure that the daemon
    reports."""

    def __init__(self, place: FramedEndpoint, timeout_s: float) -> None:
        """Raises what `FramedEndpoint.connect` raises."""
        #: Sent together with the first request.
        self._greeting = frames.frame(place.greeting())
        self._wire = place.connect(timeout_s)
        self._until_s = 0.0
        #: Received bytes that were not read yet: `_ahead[_start:_end]`.
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._end = 0
        #: Under TLS, and nothing was received yet. The daemon checks this side's certificate only
        #: after this side has finished its handshake. A connection that ends before the daemon has
        #: sent anything was refused, and no request was read.
        self._unheard = place.secured
        #: Whether no payload is expected from this side.
        self.in_step = True
        #: Whether any data came for the last request.
        self.moved = False

    def begin(self, request: pb.FramedRequest, timeout_s: float) -> None:
        """Send a request, or the next one of a call that has several. The call has this much time,
        up to its last response."""
        if parent := TRACEPARENT.get():
            request.traceparent = parent
        self._until_s = time.monotonic() + timeout_s
        self.moved = False
        self.in_step = not request.HasField("save_staged") or request.save_staged.last
        greeting, self._greeting = self._greeting, b""
        data = greeting + frames.frame(request)
        try:
            self._send([memoryview(data)])
        except DaemonUnavailable:
            while True:  # until one raises what the daemon said before it hung up
                self.response()

    def attach(self, timeout_s: float) -> None:
        """Prove the session now, and not with the first request. There is no response."""
        self._until_s = time.monotonic() + timeout_s
        greeting, self._greeting = self._greeting, b""
        self._send([memoryview(greeting)])

    def response(self) -> pb.FramedResponse:
        """The next response. Raises NoConnection if the daemon has no place for this connection."""
        self._read_ahead(frames.HEAD.size)
        (size_bytes,) = frames.HEAD.unpack_from(self._ahead, self._start)
        if size_bytes > frames.MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"the daemon announced a message of {size_bytes} bytes")
        self._start += frames.HEAD.size
        if size_bytes <= _AHEAD_BYTES - frames.HEAD.size:
            self._read_ahead(size_bytes)
            message = bytes(self._ahead[self._start : self._start + size_bytes])
            self._start += size_bytes
        else:
            message = self._received(size_bytes)
        response = frames.response_of(message)
        if response.HasField("failure"):
            failure = response.failure
            if failure.refused:
                raise NoConnection(failure.message)
            raise from_name(failure.error, failure.message, retryable=failure.retry)
        return response

    def hand_over(
        self, session: pb.SessionRef, timeout_s: float, names: Sequence[str] = ()
    ) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """Ask a daemon on this host for its descriptors; `names`: of some, or empty for all.

        Returns the descriptors by name, each with its size in bytes, which the caller then owns;
        and what was refused, with the reasons. Raises PrefixdError.
        """
        request = pb.HandOverRequest(session=session, wanted=names)
        self.begin(pb.FramedRequest(hand_over=request), timeout_s)
        fds: list[int] = []
        try:
            try:
                data, fds = self._wire.receive_with(_AHEAD_BYTES, self._until_s)
            except OSError as problem:
                raise self._error_of(problem) from None
            self._start, self._end = 0, len(data)
            self._ahead[: len(data)] = data
            response = self.response().hand_over
            # The kernel drops descriptors beyond the limit of this process.
            if len(response.descriptors) != len(fds):
                raise MalformedMessage(
                    f"{len(fds)} descriptors came instead of {len(response.descriptors)}"
                )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        handed = zip(response.descriptors, fds, strict=True)
        return {each.name: (fd, each.size_bytes) for each, fd in handed}, dict(response.refused)

    def parts(self, count: int, sink: Sink) -> None:
        """Hand `sink` everything that the daemon sends for `count` requested ranges."""
        while True:
            response = self.response()
            if response.HasField("read_end"):
                return
            if not response.HasField("part") or response.part.range >= count:
                raise PrefixdError("the daemon sent a response that was not requested")
            part, self.moved = response.part, True
            if part.status != pb.READ_STATUS_OK:
                sink(part.range, part.offset_bytes, None)
            else:
                for view in views_of(sink.room(part.range, part.offset_bytes, part.length_bytes)):
                    for start in range(0, len(view), _PIECE_BYTES):
                        piece = view[start : start + _PIECE_BYTES]
                        self._receive(piece)
                        sink.filled(part.range, len(piece))

    def payloads(self, payloads: Sequence[FlatBytes]) -> None:
        """Send payloads, each followed by its CRC32C."""
        self.in_step = False
        queue: list[memoryview] = []
        queued_bytes = 0
        for payload in payloads:
            crc = 0
            for view in views_of(payload):
                for start in range(0, len(view), _PIECE_BYTES):
                    piece = view[start : start + _PIECE_BYTES]
                    crc = crc32c(piece, crc)
                    queue.append(piece)
                    queued_bytes += len(piece)
                    if queued_bytes >= _PIECE_BYTES or len(queue) >= _GATHER - 1:
                        self._send(queue)
                        queue, queued_bytes = [], 0
            queue.append(memoryview(frames.CRC.pack(crc)))
        self._send(queue)

    # ---- bytes

    def _send(self, buffers: Sequence[memoryview]) -> None:
        while buffers:
            try:
                sent_bytes = self._wire.send(buffers, self._until_s)
            except OSError as problem:
                raise self._error_of(problem) from None
            if len(buffers) == 1 and sent_bytes == len(buffers[0]):
                return
            rest = []
            for buffer in buffers:
                if len(buffer) > sent_bytes:
                    rest.append(buffer[sent_bytes:])
                sent_bytes = max(0, sent_bytes - len(buffer))
            buffers = rest

    def _read_ahead(self, length_bytes: int) -> None:
        """Receive until at least `length_bytes` unread bytes are in the buffer."""
        unread_bytes = self._end - self._start
        if unread_bytes >= length_bytes:
            return
        if self._start:
            self._ahead[:unread_bytes] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, unread_bytes
        while self._end < length_bytes:
            self._end += self._receive_some(self._ahead[self._end :], whole=False)

    def _received(self, length_bytes: int) -> bytes:
        received = bytearray(length_bytes)
        with memoryview(received) as room:
            self._receive(room)
        return bytes(received)

    def _receive(self, room: memoryview) -> None:
        """Fill `room`."""
        ahead_bytes = min(len(room), self._end - self._start)
        if ahead_bytes:
            room[:ahead_bytes] = self._ahead[self._start : self._start + ahead_bytes]
            self._start += ahead_bytes
            room = room[ahead_bytes:]
        while room:
            room = room[self._receive_some(room, whole=True) :]

    def _receive_some(self, room: memoryview, *, whole: bool) -> int:
        try:
            received_bytes = self._wire.receive(room, self._until_s, whole=whole)
            if not received_bytes:
                raise OSError("the daemon hung up")
        except OSError as problem:
            raise self._error_of(problem) from None
        self._unheard = False
        return received_bytes

    def _error_of(self, problem: OSError) -> Exception:
        """A socket's error as the one that gRPC would have raised."""
        if isinstance(problem, TimeoutError):
            return DeadlineExceeded("the daemon did not answer in time")
        if self._unheard:
            return NoConnection(f"no handshake: {problem}")
        return DaemonUnavailable(f"the connection broke: {problem}")

    @property
    def round_trip_s(self) -> float:
        """Of a connection over TCP: see `Wire.round_trip_s`."""
        return self._wire.round_trip_s

    def shut_down(self) -> None:
        self._wire.shut_down()

    def close(self) -> None:
        self._wire.close()


def _left_s(until_s: float) -> float:
    """Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
