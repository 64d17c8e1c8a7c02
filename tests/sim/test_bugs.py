"""The simulation finds every planted bug within a few seeds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.plan import plan_of
from tests.sim.run import Outcome, run

#: The most seeds that finding a bug may take.
MOST_SEEDS = 1000
#: A seed that found each bug, tried first. Any edit of the code may change which seeds do.
FOUND_BY = {
    "budget arithmetic": 14,
    "publish before verify": 14,
    "record before data sync": 40,
    "missed waiter": 328,
    "room reused while its row stands": 0,
    "row removed after reuse": 0,
    "stale secret accepted": 8,
    "pin leak": 46,
    "wrong restart order": 0,
    "swallowed task death": 457,
    "damage taken for failure": 7,
    "failure taken for damage": 669,
    "saves while it recovers": 31,
    "record outlives its entry": 7,
    "batch believed for its first": 103,
    "incarnation not checked": 708,
    "beyond the budget is dropped": 28,
    "wrong end evicted at a start": 28,
    "tier decides": 356,
    "deleted before it is durable": 64,
    "deletes of a recovery are forgotten": 1839,
    "hung tier is not marked": 121,
    "clock is believed": 7718,
    "device awaited by the caller": 322,
    "buffer filled after its call": 322,
    "arenas of the dead are kept": 0,
}


def first_failure(seeds: Iterable[int]) -> Outcome | None:
    return next((o for o in map(run, map(plan_of, seeds)) if o.failure is not None), None)


def test_each_has_its_seed() -> None:
    assert FOUND_BY.keys() == BUGS.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        outcome = first_failure(chain([FOUND_BY[name]], range(MOST_SEEDS)))
    assert outcome is not None, f"{name}: {MOST_SEEDS} seeds did not find it"
    assert outcome.failure is not None
    # Without the bug, the seed passes.
    assert run(outcome.plan).failure is None
