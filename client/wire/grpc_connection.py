"""One gRPC connection to a daemon, with the calls that move payloads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message
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
from .deadline import woken
from .reach import Reached, reach
from .security import Security, open_channel
from .trace_context import trace_metadata
from .transport import Sink

T = TypeVar("T")
RequestT = TypeVar("RequestT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)

#: How long after its deadline gRPC may end a call before the call gives up on gRPC.
_SLACK_S: Final = 0.02
#: How long `close` waits for a connection that closes at once.
_CLOSE_S: Final = 0.01
#: Room for the framing of the largest message.
_FRAMING_BYTES: Final = 64 * 2**10


class Calls(Protocol):
    """Makes calls with one small message each way."""

    def call(self, rpc: str, request: Message, response: type[T], timeout_s: float, /) -> T:
        """Call an rpc of the service Cache, and return its response, which is of type `response`.
        Raises PrefixdError, grpc.RpcError."""


class _Rpc(Protocol[RequestT_contra, T]):
    """An rpc of a gRPC stub, with one response."""

    def future(
        self,
        request: RequestT_contra,
        /,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> grpc.Future[T]: ...


class GrpcConnection:
    """A channel with its calls; implements `Calls`. Closing it makes the calls in progress fail.

    Every call but `Read` waits for a future. gRPC's blocking calls, and closing a channel, return
    only when all bytes have been sent, and a daemon that is stopped (SIGSTOP) receives none.
    """

    def __init__(
        self, address: str | Reached, connect_timeout_ms: int, security: Security | None = None
    ) -> None:
        """`address`: also one that was reached, which the connection then owns. `security`: see
        `open_channel`. Raises ConfigError, DaemonUnavailable."""
        self.security: Final = security or Security.of_environment()
        if isinstance(address, str):
            address = reach([address], connect_timeout_ms / 1e3)
        self._reached: Final = address
        self.address: Final = address.address
        try:
            target, options = address.target, _options(connect_timeout_ms)
            self.channel = open_channel(target, options, self.security)
        except BaseException:
            address.close()
            raise
        self.stub = CacheStub(self.channel)
        service = pb.DESCRIPTOR.services_by_name["Cache"].full_name
        # No serializer: `messages.pack` encodes the messages.
        path, parse = f"/{service}/Save", pb.SaveResponse.FromString
        self._save: grpc.StreamUnaryMultiCallable[bytes, pb.SaveResponse] = (
            self.channel.stream_unary(path, None, parse)
        )
        #: The same, of one message: gRPC needs half the time where it needs no thread that sends.
        self._save_whole: grpc.UnaryUnaryMultiCallable[bytes, pb.SaveResponse] = (
            self.channel.unary_unary(path, None, parse)
        )
        # Re-entrant: the finalizer of a forgotten client may run while this thread holds it.
        self._lock = threading.RLock()
        self._in_progress: set[grpc.Future[Any]] = set()
        self._closed = False

    # ---- Calls

    def call(self, rpc: str, request: Message, _response: type[T], timeout_s: float, /) -> T:
        method: _Rpc[Message, T] = getattr(self.stub, rpc)
        give_back = _GIVE_BACK.get(rpc)
        if give_back is None:
            return self._result(method, request, timeout_s)
        return self._granted(method, request, timeout_s, partial(give_back, self))

    # ---- payloads

    def save(self, messages: Iterator[bytes], timeout_s: float) -> pb.SaveResponse:
        """`Cache.Save` of encoded SaveRequests. Raises grpc.RpcError, PrefixdError."""
        first, second = next(messages), next(messages, None)
        if second is None:
            return self._result(self._save_whole, first, timeout_s)
        return self._result(self._save, chain((first, second), messages), timeout_s)

    def read(self, request: pb.ReadRequest, count: int, sink: Sink, timeout_s: float) -> None:
        """`Cache.Read` of `count` ranges. Raises grpc.RpcError, PrefixdError."""
        try:
            call = self.stub.Read(request, timeout=timeout_s, metadata=trace_metadata())
        except ValueError as problem:
            raise ClaimLost(f"the connection closed: {problem}") from None
        try:
            with woken(call.cancel):
                for response in call:
                    for part in response.parts:
                        if part.range >= count:
                            raise PrefixdError(f"the daemon sent a range {part.range} of {count}")
                        ok = part.status == pb.READ_STATUS_OK
                        sink(part.range, part.offset_bytes, part.data if ok else None)
        finally:
            call.cancel()  # no effect once it has ended

    def close(self) -> None:
        """Returns at once. Whatever gRPC still waits for, it waits for in another thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            in_progress = list(self._in_progress)
        for call in in_progress:
            call.cancel()
        self._reached.close()
        closing = threading.Thread(target=self.channel.close, name="prefixd-hang-up", daemon=True)
        try:
            closing.start()
        except RuntimeError:
            return  # the process is exiting, which ends the connection
        closing.join(_CLOSE_S)

    def _granted(
        self,
        rpc: _Rpc[RequestT, T],
        request: RequestT,
        timeout_s: float,
        give_back: Callable[[RequestT, T], None],
    ) -> T:
        """The response to a call that grants something.

        gRPC gets no deadline for it. Otherwise a response that crosses the deadline would be lost
        here, and the daemon would hold what it granted as long as the session lasts.
        """
        call = self._started(rpc.future(request, metadata=trace_metadata()))
        try:
            response = call.result(timeout_s)
        except BaseException as problem:
            call.add_done_callback(partial(self._came_late, partial(give_back, request)))
            if isinstance(problem, grpc.FutureTimeoutError):
                raise DeadlineExceeded("the daemon did not answer in time") from None
            if isinstance(problem, grpc.FutureCancelledError):
                raise DaemonUnavailable("the connection was closed") from None
            raise
        self._ended(call)
        return response

    def _came_late(self, give_back: Callable[[T], None], call: grpc.Future[T]) -> None:
        """The call has ended after its caller gave up, perhaps without a response. Runs in gRPC's
        thread, or at once in the caller's."""
        self._ended(call)
        if not call.cancelled() and call.exception() is None:
            with suppress(ValueError):  # the channel was closed: the session's end releases it
                give_back(call.result())

    def _release(self, request: pb.ClaimRequest, granted: pb.ClaimResponse) -> None:
        if granted.claim_id:
            release = pb.ReleaseRequest(session=request.session, claim_ids=[granted.claim_id])
            self._started(self.stub.Release.future(release)).add_done_callback(self._ended)

    def _cancel(self, request: pb.ReserveRequest, granted: pb.ReserveResponse) -> None:
        tokens = [result.token for result in granted.results if result.token]
        if tokens:
            cancel = pb.CancelRequest(session=request.header.session, tokens=tokens)
            self._started(self.stub.Cancel.future(cancel)).add_done_callback(self._ended)

    def _started(self, call: grpc.Future[T]) -> grpc.Future[T]:
        """Keep a reference, because gRPC cancels a call that nothing refers to. Cancels the call if
        the connection is closed."""
        with self._lock:
            self._in_progress.add(call)
            closed = self._closed
        if closed:
            call.cancel()
        return call

    def _ended(self, call: grpc.Future[Any]) -> None:
        with self._lock:
            self._in_progress.discard(call)

    def _result(self, rpc: _Rpc[RequestT, T], request: RequestT, timeout_s: float) -> T:
        """The response of a unary call; `request`: a message, or an iterator of them."""
        call = self._started(rpc.future(request, timeout=timeout_s, metadata=trace_metadata()))
        try:
            return call.result(timeout_s + _SLACK_S)
        except grpc.FutureTimeoutError:
            call.cancel()
            raise DeadlineExceeded("the daemon did not take the call in time") from None
        except grpc.FutureCancelledError:
            raise DaemonUnavailable("the connection was closed") from None
        finally:
            self._ended(call)


#: How to give back what a call granted after its caller gave up, of rpcs that grant something.
_GIVE_BACK: Final[dict[str, Callable[[GrpcConnection, Any, Any], None]]] = {
    "Claim": GrpcConnection._release,
    "Reserve": GrpcConnection._cancel,
}


def _options(connect_timeout_ms: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
        # Each attempt to connect is a new channel, which must not inherit the backoff of the last.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC takes the time that an attempt to connect may take from these.
        ("grpc.min_reconnect_backoff_ms", connect_timeout_ms),
        ("grpc.initial_reconnect_backoff_ms", connect_timeout_ms),
        # $http_proxy is not meant for a cache daemon, which is nearby.
        ("grpc.enable_http_proxy", 0),
        # Messages of a read arrive in the thread that reads them, without a switch to another
        # thread for each: 2 x as fast.
        (ChannelOptions.SingleThreadedUnaryStream, 1),
    ]


def unanswered(problem: grpc.RpcError) -> bool:
    """Whether the call's deadline ended it, and not a response of the daemon."""
    metadata = dict(cast("Iterable[tuple[str, str]]", problem.trailing_metadata() or ()))
    ended_here = ERROR_METADATA not in metadata
    return ended_here and problem.code() is grpc.StatusCode.DEADLINE_EXCEEDED
