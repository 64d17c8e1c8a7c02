"""What holds for every policy: its name, the protocol, and runs that equal single accesses.

The search for a victim may be split over several calls, and finds the same victims then.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction import POLICIES, EvictionPolicy, make_policy
from prefixd.tiers.eviction.base import Looks, NotYet
from prefixd.tiers.eviction.lfu import LFU

names = pytest.mark.parametrize("name", list(POLICIES))


def test_the_registry_knows_five_names() -> None:
    assert list(POLICIES) == ["lru", "lfu", "fifo", "s3fifo", "arc"]
    for name, policy in POLICIES.items():
        made = make_policy(name, 7, max_ghosts=3)
        assert (type(made), made.name) == (policy, name)
        assert (made.capacity, made.max_ghosts) == (7, 3)


def test_an_unknown_name_and_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy 'clock', known are lru, lfu, fifo, s3f"):
        make_policy("clock", 1)
    for name in POLICIES:
        with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
            make_policy(name, -1)
        with pytest.raises(ValueError, match="ghosts must not be negative, got -2"):
            make_policy(name, 1, max_ghosts=-2)


@names
@given(
    ids=st.lists(st.integers(0, 11), max_size=300),
    capacity=st.integers(0, 15),
    cut=st.integers(1, 40),
)
@settings(deadline=None)
def test_a_run_equals_single_accesses(name: str, ids: list[int], capacity: int, cut: int) -> None:
    policy, single = make_policy(name, capacity), make_policy(name, capacity)
    for start in range(0, len(ids), cut):
        run = ids[start : start + cut]
        assert policy.resident_run(run) == next(
            (index for index, key in enumerate(run) if key not in single), len(run)
        )
        assert policy.access_run(run) == sum([single.access(key) for key in run])
        assert (policy.moves, policy.used, policy.ghosts) == (
            single.moves, single.used, single.ghosts,
        )  # fmt: skip
    assert list(policy.keys()) == list(single.keys())
    assert list(policy.victims()) == list(single.victims())


@names
def test_keys_restore_the_order(name: str) -> None:
    """After a restart a tier admits the entries that it finds in the order of `keys`."""
    policy = make_policy(name, 100)
    for key in [*range(20), 3, 3, 7]:
        policy.access(key)
    restored: Any = make_policy(name, 100)
    for key in policy.keys():  # noqa: SIM118 (not a mapping)
        restored.prepare(key, 1)
        restored.admit(key, 1)
    assert list(restored.keys()) == list(policy.keys())
    if name != "s3fifo":  # which forgets the hits
        assert list(restored.victims()) == list(policy.victims())


KEYS = 1_000


def filled(name: str, looks: int) -> EvictionPolicy[int]:
    """A full policy of a tier: nothing left before."""
    policy = make_policy(name, KEYS)
    policy.looks.most = looks
    for key in range(KEYS):
        policy.prepare(key, 1)
        policy.admit(key, 1)
    return policy


def evict(policy: EvictionPolicy[int], incoming: int | None = None) -> tuple[int | None, int]:
    """The victim, and the number of calls that found it."""
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
    """`prepare` and `evict` promote 900 keys. In M each goes round once for each hit."""
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
    """Only if nothing else happens meanwhile, as here. In a tier other calls come in between."""
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
