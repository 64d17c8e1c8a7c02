"""Calls to the daemon over its local socket (proto.local), which take a fraction of gRPC's time.

One call at a time goes over a connection; there are as many connections as there were calls at
once. A call that fails on its way closes its connection, so that no answer is taken for that of
another call.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from ...proto import local
from ...proto import prefixd_pb2 as pb
from ...proto.errors import DaemonUnavailable, DeadlineExceeded, MalformedMessage, from_name
from ...proto.limits import MAX_BATCH_KEYS
from ..wire.connection import Calls

#: A daemon that does not take a connection in this time is asked over gRPC.
_CONNECT_S: Final = 0.5
#: More than most answers need.
_RECEIVE_BYTES: Final = 64 * 2**10


class Line:
    """One connection. Not thread-safe."""

    def __init__(self, path: str, session: pb.SessionRef, timeout_s: float) -> None:
        """Says whose it is before anything else. Raises OSError when nobody listens there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = local.Frames(pb.LocalResponse.FromString)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._socket.sendall(local.frame(pb.LocalRequest(attach=session)))
        except OSError:
            self._socket.close()
            raise

    def send(self, request: pb.LocalRequest, timeout_s: float) -> None:
        """Raises DaemonUnavailable, DeadlineExceeded, InvalidSize."""
        with _in_our_words():
            self._socket.settimeout(timeout_s)
            self._socket.sendall(local.frame(request))

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
                    self._socket, _RECEIVE_BYTES, local.MAX_DESCRIPTORS
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


class LocalCalls:
    """`connection.Calls` over lines, or `instead` of them while none can be had. Thread-safe."""

    def __init__(self, path: str, session: pb.SessionRef, instead: Calls) -> None:
        self._path = path
        self._session = session
        self._instead = instead
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._closed = False

    @contextmanager
    def line(self, timeout_s: float) -> Iterator[Line]:
        """A line for one call, from its request to its last response. Raises OSError: no line
        can be had, and nothing was asked."""
        with self._lock:
            if self._closed:
                raise OSError("these connections were closed")
            line = self._idle.pop() if self._idle else None
        line = line or Line(self._path, self._session, min(timeout_s, _CONNECT_S))
        with self._lock:
            self._busy.add(line)
        try:
            yield line
        except BaseException:
            with self._lock:
                self._busy.discard(line)
            line.close()
            raise
        with self._lock:
            self._busy.discard(line)
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def give_back(self, session: pb.SessionRef, claims: Sequence[int]) -> None:
        """Release claims without waiting for the answer. Raises OSError, DaemonUnavailable."""
        with self.line(_CONNECT_S) as line:
            for start in range(0, len(claims), MAX_BATCH_KEYS):
                batch = claims[start : start + MAX_BATCH_KEYS]
                asked = pb.ReleaseRequest(session=session, claim_ids=batch)
                line.send(pb.LocalRequest(give_back=asked), _CONNECT_S)

    def hang_up(self) -> None:
        """The session has ended: calls under way fail, now."""
        self.close()
        with self._lock:
            for line in self._busy:
                line.shut_down()

    def close(self) -> None:
        """Hang up, now or when the calls under way have ended."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _ask(self, request: pb.LocalRequest, timeout_s: float) -> pb.LocalResponse:
        with self.line(timeout_s) as line:
            line.send(request, timeout_s)
            return line.receive(timeout_s)

    # ---- connection.Calls

    def Lookup(self, request: pb.LookupRequest, timeout: float) -> pb.LookupResponse:
        try:
            return self._ask(pb.LocalRequest(lookup=request), timeout).lookup
        except OSError:
            return self._instead.Lookup(request, timeout=timeout)

    def Claim(self, request: pb.ClaimRequest, timeout: float) -> pb.ClaimResponse:
        try:
            return self._ask(pb.LocalRequest(claim=request), timeout).claim
        except OSError:
            return self._instead.Claim(request, timeout=timeout)

    def Release(self, request: pb.ReleaseRequest, timeout: float) -> pb.ReleaseResponse:
        try:
            return self._ask(pb.LocalRequest(release=request), timeout).release
        except OSError:
            return self._instead.Release(request, timeout=timeout)

    def Reserve(self, request: pb.ReserveRequest, timeout: float) -> pb.ReserveResponse:
        try:
            return self._ask(pb.LocalRequest(reserve=request), timeout).reserve
        except OSError:
            return self._instead.Reserve(request, timeout=timeout)

    def Cancel(self, request: pb.CancelRequest, timeout: float) -> pb.CancelResponse:
        try:
            return self._ask(pb.LocalRequest(cancel=request), timeout).cancel
        except OSError:
            return self._instead.Cancel(request, timeout=timeout)


@contextmanager
def _in_our_words() -> Iterator[None]:
    """What a socket raises, as gRPC's failures are told."""
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded("the daemon did not answer in time") from None
    except OSError as problem:
        raise DaemonUnavailable(f"the local connection broke: {problem}") from None
