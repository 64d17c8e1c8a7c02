"""One gRPC connection to a daemon, set up for moving payloads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeVar, cast

import grpc
from grpc.experimental import ChannelOptions

from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    ERROR_METADATA,
    ClaimLost,
    DaemonUnavailable,
    DeadlineExceeded,
    PrefixdError,
)
from ...proto.limits import MAX_MESSAGE_BYTES
from ...proto.prefixd_pb2_grpc import CacheStub
from .channel import Security, open_channel
from .sinks import Sink
from .trace_context import trace_metadata

T = TypeVar("T")

#: What gRPC is given to end a call at its deadline, before the call ends without it.
_SLACK_S: Final = 0.02
#: How long a connection that can be closed at once may take for it.
_CLOSE_S: Final = 0.01
#: Room for what surrounds the largest message.
_FRAMING_BYTES: Final = 64 * 2**10


class Calls(Protocol):
    """The calls that are one message each way, and small. Raise PrefixdError or grpc.RpcError."""

    def Lookup(self, request: pb.LookupRequest, *, timeout: float) -> pb.LookupResponse: ...
    def Claim(self, request: pb.ClaimRequest, *, timeout: float) -> pb.ClaimResponse: ...
    def Release(self, request: pb.ReleaseRequest, *, timeout: float) -> pb.ReleaseResponse: ...
    def Reserve(self, request: pb.ReserveRequest, *, timeout: float) -> pb.ReserveResponse: ...
    def Cancel(self, request: pb.CancelRequest, *, timeout: float) -> pb.CancelResponse: ...


class Connection:
    """A channel with its calls, `Calls` among them. Closing it fails whatever is under way on it.

    Every call but `Read` is waited for as a future: gRPC's blocking calls, and the closing of a
    channel, end only when all bytes have left, and a daemon that is stopped takes none.
    """

    def __init__(
        self, address: str, connect_timeout_ms: int, security: Security | None = None
    ) -> None:
        """`security`: see `open_channel`. Raises ConfigError."""
        #: What the channel was opened with.
        self.security: Final = security or Security.of_environment()
        self.channel = open_channel(address, _options(connect_timeout_ms), self.security)
        self.stub = CacheStub(self.channel)
        service = pb.DESCRIPTOR.services_by_name["Cache"].full_name
        # Saves encode their messages themselves (packing.py): no serializer.
        self._save: grpc.StreamUnaryMultiCallable[bytes, pb.SaveResponse] = (
            self.channel.stream_unary(f"/{service}/Save", None, pb.SaveResponse.FromString)
        )
        self._save_whole: grpc.UnaryUnaryMultiCallable[bytes, pb.SaveWholeResponse] = (
            self.channel.unary_unary(f"/{service}/SaveWhole", None, pb.SaveWholeResponse.FromString)
        )
        self._write: grpc.StreamUnaryMultiCallable[bytes, pb.WriteResponse] = (
            self.channel.stream_unary(f"/{service}/Write", None, pb.WriteResponse.FromString)
        )
        # Re-entrant: a finalizer that closes a forgotten client may run while it is held.
        self._lock = threading.RLock()
        self._under_way: set[grpc.Future[Any]] = set()
        self._closed = False

    # ---- Calls

    def Lookup(self, request: pb.LookupRequest, *, timeout: float) -> pb.LookupResponse:
        return self._result(
            self.stub.Lookup.future(request, timeout=timeout, metadata=trace_metadata()), timeout
        )

    def Claim(self, request: pb.ClaimRequest, *, timeout: float) -> pb.ClaimResponse:
        return self._granted(
            self.stub.Claim.future(request, metadata=trace_metadata()),
            timeout,
            partial(self._release, request),
        )

    def Release(self, request: pb.ReleaseRequest, *, timeout: float) -> pb.ReleaseResponse:
        return self._result(
            self.stub.Release.future(request, timeout=timeout, metadata=trace_metadata()), timeout
        )

    def Reserve(self, request: pb.ReserveRequest, *, timeout: float) -> pb.ReserveResponse:
        return self._granted(
            self.stub.Reserve.future(request, metadata=trace_metadata()),
            timeout,
            partial(self._cancel, request),
        )

    def Cancel(self, request: pb.CancelRequest, *, timeout: float) -> pb.CancelResponse:
        return self._result(
            self.stub.Cancel.future(request, timeout=timeout, metadata=trace_metadata()), timeout
        )

    # ---- payloads

    def save(
        self, messages: Iterator[bytes], timeout_s: float
    ) -> pb.SaveResponse | pb.SaveWholeResponse:
        """`Cache.Save` of encoded SaveRequests, `SaveWhole` if there is but one. Raises
        grpc.RpcError, PrefixdError."""
        first, second = next(messages), next(messages, None)
        if second is None:
            return self._result(
                self._save_whole.future(first, timeout=timeout_s, metadata=trace_metadata()),
                timeout_s,
            )
        stream = chain((first, second), messages)
        return self._result(
            self._save.future(stream, timeout=timeout_s, metadata=trace_metadata()), timeout_s
        )

    def write(self, messages: Iterator[bytes], timeout_s: float) -> pb.WriteResponse:
        """`Cache.Write` of encoded WriteRequests. Raises grpc.RpcError, PrefixdError."""
        return self._result(
            self._write.future(messages, timeout=timeout_s, metadata=trace_metadata()), timeout_s
        )

    def read(self, request: pb.ReadRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """`Cache.Read`, of `count` ranges. Raises grpc.RpcError, PrefixdError."""
        try:
            call = self.stub.Read(request, timeout=timeout_s, metadata=trace_metadata())
        except ValueError as problem:
            raise ClaimLost(f"the connection closed: {problem}") from None
        try:
            for response in call:
                for part in response.parts:
                    if part.range >= count:
                        raise PrefixdError(f"the daemon sent a range {part.range} of {count}")
                    ok = part.status == pb.READ_STATUS_OK
                    sink(part.range, part.offset_bytes, part.data if ok else None)
        finally:
            call.cancel()  # no effect once it has ended

    def close(self) -> None:
        """Returns at once; what gRPC still waits for it waits for in a thread of its own."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            under_way = list(self._under_way)
        for call in under_way:
            call.cancel()
        closing = threading.Thread(target=self.channel.close, name="prefixd-hang-up", daemon=True)
        try:
            closing.start()
        except RuntimeError:
            return  # the process ends, and with it the connection
        closing.join(_CLOSE_S)

    def _granted(self, call: grpc.Future[T], timeout_s: float, give_back: Callable[[T], None]) -> T:
        """The answer to a call that grants something. At the daemon it has no deadline: an answer
        that crosses it would be lost here, and what it grants be held as long as the session."""
        with self._lock:
            self._under_way.add(call)
            closed = self._closed
        if closed:
            call.cancel()
        try:
            answer = call.result(timeout_s)
        except BaseException as problem:
            call.add_done_callback(partial(self._came_late, give_back))
            if isinstance(problem, grpc.FutureTimeoutError):
                raise DeadlineExceeded("the daemon did not answer in time") from None
            if isinstance(problem, grpc.FutureCancelledError):
                raise DaemonUnavailable("the connection was closed") from None
            raise
        self._ended(call)
        return answer

    def _came_late(self, give_back: Callable[[T], None], call: grpc.Future[T]) -> None:
        """In gRPC's thread, or at once. Also of a call that failed, or ended with the session."""
        self._ended(call)
        if not call.cancelled() and call.exception() is None:
            with suppress(ValueError):  # the channel was closed: the session releases it
                give_back(call.result())

    def _release(self, asked: pb.ClaimRequest, granted: pb.ClaimResponse) -> None:
        if granted.claim_id:
            given = pb.ReleaseRequest(session=asked.session, claim_ids=[granted.claim_id])
            self._leave_alone(self.stub.Release.future(given))

    def _cancel(self, asked: pb.ReserveRequest, granted: pb.ReserveResponse) -> None:
        tokens = [result.token for result in granted.results if result.token]
        if tokens:
            given = pb.CancelRequest(session=asked.header.session, tokens=tokens)
            self._leave_alone(self.stub.Cancel.future(given))

    def _leave_alone(self, call: grpc.Future[Any]) -> None:
        """No thread waits for it. gRPC cancels a call that nothing refers to."""
        with self._lock:
            self._under_way.add(call)
        call.add_done_callback(self._ended)

    def _ended(self, call: grpc.Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(call)

    def _result(self, call: grpc.Future[T], timeout_s: float) -> T:
        with self._lock:
            self._under_way.add(call)
            closed = self._closed
        try:
            if closed:
                call.cancel()
            return call.result(timeout_s + _SLACK_S)
        except grpc.FutureTimeoutError:
            call.cancel()
            raise DeadlineExceeded("the daemon did not take the call in time") from None
        except grpc.FutureCancelledError:
            raise DaemonUnavailable("the connection was closed") from None
        finally:
            self._ended(call)


def _options(connect_timeout_ms: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
        # Each attempt to connect is a new channel: it must not inherit the waits of the last.
        ("grpc.use_local_subchannel_pool", 1),
        # What gRPC takes as the time that connecting may take.
        ("grpc.min_reconnect_backoff_ms", connect_timeout_ms),
        ("grpc.initial_reconnect_backoff_ms", connect_timeout_ms),
        # A cache daemon is next door; $http_proxy is not meant for it.
        ("grpc.enable_http_proxy", 0),
        # Reads run in the thread that reads, without a hand-over for each message: 2 x as fast.
        (ChannelOptions.SingleThreadedUnaryStream, 1),
    ]


def unanswered(problem: grpc.RpcError) -> bool:
    """Is the deadline what ended the call, and not the daemon?"""
    metadata = dict(cast("Iterable[tuple[str, str]]", problem.trailing_metadata() or ()))
    ended_here = ERROR_METADATA not in metadata
    return ended_here and problem.code() is grpc.StatusCode.DEADLINE_EXCEEDED
