"""Calls over gRPC: which are repeated, and what malformed responses lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.counters import ClientCounters
from prefixd.client.results import ReserveStatus
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.session import Backoff
from prefixd.client.wire.transport import Item, Range, SaveTerms, Saving, Sink
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import (
    CallerError,
    ClaimLost,
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidBatch,
    InvalidSize,
    LimitReached,
    PrefixdError,
    StaleIncarnation,
    UnknownReservation,
    UnknownSession,
    UnknownTier,
)
from prefixd.proto.keys import Key
from prefixd.proto.payload import FlatBytes
from prefixd.proto.vocabulary import ClaimMode, Presence, SaveReason, SaveStatus, Tier
from tests.support.fakes import PATIENCE_S, FakeDaemon, keys, payloads

TERMS = SaveTerms(Tier.RAM, SaveReason.COLD)
ONE, TWO, THREE = (Key(key) for key in keys(3))


def long() -> Deadline:
    return Deadline(PATIENCE_S * 1e3)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        yield daemon


@pytest.fixture
def counters() -> ClientCounters:
    return ClientCounters()


@pytest.fixture
def remote(daemon: FakeDaemon, counters: ClientCounters) -> Iterator[RemoteTransport]:
    remote = RemoteTransport(
        daemon.address,
        "tester",
        counters=counters,
        backoff=Backoff(0, 0),
        connect_timeout_ms=5_000,
        wire="grpc",
    )
    assert remote.wait(long())
    yield remote
    remote.close(PATIENCE_S)


class Parts(Sink):
    """Keeps what a read hands over. Over gRPC nothing is received directly into memory."""

    def __init__(self) -> None:
        self.received: list[tuple[int, int, bytes | None]] = []

    def __call__(self, number: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        self.received.append((number, offset_bytes, None if data is None else bytes(data)))

    def room(self, number: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        raise NotImplementedError

    def filled(self, number: int, length_bytes: int) -> None:
        raise NotImplementedError


def saving(key: Key, payload: bytes, token_ids: bytes = b"", **content: int) -> Saving:
    said = Content(len(payload), token_ids_bytes=len(token_ids), **content)
    return Saving(Item(key, said, token_ids), memoryview(payload))


# ---- the session


def test_a_client_has_a_name(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    assert remote.connected
    assert daemon.hellos[0].client_name == "tester"
    assert daemon.hellos[0].pid > 0


@pytest.mark.parametrize("name", ["", "n" * 121])
def test_a_name_has_a_length(name: str, counters: ClientCounters) -> None:
    with pytest.raises(InvalidSize, match="name"):
        RemoteTransport("/tmp/x.sock", name, counters=counters, wire="grpc")


def test_an_address_is_checked(counters: ClientCounters) -> None:
    with pytest.raises(ConfigError):
        RemoteTransport("nonsense", counters=counters, wire="grpc")


#: Calls that need nothing but a session.
CALLS: dict[str, Callable[[RemoteTransport], object]] = {
    "Lookup": lambda remote: remote.lookup([ONE], 0, long()),
    "Claim": lambda remote: remote.claim([ONE], ClaimMode.ANY, 0, 0, long()),
    "Reserve": lambda remote: remote.reserve([Item(TWO, Content(5))], TERMS, long()),
    "Save": lambda remote: remote.save([saving(THREE, b"abc")], TERMS, long()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [UnknownSession, StaleIncarnation])
def test_a_lost_session_is_renewed_and_the_call_repeated_once(
    daemon: FakeDaemon,
    remote: RemoteTransport,
    counters: ClientCounters,
    name: str,
    error: type[PrefixdError],
) -> None:
    daemon.fail(name, error("you are a stranger"))
    CALLS[name](remote)
    assert daemon.rpcs[name] == 2
    assert counters.snapshot()["rpcs"][name] == 2  # type: ignore[index]
    assert len(daemon.hellos) == 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("error", [LimitReached, UnknownTier, DaemonUnavailable])
def test_no_other_failure_is_repeated(
    daemon: FakeDaemon, remote: RemoteTransport, name: str, error: type[PrefixdError]
) -> None:
    daemon.fail(name, error("no"))
    with pytest.raises(error, match="no"):
        CALLS[name](remote)
    assert daemon.rpcs[name] == 1


@pytest.mark.parametrize("name", CALLS)
def test_every_call_ends_by_its_deadline(
    daemon: FakeDaemon, remote: RemoteTransport, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.long", lambda: Deadline(20))
    daemon.hold(name)
    with pytest.raises(DeadlineExceeded):
        CALLS[name](remote)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_fails_when_the_daemon_goes_away_meanwhile(
    daemon: FakeDaemon, remote: RemoteTransport, name: str
) -> None:
    def leave(message: Any) -> Any:
        daemon.end_sessions()  # the client closes its connection during the call
        daemon.wait_until(lambda: len(daemon.hellos) > 1)
        return message

    daemon.mangle(name, leave)
    with pytest.raises(DaemonUnavailable):
        CALLS[name](remote)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("Lookup", pb.LookupResponse()),
        ("Lookup", pb.LookupResponse(results=[pb.LookupResult(presence=pb.PRESENCE_PRESENT)])),
        ("Claim", pb.ClaimResponse(claim_id=1, results=[pb.ClaimResult(claimed=True)] * 2)),
        ("Reserve", pb.ReserveResponse()),
        ("Reserve", pb.ReserveResponse(results=[pb.ReserveResult()])),
        ("Save", pb.SaveResponse()),
        ("Save", pb.SaveResponse(results=[pb.SaveResult()])),
    ],
)
def test_an_answer_against_the_contract_is_a_failed_call(
    daemon: FakeDaemon, remote: RemoteTransport, name: str, answer: object
) -> None:
    daemon.mangle(name, lambda _: answer)
    with pytest.raises(PrefixdError, match="does not follow the contract") as caught:
        CALLS[name](remote)
    assert not isinstance(caught.value, CallerError)


# ---- reading


def test_lookup_tells_what_is_known(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    daemon.put(ONE, b"12345", tier=pb.TIER_DISK, token_count=7, layer_count=5)
    remote.reserve([Item(TWO, Content(5))], TERMS, long())
    present, in_flight, absent = remote.lookup([ONE, TWO, THREE], 0, long())
    assert [present.presence, in_flight.presence, absent.presence] == [
        Presence.PRESENT,
        Presence.IN_FLIGHT,
        Presence.ABSENT,
    ]
    assert present.entry is not None
    assert present.entry[:3] == (ONE, Tier.DISK, Content(5, 7, 0, 5))
    assert in_flight.owner.startswith("session")
    assert in_flight.age_ms == 7


@pytest.mark.parametrize(
    ("mode", "there", "positions"),
    [
        (ClaimMode.RUN, [ONE, TWO], [0, 1]),
        (ClaimMode.RUN, [ONE, THREE], [0]),
        (ClaimMode.FIRST, [TWO, THREE], [1]),
        (ClaimMode.ANY, [ONE, THREE], [0, 2]),
        (ClaimMode.ANY, [], []),
    ],
)
def test_claims_say_where_each_entry_stood(
    daemon: FakeDaemon,
    remote: RemoteTransport,
    mode: ClaimMode,
    there: list[Key],
    positions: list[int],
) -> None:
    for key in there:
        daemon.put(key, b"bytes")
    claimed = remote.claim([ONE, TWO, THREE], mode, 0, 0, long())
    assert claimed.positions == positions
    assert [entry.key for entry in claimed.entries] == [[ONE, TWO, THREE][p] for p in positions]
    assert (claimed.holding is None) == (not there)
    assert not claimed.in_flight


def test_reads_come_in_parts_of_the_ranges_asked_for(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    daemon.chunk_bytes = 100
    one, two = payloads([250, 120])
    daemon.put(ONE, one)
    daemon.put(TWO, two, token_ids=b"\1\0\0\0")
    claimed = remote.claim([ONE, TWO], ClaimMode.ANY, 0, 0, long())
    assert claimed.holding is not None
    first, second = claimed.entries
    parts = Parts()
    remote.read(
        claimed.holding,
        [Range(second, 1, 0, 120), Range(first, 0, 200, 50), Range(second, 1, 0, 4, True)],
        parts,
        long(),
    )
    assert parts.received == [
        (0, 0, two[:100]),
        (0, 100, two[100:]),
        (1, 0, one[200:]),
        (2, 0, b"\1\0\0\0"),
    ]


def test_what_cannot_be_read_arrives_as_none(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    daemon.put(ONE, b"bytes")
    daemon.mangle(
        "Read",
        lambda _: pb.ReadResponse(parts=[pb.ReadPart(status=pb.READ_STATUS_UNREADABLE)]),
    )
    claimed = remote.claim([ONE], ClaimMode.ANY, 0, 0, long())
    assert claimed.holding is not None
    parts = Parts()
    wanted = Range(claimed.entries[0], 0, 0, 5)
    remote.read(claimed.holding, [wanted], parts, long())
    assert parts.received == [(0, 0, None)]


def test_a_lost_claim_is_not_read(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    daemon.put(ONE, b"bytes")
    claimed = remote.claim([ONE], ClaimMode.ANY, 0, 0, long())
    assert claimed.holding is not None
    claimed.holding.why_lost = "it was revoked"
    wanted = Range(claimed.entries[0], 0, 0, 5)
    with pytest.raises(ClaimLost, match="revoked"):
        remote.read(claimed.holding, [wanted], Parts(), long())
    assert daemon.rpcs["Read"] == 0


def test_releases_of_this_and_earlier_sessions(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    for key in (ONE, TWO):
        daemon.put(key, b"bytes")
    old = remote.claim([ONE], ClaimMode.ANY, 0, 0, long()).holding
    daemon.fail("Lookup", UnknownSession("who?"))
    remote.lookup([ONE], 0, long())
    new = remote.claim([TWO], ClaimMode.ANY, 0, 0, long()).holding
    assert old is not None
    assert new is not None
    assert remote.release([old], long()) == [False]
    assert daemon.rpcs["Release"] == 0
    assert remote.release([old, new], long()) == [False, True]
    assert remote.release([new], long()) == [False]  # the daemon had taken it back before


def test_more_than_a_call_takes_goes_in_several(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    """Releases, and messages on the session stream."""
    daemon.put(ONE, b"bytes")
    link = remote.current
    assert link is not None
    claims = [remote.claim([ONE], ClaimMode.ANY, 0, 0, long()).holding for _ in range(12)]
    held = [claim for claim in claims if claim is not None]
    link.welcome.max_batch_keys = 5
    assert remote.release(held[:6], long()) == [True] * 6
    assert daemon.rpcs["Release"] == 2
    remote.give_back(held[6:])
    with daemon.changed:
        assert daemon.changed.wait_for(lambda: len(daemon.given_back) == 6, PATIENCE_S)
    assert daemon.given_back == [claim.number for claim in held[6:]]
    assert remote.max_batch_keys == 5


# ---- writing


def test_saves_carry_everything(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    terms = SaveTerms(Tier.SHM, SaveReason.EVICT, ancestors=[THREE], wait_ms=3, ttl_ms=9)
    outcomes = remote.save(
        [
            saving(ONE, b"123456", token_count=3, layer_count=2, token_ids=b"\1\0\0\0"),
            saving(TWO, b"7"),
        ],
        terms,
        long(),
    )
    assert [(outcome.key, outcome.status) for outcome in outcomes] == [
        (ONE, SaveStatus.SAVED),
        (TWO, SaveStatus.SAVED),
    ]
    entry = daemon.entries[ONE]
    assert (entry.payload, entry.tier, entry.reason) == (b"123456", Tier.SHM, SaveReason.EVICT)
    assert (entry.item.token_count, entry.item.layer_count) == (3, 2)
    assert entry.item.token_ids == b"\1\0\0\0"
    header = daemon.saves[0]
    assert (list(header.ancestors), header.wait_ms, header.ttl_ms) == ([THREE], 3, 9)


def test_messages_stay_below_what_the_daemon_takes(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    daemon.max_message_bytes, daemon.chunk_bytes = 50_000, 20_000
    daemon.fail("Lookup", UnknownSession("learn the new limits"))
    remote.lookup([ONE], 0, long())
    data = payloads([130_000, 10, 45_000])
    outcomes = remote.save(
        [saving(Key(key), payload) for key, payload in zip(keys(3), data, strict=True)],
        TERMS,
        long(),
    )
    assert all(outcome.ok for outcome in outcomes)
    assert [daemon.entries[key].payload for key in keys(3)] == data
    assert max(daemon.message_bytes) <= 50_000
    with pytest.raises(InvalidBatch, match="several calls"):
        remote.save([saving(ONE, b"1", token_ids=bytes(60_000))], TERMS, long())


def test_reservations_are_written_or_cancelled(daemon: FakeDaemon, remote: RemoteTransport) -> None:
    daemon.put(THREE, b"there")
    one, two, three = remote.reserve(
        [Item(ONE, Content(3)), Item(TWO, Content(4)), Item(THREE, Content(5))], TERMS, long()
    )
    assert [granted.status for granted in (one, two, three)] == [
        ReserveStatus.GRANTED,
        ReserveStatus.GRANTED,
        ReserveStatus.PRESENT,
    ]
    assert one.holding is not None
    assert two.holding is not None
    (outcome,) = remote.write([(one.holding, ONE)], [memoryview(b"abc")], long())
    assert outcome.status is SaveStatus.SAVED
    assert daemon.entries[ONE].payload == b"abc"
    assert remote.cancel([two.holding], long()) == [True]
    assert remote.cancel([two.holding, one.holding], long()) == [False, False]
    assert not daemon.reservations


def test_a_reservation_of_an_earlier_session_is_unknown(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    (granted,) = remote.reserve([Item(ONE, Content(3))], TERMS, long())
    daemon.fail("Lookup", UnknownSession("who?"))
    remote.lookup([ONE], 0, long())
    assert granted.holding is not None
    with pytest.raises(UnknownReservation):
        remote.write([(granted.holding, ONE)], [memoryview(b"abc")], long())
    assert remote.cancel([granted.holding], long()) == [False]
    assert daemon.rpcs["Save"] == daemon.rpcs["Cancel"] == 0


def test_somebody_elses_save_in_flight_is_named(remote: RemoteTransport) -> None:
    remote.reserve([Item(ONE, Content(3))], TERMS, long())
    (granted,) = remote.reserve([Item(ONE, Content(3))], TERMS, long())
    assert granted.status is ReserveStatus.IN_FLIGHT
    assert granted.owner.startswith("session")
    (outcome,) = remote.save([saving(ONE, b"abc")], TERMS, long())
    assert (outcome.status, outcome.owner) == (SaveStatus.IN_FLIGHT, granted.owner)
    assert not outcome.ok


def test_a_claim_that_is_granted_too_late_is_given_back(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    """Otherwise it would be held as long as the session, because no caller knows its number."""
    daemon.put(ONE, b"abc")
    gate = daemon.hold("Claim")
    with pytest.raises(DeadlineExceeded):
        remote.claim([ONE], ClaimMode.ANY, 0, 0, Deadline(50))
    assert not daemon.rpcs["Release"]
    gate.set()
    daemon.wait_until(lambda: daemon.rpcs["Release"] and not daemon.claims)
    assert remote.wait(long())
    held = remote.claim([ONE], ClaimMode.ANY, 0, 0, long()).holding
    assert held is not None
    assert set(daemon.claims) == {held.number}


def test_a_reservation_that_is_granted_too_late_is_given_back(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    gate = daemon.hold("Reserve")
    with pytest.raises(DeadlineExceeded):
        remote.reserve([Item(ONE, Content(3)), Item(TWO, Content(3))], TERMS, Deadline(50))
    gate.set()
    daemon.wait_until(lambda: daemon.rpcs["Cancel"] and not daemon.reservations)


def test_what_is_granted_too_late_ends_with_the_session(
    daemon: FakeDaemon, remote: RemoteTransport
) -> None:
    daemon.put(ONE, b"abc")
    gate = daemon.hold("Claim")
    with pytest.raises(DeadlineExceeded):
        remote.claim([ONE], ClaimMode.ANY, 0, 0, Deadline(50))
    remote.close(PATIENCE_S)
    gate.set()
    daemon.wait_until(lambda: not daemon.sessions)
    assert not daemon.rpcs["Release"]
