"""One call of a running tier puts few keys aside on its way to a victim, which stays the same."""

from __future__ import annotations

import random

import pytest

from prefixd.tiers.eviction import POLICIES, EvictionPolicy, make_policy
from prefixd.tiers.eviction.base import Looks, NotYet
from prefixd.tiers.eviction.lfu import LFU

KEYS = 1_000


def filled(name: str, looks: int) -> EvictionPolicy[int]:
    """A tier's: nothing leaves before it is full."""
    policy = make_policy(name, KEYS)
    policy.looks.most = looks
    for key in range(KEYS):
        policy.prepare(key, 1)
        policy.admit(key, 1)
    return policy


def evict(policy: EvictionPolicy[int], incoming: int | None = None) -> tuple[int | None, int]:
    """The victim, and how many calls it took."""
    calls = 1
    while True:
        try:
            return policy.evict(incoming), calls
        except NotYet:
            calls += 1


def test_a_call_has_so_many_looks() -> None:
    looks = Looks()
    looks.most = 3
    for _ in range(2):
        looks.begin()
        looks.take()
        looks.take()
        with pytest.raises(NotYet):
            looks.take()


@pytest.mark.parametrize(("name", "calls"), [("lru", 1), ("arc", 1), ("lfu", 101), ("fifo", 101)])
def test_pinned_keys_are_put_aside_a_few_at_a_time(name: str, calls: int) -> None:
    policy = filled(name, 8)
    for key in range(800):
        policy.pin(key)
    assert evict(policy) == (800, calls)
    assert evict(policy) == (801, 1)


@pytest.mark.parametrize(("hits", "calls"), [(1, 225), (3, 450)])
def test_s3fifo_promotes_and_requeues_a_few_keys_at_a_time(hits: int, calls: int) -> None:
    """900 are promoted, in the calls of `prepare` and `evict`; those in M go round once a hit."""
    policy = filled("s3fifo", 8)
    for key in range(KEYS):
        for _ in range(hits):
            policy.hit(key)
    policy.prepare(KEYS, 1)
    before = policy.moves
    assert before < KEYS + 10
    victim, taken = evict(policy, KEYS)
    assert victim == 0
    assert taken == calls == (policy.moves - before) // 8 + 1


def test_lfu_puts_a_few_items_right_at_a_time() -> None:
    policy = filled("lfu", 8)
    for _ in range(2):
        for key in range(KEYS):
            policy.hit(key)
    assert evict(policy) == (0, 126)
    assert evict(policy) == (1, 1)


def test_lfu_takes_a_few_items_over_for_each_that_is_removed() -> None:
    lfu = LFU[int](KEYS)
    for key in range(KEYS):
        lfu.access(key)
        lfu.access(key)
    lfu.hit(999)
    before = 0
    for key in range(900):
        lfu.remove(key)
        old = len(lfu._old)
        assert before - old <= 4
        assert lfu._dead == len(lfu._heap) + old - len(lfu)
        before = old
    assert len(lfu._heap) + old < 300
    assert [lfu.evict() for _ in range(101)] == [*range(900, 1000), None]
    assert (lfu._heap, lfu._old, lfu._dead) == ([], [], 0)


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("looks", [1, 2, 8])
def test_the_victims_are_those_of_one_long_look(name: str, looks: int) -> None:
    """While victims are looked for nothing else happens here; in a tier it counts when it does."""
    chance = random.Random(looks)
    both = short, long = filled(name, looks), filled(name, KEYS * 10)
    hit, pinned = chance.choices(range(KEYS), k=1_500), chance.sample(range(KEYS), 300)
    for policy in both:
        for key in hit:
            policy.hit(key)
        for key in pinned:
            policy.pin(key)
    for coming in range(KEYS, KEYS + 500):
        for policy in both:
            policy.prepare(coming, 1)
        assert evict(short, coming)[0] == evict(long, coming)[0]
        for policy in both:
            policy.admit(coming, 1)
    for key in pinned:
        for policy in both:
            policy.unpin(key)
    assert [evict(short)[0] for _ in range(KEYS)] == [evict(long)[0] for _ in range(KEYS)]
