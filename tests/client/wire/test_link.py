"""The heartbeats of a session, and the claims and reservations in it."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.client.counters import ClientCounters
from prefixd.client.wire import link as link_module
from prefixd.client.wire.grpc_connection import GrpcConnection
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
    link = Link(GrpcConnection(daemon.address, 5_000), pb.Hello(client_name="me"), 5.0)
    yield link
    link.close("the test is over")


def test_a_link_says_hello_and_knows_its_welcome(daemon: FakeDaemon, link: Link) -> None:
    link.open()
    assert daemon.hellos == [pb.Hello(client_name="me")]
    assert link.ref.incarnation == daemon.incarnation
    assert link.welcome.daemon_version == "fake"


def test_what_the_daemon_refuses_is_raised(daemon: FakeDaemon) -> None:
    daemon.fail("Session", LimitReached("too many sessions"))
    link = Link(GrpcConnection(daemon.address, 5_000), pb.Hello(), 5.0)
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


class Idle:
    """A link to a daemon that wants heartbeats every millisecond, and of idle clients none."""

    def __init__(self, daemon: FakeDaemon) -> None:
        daemon.heartbeat_interval_ms = 2
        daemon.idle_heartbeat_interval_ms = 10**9
        self.daemon = daemon
        self.counters = ClientCounters()
        self.link = Link(GrpcConnection(daemon.address, 5_000), pb.Hello(), 5.0, self.counters)
        self.looks = 0
        self.link.before_heartbeat = self.looked
        self.link.open()
        self.reader = threading.Thread(target=lambda: deque(self.link.events(), 0))
        self.reader.start()

    def looked(self) -> None:
        with self.daemon.changed:
            self.looks += 1
            self.daemon.changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until ten intervals in a row bring no heartbeat."""
        sent = looked = -1
        while sent != self.daemon.heartbeats:
            sent, looked = self.daemon.heartbeats, self.looks
            self.daemon.wait_until(lambda looked=looked: self.looks >= looked + 10)

    def wait_until_it_beats(self) -> None:
        sent = self.daemon.heartbeats
        self.daemon.wait_until(lambda: self.daemon.heartbeats >= sent + 5)

    def close(self) -> None:
        self.link.close("the test is over")
        self.reader.join()


@pytest.fixture
def idle(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Idle]:
    monkeypatch.setattr(link_module, "MAX_UNANSWERED", 10**9)  # a busy machine is late
    idle = Idle(daemon)
    yield idle
    idle.close()


def test_a_client_that_holds_nothing_is_quiet(idle: Idle) -> None:
    idle.wait_until_idle()
    assert idle.daemon.heartbeats >= 1


@pytest.mark.parametrize("what", ["claims", "reservations"])
def test_heartbeats_come_as_long_as_something_is_held(idle: Idle, what: str) -> None:
    idle.wait_until_idle()
    held = getattr(idle.link, what).hold(idle.link, 1)
    idle.wait_until_it_beats()
    assert held.why_lost is None
    del held
    idle.wait_until_idle()


def test_heartbeats_come_during_calls(idle: Idle) -> None:
    idle.wait_until_idle()
    with idle.link.calling():
        idle.wait_until_it_beats()
        with idle.link.calling():
            pass
        idle.wait_until_it_beats()
    idle.wait_until_idle()


def test_heartbeats_come_as_long_as_the_daemon_holds_something(idle: Idle) -> None:
    """Such as a claim that was granted to a call whose answer never came."""
    idle.wait_until_idle()
    idle.daemon.holds = True
    idle.link.call_timed_out()  # which a heartbeat follows
    idle.wait_until_it_beats()
    idle.daemon.holds = False
    idle.wait_until_idle()


def test_what_was_counted_is_reported_as_soon_as_by_others(idle: Idle) -> None:
    idle.wait_until_idle()
    sent = idle.daemon.heartbeats
    idle.counters.add("lookups")
    idle.daemon.wait_until(lambda: idle.daemon.heartbeats > sent)
    idle.wait_until_idle()
    assert not idle.counters.to_report


def test_unanswered_heartbeats_are_repeated_until_the_daemon_counts_as_gone(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle.wait_until_idle()
    monkeypatch.setattr(link_module, "MAX_UNANSWERED", 4)
    idle.daemon.answers_heartbeats = False
    idle.link.call_timed_out()
    idle.reader.join()
    assert idle.link.why_ended == "the daemon stopped answering"


def test_a_change_of_pressure_is_heard_without_a_heartbeat(idle: Idle) -> None:
    idle.wait_until_idle()
    (events,) = idle.daemon.sessions.values()
    sent = idle.daemon.heartbeats
    events.put(pb.SessionEvent(heartbeat_ack=pb.HeartbeatAck(under_pressure=True, holds=True)))
    idle.daemon.wait_until(lambda: idle.link.under_pressure)
    idle.wait_until_idle()
    assert idle.daemon.heartbeats == sent, "it says nothing else: it answers no heartbeat"
