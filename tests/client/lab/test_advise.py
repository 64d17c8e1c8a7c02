"""The advice on memory: checked against a replay that shares nothing with the code."""

import tomllib
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from prefixd.client.lab.advise import (
    advise,
    model_bytes_per_token,
    reordered,
    smallest_capacity,
    stored_block_bytes,
)
from prefixd.client.lab.trace import Request
from prefixd.client.lab.workloads import generate

TOKENS = 8
MIB = 1 << 20


class SlowCurve:
    """LRU hit tokens, by replaying a list for each capacity."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = list(requests)
        self._known: dict[int, int] = {}
        self.unique_blocks = len({b for r in self._requests for b in r.hash_ids})
        self.prompt_tokens = sum(r.input_length for r in self._requests)

    def hit_tokens(self, capacity_blocks: int) -> int:
        if capacity_blocks not in self._known:
            self._known[capacity_blocks] = self._replay(capacity_blocks)
        return self._known[capacity_blocks]

    def _replay(self, capacity: int) -> int:
        order: dict[int, None] = {}
        total = 0
        for request in self._requests:
            run = 0
            while run < len(request.hash_ids) and request.hash_ids[run] in order:
                run += 1
            total += min(run * TOKENS, request.input_length)
            for block in request.hash_ids if capacity else ():
                order.pop(block, None)
                order[block] = None
                if len(order) > capacity:
                    del order[next(iter(order))]
        return total


def trace(requests: int = 300, seed: int = 1) -> list[Request]:
    """Returning sessions: a tree of prompts, in random order."""
    random = Random(seed)
    prompts: list[tuple[int, ...]] = [(0,)]
    for block in range(1, 60):
        parent = random.choice(prompts)
        prompts.append((*parent, block))
    return [
        Request(100 * n, TOKENS * len(ids), 1, ids)
        for n, ids in enumerate(random.choices(prompts, k=requests))
    ]


def advice(**arguments: Any) -> dict[str, Any]:
    options = {"bytes_per_token": MIB // TOKENS, "block_tokens": TOKENS, **arguments}
    return advise(trace(), **options).to_json()


def test_the_capacity_is_the_smallest_that_hits_enough() -> None:
    curve = SlowCurve(trace())
    for wanted in (0.0, 0.1, 0.5, 0.8):
        found = advice(hit_rate=wanted)
        capacity = found["capacity_blocks"]
        assert found["hit_rate"] >= wanted
        assert found["hit_rate"] == curve.hit_tokens(capacity) / curve.prompt_tokens
        assert not capacity or curve.hit_tokens(capacity - 1) < wanted * curve.prompt_tokens


def test_a_fraction_of_the_best() -> None:
    found = advice(fraction_of_best=0.9)
    assert found["wanted_hit_rate"] == pytest.approx(0.9 * found["best_hit_rate"])
    assert found["hit_rate"] >= found["wanted_hit_rate"]
    whole = advice(fraction_of_best=1.0)
    assert whole["hit_rate"] == whole["best_hit_rate"]
    assert whole["capacity_blocks"] <= whole["unique_blocks"] == 60


def test_a_share_that_was_counted_is_found_again() -> None:
    curve = SlowCurve(trace())
    for capacity in range(curve.unique_blocks + 1):
        tokens = curve.hit_tokens(capacity)
        found = smallest_capacity(curve, tokens / curve.prompt_tokens)
        assert curve.hit_tokens(found) == tokens


def test_working_set_headroom_and_budget() -> None:
    found = advice(hit_rate=0.5)
    assert found["stored_block_bytes"] == MIB
    working_set = found["capacity_blocks"] * found["stored_block_bytes"]
    assert found["working_set_bytes"] == working_set
    assert found["headroom"] == 0.2
    assert found["budget_bytes"] % MIB == 0
    assert 1.2 * working_set <= found["budget_bytes"] < 1.2 * working_set + MIB
    assert stored_block_bytes(1) == 64 << 10
    assert stored_block_bytes(MIB + 1) == MIB + (64 << 10)


def test_without_limits_everything_is_ram() -> None:
    found = advice(hit_rate=0.5)
    budgets = {tier["tier"]: tier["budget_bytes"] for tier in found["tiers"]}
    assert budgets == {"ram": found["budget_bytes"], "shm": 0, "disk": 0}
    assert found["missing_bytes"] == 0
    assert found["tiers"][0]["limit_bytes"] is None
    assert found["split_hit_rate"] == pytest.approx(found["hit_rate"])


def test_the_fastest_tier_is_filled_first() -> None:
    limits = {"ram": 10 * MIB + 17, "disk": 1 << 40}
    found = advice(hit_rate=0.7, limits=limits)
    ram, shm, disk = found["tiers"]
    assert ram["budget_bytes"] == 10 * MIB  # whole MiB within the limit
    assert shm["budget_bytes"] == 0
    assert disk["budget_bytes"] == found["budget_bytes"] - 10 * MIB
    assert sum(tier["save_share"] for tier in found["tiers"]) == pytest.approx(1)
    assert ram["save_share"] == pytest.approx(10 * MIB / found["budget_bytes"])
    curve = SlowCurve(trace())
    alone = int(10 * MIB / 1.2) // found["stored_block_bytes"]
    expected = curve.hit_tokens(alone) / curve.prompt_tokens
    assert ram["hit_rate_up_to_here"] == shm["hit_rate_up_to_here"] == expected
    assert disk["hit_rate_up_to_here"] == pytest.approx(found["hit_rate"], abs=0.02)


def test_limits_that_are_too_small_are_said() -> None:
    found = advice(hit_rate=0.7, limits={"ram": 5 * MIB, "shm": 3 * MIB})
    assert [tier["budget_bytes"] for tier in found["tiers"]] == [5 * MIB, 3 * MIB, 0]
    assert found["missing_bytes"] == found["budget_bytes"] - 8 * MIB
    assert found["tiers"][2]["hit_rate_up_to_here"] < 0.7
    nothing = advice(hit_rate=0.7, limits={"ram": 0})
    assert nothing["split_hit_rate"] == 0
    assert nothing["missing_bytes"] == nothing["budget_bytes"]


def test_divided_by_key_the_tiers_act_as_one_cache() -> None:
    """The trace has enough blocks for a random division to be even."""
    requests = list(generate("multi-turn", requests=1500, seed=2))
    found = advise(
        requests,
        bytes_per_token=2048,
        hit_rate=0.8,
        limits={"ram": 200 * MIB, "shm": 200 * MIB, "disk": 1 << 40},
    )
    assert all(tier.budget_bytes for tier in found.tiers)
    assert found.split_hit_rate == pytest.approx(found.hit_rate, abs=0.02)


def test_the_snippet_is_what_the_daemon_reads() -> None:
    found = advice(hit_rate=0.7, limits={"ram": 10 * MIB, "disk": 1 << 40})
    budgets = {name: table["budget"] for name, table in tomllib.loads(found["toml"]).items()}
    left = found["budget_bytes"] // MIB - 10
    assert budgets == {"ram": "10MiB", "shm": "0", "disk": f"{left}MiB"}
    huge = advise(trace(), bytes_per_token=1 << 40, block_tokens=TOKENS, limits={"ram": 5 << 30})
    assert tomllib.loads(huge.to_toml())["ram"]["budget"] == "5GiB"


def test_reordering_sorts_within_windows_only() -> None:
    requests = [
        Request(t, 16, 1, ids)
        for t, ids in [(0, (3, 1)), (5, (1, 2)), (9, (3, 0)), (10, (0, 9)), (25, (7,)), (25, (2,))]
    ]
    assert [r.hash_ids for r in reordered(requests, 10)] == [
        (1, 2), (3, 0), (3, 1), (0, 9), (2,), (7,),
    ]  # fmt: skip
    assert list(reordered(requests[:4], 0)) == requests[:4]
    assert sorted(map(repr, reordered(trace(), 700))) == sorted(map(repr, trace()))


def test_what_reordering_adds_is_measured() -> None:
    found = advice(hit_rate=0.5, window_ms=5000)
    capacity = found["capacity_blocks"]
    sorted_curve = SlowCurve(reordered(trace(), 5000))
    in_order = SlowCurve(trace()).hit_tokens(capacity)
    reorder = found["reorder"]
    assert reorder["hit_tokens"] == sorted_curve.hit_tokens(capacity)
    assert reorder["added_hit_tokens"] == reorder["hit_tokens"] - in_order > 0
    fewer = reorder["same_hit_rate_capacity_blocks"]
    assert sorted_curve.hit_tokens(fewer) >= in_order > sorted_curve.hit_tokens(fewer - 1)
    nothing = advice(hit_rate=0.5, window_ms=0)["reorder"]
    assert nothing["added_hit_tokens"] == 0


def test_an_empty_prompt_trace_needs_nothing() -> None:
    found = advise([Request(0, 0, 1, ())], bytes_per_token=1)
    assert (found.capacity_blocks, found.budget_bytes, found.hit_rate) == (0, 0, 0)
    assert found.split_hit_rate == found.reorder.hit_rate == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"hit_rate": 0.99}, r"no cache hits 99.00 % of this trace; without any limit one hits \d"),
        ({"hit_rate": 1.5}, "a hit rate is between 0 and 1, got 1.5"),
        ({"hit_rate": -0.1}, "a hit rate is between 0 and 1"),
        ({"fraction_of_best": 1.1}, "a fraction is between 0 and 1, got 1.1"),
        ({"bytes_per_token": 0}, "at least 1"),
        ({"window_ms": -1}, "a window must not be negative"),
        ({"limits": {"tape": 1}}, "there is no tier tape"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        advice(**arguments)


def test_model_shapes() -> None:
    assert model_bytes_per_token("32,8,128,2") == 131_072
    assert model_bytes_per_token("80, 8, 128, 0.5") == 81_920
    for text in ("", "32", "32,8,128", "32,8,128,2,1", "a,b,c,d", "0,8,128,2", "32,8,128,0"):
        with pytest.raises(ValueError, match="is no model shape"):
            model_bytes_per_token(text)
