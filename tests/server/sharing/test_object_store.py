"""Failures of an object store are misses, by the deadline, and are reported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, time

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.engine_record import encode_header
from prefixd.server.sharing.engine_store import Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.object_store import PATIENCE_REQUESTS, ObjectStore

from ...support.daemon import eventually
from ...support.s3 import S3_URL, aws

PATIENCE_S = 30.0
DATA = bytes(range(256)) * 4
ENTRIES = [
    SharedEntry(Key(number.to_bytes(32, "big")), Content(len(DATA)), crc32c(DATA))
    for number in range(6)
]
KEYS = [entry.key for entry in ENTRIES]


class Bucket(BaseHTTPRequestHandler):
    """A server that has every object. `fault` may answer a request instead, or return False."""

    fault: Callable[[Bucket], bool]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not type(self).fault(self):
            key = Key(bytes.fromhex(self.path.rpartition("/")[2]))
            entry = next(entry for entry in ENTRIES if entry.key == key)
            value = encode_header(entry) + DATA
            last = min(int(self.headers["Range"].rpartition("-")[2]), len(value) - 1)
            self.answer(206, value[: last + 1], **{"Content-Range": f"bytes 0-{last}/{len(value)}"})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not type(self).fault(self):
            self.answer(200, b"", ETag='"1"')

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 16:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Bucket], ObjectStore]]:
    handler = type("Handler", (Bucket,), {"fault": staticmethod(lambda _: False)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name, value in aws(f"http://127.0.0.1:{server.server_port}", "who", "secret").items():
        monkeypatch.setenv(name, value)
    try:
        with closing(ObjectStore("s3://bucket/prefix", "test")) as store:
            yield handler, store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def break_off(request: Bucket) -> bool:
    """Answer with the beginning of what was asked for."""
    request.send_response(206)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b"half")
    request.close_connection = True
    return True


def soon() -> float:
    return monotonic() + PATIENCE_S


def offers() -> list[Offer]:
    return [Offer(entry, [memoryview(DATA)], int(time() * 1000) + 1000) for entry in ENTRIES]


def fetch(store: ObjectStore, deadline_s: float) -> list[Outcome]:
    buffers = [memoryview(bytearray(len(DATA))) for _ in ENTRIES]
    requests = [Wanted(entry, buffer) for entry, buffer in zip(ENTRIES, buffers, strict=True)]
    outcomes = store.get(requests, deadline_s)
    for outcome, buffer in zip(outcomes, buffers, strict=True):
        assert outcome is not Outcome.DONE or bytes(buffer) == DATA
    return outcomes


def test_an_address_without_tls_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as (_, store):
        assert store.find(KEYS, soon()) == ENTRIES
        assert set(fetch(store, soon())) == {Outcome.DONE}
        assert set(store.put(offers(), soon())) == {Outcome.DONE}
        assert store.health() == {}


def test_a_block_is_written_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server knows none of the requests that begin and end an upload in parts."""
    data = bytes(5 * 2**20)
    entry = SharedEntry(KEYS[0], Content(len(data)), crc32c(data))
    with bucket(monkeypatch) as (_, store):
        assert store.put([Offer(entry, [memoryview(data)], 0)], soon()) == [Outcome.DONE]


def test_a_hanging_store_costs_one_deadline_and_then_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    with bucket(monkeypatch) as (handler, store):
        handler.fault = staticmethod(lambda _: not answers.wait(PATIENCE_S))
        began_s = monotonic()
        assert set(fetch(store, began_s + 0.2)) == {Outcome.UNAVAILABLE}
        assert monotonic() - began_s >= 0.2
        assert "in time" in store.health()["objects"]
        began_s = monotonic()
        assert store.find(KEYS, began_s + PATIENCE_S) == [None] * len(KEYS)
        assert monotonic() - began_s < PATIENCE_S, "requests were sent during the pause"
        answers.set()
        eventually(lambda: None not in store.find(KEYS, soon()))
        eventually(lambda: store.health() == {})


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "SignatureDoesNotMatch"), (403, "AccessDenied"), (500, "InternalError"), (503, "Slow")],
)
def test_errors_are_misses_and_are_reported(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    def refuse(request: Bucket) -> bool:
        request.answer(status, f"<Error><Code>{code}</Code></Error>".encode())
        return True

    with bucket(monkeypatch) as (handler, store):
        handler.fault = staticmethod(refuse)
        assert store.find(KEYS[:PATIENCE_REQUESTS], soon()) == [None] * PATIENCE_REQUESTS
        assert store.health()["objects"]
        assert "secret" not in store.health()["objects"]
        assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
        handler.fault = staticmethod(lambda _: False)
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})


def test_an_answer_that_breaks_off_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch) as (handler, store):
        handler.fault = staticmethod(break_off)
        assert Outcome.DONE not in fetch(store, soon())


def test_an_unreachable_store_is_a_miss_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket(monkeypatch):
        pass
    with closing(ObjectStore("s3://bucket/prefix", "test")) as store:
        assert store.find(KEYS, soon()) == [None] * len(KEYS)
        assert store.health()["objects"]


@pytest.mark.parametrize("url", ["s3:", "gopher://x/y", "nothing"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # obstore's own messages
        ObjectStore(url, "test")


@pytest.mark.skipif(S3_URL not in os.environ, reason="needs the server of `make s3`")
def test_a_wrong_secret_is_reported_with_a_real_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with closing(ObjectStore(os.environ[S3_URL], "test")) as store:
        assert store.find(KEYS, soon()) == [None] * len(KEYS)
        assert "wrong" not in store.health()["objects"]
        assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
