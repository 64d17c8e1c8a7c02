"""The heartbeats of a session, and the claims and reservations in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.client.wire.connection import Connection
from prefixd.client.wire.link import Holdings, Link
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DaemonUnavailable, LimitReached
from tests.support.fakes import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        yield daemon


@pytest.fixture
def link(daemon: FakeDaemon) -> Iterator[Link]:
    link = Link(Connection(daemon.address, 5_000), pb.Hello(client_name="me"), 5.0)
    yield link
    link.close("the test is over")


def test_a_link_says_hello_and_knows_its_welcome(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    assert daemon.hellos == [pb.Hello(client_name="me")]
    assert link.ref.incarnation == daemon.incarnation
    assert link.welcome.daemon_version == "fake"


def test_what_the_daemon_refuses_is_raised(daemon: FakeDaemon) -> None:
    daemon.fail("Session", LimitReached("too many sessions"))
    link = Link(Connection(daemon.address, 5_000), pb.Hello(), 5.0)
    with pytest.raises(LimitReached, match="too many sessions"):
        link.open()
    link.close("the test is over")


def test_a_session_that_ends_in_order_ends_its_events(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    daemon.end_sessions()
    assert [event.WhichOneof("kind") for event in link.events()] in ([], ["heartbeat_ack"])
    assert link.why_ended == "the daemon ended the session"


def test_the_first_reason_stays(link: Link) -> None:
    link.close("the first")
    link.close("the second")
    assert link.why_ended == "the first"
    with pytest.raises(DaemonUnavailable, match="the first"):
        link.open()


def test_what_is_said_arrives_in_order(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    for number in range(20):
        link.send(pb.SessionRequest(suspect=pb.Suspect(keys=[bytes([number]) * 32])))
    daemon.wait_until(lambda: len(daemon.suspects) == 20)
    assert daemon.suspects == [bytes([number]) * 32 for number in range(20)]


def test_leaving_lets_the_daemon_end_the_session(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    link.leave("enough")
    assert [e for e in link.events() if e.WhichOneof("kind") != "heartbeat_ack"] == []
    assert link.why_ended == "enough"
    daemon.wait_until(lambda: not daemon.sessions)


def test_what_waits_to_be_told_is_told_before_leaving(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    for number in range(20):
        link.send(pb.SessionRequest(suspect=pb.Suspect(keys=[bytes([number]) * 32])))
    link.leave("enough")
    assert [e for e in link.events() if e.WhichOneof("kind") != "heartbeat_ack"] == []
    assert daemon.suspects == [bytes([number]) * 32 for number in range(20)]


def test_a_suspect_link_is_cleared_by_a_heartbeat_of_its_own(
    daemon: FakeDaemon, link: Link
) -> None:
    link.open()
    events = link.events()
    assert next(events).heartbeat_ack.sequence == 1
    link.call_timed_out()
    link.call_timed_out()
    assert link.suspect
    # It comes at once, although the next heartbeat is not due before a second has passed.
    assert next(events).heartbeat_ack.sequence == 2
    assert not link.suspect
    assert daemon.heartbeats == 2


def test_an_answer_that_was_on_its_way_proves_nothing(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    events = link.events()
    daemon.wait_until(lambda: daemon.heartbeats == 1)  # answered, but the answer was not read yet
    link.call_timed_out()
    assert next(events).heartbeat_ack.sequence == 1
    assert link.suspect
    assert next(events).heartbeat_ack.sequence == 2
    assert not link.suspect


# ---- holdings


def test_a_holding_is_lost_by_its_number(link: Link) -> None:
    holdings = Holdings()
    one, two = holdings.hold(link, 1), holdings.hold(link, 2)
    assert holdings.lose(1, "revoked")
    assert not holdings.lose(1, "again")
    assert (one.why_lost, two.why_lost) == ("revoked", None)


def test_the_end_takes_everything_but_not_the_reasons(link: Link) -> None:
    holdings = Holdings()
    one, two = holdings.hold(link, 1), holdings.hold(link, 2)
    holdings.lose(1, "revoked")
    holdings.end("over")
    assert (one.why_lost, two.why_lost) == ("revoked", "over")
    assert holdings.hold(link, 3).why_lost == "over"


def test_what_nobody_refers_to_is_not_kept(link: Link) -> None:
    holdings = Holdings()
    holdings.hold(link, 1)
    gc.collect()
    assert not holdings.lose(1, "nobody cares")


def test_closing_a_link_loses_what_it_holds(link: Link) -> None:
    claim, reservation = link.claims.hold(link, 1), link.reservations.hold(link, 1)
    link.close("gone")
    assert claim.why_lost == reservation.why_lost == "gone"
