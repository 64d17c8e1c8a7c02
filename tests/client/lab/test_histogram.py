"""The histogram of durations against sorted lists."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.lab.latency import Latencies

DURATIONS = st.lists(st.integers(1, 10**12), min_size=1, max_size=200)


def filled(durations_ns: list[int]) -> Latencies:
    latencies = Latencies()
    for duration_ns in durations_ns:
        latencies.add(duration_ns)
    return latencies


@given(DURATIONS, st.floats(0, 1))
def test_a_quantile_is_within_a_percent_of_the_sorted_one(
    durations_ns: list[int], share: float
) -> None:
    rank = max(1, math.ceil(share * len(durations_ns)))
    exact_ms = sorted(durations_ns)[rank - 1] / 1e6
    assert filled(durations_ns).quantile_ms(share) == pytest.approx(exact_ms, rel=0.01)


@given(DURATIONS, DURATIONS)
def test_merging_is_having_seen_both(first: list[int], second: list[int]) -> None:
    merged = filled(first)
    merged.merge(filled(second))
    both = filled(first + second)
    assert merged.count == both.count == len(first) + len(second)
    assert merged.quantile_ms(0.5) == both.quantile_ms(0.5)


def test_nothing_has_no_quantile() -> None:
    assert Latencies().quantile_ms(0.5) is None
    assert Latencies().count == 0


def test_zero_counts_as_the_least() -> None:
    assert filled([0]).count == 1


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        filled([1]).quantile_ms(share)


def test_memory_does_not_grow_with_the_number_of_durations() -> None:
    random = Random(1)
    latencies = filled([random.randrange(1, 10**9) for _ in range(20_000)])
    assert len(latencies._buckets) < 64 * 31
