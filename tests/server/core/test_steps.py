"""No event takes long: work that may concern many is done in steps, with other events between them.
And a daemon that was late takes nothing from its clients for that."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from prefixd.proto.errors import LimitReached, UnknownSession
from prefixd.proto.vocabulary import ClaimMode, SaveStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core import reservations, transition
from prefixd.server.core.entries import EntryState
from prefixd.tiers import extents
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.ledger import Ledger
from tests.support.state_driver import LOST_AFTER_NS, Driver, key, keys, names

MINUTE_NS = 60_000_000_000


def large(max_steps: int, **config: Any) -> Driver:
    """A state with room for some hundred entries of a byte."""
    driver = Driver(max_steps=max_steps, session_lost_after_ns=10 * MINUTE_NS, **config)
    for ledger in driver.tables.ledgers.values():
        ledger.budget_bytes = ledger.arena_bytes = ledger.limit_bytes = 1_000
        if ledger.extents is not None:
            ledger.extents.grow(1_000)
    return driver


def go_on(driver: Driver) -> list[fx.Effect]:
    """One more step of the backlog."""
    return driver.happens(ev.WorkLeft(driver.now_ns))


def finish(driver: Driver) -> list[fx.Effect]:
    effects = []
    while driver.state.busy:
        effects += go_on(driver)
    return effects


def many(count: int, letter: str = "k") -> str:
    return " ".join(f"{letter}{number}" for number in range(count))


def saved(driver: Driver, session: int, of: str, tier: Tier = Tier.RAM) -> None:
    """Saves item by item, so that no work is left for later."""
    for one in of.split():
        driver.save(session, one, tier=tier)
        finish(driver)


# ---- steps


def test_what_a_claim_held_is_let_go_in_steps() -> None:
    driver = large(10)
    session = driver.open()
    saved(driver, session, many(35))
    claim = driver.claim(session, many(35), ClaimMode.ANY).claim
    ram = driver.tables.ledgers[Tier.RAM]
    assert driver.release(session, claim) == "released"
    pinned = [ram.pinned_entries]
    while driver.state.busy:
        go_on(driver)
        pinned.append(ram.pinned_entries)
    assert pinned == [25, 15, 5, 0]
    assert driver.order().split()[-1] == "k0", "the root is the most recent"


def test_a_session_that_ends_is_gone_at_once_and_what_it_held_soon_after() -> None:
    driver = large(4)
    alice, bob = driver.open("alice"), driver.open("bob")
    saved(driver, alice, many(9))
    for one in many(9).split():
        driver.claim(alice, one)
    driver.reserve(alice, "r")
    finish(driver)
    driver.lose(alice)
    assert isinstance(driver.claim(alice, "k0").error, UnknownSession)
    assert driver.state.busy
    assert driver.claim(bob, "k0").claim, "others are served in between"
    finish(driver)
    assert [claim.session for claim in driver.tables.claims.values()] == [bob]
    assert not driver.tables.ending
    assert not driver.tables.reservations


def test_what_a_session_waits_for_is_given_up_in_steps() -> None:
    """Each of its waits may be for a whole batch of keys."""
    driver = large(16)
    alice, bob = driver.open("alice"), driver.open("bob")
    for one in many(10).split():
        driver.granted(alice, one)
        finish(driver)
    for _ in range(6):
        assert driver.claim(bob, many(10), ClaimMode.ANY, wait_ns=MINUTE_NS) is None
    effects = driver.lose(bob)
    left = [len(driver.tables.waiting)]
    while driver.state.busy:
        effects += go_on(driver)
        left.append(len(driver.tables.waiting))
    assert left[:4] == [4, 2, 0, 0]
    assert sum(isinstance(effect, fx.Reply) for effect in effects) == 6
    assert driver.tables.waited_keys == 0


def test_a_large_save_finds_its_room_in_steps_and_is_answered_once() -> None:
    driver = large(32)
    session = driver.open()
    assert driver.reserve(session, many(10)) is None
    request = driver.last_request
    granted = [len(driver.tables.reservations)]
    while driver.state.busy:
        effects = go_on(driver)
        granted.append(len(driver.tables.reservations))
    assert granted == [3, 6, 9, 10]
    answer = driver.answer_of(request, effects)
    assert [order.key for order in answer.results] == list(keys(many(10)))


def full(driver: Driver, session: int) -> None:
    """100 entries of 10 bytes each, the least recent first."""
    for one in many(100).split():
        driver.save(session, one, payload_bytes=10)
        finish(driver)


def test_a_large_item_evicts_in_steps_and_nobody_takes_its_room_meanwhile() -> None:
    driver = large(32)
    alice, bob = driver.open("alice"), driver.open("bob")
    full(driver, alice)
    assert driver.reserve(alice, "large", payload_bytes=400, begin=True) is None
    first = driver.last_request
    left = [driver.tables.ledgers[Tier.RAM].entries]
    assert driver.reserve(bob, "small", payload_bytes=10) is None
    effects = list(driver.effects)
    while driver.state.busy:
        left.append(driver.tables.ledgers[Tier.RAM].entries)
        effects += go_on(driver)
    assert 100 > left[0] > left[1] > left[2]
    assert max(a - b for a, b in pairwise(left)) <= 12
    replied = [e for e in effects if isinstance(e, fx.Reply)]
    assert [e.request for e in replied] == [first, first + 1]
    assert all(isinstance(e.answer.results[0], an.WriteOrder) for e in replied)
    assert driver.tables.tier_counters[Tier.RAM].evictions == 41, "exactly what both needed"


def test_a_victim_behind_much_that_was_used_is_looked_for_in_steps() -> None:
    driver = large(32)
    ram = driver.tables.ledgers[Tier.RAM] = Ledger(Tier.RAM, 1_000, make_policy("lfu", 1_000))
    session = driver.open()
    full(driver, session)
    for _ in range(2):
        driver.release(session, driver.claim(session, many(100), ClaimMode.ANY).claim)
        finish(driver)
    assert driver.reserve(session, "one", payload_bytes=10) is None
    request = driver.last_request
    assert ram.entries == 100, "twelve calls with eight looks each found none"
    effects = go_on(driver)
    assert isinstance(driver.answer_of(request, effects).results[0], an.WriteOrder)
    assert ram.entries == 99


def test_a_large_item_whose_room_is_claimed_meanwhile_has_none() -> None:
    driver = large(32)
    alice, bob = driver.open("alice"), driver.open("bob")
    full(driver, alice)
    assert driver.reserve(alice, "large", payload_bytes=600, begin=True) is None
    request = driver.last_request
    driver.claim(bob, " ".join(f"k{n}" for n in range(50, 100)), ClaimMode.ANY)
    effects = list(driver.effects)
    assert driver.tables.ledgers[Tier.RAM].pinned_entries == 50
    effects += finish(driver)
    assert driver.answer_of(request, effects).results == (SaveStatus.NO_ROOM,)
    assert driver.tables.sessions[alice].reserving == 0


def test_a_large_item_has_no_room_where_what_is_claimed_lies_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = large(32)
    alice, bob = driver.open("alice"), driver.open("bob")
    full(driver, alice)
    monkeypatch.setattr(extents, "MAX_EXTENTS", 30)
    ram = driver.tables.ledgers[Tier.RAM]
    ram.scattered_bytes = 30
    driver.claim(bob, " ".join(f"k{n}" for n in range(0, 100, 2)), ClaimMode.ANY)
    assert driver.reserve(alice, "large", payload_bytes=400, begin=True) is None
    request = driver.last_request
    answer = driver.answer_of(request, finish(driver))
    assert answer.results == (SaveStatus.NO_ROOM,), "fifty runs of ten bytes"
    assert ram.entries == 50
    assert driver.tables.counters.no_room_refusals == 1
    assert driver.reserve(alice, "smaller", payload_bytes=300, begin=True)
    assert len(driver.tables.in_flight) == 1


def test_a_large_item_that_is_given_up_meanwhile_keeps_nothing() -> None:
    driver = large(32)
    session = driver.open()
    full(driver, session)
    driver.reserve(session, "large", payload_bytes=600, begin=True)
    driver.happens(ev.RequestDropped(driver.last_request, 0))
    finish(driver)
    assert not driver.tables.reservations
    assert driver.tables.sessions[session].reserving == 0


def reserve_with_chains(
    driver: Driver, session: int, saves: int, *, begin: bool = False
) -> list[int]:
    """Tokens of this many saves of one item each, all after the same ten ancestors."""
    tokens = []
    for number in range(saves):
        answer = driver.reserve(session, f"r{number}", after=many(10), begin=begin)
        tokens += [order.token for order in answer.results]
        finish(driver)
    return tokens


@pytest.mark.parametrize("how", ["cancelled", "sealed", "expired", "session"])
def test_the_chains_of_many_saves_are_used_in_steps(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each chain may be as long as a batch."""
    monkeypatch.setattr(transition, "_CHAINED_AT_ONCE", 22)
    driver = large(16)
    session = driver.open()
    saved(driver, session, many(10))
    tokens = reserve_with_chains(driver, session, 20, begin=how == "sealed")
    assert driver.tables.sessions[session].chained_keys == 220
    refreshed: list[int] = []
    real = transition.Transition.refresh_all

    def counted(self: transition.Transition, entries: Iterable[EntryState]) -> None:
        listed = list(entries)
        refreshed.append(len(listed))
        real(self, listed)

    monkeypatch.setattr(transition.Transition, "refresh_all", counted)
    holder = driver.tables.sessions[session]
    if how == "cancelled":
        driver.cancel(session, *tokens)
    elif how == "sealed":
        driver.seal(*tokens)
    elif how == "session":
        driver.lose(session)
    else:
        driver.now_ns += 1_000
        driver.tick()
    # Two chains at once, and then as many keys as there are steps.
    most = [sum(refreshed)]
    while driver.state.busy or holder.chained_keys:
        refreshed.clear()
        driver.tick()
        most.append(sum(refreshed))
    assert max(most) <= 22 + 2 * 16
    assert len(most) > 5
    assert holder.chained_keys == 0
    assert driver.order().split()[-1] == "k0", "the root is the most recent"


def test_the_chains_that_a_session_holds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "MOST_CHAINED_KEYS", 30)
    driver = large(2_000)
    session = driver.open()
    tokens = reserve_with_chains(driver, session, 3)
    refused = driver.reserve(session, "more", after=many(10))
    assert isinstance(refused.error, LimitReached)
    assert "chains of 33 keys" in str(refused.error)
    driver.cancel(session, tokens[0])
    reserve_with_chains(driver, session, 1)


def test_a_save_that_is_given_up_meanwhile_keeps_nothing() -> None:
    driver = large(32)
    session = driver.open()
    driver.reserve(session, many(10))
    driver.happens(ev.RequestDropped(driver.last_request, 0))
    finish(driver)
    assert not driver.tables.reservations
    assert driver.tables.sessions[session].reserving == 0


def test_a_save_whose_session_ends_meanwhile_is_refused() -> None:
    driver = large(32)
    session = driver.open()
    driver.reserve(session, many(10))
    request = driver.last_request
    driver.happens(ev.SessionLost(session, "it broke", 0))
    effects = [*driver.effects, *finish(driver)]
    assert isinstance(driver.answer_of(request, effects).error, UnknownSession)
    assert not driver.tables.reservations


def test_what_is_being_reserved_counts_against_the_limit() -> None:
    driver = large(32, max_reservations_per_session=12)
    session = driver.open()
    driver.reserve(session, many(10))
    assert "holds 10 reservations" in str(driver.reserve(session, many(3, "x")).error)


def test_waiters_are_told_in_steps_and_asked_once() -> None:
    """8 requests wait for the same 100 blocks. Each is answered when all of them are there."""
    driver = large(64)
    alice, bob = driver.open("alice"), driver.open("bob")
    tokens = []
    for one in many(100).split():
        tokens += driver.granted(alice, one)
        finish(driver)
    for _ in range(8):
        assert driver.claim(bob, many(100), wait_ns=MINUTE_NS) is None
    waits = range(driver.last_request - 7, driver.last_request + 1)
    assert driver.tables.waited_keys == 800
    answered: list[fx.Effect] = []
    for token in tokens[:-1]:
        answered += driver.seal(token)
        answered += finish(driver)
    assert not any(isinstance(effect, fx.Reply) for effect in answered)
    effects = driver.seal(tokens[-1])
    told = [sum(isinstance(effect, fx.Reply) for effect in effects)]
    while driver.state.busy:
        effects = go_on(driver)
        told.append(sum(isinstance(effect, fx.Reply) for effect in effects))
    assert sum(told) == 8
    assert max(told) == 1, "an answer of 100 keys is all that an event gives here"
    assert driver.counters.claims == 8
    assert driver.counters.claimed_entries == 800
    assert driver.tables.waited_keys == 0
    assert len(waits) == driver.counters.waits


def test_a_run_that_waits_is_answered_when_nothing_can_change_it() -> None:
    driver = large(4096)
    alice, bob = driver.open("alice"), driver.open("bob")
    first, second, third = driver.granted(alice, "a b c")
    assert driver.lookup("a b c", stop=True, wait_ns=50) is None
    request = driver.last_request
    driver.seal(third)
    driver.stop(second)
    assert driver.replies == {}, "a may still come"
    driver.seal(first)
    found = driver.replies[request].results
    assert [isinstance(one, type(driver.entry("a"))) for one in found] == [True, False]
    del bob


def test_a_question_that_is_given_up_while_others_are_told_is_not_answered() -> None:
    driver = large(12)
    session = driver.open()
    (token,) = driver.granted(session, "a")
    for _ in range(20):
        driver.lookup("a", wait_ns=50)
    requests = range(driver.last_request - 19, driver.last_request + 1)
    told = [*driver.seal(token), *driver.happens(ev.RequestDropped(requests[-1], 0))]
    assert driver.state.busy
    told += finish(driver)
    assert [effect.request for effect in told if isinstance(effect, fx.Reply)] == [*requests[:-1]]


def test_only_so_much_is_waited_for() -> None:
    driver = large(4096, max_waited_keys=10, max_waited_keys_per_session=4)
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.reserve(alice, many(4))
    assert driver.claim(bob, many(4), wait_ns=50) is None
    assert driver.claim(bob, "k0", wait_ns=50).claim == 0, "its share is used up"
    assert driver.lookup(many(4), wait_ns=50) is None
    assert driver.lookup("k0", wait_ns=50) is not None, "so is that of look-ups"
    assert driver.claim(alice, many(3), wait_ns=50).claim == 0, "and what there is in all"
    assert driver.claim(alice, many(2), wait_ns=50) is None
    assert driver.tables.waited_keys == 10


def test_many_deadlines_are_met_in_steps() -> None:
    driver = large(5)
    session = driver.open()
    for one in many(12).split():
        driver.reserve(session, one, ttl_ns=50)
        finish(driver)
    driver.now_ns = 50
    ticks = 0
    while (due_ns := driver.state.next_deadline_ns()) is not None and due_ns <= driver.now_ns:
        driver.tick()
        ticks += 1
    assert ticks == 3
    assert not driver.tables.reservations


def test_use_is_handed_over_in_steps() -> None:
    driver = large(4)
    saved(driver, driver.open(), many(10), tier=Tier.SHM)
    driver.tick(flush=True)
    finish(driver)
    driver.touch(many(10))
    effects = driver.tick(flush=True)
    driver.happens(ev.KeysTouched(keys("k9"), 0))
    effects += driver.effects + finish(driver)
    recorded = [effect.usages for effect in effects if isinstance(effect, fx.RecordUsage)]
    assert [len(usages) for usages in recorded] == [4, 4, 1]
    assert names(usage.entry.key for usages in recorded for usage in usages) == many(9)
    driver.tick(flush=True)
    (last,) = driver.of_kind(fx.RecordUsage)
    assert names(usage.entry.key for usage in last.usages) == "k9", "it was used again meanwhile"


def test_timers_are_sifted_in_steps_and_none_is_late_for_it() -> None:
    driver = large(7)
    session = driver.open()
    saved(driver, session, "a")
    kept = driver.claim(session, "a", lease_ns=900).claim
    for number in range(kept + 1, kept + 301):
        driver.state.apply(ev.ClaimAsked(0, session, keys("a"), ClaimMode.RUN, 900, 0, 0))
        driver.state.apply(ev.ReleaseAsked(0, session, (number,), 0))
        assert len(driver.tables.timers) + len(driver.tables.old_timers) <= 200
    assert driver.state.next_deadline_ns() == 900
    driver.now_ns = 900
    while (due_ns := driver.state.next_deadline_ns()) is not None and due_ns <= driver.now_ns:
        driver.tick()
    assert driver.counters.claims_lost == 1


def test_the_next_deadline_is_the_first_of_all_while_timers_are_sifted() -> None:
    driver = large(7)
    session = driver.open()
    saved(driver, session, "a")
    last = driver.claim(session, "a", lease_ns=890).claim
    while not driver.tables.old_timers:
        last += 1
        driver.state.apply(ev.ClaimAsked(0, session, keys("a"), ClaimMode.RUN, 900, 0, 0))
        driver.state.apply(ev.ReleaseAsked(0, session, (last,), 0))
    driver.state.apply(ev.ClaimAsked(0, session, keys("a"), ClaimMode.RUN, 500, 0, 0))
    assert driver.tables.old_timers
    assert driver.state.next_deadline_ns() == 100, "that of the save of a, which nobody needs"
    driver.state.apply(ev.ClaimAsked(0, session, keys("a"), ClaimMode.RUN, 5, 0, 0))
    assert driver.tables.old_timers
    assert driver.state.next_deadline_ns() == 5


# ---- a late daemon


def test_a_daemon_that_was_late_loses_nothing() -> None:
    """The heartbeats arrived, but the loop did not read them: it stood still for longer than any
    deadline."""
    driver = Driver()
    session = driver.open()
    driver.save(session, "a")
    claim = driver.claim(session, "a", lease_ns=300).claim
    (order,) = driver.reserve(session, "b", ttl_ns=200).results
    driver.lookup("b", wait_ns=100)
    waiting = driver.last_request
    driver.now_ns = 50
    late_ns = 100 * LOST_AFTER_NS
    driver.now_ns += late_ns
    driver.happens(ev.Tick(driver.now_ns, late_ns=late_ns))
    assert driver.effects == []
    assert driver.state.next_deadline_ns() == driver.now_ns + 50
    driver.hear(session)
    driver.now_ns += 50
    driver.tick()
    assert list(driver.replies) == [waiting], "a wait is no shorter either"
    driver.now_ns += 100
    driver.tick()
    assert order.token not in driver.tables.sessions[session].tokens
    assert driver.release(session, claim) == "released"
    driver.reserve(session, "c", ttl_ns=10 * LOST_AFTER_NS)
    driver.now_ns += LOST_AFTER_NS
    driver.tick()
    assert session not in driver.tables.sessions, "its own silence counts as before"


@pytest.mark.parametrize("unwritten_ns", [40, 400])
def test_a_reservation_without_a_byte_does_not_stand_for_long(unwritten_ns: int) -> None:
    driver = Driver(unwritten_ttl_ns=unwritten_ns)
    session = driver.open()
    stands_ns = min(unwritten_ns, 200)
    answer = driver.reserve(session, "a", ttl_ns=200)
    assert isinstance(answer, an.ReserveAnswer)
    assert answer.ttl_ns == stands_ns
    (began,) = driver.reserve(session, "b", ttl_ns=200).results
    driver.begin(session, began.token)
    driver.now_ns = stands_ns
    driver.tick()
    assert key("a") not in driver.tables.in_flight
    assert (key("b") in driver.tables.in_flight) == (stands_ns < 200), "bytes are on their way"
    driver.now_ns = 200
    driver.tick()
    assert key("b") not in driver.tables.in_flight


def test_a_session_reserves_no_more_than_its_share() -> None:
    driver = Driver(max_reserved_share=0.5)
    alice, bob = driver.open("alice"), driver.open("bob")
    assert len(driver.granted(alice, "a b", payload_bytes=2)) == 2
    assert driver.reserve(alice, "c", payload_bytes=2).results == (SaveStatus.NO_ROOM,)
    assert driver.reserve(alice, "c", payload_bytes=11).results == (SaveStatus.TOO_LARGE,)
    assert driver.counters.quota_refusals == 1
    (token,) = driver.granted(bob, "c", payload_bytes=2)
    driver.cancel(bob, token)
    driver.stop(token)
    (order,) = driver.reserve(bob, "d", payload_bytes=6, begin=True).results
    assert order.entry.payload_bytes == 6, "alone it may be larger"


@pytest.mark.parametrize("ttl_ns", [1, 3_600_000_000_000])
def test_a_reservation_of_a_whole_tier_evicts_nothing(ttl_ns: int) -> None:
    """A client that sends no byte can evict no more than its share of a tier."""
    driver = Driver(max_reserved_share=0.5)
    alice, mallory = driver.open("alice"), driver.open("mallory")
    saved(driver, alice, many(10))
    for asked_bytes in (10, 6):
        asked = driver.reserve(mallory, "all", payload_bytes=asked_bytes, ttl_ns=ttl_ns)
        assert asked.results == (SaveStatus.TOO_LARGE,)
    assert len(driver.tables.entries) == 10
    assert driver.reserve(mallory, "half", payload_bytes=5, ttl_ns=ttl_ns).results[0].token
    assert driver.reserve(mallory, "more", ttl_ns=ttl_ns).results == (SaveStatus.NO_ROOM,)
    assert len(driver.tables.entries) == 5


def test_shares_are_of_the_tier_as_large_as_it_is() -> None:
    """The device has room for a tenth of the configured budget."""
    driver = large(100, max_reserved_share=0.5, max_pinned_share=0.5)
    for ledger in driver.tables.ledgers.values():
        ledger.budget_bytes = ledger.arena_bytes = 10_000
    alice, bob = driver.open("alice"), driver.open("bob")
    tokens = driver.granted(alice, "a b", payload_bytes=250)
    assert driver.reserve(alice, "c").results == (SaveStatus.NO_ROOM,)
    asked = driver.reserve(bob, "c", payload_bytes=501)
    assert asked.results == (SaveStatus.NO_ROOM,), "there may be more room later"
    driver.save(bob, "d", payload_bytes=300)
    driver.save(bob, "e", payload_bytes=200)
    assert driver.claim(bob, "d e", ClaimMode.ANY).claim
    driver.seal(*tokens)
    driver.save(alice, "f")
    assert isinstance(driver.claim(bob, "f").error, LimitReached)
