"""The client's end of the data socket, against daemons that break the rules: whatever they send, a
call ends within its deadline with one of the library's errors, and no wrong bytes count as
restored."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar, cast

import pytest

from prefixd.client import Client, MissReason, SaveReason, SaveStatus, Tier
from prefixd.client.counters import ClientCounters
from prefixd.client.restores import Restore
from prefixd.client.results import Entries, Entry
from prefixd.client.wire import messages, remote_transport
from prefixd.client.wire.framed_calls import FramedCalls
from prefixd.client.wire.framed_connection import FramedConnection, NoConnection, TcpPlace, Wire
from prefixd.client.wire.link import Link
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.security import Security
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import (
    ClaimLost,
    DaemonUnavailable,
    DeadlineExceeded,
    MalformedMessage,
    PrefixdError,
    UnknownSession,
)
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from tests.support.daemon import eventually, private_daemon, tcp_address, tcp_daemon
from tests.support.fakes import PATIENCE_S

T = TypeVar("T")

PAYLOAD: Final = os.urandom(3 * 2**20 + 5)
REF: Final = pb.SessionRef(session_id=1, secret=bytes(16))
END: Final = pb.FramedResponse(read_end=pb.ReadEnd())
SOON_S: Final = 0.2

Script = Callable[[socket.socket], None]


def answer(message: pb.FramedResponse, raw: bytes = b"") -> bytes:
    return frames.frame(message) + raw


def part(number: int, offset: int, raw: bytes, **fields: int) -> bytes:
    told = pb.RawPart(range=number, offset_bytes=offset, length_bytes=len(raw), **fields)  # type: ignore[arg-type]
    return answer(pb.FramedResponse(part=told), raw)


@contextmanager
def daemon_that_says(*answers: bytes, hang_up: bool = True) -> Iterator[int]:
    """Accepts one connection and answers the first bytes that come with these. Yields the port."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                try:
                    connection.sendall(b"".join(answers))
                    if hang_up:
                        connection.shutdown(socket.SHUT_WR)
                    over.wait()
                except OSError:
                    pass  # the client has hung up

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            thread.join()


def entry_of(payload: bytes) -> Entry:
    crc = crc32c(payload)
    return Entry(Key(bytes(32)), Tier.RAM, Content(len(payload), 1), crc, 1, SaveReason.COLD)


def place(port: int) -> TcpPlace:
    return TcpPlace("127.0.0.1", port, REF)


def read(port: int, restore: Restore, timeout_s: float = PATIENCE_S) -> None:
    line = FramedConnection(place(port), timeout_s)
    try:
        line.begin(pb.FramedRequest(read=pb.ReadRequest()), timeout_s)
        line.parts(len(restore.rooms), restore)
    finally:
        line.close()


def room_for(*payloads: bytes) -> tuple[Restore, list[bytearray]]:
    buffers = [bytearray(len(payload)) for payload in payloads]
    entries = Entries([entry_of(payload) for payload in payloads])
    return Restore(entries, [memoryview(buffer) for buffer in buffers], "always"), buffers


def test_parts_arrive_where_they_are_wanted() -> None:
    restore, buffers = room_for(PAYLOAD, b"x")
    cut = 2**20 + 1
    answers = (part(0, 0, PAYLOAD[:cut]), part(0, cut, PAYLOAD[cut:]), part(1, 0, b"x"))
    with daemon_that_says(*answers, answer(END)) as port:
        read(port, restore)
    assert buffers == [PAYLOAD, b"x"]
    assert restore.misses(None) == [None, None]


def test_a_flipped_bit_is_a_miss() -> None:
    wrong = bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:]
    restore, _ = room_for(PAYLOAD, PAYLOAD)
    answers = (part(0, 0, wrong), part(1, 0, PAYLOAD))
    with daemon_that_says(*answers, answer(END)) as port:
        read(port, restore)
    assert restore.misses(None) == [MissReason.CORRUPT, None]


VIOLATIONS: Final = {
    "a range that was not asked for": part(2, 0, b"abc"),
    "a part that is not the next": part(0, 5, b"abc"),
    "a part beyond the end": part(1, 0, b"abcd"),
    "another answer": answer(pb.FramedResponse(claim=pb.ClaimResponse())),
    "an empty message": answer(pb.FramedResponse()),
    "a message that is none": frames.HEAD.pack(3) + b"\xff\xff\xff",
    "a message without end": frames.HEAD.pack(2**32 - 1),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_what_must_not_come_is_an_error_of_ours(violation: str) -> None:
    restore, _ = room_for(b"abc", b"abc")
    with (
        daemon_that_says(VIOLATIONS[violation], answer(END)) as port,
        pytest.raises(PrefixdError),
    ):
        read(port, restore)
    assert restore.misses(MissReason.UNEXPECTED) == [MissReason.UNEXPECTED] * 2


@pytest.mark.parametrize("sent_bytes", [0, 3, 30, 2**20, len(PAYLOAD)])
def test_a_daemon_that_hangs_up_is_unavailable(sent_bytes: int) -> None:
    """Even after the last byte: the daemon has not said that the claim was held until then."""
    restore, _ = room_for(PAYLOAD)
    whole = part(0, 0, PAYLOAD)
    with (
        daemon_that_says(whole[:sent_bytes] if sent_bytes < len(PAYLOAD) else whole) as port,
        pytest.raises(DaemonUnavailable),
    ):
        read(port, restore)


@pytest.mark.parametrize("sent_bytes", [0, 3, 30, 2**20, len(PAYLOAD)])
def test_one_that_stops_costs_the_deadline(sent_bytes: int) -> None:
    restore, _ = room_for(PAYLOAD)
    whole = part(0, 0, PAYLOAD)
    sent = whole[:sent_bytes] if sent_bytes < len(PAYLOAD) else whole
    with daemon_that_says(sent, hang_up=False) as port:
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            read(port, restore, SOON_S)
        assert time.monotonic() - began_s >= SOON_S * 0.9


def test_what_the_daemon_refuses_is_raised() -> None:
    failure = pb.Failure(error="claim_lost", message="it is gone")
    restore, _ = room_for(PAYLOAD)
    with (
        daemon_that_says(answer(pb.FramedResponse(failure=failure))) as port,
        pytest.raises(ClaimLost, match="it is gone"),
    ):
        read(port, restore)


def calls_to(port: int) -> FramedCalls:
    return FramedCalls(place(port), None, ClientCounters())  # type: ignore[arg-type]  # nothing goes there


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (answer(pb.FramedResponse(save_ready=pb.SaveReady(items=[1]))), PrefixdError),
        (answer(pb.FramedResponse(save_ready=pb.SaveReady(items=[0]))), DaemonUnavailable),
        (b"", DaemonUnavailable),
        (frames.HEAD.pack(1) + b"\xff", MalformedMessage),
    ],
)
def test_a_save_that_is_answered_wrong_is_an_error_of_ours(
    said: bytes, error: type[PrefixdError]
) -> None:
    with daemon_that_says(said) as port, pytest.raises(error):
        calls_to(port).save(pb.RawSaveRequest(), [memoryview(PAYLOAD)], PATIENCE_S)


def test_a_save_that_nobody_takes_costs_the_deadline() -> None:
    ready = answer(pb.FramedResponse(save_ready=pb.SaveReady(items=[0] * 20)))
    with daemon_that_says(ready, hang_up=False) as port, pytest.raises(DeadlineExceeded):
        calls_to(port).save(pb.RawSaveRequest(), [memoryview(PAYLOAD)], SOON_S)


def test_where_nobody_listens_nothing_was_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    calls = calls_to(port)
    for _ in range(2):  # the second call does not even try
        with pytest.raises(NoConnection):
            calls.save(pb.RawSaveRequest(), [], PATIENCE_S)


def test_a_session_that_ended_in_the_middle_is_no_reason_to_ask_again() -> None:
    """The bytes before it would come twice."""
    for said, error in ((FAILURE, UnknownSession), (part(0, 0, PAYLOAD) + FAILURE, ClaimLost)):
        restore, _ = room_for(PAYLOAD)
        with daemon_that_says(said) as port, pytest.raises(error):
            calls_to(port).fetch(pb.FetchRequest(), 1, restore, PATIENCE_S)


def claimed(*payloads: bytes, tier: int = pb.TIER_RAM) -> bytes:
    """The first response to a fetch: what was claimed."""
    results = [
        pb.ClaimResult(
            claimed=True,
            entry=pb.EntryInfo(
                tier=tier,  # type: ignore[arg-type]  # or none
                reason=pb.SAVE_REASON_COLD,
                payload_bytes=len(payload),
                payload_crc32c=crc32c(payload),
            ),
        )
        for payload in payloads
    ]
    return answer(pb.FramedResponse(claim=pb.ClaimResponse(results=results)))


FAILURE: Final = answer(pb.FramedResponse(failure=pb.Failure(error="unknown_session")))
#: Responses to a fetch of two keys, each with room for `b"abc"`; the error that they raise; which
#: entries may count as restored when every checksum is compared.
FETCHES: Final[dict[str, tuple[bytes, type[PrefixdError] | None, list[bool]]]] = {
    "all": (
        claimed(b"abc", b"abd") + part(0, 0, b"abc") + part(1, 0, b"abd") + answer(END),
        None,
        [True, True],
    ),
    "one": (claimed(b"abc") + part(0, 0, b"abc") + answer(END), None, [True]),
    "none": (claimed() + answer(END), None, []),
    "nothing of what was found": (claimed(b"abc", b"abc") + answer(END), None, [False] * 2),
    "what does not fit": (
        claimed(b"abcd", b"abc") + part(1, 0, b"abc") + answer(END),
        None,
        [False, True],
    ),
    "what does not fit, sent": (claimed(b"abcd") + part(0, 0, b"abcd"), PrefixdError, [False]),
    "other bytes": (claimed(b"abc") + part(0, 0, b"abd") + answer(END), None, [False]),
    "bytes before what was found": (part(0, 0, b"abc") + answer(END), PrefixdError, []),
    "a range that was not found": (claimed(b"abc") + part(1, 0, b"abc"), PrefixdError, [False]),
    "more than was asked for": (claimed(*[b"abc"] * 3), PrefixdError, []),
    "a tier of a later version": (claimed(b"abc", tier=99), PrefixdError, []),
    "no session": (FAILURE, UnknownSession, []),
    "no session any more": (claimed(b"abc") + FAILURE, ClaimLost, [False]),
    "no end": (claimed(b"abc") + part(0, 0, b"abc"), DaemonUnavailable, [True]),
    "two ends": (claimed(b"abc") + claimed(b"abc"), PrefixdError, [False]),
}


@pytest.mark.parametrize("said", FETCHES)
def test_a_fetch_of_what_is_there_is_right_or_a_miss(said: str) -> None:
    answers, error, good = FETCHES[said]
    restores: list[Restore] = []
    keys = [Key(bytes(32)), Key(bytes(31) + b"1")]

    def begin(response: pb.ClaimResponse) -> Restore:
        _, entries, _ = messages.claimed_of(keys, response)
        rooms = [memoryview(bytearray(3 if entry.payload_bytes == 3 else 0)) for entry in entries]
        restores.append(Restore(entries, rooms, "always"))
        return restores[0]

    with daemon_that_says(answers) as port:
        calls = calls_to(port)
        with ExitStack() as stack:
            if error is not None:
                stack.enter_context(pytest.raises(error))
            calls.fetch_found(pb.FetchRequest(), begin, PATIENCE_S)
        assert len(calls._idle) == (error is None), "a failed call closes its connection"
        calls.close()
    if error is not None and restores:
        restores[0].read_failed(lost=error is ClaimLost)
    misses = restores[0].misses(MissReason.UNEXPECTED) if restores else []
    assert [miss is None for miss in misses] == good


def test_a_connection_that_is_not_taken_leaves_time_for_grpc() -> None:
    """The kernel queues connections until the backlog is full; after that it does not answer."""
    asked: list[float] = []

    class Grpc:
        def call(self, _rpc: str, _request: object, response: type[T], timeout_s: float) -> T:
            asked.append(timeout_s)
            return response()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as full:
        address = listening.getsockname()
        for _ in range(3):
            blocked = full.enter_context(socket.socket())
            blocked.setblocking(False)
            blocked.connect_ex(address)
        counters = ClientCounters()
        calls = FramedCalls(place(address[1]), Grpc(), counters)
        # Long enough for a machine that has much to do: the first one waits for half of it.
        calls.call("Lookup", pb.LookupRequest(), pb.LookupResponse, 4 * SOON_S)
        calls.call("Lookup", pb.LookupRequest(), pb.LookupResponse, 4 * SOON_S)
    assert 0 < asked[0] <= 2 * SOON_S
    assert asked[1] > asked[0], "it does not try to connect again at once"
    assert counters.snapshot()["data_fallbacks"] == 2


def test_calls_under_way_fail_with_their_session() -> None:
    with daemon_that_says(hang_up=False) as port:
        calls = calls_to(port)
        raised: list[Exception] = []

        def ask() -> None:
            try:
                calls.call("Claim", pb.ClaimRequest(), pb.ClaimResponse, PATIENCE_S)
            except Exception as problem:
                raised.append(problem)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: calls._busy)
        calls.hang_up()
        asking.join()
        assert isinstance(raised[0], DaemonUnavailable)
        with pytest.raises(NoConnection):
            calls.save(pb.RawSaveRequest(), [], PATIENCE_S)


class Opened:
    """An opened link, with what the transport reads of it."""

    def __init__(self, data_port: int) -> None:
        self.welcome = pb.Welcome(data_port=data_port)
        self.ref = REF
        self.connection = self.calls = self
        self.security = Security()
        self.address = ""
        self.framed: FramedCalls | None = None
        self.on_end: list[object] = []

    def go_over(self, framed: FramedCalls) -> None:
        Link.go_over(self, framed)  # type: ignore[arg-type]  # it has what this sets


@pytest.mark.parametrize(
    ("address", "data_port", "host"),
    [
        ("cache.example:7", 8, "cache.example"),
        ("dns:///cache.example:7", 8, "cache.example"),
        ("[::1]:7", 8, "::1"),
        ("cache.example:7", 0, None),
        ("/run/d.sock", 8, None),  # it has a local socket or none
    ],
)
def test_the_data_socket_is_where_the_daemon_was_reached(
    monkeypatch: pytest.MonkeyPatch, address: str, data_port: int, host: str | None
) -> None:
    """Even if the session is open before the constructor has returned."""
    opened = Opened(data_port)

    def keeper(
        addresses: Sequence[str], *_: object, when_opened: Callable[[object], None], **__: object
    ) -> None:
        (opened.connection.address,) = addresses
        when_opened(opened)

    monkeypatch.setattr(remote_transport, "SessionKeeper", keeper)
    RemoteTransport(address, counters=ClientCounters())
    if host is None:
        assert opened.framed is None
        assert opened.calls is opened.connection
    else:
        assert opened.framed is not None
        assert str(opened.framed._place) == f"{host}:{data_port}"
        assert opened.calls is opened.framed
        assert opened.on_end == [opened.framed.hang_up]


# ---- on real daemons


def test_without_a_data_socket_all_goes_over_grpc() -> None:
    with private_daemon() as daemon:
        counters = ClientCounters()
        transport = RemoteTransport(daemon.address, counters=counters, wire="data")
        with Client(transport=transport, counters=counters) as client:
            assert client.wait_connected()
            assert not transport.framed
            moves(client)


def test_one_that_cannot_be_reached_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example behind a firewall that lets only gRPC through."""

    def elsewhere(link: Link, **_: bool) -> TcpPlace:
        return TcpPlace("127.0.0.77", link.welcome.data_port, link.ref)  # nothing listens there

    monkeypatch.setattr(remote_transport, "place_of", elsewhere)
    with private_daemon("--server.tcp=127.0.0.1:0") as daemon:
        counters = ClientCounters()
        transport = RemoteTransport(daemon.address, counters=counters)
        with Client(transport=transport, counters=counters) as client:
            assert client.wait_connected()
            assert transport.framed
            moves(client)
            with daemon.admin() as admin:
                assert not admin.stats().in_flight["data_connections"]


def moves(client: Client) -> None:
    """Save and read back, in every way."""
    key = Key(os.urandom(32))
    assert client.save(key, PAYLOAD, tier=Tier.RAM, reason=SaveReason.EVICT).ok
    with client.claim([key]) as hit:
        assert hit.read(0) == PAYLOAD
        assert hit.release()
    assert client.longest_run([key], claim=False).read(0) == PAYLOAD
    buffer = bytearray(len(PAYLOAD))
    assert client.restore_keys([key], [buffer])
    assert buffer == PAYLOAD
    assert client.exists([key]) == [True]


def test_a_daemon_that_stops_in_the_middle_costs_each_call_its_deadline() -> None:
    with (
        tcp_daemon("--sessions.heartbeat=60s", ram="64MiB") as daemon,
        Client(tcp_address(daemon), local=False) as client,
    ):
        assert client.wait_connected()
        large, key, other = os.urandom(30 * 2**20), Key(os.urandom(32)), Key(os.urandom(32))
        assert client.save(key, large, tier=Tier.RAM, reason=SaveReason.EVICT).ok
        hit = client.claim([key])
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            result = hit.restore_into([bytearray(len(large))], deadline_ms=200)
            assert result.miss is MissReason.DEADLINE
            result = client.restore_keys([key], [bytearray(len(large))], deadline_ms=200)
            assert result.miss in (MissReason.DEADLINE, MissReason.UNAVAILABLE)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        buffer = bytearray(len(large))
        assert hit.restore_into([buffer])
        assert buffer == large
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            outcome = client.save(
                other, large, tier=Tier.RAM, reason=SaveReason.EVICT, deadline_ms=200
            )
            assert outcome.status is SaveStatus.DEADLINE
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        assert hit.release()
        with daemon.admin() as admin:
            eventually(lambda: not list(admin.all_reservations()))
        moves(client)


class Impatient:
    """A socket whose kernel's timeout is over at once, each time that it may wait."""

    def __init__(self, sock: socket.socket, then: Callable[[], object] = lambda: None) -> None:
        self._socket, self._then = sock, then
        self.fileno, self.setsockopt = sock.fileno, sock.setsockopt

    def settimeout(self, _: None) -> None:
        pass

    def recv_into(self, room: memoryview, size_bytes: int, flags: int) -> int:
        if not flags & socket.MSG_DONTWAIT:
            self._then()
            raise BlockingIOError
        return self._socket.recv_into(room, size_bytes, flags)


@pytest.mark.parametrize("whole", [False, True])
def test_a_timeout_of_the_kernel_is_not_the_deadline(whole: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(cast(socket.socket, Impatient(ours, lambda: theirs.send(b"late"))))
        room = memoryview(bytearray(4))
        assert wire.receive(room, time.monotonic() + 60, whole=whole) == 4
        assert room == b"late"


def test_the_deadline_is_a_timeout_whatever_the_kernel_said_before() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(cast(socket.socket, Impatient(ours)))
        with pytest.raises(TimeoutError):
            wire.receive(memoryview(bytearray(4)), time.monotonic() + 0.01, whole=True)


def test_the_timeout_of_the_kernel_is_early_enough_to_be_late_and_is_seldom_set() -> None:
    """The timer wheel of Linux lets it end an eighth late."""
    set_s: list[float] = []

    class Counted(socket.socket):
        def setsockopt(self, level: int, name: int, value: Any) -> None:  # type: ignore[override]
            seconds, us = struct.unpack("ll", value)
            set_s.append(seconds + us / 1e6)
            super().setsockopt(level, name, value)

    ours, theirs = socket.socketpair()
    with theirs, Counted(fileno=ours.detach()) as counted:
        wire = Wire(counted)
        for left_s in (8.0, 7.9, 8.0, 1.0, 0.99):
            theirs.send(b"x")
            wire.receive(memoryview(bytearray(1)), time.monotonic() + left_s, whole=True)
    assert len(set_s) == 2
    assert 4.0 < set_s[0] <= 7.0
    assert 0.5 < set_s[1] <= 0.875
