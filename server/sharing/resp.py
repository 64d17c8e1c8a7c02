"""Requests and replies of Redis' protocol (RESP2) over many connections at once.

Client libraries make a bytes object of every reply and wait for one node after the other. Here
payloads move between sockets and their own buffers, and all nodes are waited for together, until
one deadline.

Large replies are requested a few at a time: an engine prepares all requested replies at once, which
is slower by half.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from time import monotonic
from typing import Final, TypeAlias

Piece: TypeAlias = bytes | memoryview

#: A request waits if its reply and the outstanding ones of its connection exceed this together ...
WINDOW_BYTES: Final = 256 * 1024
#: ... unless fewer replies than this are outstanding.
WINDOW_REPLIES: Final = 2
_BUFFER_BYTES: Final = 64 * 1024
_MAX_PIECES: Final = 64
#: The longest accepted first line, and the longest accepted value without buffers.
_MAX_LINE_BYTES: Final = 4096
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Result(Enum):
    """The result of a request, if it is not a value."""

    UNANSWERED = "unanswered"
    NOTHING = "nothing"
    """A null: there is no such value."""
    FILLED = "filled"
    """The value is in the buffers `into`."""
    MISFIT = "misfit"
    """The value has another length than its buffers; it was read and dropped."""


class RedisRefused(Exception):
    """The engine answered with this error."""


class ProtocolError(Exception):
    """The received bytes are no reply of this protocol."""


class RedisRequest:
    """One command for the node that serves `name`, and its result."""

    __slots__ = ("into", "name", "pieces", "reply_bytes", "result")

    def __init__(
        self,
        command: bytes,
        name: bytes,
        *words: Piece | Sequence[Piece],
        into: Sequence[memoryview] = (),
    ) -> None:
        """Each word is one argument; a sequence of pieces is joined to one. `into`: the buffers for
        the value; without them the value becomes the result, and has to be small."""
        self.name: Final = name
        self.pieces: Final = _encode((command, name, *words))
        self.into: Final = into
        self.reply_bytes: Final = sum(map(len, into))
        self.result: Result | RedisRefused | bytes | int = Result.UNANSWERED


def _encode(words: Sequence[Piece | Sequence[Piece]]) -> list[Piece]:
    pieces: list[Piece] = []
    small = bytearray(b"*%d\r\n" % len(words))
    for word in words:
        if isinstance(word, bytes):
            small += b"$%d\r\n" % len(word)
            small += word
        else:
            views = (word,) if isinstance(word, memoryview) else word
            small += b"$%d\r\n" % sum(map(len, views))
            pieces += [bytes(small), *views]
            small.clear()
        small += b"\r\n"
    pieces.append(bytes(small))
    return pieces


class RedisConnection:
    """A connected socket and its outstanding requests. Used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes over `connected`."""
        self.socket: Final = connected
        connected.setblocking(False)
        self._gathers: Final = not isinstance(connected, ssl.SSLSocket)
        #: A reply is missing or invalid: later replies can't be matched with their requests.
        self.broken = False
        self._unsent: deque[RedisRequest] = deque()
        self._sending: deque[memoryview] = deque()
        self._unanswered: deque[RedisRequest] = deque()
        self._expected_bytes = 0
        self._buffer: Final = memoryview(bytearray(_BUFFER_BYTES))
        self._first = self._last = 0
        #: For the value that is being read: its result, the views that are still to be filled, and
        #: how many bytes to drop after them.
        self._reading: Result | bytearray | None = None
        self._rooms: deque[memoryview] = deque()
        self._waste_bytes = 0

    def close(self) -> None:
        self.broken = True
        self.socket.close()

    @property
    def usable(self) -> bool:
        """Whether more requests can be sent. False also if the engine hung up, or sent something
        without a request."""
        if self.broken or not self.idle:
            return False
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    # ---- for `exchange`

    @property
    def idle(self) -> bool:
        return not self._unsent and not self._sending and not self._unanswered

    def begin(self, requests: Sequence[RedisRequest]) -> None:
        """Queue requests, which are sent in this order."""
        self._unsent.extend(requests)

    def events(self) -> int:
        """The events that `poll` has to wait for."""
        receiving = select.POLLIN if self._unanswered else 0
        return receiving | (select.POLLOUT if self._sending or self._may_send() else 0)

    @property
    def buffered(self) -> bool:
        """Whether received bytes are buffered, which `poll` does not report."""
        if not self._unanswered:
            return False
        ahead = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0
        return ahead or self._first < self._last

    def move(self) -> None:
        """Send and receive without waiting, up to a large value, so that other connections have
        their turn. Raises OSError, ProtocolError."""
        with suppress(*_WOULD_BLOCK):
            self._send()
        with suppress(*_WOULD_BLOCK):
            moved_bytes = 0
            while self._unanswered and moved_bytes < WINDOW_BYTES:
                request = self._unanswered[0]
                self._receive()
                if request.result is not Result.UNANSWERED:
                    moved_bytes += request.reply_bytes
                if self._may_send():
                    self._send()

    def _may_send(self) -> bool:
        if not self._unsent:
            return False
        if len(self._unanswered) < WINDOW_REPLIES:
            return True
        return self._expected_bytes + self._unsent[0].reply_bytes <= WINDOW_BYTES

    def _send(self) -> None:
        while True:
            while len(self._sending) < _MAX_PIECES and self._may_send():
                request = self._unsent.popleft()
                self._sending.extend(memoryview(piece) for piece in request.pieces if len(piece))
                self._unanswered.append(request)
                self._expected_bytes += request.reply_bytes
            if not self._sending:
                return
            if self._gathers:
                some = [self._sending[i] for i in range(min(len(self._sending), _MAX_PIECES))]
                sent = self.socket.sendmsg(some)
            else:
                sent = self.socket.send(self._sending[0])
            while sent:
                piece = self._sending.popleft()
                if sent < len(piece):
                    self._sending.appendleft(piece[sent:])
                    break
                sent -= len(piece)

    def _receive(self) -> None:
        """Receive one part: a piece of a value, or a first line."""
        if self._reading is not None:
            self._receive_value()
            return
        line = self._line()
        if line is None:
            self._more()
            return
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            self._begin_value(_number(rest))
        elif kind == b":":
            self._answer(_number(rest))
        elif kind == b"+":
            self._answer(rest)
        elif kind == b"-":
            self._answer(RedisRefused(rest.decode("utf-8", "replace")))
        else:
            raise ProtocolError(f"a reply begins with {kind!r}")

    def _begin_value(self, length: int) -> None:
        request = self._unanswered[0]
        if length < 0:
            self._answer(Result.NOTHING)
        elif request.into and length == request.reply_bytes:
            self._reading = Result.FILLED
            self._rooms.extend(request.into)
            self._waste_bytes = 2  # the end of the line
        elif request.into or length > _MAX_LINE_BYTES:
            self._reading, self._waste_bytes = Result.MISFIT, length + 2
        else:
            self._reading = bytearray(length)
            if length:
                self._rooms.append(memoryview(self._reading))
            self._waste_bytes = 2

    def _receive_value(self) -> None:
        while self._rooms:
            room = self._rooms[0]
            there = min(len(room), self._last - self._first)
            if there:
                room[:there] = self._buffer[self._first : self._first + there]
                self._first += there
            else:
                there = self.socket.recv_into(room)
                if not there:
                    raise ConnectionResetError("the engine hung up")
            if there == len(room):
                self._rooms.popleft()
            else:
                self._rooms[0] = room[there:]
        while self._waste_bytes:
            if self._first == self._last:
                self._more()
            there = min(self._waste_bytes, self._last - self._first)
            self._first += there
            self._waste_bytes -= there
        result, self._reading = self._reading, None
        assert result is not None
        self._answer(bytes(result) if isinstance(result, bytearray) else result)

    def _answer(self, result: Result | RedisRefused | bytes | int) -> None:
        request = self._unanswered.popleft()
        self._expected_bytes -= request.reply_bytes
        request.result = result

    def _line(self) -> bytes | None:
        there = bytes(self._buffer[self._first : min(self._last, self._first + _MAX_LINE_BYTES)])
        end = there.find(b"\r\n")
        if end < 0:
            if len(there) == _MAX_LINE_BYTES:
                raise ProtocolError("a reply's first line does not end")
            return None
        self._first += end + 2
        return there[:end]

    def _more(self) -> None:
        """Read into the buffer, which holds an incomplete line at most."""
        if self._first == self._last:
            self._first = self._last = 0
        elif self._last == _BUFFER_BYTES:
            rest = bytes(self._buffer[self._first : self._last])
            self._first, self._last = 0, len(rest)
            self._buffer[: len(rest)] = rest
        there = self.socket.recv_into(self._buffer[self._last :])
        if not there:
            raise ConnectionResetError("the engine hung up")
        self._last += there


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError(f"{text!r} is not a number") from None


Work: TypeAlias = tuple[RedisConnection, Sequence[RedisRequest]]


def exchange(work: Sequence[Work], deadline_s: float) -> None:
    """Send all requests, each list in order on its connection, and wait for the replies.

    Returns when all have arrived, or at `deadline_s` (`time.monotonic()`). Requests without a reply
    stay `UNANSWERED`, and only their connections are broken. Never raises.
    """
    poll = select.poll()
    connections: dict[int, RedisConnection] = {}
    for connection, requests in work:
        connection.begin(requests)
        if _moved(connection) and not connection.idle:
            connections[connection.socket.fileno()] = connection
            poll.register(connection.socket, connection.events())
    while connections:
        left_s = deadline_s - monotonic()
        if left_s <= 0:
            break
        ahead = [number for number, each in connections.items() if each.buffered]
        ready = {number for number, _ in poll.poll(0 if ahead else left_s * 1000)}
        for descriptor in ready.union(ahead):
            connection = connections[descriptor]
            if _moved(connection) and not connection.idle:
                poll.modify(descriptor, connection.events())
            else:
                poll.unregister(descriptor)
                del connections[descriptor]
    for connection in connections.values():
        connection.broken = True


def _moved(connection: RedisConnection) -> bool:
    if connection.broken:
        return False
    try:
        connection.move()
    except (OSError, ProtocolError):
        connection.broken = True
        return False
    return True
