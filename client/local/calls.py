"""Calls to the daemon over its local socket (proto.frames), in a fraction of the time of gRPC."""

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
from ..wire.data_wire import NoLine
from ..wire.lines import CONNECT_S, Lines
from ..wire.trace_context import TRACEPARENT

#: More than most answers need.
_RECEIVE_BYTES: Final = 64 * 2**10


class Line:
    """One connection. Not thread-safe."""

    def __init__(self, path: str, session: pb.SessionRef, timeout_s: float) -> None:
        """Says whose it is before anything else. Raises OSError if no daemon listens there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = frames.Frames(pb.LocalResponse.FromString)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._socket.sendall(frames.frame(pb.LocalRequest(attach=session)))
        except OSError:
            self._socket.close()
            raise

    def send(self, request: pb.LocalRequest, timeout_s: float) -> None:
        """Raises DaemonUnavailable, DeadlineExceeded, InvalidSize."""
        if parent := TRACEPARENT.get():
            request.traceparent = parent
        with _in_our_words():
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frames.frame(request))

    def receive(self, timeout_s: float) -> pb.LocalResponse:
        """The next response. Raises PrefixdError, also what the daemon refuses the call with."""
        until_s = time.monotonic() + timeout_s
        with _in_our_words():
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
        self, session: pb.SessionRef, timeout_s: float, wanted: Sequence[str] = ()
    ) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """The daemon's descriptors by name, each with its size in bytes, which the caller then
        owns; and what was refused, with the reasons. `wanted`: of which; none: of everything.
        Raises PrefixdError."""
        asked = pb.HandOverRequest(session=session, wanted=wanted)
        self.send(pb.LocalRequest(hand_over=asked), timeout_s)
        fds: list[int] = []
        try:
            with _in_our_words():
                # They come with the first byte of the answer.
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _RECEIVE_BYTES, frames.MAX_DESCRIPTORS
                )
            for fd in fds:
                os.set_inheritable(fd, False)  # Python 3.11 does not pass MSG_CMSG_CLOEXEC on
            self._frames.feed(data)
            response = self.receive(timeout_s).hand_over
            # The kernel leaves out descriptors for which this process has no room.
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
        """Make the call that is under way fail. From another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class LocalCalls(Lines[Line]):
    """Calls over the local socket."""

    def __init__(self, path: str, session: pb.SessionRef, instead: Calls) -> None:
        super().__init__(instead)
        self._path = path
        self._session = session

    def _connect(self, timeout_s: float) -> Line:
        try:
            return Line(self._path, self._session, min(timeout_s, CONNECT_S))
        except OSError as problem:
            raise NoLine(str(problem)) from None

    def _send(self, line: Line, kind: str, request: Any, timeout_s: float) -> None:
        line.send(pb.LocalRequest(**{kind: request}), timeout_s)

    def _receive(self, line: Line, timeout_s: float) -> pb.LocalResponse:
        return line.receive(timeout_s)


@contextmanager
def _in_our_words() -> Iterator[None]:
    """What a socket raises, as gRPC's failures are told."""
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded("the daemon did not answer in time") from None
    except OSError as problem:
        raise DaemonUnavailable(f"the local connection broke: {problem}") from None
