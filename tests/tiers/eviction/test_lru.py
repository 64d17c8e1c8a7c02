"""LRU: recency, pins, and the cost of an eviction among a hundred thousand pinned keys."""

from __future__ import annotations

import gc
import tracemalloc
from typing import ClassVar

import pytest

from prefixd.tiers.eviction import POLICIES, EvictionPolicy, make_policy
from prefixd.tiers.eviction.lru import LRU


class Counted:
    """A key that counts how often keys are hashed: every look-up, move and removal."""

    hashed: ClassVar[int] = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        Counted.hashed += 1
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and self.number == other.number


def filled(name: str, *, pinned: int, free: int) -> EvictionPolicy[Counted]:
    policy: EvictionPolicy[Counted] = make_policy(name, 10 * (pinned + free))
    for number in range(pinned + free):
        key = Counted(number)
        policy.prepare(key, 1)
        policy.admit(key, 1)
        if number < pinned:
            policy.pin(key)
    return policy


def cost_of_evicting(policy: EvictionPolicy[Counted], count: int) -> int:
    before = Counted.hashed
    for _ in range(count):
        assert policy.evict() is not None
    return Counted.hashed - before


def test_the_least_recent_leaves() -> None:
    lru = LRU[str](3)
    for key in "abcab":
        lru.access(key)
    assert list(lru.victims()) == ["c", "a", "b"]
    assert not lru.access("d")
    assert "c" not in lru
    assert list(lru.victims()) == ["a", "b", "d"]


def test_a_chain_touched_leaf_first_loses_its_leaf_first() -> None:
    lru = LRU[str](3)
    for key in ("leaf", "middle", "root"):
        lru.access(key)
    for key in ("leaf", "middle", "root"):
        lru.refresh(key)
    assert lru.evict() == "leaf"
    assert list(lru.victims()) == ["middle", "root"]


def test_an_unpinned_key_is_the_most_recent() -> None:
    lru = LRU[str](3)
    for key in "abc":
        lru.access(key)
    lru.pin("a")
    lru.hit("a")
    lru.refresh("a")
    assert list(lru.victims()) == ["b", "c"]
    assert list(lru.keys()) == ["b", "c", "a"]
    lru.unpin("a")
    assert list(lru.victims()) == ["b", "c", "a"]


def test_nothing_is_admitted_past_pinned_keys() -> None:
    lru = LRU[str](2)
    lru.access("a")
    lru.access("b")
    lru.pin("a")
    lru.pin("b")
    assert lru.evict() is None
    assert not lru.access("c")
    assert ("c" not in lru, lru.used) == (True, 2)
    lru.remove("a")
    assert not lru.access("c")
    assert ("c" in lru, lru.used) == (True, 2)


def test_weights() -> None:
    lru = LRU[str](10)
    lru.access("a", 4)
    lru.access("b", 4)
    lru.access("c", 6)
    assert (sorted(lru.keys()), lru.used) == (["b", "c"], 10)
    assert not lru.access("heavy", 11)
    assert sorted(lru.keys()) == ["b", "c"]


def test_evicting_costs_the_same_among_pinned_keys() -> None:
    alone = cost_of_evicting(filled("lru", pinned=0, free=1_000), 1_000)
    crowd = cost_of_evicting(filled("lru", pinned=100_000, free=1_000), 1_000)
    assert crowd == alone


@pytest.mark.parametrize("name", list(POLICIES))
def test_no_policy_meets_a_pinned_key_twice(name: str) -> None:
    pinned, free = 20_000, 4_000
    alone = cost_of_evicting(filled(name, pinned=0, free=free), free)
    policy = filled(name, pinned=pinned, free=free)
    first = cost_of_evicting(policy, free // 2)
    second = cost_of_evicting(policy, free // 2)
    assert first <= alone + 8 * pinned
    assert second <= alone


@pytest.mark.parametrize(
    ("name", "bytes_per_key"),
    [("lru", 160), ("fifo", 160), ("s3fifo", 160), ("arc", 160), ("lfu", 330)],
)
def test_memory_of_a_resident_key(name: str, bytes_per_key: int) -> None:
    """Without the key itself and its weight, which the caller has anyway."""
    # Tables grow by doubling: these are as full as with 100,000 keys.
    keys = [number.to_bytes(32, "big") for number in range(3_125)]
    gc.collect()
    tracemalloc.start()
    policy: EvictionPolicy[bytes] = make_policy(name, 1 << 40)
    for key in keys:
        policy.prepare(key, 1 << 20)
        policy.admit(key, 1 << 20)
    allocated, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(policy) == len(keys)
    assert allocated / len(keys) < bytes_per_key
