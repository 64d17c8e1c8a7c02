"""A tier that gets another size: exactly as many victims leave as are too many."""

from __future__ import annotations

import random
from typing import Any

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.errors import LimitReached
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import events as ev
from prefixd.server.core.journal import EvictionCause
from prefixd.tiers import extents
from prefixd.tiers.eviction import POLICIES, make_policy
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger
from tests.support.state_driver import Driver, key, names


def resize(driver: Driver, budget_bytes: int, max_entries: int = 1_000) -> Any:
    asked = ev.ResizeAsked(
        driver.request(), Tier.RAM, budget_bytes, budget_bytes, max_entries, driver.now_ns
    )
    return driver.ask(asked)


def restore_all(driver: Driver, budget_bytes: int) -> None:
    ledger = driver.tables.ledgers[Tier.RAM]
    while ledger.limit_bytes < budget_bytes:
        location = ledger.next_restored(budget_bytes - ledger.limit_bytes)
        driver.happens(ev.SlabsRestored(Tier.RAM, location, driver.now_ns))


def test_a_smaller_tier_loses_its_next_victims_and_no_more() -> None:
    driver = Driver()
    alice = driver.open()
    for name in "abcdefgh":
        driver.save(alice, name)
    assert resize(driver, 9) == an.ResizeAnswer(0, 0, (1, 1), done=True)
    answer = resize(driver, 5)
    assert (answer.entries, answer.freed_bytes, answer.done) == (3, 3, True)
    assert driver.order() == "d e f g h"
    ledger = driver.tables.ledgers[Tier.RAM]
    assert (ledger.budget_bytes, ledger.limit_bytes, ledger.retired_bytes) == (5, 5, 5)
    assert driver.tables.eviction_ages[Tier.RAM, EvictionCause.RESIZE].counts[0] == 3
    driver.save(alice, "i")
    assert driver.order() == "e f g h i"


def test_it_goes_in_steps_and_is_full_at_each() -> None:
    driver = Driver()
    alice = driver.open()
    for name in "abcdefghij":
        driver.save(alice, name)
    ledger = driver.tables.ledgers[Tier.RAM]
    for left in (8, 6):
        answer = resize(driver, 5, max_entries=2)
        assert not answer.done
        assert (ledger.budget_bytes, ledger.limit_bytes, ledger.free_bytes) == (10, left, 0)
    assert resize(driver, 5, max_entries=2).done
    assert driver.order() == "f g h i j"


def test_what_is_pinned_is_in_the_way_and_nothing_changes() -> None:
    driver = Driver()
    alice = driver.open()
    for name in "abcdefgh":
        driver.save(alice, name)
    claim = driver.claim(alice, "a b c")
    refused = resize(driver, 2)
    assert isinstance(refused.error, LimitReached)
    assert "claims pin 3 bytes" in str(refused.error)
    assert driver.order() == "d e f g h"
    ledger = driver.tables.ledgers[Tier.RAM]
    assert (ledger.budget_bytes, ledger.limit_bytes) == (10, 10)
    assert resize(driver, 3).done
    assert driver.order() == ""
    assert driver.release(alice, claim.claim) == "released"
    assert driver.order() == "c b a"


def test_saves_under_way_are_waited_for() -> None:
    driver = Driver()
    alice = driver.open()
    token, other = driver.granted(alice, "a b", payload_bytes=4)
    assert not resize(driver, 5).done
    assert resize(driver, 5) == an.ResizeAnswer(0, 0, (), done=False)
    driver.seal(token)
    driver.stop(other)
    answer = resize(driver, 5)
    assert (answer.entries, answer.done) == (0, True)


def test_a_larger_tier_has_the_budget_at_once_and_the_room_as_it_comes() -> None:
    driver = Driver()
    alice = driver.open()
    for name in "abcdef":
        driver.save(alice, name)
    assert resize(driver, 4).done
    assert resize(driver, 8) == an.ResizeAnswer(0, 0, (), done=True)
    ledger = driver.tables.ledgers[Tier.RAM]
    assert (ledger.budget_bytes, ledger.limit_bytes) == (8, 4)
    restore_all(driver, 8)
    for name in "ghij":
        driver.save(alice, name)
    assert driver.order() == "c d e f g h i j"
    assert ledger.next_restored(0) == ()
    assert resize(driver, 10).done
    driver.happens(ev.ArenaGrown(Tier.RAM, 12, driver.now_ns))
    restore_all(driver, 10)
    assert (ledger.limit_bytes, ledger.retired_bytes) == (10, 2), "it came too late"


def test_slabs_in_many_pieces_are_retired_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    alice = driver.open()
    for name in "abcdefghij":
        driver.save(alice, name)
    monkeypatch.setattr(extents, "MAX_EXTENTS", 2)
    for name in "acegi":
        generation = driver.entry(name).generation
        driver.happens(ev.EntryDamaged(key(name), generation, "gone", driver.now_ns))
    answers = [resize(driver, 4) for _ in range(2)]
    assert [(a.entries, len(a.retired) // 2, a.done) for a in answers] == [
        (1, 2, False), (0, 2, True),
    ]  # fmt: skip
    assert driver.order() == "d f h j"


def test_victims_behind_what_was_used_are_looked_for_in_steps() -> None:
    driver = Driver()
    ledger = driver.tables.ledgers[Tier.RAM] = Ledger(
        Tier.RAM, 40, make_policy("lfu", 40), extents=ExtentAllocator(40, 1)
    )
    alice = driver.open()
    for number in range(40):
        driver.save(alice, f"n{number}")
    for _ in range(2):
        for number in range(40):
            driver.release(alice, driver.claim(alice, f"n{number}").claim)
    assert driver.evict(1, max_entries=2) == an.EvictAnswer(0, 0, more=True)
    answers = [resize(driver, 38, max_entries=2) for _ in range(3)]
    assert [(a.entries, a.done, a.more) for a in answers] == [
        (0, False, True), (1, False, True), (1, True, False),
    ]  # fmt: skip
    assert ledger.entries == 38


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_order_of_any_policy_says_who_leaves(policy: str) -> None:
    """Random resizes, with other events in between. The foretold victims leave, and no others."""
    chance = random.Random(policy)
    driver = Driver()
    driver.tables.ledgers[Tier.RAM] = Ledger(
        Tier.RAM, 40, make_policy(policy, 40), extents=ExtentAllocator(40, 1)
    )
    ledger = driver.tables.ledgers[Tier.RAM]
    alice = driver.open()
    claims: list[int] = []
    for number in range(400):
        match chance.randrange(5):
            case 0 | 1:
                size = chance.choice([1, 2, 5])
                if size <= ledger.free_bytes + ledger.unpinned_bytes:
                    driver.save(alice, f"n{number}", payload_bytes=size)
            case 2 if ledger.entries:
                some = chance.choice(names(driver.tables.entries).split())
                claims.append(driver.claim(alice, some).claim)
            case 3 if claims:
                driver.release(alice, claims.pop(chance.randrange(len(claims))))
            case 4:
                target = chance.randrange(6, 41)
                if ledger.pinned_bytes > target:
                    assert isinstance(resize(driver, target), an.Refused)
                    continue
                ledger.policy.resize(target if target < ledger.limit_bytes else ledger.budget_bytes)
                foretold = list(ledger.victims())
                ledger.policy.resize(ledger.budget_bytes)
                before = dict(driver.tables.entries)
                excess = max(0, ledger.limit_bytes - target - ledger.free_bytes)
                assert resize(driver, target).done
                gone = set(before) - set(driver.tables.entries)
                assert gone == set(foretold[: len(gone)])
                freed = [before[key].stored_bytes for key in foretold[: len(gone)]]
                assert sum(freed) >= excess
                assert not freed or sum(freed[:-1]) < excess, "none too many"
                restore_all(driver, target)
                assert ledger.limit_bytes == ledger.budget_bytes == target


def test_a_tier_is_not_made_smaller_than_its_shares() -> None:
    driver = Driver(shares={"team-a": 4, "team-b": 2})
    alice = driver.open()
    ledger = driver.tables.ledgers[Tier.RAM]
    for name in "abcd":
        driver.save(alice, name)
    refused = resize(driver, 5)
    assert isinstance(refused.error, LimitReached)
    assert "ram.shares gives 6 bytes" in str(refused.error)
    assert (ledger.limit_bytes, len(driver.tables.entries)) == (10, 4)
    for of in TenantNamespace("team-a").stored(map(key, "abcd")):
        item = ev.KeyToSave(of, Content(1, 10))
        asked = ev.ReserveAsked(
            driver.request(), alice, Tier.RAM, SaveReason.COLD, (item,), (), True, 100, 0, 0
        )
        (order,) = driver.ask(asked).results
        driver.seal(order.token)
    assert ledger.shares.standings[1].used_bytes == 4
    answer = resize(driver, 6)
    assert (answer.done, answer.entries) == (True, 2)
    assert ledger.shares.standings[1].used_bytes == 4, "what has no share gives"
    # An operator asks for room, whichever namespace has it.
    assert driver.evict(6).freed_bytes == 6
