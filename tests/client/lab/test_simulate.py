"""The offline replay: known results of the conversation trace, and the rules by hand."""

from __future__ import annotations

import multiprocessing
import os
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.client.lab import simulate
from prefixd.client.lab.simulate import (
    Cell,
    ReplayResult,
    TouchOrder,
    available_jobs,
    replay,
    replay_all,
)
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader
from prefixd.tiers.eviction import POLICIES, make_policy
from tests.support.lengths import times

CAPACITIES = (1_000, 4_096, 10_000, 30_000)
#: Hit tokens at these capacities, from two independent implementations that agree.
KNOWN = {
    "lru": (6_567_267, 12_923_638, 31_174_981, 48_088_108),
    "lfu": (7_100_235, 12_730_662, 19_455_609, 40_735_565),
    "fifo": (6_403_037, 12_325_933, 26_788_951, 43_466_251),
    "s3fifo": (7_689_987, 15_168_640, 26_360_914, 34_279_112),
    "arc": (7_807_942, 14_408_401, 32_797_932, 45_871_555),
}
ROOT_MRU_GAIN = (8_192, 46_592, 64_000, 5_632)
S3FIFO_RESIDENT = (752, 4_096, 10_000, 30_000)


@cache
def conversation() -> TraceColumns:
    folder = os.environ.get("PREFIXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces"
    path = Path(folder) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("needs conversation_trace.jsonl (set PREFIXD_TRACES to its folder)")
    return TraceColumns.load(TraceReader(path))


def columns(*runs: tuple[tuple[int, ...], int]) -> TraceColumns:
    return TraceColumns.load(Request(0, length, 1, ids) for ids, length in runs)


def hits(trace: TraceColumns, cell: Cell, block_tokens: int = 10) -> list[int]:
    result = replay(trace, cell, block_tokens=block_tokens, per_request=True)
    assert result.per_request is not None
    assert sum(result.per_request[1]) == result.total_hit_tokens
    return result.per_request[1].tolist()


def test_the_conversation_trace_in_numbers() -> None:
    summary = conversation().summary(512)
    assert (summary.requests, summary.blocks, summary.unique_blocks) == (12_031, 288_500, 182_790)
    assert (summary.prompt_tokens, summary.infinite_hit_tokens) == (144_793_823, 54_098_411)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("policy", list(KNOWN))
def test_known_results(policy: str, at: int) -> None:
    capacity = CAPACITIES[at]
    result = replay(conversation(), Cell(policy, capacity))
    assert result.total_hit_tokens == KNOWN[policy][at]
    assert result.total_prompt_tokens == 144_793_823
    assert result.accesses == 288_500
    resident = S3FIFO_RESIDENT[at] if policy == "s3fifo" else capacity
    assert result.final_cache_blocks == resident


@pytest.mark.parametrize("at", range(4))
def test_known_gains_of_touching_the_root_last(at: int) -> None:
    result = replay(conversation(), Cell("lru", CAPACITIES[at], TouchOrder.ROOT_MRU))
    assert result.total_hit_tokens == KNOWN["lru"][at] + ROOT_MRU_GAIN[at]


def test_a_request_hits_its_longest_resident_beginning() -> None:
    trace = columns(((1, 2, 3, 4), 40), ((1, 2, 9, 4), 40), ((8, 2, 3), 30))
    assert hits(trace, Cell("lru", 100)) == [0, 20, 0]


def test_hits_are_looked_up_before_anything_is_admitted() -> None:
    trace = columns(((1, 1, 1), 30), ((1, 1, 2, 1), 40))
    assert hits(trace, Cell("lru", 100)) == [0, 20]
    assert replay(trace, Cell("lru", 100)).queue_moves == 7  # each is still accessed


def test_hit_tokens_end_at_the_prompt() -> None:
    trace = columns(((1, 2, 3), 25), ((1, 2, 3), 25), ((1, 2, 3), 0))
    assert hits(trace, Cell("fifo", 3)) == [0, 25, 0]


def test_a_request_can_evict_its_own_beginning() -> None:
    trace = columns(((1, 2, 3), 30), ((1, 2, 3), 30))
    assert hits(trace, Cell("lru", 2)) == [0, 0]
    assert hits(trace, Cell("lru", 2, TouchOrder.ROOT_MRU)) == [0, 20]


def test_no_ids_hit_nothing_and_their_tokens_count() -> None:
    trace = columns(((), 70), ((1,), 10), ((1,), 10))
    result = replay(trace, Cell("lru", 1), block_tokens=10)
    assert (result.total_hit_tokens, result.total_prompt_tokens) == (10, 90)
    assert result.overall_hit_rate == pytest.approx(1 / 9)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_capacity_zero_admits_nothing(policy: str) -> None:
    trace = columns(((1, 2), 20), ((1, 2), 20))
    result = replay(trace, Cell(policy, 0), per_request=True)
    assert (result.total_hit_tokens, result.final_cache_blocks) == (0, 0)
    assert (result.evictions, result.ghost_blocks, result.queue_moves) == (0, 0, 0)
    assert (result.accesses, result.total_prompt_tokens) == (4, 40)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_an_empty_trace(policy: str) -> None:
    result = replay(columns(), Cell(policy, 5), per_request=True)
    assert (
        result.overall_hit_rate,
        result.moves_per_access,
        result.hit_tokens_percentiles["p90"],
    ) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "arc"])
def test_room_for_everything_hits_what_an_unlimited_cache_hits(policy: str) -> None:
    trace = conversation()
    result = replay(trace, Cell(policy, trace.unique_blocks + 1))
    assert result.total_hit_tokens == trace.summary(512).infinite_hit_tokens
    assert (result.evictions, result.final_cache_blocks) == (0, trace.unique_blocks)


runs = st.lists(
    st.tuples(st.lists(st.integers(0, 14), max_size=8).map(tuple), st.integers(0, 60)), max_size=40
)


@pytest.mark.parametrize("policy", list(POLICIES))
@given(runs=runs, capacity=st.integers(0, 12), order=st.sampled_from(TouchOrder))
@settings(deadline=None, max_examples=times(30, 300))
def test_equals_the_rules_taken_literally(
    policy: str, runs: list[tuple[tuple[int, ...], int]], capacity: int, order: TouchOrder
) -> None:
    cache = make_policy(policy, capacity)
    wanted, evictions = [], 0
    for ids, length in runs:
        found = 0
        while found < len(ids) and ids[found] in cache:
            found += 1
        wanted.append(min(found * 10, length))
        for key in ids if order is TouchOrder.IN_ORDER else ids[::-1]:
            before = set(cache.keys())
            cache.access(key)
            evictions += len(before - set(cache.keys()))
    trace, cell = columns(*runs), Cell(policy, capacity, order)
    assert hits(trace, cell) == wanted
    result = replay(trace, cell, block_tokens=10)
    assert (result.evictions, result.final_cache_blocks) == (evictions, len(cache))
    assert (result.ghost_blocks, result.queue_moves) == (cache.ghosts, cache.moves)
    assert result.hit_tokens_percentiles["p50"] == (
        sorted(wanted)[(len(wanted) - 1) // 2] if wanted else 0
    )


def test_ghosts_that_are_hit_again_and_again_take_no_more_room() -> None:
    """Of S3-FIFO, whose replay leaves them in their queue."""
    chance, cache = random.Random(3), make_policy("s3fifo", 10)
    runs = [((chance.randrange(18),), 10) for _ in range(20_000)]
    for ids, _ in runs:
        cache.access(ids[0])
    result = replay(columns(*runs), Cell("s3fifo", 10))
    assert result.ghost_blocks == cache.ghosts > 0
    assert (result.final_cache_blocks, result.queue_moves) == (len(cache), cache.moves)


def test_percentiles_are_nearest_ranks() -> None:
    lengths = [20, 40, 10, 30]
    found = replay(columns(*(((7,), length) for length in [5, *lengths])), Cell("lru", 1))
    assert found.hit_tokens_percentiles == {"p10": 0, "p50": 20, "p90": 40}
    assert replay(columns(), Cell("lru", 1)).hit_tokens_percentiles == dict.fromkeys(
        ("p10", "p50", "p90"), 0
    )


def test_bad_cells() -> None:
    with pytest.raises(ValueError, match="unknown policy 'mru', known are lru"):
        Cell("mru", 1)
    with pytest.raises(ValueError, match="must not be negative, got -4"):
        Cell("lru", -4)
    with pytest.raises(ValueError, match="at least one token, got 0"):
        replay(columns(), Cell("lru", 1), block_tokens=0)


def without_seconds(results: dict[int, ReplayResult]) -> dict[int, dict[str, object]]:
    return {index: {**result.to_json(), "seconds": None} for index, result in results.items()}


def test_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_WORTH_A_PROCESS", 1)
    trace = columns(*((tuple(range(n % 7, n % 7 + 5)), 50) for n in range(60)))
    cells = [Cell(p, c, o) for o in TouchOrder for c in (3, 6) for p in ("lru", "s3fifo", "arc")]
    here = dict(replay_all(trace, cells, block_tokens=10, per_request=True))
    there = dict(replay_all(trace, cells, block_tokens=10, per_request=True, jobs=2))
    assert [result.cell for result in here.values()] == cells
    assert without_seconds(there) == without_seconds(here)
    assert not multiprocessing.active_children()
    assert available_jobs() >= 1


def test_the_json_document() -> None:
    trace = columns(((1, 2), 20), ((1, 2, 3), 25))
    assert trace.summary(10).to_json() == {
        "requests": 2,
        "blocks": 5,
        "unique_blocks": 3,
        "prompt_tokens": 45,
        "infinite_hit_tokens": 20,
        "infinite_hit_rate": 20 / 45,
    }
    entry = replay(trace, Cell("lru", 3), block_tokens=10, per_request=True).to_json()
    assert entry.pop("seconds") > 0
    assert entry == {
        "policy": "lru",
        "capacity_blocks": 3,
        "touch_order": "in-order",
        "total_hit_tokens": 20,
        "total_prompt_tokens": 45,
        "overall_hit_rate": 20 / 45,
        "final_cache_blocks": 3,
        "evictions": 0,
        "ghost_blocks": 0,
        "accesses": 5,
        "hit_tokens_per_request": {"p10": 0, "p50": 0, "p90": 20},
        "queue_moves": 5,
        "moves_per_access": 1.0,
        "per_request": [
            {"prompt_tokens": 20, "hit_tokens": 0},
            {"prompt_tokens": 25, "hit_tokens": 20},
        ],
    }
    short = replay(trace, Cell("lru", 3), block_tokens=10)
    assert "per_request" not in short.to_json()
