"""Plants each kind of corruption that `check()` knows; it has to find it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server.core import checking
from prefixd.server.core.entries import shard_of
from prefixd.server.core.events import Tick
from prefixd.server.core.sessions import Claim, Stage
from prefixd.server.core.shares import Holder
from prefixd.server.core.tables import Timer
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.order import order_by
from tests.support.state_driver import Driver, key, ledger

Plant = Callable[[Driver], Any]


def everything() -> Driver:
    """Some of everything: claimed and unclaimed entries, saves at every stage, a wait."""
    driver = Driver()
    driver.tables.ledgers[Tier.DISK] = ledger(Tier.DISK, 10, shares={"team": 2})
    driver.open("alice")
    driver.open("bob", "team")
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


def a_share_that_is_booked_wrong(d: Driver) -> None:
    d.tables.ledgers[Tier.DISK].shares.standings[0].fixed_bytes += 1


def claim_without_a_session(d: Driver) -> None:
    d.tables.claims[1].session = 99


def claim_that_its_session_lacks(d: Driver) -> None:
    d.tables.sessions[1].claims.clear()


def claim_that_is_not_there(d: Driver) -> None:
    d.tables.sessions[1].claims[77] = None


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
    del d.tables.sessions[1].tokens[reservation(d, Stage.WRITING).token]


def reservation_that_is_not_there(d: Driver) -> None:
    d.tables.sessions[1].tokens[77] = None


def outlived_its_session(d: Driver) -> None:
    reservation(d, Stage.WRITING).session = 99


def in_flight_by_nobody(d: Driver) -> None:
    d.tables.in_flight[key("z")] = reservation(d, Stage.WRITING)


def batch_miscounted(d: Driver) -> None:
    reservation(d, Stage.WRITING).batch.unsettled.add(77)


def waits_for_what_ended(d: Driver) -> None:
    del d.tables.in_flight[key("r")]


def would_not_be_woken(d: Driver) -> None:
    reservation(d, Stage.RESERVED).waiters.clear()


def would_wake_nobody(d: Driver) -> None:
    reservation(d, Stage.RESERVED).waiters[77] = None


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


def order_holds_a_stranger(d: Driver) -> None:
    gone = d.entry("c")
    ram(d).policy.remove(gone)
    d.tables.entries.pop(key("c"))
    ram(d).policy.unpin(gone)


def order_against_the_stamps(d: Driver) -> None:
    d.save(1, "e")
    d.entry("e").last_used_ns = 1


def wait_that_is_not_there(d: Driver) -> None:
    d.tables.sessions[1].waits[77] = None


def shares_of_waits_miscounted(d: Driver) -> None:
    d.tables.waits.add(Holder())


def waited_keys_miscounted(d: Driver) -> None:
    d.tables.waited_keys += 1


def waited_keys_of_a_session_miscounted(d: Driver) -> None:
    d.tables.sessions[1].waited_keys += 1


def pins_of_a_session_miscounted(d: Driver) -> None:
    d.tables.sessions[1].pinned_bytes[Tier.RAM] -= 1


def reservations_of_a_session_miscounted(d: Driver) -> None:
    d.tables.sessions[1].reserved_bytes[Tier.RAM] += 1


def held_keys_miscounted(d: Driver) -> None:
    d.tables.held.add(Holder())


def sessions_of_a_tenant_miscounted(d: Driver) -> None:
    d.tables.tenants["team"].sessions += 1


def pins_of_a_tenant_miscounted(d: Driver) -> None:
    d.tables.tenants["team"].pinned_bytes[Tier.RAM] = 1


def reservations_of_a_tenant_miscounted(d: Driver) -> None:
    d.tables.tenants["team"].reserved_bytes[Tier.RAM] = 1


def condemned_without_a_claim(d: Driver) -> None:
    d.damage("a")
    (condemned,) = d.tables.condemned.values()
    condemned.pins = 0


def wrong_length(d: Driver) -> None:
    entry = d.entry("c")
    entry.place = (entry.location[0], 1)
    entry.stored_bytes += 1


def shared_room(d: Driver) -> None:
    d.entry("c").location = d.entry("a").location


def room_lost(d: Driver) -> None:
    ram(d).extents.allocate(1)


def room_given_away(d: Driver) -> None:
    ram(d).extents.free(d.entry("c").location)


def extents_inconsistent(d: Driver) -> None:
    ram(d).extents._free_slabs += 1


PLANTS: dict[Plant, str] = {
    a_share_that_is_booked_wrong: "disk: what namespaces take is booked wrong",
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
    one_pin_too_many: "counts 2 pins, 1 claims hold it",
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
    order_lacks_one: "ram: the eviction order lacks 63",
    pinned_one_may_leave: "ram: 61.* may be evicted, it has 1 pins",
    unpinned_one_may_not: "ram: the eviction order lacks 63",
    order_holds_a_stranger: "the eviction order holds 63.*, which is not published",
    order_against_the_stamps: "65.* would be evicted too late for its last use",
    wait_that_is_not_there: "session 1 counts request 77, which does not wait",
    waited_keys_miscounted: "2 keys are said to be waited for, 1 are",
    shares_of_waits_miscounted: "shares of 1 waiting requests and 2 waits",
    waited_keys_of_a_session_miscounted: r"session 1 is charged \d+ waited keys, not its own",
    pins_of_a_session_miscounted: "session 1 is charged 1 pinned bytes, and holds others",
    reservations_of_a_session_miscounted: "session 1 is charged 5 reserved bytes, and holds others",
    held_keys_miscounted: r"\d+ held keys are counted, \d+ are held",
    sessions_of_a_tenant_miscounted: "tenant team has 1 sessions, not 2",
    pins_of_a_tenant_miscounted: "tenant team is charged 1 pinned bytes, and holds others",
    reservations_of_a_tenant_miscounted: "tenant team is charged other reserved bytes",
    condemned_without_a_claim: "entry 61.* is condemned without a claim on it",
    wrong_length: "ram: an entry of 2 bytes lies on 1",
    shared_room: "ram: two entries share the bytes at",
    room_lost: "ram: 3 bytes are called free, 4 are",
    room_given_away: "ram: 5 bytes are called free, 4 are",
    extents_inconsistent: "ram: the extents are inconsistent",
}


#: Checked when a recount begins, and not again.
STAND_STILL = {
    session_for_ever,
    claim_for_ever,
    reservation_for_ever,
    wait_for_ever,
    timers_pile_up,
    claim_on_what_is_gone,
}


def broken_by(plant: Plant) -> list[str]:
    driver = everything()
    plant(driver)
    return driver.state.check()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Plant) -> None:
    problems = broken_by(plant)
    assert any(re.search(PLANTS[plant], problem) for problem in problems), problems


def keyed() -> Driver:
    """With a policy that keeps pinned entries. LRU takes them out, so less can be wrong."""
    driver = Driver()
    ram(driver).policy = order_by(make_policy("fifo", 10))
    driver.open("alice")
    driver.save(1, "a b")
    driver.claim(1, "a")
    driver.reserve(1, "r")
    return driver


def test_an_order_that_keeps_what_is_pinned_has_to_have_it() -> None:
    driver = keyed()
    assert driver.state.check() == []
    for pinned in (driver.entry("a"), reservation(driver, Stage.RESERVED).entry):
        ram(driver).policy.remove(pinned)
        lacks, count = driver.state.check()
        assert re.search("ram: the eviction order lacks", lacks)
        assert re.search("ram: the eviction order holds 2 entries, 3 are published", count)
        ram(driver).policy.enter(pinned)
        assert driver.state.check() == []
    ram(driver).policy.pin(driver.entry("b"))
    (problem,) = driver.state.check()
    assert re.search("ram: 62.* can't be evicted, it has 0 pins", problem)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found_in_steps(plant: Plant) -> None:
    """Damage during a recount is found too, if the recount has not visited it yet."""
    driver = everything()
    with driver.state.recount(items_a_step=1) as recount:
        steps = recount.steps()
        if plant not in STAND_STILL:
            next(steps)
        plant(driver)
        for _ in steps:
            driver.state.apply(Tick(0))
    assert any(re.search(PLANTS[plant], problem) for problem in recount.problems)


def test_a_step_is_as_much_as_it_may_be() -> None:
    """A step counts what a claim or a session holds. The extents of two tiers are a step each."""
    driver = everything()
    for _ in range(4):
        driver.claim(1, "a b c")
    t = driver.tables
    claims, sessions, waits = t.claims.values(), t.sessions.values(), t.waiting.values()
    items = (
        3 * len(t.timers)
        + 2 * sum(len(t.timed[timer]) for timer in Timer)
        + sum(len(claim.entries) for claim in claims)
        + len({entry for claim in claims for entry in claim.entries})
        + len(t.reservations)
        + len(t.in_flight)
        + sum(1 + len(each.claims) + len(each.tokens) + len(each.waits) for each in sessions)
        + sum(len(wait.pending) for wait in waits)
        + len(t.tenants)
        + len(t.entries)
        + len(t.unrecorded)
    )

    def steps(items_a_step: int) -> int:
        with driver.state.recount(items_a_step) as recount:
            return sum(1 for _ in recount.steps())

    assert (steps(items + 1), steps(items)) == (2, 3)
    assert all((steps(each) - 2) * each <= items for each in range(1, items))


def test_what_happens_meanwhile_is_no_problem() -> None:
    driver = everything()
    driver.save(2, "kept")
    earlier = driver.claim(2, "kept").claim
    with driver.state.recount(items_a_step=1) as recount:
        for number, _ in enumerate(recount.steps()):
            # One of two claims ends. The other one still pins the entry.
            later = driver.claim(2, "kept").claim
            driver.release(2, earlier)
            earlier = later
            name = f"n{number}"
            driver.save(2, f"{name} {name}b", tier=Tier.SHM)
            claim = driver.claim(2, name).claim
            driver.damage(name)
            driver.save(2, name, tier=Tier.DISK)
            driver.release(2, claim)
            driver.evict(2, Tier.SHM)
    assert recount.problems == []
    assert driver.tables.recounts == []


def test_what_is_claimed_just_before_it_is_counted_is_counted_once() -> None:
    driver = Driver()
    driver.open()
    names: dict[int, str] = {}
    for name in map(str, count()):
        if (shard := shard_of(key(name))) < 8 and shard not in names:
            names[shard] = name
            driver.save(1, name)
            if len(names) == 8:
                break
    with driver.state.recount(items_a_step=1) as recount:
        for _ in recount.steps():
            # The one that is counted next.
            if recount._shard and (name := names.pop(recount._shard, "")):
                driver.claim(1, name)
    assert names.keys() == {0}
    assert recount.problems == []


def test_problems_are_kept_up_to_a_number_and_all_counted() -> None:
    driver = Driver(max_sessions=3)
    driver.open()
    driver.tables.sessions[1].claims.update(dict.fromkeys(range(5_000)))
    with driver.state.recount() as recount:
        for _ in recount.steps():
            pass
    assert len(recount.problems) == checking.MAX_PROBLEMS
    assert recount.found == 5_000


def test_checking_changes_nothing() -> None:
    driver = everything()
    before = repr(driver.tables)
    driver.state.check()
    assert repr(driver.tables) == before


def sentences() -> list[re.Pattern[str]]:
    """Every problem that `checking` can report, as patterns."""
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
    driver = keyed()
    ram(driver).policy.remove(driver.entry("a"))
    ram(driver).policy.pin(driver.entry("b"))
    said += driver.state.check()
    patterns = sentences()
    assert [one.pattern for one in patterns if not any(map(one.fullmatch, said))] == []
    assert len(patterns) > 25
