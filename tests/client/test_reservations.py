"""Reservations: the right to save keys before they are computed. (client/saves.py)"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefixd.client import Client, ReserveItem, SaveReason, SaveStatus, Tier
from prefixd.client.results import ReserveStatus
from prefixd.proto.errors import (
    CallerError,
    DaemonUnavailable,
    InvalidBatch,
    InvalidKey,
    InvalidSize,
    LimitReached,
)
from prefixd.proto.keys import Key
from prefixd.proto.limits import MAX_WAIT_MS
from tests.support.fake_clients import ALL, ONE, TWO, fake_daemon, saves_of, saving_client
from tests.support.fakes import PATIENCE_S, FakeDaemon

daemon = pytest.fixture(fake_daemon)
client = pytest.fixture(saving_client)


def reserve(client: Client, *reserved: Key, **options: Any) -> list[Any]:
    items = [ReserveItem(key, 3, token_count=9) for key in reserved]
    return client.reserve(items, tier=Tier.SHM, reason=SaveReason.COLD, **options)


def test_a_reservation_is_written(daemon: FakeDaemon, client: Client) -> None:
    (reservation,) = reserve(client, ONE, ttl_ms=7_000)
    assert reservation.granted
    assert repr(reservation) == f"<Reservation: granted {ONE.hex()[:16]}>"
    assert daemon.saves[0].ttl_ms == 7_000
    with reservation:
        assert reservation.write(bytearray(b"abc")).status is SaveStatus.SAVED
    assert not reservation.granted
    assert not reservation.cancel()
    assert daemon.entries[ONE].payload == b"abc"
    assert daemon.entries[ONE].item.token_count == 9
    assert daemon.rpcs["Cancel"] == 0
    assert client.counters["saved_bytes"] == 3


def test_what_is_not_written_is_cancelled(daemon: FakeDaemon, client: Client) -> None:
    (reservation,) = reserve(client, ONE)
    with pytest.raises(RuntimeError, match="computing failed"), reservation:
        raise RuntimeError("computing failed")
    assert not daemon.reservations
    with pytest.raises(CallerError, match="can't be written"):
        reservation.write(b"abc")


def test_one_that_is_dropped_is_given_back_with_a_warning(
    daemon: FakeDaemon, client: Client
) -> None:
    dropped = reserve(client, ONE, TWO)
    assert dropped.pop().cancel()
    assert len(daemon.reservations) == 1
    with pytest.warns(ResourceWarning, match="neither written nor cancelled"):
        dropped.clear()
    daemon.wait_until(lambda: not daemon.reservations)
    assert daemon.rpcs["Cancel"] == 1


def test_of_two_that_miss_one_computes_and_the_other_gets_it(
    daemon: FakeDaemon, client: Client
) -> None:
    with Client(daemon.address, name="other", local=False) as other:
        (mine,) = reserve(client, ONE)
        (theirs,) = reserve(other, ONE)
        assert theirs.status is ReserveStatus.IN_FLIGHT
        assert theirs.owner.startswith("session")
        assert theirs.age_ms == 7
        assert not theirs.granted
        with theirs:
            pass
        assert daemon.rpcs["Cancel"] == 0
        thread = threading.Thread(
            target=lambda: (
                daemon.wait_until(lambda: daemon.rpcs["Reserve"] == 3),
                mine.write(b"abc"),
            )
        )
        thread.start()
        (theirs,) = reserve(other, ONE, wait_ms=MAX_WAIT_MS)
        thread.join(PATIENCE_S)
        assert theirs.status is ReserveStatus.PRESENT
        with other.claim([ONE]) as hit:
            assert hit.read(0) == b"abc"


def test_many_are_written_in_one_rpc(daemon: FakeDaemon, client: Client) -> None:
    one, two, three = reserve(client, *ALL)
    outcomes = client.write([(two, b"222"), (one, b"111")])
    assert [(outcome.key, outcome.status) for outcome in outcomes] == [
        (TWO, SaveStatus.SAVED),
        (ONE, SaveStatus.SAVED),
    ]
    assert client.cancel([one, three, two]) == [False, True, False]
    assert client.cancel([one]) == [False]
    assert daemon.rpcs["Save"] == daemon.rpcs["Cancel"] == 1


@pytest.mark.parametrize("payload", [b"ab", b"abcd", b""])
def test_a_write_has_the_reserved_size(client: Client, payload: bytes) -> None:
    (reservation,) = reserve(client, ONE)
    with pytest.raises(InvalidSize):
        reservation.write(payload)
    assert reservation.granted  # and may still be written
    assert reservation.cancel()


def test_a_write_names_each_reservation_once(client: Client) -> None:
    (reservation,) = reserve(client, ONE)
    with pytest.raises(InvalidBatch):
        client.write([(reservation, b"abc")] * 2)
    assert reservation.granted
    assert reservation.cancel()


def test_a_lost_reservation_is_an_outcome(daemon: FakeDaemon, client: Client) -> None:
    (reservation,) = reserve(client, ONE)
    daemon.lose_reservations()
    daemon.end_sessions()
    daemon.wait_until(lambda: len(daemon.hellos) > 1)
    assert reservation.lost
    outcome = reservation.write(b"abc")
    assert outcome.status in (SaveStatus.LOST, SaveStatus.UNAVAILABLE)
    assert not outcome.ok
    assert client.counters["lost_reservations"] == 1


def test_a_reservation_that_the_daemon_has_forgotten_is_lost(
    daemon: FakeDaemon, client: Client
) -> None:
    (reservation,) = reserve(client, ONE)
    daemon.reservations.clear()
    assert reservation.write(b"abc").status is SaveStatus.LOST
    assert saves_of(client) == {"lost": 1}


@pytest.mark.parametrize("error", [DaemonUnavailable("gone"), LimitReached("full")])
def test_a_reservation_that_cannot_be_had_is_an_answer(
    daemon: FakeDaemon, client: Client, error: Any
) -> None:
    daemon.fail("Reserve", error)
    (reservation,) = reserve(client, ONE)
    assert (reservation.status, reservation.message) == (ReserveStatus.FAILED, str(error))
    assert not reservation.granted
    assert not reservation.lost
    assert not reservation.cancel()


@pytest.mark.parametrize("name", ["Save", "Cancel"])
def test_using_a_reservation_may_fail_without_raising(
    daemon: FakeDaemon, client: Client, name: str
) -> None:
    (reservation,) = reserve(client, ONE)
    daemon.fail(name, DaemonUnavailable("gone"))
    if name == "Save":
        assert reservation.write(b"abc").status is SaveStatus.UNAVAILABLE
    else:
        assert reservation.cancel() is False


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (ReserveItem(Key(b"short"), 3), InvalidKey),
        (ReserveItem(ONE, 0), InvalidSize),
        (ReserveItem(ONE, 2**40 + 1), InvalidSize),
        (ReserveItem(ONE, 3, layer_count=2), InvalidSize),
        (ReserveItem(ONE, 3, token_count=-1), InvalidSize),
        (ReserveItem(ONE, 3, token_ids=b"abc"), InvalidSize),
    ],
)
def test_a_reservation_is_checked(client: Client, item: ReserveItem, error: Any) -> None:
    with pytest.raises(error):
        client.reserve([item], tier=Tier.RAM, reason=SaveReason.COLD)


def test_a_reservation_has_a_bounded_life(client: Client) -> None:
    with pytest.raises(InvalidSize, match="ttl_ms"):
        reserve(client, ONE, ttl_ms=3_600_001)
