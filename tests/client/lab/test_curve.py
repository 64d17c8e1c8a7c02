"""The curve equals the replay at every capacity; samples report their error."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.client.lab.curve import (
    CurvePoint,
    LruCurve,
    Sample,
    curve_error,
    exact_curve,
    sampled_curve,
)
from prefixd.client.lab.simulate import Cell, TouchOrder, replay
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader
from tests.support.lengths import times

Runs = list[tuple[tuple[int, ...], int]]
orders = pytest.mark.parametrize("order", list(TouchOrder))


@cache
def conversation() -> TraceColumns:
    folder = os.environ.get("PREFIXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces"
    path = Path(folder) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("needs conversation_trace.jsonl (set PREFIXD_TRACES to its folder)")
    return TraceColumns.load(TraceReader(path))


def columns(runs: Runs) -> TraceColumns:
    return TraceColumns.load(Request(0, length, 1, ids) for ids, length in runs)


def staircase(*steps: tuple[int, int], prompt_tokens: int = 100) -> LruCurve:
    capacities, tokens = zip(*steps, strict=True) if steps else ((), ())
    return LruCurve(TouchOrder.IN_ORDER, 1, 1, prompt_tokens, 50, capacities, tokens, 0.0)


@orders
def test_equals_the_replay_of_the_conversation_trace(order: TouchOrder) -> None:
    trace = conversation()
    curve = exact_curve(trace, touch_order=order)
    last = curve.capacities[-1]
    steps = times(4, 16)
    spread = [round(last ** (n / steps)) for n in range(steps + 1)]
    capacities = {0, *spread, last - 1, 1_000, 4_096, 30_000}
    assert len(capacities) >= steps + 4
    for capacity in capacities:
        wanted = replay(trace, Cell("lru", capacity, order)).total_hit_tokens
        assert curve.hit_tokens(capacity) == wanted
    summary = trace.summary(512)
    assert curve.infinite_hit_tokens == summary.infinite_hit_tokens
    assert (curve.requests, curve.prompt_tokens) == (summary.requests, summary.prompt_tokens)
    assert curve.unique_blocks == summary.unique_blocks


@orders
@given(
    runs=st.lists(
        st.tuples(st.lists(st.integers(0, 15), max_size=8).map(tuple), st.integers(0, 60)),
        max_size=40,
    )
)
@settings(deadline=None)
def test_equals_the_replay_at_every_capacity(order: TouchOrder, runs: Runs) -> None:
    """Also with ids that form no chains, repeats, and prompts that end early."""
    trace = columns(runs)
    curve = exact_curve(trace, block_tokens=10, touch_order=order)
    for capacity in range(18):
        wanted = replay(trace, Cell("lru", capacity, order), block_tokens=10)
        assert curve.hit_tokens(capacity) == wanted.total_hit_tokens
        assert curve.hit_rate(capacity) == wanted.overall_hit_rate


def test_a_staircase() -> None:
    curve = staircase((2, 10), (5, 30), (40, 35))
    assert [curve.hit_tokens(c) for c in (0, 1, 2, 4, 5, 39, 40, 10**9)] == [
        0, 0, 10, 10, 30, 30, 35, 35,
    ]  # fmt: skip
    assert curve.hit_rate(5) == 0.3
    assert curve.knee() == CurvePoint(5, 30, 0.3)


def test_points_are_the_curve_itself_from_one_block_to_the_last_step() -> None:
    curve = staircase((2, 10), (5, 30), (1000, 35))
    points = curve.points(20)
    capacities = [point.capacity_blocks for point in points]
    assert (capacities[0], capacities[-1]) == (1, 1000)
    assert capacities == sorted(set(capacities))
    assert 10 < len(points) <= 20
    assert all(point == curve.point(point.capacity_blocks) for point in points)
    assert len(curve.points(0)) == 2


def test_a_curve_without_hits() -> None:
    curve = exact_curve(columns([((1, 2), 20), ((), 0), ((3,), 10)]))
    assert (curve.infinite_hit_tokens, curve.hit_tokens(100), curve.knee()) == (0, 0, None)
    assert curve.points() == [CurvePoint(1, 0, 0.0)]
    assert exact_curve(columns([])).hit_rate(5) == 0.0


def test_json() -> None:
    data = staircase((2, 10), (5, 30)).to_json(most_points=2, block_bytes=4096)
    assert data == {
        "policy": "lru",
        "touch_order": "in-order",
        "unique_blocks": 50,
        "seconds": 0.0,
        "knee": {
            "capacity_blocks": 5, "hit_tokens": 30, "hit_rate": 0.3, "capacity_bytes": 20480,
        },
        "points": [
            {"capacity_blocks": 1, "hit_tokens": 0, "hit_rate": 0.0, "capacity_bytes": 4096},
            {"capacity_blocks": 5, "hit_tokens": 30, "hit_rate": 0.3, "capacity_bytes": 20480},
        ],
    }  # fmt: skip
    assert "capacity_bytes" not in staircase((2, 10)).to_json()["knee"]


def test_the_error_of_a_curve() -> None:
    exact = staircase((1, 10), (2, 20), (3, 30))
    error = curve_error(exact, staircase((1, 13), (3, 30)))
    assert error.mean_absolute_error == pytest.approx((0.03 + 0.07 + 0.0) / 3)
    assert error.max_absolute_error == pytest.approx(0.07)
    same = curve_error(exact, exact)
    assert (same.mean_absolute_error, same.max_absolute_error) == (0.0, 0.0)


@orders
@pytest.mark.parametrize(
    ("sampling", "mean", "largest"),
    [({"rate": 0.1}, 0.015, 0.06), ({"max_blocks": 8192}, 0.02, 0.06), ({"rate": 1.0}, 1e-4, 1e-3)],
)
def test_samples_of_the_conversation_trace(
    order: TouchOrder, sampling: dict[str, float], mean: float, largest: float
) -> None:
    exact = exact_curve(conversation(), touch_order=order)
    curve = sampled_curve(conversation(), touch_order=order, **sampling)  # type: ignore[arg-type]
    error = curve_error(exact, curve)
    assert error.mean_absolute_error < mean
    assert error.max_absolute_error < largest
    assert isinstance(curve.sample, Sample)
    assert curve.sample.blocks <= sampling.get("max_blocks", 182_790)
    assert curve.unique_blocks == pytest.approx(182_790, rel=0.05)
    assert curve.prompt_tokens == exact.prompt_tokens


@orders
@given(
    runs=st.lists(
        st.tuples(st.lists(st.integers(0, 15), max_size=8).map(tuple), st.integers(0, 60)),
        max_size=40,
    )
)
@settings(deadline=None)
def test_a_sample_of_everything_is_exact(order: TouchOrder, runs: Runs) -> None:
    exact = exact_curve(columns(runs), block_tokens=10, touch_order=order)
    sampled = sampled_curve(runs, block_tokens=10, touch_order=order)
    for capacity in range(18):
        assert sampled.hit_tokens(capacity) == exact.hit_tokens(capacity)
    assert (sampled.unique_blocks, sampled.prompt_tokens) == (
        exact.unique_blocks, exact.prompt_tokens,
    )  # fmt: skip


def test_seeds_choose_the_sample() -> None:
    runs: Runs = [(tuple(range(n % 50, n % 50 + 20)), 2000) for n in range(200)]
    curves = [sampled_curve(runs, rate=0.3, seed=seed, block_tokens=100) for seed in (1, 1, 2)]
    assert curves[0].tokens == curves[1].tokens != curves[2].tokens


def test_bad_samples() -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1, got 2"):
        sampled_curve([], rate=2.0)
    with pytest.raises(ValueError, match="at least one key, got 0"):
        sampled_curve([], max_blocks=0)
