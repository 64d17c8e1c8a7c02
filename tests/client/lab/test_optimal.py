"""The optimum against every choice that a cache has, on small traces; and its known values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from prefixd.client.lab.optimal import OPTIMAL, Optimum
from prefixd.client.lab.simulate import Cell, replay
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader
from prefixd.tiers.eviction import POLICIES

TRACE = Path(__file__).parents[3].parent / "shared" / "traces" / "conversation_trace.jsonl"


def columns(prompts: Sequence[Sequence[int]], block_tokens: int = 1) -> TraceColumns:
    return TraceColumns.load(
        Request(n, len(ids) * block_tokens, 0, tuple(ids)) for n, ids in enumerate(prompts)
    )


def best_by_trying_everything(prompts: Sequence[tuple[int, ...]], capacity: int) -> int:
    """The most blocks that are hit in prefixes, over every set that a cache may keep after every
    request."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(prompts):
            return 0
        hits = 0
        while hits < len(prompts[at]) and prompts[at][hits] in held:
            hits += 1
        could_hold = held | set(prompts[at])
        # Holding more is never worse, so only the largest sets are tried.
        most = min(capacity, len(could_hold))
        return hits + max(best(at + 1, frozenset(kept)) for kept in combinations(could_hold, most))

    return best(0, frozenset())


def small_trace(rng: random.Random) -> list[tuple[int, ...]]:
    """Prompts that walk down a random tree, whose nodes are the blocks."""
    children: dict[int, list[int]] = {}
    prompts = []
    nodes = 0
    for _ in range(rng.randint(2, 7)):
        at, prompt = -1, []
        for _ in range(rng.randint(1, 4)):
            below = children.setdefault(at, [])
            if not below or (nodes < 7 and rng.random() < 0.35):
                if nodes == 8:
                    break
                below.append(nodes)
                nodes += 1
            at = rng.choice(below)
            prompt.append(at)
        prompts.append(tuple(prompt))
    return prompts


def test_it_is_the_best_of_all_choices_on_1000_small_traces() -> None:
    rng = random.Random(5)
    below_unlimited = 0
    for _ in range(1000):
        prompts = small_trace(rng)
        trace = columns(prompts)
        assert trace.collisions == 0
        optimum = Optimum(trace)
        unlimited = sum(optimum.hits(100)[0])
        for capacity in range(4):
            hits, kept, _ = optimum.hits(capacity)
            assert sum(hits) == best_by_trying_everything(prompts, capacity), (prompts, capacity)
            assert kept <= capacity
            below_unlimited += sum(hits) < unlimited
    assert below_unlimited > 1000


def test_no_policy_hits_more_even_where_ids_are_no_prefixes() -> None:
    rng = random.Random(6)
    for _ in range(200):
        prompts = [
            tuple(rng.randrange(12) for _ in range(rng.randint(0, 6)))
            for _ in range(rng.randint(1, 40))
        ]
        trace = columns(prompts, 4)
        for capacity in (0, 1, 3, 8, 20):
            best = replay(trace, Cell(OPTIMAL, capacity), block_tokens=4).total_hit_tokens
            for policy in POLICIES:
                found = replay(trace, Cell(policy, capacity), block_tokens=4)
                assert found.total_hit_tokens <= best, (prompts, policy, capacity)


def test_an_unlimited_optimum_hits_what_an_unlimited_cache_hits() -> None:
    rng = random.Random(7)
    for _ in range(100):
        trace = columns(small_trace(rng), 16)
        found = replay(trace, Cell(OPTIMAL, trace.unique_blocks), block_tokens=16)
        assert found.total_hit_tokens == trace.summary(16).infinite_hit_tokens


@pytest.mark.skipif(not TRACE.is_file(), reason=f"needs {TRACE}")
def test_the_conversation_trace() -> None:
    trace = TraceColumns.load(TraceReader(TRACE))
    found = {n: replay(trace, Cell(OPTIMAL, n)) for n in (1_409, 11_275)}
    assert f"{found[1_409].overall_hit_rate:.3f}" == "0.226"
    assert found[11_275].total_hit_tokens == trace.summary(512).infinite_hit_tokens == 54_098_411
