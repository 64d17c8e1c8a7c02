"""`/metrics`, `/healthz` and `/readyz`, for monitors and orchestrators, and the page at `/`, for
people. Changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from socket import socket as Socket
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from .metrics import StateCollector
from .page import Board, NoSample, load_page

#: How long a client may take for its request, or to take the answer.
_PATIENCE_S: Final = 5.0
#: Connections at once, each with a thread; beyond them the oldest is closed.
MAX_CONNECTIONS: Final = 64
_TEXT: Final = "text/plain; charset=utf-8"


class _Reply(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes
    #: Content-Security-Policy; of texts and numbers nothing is to be run or shown
    policy: str = "default-src 'none'; frame-ancestors 'none'"


#: By path: given what the client accepts, the answer.
_Paths: TypeAlias = Mapping[str, Callable[[str], _Reply]]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, paths: _Paths) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self.paths = paths
        #: the oldest first
        self._open: dict[Socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Makes room for a new connection: clients that send nothing, or a byte now and then, must
        not keep others out."""
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):  # it ends at this moment
                oldest.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
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
        if answer is None:
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

    def metrics(accepted: str) -> _Reply:
        encode, kind = choose_encoder(accepted)
        return _Reply(HTTPStatus.OK, kind, encode(registry))

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
    """Answer on `host:port` from threads of its own until the context ends; paths other than these
    do not exist. `/healthz`: 200 while the process answers. `/readyz`: 503, with the reasons,
    while the daemon is not serving. With a `board` there are the page, `/`, and what it asks for,
    `/status.json`: 503 while the event loop does not answer.

    Yields the address, with the port that the kernel chose for port 0. Besides those of the
    collector there are the usual `process_` metrics. Raises OSError.
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
