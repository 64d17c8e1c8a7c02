"""The moves that several helpers of the state share, by themselves."""

from __future__ import annotations

import pytest

from prefixd.proto.errors import UnknownSession
from prefixd.proto.vocabulary import Tier
from prefixd.server import effects as fx
from prefixd.server.events import LookupAsked
from prefixd.server.turn import Refusal, Turn

from .state_driver import Driver, key, keys


@pytest.fixture
def driver() -> Driver:
    """Session 1 has saved a and b; c and d are reserved."""
    driver = Driver()
    driver.open()
    driver.save(1, "a b")
    driver.reserve(1, "c d")
    return driver


def lookup(driver: Driver, until_ns: int) -> LookupAsked:
    return LookupAsked(driver.request(), keys("c d"), False, until_ns, 0)


def test_a_session_that_is_not_there_refuses_the_question(driver: Driver) -> None:
    turn = Turn(driver.tables, 0)
    assert turn.session(1).owner == "alice"
    with pytest.raises(Refusal, match="session 2 ended or never was") as refusal:
        turn.session(2)
    assert isinstance(refusal.value.error, UnknownSession)


def test_a_wait_is_registered_with_all_that_it_waits_for(driver: Driver) -> None:
    turn, question = Turn(driver.tables, 10), lookup(driver, until_ns=11)
    assert turn.park(question, keys("c d"))
    saves = [driver.tables.in_flight[key(name)] for name in "cd"]
    assert [save.waiters for save in saves] == [{question.request}, {question.request}]
    turn.wake(saves[0])
    assert turn.woken == [question.request]
    waiting = turn.unpark(question.request)
    assert waiting is not None
    assert waiting.question is question
    assert [save.waiters for save in saves] == [set(), set()]
    assert turn.unpark(question.request) is None


def test_nobody_waits_longer_than_they_said(driver: Driver) -> None:
    question = lookup(driver, until_ns=10)
    assert not Turn(driver.tables, 10).park(question, keys("c"))
    assert not driver.tables.waiting


def test_a_use_counts_and_a_refresh_does_not(driver: Driver) -> None:
    turn = Turn(driver.tables, 10)
    entry = driver.entry("b")
    turn.refresh(entry)
    assert (entry.hits, driver.order()) == (0, "a b")
    refreshed_ns = entry.last_used_ns
    turn.use(driver.entry("a"))
    turn.use(entry)
    assert (entry.hits, driver.order()) == (1, "a b")
    assert entry.last_used_ns > refreshed_ns


@pytest.mark.parametrize("tier", list(Tier))
def test_use_is_remembered_where_an_entry_outlives_the_daemon(driver: Driver, tier: Tier) -> None:
    driver.save(1, "e f g", tier=tier)
    driver.tick(flush=True)
    turn = Turn(driver.tables, 10)
    for name in "feg":
        turn.use(driver.entry(name))
    turn.refresh(driver.entry("f"))
    unrecorded = () if tier is Tier.RAM else keys("e g f")
    assert tuple(driver.tables.unrecorded) == unrecorded


def test_the_ledger_hears_of_the_first_pin_and_the_last(driver: Driver) -> None:
    turn, ram = Turn(driver.tables, 10), driver.tables.ledgers[Tier.RAM]
    entry = driver.entry("a")
    for pins in (1, 2):
        turn.pin([entry])
        assert (entry.pins, ram.pinned_entries) == (pins, 1)
    turn.unpin([entry])
    assert (entry.pins, ram.pinned_entries, driver.order()) == (1, 1, "b")
    turn.unpin([entry])
    assert (entry.pins, ram.pinned_entries, driver.order()) == (0, 0, "b a")


def test_an_eviction_is_told_to_readers_before_the_store(driver: Driver) -> None:
    turn = Turn(driver.tables, 10)
    victim, entry = driver.tables.ledgers[Tier.RAM].next_victim(), driver.entry("b")
    assert turn.evict(victim) is entry
    assert not entry.published
    assert turn.effects == [fx.IndexDelete(key("b")), fx.Erase(Tier.RAM, keys("b"))]
    assert driver.state.check() == []
