"""HTTP over a Unix socket, so that tests need no ports."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from tests.support.daemon import WITHIN_S


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, within_s: float = WITHIN_S) -> None:
        super().__init__("localhost", timeout=within_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def call(
    path: Path,
    method: str,
    url: str,
    body: Any = None,
    within_s: float = WITHIN_S,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Status and JSON (or bytes) of an answer."""
    connection = Connection(path, within_s)
    try:
        connection.request(method, url, None if body is None else json.dumps(body), headers or {})
        answer = connection.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if raw[:1] in b"{[" and raw else raw
    finally:
        connection.close()
