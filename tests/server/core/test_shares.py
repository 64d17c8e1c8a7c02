"""Shares: nobody holds more than is left to others, and the counts always add up."""

from __future__ import annotations

import random

import pytest

from prefixd.proto.errors import LimitReached
from prefixd.server.core.shares import HOST, Holder, Shares


def fill(shares: Shares, holder: Holder, amount: int = 1) -> int:
    """Take as often as the rule allows it; returns what the holder has then."""
    while shares.may_take(holder, amount):
        shares.add(holder, amount)
    return shares.held_by(holder)


def test_each_tenant_leaves_as_much_as_it_takes_and_the_host_has_its_part() -> None:
    shares = Shares("places", 800)
    assert [fill(shares, Holder(tenant)) for tenant in "abcdef"] == [350, 175, 87, 44, 22, 11]
    many = [fill(shares, Holder(f"tenant {number}")) for number in range(20)]
    assert sum(many) == 800 - 100 - 689
    assert shares.left_for("another") == 0
    assert fill(shares, Holder(HOST)) == 100, "what remote tenants can't take"


def test_the_sessions_of_a_tenant_leave_each_other_as_much() -> None:
    shares = Shares("places", 800)
    first = [fill(shares, Holder("a", session)) for session in (1, 2, 3)]
    assert first == [175, 87, 44]
    assert shares.held_by(Holder("a")) == 306
    assert fill(shares, Holder("b", 4)) == 98, "half of what its tenant may have"
    assert fill(shares, Holder(HOST, 5)) > 100


def test_clients_of_this_host_leave_each_other_as_much_and_take_what_is_free() -> None:
    shares = Shares("places", 100)
    assert [fill(shares, Holder(HOST, session)) for session in (1, 2, 3)] == [50, 25, 12]
    assert fill(shares, Holder(HOST)) == 100, "no session: none to leave something to"


def test_the_first_place_is_for_anybody_and_nothing_is_for_nobody() -> None:
    one = Shares("places", 1)
    one.take(Holder("a"))
    with pytest.raises(LimitReached, match="all of the 1 places are taken"):
        one.take(Holder("b"))
    one.give(Holder("a"))
    one.take(Holder("b"))
    assert (one.used, one.refusals) == (1, 1)
    with pytest.raises(LimitReached):
        Shares("places", 0).take(Holder())
    big = Shares("bytes", 10)
    assert big.may_take(Holder("a"), 500), "larger than all of it, and nothing is taken"
    big.add(Holder("a"), 500)
    assert not big.may_take(Holder(HOST))


def test_who_is_refused_is_told_what_it_holds() -> None:
    shares = Shares("sessions (max_sessions)", 16)
    fill(shares, Holder("a"))
    with pytest.raises(LimitReached, match=r"7 of the 16 sessions \(max_sessions\) are yours"):
        shares.take(Holder("a"))
    # A session that holds something is told that, another one what its tenant holds.
    shares = Shares("bytes", 16)
    shares.add(Holder("a", 1), 5)
    shares.add(Holder("a", 2), 3)
    assert shares.why(Holder("a", 1)).startswith("5 of the 16 bytes are yours")
    assert shares.why(Holder("a", 3)).startswith("8 of the 16 bytes are yours")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_taken_and_given_back_the_counts_add_up(seed: int) -> None:
    chance = random.Random(seed)
    total = chance.choice((8, 100, 1000))
    shares = Shares("bytes", total)
    held: list[tuple[Holder, int]] = []
    for _ in range(2_000):
        if held and chance.random() < 0.45:
            holder, amount = held.pop(chance.randrange(len(held)))
            shares.give(holder, amount)
        else:
            tenant = chance.choice((HOST, "a", "b", "c"))
            holder, amount = Holder(tenant, chance.randrange(4)), chance.randint(1, 5)
            if shares.may_take(holder, amount):
                shares.take(holder, amount)
                held.append((holder, amount))
        assert shares.used == sum(amount for _, amount in held)
        assert shares.used <= total
        remote = sum(amount for holder, amount in held if holder.tenant != HOST)
        assert remote <= max(total - total // 8, 5)
        for tenant in "abc":
            its = sum(amount for holder, amount in held if holder.tenant == tenant)
            assert its == shares.held_by(Holder(tenant))
    for holder, amount in held:
        shares.give(holder, amount)
    assert (shares.used, shares._tenants, shares._sessions) == (0, {}, {})


def test_nothing_may_be_taken_and_given_back() -> None:
    """As by offers to an engine that gets addresses instead of payloads."""
    shares = Shares("bytes", 10)
    shares.take(Holder(), 0)
    shares.give(Holder(), 0)
    assert shares.used == 0
