"""Keeping a session: reconnecting, failing fast, noticing a daemon that hangs."""

from __future__ import annotations

import logging
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from prefixd.client.counters import ClientCounters
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.session import Backoff, SessionKeeper
from prefixd.client.wire.transport import Holding
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    ClientClosed,
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    LimitReached,
)
from tests.support.fakes import PATIENCE_S, FakeDaemon

LONG = PATIENCE_S * 1e3


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d.sock"


@pytest.fixture
def daemon(address: str) -> Iterator[FakeDaemon]:
    with FakeDaemon(address) as daemon:
        yield daemon


class WatchedCounters(ClientCounters):
    """Counters that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: SimpleQueue[str] = SimpleQueue()

    def add(self, name: str, amount: int = 1) -> None:
        super().add(name, amount)
        self.counted.put(name)

    def wait_for(self, name: str) -> None:
        while self.counted.get(timeout=PATIENCE_S) != name:
            pass


class WatchedBackoff(Backoff):
    """Waits of a millisecond; a test can wait until a session has had its first answer."""

    def __init__(self) -> None:
        super().__init__(1, 4)
        self.proved = threading.Event()

    def reset(self) -> None:
        super().reset()
        self.proved.set()


class Keepers:
    """Makes keepers, and closes them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.counters = WatchedCounters()
        self.backoff = WatchedBackoff()
        self.made: list[SessionKeeper] = []

    def __call__(self, *, connect_timeout_ms: int = 5_000) -> SessionKeeper:
        keeper = SessionKeeper(
            [self.address],
            pb.Hello(client_name="test", pid=1),
            counters=self.counters,
            connect_timeout_ms=connect_timeout_ms,
            backoff=self.backoff,
        )
        self.made.append(keeper)
        return keeper


@pytest.fixture
def keepers(address: str) -> Iterator[Keepers]:
    keepers = Keepers(address)
    yield keepers
    for keeper in keepers.made:
        keeper.close(PATIENCE_S)


def test_the_first_call_waits_for_the_session(daemon: FakeDaemon, keepers: Keepers) -> None:
    gate = daemon.hold("Session")
    keeper = keepers()
    assert keeper.current is None
    threading.Thread(
        target=lambda: (daemon.wait_until(lambda: daemon.rpcs["Session"]), gate.set())
    ).start()
    link = keeper.link(Deadline(LONG))
    assert link is keeper.current
    assert link.ref.incarnation == daemon.incarnation
    assert list(daemon.sessions) == [link.ref.session_id]
    assert daemon.hellos[0].client_name == "test"


def test_a_call_waits_no_longer_than_it_may(daemon: FakeDaemon, keepers: Keepers) -> None:
    daemon.hold("Session")
    keeper = keepers()
    with pytest.raises(DeadlineExceeded):
        keeper.link(Deadline(5))


def test_nobody_there_is_told_at_once_and_from_then_on(keepers: Keepers) -> None:
    keeper = keepers()
    for _ in range(3):
        with pytest.raises(DaemonUnavailable, match=keepers.address):
            keeper.link(Deadline(LONG))


def test_a_daemon_that_comes_later_is_found(address: str, keepers: Keepers) -> None:
    keeper = keepers()
    with pytest.raises(DaemonUnavailable):
        keeper.link(Deadline(LONG))
    with FakeDaemon(address):
        assert keeper.wait(Deadline(LONG))
        assert keeper.link(Deadline(LONG))
        keeper.close(PATIENCE_S)


def test_a_restarted_daemon_is_another_session(
    address: str, keepers: Keepers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixd.client")
    daemon = FakeDaemon(address).start()
    keeper = keepers()
    first = keeper.link(Deadline(LONG))
    held = first.claims.hold(first, 1)
    daemon.stop()
    daemon.start()
    while keeper.current in (None, first):
        keeper.wait(Deadline(LONG))
    second = keeper.link(Deadline(LONG))
    assert second.ref.incarnation == daemon.incarnation != first.ref.incarnation
    assert held.why_lost
    assert first.why_ended
    assert keepers.counters.snapshot()["sessions"] == 2
    assert "lost the daemon" in caplog.text
    keeper.close(PATIENCE_S)
    daemon.stop()


def test_a_session_that_the_daemon_forgot_is_renewed(daemon: FakeDaemon, keepers: Keepers) -> None:
    keeper = keepers()
    first = keeper.link(Deadline(LONG))
    assert keepers.backoff.proved.wait(PATIENCE_S)
    keeper.renew(first, "it was forgotten")
    keeper.renew(first, "it was forgotten")  # another thread did it; once is enough
    second = keeper.link(Deadline(LONG))
    assert second is not first
    assert first.why_ended == "it was forgotten"
    daemon.wait_until(lambda: list(daemon.sessions) == [second.ref.session_id])


def test_a_daemon_that_ends_every_session_sees_ever_fewer(daemon: FakeDaemon, address: str) -> None:
    waits: list[float] = []

    class Recording(Backoff):
        def next_s(self) -> float:
            waits.append(super().next_s())
            if len(waits) == 5:
                daemon.answers_heartbeats = True
            return waits[-1]

    daemon.answers_heartbeats = False
    for _ in range(4):
        daemon.fail("Session", LimitReached("too many sessions"))
    keeper = SessionKeeper(
        [address],
        pb.Hello(),
        counters=ClientCounters(),
        connect_timeout_ms=5_000,
        backoff=Recording(1, 100, draw=lambda: 1.0),
    )
    assert keeper.wait(Deadline(LONG))
    assert waits == [0, 0.001, 0.002, 0.004, 0.008]
    daemon.wait_until(lambda: daemon.heartbeats)
    keeper.close(PATIENCE_S)


def test_a_daemon_that_accepts_and_says_nothing_counts_as_down(
    tmp_path: Path, keepers: Keepers
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "d.sock"))
        listener.listen()
        keeper = keepers(connect_timeout_ms=50)
        with pytest.raises(DaemonUnavailable):
            keeper.link(Deadline(LONG))


def test_a_daemon_without_a_welcome_counts_as_down(daemon: FakeDaemon, keepers: Keepers) -> None:
    daemon.welcomes = False
    keeper = keepers(connect_timeout_ms=50)
    with pytest.raises(DaemonUnavailable, match="did not answer in time"):
        keeper.link(Deadline(LONG))


def test_something_else_than_a_welcome_counts_as_down(daemon: FakeDaemon, keepers: Keepers) -> None:
    daemon.mangle("Session", lambda _: pb.SessionEvent(draining=pb.Draining()))
    keeper = keepers()
    with pytest.raises(DaemonUnavailable, match="welcome"):
        keeper.link(Deadline(LONG))


def test_heartbeats_go_out_by_themselves(address: str, keepers: Keepers) -> None:
    with FakeDaemon(address, heartbeat_interval_ms=2) as daemon:
        keeper = keepers()
        keeper.link(Deadline(LONG))
        daemon.wait_until(lambda: daemon.heartbeats >= 5)
        keeper.close(PATIENCE_S)


def test_a_daemon_that_stops_answering_heartbeats_is_left(address: str, keepers: Keepers) -> None:
    with FakeDaemon(address, heartbeat_interval_ms=2) as daemon:
        daemon.answers_heartbeats = False
        keeper = keepers()
        link = keeper.link(Deadline(LONG))
        daemon.wait_until(lambda: len(daemon.hellos) > 1)
        assert link.why_ended == "the daemon stopped answering"
        daemon.answers_heartbeats = True
        keeper.close(PATIENCE_S)


def lose(daemon: FakeDaemon, held: Holding) -> None:
    lost = pb.ReservationLost(token=held.number, why="it expired")
    daemon.sessions[held.link.ref.session_id].put(pb.SessionEvent(reservation_lost=lost))


def test_a_stopping_daemon_is_asked_nothing_new(daemon: FakeDaemon, keepers: Keepers) -> None:
    keeper = keepers()
    link = keeper.link(Deadline(LONG))
    held = link.reservations.hold(link, 9)
    daemon.drain()
    lose(daemon, held)
    keepers.counters.wait_for("lost_reservations")  # events come in order
    with pytest.raises(Draining):
        keeper.link(Deadline(LONG), opening=True)
    assert keeper.link(Deadline(LONG)) is link


def test_events_of_a_later_version_are_ignored(daemon: FakeDaemon, keepers: Keepers) -> None:
    keeper = keepers()
    link = keeper.link(Deadline(LONG))
    daemon.sessions[link.ref.session_id].put(pb.SessionEvent())
    held = link.reservations.hold(link, 9)
    lose(daemon, held)
    keepers.counters.wait_for("lost_reservations")
    assert held.why_lost == "it expired"
    assert keepers.counters.snapshot()["lost_reservations"] == 1


def test_the_library_swallows_nothing_that_it_logs() -> None:
    """In an interpreter of its own: prefixctl, which reports by itself, does swallow it."""
    ask = (
        "import logging, prefixd.client.client; print(logging.getLogger('prefixd.client').handlers)"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_daemon_that_is_not_found_is_said_once_for_each_time(
    address: str, keepers: Keepers, caplog: pytest.LogCaptureFixture
) -> None:
    """With where it was looked for, and however often it is tried."""
    keeper = keepers()
    with pytest.raises(DaemonUnavailable, match="no such socket"):
        keeper.link(Deadline(LONG))
    tries = threading.Event()
    waits = keepers.backoff.next_s
    keepers.backoff.next_s = lambda: tries.set() or waits()  # type: ignore[method-assign]
    for _ in range(3):
        tries.clear()
        assert tries.wait(PATIENCE_S)
    with FakeDaemon(address):
        assert keeper.wait(Deadline(LONG))
        keepers.backoff.proved.wait(PATIENCE_S)
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    first, *rest = said
    assert first.startswith(
        f"no daemon at {address}: there is no such socket. Start one with `prefixd`"
    )
    # That daemon ended as well, which is another time.
    assert [each.split(" at ")[0] for each in rest] in (
        [],
        ["lost the daemon"],
        ["lost the daemon", "no daemon"],
    )


def test_a_closed_keeper_says_so_and_leaves_nothing(daemon: FakeDaemon, keepers: Keepers) -> None:
    keeper = keepers()
    link = keeper.link(Deadline(LONG))
    keeper.close(PATIENCE_S)
    keeper.close(PATIENCE_S)
    daemon.wait_until(lambda: not daemon.sessions)
    assert link.why_ended == "the client was closed"
    with pytest.raises(ClientClosed):
        keeper.link(Deadline(LONG))
    assert keeper.wait(Deadline(LONG)) is False
    assert not [t for t in threading.enumerate() if t.name == "prefixd-session"]


def test_closing_does_not_wait_for_a_backoff(address: str) -> None:
    keeper = SessionKeeper(
        [address],
        pb.Hello(),
        counters=ClientCounters(),
        connect_timeout_ms=5_000,
        backoff=Backoff(1e9, 1e9),
    )
    with pytest.raises(DaemonUnavailable):
        keeper.link(Deadline(LONG))
    keeper.close(PATIENCE_S)
    assert not keeper._thread.is_alive()


# ---- the waits between attempts


def waits_ms(backoff: Backoff, count: int) -> list[float]:
    return [round(backoff.next_s() * 1e3, 6) for _ in range(count)]


def test_the_first_attempt_is_at_once_then_waits_double_up_to_a_maximum() -> None:
    backoff = Backoff(10, 60, draw=lambda: 1.0)
    assert waits_ms(backoff, 6) == [0, 10, 20, 40, 60, 60]


def test_a_success_starts_over() -> None:
    backoff = Backoff(10, 60, draw=lambda: 1.0)
    waits_ms(backoff, 4)
    backoff.reset()
    assert waits_ms(backoff, 3) == [0, 10, 20]


def test_each_wait_is_drawn_from_its_upper_half() -> None:
    assert waits_ms(Backoff(10, 60, draw=lambda: 0.0), 4) == [0, 5, 10, 20]
    drawn = Backoff(100, 100, draw=random.Random(7).random)
    waits = waits_ms(drawn, 200)[1:]
    assert all(50 <= wait <= 100 for wait in waits)
    assert len(set(waits)) > 100


@pytest.mark.parametrize("count", [1, 40])
def test_waits_are_bounded_by_default(count: int) -> None:
    assert max(waits_ms(Backoff(), count)) <= 2_000


@pytest.mark.parametrize(
    ("daemons", "older"),
    [("0.0.9", True), ("0.1.7", False), ("0.1.0rc1", False), ("1.0.0", False), ("fake", False)],
)
def test_both_tell_their_versions(
    daemon: FakeDaemon,
    keepers: Keepers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    daemons: str,
    older: bool,
) -> None:
    monkeypatch.setattr("prefixd.client.wire.session._own_version", lambda: "0.1.3")
    daemon.version = daemons
    with caplog.at_level("INFO", "prefixd.client"):
        keepers().link(Deadline(LONG))
    assert daemon.hellos[0].client_version == "0.1.3"
    assert f"with prefixd {daemons} at" in caplog.text
    assert ("older than this client (0.1.3)" in caplog.text) is older
