"""Shrinks a failing plan to fewer steps that still break the same promise."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.plan import Plan
from tests.sim.run import Outcome, run

#: The most runs for shrinking one plan.
_MOST_RUNS = 150


def shrink(
    failed: Outcome, most_runs: int = _MOST_RUNS, run: Callable[[Plan], Outcome] = run
) -> Outcome:
    """The outcome of the smallest plan found that breaks the same promise as `failed`."""
    assert failed.failure is not None
    promise, best = failed.failure.promise, failed
    size = len(best.plan.steps) // 2
    while size:
        at = 0
        while at < len(best.plan.steps):
            if not most_runs:
                return best
            most_runs -= 1
            outcome = run(best.plan.without(best.plan.steps[at : at + size]))
            if outcome.failure is not None and outcome.failure.promise == promise:
                best = outcome
            else:
                at += size
        size //= 2
    return best
