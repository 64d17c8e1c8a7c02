"""The data socket of a daemon elsewhere (proto.frames): small calls, and payloads without a copy of
this side's own.

Where a call fails on its way, its connection is closed, and the daemon gives back what it granted.
Sockets block here, and the kernel keeps the deadlines: a payload of any size then takes few calls
of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

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
from .data_wire import NoLine, Place, connected
from .lines import CONNECT_S, Lines
from .sinks import Rooms, Sink
from .trace_context import TRACEPARENT

logger = logging.getLogger("prefixd.client")
T = TypeVar("T")

#: After a daemon took no connection, none is tried for so long.
_AGAIN_AFTER_S: Final = 5.0
#: What is read ahead, of messages and maybe of the bytes behind them.
_AHEAD_BYTES: Final = 16 * 2**10
#: What is received, or sent, between two looks at the deadline, and checksummed while it is in the
#: cache.
_PIECE_BYTES: Final = 2**20
#: Buffers that one call of the kernel takes.
_GATHER: Final = 64


class DataLine:
    """One connection. Not thread-safe. Calls raise PrefixdError, also what the daemon refuses them
    with."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        """Raises OSError if no daemon listens there, or none that is to be trusted, ConfigError if
        this side's files are wrong."""
        # With the first request.
        self._greeting = frames.frame(place.greeting())
        self._wire = connected(place, timeout_s)
        self._until_s = 0.0
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._end = 0
        #: Nothing has come yet. Under TLS the daemon looks at this side's certificate when for this
        #: side the handshake is over: what ends before was not asked.
        self._unheard = bool(place.security.ca)
        #: Something has come of what was asked for last.
        self.moved = False

    def begin(self, request: pb.DataRequest, timeout_s: float) -> None:
        """Ask; everything up to the last answer has this time."""
        if parent := TRACEPARENT.get():
            request.traceparent = parent
        self._until_s = time.monotonic() + timeout_s
        self.moved = False
        greeting, self._greeting = self._greeting, b""
        self._send([memoryview(greeting + frames.frame(request))])

    def response(self) -> pb.DataResponse:
        """The next one."""
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
            whole = bytearray(size_bytes)
            with memoryview(whole) as room:
                self._receive(room)
            message = bytes(whole)
        response = frames.response_of(message)
        if response.HasField("failure"):
            failure = response.failure
            raise from_name(failure.error, failure.message, retryable=failure.retry)
        return response

    def parts(self, count: int, sink: Sink) -> None:
        """Everything that was asked for of `count` ranges."""
        while True:
            response = self.response()
            if response.HasField("read_end"):
                return
            if not response.HasField("part") or response.part.range >= count:
                raise PrefixdError("the daemon sent something that was not asked for")
            part, self.moved = response.part, True
            if part.status != pb.READ_STATUS_OK:
                sink(part.range, part.offset_bytes, None)
            elif not isinstance(sink, Rooms):
                if part.length_bytes > frames.PART_BYTES:
                    raise PrefixdError(f"the daemon sent {part.length_bytes} bytes at once")
                came = bytearray(part.length_bytes)
                with memoryview(came) as room:
                    self._receive(room)
                sink(part.range, part.offset_bytes, bytes(came))
            else:
                room_there = sink.room(part.range, part.offset_bytes, part.length_bytes)
                for view in views_of(room_there):
                    for start in range(0, len(view), _PIECE_BYTES):
                        piece = view[start : start + _PIECE_BYTES]
                        self._receive(piece)
                        sink.filled(part.range, len(piece))

    def payloads(self, payloads: Sequence[FlatBytes]) -> None:
        """Send them, each with its CRC32C behind it."""
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
                raise self._in_our_words(problem) from None
            if len(buffers) == 1 and sent_bytes == len(buffers[0]):
                return
            rest = []
            for buffer in buffers:
                if len(buffer) > sent_bytes:
                    rest.append(buffer[sent_bytes:])
                sent_bytes = max(0, sent_bytes - len(buffer))
            buffers = rest

    def _read_ahead(self, wanted_bytes: int) -> None:
        """Have so many bytes there."""
        if self._end - self._start >= wanted_bytes:
            return
        if self._start:
            there_bytes = self._end - self._start
            self._ahead[:there_bytes] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, there_bytes
        while self._end < wanted_bytes:
            self._end += self._receive_some(self._ahead[self._end :], whole=False)

    def _receive(self, room: memoryview) -> None:
        """Fill all of it."""
        ahead_bytes = min(len(room), self._end - self._start)
        if ahead_bytes:
            room[:ahead_bytes] = self._ahead[self._start : self._start + ahead_bytes]
            self._start += ahead_bytes
            room = room[ahead_bytes:]
        while room:
            room = room[self._receive_some(room, whole=True) :]

    def _receive_some(self, room: memoryview, *, whole: bool) -> int:
        try:
            came_bytes = self._wire.receive(room, self._until_s, whole=whole)
            if not came_bytes:
                raise OSError("the daemon hung up")
        except OSError as problem:
            raise self._in_our_words(problem) from None
        self._unheard = False
        return came_bytes

    def _in_our_words(self, problem: OSError) -> Exception:
        """What a socket raised, as gRPC's failures are told."""
        if isinstance(problem, TimeoutError | BlockingIOError):
            return DeadlineExceeded("the daemon did not answer in time")
        if self._unheard:
            return NoLine(f"no handshake: {problem}")
        return DaemonUnavailable(f"the data connection broke: {problem}")

    def shut_down(self) -> None:
        """Make the call that is under way fail. From another thread."""
        self._wire.shut_down()

    def close(self) -> None:
        self._wire.close()


class DataCalls(Lines[DataLine]):
    """Calls over the data socket, and what moves payloads."""

    def __init__(self, place: Place, instead: Calls, counters: Counters) -> None:
        """`counters`: of calls that had to go over `instead`."""
        super().__init__(instead)
        self._place = place
        self._counters = counters
        #: Before this moment, on the monotonic clock, no connection is tried.
        self._not_before_s = 0.0

    def _connect(self, timeout_s: float) -> DataLine:
        if time.monotonic() < self._not_before_s:
            self._counters.add("data_fallbacks")
            raise NoLine("the daemon took no connection a moment ago")
        try:
            # Half of the time is left for asking over gRPC.
            return DataLine(self._place, min(timeout_s / 2, CONNECT_S))
        except (OSError, ConfigError) as problem:
            self._refused(str(problem))
            raise NoLine(str(problem)) from None

    def _refused(self, why: str) -> None:
        self._counters.add("data_fallbacks")
        if time.monotonic() >= self._not_before_s:
            host, port = self._place.host, self._place.port
            logger.warning("no data connection with %s:%d: %s; over gRPC instead", host, port, why)
        self._not_before_s = time.monotonic() + _AGAIN_AFTER_S

    def _send(self, line: DataLine, kind: str, request: Any, timeout_s: float) -> None:
        line.begin(pb.DataRequest(**{kind: request}), timeout_s)

    def _receive(self, line: DataLine, timeout_s: float) -> pb.DataResponse:  # noqa: ARG002  # `begin` has it
        return line.response()

    def _asked(self, request: pb.DataRequest, timeout_s: float, take: Callable[[DataLine], T]) -> T:
        """Send a request and `take` what answers it. Raises NoLine, PrefixdError."""
        with self.line(timeout_s) as line:
            line.begin(request, timeout_s)
            return take(line)

    # ---- payloads

    def read(self, request: pb.ReadRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """Raises NoLine, PrefixdError."""
        asked = pb.DataRequest(read=request)
        self._asked(asked, timeout_s, lambda line: line.parts(count, sink))

    def fetch(self, request: pb.FetchRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """Raises NoLine, PrefixdError: UnknownEntry, and what says that there is no such session,
        before anything came."""

        asked = pb.DataRequest(fetch=request)
        self._asked(asked, timeout_s, lambda line: _fetched(line, count, sink))

    def fetch_found(
        self, request: pb.FetchRequest, begin: Callable[[pb.ClaimResponse], Sink], timeout_s: float
    ) -> None:
        """`begin` is told what was found, and says what takes it. Raises NoLine, PrefixdError:
        what says that there is no such session, before `begin` was called."""

        def take(line: DataLine) -> None:
            response = line.response()
            if not response.HasField("claim"):
                raise PrefixdError("the daemon sent something that was not asked for")
            line.moved = True
            claimed = response.claim
            _fetched(line, sum(result.claimed for result in claimed.results), begin(claimed))

        self._asked(pb.DataRequest(fetch=request), timeout_s, take)

    def save(
        self, request: pb.RawSaveRequest, payloads: Sequence[FlatBytes], timeout_s: float
    ) -> list[pb.SaveResult]:
        """Raises NoLine, PrefixdError."""

        def move(line: DataLine) -> list[pb.SaveResult]:
            response = line.response()
            if response.HasField("save_ready"):
                items = response.save_ready.items
                if any(item >= len(payloads) for item in items):
                    raise PrefixdError("the daemon asked for a payload that there is not")
                try:
                    line.payloads([payloads[item] for item in items])
                except DaemonUnavailable:
                    line.response()  # it hung up, and before that said why
                    raise
                response = line.response()
            return list(response.save.results)

        return self._asked(pb.DataRequest(save=request), timeout_s, move)


def _fetched(line: DataLine, count: int, sink: Sink) -> None:
    """What a fetch sends of `count` ranges. Raises PrefixdError."""
    try:
        line.parts(count, sink)
    except (UnknownSession, StaleIncarnation) as problem:
        if line.moved:
            raise ClaimLost(str(problem)) from None
        raise
