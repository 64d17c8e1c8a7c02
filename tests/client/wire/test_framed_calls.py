"""Calls over the framed protocol, on a Unix socket, against a daemon whose responses the test
chooses."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from prefixd.client.counters import ClientCounters
from prefixd.client.wire.framed_calls import FramedCalls
from prefixd.client.wire.framed_connection import FramedConnection, NoConnection, UnixPlace, Wire
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    ClaimLost,
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    InvalidBatch,
    InvalidSize,
    LimitReached,
    MalformedMessage,
    PrefixdError,
    UnknownSession,
)
from prefixd.proto.limits import KEY_BYTES, MAX_BATCH_KEYS, MAX_MESSAGE_BYTES
from tests.support.daemon import eventually
from tests.support.fakes_local import (
    PATIENCE_S,
    Daemon,
    Peer,
    echo,
    failure,
    looked,
    open_descriptors,
    response,
    room_for,
)

T = TypeVar("T")

SESSION = pb.SessionRef(incarnation=b"i" * 16, session_id=7, secret=b"s" * 16)


class Fallback:
    """Counts the calls that would go over gRPC."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, float]] = []

    def call(self, rpc: str, request: object, _response: type[T], timeout_s: float) -> T:
        self.asked.append((rpc, request, timeout_s))
        answer: T = ANSWERS[rpc]
        return answer


KINDS: dict[str, tuple[str, Any, Any]] = {
    "Lookup": (
        "lookup",
        pb.LookupRequest(keys=[bytes(32)], wait_ms=3),
        pb.LookupResponse(results=[pb.LookupResult(presence=pb.PRESENCE_ABSENT)]),
    ),
    "Claim": (
        "claim",
        pb.ClaimRequest(session=SESSION, keys=[bytes(32)], brief=True, mode=pb.CLAIM_MODE_RUN),
        pb.ClaimResponse(claim_id=5),
    ),
    "Release": (
        "release",
        pb.ReleaseRequest(session=SESSION, claim_ids=[5]),
        pb.ReleaseResponse(results=[pb.RELEASE_STATUS_RELEASED]),
    ),
    "Reserve": (
        "reserve",
        pb.ReserveRequest(header=pb.SaveHeader(session=SESSION)),
        pb.ReserveResponse(ttl_ms=9),
    ),
    "Cancel": (
        "cancel",
        pb.CancelRequest(session=SESSION, tokens=[1]),
        pb.CancelResponse(cancelled=[True]),
    ),
}
ANSWERS = {name: answer for name, (_, _, answer) in KINDS.items()}
CALLS = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def fallback() -> Fallback:
    return Fallback()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "l")


@pytest.fixture
def daemon(path: str) -> Iterator[Daemon]:
    running = Daemon(path)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def calls(daemon: Daemon, fallback: Fallback) -> Iterator[FramedCalls]:
    made = FramedCalls(UnixPlace(daemon.path, SESSION), fallback, ClientCounters())
    yield made
    made.close()


def lookup(calls: FramedCalls, keys: int = 1, timeout_s: float = PATIENCE_S) -> int:
    """Make a look-up. Returns how many results came."""
    request = pb.LookupRequest(keys=[bytes(32)] * keys)
    return len(calls.call("Lookup", request, pb.LookupResponse, timeout_s).results)


# ---- calls


@CALLS
def test_a_call_is_one_request_and_its_answer(
    daemon: Daemon, calls: FramedCalls, fallback: Fallback, name: str
) -> None:
    kind, request, answer = KINDS[name]
    asked: list[pb.FramedRequest] = []

    def serve(peer: Peer) -> None:
        for each in peer.requests():
            asked.append(each)
            peer.socket.sendall(response(**{kind: answer}))
        assert peer.attached == SESSION

    daemon.serve = serve
    assert calls.call(name, request, type(answer), PATIENCE_S) == answer
    assert asked == [pb.FramedRequest(**{kind: request})]
    assert fallback.asked == []


def test_an_answer_may_come_in_pieces(daemon: Daemon, calls: FramedCalls) -> None:
    def serve(peer: Peer) -> None:
        for request in peer.requests():
            for byte in looked(len(request.lookup.keys)):
                peer.socket.sendall(bytes([byte]))

    daemon.serve = serve
    assert [lookup(calls, keys) for keys in range(1, 20)] == [*range(1, 20)]


def test_an_answer_may_be_large(calls: FramedCalls) -> None:
    assert lookup(calls, 100_000) == 100_000


# ---- without a connection


@CALLS
@pytest.mark.parametrize("why", ["nobody", "nobody any more", "no socket", "a full backlog"])
def test_without_a_connection_the_call_goes_over_grpc(
    path: str, fallback: Fallback, name: str, why: str
) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as waiting:
        match why:
            case "nobody any more":
                listening.bind(path)
            case "no socket":
                Path(path).touch()
            case "a full backlog":
                listening.bind(path)
                listening.listen(0)
                waiting.connect(path)
        calls = FramedCalls(UnixPlace(path, SESSION), fallback, ClientCounters())
        _, request, answer = KINDS[name]
        before = open_descriptors(path)
        assert calls.call(name, request, type(answer), 2.5) == answer
        ((asked, message, left_s),) = fallback.asked
        assert (asked, message) == (name, request)
        assert 0 < left_s <= 2.5, "what connecting has left of the time"
        with pytest.raises(OSError):  # noqa: PT011  # whatever connecting raises
            calls.give_back(SESSION, [1])
        assert open_descriptors(path) == before
        calls.close()


def test_a_process_without_descriptors_goes_another_way(path: str, fallback: Fallback) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        calls = FramedCalls(UnixPlace(path, SESSION), fallback, ClientCounters())
        with room_for(0):
            lookup(calls)
        assert [name for name, _, _ in fallback.asked] == ["Lookup"]
        with calls.connection(PATIENCE_S):
            pass  # the next call tries to connect again
        calls.close()


# ---- connections


def test_calls_one_after_the_other_share_a_connection(daemon: Daemon, calls: FramedCalls) -> None:
    assert [lookup(calls, keys) for keys in range(1, 30)] == [*range(1, 30)]
    assert daemon.connections == 1


def test_calls_at_once_have_a_connection_each(daemon: Daemon, calls: FramedCalls) -> None:
    """And later calls use those connections again."""
    at_once = 4
    together = threading.Barrier(at_once)

    def serve(peer: Peer) -> None:
        for request in peer.requests():
            together.wait(PATIENCE_S)
            peer.socket.sendall(looked(len(request.lookup.keys)))

    daemon.serve = serve
    with ThreadPoolExecutor(at_once) as threads:
        for _ in range(5):
            sizes = range(1, at_once + 1)
            assert [*threads.map(lambda keys: lookup(calls, keys), sizes)] == [*sizes]
    assert daemon.connections == at_once


def test_each_of_many_threads_gets_its_own_answers(daemon: Daemon, calls: FramedCalls) -> None:
    def ask_on(thread: int) -> list[int]:
        return [lookup(calls, thread) for _ in range(50)]

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(ask_on, range(1, 9))] == [[thread] * 50 for thread in range(1, 9)]
    assert daemon.connections <= 8


def test_a_late_response_is_dropped(daemon: Daemon, calls: FramedCalls) -> None:
    """The next call would take it for its own."""
    late = threading.Event()
    said: list[object] = []

    def serve_late(peer: Peer) -> None:
        peer.receive()
        assert late.wait(PATIENCE_S)
        try:
            peer.socket.sendall(looked(1))
        except BrokenPipeError:
            said.append("broken pipe")
        said.append(peer.receive())

    daemon.serve = serve_late
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        lookup(calls, 1, timeout_s=0.01)
    daemon.serve = echo
    late.set()
    assert daemon.ended.acquire(timeout=PATIENCE_S)
    assert said == ["broken pipe", None], "the connection has gone"
    assert lookup(calls, 2) == 2
    assert daemon.connections == 2


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        (b"", DaemonUnavailable),
        (looked(3)[:-1], DaemonUnavailable),
        (looked(3)[:2], DaemonUnavailable),
        (struct.pack("<I", 2) + b"\xff\xff", MalformedMessage),
        (struct.pack("<I", MAX_MESSAGE_BYTES + 1), MalformedMessage),
    ],
    ids=["hangs up", "in the middle", "in the length", "rubbish", "too long"],
)
def test_a_malformed_response_ends_the_connection_and_not_the_next_call(
    daemon: Daemon, calls: FramedCalls, said: bytes, raised: type[PrefixdError]
) -> None:
    def serve(peer: Peer) -> None:
        peer.receive()
        peer.socket.sendall(said)

    daemon.serve = serve
    with pytest.raises(raised):
        lookup(calls)
    daemon.serve = echo
    assert lookup(calls, 2) == 2


def test_a_connection_that_the_daemon_ended_meanwhile_costs_one_call(
    daemon: Daemon, calls: FramedCalls, fallback: Fallback
) -> None:
    """The daemon may have carried the call out, so it is not repeated."""

    def serve(peer: Peer) -> None:
        peer.receive()
        peer.socket.sendall(looked(1))

    daemon.serve = serve
    assert lookup(calls) == 1
    assert daemon.ended.acquire(timeout=PATIENCE_S)
    daemon.serve = echo
    with pytest.raises(DaemonUnavailable):
        lookup(calls, 2)
    assert lookup(calls, 2) == 2
    assert fallback.asked == []


def test_a_daemon_that_reads_nothing(daemon: Daemon, calls: FramedCalls) -> None:
    enough = threading.Event()
    daemon.serve = lambda _: assert_set(enough)
    with pytest.raises(DeadlineExceeded):
        lookup(calls, 2**17, timeout_s=0.01)
    enough.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_a_call_has_its_time_from_its_request_to_its_last_answer(daemon: Daemon) -> None:
    enough = threading.Event()

    def serve(peer: Peer) -> None:
        peer.socket.sendall(looked(1))
        assert_set(enough)

    daemon.serve = serve
    with closing(FramedConnection(UnixPlace(daemon.path, SESSION), PATIENCE_S)) as line:
        line.begin(pb.FramedRequest(lookup=pb.LookupRequest()), 0.1)
        assert len(line.response().lookup.results) == 1
        with pytest.raises(DeadlineExceeded):
            line.response()
        with pytest.raises(DeadlineExceeded):
            line.begin(pb.FramedRequest(lookup=pb.LookupRequest(keys=[bytes(2**22)])), 0.02)
        enough.set()


def test_a_connection_without_a_place_is_none(
    daemon: Daemon, calls: FramedCalls, fallback: Fallback
) -> None:
    """The daemon says so in place of an answer: it has read no request."""

    def serve(peer: Peer) -> None:
        peer.receive()
        told = pb.Failure(error="limit_reached", message="there are too many", refused=True)
        peer.socket.sendall(response(failure=told))

    daemon.serve = serve
    assert lookup(calls) == 1
    ((asked, _, _),) = fallback.asked
    assert asked == "Lookup"
    with pytest.raises(NoConnection, match="too many"):
        calls.save(pb.RawSaveRequest(), [], PATIENCE_S)


def test_who_is_hung_up_on_says_why(daemon: Daemon) -> None:
    """The daemon refuses the first request of several and hangs up, which the next one notices."""

    def serve(peer: Peer) -> None:
        peer.receive()
        copied = response(save_staged=pb.SaveStagedResponse(parts_copied=1))
        peer.socket.sendall(copied + failure("unknown_session"))

    daemon.serve = serve
    with closing(FramedConnection(UnixPlace(daemon.path, SESSION), PATIENCE_S)) as line:
        line.begin(pb.FramedRequest(save_staged=pb.SaveStagedRequest()), PATIENCE_S)
        assert daemon.ended.acquire(timeout=PATIENCE_S)
        with pytest.raises(UnknownSession):
            line.begin(pb.FramedRequest(save_staged=pb.SaveStagedRequest()), PATIENCE_S)


def test_a_message_above_the_most_is_not_sent(calls: FramedCalls) -> None:
    """The daemon would hang up before it has read it, which would look like no daemon."""
    with pytest.raises(InvalidSize, match=f"{MAX_MESSAGE_BYTES} is the most"):
        lookup(calls, MAX_MESSAGE_BYTES // KEY_BYTES)
    assert lookup(calls) == 1


def test_whatever_else_ends_a_call_ends_its_connection(daemon: Daemon, calls: FramedCalls) -> None:
    with pytest.raises(KeyboardInterrupt), calls.connection(PATIENCE_S):
        raise KeyboardInterrupt
    assert daemon.ended.acquire(timeout=PATIENCE_S)


# ---- failures


@pytest.mark.parametrize(
    "kind", [UnknownSession, ClaimLost, LimitReached, InvalidBatch, Draining, PrefixdError]
)
def test_a_failure_is_what_the_daemon_raised(
    daemon: Daemon, calls: FramedCalls, kind: type[PrefixdError]
) -> None:
    def serve(peer: Peer) -> None:
        for _ in peer.requests():
            peer.socket.sendall(failure(kind.name))

    daemon.serve = serve
    with pytest.raises(PrefixdError, match="a sentence") as raised:
        lookup(calls)
    assert type(raised.value) is kind
    assert raised.value.retryable == kind.retryable


@pytest.mark.parametrize("retry", [False, True])
def test_a_failure_of_a_later_version_says_whether_to_repeat_the_call(
    daemon: Daemon, calls: FramedCalls, retry: bool
) -> None:
    def serve(peer: Peer) -> None:
        for _ in peer.requests():
            peer.socket.sendall(failure("weather_too_bad", retry=retry))

    daemon.serve = serve
    with pytest.raises(PrefixdError, match="a sentence") as raised:
        lookup(calls)
    assert type(raised.value) is PrefixdError
    assert raised.value.retryable is retry
    assert not PrefixdError("another").retryable


# ---- giving back


def test_giving_back_waits_for_nothing(daemon: Daemon, calls: FramedCalls) -> None:
    asked: list[pb.FramedRequest] = []

    def serve(peer: Peer) -> None:
        for request in peer.requests():
            asked.append(request)
            if request.HasField("lookup"):
                peer.socket.sendall(looked(len(request.lookup.keys)))

    daemon.serve = serve
    many = range(2 * MAX_BATCH_KEYS + 1)  # more than one call takes
    calls.give_back(SESSION, [1, 2])
    calls.give_back(SESSION, many)
    assert lookup(calls, 5) == 5
    assert [request.WhichOneof("kind") for request in asked] == ["give_back"] * 4 + ["lookup"]
    assert asked[0].give_back == pb.ReleaseRequest(session=SESSION, claim_ids=[1, 2])
    given = [list(request.give_back.claim_ids) for request in asked[1:4]]
    assert [len(claims) for claims in given] == [MAX_BATCH_KEYS, MAX_BATCH_KEYS, 1]
    assert [number for claims in given for number in claims] == [*many]
    assert daemon.connections == 1


# ---- the end


def test_closing_hangs_up_on_idle_connections(daemon: Daemon, calls: FramedCalls) -> None:
    lookup(calls)
    calls.close()
    assert daemon.ended.acquire(timeout=PATIENCE_S)
    calls.close()


def test_a_call_under_way_is_answered_although_it_was_closed(
    daemon: Daemon, calls: FramedCalls, fallback: Fallback
) -> None:
    """After it the connection is closed as well, and later calls go over gRPC."""
    asked, answering = threading.Event(), threading.Event()

    def serve(peer: Peer) -> None:
        peer.receive()
        asked.set()
        assert answering.wait(PATIENCE_S)
        peer.socket.sendall(looked(3))
        assert peer.receive() is None

    daemon.serve = serve
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(lookup, calls)
        assert asked.wait(PATIENCE_S)
        calls.close()
        answering.set()
        assert call.result() == 3
    assert daemon.ended.acquire(timeout=PATIENCE_S)
    lookup(calls, 2)
    assert [name for name, _, _ in fallback.asked] == ["Lookup"]
    assert daemon.connections == 1


def test_connections_leave_no_descriptor(daemon: Daemon, path: str, fallback: Fallback) -> None:
    before = open_descriptors(path)
    for _ in range(20):
        calls = FramedCalls(UnixPlace(path, SESSION), fallback, ClientCounters())
        lookup(calls)
        calls.close()
        assert daemon.ended.acquire(timeout=PATIENCE_S)
    assert open_descriptors(path) == before


# ---- a place that takes no connection


class FarPlace:
    """A place on another host, where connections are taken or dropped as the test says. Also says
    which threads tried to connect."""

    local = False
    again_after_s = 0.0
    secured = False

    def __init__(self, path: str, name: str = "far") -> None:
        self._near = UnixPlace(path, SESSION)
        self._name = name
        #: Refuses connections.
        self.refuses = False
        #: Attempts to connect wait for it.
        self.answers = threading.Event()
        self.answers.set()
        self.tried: list[threading.Thread] = []

    def __str__(self) -> str:
        return self._name

    def connect(self, within_s: float) -> Wire:
        self.tried.append(threading.current_thread())
        assert self.answers.wait(PATIENCE_S)
        if self.refuses:
            raise TimeoutError("timed out")
        return self._near.connect(within_s)

    def greeting(self) -> pb.FramedRequest:
        return self._near.greeting()


def test_no_call_waits_for_a_reconnect(
    daemon: Daemon, fallback: Fallback, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prefixd.client")
    here = threading.current_thread()
    place, counters = FarPlace(daemon.path), ClientCounters()
    calls = FramedCalls(place, fallback, counters)
    place.refuses = True
    lookup(calls)
    assert place.tried == [here], "the first one is tried at once"
    place.answers.clear()
    for _ in range(3):
        lookup(calls)  # returns, although nothing answers there
    assert len(fallback.asked) == counters.snapshot()["data_fallbacks"] == 4
    eventually(lambda: len(place.tried) == 2)
    assert place.tried[1] is not here, "one attempt at a time, and not in a call"
    place.answers.set()
    place.tried[1].join()
    place.answers.clear()
    place.refuses = False
    lookup(calls)
    eventually(lambda: len(place.tried) == 3)
    place.answers.set()
    place.tried[2].join()
    assert lookup(calls, keys=2) == 2
    assert daemon.connections == 1, "over the connection that the thread made"
    assert len(fallback.asked) == 5
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    calls.close()


def test_the_next_session_does_not_wait_either(daemon: Daemon, fallback: Fallback) -> None:
    place = FarPlace(daemon.path)
    place.refuses = True
    first = FramedCalls(place, fallback, ClientCounters())
    lookup(first)
    place.refuses = False
    after = FramedCalls(place, fallback, ClientCounters(), first)
    lookup(after)
    eventually(lambda: len(place.tried) == 2)
    place.tried[1].join()
    assert lookup(after) == 1
    assert len(fallback.asked) == 2
    # Of another port nothing is known.
    elsewhere = FramedCalls(FarPlace(daemon.path, "elsewhere"), fallback, ClientCounters(), first)
    assert lookup(elsewhere) == 1
    assert len(fallback.asked) == 2
    for calls in (first, after, elsewhere):
        calls.close()


def test_a_connection_that_comes_too_late_is_closed(daemon: Daemon, fallback: Fallback) -> None:
    place = FarPlace(daemon.path)
    place.refuses = True
    calls = FramedCalls(place, fallback, ClientCounters())
    lookup(calls)
    place.refuses = False
    place.answers.clear()
    lookup(calls)
    eventually(lambda: len(place.tried) == 2)
    calls.close()
    place.answers.set()
    place.tried[1].join()
    assert daemon.ended.acquire(timeout=PATIENCE_S)
