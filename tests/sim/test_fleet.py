"""Simulated fleets: deletes reach every node, determinism, and planted bugs that are found."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.sim.bugs import FLEET_BUGS, planted
from tests.sim.fleet import fleet_plan_of, run_fleet
from tests.sim.shrink import shrink
from tests.support.lengths import times

#: Divided among the parallel test workers. `make sim-fleet` runs more.
SEEDS = times(16, 400)
AT_ONCE = 8
#: The most seeds that finding a bug may take, and one that found it, tried first.
MOST_SEEDS = 1000
FOUND_BY = {"lost deletes stay lost": 115, "claimed stays": 1}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_promise_is_broken(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = run_fleet(fleet_plan_of(seed))
        if outcome.failure is not None:
            smallest = shrink(outcome, run=run_fleet)
            pytest.fail(f"{outcome.failure}\n{smallest.failure}\n{smallest.plan}")


def test_a_seed_determines_everything() -> None:
    for seed in range(4):
        plan = fleet_plan_of(seed)
        assert plan == fleet_plan_of(seed)
        one, other = run_fleet(plan), run_fleet(plan)
        assert (one.digest, one.counts) == (other.digest, other.counts)


def test_each_has_its_seed() -> None:
    assert FOUND_BY.keys() == FLEET_BUGS.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FLEET_BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        seeds = chain([FOUND_BY[name]], range(MOST_SEEDS))
        outcomes = (run_fleet(fleet_plan_of(seed)) for seed in seeds)
        outcome = next((each for each in outcomes if each.failure is not None), None)
    assert outcome is not None, f"{name}: {MOST_SEEDS} seeds did not find it"
    # Without the bug, the seed passes.
    assert run_fleet(outcome.plan).failure is None
