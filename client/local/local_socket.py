"""Calls over the daemon's local socket (proto.frames), which take a fraction of gRPC's time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import DaemonUnavailable, DeadlineExceeded, MalformedMessage, from_name
from ..wire.connection import Calls
from ..wire.pool import CONNECT_S, ConnectionPool, NoConnection
from ..wire.reach import connect
from ..wire.trace_context import TRACEPARENT

#: More than most responses need.
_RECEIVE_BYTES: Final = 64 * 2**10


class LocalConnection:
    """One connection. Not thread-safe."""

    def __init__(self, path: str, session: pb.SessionRef, timeout_s: float) -> None:
        """Connects and names its session. Raises OSError if no daemon listens there that may be
        relied on: what it hands over is read as it is."""
        self._socket = connect(path, timeout_s)
        self._frames = frames.Frames(pb.LocalResponse.FromString)
        #: Whether no staged save is unfinished.
        self.in_step = True
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frames.frame(pb.LocalRequest(attach=session)))
        except OSError:
            self._socket.close()
            raise

    def send(self, request: pb.LocalRequest, timeout_s: float) -> None:
        """Raises DaemonUnavailable, DeadlineExceeded, InvalidSize."""
        if parent := TRACEPARENT.get():
            request.traceparent = parent
        self.in_step = not request.HasField("save_staged") or request.save_staged.last
        with _translated_errors():
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frames.frame(request))

    def receive(self, timeout_s: float) -> pb.LocalResponse:
        """The next response. Raises PrefixdError, also for a failure that the daemon reports."""
        until_s = time.monotonic() + timeout_s
        with _translated_errors():
            while (response := self._frames.next()) is None:
                self._socket.settimeout(max(until_s - time.monotonic(), 1e-6))
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise DaemonUnavailable("the daemon hung up")
                self._frames.feed(data)
        if response.HasField("failure"):
            failure = response.failure
            raise from_name(failure.error, failure.message, retryable=failure.retry)
        return response

    def hand_over(
        self, session: pb.SessionRef, timeout_s: float, names: Sequence[str] = ()
    ) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """Ask for the daemon's descriptors; `names`: of some, or empty for all.

        Returns the descriptors by name, each with its size in bytes, which the caller then owns;
        and what was refused, with the reasons. Raises PrefixdError.
        """
        request = pb.HandOverRequest(session=session, wanted=names)
        self.send(pb.LocalRequest(hand_over=request), timeout_s)
        fds: list[int] = []
        try:
            with _translated_errors():
                # They come with the first byte of the response.
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _RECEIVE_BYTES, frames.MAX_DESCRIPTORS
                )
            for fd in fds:
                os.set_inheritable(fd, False)  # Python 3.11 does not pass on MSG_CMSG_CLOEXEC
            self._frames.feed(data)
            response = self.receive(timeout_s).hand_over
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

    def shut_down(self) -> None:
        """Make the call in progress fail. Callable from another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class LocalCalls(ConnectionPool[LocalConnection]):
    """Small calls over the local socket, and connections for saves and hand-overs. Thread-safe."""

    def __init__(self, path: str, session: pb.SessionRef, fallback: Calls) -> None:
        super().__init__(fallback)
        self._path = path
        self._session = session

    def _connect(self, timeout_s: float) -> LocalConnection:
        try:
            return LocalConnection(self._path, self._session, min(timeout_s, CONNECT_S))
        except OSError as problem:
            raise NoConnection(str(problem)) from None

    def _send(self, connection: LocalConnection, kind: str, request: Any, timeout_s: float) -> None:
        connection.send(pb.LocalRequest(**{kind: request}), timeout_s)

    def _receive(self, connection: LocalConnection, timeout_s: float) -> pb.LocalResponse:
        return connection.receive(timeout_s)


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raise a socket's errors as those that gRPC would have raised."""
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded("the daemon did not answer in time") from None
    except OSError as problem:
        raise DaemonUnavailable(f"the local connection broke: {problem}") from None
