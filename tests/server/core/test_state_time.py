"""Deadlines, stamps and use counts: what the state makes of the time in its events."""

from __future__ import annotations

import pytest

from prefixd.proto.vocabulary import ClaimMode, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from tests.support.state_driver import LOST_AFTER_NS, Driver, key, keys, names, stored

# ---- deadlines


def test_the_next_deadline_is_the_soonest() -> None:
    driver = Driver()
    assert driver.state.next_deadline_ns() is None
    session = driver.open()
    assert driver.state.next_deadline_ns() == LOST_AFTER_NS
    driver.save(session, "a", ttl_ns=900)
    driver.claim(session, "a", lease_ns=800)
    assert driver.state.next_deadline_ns() == 800
    driver.reserve(session, "b", ttl_ns=700)
    assert driver.state.next_deadline_ns() == 700
    driver.lookup("b", wait_ns=600)
    assert driver.state.next_deadline_ns() == 600


def test_after_a_tick_the_next_deadline_is_later() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a")
    driver.claim(session, "a", lease_ns=10)
    driver.now_ns = 5
    driver.hear(session)
    driver.now_ns = 10
    assert driver.tick() == [], "renewed by the heartbeat"
    assert driver.state.next_deadline_ns() == 15
    driver.now_ns = 15
    driver.tick()
    assert driver.counters.claims_lost == 1


def test_a_session_that_holds_nothing_may_be_silent_for_longer() -> None:
    driver = Driver()
    idle, holder = driver.open("idle"), driver.open("holder")
    driver.save(holder, "a")
    driver.claim(holder, "a", lease_ns=10 * LOST_AFTER_NS)
    driver.now_ns = LOST_AFTER_NS - 1
    driver.tick()
    assert set(driver.state.tables.sessions) == {idle, holder}
    driver.now_ns += 1
    driver.tick()
    assert set(driver.state.tables.sessions) == {idle}
    assert driver.state.next_deadline_ns() == 2 * LOST_AFTER_NS, "it may begin to hold something"
    driver.now_ns = 5 * LOST_AFTER_NS - 1
    driver.tick()
    assert set(driver.state.tables.sessions) == {idle}
    driver.now_ns += 1
    driver.tick()
    assert not driver.state.tables.sessions


@pytest.mark.parametrize("asks", ["claim", "reserve"])
def test_who_begins_to_hold_something_is_alive_then_and_lost_as_soon_as_ever(asks: str) -> None:
    driver = Driver()
    idle, other = driver.open("idle"), driver.open("other")
    driver.save(other, "a")
    driver.now_ns = LOST_AFTER_NS + 300  # without any heartbeat so far
    driver.tick()
    if asks == "claim":
        driver.claim(idle, "a", lease_ns=10 * LOST_AFTER_NS)
    else:
        driver.reserve(idle, "b", ttl_ns=10 * LOST_AFTER_NS)
    driver.now_ns += LOST_AFTER_NS - 1
    driver.tick()
    assert idle in driver.state.tables.sessions
    driver.now_ns += 1
    driver.tick()
    assert idle not in driver.state.tables.sessions
    assert other in driver.state.tables.sessions


def test_however_late_a_tick_comes_things_happen_in_the_order_in_which_they_were_due() -> None:
    """The last heartbeat was at 5: the session ends before the wait at 1,200, not after it."""
    driver = Driver()
    alice = driver.open("alice")
    driver.now_ns = 5
    driver.hear(alice)
    driver.reserve(alice, "a b", ttl_ns=10_000)
    driver.lookup("a", wait_ns=900)
    first = driver.last_request
    driver.lookup("b", wait_ns=1_195)
    second = driver.last_request
    driver.now_ns = 5_000
    driver.tick()
    assert isinstance(driver.replies[first].results[0], an.FlightInfo)
    assert driver.replies[second].results == (None,)


def test_at_one_moment_a_wait_sees_what_the_others_left() -> None:
    driver = Driver()
    session = driver.open()
    driver.reserve(session, "a", ttl_ns=50)
    driver.lookup("a", wait_ns=50)
    driver.now_ns = 50
    driver.tick()
    assert driver.replies == {driver.last_request: an.LookupAnswer((None,))}


def test_timers_of_what_ended_do_not_pile_up() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a")
    state = driver.state
    kept = driver.claim(session, "a", lease_ns=900).claim
    for number in range(kept + 1, kept + 2_001):
        state.apply(ev.ClaimAsked(0, session, keys("a"), ClaimMode.RUN, 900, 0, 0))
        state.apply(ev.ReleaseAsked(0, session, (number,), 0))
        assert len(driver.tables.timers) <= 100
    assert state.check() == []
    assert list(driver.tables.claims) == [kept]
    driver.now_ns = 900
    driver.tick()
    assert driver.of_kind(fx.TellClaimLost) == [
        fx.TellClaimLost(session, kept, "its lease ran out")
    ], "dropping the others must not have dropped this one"


def test_a_wait_has_one_deadline_however_often_it_is_woken() -> None:
    driver = Driver()
    session = driver.open()
    driver.reserve(session, "a b", ttl_ns=900)
    driver.claim(session, "a b", ClaimMode.ANY, wait_ns=500)
    driver.cancel(session, 1)
    assert driver.counters.waits == 1
    assert len(driver.tables.timers) == 4, "a session, two reservations, one wait"


# ---- stamps


def test_stamps_are_unique_and_grow_while_the_clock_stands() -> None:
    driver = Driver(stamp_ns=5)
    session = driver.open()
    driver.save(session, "a b c")
    generations = [driver.entry(one).generation for one in "abc"]
    assert generations == [6, 7, 8]
    used = [entry.last_used_ns for entry in driver.tables.entries.values()]
    assert len(set(used)) == 3
    assert min(used) > 8


def test_stamps_are_the_time_whenever_that_is_later() -> None:
    driver = Driver()
    session = driver.open()
    driver.now_ns = 777
    driver.save(session, "a")
    assert driver.entry("a").generation == 777


def test_stamps_grow_when_the_clock_was_set_back_between_two_starts() -> None:
    driver = Driver()
    driver.recover(Tier.DISK, stored("a", used_ns=9_000, generation=4_000))
    session = driver.open()
    driver.save(session, "b")
    assert driver.entry("b").generation > 9_000


def test_the_stamps_of_entries_are_in_their_eviction_order() -> None:
    """Otherwise the order after a restart would differ from the one before."""
    driver = Driver()
    session = driver.open()
    (late,) = driver.granted(session, "a")
    driver.save(session, "b c")
    driver.claim(session, "c b", ClaimMode.ANY)
    driver.seal(late)
    driver.release(session, 1)
    driver.touch("c")
    order = sorted(driver.tables.entries.values(), key=lambda entry: entry.last_used_ns)
    assert names(entry.key for entry in order) == driver.order() == "a b c"


# ---- use counts


def test_use_is_handed_over_once_in_order_of_use() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a b", tier=Tier.SHM)
    driver.save(session, "c", tier=Tier.DISK)
    driver.touch("a c a")
    driver.tick(flush=True)
    shm, disk = driver.of_kind(fx.RecordUsage)
    assert (shm.tier, disk.tier) == (Tier.SHM, Tier.DISK)
    assert [(usage.entry.key, usage.hits) for usage in shm.usages] == [(key("b"), 0), (key("a"), 2)]
    assert [(usage.entry.key, usage.hits) for usage in disk.usages] == [(key("c"), 1)]
    assert shm.usages[1].last_used_ns == driver.entry("a").last_used_ns
    assert driver.tick(flush=True) == []


@pytest.mark.parametrize("ram_use", [False, True])
def test_use_of_ram_is_handed_over_where_it_is_wanted(ram_use: bool) -> None:
    """However long ago it was saved."""
    driver = Driver(ram_use=ram_use)
    session = driver.open()
    driver.save(session, "a b")
    driver.tick(flush=True)
    driver.claim(session, "a")
    driver.touch("b")
    driver.tick(flush=True)
    handed = [u.entry.key for found in driver.of_kind(fx.RecordUsage) for u in found.usages]
    assert names(handed) == ("a b" if ram_use else "")


def test_a_tick_without_flush_hands_nothing_over() -> None:
    driver = Driver()
    driver.save(driver.open(), "a", tier=Tier.SHM)
    assert driver.tick() == []
    assert len(driver.tick(flush=True)) == 1


def test_use_of_what_left_is_not_handed_over() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a b c", tier=Tier.SHM)
    driver.evict(1, Tier.SHM)
    driver.damage("b")
    driver.tick(flush=True)
    (recorded,) = driver.of_kind(fx.RecordUsage)
    assert names(usage.entry.key for usage in recorded.usages) == "a"
