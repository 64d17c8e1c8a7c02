"""Stack distances against a plain list; sampled curves: exact at rate 1, close to it below."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction import stack_distance
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.eviction.stack_distance import (
    POSITIONS,
    SampledCurve,
    StackDistances,
    position_of_bytes,
    position_of_int,
)

runs = st.lists(st.lists(st.integers(0, 25), max_size=12), max_size=60)
orders = pytest.mark.parametrize("root_mru", [False, True])


class Pile:
    """Keys, most recent first. A key's distance is the weight down to and including it."""

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
    """With two neighbours to a sum and few spare slots, so that all levels are used often."""
    monkeypatch.setattr(stack_distance, "_BITS", 1)
    monkeypatch.setattr(stack_distance, "_LAST", 1)
    monkeypatch.setattr(stack_distance, "_SPARE_SLOTS", 3)
    monkeypatch.setattr(stack_distance, "_STEP", 2)


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
        # Begins above 1.5 slots for each key and 3, within a run of 3, and grows by half meanwhile.
        most = 1.5 * (1.5 * len(distances) + 3 + 3)
        assert len(distances._levels[0]) == len(distances._keys) <= most
        assert sum(map(len, distances._levels)) <= 2 * most + 8


@pytest.mark.parametrize("keys", [2_000, 20_000])
def test_no_run_pays_for_all_keys(keys: int) -> None:
    """Counts the slots that one run goes through: they depend on the run alone."""

    class Counted(StackDistances[int]):
        longest = moves = 0

        def _move_down(self, slots: int) -> None:
            before = self._read
            assert before is not None
            super()._move_down(slots)
            self.moves += 1
            if self._read is not None:
                self.longest = max(self.longest, self._read - before)

    distances, run = Counted(), 16
    for start in range(0, 8 * keys, run):
        distances.access([n * 7919 % keys for n in range(start, start + run)])
    assert distances.moves > keys / run
    assert distances.longest <= max(3 * run, 128)


def chains(seed: int, requests: int = 3000) -> list[list[int]]:
    """Conversations that grow by some blocks a turn, some far more popular than others."""
    chance = random.Random(seed)
    length = Counter[int]()
    found = []
    for _ in range(requests):
        talk = int(1500 * chance.random() ** 2)
        length[talk] += chance.randrange(1, 5)
        found.append([0, 1, *(1000 * talk + 2 + n for n in range(length[talk] % 30))])
    return found


def exact_hits(runs: list[list[int]], capacity: int) -> int:
    stack = StackDistances[int]()
    hits = 0
    for run in runs:
        hits += max((count for needed, count in stack.access(run) if needed <= capacity), default=0)
    return hits


def test_positions_spread_evenly() -> None:
    for position in (position_of_int, lambda n: position_of_bytes(sha256(b"%d" % n).digest())):
        tenths = Counter(position(number) * 10 // POSITIONS for number in range(50_000))
        assert set(tenths) == set(range(10))
        assert all(4_700 < count < 5_300 for count in tenths.values())
    assert position_of_bytes(bytes([1] + [0] * 31)) == 1 << 56
    assert position_of_int(-5) != position_of_int(5)


@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=50))
@settings(deadline=None)
def test_everything_sampled_is_exact(runs: list[list[int]]) -> None:
    curve = SampledCurve(position_of_int)
    for run in runs:
        curve.access(run)
    estimate = curve.estimate()
    assert (estimate.rate, estimate.total) == (1.0, sum(map(len, runs)))
    for capacity in range(35):  # distances are only rounded above 255
        assert estimate.at(capacity) == exact_hits(runs, capacity)


def errors(settings: dict[str, Any], capacities: list[int]) -> list[list[float]]:
    """capacity -> errors of twelve samples of one trace, as shares of all accesses."""
    runs = chains(1)
    wanted = [exact_hits(runs, capacity) for capacity in capacities]
    found: list[list[float]] = [[] for _ in capacities]
    for seed in range(12):
        curve = SampledCurve[int](lambda key, s=seed: position_of_int(key + 7919 * s), **settings)
        for run in runs:
            curve.access(run)
        estimate = curve.estimate()
        for row, capacity, hits in zip(found, capacities, wanted, strict=True):
            row.append((estimate.at(capacity) - hits) / estimate.total)
    return found


@pytest.mark.parametrize("settings", [{"rate": 0.25}, {"max_keys": 1000}])
def test_samples_err_little_and_to_both_sides(settings: dict[str, Any]) -> None:
    for row in errors(settings, [100, 300, 1000, 3000]):
        assert max(map(abs, row)) < 0.06
        assert abs(sum(row)) / len(row) < 0.015
        assert min(row) < 0 < max(row)


def test_a_fixed_rate_samples_that_part_of_the_keys() -> None:
    runs = chains(5)
    curve = SampledCurve(position_of_int, rate=0.1)
    for run in runs:
        curve.access(run)
    different = len({key for run in runs for key in run})
    assert 0.9 * 0.1 * different < len(curve) < 1.1 * 0.1 * different
    assert curve.rate == pytest.approx(0.1)


def test_a_bounded_sample_lowers_its_rate() -> None:
    curve = SampledCurve(position_of_int, max_keys=500)
    rates = []
    for run in chains(2):
        curve.access(run)
        rates.append(curve.rate)
        assert len(curve) <= 500
        assert len(curve._highest) == len(curve)
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (1.0, pytest.approx(500 / 7000, rel=0.2))
    assert (curve.estimate().keys, curve.estimate().rate) == (len(curve), rates[-1])


def test_values_and_weights_scale_the_axes() -> None:
    runs = chains(3, requests=300)
    plain, scaled = (SampledCurve(position_of_int, rate=0.5) for _ in range(2))
    for run in runs:
        plain.access(run)
        scaled.access(run, [512] * len(run), [64] * len(run))
    one, other = plain.estimate(), scaled.estimate()
    assert other.total == 512 * one.total
    for capacity in range(0, 128, 5):
        assert other.at(64 * capacity) == pytest.approx(512 * one.at(capacity))


def test_estimates_are_monotonous_and_within_the_total() -> None:
    curve = SampledCurve(position_of_int, rate=0.02)
    assert curve.estimate().at(10) == 0.0
    for run in chains(4, requests=400):
        curve.access(run)
        estimate = curve.estimate()
        assert estimate.capacities == sorted(set(estimate.capacities))
        assert estimate.values == sorted(estimate.values)
        assert estimate.values[0] >= 0
        assert estimate.values[-1] <= estimate.total


def test_keys_that_share_a_position_leave_together() -> None:
    curve = SampledCurve[int](lambda key: key // 10, max_keys=15)
    curve.access(list(range(20)))
    assert len(curve) == 10
    curve.access(list(range(10, 20)))
    assert len(curve) == 10
    nowhere = SampledCurve[int](lambda _key: 0, max_keys=2)
    nowhere.access([1, 2, 3, 4])
    assert len(nowhere) <= 2
    assert nowhere.rate > 0


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling rate must be above 0 and at most 1"):
        SampledCurve(position_of_int, rate=rate)


def test_bad_bound() -> None:
    with pytest.raises(ValueError, match="room for at least one key, got 0"):
        SampledCurve(position_of_int, max_keys=0)


def test_keys_that_are_bytes_are_sampled_by_their_positions() -> None:
    keys = [sha256(b"%d" % number).digest() for number in range(3_000)]
    # A key exactly at the border is not in the sample.
    border = round(0.1 * POSITIONS)
    keys.append(border.to_bytes(8, "big") + bytes(24))
    curves = [
        SampledCurve[bytes](position, rate=0.1)
        for position in (position_of_bytes, lambda key: position_of_bytes(key))
    ]
    for curve in curves:
        curve.access(keys)
        curve.access(keys[::2])
    quick, called = curves
    assert len(quick) == len(called) == sum(position_of_bytes(k) < border for k in keys)
    assert quick.estimate() == called.estimate()
