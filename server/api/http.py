"""HTTP for monitors, orchestrators and browsers: `/metrics`, `/healthz`, `/readyz`, and the page at
`/`, which shows what `prefixctl top` shows. It changes nothing.

The page is one HTML file that polls `/status.json`. `status_of` names each field of that: no key,
no address, no secret. Samples are taken on the event loop, one for all that ask at the same time,
so that any number of viewers cost the daemon one sample each half second.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR
from socket import socket as Socket
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from ...proto import prefixd_pb2 as pb
from ...proto.vocabulary import Tier
from ..core.arrivals import Arrivals
from ..core.events import TierState
from ..runtime.limited_log import LimitedLog
from .admin_views import AdminViews
from .calls import Caller
from .grpc_connections import network_of
from .metrics import StateCollector
from .usage import words_of

log = LimitedLog("prefixd.page")

#: How long a client may take to send its request, or to take the response.
_PATIENCE_S: Final = 5.0
#: Connections at once, each with a thread; beyond them the host that has most loses its oldest.
MAX_CONNECTIONS: Final = 64
#: The port behind a name.
_HOST: Final = re.compile(r":\d*$")
_TEXT: Final = "text/plain; charset=utf-8"
#: How long a sample is served before a new one is taken.
FRESH_S: Final = 0.5
#: How long the event loop may take for a sample.
_ANSWERED_WITHIN_S: Final = 5.0
_OLDEST_CLAIMS: Final = 5
#: The part of a processor that each form of the metrics takes, however many ask for it.
AT_MOST = 0.1
_OPENMETRICS: Final = "application/openmetrics-text"
_TIER_FIELDS: Final = (
    "budget_bytes", "published_bytes", "reserved_bytes", "pinned_bytes", "entries", "hits",
    "saved_bytes", "evicted_bytes",
)  # fmt: skip


# ---- the server


def _is_loopback(host: str) -> bool:
    host = host.strip("[]").rstrip(".").lower()
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _Reply(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes
    #: Content-Security-Policy. Texts and numbers have nothing to run or to embed.
    policy: str = "default-src 'none'; frame-ancestors 'none'"


#: By path: (Accept header) -> response.
_Paths: TypeAlias = Mapping[str, Callable[[str], _Reply]]


class Kept:
    """What takes long to make, made for all who ask in some time. Thread-safe."""

    def __init__(
        self, make: Callable[[], bytes], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._now_s = now_s
        self._lock = threading.Lock()
        self._made = b""
        self._until_s = 0.0

    def get(self) -> bytes:
        """Made again no sooner than `AT_MOST` allows."""
        with self._lock:
            began_s = self._now_s()
            if began_s >= self._until_s:
                self._made = self._make()
                ended_s = self._now_s()
                self._until_s = ended_s + (ended_s - began_s) * (1 / AT_MOST - 1)
            return self._made


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, paths: _Paths) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self.paths = paths
        self._loopback = _is_loopback(host)
        self._open: Final[Arrivals[Socket]] = Arrivals()
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def knows(self, hosts: list[str]) -> bool:
        """Whether a request was meant for this server. On loopback it serves this machine: a web
        page that made a name of its own lead here (DNS rebinding) would show itself by that name.
        Browsers always send one. Elsewhere the names are those of the network."""
        if not self._loopback or not hosts:
            return True
        return len(hosts) == 1 and _is_loopback(_HOST.sub("", hosts[0]))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Close a connection when there are too many: clients that send nothing, or a byte now and
        then, must not keep others out."""
        with self._lock:
            worst = self._open.take_worst() if len(self._open) >= MAX_CONNECTIONS else None
            self._open.add(request, network_of(client_address[0]))
        if worst is not None:
            with suppress(OSError):  # it may have ended at this moment
                worst.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not logged: clients hang up all the time."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server_version = "prefixd"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        answer = self.server.paths.get(self.path.partition("?")[0])
        if not self.server.knows(self.headers.get_all("Host", [])):
            reply = _Reply(HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b"no host of this name here\n")
        elif answer is None:
            reply = _Reply(HTTPStatus.NOT_FOUND, _TEXT, b"not found\n")
        else:
            reply = answer(self.headers.get("Accept", ""))
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", reply.policy)
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_HEAD = do_GET

    def log_message(self, *_args: object) -> None:
        """Not logged: scrapes come every few seconds."""


def _paths(collector: StateCollector, board: Board | None) -> _Paths:
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    encoders = {accept: choose_encoder(accept) for accept in ("", _OPENMETRICS)}
    kept = {accept: Kept(partial(encode, registry)) for accept, (encode, _) in encoders.items()}

    def metrics(accepted: str) -> _Reply:
        accept = _OPENMETRICS if _OPENMETRICS in accepted else ""
        return _Reply(HTTPStatus.OK, encoders[accept][1], kept[accept].get())

    def ready(_accepted: str) -> _Reply:
        problems = collector.unhealthy()
        lines = [f"{part}: {why}" for part, why in problems.items()] or ["serving"]
        status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        return _Reply(status, _TEXT, ("\n".join(lines) + "\n").encode())

    def alive(_accepted: str) -> _Reply:
        return _Reply(HTTPStatus.OK, _TEXT, b"alive\n")

    paths = {"/metrics": metrics, "/healthz": alive, "/readyz": ready}
    if board is None:
        return paths
    html, policy = load_page()

    def page(_accepted: str) -> _Reply:
        return _Reply(HTTPStatus.OK, "text/html; charset=utf-8", html, policy)

    def status(_accepted: str) -> _Reply:
        try:
            return _Reply(HTTPStatus.OK, "application/json", board.sample())
        except NoSample as problem:
            return _Reply(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{problem}\n".encode())

    return {**paths, "/": page, "/status.json": status}


@contextmanager
def serve_metrics(
    address: str, collector: StateCollector, board: Board | None = None
) -> Iterator[str]:
    """Serve on `host:port`, on threads of its own, until the context ends. Yields the address, with
    the port that the kernel chose for port 0. Raises OSError.

    `/metrics`: those of the collector and the usual `process_` metrics. `/healthz`: 200 while the
    process answers. `/readyz`: 503, with the reasons, while the daemon is not serving. With a
    `board` also the page, `/`, and what it polls, `/status.json`: 503 while the event loop does
    not answer.
    """
    host, _, port = address.rpartition(":")
    try:
        server = _Server(host.strip("[]"), int(port), _paths(collector, board))
    except OSError as problem:
        raise OSError(f"server.metrics: can't serve metrics on {address}: {problem}") from None
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="prefixd-http")
    thread.daemon = True
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---- the page


class NoSample(Exception):  # its message is shown to the viewer
    """The daemon gave no sample; says why."""


class Board:
    """Samples of a running daemon, for the threads of the server. Made on the event loop."""

    def __init__(self, admin: AdminViews, now_s: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._now_s = now_s
        self._loop = asyncio.get_running_loop()
        self._one = threading.Lock()
        self._sample = b""
        self._taken_s = 0.0
        #: Kept because asyncio itself holds no strong reference to a running task.
        self._taking: asyncio.Task[bytes] | None = None

    def sample(self) -> bytes:
        """A sample as JSON, not older than `FRESH_S`. Call it on any thread but the loop's. Threads
        that ask while a sample is being taken get that one. Raises NoSample."""
        if not self._one.acquire(timeout=2 * _ANSWERED_WITHIN_S):
            raise NoSample("too many wait for a sample")
        try:
            if not self._sample or self._now_s() - self._taken_s > FRESH_S:
                self._sample = b""
                self._sample = self._new_sample()
                self._taken_s = self._now_s()
            return self._sample
        finally:
            self._one.release()

    def _new_sample(self) -> bytes:
        """Have the event loop take a sample, and wait for it. Raises NoSample."""
        sample: Future[bytes] = Future()
        try:
            self._loop.call_soon_threadsafe(self._begin, sample)
        except RuntimeError:
            raise NoSample("the daemon stops") from None
        try:
            return sample.result(_ANSWERED_WITHIN_S)
        except NoAnswer:
            raise NoSample("the event loop does not answer") from None

    def _begin(self, sample: Future[bytes]) -> None:
        """Called on the loop: a coroutine that is made elsewhere and never run is an error."""
        self._taking = self._loop.create_task(self._take())
        self._taking.add_done_callback(partial(_tell, sample))

    async def _take(self) -> bytes:
        caller = Caller()
        stats = await self._admin.stats(pb.StatsRequest(), caller)
        oldest = pb.ListClaimsRequest(page_claims=_OLDEST_CLAIMS)
        claims = await self._admin.list_claims(oldest, caller)
        return json.dumps(status_of(stats, claims.claims)).encode()


def _tell(sample: Future[bytes], taking: asyncio.Task[bytes]) -> None:
    if taking.cancelled():
        sample.set_exception(NoSample("the daemon stops"))
    elif (problem := taking.exception()) is not None:
        log.error("sample_failed", exc_info=problem)
        sample.set_exception(NoSample(f"the daemon failed: {type(problem).__name__}"))
    else:
        sample.set_result(taking.result())


def _missed(usage: pb.Usage) -> dict[str, int]:
    """Missed tokens by reason, in words."""
    found: dict[str, int] = {}
    for each in usage.missed:
        if each.tokens:
            words = words_of(each)
            found[words] = found.get(words, 0) + each.tokens
    return found


def status_of(stats: pb.StatsResponse, claims: Iterable[pb.ClaimDetail]) -> dict[str, Any]:
    """What the page shows, and nothing else. Counts begin with the daemon."""
    return {
        "version": stats.daemon_version,
        "health": stats.health,
        "notices": dict(stats.notices),
        "uptime_ms": stats.uptime_ms,
        "pid": stats.pid,
        "sessions": stats.sessions,
        "claims": stats.claims,
        "reservations": stats.reservations,
        "waiters": stats.waiters,
        "tiers": {
            Tier(tier.tier).label: {
                "state": TierState(tier.state).label,
                **{field: getattr(tier, field) for field in _TIER_FIELDS},
            }
            for tier in stats.tiers
        },
        "usage": {
            label: {
                "lookups": usage.lookups,
                "lookup_tokens": usage.lookup_tokens,
                "hit_tokens": sum(tier.hit_tokens for tier in usage.tiers),
                "restored_bytes": sum(sum(t.restored_bytes.values()) for t in usage.tiers),
                "missed_tokens": _missed(usage),
            }
            for label, usage in stats.usage.items()
        },
        "stages": {
            stage.stage: {"bounds_ns": list(stage.bounds_ns), "times": list(stage.times)}
            for stage in stats.stages
        },
        "oldest_claims": [
            {
                "claim_id": claim.claim_id,
                "owner": claim.owner,
                "age_ms": claim.age_ms,
                "lease_left_ms": claim.lease_left_ms,
                "entries": claim.entries,
                "payload_bytes": claim.payload_bytes,
            }
            for claim in claims
        ],
    }


def load_page() -> tuple[bytes, str]:
    """The page, and the Content-Security-Policy under which only its own script runs: nothing that
    a client's name or label might smuggle in."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    hashes = {
        tag: b64encode(sha256(inner.encode()).digest()).decode()
        for tag in ("style", "script")
        for inner in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    }
    policy = [
        "default-src 'none'",
        f"script-src 'sha256-{hashes['script']}'",
        f"style-src 'sha256-{hashes['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return html.encode(), "; ".join(policy)
