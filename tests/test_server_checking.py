"""Every kind of corruption that `check()` knows is planted once, and found."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server import checking
from prefixd.server.tables import Claim, Stage, Timer
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.order import order_by

from .state_driver import Driver, key

Plant = Callable[[Driver], Any]


def everything() -> Driver:
    """Of everything something: claimed and unclaimed entries, saves at every stage, a wait."""
    driver = Driver()
    driver.open("alice")
    driver.open("bob")
    driver.save(1, "a b c")
    driver.save(1, "d", tier=Tier.DISK)
    driver.claim(1, "a b")
    driver.reserve(1, "r")
    driver.granted(1, "w")
    (lost,) = driver.granted(1, "l")
    driver.cancel(1, lost)
    (committing,) = driver.granted(1, "x", tier=Tier.DISK)
    driver.seal(committing)
    driver.lookup("r", wait_ns=50)
    driver.touch("c")
    assert driver.state.check() == []
    return driver


def reservation(driver: Driver, stage: Stage) -> Any:
    return next(r for r in driver.tables.reservations.values() if r.stage is stage)


def ram(driver: Driver) -> Any:
    return driver.tables.ledgers[Tier.RAM]


# ---- how to break it


def listed_under_another_key(d: Driver) -> None:
    d.tables.entries[key("z")] = d.tables.entries[key("c")]


def dropped_and_still_found(d: Driver) -> None:
    d.entry("c").published = False


def published_and_in_flight(d: Driver) -> None:
    d.tables.in_flight[key("c")] = reservation(d, Stage.RESERVED)


def stamp_of_the_future(d: Driver) -> None:
    d.entry("c").last_used_ns = d.tables.stamp_ns + 1


def generation_twice(d: Driver) -> None:
    d.entry("c").generation = d.entry("a").generation


def use_of_what_is_gone(d: Driver) -> None:
    d.tables.unrecorded[key("z")] = d.entry("c")


def claim_without_a_session(d: Driver) -> None:
    d.tables.claims[1].session = 99


def claim_that_its_session_lacks(d: Driver) -> None:
    d.tables.sessions[1].claims.clear()


def claim_that_is_not_there(d: Driver) -> None:
    d.tables.sessions[1].claims.add(77)


def claim_on_nothing(d: Driver) -> None:
    d.tables.claims[1].entries = ()


def one_pin_too_many(d: Driver) -> None:
    d.entry("a").pins += 1


def claim_on_what_is_gone(d: Driver) -> None:
    gone = d.entry("c")
    d.evict(9, Tier.RAM)
    d.tables.claims[9] = Claim(9, 1, (gone,), 0, 10)


def ended_and_still_listed(d: Driver) -> None:
    reservation(d, Stage.WRITING).stage = Stage.GONE


def lost_and_still_in_flight(d: Driver) -> None:
    lost = reservation(d, Stage.DOOMED)
    d.tables.in_flight[lost.key] = lost


def alive_and_not_in_flight(d: Driver) -> None:
    del d.tables.in_flight[key("w")]


def reservation_that_its_session_lacks(d: Driver) -> None:
    d.tables.sessions[1].tokens.discard(reservation(d, Stage.WRITING).token)


def reservation_that_is_not_there(d: Driver) -> None:
    d.tables.sessions[1].tokens.add(77)


def outlived_its_session(d: Driver) -> None:
    reservation(d, Stage.WRITING).session = 99


def in_flight_by_nobody(d: Driver) -> None:
    d.tables.in_flight[key("z")] = reservation(d, Stage.WRITING)


def batch_miscounted(d: Driver) -> None:
    reservation(d, Stage.WRITING).batch.unsettled += 1


def waits_for_what_ended(d: Driver) -> None:
    del d.tables.in_flight[key("r")]


def would_not_be_woken(d: Driver) -> None:
    reservation(d, Stage.RESERVED).waiters.clear()


def would_wake_nobody(d: Driver) -> None:
    reservation(d, Stage.RESERVED).waiters.add(77)


def session_for_ever(d: Driver) -> None:
    _disarm(d, Timer.SESSION)


def claim_for_ever(d: Driver) -> None:
    _disarm(d, Timer.CLAIM)


def reservation_for_ever(d: Driver) -> None:
    _disarm(d, Timer.RESERVATION)


def wait_for_ever(d: Driver) -> None:
    _disarm(d, Timer.WAITING)


def _disarm(d: Driver, kind: Timer) -> None:
    d.tables.timers[:] = [timer for timer in d.tables.timers if timer[1] is not kind]


def timers_pile_up(d: Driver) -> None:
    d.tables.timers.extend([(5, Timer.CLAIM, 77)] * 500)


def bytes_miscounted(d: Driver) -> None:
    ram(d).published_bytes += 1


def entries_miscounted(d: Driver) -> None:
    ram(d).entries -= 1


def pins_miscounted(d: Driver) -> None:
    ram(d).pinned_bytes -= 1


def pinned_entries_miscounted(d: Driver) -> None:
    ram(d).pinned_entries += 1


def reserved_miscounted(d: Driver) -> None:
    ram(d).reserved_bytes = 0


def reservations_miscounted(d: Driver) -> None:
    ram(d).reservations += 1


def payload_miscounted(d: Driver) -> None:
    d.tables.tier_counters[Tier.RAM].payload_bytes += 1


def above_the_limit(d: Driver) -> None:
    ram(d).limit_bytes = 2


def limit_above_the_budget(d: Driver) -> None:
    ram(d).budget_bytes = 9


def too_many_entries(d: Driver) -> None:
    ram(d).max_entries = 2


def order_lacks_one(d: Driver) -> None:
    ram(d).policy.remove(d.entry("c"))


def pinned_one_may_leave(d: Driver) -> None:
    ram(d).policy.unpin(d.entry("a"))


def unpinned_one_may_not(d: Driver) -> None:
    ram(d).policy.pin(d.entry("c"))


def wrong_length(d: Driver) -> None:
    d.entry("c").stored_bytes += 1


def shared_room(d: Driver) -> None:
    d.entry("c").location = d.entry("a").location


def room_lost(d: Driver) -> None:
    ram(d).extents.allocate(1)


def room_given_away(d: Driver) -> None:
    ram(d).extents.free(d.entry("c").location)


def extents_inconsistent(d: Driver) -> None:
    ram(d).extents._free_slabs += 1


PLANTS: dict[Plant, str] = {
    listed_under_another_key: r"entry 63\w+ is listed under 7a",
    dropped_and_still_found: "can be found though it was dropped",
    published_and_in_flight: "is published and in flight at once",
    stamp_of_the_future: "has a stamp of the future",
    generation_twice: r"generation \d+ was given out 2 times",
    use_of_what_is_gone: "unrecorded use of 7a",
    claim_without_a_session: "claim 1 belongs to session 99, which ended",
    claim_that_its_session_lacks: "session 1 does not know its claim 1",
    claim_that_is_not_there: "session 1 holds claim 77, which does not exist",
    claim_on_nothing: "claim 1 holds nothing",
    one_pin_too_many: "counts 2 pins that its claims do not",
    claim_on_what_is_gone: "1 claimed entries are not published",
    ended_and_still_listed: r"reservation \d+ ended and is still listed",
    lost_and_still_in_flight: "is doomed, in flight: True",
    alive_and_not_in_flight: "is writing, in flight: False",
    reservation_that_its_session_lacks: "session 1 does not know its reservation",
    reservation_that_is_not_there: "session 1 holds reservation 77, which does not exist",
    outlived_its_session: r"reservation \d+ outlived session 99",
    in_flight_by_nobody: "7a.* is in flight without a reservation",
    batch_miscounted: "miscounts its open saves",
    waits_for_what_ended: r"request \d+ waits for a save that ended",
    would_not_be_woken: r"reservation \d+ would not wake request \d+",
    would_wake_nobody: r"reservation \d+ would wake request 77, which is gone",
    session_for_ever: "session 1 would never run out",
    claim_for_ever: "claim 1 would never run out",
    reservation_for_ever: r"reservation \d+ would never run out",
    wait_for_ever: r"waiting \d+ would never run out",
    timers_pile_up: r"\d+ timers are kept",
    bytes_miscounted: "ram: published_bytes is booked as 4 and counts 3",
    entries_miscounted: "ram: entries is booked as 2 and counts 3",
    pins_miscounted: "ram: pinned_bytes is booked as 1 and counts 2",
    pinned_entries_miscounted: "ram: pinned_entries is booked as 3 and counts 2",
    reserved_miscounted: "ram: reserved_bytes is booked as 0 and counts 3",
    reservations_miscounted: "ram: reservations is booked as 4 and counts 3",
    payload_miscounted: "ram: 4 payload bytes are shown and 3 are there",
    above_the_limit: "ram: 6 bytes used of 2",
    limit_above_the_budget: "ram: 6 bytes used of 10, the budget is 9",
    too_many_entries: "ram: more than 2 entries",
    order_lacks_one: "ram: the eviction order does not hold just what is published or in flight",
    pinned_one_may_leave: "ram: the victims are not exactly the unpinned entries",
    unpinned_one_may_not: "ram: the victims are not exactly the unpinned entries",
    wrong_length: "ram: an entry of 2 bytes lies on 1",
    shared_room: "ram: two entries share the bytes at",
    room_lost: "ram: 3 bytes are called free, 4 are",
    room_given_away: "ram: 5 bytes are called free, 4 are",
    extents_inconsistent: "ram: the extents are inconsistent",
}


def broken_by(plant: Plant) -> list[str]:
    driver = everything()
    plant(driver)
    return driver.state.check()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Plant) -> None:
    problems = broken_by(plant)
    assert any(re.search(PLANTS[plant], problem) for problem in problems), problems


def test_an_order_that_keeps_what_is_pinned_has_to_have_it() -> None:
    """LRU takes it out, so that nothing can be wrong with it."""
    driver = Driver()
    ram(driver).policy = order_by(make_policy("fifo", 10))
    driver.open("alice")
    driver.save(1, "a b")
    driver.claim(1, "a")
    driver.reserve(1, "r")
    assert driver.state.check() == []
    for pinned in (driver.entry("a"), reservation(driver, Stage.RESERVED).entry):
        ram(driver).policy.remove(pinned)
        (problem,) = driver.state.check()
        assert re.search(PLANTS[order_lacks_one], problem)
        ram(driver).policy.enter(pinned)
        assert driver.state.check() == []


def test_checking_changes_nothing() -> None:
    driver = everything()
    before = repr(driver.tables)
    driver.state.check()
    assert repr(driver.tables) == before


def sentences() -> list[re.Pattern[str]]:
    """All that `checking` can say, as patterns."""
    found: list[re.Pattern[str]] = []
    for node in ast.walk(ast.parse(inspect.getsource(checking))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                re.escape(part.value) if isinstance(part, ast.Constant) else ".+"
                for part in node.values
            )
            if " " in text:
                found.append(re.compile(text))
    return found


def test_every_sentence_of_the_check_has_a_plant() -> None:
    said = [problem for plant in PLANTS for problem in broken_by(plant)]
    patterns = sentences()
    assert [one.pattern for one in patterns if not any(map(one.fullmatch, said))] == []
    assert len(patterns) > 25
