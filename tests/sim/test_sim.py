"""The seeds that run with every change, determinism of runs, and shrinking."""

from __future__ import annotations

import pytest

from tests.sim.bugs import planted
from tests.sim.plan import NEMESIS, plan_of
from tests.sim.run import run
from tests.sim.shrink import shrink
from tests.support.lengths import times

#: Divided among the parallel test workers. `make sim` runs more.
SEEDS = times(40, 1_000)
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_promise_is_broken(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = run(plan_of(seed))
        if outcome.failure is not None:
            smallest = shrink(outcome)
            pytest.fail(f"{outcome.failure}\n{smallest.failure}\n{smallest.plan}")


def test_a_seed_determines_everything() -> None:
    """A seed always gives the same plan and the same order of events."""
    for seed in range(8):
        assert plan_of(seed) == plan_of(seed)
        one, other = run(plan_of(seed)), run(plan_of(seed))
        assert (one.digest, one.counts) == (other.digest, other.counts)


def test_a_failing_plan_is_made_smaller() -> None:
    """The smaller plan breaks the same promise and has only the steps that it needs."""
    with planted("stale secret accepted"):
        outcome = next(o for o in map(run, map(plan_of, range(500))) if o.failure is not None)
        smallest = shrink(outcome)
    assert outcome.failure is not None
    assert smallest.failure is not None
    assert smallest.failure.promise == outcome.failure.promise
    assert "forge" in [step.kind for step in smallest.plan.steps]
    assert len(smallest.plan.steps) <= 3
    assert run(smallest.plan).failure is None


def test_a_plan_can_do_without_any_step() -> None:
    plan = plan_of(3)
    for step in plan.steps:
        assert step not in plan.without([step]).steps
    assert run(plan.without(plan.steps)).failure is None
    assert {step.actor for step in plan.steps} - {NEMESIS} <= {"client0", "client1", "client2"}
