"""The operator's connection to a daemon: the Admin service and the health check.

The Admin service has a socket of its own, which only the daemon's user may use. The health check is
served where workers connect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto import prefixd_pb2_grpc as pb_grpc
from ...proto.endpoints import socket_path
from ...proto.errors import DaemonUnavailable, DeadlineExceeded, PrefixdError, from_grpc
from ...proto.vocabulary import Tier
from ..wire.reach import DENIED, NOT_RELIED_ON, Reached, reach
from ..wire.security import open_channel, operators_of

Response = TypeVar("Response")

CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    # A new line to the same daemon must not inherit the backoff of the last.
    ("grpc.use_local_subchannel_pool", 1),
    # Over TCP: reconnect to a restarted daemon soon, without a back-off of minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A daemon is never behind the proxy to the internet.
    ("grpc.enable_http_proxy", 0),
]
#: How long a socket may take to accept a connection when several are tried.
_PROBE_S: Final = 1.0
_WHAT_TO_DO: Final = (
    "Start one with `prefixd`, or say where it is with --address or $PREFIXD_ADDRESS"
)
#: Entries in a page. An entry with many extents takes kilobytes.
PAGE_ENTRIES: Final = 1_000


class AdminConnection:
    """One daemon. Every call raises the daemon's error (`proto.errors`), or DaemonUnavailable with
    a sentence that says where no daemon answers and what to do.

    Connects with the first call. A context manager; may be used from several threads.
    """

    def __init__(self, address: str, timeout_s: float, operators: str | None = None) -> None:
        """`address` is where workers connect. `operators` is the address of the Admin service, if
        it is not the default one beside `address` (`server.admin_address`)."""
        self.address = address
        self.timeout_s = timeout_s
        # None over TCP without TLS and a token. The calls below then raise DaemonUnavailable.
        self._operators = operators or operators_of(address)
        self._lines: dict[str, _Line] = {}

    def __enter__(self) -> AdminConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def stats(self) -> pb.StatsResponse:
        return self._operate(self._admin.Stats, pb.StatsRequest())

    def next_victims(self, tier: Tier, limit: int) -> list[pb.EntryDetail]:
        """The next victims of a tier in their order, then some pinned entries; at most `limit`, and
        at most a page."""
        request = pb.ListEntriesRequest(
            tier=wire_tier(tier),
            page_entries=min(limit, limits.MAX_PAGE_ENTRIES),
            next_victims=True,
        )
        return list(self._operate(self._admin.ListEntries, request).entries)

    def all_entries(self, tier: Tier) -> Iterator[pb.EntryDetail]:
        """Every entry of a tier, in no order. Fetches a page at a time."""
        request = pb.ListEntriesRequest(tier=wire_tier(tier), page_entries=PAGE_ENTRIES)
        for page in self._pages(self._admin.ListEntries, request):
            yield from page.entries

    def inspect(self, key: bytes, *, verify: bool) -> pb.InspectResponse:
        return self._operate(self._admin.Inspect, pb.InspectRequest(key=key, verify=verify))

    def all_claims(self) -> Iterator[pb.ClaimDetail]:
        """Every claim, with the first of its keys. Fetches a page at a time."""
        request = pb.ListClaimsRequest(page_claims=PAGE_ENTRIES)
        for page in self._pages(self._admin.ListClaims, request):
            yield from page.claims

    def all_reservations(self) -> Iterator[pb.ReservationDetail]:
        """Every save that is not published yet. Fetches a page at a time."""
        request = pb.ListReservationsRequest(page_reservations=PAGE_ENTRIES)
        for page in self._pages(self._admin.ListReservations, request):
            yield from page.reservations

    def identities(self, digest: bytes = b"") -> list[pb.AnnouncedIdentity]:
        """What clients with an open session have announced. `digest`: the beginning of one; only
        then their words come along."""
        request = pb.ListIdentitiesRequest(digest=digest)
        return list(self._operate(self._admin.ListIdentities, request).identities)

    def sessions(self) -> pb.ListSessionsResponse:
        return self._operate(self._admin.ListSessions, pb.ListSessionsRequest())

    def preview(
        self, tier: Tier, payload_bytes: int, entries: int, namespace: str = ""
    ) -> pb.PreviewResponse:
        request = pb.PreviewRequest(
            tier=wire_tier(tier),
            payload_bytes=payload_bytes,
            entries=entries,
            namespace=namespace,
        )
        return self._operate(self._admin.Preview, request)

    def evict(self, free_bytes: int, tiers: Sequence[Tier]) -> pb.EvictResponse:
        """Evict from each of these tiers; empty: from all."""
        numbers = [wire_tier(tier) for tier in tiers] or [t.tier for t in self.stats().tiers]
        request = pb.EvictRequest(free_bytes=free_bytes, tiers=numbers)
        return self._operate(self._admin.Evict, request)

    def drop(self, keys: Sequence[bytes]) -> list[int]:
        """What became of each key: `pb.DeleteStatus`."""
        return list(self._operate(self._admin.Drop, pb.DropRequest(keys=keys)).results)

    def drain(self, within_s: float, *, stop: bool, resume: bool) -> pb.DrainResponse:
        within_ms = min(round(within_s * 1000), 2**32 - 1)
        request = pb.DrainRequest(within_ms=within_ms, stop=stop, resume=resume)
        return self._operate(self._admin.Drain, request)

    def set_log_level(self, level: str) -> pb.SetLogLevelResponse:
        """`level`: `debug`, `info`, `warning` or `error`."""
        request = pb.SetLogLevelRequest(level=pb.LogLevel.Value(f"LOG_LEVEL_{level.upper()}"))
        return self._operate(self._admin.SetLogLevel, request)

    def why(self, beginning: bytes) -> pb.WhyResponse:
        return self._operate(self._admin.Why, pb.WhyRequest(key=beginning))

    def oldest_claims(self, count: int) -> list[pb.ClaimDetail]:
        """The oldest claims, the oldest first."""
        request = pb.ListClaimsRequest(page_claims=count)
        return list(self._operate(self._admin.ListClaims, request).claims)

    def clear(
        self, namespace: str, tiers: Sequence[Tier], *, dry_run: bool = False
    ) -> pb.ClearResponse:
        """Drop entries of a namespace. Empty `tiers` means all."""
        request = pb.ClearRequest(namespace=namespace, tiers=map(wire_tier, tiers), dry_run=dry_run)
        return self._operate(self._admin.Clear, request)

    def resize(self, tier: Tier, budget_bytes: int) -> pb.ResizeResponse:
        request = pb.ResizeRequest(tier=wire_tier(tier), budget_bytes=budget_bytes)
        return self._operate(self._admin.Resize, request)

    def kick(self, session_id: int) -> None:
        """End a session. Raises UnknownSession."""
        self._operate(self._admin.Kick, pb.KickRequest(session_id=session_id))

    def configure(self, *, apply: bool) -> pb.ConfigureResponse:
        """The options whose configuration changed. `apply` also applies those that can change at
        run time."""
        return self._operate(self._admin.Configure, pb.ConfigureRequest(apply=apply))

    def curve(self, tier: Tier, budgets_bytes: Sequence[int] = ()) -> pb.CurveResponse:
        """What a tier would hit at these budgets. Empty: at a quarter to four times its own."""
        request = pb.CurveRequest(tier=wire_tier(tier), budget_bytes=budgets_bytes)
        return self._operate(self._admin.Curve, request)

    def gc(self) -> pb.GcResponse:
        return self._operate(self._admin.Gc, pb.GcRequest())

    def check(self) -> pb.CheckResponse:
        return self._operate(self._admin.Check, pb.CheckRequest())

    def verify(self, tiers: Sequence[Tier] = ()) -> Generator[pb.VerifyResponse, None, None]:
        """Have the daemon read these tiers back (empty: all). Yields its progress and its findings
        so far, until `done`. Closing the iterator stops the daemon. The timeout is for each
        message."""
        request = pb.VerifyRequest(tiers=[wire_tier(tier) for tier in tiers])
        problems: list[str] = []
        with closing(self._streamed(self._admin.Verify, request)) as messages:
            for message in messages:
                problems += message.problems
                message.problems[:] = problems
                yield message

    def record(self, sample_permille: int) -> Generator[pb.RecordResponse, None, None]:
        """What all clients look up from now on, until the iterator is closed: this share of the
        prompts. Yields at least once a second. Raises LimitReached while another call records."""
        return self._streamed(self._admin.Record, pb.RecordRequest(sample_permille=sample_permille))

    def _streamed(self, method: Callable[..., Any], request: object) -> Generator[Any, None, None]:
        """The messages of a stream, each read when it is taken; the timeout is for each."""
        address = self._operators_address()
        call = method(request)
        # In a thread, because gRPC has no deadline for a single message of a stream.
        with ThreadPoolExecutor(1, "prefixctl-stream") as thread:
            try:
                while (
                    message := thread.submit(next, call, None).result(self.timeout_s)
                ) is not None:
                    yield message
            except grpc.RpcError as failure:
                raise self._explained(address, from_grpc(failure)) from None
            except TimeoutError:
                raise self._explained(address, DeadlineExceeded("no message came")) from None
            finally:
                call.cancel()  # no effect if it has ended

    def health(self) -> bool:
        """Whether the whole daemon serves, as its health service says."""
        request = health_pb2.HealthCheckRequest()
        response = self._call(self.address, self._line(self.address).health, request)
        return response.status == health_pb2.HealthCheckResponse.SERVING

    @property
    def _admin(self) -> pb_grpc.AdminStub:
        """The Admin service. Raises DaemonUnavailable."""
        return self._line(self._operators_address()).admin

    def _line(self, address: str) -> _Line:
        """The line to an address, which is kept as long as it is to the daemon that is there.
        Raises DaemonUnavailable."""
        line = self._lines.get(address)
        if line is not None and not line.reached.there:
            del self._lines[address]
            line.close()
            line = None
        if line is None:
            try:
                reached = reach([address], self.timeout_s)
            except DaemonUnavailable as problem:
                raise self._explained(address, problem) from None
            line = self._lines.setdefault(address, _Line(reached))
        return line

    def _operate(self, method: Callable[..., Response], request: object) -> Response:
        return self._call(self._operators_address(), method, request)

    def _pages(self, method: Callable[..., Response], request: Any) -> Iterator[Response]:
        """Every page of a list. Each is fetched when it is taken."""
        while True:
            page: Any = self._operate(method, request)
            yield page
            if not page.next_cursor:
                return
            request.cursor = page.next_cursor

    def _operators_address(self) -> str:
        if self._operators is None:
            raise DaemonUnavailable(
                f"without TLS, operators are served on the daemon's own host, not at "
                f"{self.address}: give --address the daemon's Unix socket, or set $PREFIXD_TLS_CA "
                "and $PREFIXD_TOKEN_FILE"
            )
        return self._operators

    def _call(self, address: str, method: Callable[..., Response], request: object) -> Response:
        try:
            return method(request, timeout=self.timeout_s)
        except grpc.RpcError as failure:
            raise self._explained(address, from_grpc(failure)) from None

    def _explained(self, address: str, error: PrefixdError) -> PrefixdError:
        if isinstance(error, DaemonUnavailable) and (line := self._lines.pop(address, None)):
            line.close()
        match error:
            case DaemonUnavailable() if DENIED in str(error):
                return DaemonUnavailable(
                    f"permission denied on {address}; run this as the daemon's user"
                )
            case DaemonUnavailable() if NOT_RELIED_ON in str(error):
                return DaemonUnavailable(f"{error}; run this as that user")
            case DaemonUnavailable() if pid := _starting(self.address):
                return DaemonUnavailable(
                    f"the daemon with pid {pid} does not listen at {address}: it is starting or "
                    "stopping, or makes a socket again that was removed; try again soon"
                )
            case DaemonUnavailable():
                return DaemonUnavailable(f"no daemon answers at {address}. {_WHAT_TO_DO}")
            case DeadlineExceeded():
                return DeadlineExceeded(
                    f"the daemon at {address} did not answer within {self.timeout_s:g} s; "
                    "--timeout gives it longer"
                )
        return error


class _Line:
    """A channel to one address, to a server whose user was checked."""

    def __init__(self, reached: Reached) -> None:
        self.reached: Final = reached
        self._channel: Final = open_channel(reached.target, CHANNEL_OPTIONS)
        self.admin: Final = pb_grpc.AdminStub(self._channel)
        # The generated stub has no types.
        self.health: Final[Callable[..., health_pb2.HealthCheckResponse]] = (
            self._channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
        )

    def close(self) -> None:
        self._channel.close()
        self.reached.close()


def found_among(addresses: Sequence[str]) -> str:
    """The first address at which a daemon answers. Raises DaemonUnavailable."""
    try:
        reached = reach(addresses, _PROBE_S)
    except DaemonUnavailable as problem:
        raise DaemonUnavailable(f"{problem}. {_WHAT_TO_DO}") from None
    reached.close()
    return reached.address


def _starting(address: str) -> int:
    """The process named in the socket's lock file, 0 if there is none.

    Only reads the file. Taking the lock would keep it from a daemon that is just starting.
    """
    path = socket_path(address)
    if path is None:
        return 0
    try:
        pid = int(json.loads(path.with_name(f"{path.name}.lock").read_text())["pid"])
        os.kill(pid, 0)
    except PermissionError as problem:
        return pid if problem.filename is None else 0
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0
    return pid


def wire_tier(tier: Tier) -> pb.Tier.ValueType:
    """The number of a tier on the wire."""
    return pb.Tier.Value(f"TIER_{tier.name}")
