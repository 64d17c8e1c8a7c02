"""The data socket of a daemon on another host (proto.frames): small calls, and payloads that are
sent from, and received into, the caller's memory without a copy in between.

When a call breaks off, its connection is closed, and the daemon gives back what it granted. The
sockets block, and the kernel watches the deadline, so a payload of any size takes few system calls.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    ClaimLost,
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    MalformedMessage,
    PrefixdError,
    StaleIncarnation,
    UnknownSession,
    from_name,
)
from ...proto.payload import FlatBytes, crc32c, views_of
from ..counters import Counters
from .connection import Calls
from .deadline import woken
from .pool import CONNECT_S, ConnectionPool, NoConnection
from .security import Security
from .sinks import Rooms, Sink
from .trace_context import TRACEPARENT

logger = logging.getLogger("prefixd.client")
T = TypeVar("T")

#: After a failed attempt to connect, the next one waits this long.
_AGAIN_AFTER_S: Final = 5.0
#: Size of the buffer that messages, and perhaps the bytes behind them, are received into.
_AHEAD_BYTES: Final = 16 * 2**10
#: Received or sent between two checks of the deadline, and checksummed while in the CPU cache.
_PIECE_BYTES: Final = 2**20
#: Buffers that one system call takes.
_GATHER: Final = 64
_KEEPALIVE_S: Final = 30
_TIMEVAL: Final = struct.Struct("ll")
#: The kernel may wait this much longer than the deadline allows, so that its timeout need not be
#: set again for each call.
_SLACK_S: Final = 0.01
#: Most that one TLS record carries.
_RECORD_BYTES: Final = 16 * 2**10


class Place(NamedTuple):
    """The address of a data socket, and what a connection identifies itself with."""

    host: str
    port: int
    session: pb.SessionRef
    #: Its files are read again for each connection, because they may have been replaced.
    security: Security = Security()

    def greeting(self) -> pb.DataRequest:
        """The first request, which has no response. Contains secrets. Raises ConfigError."""
        return pb.DataRequest(attach=self.session, token=self.security.token())


class Wire:
    """A plain TCP socket that blocks until a deadline, which the kernel watches."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`, which is connected."""
        self._socket = sock
        self._socket.settimeout(None)
        #: The timeout that the kernel has, by direction.
        self._timeouts_s = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}

    def send(self, buffers: Sequence[memoryview], until_s: float) -> int:
        """Send some of the bytes; returns how many. `until_s`: on the monotonic clock. Raises
        TimeoutError or BlockingIOError at the deadline, OSError."""
        self._set_timeout(socket.SO_SNDTIMEO, until_s)
        return self._socket.sendmsg(buffers)

    def receive(self, room: memoryview, until_s: float, *, whole: bool) -> int:
        """Receive into `room`; returns how many bytes. `whole`: wait until it is full, if possible.
        0: the other side has closed the connection. Raises as `send` does."""
        self._set_timeout(socket.SO_RCVTIMEO, until_s)
        return self._socket.recv_into(room, len(room), socket.MSG_WAITALL if whole else 0)

    def _set_timeout(self, direction: int, until_s: float) -> None:
        left_s = _left_s(until_s)
        if left_s <= self._timeouts_s[direction] <= left_s + _SLACK_S:
            return
        timeout_s = self._timeouts_s[direction] = left_s + _SLACK_S / 2
        packed = _TIMEVAL.pack(*divmod(int(timeout_s * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, direction, packed)

    def shut_down(self) -> None:
        """Make the call in progress fail. Callable from another thread."""
        with suppress(OSError):
            # Not `SSLSocket.shutdown`, which drops the TLS layer: the rest would go in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class SecuredWire(Wire):
    """A TLS socket. It sends and receives one record of at most 16 KiB at a time."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
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

    def receive(self, room: memoryview, until_s: float, *, whole: bool) -> int:
        received_bytes = 0
        while True:
            self._socket.settimeout(_left_s(until_s))
            more_bytes = self._socket.recv_into(room[received_bytes:])
            received_bytes += more_bytes
            if not whole or not more_bytes or received_bytes == len(room):
                return received_bytes


def _connected(place: Place, within_s: float) -> Wire:
    """Connect, under TLS if `place` asks for it. Raises OSError, ConfigError."""
    context = place.security.context()
    until_s = time.monotonic() + within_s
    sock = socket.create_connection((place.host, place.port), within_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # So that no firewall drops an idle connection unnoticed.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        if context is None:
            return Wire(sock)
        sock.settimeout(_left_s(until_s))  # for the whole handshake
        return SecuredWire(context.wrap_socket(sock, server_hostname=place.host))
    except BaseException:
        sock.close()
        raise


class DataConnection:
    """One connection. Not thread-safe. Calls raise PrefixdError, also for a failure that the daemon
    reports."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        """Raises OSError when no daemon listens there, or it can't be trusted; ConfigError when a
        file named in `place.security` is wrong."""
        #: Sent together with the first request.
        self._greeting = frames.frame(place.greeting())
        self._wire = _connected(place, timeout_s)
        self._until_s = 0.0
        #: Received bytes that were not read yet: `_ahead[_start:_end]`.
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._end = 0
        #: Under TLS, and nothing was received yet. The daemon checks this side's certificate only
        #: after this side has finished its handshake. A connection that ends before the daemon has
        #: sent anything was refused, and no request was read.
        self._unheard = bool(place.security.ca)
        #: Whether no payload is expected from this side.
        self.in_step = True
        #: Whether any data came for the last request.
        self.moved = False

    def begin(self, request: pb.DataRequest, timeout_s: float) -> None:
        """Send a request. The call has this much time, up to its last response."""
        if parent := TRACEPARENT.get():
            request.traceparent = parent
        self._until_s = time.monotonic() + timeout_s
        self.moved, self.in_step = False, True
        greeting, self._greeting = self._greeting, b""
        self._send([memoryview(greeting + frames.frame(request))])

    def response(self) -> pb.DataResponse:
        """The next response."""
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
            raise from_name(failure.error, failure.message, retryable=failure.retry)
        return response

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
            elif not isinstance(sink, Rooms):
                if part.length_bytes > frames.PART_BYTES:
                    raise PrefixdError(f"the daemon sent {part.length_bytes} bytes at once")
                sink(part.range, part.offset_bytes, self._received(part.length_bytes))
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
        if isinstance(problem, TimeoutError | BlockingIOError):
            return DeadlineExceeded("the daemon did not answer in time")
        if self._unheard:
            return NoConnection(f"no handshake: {problem}")
        return DaemonUnavailable(f"the data connection broke: {problem}")

    def shut_down(self) -> None:
        self._wire.shut_down()

    def close(self) -> None:
        self._wire.close()


class DataCalls(ConnectionPool[DataConnection]):
    """Small calls and transfers of payloads over the data socket. Thread-safe.

    The transfers raise PrefixdError; NoConnection when nothing was sent, so that the call can go
    over gRPC.
    """

    def __init__(self, place: Place, fallback: Calls, counters: Counters) -> None:
        """`counters`: count the calls that go over `fallback`."""
        super().__init__(fallback)
        self._place = place
        self._counters = counters
        #: No attempt to connect before this moment, on the monotonic clock.
        self._not_before_s = 0.0

    def _connect(self, timeout_s: float) -> DataConnection:
        if time.monotonic() < self._not_before_s:
            self._counters.add("data_fallbacks")
            raise NoConnection("the daemon took no connection a moment ago")
        try:
            # Half of the time is left for gRPC.
            return DataConnection(self._place, min(timeout_s / 2, CONNECT_S))
        except (OSError, ConfigError) as problem:
            self._refused(str(problem))
            raise NoConnection(str(problem)) from None

    def _refused(self, why: str) -> None:
        self._counters.add("data_fallbacks")
        if time.monotonic() >= self._not_before_s:
            host, port = self._place.host, self._place.port
            logger.warning("no data connection with %s:%d: %s; over gRPC instead", host, port, why)
        self._not_before_s = time.monotonic() + _AGAIN_AFTER_S

    def _send(self, connection: DataConnection, kind: str, request: Any, timeout_s: float) -> None:
        connection.begin(pb.DataRequest(**{kind: request}), timeout_s)

    def _receive(self, connection: DataConnection, timeout_s: float) -> pb.DataResponse:  # noqa: ARG002  # `begin` has it
        return connection.response()

    def _transfer(
        self, request: pb.DataRequest, timeout_s: float, receive: Callable[[DataConnection], T]
    ) -> T:
        with self.connection(timeout_s) as connection, woken(connection.shut_down):
            connection.begin(request, timeout_s)
            return receive(connection)

    # ---- payloads

    def read(self, request: pb.ReadRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """Read `count` ranges under a claim."""
        self._transfer(
            pb.DataRequest(read=request),
            timeout_s,
            lambda connection: connection.parts(count, sink),
        )

    def fetch(self, request: pb.FetchRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """Read `count` ranges of entries that are not claimed. Raises UnknownEntry, UnknownSession
        and StaleIncarnation only before `sink` got anything."""
        self._transfer(
            pb.DataRequest(fetch=request),
            timeout_s,
            lambda connection: _receive_fetched(connection, count, sink),
        )

    def fetch_found(
        self, request: pb.FetchRequest, begin: Callable[[pb.ClaimResponse], Sink], timeout_s: float
    ) -> None:
        """Look up, claim and read in one call. `begin` gets what was claimed and returns the sink
        for it. Raises UnknownSession and StaleIncarnation only before `begin` was called."""

        def receive(connection: DataConnection) -> None:
            response = connection.response()
            if not response.HasField("claim"):
                raise PrefixdError("the daemon sent a response that was not requested")
            connection.moved = True
            claimed = response.claim
            count = sum(result.claimed for result in claimed.results)
            _receive_fetched(connection, count, begin(claimed))

        self._transfer(pb.DataRequest(fetch=request), timeout_s, receive)

    def save(
        self, request: pb.RawSaveRequest, payloads: Sequence[FlatBytes], timeout_s: float
    ) -> list[pb.SaveResult]:
        """Save payloads, or write those of reservations; `request` says which."""

        def send(connection: DataConnection) -> list[pb.SaveResult]:
            response = connection.response()
            if response.HasField("save_ready"):
                items = response.save_ready.items
                if any(item >= len(payloads) for item in items):
                    raise PrefixdError("the daemon asked for a payload that does not exist")
                try:
                    connection.payloads([payloads[item] for item in items])
                except DaemonUnavailable:
                    connection.response()  # raises what the daemon said before it hung up
                    raise
                response = connection.response()
            return list(response.save.results)

        return self._transfer(pb.DataRequest(save=request), timeout_s, send)


def _receive_fetched(connection: DataConnection, count: int, sink: Sink) -> None:
    try:
        connection.parts(count, sink)
    except (UnknownSession, StaleIncarnation) as problem:
        if connection.moved:
            raise ClaimLost(str(problem)) from None
        raise


def _left_s(until_s: float) -> float:
    """Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
