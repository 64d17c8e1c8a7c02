"""The wire of a data connection: a socket that blocks until a deadline, plain or under TLS."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ...proto import prefixd_pb2 as pb
from .channel import Security

_KEEPALIVE_S: Final = 30
_TIMEVAL: Final = struct.Struct("ll")
#: By how much more than is left the kernel may wait. It need not be told of each call, then.
_SLACK_S: Final = 0.01
#: What is in one record of TLS, at most.
_RECORD_BYTES: Final = 16 * 2**10


class NoLine(OSError):
    """No connection can be had, and nothing was asked."""


class Place(NamedTuple):
    """Where a data socket is, and how its connections begin."""

    host: str
    port: int
    session: pb.SessionRef
    #: Its files are read with each connection: they may be others by then.
    security: Security = Security()

    def greeting(self) -> pb.DataRequest:
        """The first request, which is not answered. Has secrets. Raises ConfigError."""
        return pb.DataRequest(attach=self.session, token=self.security.token())


class Wire:
    """A plain one. The kernel keeps the deadlines: a payload of any size takes few calls of it."""

    def __init__(self, sock: socket.socket) -> None:
        """Owns `sock`, which is connected."""
        self._socket = sock
        self._socket.settimeout(None)
        #: How long the kernel waits, by direction.
        self._armed_s = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}

    def send(self, buffers: Sequence[memoryview], until_s: float) -> int:
        """Send some of it. `until_s`: on the monotonic clock. Raises TimeoutError, BlockingIOError,
        OSError."""
        self._arm(socket.SO_SNDTIMEO, until_s)
        return self._socket.sendmsg(buffers)

    def receive(self, room: memoryview, until_s: float, *, whole: bool) -> int:
        """Receive some of what is to come, if it can be the `whole` room. 0: that was all. Raises
        as `send`."""
        self._arm(socket.SO_RCVTIMEO, until_s)
        return self._socket.recv_into(room, len(room), socket.MSG_WAITALL if whole else 0)

    def _arm(self, direction: int, until_s: float) -> None:
        """Let the kernel end the next call."""
        left_s = _left_s(until_s)
        if left_s <= self._armed_s[direction] <= left_s + _SLACK_S:
            return
        armed_s = self._armed_s[direction] = left_s + _SLACK_S / 2
        packed = _TIMEVAL.pack(*divmod(int(armed_s * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, direction, packed)

    def shut_down(self) -> None:
        """Make the call that is under way fail. From another thread."""
        with suppress(OSError):
            # Not the method of the socket: that of TLS would go on in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class SecuredWire(Wire):
    """Under TLS. A record at a time, none larger than 16 KiB."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """Owns `sock`, whose handshake is over."""
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
        came_bytes = 0
        while True:
            self._socket.settimeout(_left_s(until_s))
            more_bytes = self._socket.recv_into(room[came_bytes:])
            came_bytes += more_bytes
            if not whole or not more_bytes or came_bytes == len(room):
                return came_bytes


def connected(place: Place, within_s: float) -> Wire:
    """A connection to a daemon, trusted if it is to be. Raises OSError, ConfigError."""
    context = place.security.context()
    until_s = time.monotonic() + within_s
    sock = socket.create_connection((place.host, place.port), within_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # No firewall forgets a connection that nothing is asked on, or a call finds it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        if context is None:
            return Wire(sock)
        sock.settimeout(_left_s(until_s))  # of the handshake as a whole
        return SecuredWire(context.wrap_socket(sock, server_hostname=place.host))
    except BaseException:
        sock.close()
        raise


def _left_s(until_s: float) -> float:
    """Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
