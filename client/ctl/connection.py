"""The operator's connection to a daemon: the Admin service and the health check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto import prefixd_pb2_grpc as pb_grpc
from ...proto.errors import DaemonUnavailable, DeadlineExceeded, PrefixdError, from_grpc
from ...proto.vocabulary import Tier

Response = TypeVar("Response")

CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    # A restarted daemon is found at once, not after a back-off of minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A daemon is never behind the proxy that leads to the internet.
    ("grpc.enable_http_proxy", 0),
]
#: Entries fetched at a time. An entry of many extents takes kilobytes.
PAGE_ENTRIES: Final = 1_000


class Health(Enum):
    """What the health service says of a daemon."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"


class AdminConnection:
    """One daemon. Every call raises the error that the daemon raised (`proto.errors`), or
    DaemonUnavailable with a sentence that says where nobody answered and what to do.

    Connects with the first call. A context manager; may be used from several threads.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._admin = pb_grpc.AdminStub(self._channel)
        # The generated stub has no types.
        self._health = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def __enter__(self) -> AdminConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def stats(self) -> pb.StatsResponse:
        return self._call(self._admin.Stats, pb.StatsRequest())

    def entries(self, tier: Tier, limit: int, cursor: int = 0) -> tuple[list[pb.EntryDetail], int]:
        """Up to `limit` entries of a tier (0: all), next victim first, and where the next page
        begins (0: nowhere, these were the last)."""
        found: list[pb.EntryDetail] = []
        for response in self._pages(tier, limit, cursor):
            found += response.entries
            cursor = response.next_cursor
            if limit and len(found) >= limit:
                break
        return found, cursor

    def all_entries(self, tier: Tier) -> Iterator[pb.EntryDetail]:
        """Every entry of a tier, next victim first, a page at a time."""
        for response in self._pages(tier, 0, 0):
            yield from response.entries

    def _pages(self, tier: Tier, limit: int, cursor: int) -> Iterator[pb.ListEntriesResponse]:
        """Pages of at most `limit` entries (0: as large as is good), until the last."""
        while True:
            request = pb.ListEntriesRequest(
                tier=wire_tier(tier),
                page_entries=min(limit or PAGE_ENTRIES, PAGE_ENTRIES),
                cursor=cursor,
            )
            response = self._call(self._admin.ListEntries, request)
            yield response
            cursor = response.next_cursor
            if not cursor:
                return
            if limit:
                limit -= len(response.entries)

    def inspect(self, key: bytes, *, verify: bool) -> pb.InspectResponse:
        return self._call(self._admin.Inspect, pb.InspectRequest(key=key, verify=verify))

    def claims(self) -> pb.ListClaimsResponse:
        return self._call(self._admin.ListClaims, pb.ListClaimsRequest())

    def reservations(self) -> pb.ListReservationsResponse:
        return self._call(self._admin.ListReservations, pb.ListReservationsRequest())

    def sessions(self) -> pb.ListSessionsResponse:
        return self._call(self._admin.ListSessions, pb.ListSessionsRequest())

    def preview(self, tier: Tier, payload_bytes: int, entries: int) -> pb.PreviewResponse:
        request = pb.PreviewRequest(
            tier=wire_tier(tier), payload_bytes=payload_bytes, entries=entries
        )
        return self._call(self._admin.Preview, request)

    def evict(self, free_bytes: int, tiers: Sequence[Tier]) -> pb.EvictResponse:
        request = pb.EvictRequest(free_bytes=free_bytes, tiers=[wire_tier(tier) for tier in tiers])
        return self._call(self._admin.Evict, request)

    def curve(self, tier: Tier, budgets_bytes: Sequence[int] = ()) -> pb.CurveResponse:
        """What a tier would hit at these budgets; at a quarter to four times its own if empty."""
        request = pb.CurveRequest(tier=wire_tier(tier), budget_bytes=budgets_bytes)
        return self._call(self._admin.Curve, request)

    def gc(self) -> pb.GcResponse:
        return self._call(self._admin.Gc, pb.GcRequest())

    def check(self, *, deep: bool) -> pb.CheckResponse:
        return self._call(self._admin.Check, pb.CheckRequest(deep=deep))

    def health(self, *, wait_for_ready: bool = False) -> Health:
        """What the health service says of the daemon as a whole.

        `wait_for_ready`: wait for a daemon that does not answer yet, within the timeout.
        """
        request = health_pb2.HealthCheckRequest()
        response = self._call(self._health, request, wait_for_ready=wait_for_ready)
        serving = response.status == health_pb2.HealthCheckResponse.SERVING
        return Health.SERVING if serving else Health.NOT_SERVING

    def _call(
        self, method: Callable[..., Response], request: object, *, wait_for_ready: bool = False
    ) -> Response:
        try:
            return method(request, timeout=self.timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as failure:
            raise self._explained(from_grpc(failure)) from None

    def _explained(self, error: PrefixdError) -> PrefixdError:
        match error:
            case DaemonUnavailable():
                return DaemonUnavailable(
                    f"no daemon answers at {self.address}; start one with `prefixd`, or say "
                    "where it is with --address or $PREFIXD_ADDRESS"
                )
            case DeadlineExceeded():
                return DeadlineExceeded(
                    f"the daemon at {self.address} did not answer within {self.timeout_s:g} s; "
                    "--timeout gives it longer"
                )
        return error


def wire_tier(tier: Tier) -> pb.Tier.ValueType:
    """A tier as it is written on the wire."""
    return pb.Tier.Value(f"TIER_{tier.name}")
