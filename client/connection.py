"""One gRPC connection to a daemon, set up for moving payloads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final, Protocol

import grpc
from grpc.experimental import ChannelOptions

from ..proto import prefixd_pb2 as pb
from ..proto.limits import MAX_MESSAGE_BYTES
from ..proto.prefixd_pb2_grpc import CacheStub

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
    """A channel with its calls. Closing it fails whatever is under way on it."""

    def __init__(self, address: str, connect_timeout_ms: int) -> None:
        self.channel = grpc.insecure_channel(address, _options(connect_timeout_ms))
        self.stub = CacheStub(self.channel)
        service = pb.DESCRIPTOR.services_by_name["Cache"].full_name
        # Saves encode their messages themselves (saving.py): no serializer.
        self._save: grpc.StreamUnaryMultiCallable[bytes, pb.SaveResponse] = (
            self.channel.stream_unary(f"/{service}/Save", None, pb.SaveResponse.FromString)
        )
        self._save_whole: grpc.UnaryUnaryMultiCallable[bytes, pb.SaveWholeResponse] = (
            self.channel.unary_unary(f"/{service}/SaveWhole", None, pb.SaveWholeResponse.FromString)
        )
        self._write: grpc.StreamUnaryMultiCallable[bytes, pb.WriteResponse] = (
            self.channel.stream_unary(f"/{service}/Write", None, pb.WriteResponse.FromString)
        )

    def save(
        self, messages: Iterator[bytes], timeout_s: float
    ) -> pb.SaveResponse | pb.SaveWholeResponse:
        """`Cache.Save` of encoded SaveRequests, `SaveWhole` if there is but one. Raises
        grpc.RpcError."""
        first, second = next(messages), next(messages, None)
        if second is None:
            return self._save_whole(first, timeout=timeout_s)
        return self._save(chain((first, second), messages), timeout=timeout_s)

    def write(self, messages: Iterator[bytes], timeout_s: float) -> pb.WriteResponse:
        """`Cache.Write` of encoded WriteRequests. Raises grpc.RpcError."""
        return self._write(messages, timeout=timeout_s)

    def close(self) -> None:
        self.channel.close()


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
