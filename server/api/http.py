"""`/metrics`, `/healthz` and `/readyz`, for monitors and orchestrators. Changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from .metrics import StateCollector

#: How long a client may take for its request, or to take the answer.
_PATIENCE_S: Final = 5.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: str, port: int, answers: dict[str, Callable[[str], tuple[int, str, bytes]]]
    ) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        #: by path: given what the client accepts, a status, a content type and a body
        self.answers = answers
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server: _Server

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0])
        if answer is None:
            status, kind, body = HTTPStatus.NOT_FOUND, "text/plain", b"not found\n"
        else:
            status, kind, body = answer(self.headers.get("Accept", ""))  # type: ignore[assignment]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Scrapes are no news."""


@contextmanager
def serve_metrics(address: str, collector: StateCollector) -> Iterator[str]:
    """Answer on `host:port` from threads of its own until the context ends; paths other than these
    three do not exist. `/healthz`: 200 while the process answers. `/readyz`: 503, with the reasons,
    while the daemon is not serving.

    Yields the address, with the port that the kernel chose for port 0. Besides those of the
    collector there are the usual `process_` metrics. Raises OSError.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def metrics(accepted: str) -> tuple[int, str, bytes]:
        encode, kind = choose_encoder(accepted)
        return HTTPStatus.OK, kind, encode(registry)

    def ready(_accepted: str) -> tuple[int, str, bytes]:
        problems = collector.unhealthy()
        lines = [f"{part}: {why}" for part, why in problems.items()] or ["serving"]
        status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        return status, "text/plain; charset=utf-8", ("\n".join(lines) + "\n").encode()

    def alive(_accepted: str) -> tuple[int, str, bytes]:
        return HTTPStatus.OK, "text/plain; charset=utf-8", b"alive\n"

    host, _, port = address.rpartition(":")
    paths = {"/metrics": metrics, "/healthz": alive, "/readyz": ready}
    try:
        server = _Server(host.strip("[]"), int(port), paths)
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
