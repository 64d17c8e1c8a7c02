"""Histograms: which values are in which bucket."""

from __future__ import annotations

from prefixd.proto.limits import LATENCY_BOUNDS_NS
from prefixd.server.core.counters import AGE_BOUNDS_NS, Histogram

MINUTE, HOUR, DAY = 60, 3_600, 86_400


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram((10, 20))
    for value in (0, 10, 11, 20, 21, 1_000):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2]
    assert histogram.total == 1_062


def test_the_bounds_are_those_that_dashboards_were_made_for() -> None:
    seconds = [bound / 1e9 for bound in AGE_BOUNDS_NS]
    minutes = [MINUTE, 5 * MINUTE, 15 * MINUTE]
    assert seconds == [1, 5, 15, *minutes, HOUR, 4 * HOUR, DAY, 7 * DAY, 30 * DAY]
    microseconds = [bound / 1e3 for bound in LATENCY_BOUNDS_NS]
    assert microseconds == [
        *(50, 100, 200, 500),
        *(1_000, 2_000, 5_000, 10_000, 20_000, 50_000),
        *(100_000, 200_000, 500_000),
        *(1_000_000, 2_000_000, 5_000_000, 10_000_000),
    ]
