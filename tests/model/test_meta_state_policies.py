"""The accounting of `MetaState` is right with every eviction policy."""

from __future__ import annotations

import random

import pytest

from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveStatus, Tier
from prefixd.server.core.effects import WriteOrder
from prefixd.server.core.sessions import Stage
from prefixd.tiers.eviction import POLICIES, EvictionPolicy
from prefixd.tiers.ledger import Admission
from prefixd.tiers.order import order_by
from tests.support.lengths import times
from tests.support.state_driver import Driver

BUDGET_BYTES = 40


def driver_with(policy: type[EvictionPolicy[Key]], max_ghosts: int | None) -> Driver:
    driver = Driver(session_lost_after_ns=10**9)
    for ledger in driver.tables.ledgers.values():
        ledger.policy = order_by(policy(BUDGET_BYTES, max_ghosts=max_ghosts))
        ledger.budget_bytes = ledger.arena_bytes = ledger.limit_bytes = BUDGET_BYTES
        if ledger.extents is not None:
            ledger.extents.grow(BUDGET_BYTES)
    driver.tables.ledgers[Tier.SHM].max_entries = 5
    return driver


def act(driver: Driver, chance: random.Random, sessions: list[int]) -> None:
    """One random event. The driver checks the state after it."""
    tables, session = driver.tables, chance.choice(sessions)
    names = " ".join(chance.sample([f"k{n}" for n in range(30)], chance.randint(1, 4)))
    tier, size = chance.choice(list(Tier)), chance.choice([1, 2, 3, 5, 8, 13, 39, 40])
    driver.now_ns += chance.randint(0, 3)
    match chance.randint(0, 11):
        case 0 | 1 | 2 | 3:
            before = tables.ledgers[tier].admission(size)
            answer = driver.reserve(session, names, tier=tier, payload_bytes=size, begin=True)
            tokens = [one.token for one in answer.results if isinstance(one, WriteOrder)]
            if before in (Admission.FITS, Admission.AFTER_EVICTION):
                assert SaveStatus.NO_ROOM not in answer.results[:1], "refused although it fits"
            if tokens and chance.random() < 0.8:
                driver.seal(*tokens)
        case 4 | 5:
            driver.claim(session, names, ClaimMode.ANY, lease_ns=200)
        case 6:
            claims = sorted(tables.claims)
            if claims:
                claim = tables.claims[chance.choice(claims)]
                whole = all(entry.published for entry in claim.entries)
                expected = "released" if whole else "lost"
                assert driver.release(claim.session, claim.claim) == expected
        case 7:
            driver.touch(names)
        case 8:
            stages = (Stage.WRITING, Stage.DOOMED)
            writing = [r.token for r in tables.reservations.values() if r.stage in stages]
            if writing:
                driver.stop(chance.choice(writing))
        case 9:
            whole = [r for r in tables.reservations.values() if r.stage is Stage.COMMITTING]
            if whole:
                driver.commit(whole[0].token)
        case 10:
            driver.tick(flush=True)
        case 11 if tables.entries and chance.random() < 0.5:
            # Sorted, because the order of the table differs from process to process.
            entry = tables.entries[chance.choice(sorted(tables.entries))]
            driver.damage(entry.key.rstrip(b".").decode())


@pytest.mark.parametrize("max_ghosts", [None, 3])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_accounting_is_right(policy: type[EvictionPolicy[Key]], max_ghosts: int | None) -> None:
    driver = driver_with(policy, max_ghosts)
    chance = random.Random(f"{policy.name} {max_ghosts}")
    sessions = [driver.open("alice"), driver.open("bob")]
    for _ in range(times(1_000, 3_000)):
        act(driver, chance, sessions)
    counters = driver.tables.tier_counters
    assert all(counters[tier].evictions > 10 for tier in Tier)
    assert driver.counters.claimed_entries > 50
    for session in sessions:
        driver.lose(session)
    while writing := list(driver.tables.reservations.values()):
        save = writing[0]
        driver.commit(save.token) if save.stage is Stage.COMMITTING else driver.stop(save.token)
    for tier in Tier:
        driver.evict(BUDGET_BYTES, tier)
    assert not driver.tables.entries
    for ledger in driver.tables.ledgers.values():
        assert (ledger.published_bytes, ledger.reserved_bytes) == (0, 0)
        assert list(ledger.policy.keys()) == []
