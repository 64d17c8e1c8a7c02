"""Calls over connections of the framed protocol, one call at a time on each.

A connection is opened when all others are busy, and kept. When a call breaks off, its connection is
closed, so that no call can receive the response to another one, and the daemon gives back what it
granted. A refusal is a response: its connection stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    ClaimLost,
    ConfigError,
    DaemonUnavailable,
    DeviceFull,
    Draining,
    PrefixdError,
    StaleIncarnation,
    StoreFailed,
    UnknownSession,
    UnknownStaging,
    UnknownTier,
)
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.payload import FlatBytes
from ..counters import ClientCounters
from .deadline import Deadline, woken
from .framed_connection import FramedConnection, FramedEndpoint, NoConnection
from .grpc_connection import Calls
from .transport import MAX_STREAMS, Sink

logger = logging.getLogger("prefixd.client")
T = TypeVar("T")

#: When the daemon does not accept a connection within this time, the call goes over gRPC.
CONNECT_S: Final = 0.5
#: A restore is divided over several connections where a round trip takes as long as this, because
#: what is under way on one is bounded by the sender's buffer (4 MiB, unless `tcp_wmem` says more).
STREAMS_FROM_S: Final = 0.002
#: Each of them carries at least so much.
STREAM_BYTES: Final = 8 * 2**20
#: Failures after which the daemon goes on with the next request.
REFUSALS: Final = (DeviceFull, Draining, StoreFailed, UnknownStaging, UnknownTier)


class FramedCalls:
    """Small calls (`connection.Calls`), transfers of payloads, and connections for other calls.
    Thread-safe.

    What gets no connection raises NoConnection, and nothing was sent. Small calls go over
    `fallback` then.

    An endpoint that took no connection is tried again on a thread, `FramedEndpoint.again_after_s`
    after the last attempt, when a call asks for a connection. No call waits for such an attempt,
    which takes its whole time where a firewall drops it.
    """

    def __init__(
        self,
        place: FramedEndpoint,
        fallback: Calls,
        counters: ClientCounters,
        before: FramedCalls | None = None,
    ) -> None:
        """`counters`: count the calls that go over `fallback`. `before`: the calls of the session
        before, which may know that the place takes no connection."""
        self._place = place
        self._fallback = fallback
        self._counters = counters
        self._lock = threading.Lock()
        self._idle: list[FramedConnection] = []
        self._busy: set[FramedConnection] = set()
        self._closed = False
        #: The last attempt to connect failed, or its connection was ended before it was used.
        self._unreachable = before is not None and before._refuses(place)
        #: No attempt to connect before this moment, on the monotonic clock.
        self._not_before_s: float = 0.0 if before is None else before._not_before_s
        #: A thread tries to connect.
        self._trying = False

    @contextmanager
    def connection(self, timeout_s: float) -> Iterator[FramedConnection]:
        """A connection for one call, from its request to its last response. Raises NoConnection."""
        connection = self._take(timeout_s)
        try:
            with woken(connection.shut_down):
                yield connection
        except BaseException as problem:
            self._failed(connection, problem)
            raise
        self._put_back(connection)

    def _take(self, timeout_s: float) -> FramedConnection:
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

    @property
    def local(self) -> bool:
        """Whether they go over a local socket, which also hands over descriptors."""
        return self._place.local

    def _refuses(self, place: FramedEndpoint) -> bool:
        """Whether `place`, which has the same address, took no connection."""
        return self._unreachable and str(place) == str(self._place)

    def streams(self, payload_bytes: int) -> int:
        """Over how many connections a read of so many bytes is best divided."""
        most = min(MAX_STREAMS, payload_bytes // STREAM_BYTES)
        if most < 2 or self._place.local:
            return 1
        with self._lock:
            # Of a place without a connection nothing is known.
            round_trip_s = self._idle[-1].round_trip_s if self._idle else 0.0
        return most if round_trip_s >= STREAMS_FROM_S else 1

    def _connect(self, timeout_s: float) -> FramedConnection:
        """Raises NoConnection."""
        if self._unreachable and not self._place.local:
            self._try_again()
            self._counters.add("data_fallbacks")
            raise NoConnection("the daemon took no connection a moment ago")
        try:
            # Half of the time is left for gRPC.
            connection = FramedConnection(self._place, min(timeout_s / 2, CONNECT_S))
        except (OSError, ConfigError) as problem:
            self._refused(str(problem))
            raise NoConnection(str(problem)) from None
        self._unreachable = False
        return connection

    def _try_again(self) -> None:
        """Connect on a thread, unless one is at it, or the last attempt was a moment ago."""
        with self._lock:
            if self._trying or self._closed or time.monotonic() < self._not_before_s:
                return
            self._trying = True
        try:
            threading.Thread(target=self._try, name="prefixd-connect", daemon=True).start()
        except RuntimeError:  # the process is exiting
            self._trying = False

    def _try(self) -> None:
        connection = None
        try:
            connection = FramedConnection(self._place, CONNECT_S)
            connection.attach(CONNECT_S)
        except (OSError, PrefixdError) as problem:
            if connection is not None:
                connection.close()
            self._not_before_s = time.monotonic() + self._place.again_after_s
            logger.debug("still no connection at %s: %s", self._place, problem)
        else:
            logger.info("connected at %s again", self._place)
            self._unreachable = False
            self._put_back(connection)
        finally:
            self._trying = False

    def _refused(self, why: str) -> None:
        """The daemon took no connection, or ended one before it read a request."""
        self._counters.add("data_fallbacks")
        if not self._unreachable:
            # A daemon may well keep its local socket from this user, and serve it over gRPC.
            level = logging.INFO if self._place.local else logging.WARNING
            logger.log(level, "no connection at %s: %s; over gRPC instead", self._place, why)
        self._unreachable = True
        self._not_before_s = time.monotonic() + self._place.again_after_s

    def _failed(self, connection: FramedConnection, problem: BaseException) -> None:
        if isinstance(problem, REFUSALS) and connection.in_step:
            self._put_back(connection)
            return
        with self._lock:
            self._busy.discard(connection)
        connection.close()
        if isinstance(problem, NoConnection):
            self._refused(str(problem))

    def _put_back(self, connection: FramedConnection) -> None:
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
                connection.begin(pb.FramedRequest(give_back=request), CONNECT_S)

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

    # ---- connection.Calls

    def call(self, rpc: str, request: Any, response_type: type[T], timeout_s: float, /) -> T:
        until_s = time.monotonic() + timeout_s
        kind = rpc.lower()
        try:
            connection = self._take(timeout_s)
            # Not `with self.connection`, which takes a tenth of the time of a small call.
            try:
                connection.begin(pb.FramedRequest(**{kind: request}), timeout_s)
                response: T = getattr(connection.response(), kind)
            except BaseException as problem:
                self._failed(connection, problem)
                raise
            self._put_back(connection)
        except NoConnection:
            left_s = Deadline((until_s - time.monotonic()) * 1e3).left_s()
            response = self._fallback.call(rpc, request, response_type, left_s)
        return response

    # ---- payloads

    def read(self, request: pb.ReadRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """Read `count` ranges under a claim."""
        self._transfer(
            pb.FramedRequest(read=request),
            timeout_s,
            lambda connection: connection.parts(count, sink),
        )

    def fetch(self, request: pb.FetchRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """Read `count` ranges of entries that are not claimed. Raises UnknownEntry, UnknownSession
        and StaleIncarnation only before `sink` got anything."""
        self._transfer(
            pb.FramedRequest(fetch=request),
            timeout_s,
            lambda connection: _receive_fetched(connection, count, sink),
        )

    def fetch_found(
        self, request: pb.FetchRequest, begin: Callable[[pb.ClaimResponse], Sink], timeout_s: float
    ) -> None:
        """Look up, claim and read in one call. `begin` gets what was claimed and returns the sink
        for it. Raises UnknownSession and StaleIncarnation only before `begin` was called."""

        def receive(connection: FramedConnection) -> None:
            response = connection.response()
            if not response.HasField("claim"):
                raise PrefixdError("the daemon sent a response that was not requested")
            connection.moved = True
            claimed = response.claim
            count = sum(result.claimed for result in claimed.results)
            _receive_fetched(connection, count, begin(claimed))

        self._transfer(pb.FramedRequest(fetch=request), timeout_s, receive)

    def save(
        self, request: pb.RawSaveRequest, payloads: Sequence[FlatBytes], timeout_s: float
    ) -> list[pb.SaveResult]:
        """Save payloads, or write those of reservations; `request` says which."""

        def send(connection: FramedConnection) -> list[pb.SaveResult]:
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

        return self._transfer(pb.FramedRequest(save=request), timeout_s, send)

    def _transfer(
        self, request: pb.FramedRequest, timeout_s: float, receive: Callable[[FramedConnection], T]
    ) -> T:
        with self.connection(timeout_s) as connection:
            connection.begin(request, timeout_s)
            return receive(connection)


def _receive_fetched(connection: FramedConnection, count: int, sink: Sink) -> None:
    try:
        connection.parts(count, sink)
    except (UnknownSession, StaleIncarnation) as problem:
        if connection.moved:
            raise ClaimLost(str(problem)) from None
        raise
