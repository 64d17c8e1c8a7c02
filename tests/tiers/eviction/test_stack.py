"""Stack distances against a list that is really moved around."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction import stack
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.eviction.stack import StackDistances

runs = st.lists(st.lists(st.integers(0, 25), max_size=12), max_size=60)
orders = pytest.mark.parametrize("root_mru", [False, True])


class Pile:
    """Keys, most recent first; a key's distance is the weight down to and including it."""

    def __init__(self, root_mru: bool) -> None:
        self.root_mru = root_mru
        self.keys: list[int] = []
        self.weight: dict[int, int] = {}

    def access(self, keys: list[int], weights: list[int] | None = None) -> list[tuple[int, int]]:
        steps: dict[int, int] = {}
        highest = 0
        for count, key in enumerate(keys, 1):
            if key not in self.keys:
                break
            above = self.keys[: self.keys.index(key) + 1]
            highest = max(highest, sum(self.weight[k] for k in above))
            steps[highest] = count
        touches = list(zip(keys, weights or [1] * len(keys), strict=True))
        for key, weight in reversed(touches) if self.root_mru else touches:
            self.keys = [key] + [k for k in self.keys if k != key]
            self.weight[key] = weight
        return list(steps.items())


@pytest.fixture
def small_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbours share a sum, and slots are given out anew often: all levels, many times."""
    monkeypatch.setattr(stack, "_BITS", 1)
    monkeypatch.setattr(stack, "_LAST", 1)
    monkeypatch.setattr(stack, "_SPARE_SLOTS", 3)


def agree(runs: list[list[int]], root_mru: bool) -> None:
    distances, pile = StackDistances[int](root_mru=root_mru), Pile(root_mru)
    for keys in runs:
        assert distances.access(keys) == pile.access(keys)
        assert len(distances) == len(pile.keys)
        assert all(key in distances for key in pile.keys)


@orders
@given(runs=runs)
@settings(deadline=None)
def test_equals_the_pile(root_mru: bool, runs: list[list[int]]) -> None:
    agree(runs, root_mru)


@orders
@pytest.mark.usefixtures("small_tree")
@given(runs=runs)
@settings(deadline=None)
def test_equals_the_pile_with_many_levels(root_mru: bool, runs: list[list[int]]) -> None:
    agree(runs, root_mru)


weighted = st.lists(
    st.one_of(
        st.dictionaries(st.integers(0, 15), st.integers(1, 9), max_size=8)
        .map(dict.items)
        .map(list),
        st.integers(0, 15),
    ),
    max_size=60,
)


@orders
@pytest.mark.usefixtures("small_tree")
@given(steps=weighted)
@settings(deadline=None)
def test_weights_and_removals_equal_the_pile(root_mru: bool, steps: list[Any]) -> None:
    distances, pile = StackDistances[int](root_mru=root_mru), Pile(root_mru)
    for step in steps:
        if isinstance(step, list):
            keys, weights = [key for key, _ in step], [weight for _, weight in step]
            assert distances.access(keys, weights) == pile.access(keys, weights)
        elif step in pile.keys:
            distances.remove(step)
            pile.keys.remove(step)
        assert len(distances) == len(pile.keys)


@given(ids=st.lists(st.integers(0, 20), max_size=200))
@settings(deadline=None)
def test_a_distance_is_the_smallest_weighted_lru_that_hits(ids: list[int]) -> None:
    distances = StackDistances[int]()
    caches = [LRU[int](capacity) for capacity in range(3, 50)]
    for key in ids:
        weight = 1 + key % 3
        steps = distances.access([key], [weight])
        for cache in caches:
            assert cache.access(key, weight) is (bool(steps) and steps[0][0] <= cache.capacity)


@pytest.mark.usefixtures("small_tree")
def test_memory_is_bounded_by_the_keys() -> None:
    distances = StackDistances[int]()
    for turn in range(500):
        distances.access([turn % 7, turn % 5, turn % 3])
        assert len(distances._levels[0]) <= 2 * len(distances) + 3
        assert sum(map(len, distances._levels)) <= 2 * (2 * len(distances) + 3) + 8
