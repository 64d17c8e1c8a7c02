"""A pool of connections to one daemon for small calls, one call at a time on each.

The pool opens a connection when all others are busy, and keeps it. When a call breaks off, its
connection is closed, so that no call can receive the response to another one. A refusal is a
response: its connection stays.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

from ...proto import prefixd_pb2 as pb
from ...proto.errors import DeviceFull, Draining, StoreFailed, UnknownStaging, UnknownTier
from ...proto.limits import MAX_BATCH_KEYS
from .connection import Calls
from .deadline import Deadline

#: When the daemon does not accept a connection within this time, the call goes over gRPC.
CONNECT_S: Final = 0.5


#: Failures after which the daemon goes on with the next request.
REFUSALS: Final = (DeviceFull, Draining, StoreFailed, UnknownStaging, UnknownTier)


class NoConnection(OSError):
    """No connection could be made, and no request was sent."""


class Closable(Protocol):
    """A connection, as far as the pool needs to know it."""

    #: Whether the daemon takes what is sent next for a request, once it has answered.
    in_step: bool

    def shut_down(self) -> None:
        """Make the call in progress fail. Callable from another thread."""

    def close(self) -> None: ...


ConnectionT = TypeVar("ConnectionT", bound=Closable)
T = TypeVar("T")


class ConnectionPool(ABC, Generic[ConnectionT]):
    """Implements `connection.Calls`. Thread-safe. Uses `fallback` when it gets no connection."""

    def __init__(self, fallback: Calls) -> None:
        self._fallback = fallback
        self._lock = threading.Lock()
        self._idle: list[ConnectionT] = []
        self._busy: set[ConnectionT] = set()
        self._closed = False

    @abstractmethod
    def _connect(self, timeout_s: float) -> ConnectionT:
        """Open another connection. Raises NoConnection."""

    def _refused(self, why: str) -> None:
        """Called when the daemon ended a connection before it read a request."""

    @abstractmethod
    def _send(self, connection: ConnectionT, kind: str, request: object, timeout_s: float) -> None:
        """Send a request. `kind`: its field in the request message. Raises PrefixdError."""

    @abstractmethod
    def _receive(self, connection: ConnectionT, timeout_s: float) -> Any:
        """The response message. Raises PrefixdError, also for a failure that the daemon reports."""

    @contextmanager
    def connection(self, timeout_s: float) -> Iterator[ConnectionT]:
        """A connection for one call, from its request to its last response. Raises NoConnection."""
        connection = self._take(timeout_s)
        try:
            yield connection
        except BaseException as problem:
            self._failed(connection, problem)
            raise
        self._put_back(connection)

    def _take(self, timeout_s: float) -> ConnectionT:
        """An idle connection, or a new one. Raises NoConnection."""
        with self._lock:
            if self._closed:
                raise NoConnection("these connections were closed")
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
        connection = self._connect(timeout_s)
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise NoConnection("these connections were closed")

    def _failed(self, connection: ConnectionT, problem: BaseException) -> None:
        if isinstance(problem, REFUSALS) and connection.in_step:
            self._put_back(connection)
            return
        with self._lock:
            self._busy.discard(connection)
        connection.close()
        if isinstance(problem, NoConnection):
            self._refused(str(problem))

    def _put_back(self, connection: ConnectionT) -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def give_back(self, session: pb.SessionRef, claims: Sequence[int]) -> None:
        """Release claims. There is no response. Raises NoConnection, PrefixdError."""
        with self.connection(CONNECT_S) as connection:
            for start in range(0, len(claims), MAX_BATCH_KEYS):
                batch = claims[start : start + MAX_BATCH_KEYS]
                request = pb.ReleaseRequest(session=session, claim_ids=batch)
                self._send(connection, "give_back", request, CONNECT_S)

    def hang_up(self) -> None:
        """Close all connections at once, because the session has ended: calls in progress fail."""
        self.close()
        with self._lock:
            for connection in self._busy:
                connection.shut_down()

    def close(self) -> None:
        """Close idle connections now, the others when their calls have ended."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _call(self, name: str, request: object, _response: type[T], timeout_s: float) -> T:
        until_s = time.monotonic() + timeout_s
        kind = name.lower()
        try:
            connection = self._take(timeout_s)
            # Not `with self.connection`, which takes a tenth of the time of a small call.
            try:
                self._send(connection, kind, request, timeout_s)
                response: T = getattr(self._receive(connection, timeout_s), kind)
            except BaseException as problem:
                self._failed(connection, problem)
                raise
            self._put_back(connection)
        except NoConnection:
            left_s = Deadline((until_s - time.monotonic()) * 1e3).left_s()
            response = getattr(self._fallback, name)(request, timeout=left_s)
        return response

    # ---- connection.Calls

    def Lookup(self, request: pb.LookupRequest, timeout: float) -> pb.LookupResponse:
        return self._call("Lookup", request, pb.LookupResponse, timeout)

    def Claim(self, request: pb.ClaimRequest, timeout: float) -> pb.ClaimResponse:
        return self._call("Claim", request, pb.ClaimResponse, timeout)

    def Release(self, request: pb.ReleaseRequest, timeout: float) -> pb.ReleaseResponse:
        return self._call("Release", request, pb.ReleaseResponse, timeout)

    def Reserve(self, request: pb.ReserveRequest, timeout: float) -> pb.ReserveResponse:
        return self._call("Reserve", request, pb.ReserveResponse, timeout)

    def Cancel(self, request: pb.CancelRequest, timeout: float) -> pb.CancelResponse:
        return self._call("Cancel", request, pb.CancelResponse, timeout)
