"""The histogram of whole numbers against sorted lists."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.lab.histogram import LogHistogram

VALUES = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)


def filled(values: list[int]) -> LogHistogram:
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(VALUES, st.floats(0, 1))
def test_a_quantile_is_within_a_percent_of_the_sorted_one(values: list[int], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    histogram = filled(values)
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.01)
    assert (histogram.count, histogram.total) == (len(values), sum(values))


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    random = Random(1)
    histogram = filled([random.randrange(1, 10**9) for _ in range(20_000)])
    assert len(histogram._buckets) < 128 * 31


def test_histogram_quantiles_are_close_and_small_ones_exact() -> None:
    random = Random(3)
    values = [round(random.lognormvariate(6, 3)) for _ in range(5000)]
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    ranked = sorted(values)
    for fraction in (0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = ranked[max(int(fraction * 5000) - 1, 0)]
        assert exact * (1 - 1 / 128) <= histogram.quantile(fraction) <= exact
        share = sum(value <= exact for value in values) / 5000
        assert histogram.at_most(exact) == pytest.approx(share, abs=0.02)
    assert histogram.max == ranked[-1]
    small = LogHistogram()
    for value in range(256):
        small.add(value)
    assert [small.quantile((n + 1) / 256) for n in range(256)] == list(range(256))
    assert LogHistogram().summary() == {"mean": 0, "p10": 0, "p50": 0, "p90": 0, "p99": 0, "max": 0}
    assert LogHistogram().at_most(5) == 0
