"""What all sessions of a tenant hold of a tier together."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.proto.errors import LimitReached
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TAG_BYTES, tag_of
from prefixd.proto.vocabulary import ClaimMode, SaveStatus, Tier
from prefixd.server.core.sessions import Tenant
from tests.support.state_driver import Driver, ledger

#: The driver's tiers have 10 bytes, of which 1 is for clients on this host.


def refused(answer: Any) -> bool:
    return isinstance(getattr(answer, "error", None), LimitReached)


def saved(*tenants: str, **config: Any) -> tuple[Driver, list[int]]:
    """Entries a to j, of one byte each, and a session of each tenant."""
    driver = Driver(**config)
    here = driver.open()
    driver.save(here, "a b c d e f g h i j")
    return driver, [driver.open(tenant, tenant) for tenant in tenants]


def test_the_sessions_of_a_tenant_pin_no_more_than_one_may() -> None:
    driver, (one, two) = saved("team", "team", max_pinned_share=0.5)
    assert driver.claim(one, "a b c", ClaimMode.ANY).claim
    assert driver.claim(two, "a b c d e", ClaimMode.ANY).claim, "the same entries cost once"
    answer = driver.claim(one, "f")
    assert refused(answer)
    assert "all clients of this tenant hold 5 bytes of the ram tier" in str(answer.error)
    assert driver.counters.quota_refusals == 1
    driver.lose(two)
    assert driver.claim(one, "f").claim


def test_beside_others_a_tenant_pins_no_more_than_it_leaves_free() -> None:
    driver, (a, b, c) = saved("a", "b", "c", max_pinned_share=0.75)
    assert driver.claim(a, "a b c d e f g", ClaimMode.ANY).claim, "it is alone"
    assert driver.claim(b, "h").claim, "the next one finds room"
    assert refused(driver.claim(a, "i"))
    assert driver.claim(c, "a b c d e f g", ClaimMode.ANY).claim, "they are pinned anyway"


def test_clients_on_this_host_have_their_part() -> None:
    driver, (a, b) = saved("a", "b")
    driver.claim(a, "a b c d e f", ClaimMode.ANY)
    driver.claim(b, "g h", ClaimMode.ANY)
    (late,) = [driver.open("late", "late")]
    driver.claim(late, "i")
    assert refused(driver.claim(b, "i j", ClaimMode.ANY))
    assert driver.claim(1, "i j", ClaimMode.ANY).claim


def test_a_tenant_reserves_no_more_than_it_leaves_free() -> None:
    driver = Driver(max_reserved_share=0.5)
    one, two, other = driver.open("1", "a"), driver.open("2", "a"), driver.open("3", "b")
    assert len(driver.granted(one, "a b c")) == 3
    assert len(driver.granted(two, "d e")) == 2
    assert driver.reserve(two, "f").results == (SaveStatus.NO_ROOM,)
    assert len(driver.granted(other, "g")) == 1
    assert driver.reserve(one, "f").results == (SaveStatus.NO_ROOM,)
    assert driver.counters.quota_refusals == 2
    driver.lose(two)
    assert driver.reserve(one, "f").results == (SaveStatus.NO_ROOM,), "3 and 1 more leave 4"


def test_an_entry_may_have_any_size_if_a_tenant_holds_nothing_else() -> None:
    driver = Driver(max_reserved_share=0.5, max_pinned_share=0.5)
    a = driver.open("1", "a")
    driver.save(a, "large", payload_bytes=8)
    driver.save(a, "small")
    claim = driver.claim(a, "large").claim
    assert claim
    assert refused(driver.claim(a, "small"))
    driver.release(a, claim)
    assert driver.claim(a, "small").claim


def test_what_a_namespace_holds_within_its_share_is_its_own() -> None:
    tier = ledger(Tier.RAM, 10, shares={"team": 6})
    assert tier.shares is not None
    rest, share = tier.shares.standings

    def may(used_bytes: int, key: Key) -> bool:
        tenant = Tenant(reserved_bytes={Tier.RAM: used_bytes})
        coming: Any = SimpleNamespace(key=key, stored_bytes=1)
        return tenant.may_reserve(tier, coming, 1.0)

    team, nobody = Key(bytes(32 - TAG_BYTES) + tag_of("team")), Key(bytes(32))
    rest.fixed_bytes, share.fixed_bytes = 1, 5
    assert may(5, team), "up to its share"
    share.fixed_bytes = 6
    assert may(6, team), "and of the rest what it leaves free"
    share.fixed_bytes = 7
    assert not may(7, team), "1 of the rest is left, and 2 would be its own"
    assert not may(1, nobody)
    assert may(0, nobody)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_tenants_do_their_counts_add_up(seed: int) -> None:
    """The driver recounts everything after each event."""
    chance = random.Random(seed)
    driver = Driver(max_pinned_share=0.75, max_reserved_share=0.5, max_held_keys=120)
    sessions = [driver.open(tenant, tenant) for tenant in ("", "a", "a", "b", "c")]
    held: list[tuple[int, int]] = []
    tokens: list[int] = []
    for _ in range(120):
        number = chance.randrange(len(sessions))
        session = sessions[number]
        some = " ".join(chance.sample("abcdefghijkl", chance.randint(1, 4)))
        match chance.randrange(6):
            case 0:
                answer = driver.reserve(session, some)
                orders = getattr(answer, "results", ())
                tokens += [order.token for order in orders if hasattr(order, "token")]
            case 1 if tokens:
                token = tokens.pop(chance.randrange(len(tokens)))
                if token in driver.tables.reservations:
                    driver.begin(driver.tables.reservations[token].session, token)
                    driver.seal(token)
            case 2 | 3:
                answer = driver.claim(session, some, ClaimMode.ANY)
                if getattr(answer, "claim", 0):
                    held.append((session, answer.claim))
            case 4 if held:
                of, claim = held.pop(chance.randrange(len(held)))
                if of in driver.tables.sessions:
                    driver.release(of, claim)
            case 5 if chance.random() < 0.2:
                tenant = driver.tables.sessions[session].tenant
                driver.lose(session)
                sessions[number] = driver.open(tenant, tenant)
        for name, tenant in driver.tables.tenants.items():
            assert tenant.pinned_bytes.get(Tier.RAM, 0) <= 7, name
            assert tenant.reserved_bytes.get(Tier.RAM, 0) <= 5, name
    for session in sessions:
        driver.lose(session)
    driver.now_ns += 10**12
    driver.tick()
    assert (driver.tables.tenants, driver.tables.held.used) == ({}, 0)


# ---- what claims and saves hold in memory


def test_claims_hold_a_bounded_number_of_keys() -> None:
    driver, (a, b) = saved("a", "b", max_held_keys=200)
    claims = []
    while not refused(answer := driver.claim(a, "a b c d", ClaimMode.ANY)):
        claims.append(answer.claim)
    assert len(claims) == 3, "each takes 12, and a session may have half of what its tenant may"
    assert "36 of the 200 keys of claims and saves (max_held_keys) are yours" in str(answer.error)
    assert driver.claim(b, "a").claim
    driver.release(a, *claims)
    assert driver.claim(a, "a b c d", ClaimMode.ANY).claim


def test_chains_of_saves_hold_a_bounded_number_of_keys() -> None:
    driver = Driver(max_held_keys=20)
    session = driver.open()
    (token,) = driver.granted(session, "z", after="a b c d e f g h")
    refusal = driver.reserve(session, "y", after="a b c d e f g h")
    assert refused(refusal)
    assert driver.tables.held.used == 9
    driver.begin(session, token)
    driver.seal(token)
    assert driver.tables.held.used == 0
