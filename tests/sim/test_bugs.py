"""Every planted bug is found, by few seeds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from tests.sim.bugs import BUGS, planted
from tests.sim.plan import plan_of
from tests.sim.run import Outcome, run

#: What a bug may take to be found.
MOST_SEEDS = 500
#: A seed that found it, to begin with: an edit anywhere may make it another one.
FOUND_BY = {
    "budget arithmetic": 2,
    "publish before verify": 7,
    "record before data sync": 28,
    "missed waiter": 54,
    "room reused while its row stands": 3,
    "row removed after reuse": 3,
    "stale secret accepted": 8,
    "pin leak": 44,
    "wrong restart order": 1,
    "swallowed task death": 45,
    "damage taken for failure": 388,
    "failure taken for damage": 334,
    "incarnation not checked": 52,
}


def tried(seeds: Iterable[int]) -> Outcome | None:
    return next((o for o in map(run, map(plan_of, seeds)) if o.failure is not None), None)


def test_each_has_its_seed() -> None:
    assert FOUND_BY.keys() == BUGS.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        outcome = tried(chain([FOUND_BY[name]], range(MOST_SEEDS)))
    assert outcome is not None, f"{name}: {MOST_SEEDS} seeds did not find it"
    assert outcome.failure is not None
    # It is the bug that was found.
    assert run(outcome.plan).failure is None
