"""Simulated daemons and clients, from seeds.

    python -m tests.sim --seed 17 --runs 1000

A seed that breaks a promise is printed, with the promise and with the fewest steps found that
still break it. Exit status 1: there was one.
"""

from __future__ import annotations

import argparse
import sys
import time

from .bugs import BUGS, planted
from .plan import STEPS, plan_of
from .run import Outcome, run
from .shrink import shrink


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--runs", type=int, default=1, help="seeds from there on")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of clients in each")
    parser.add_argument("--bug", choices=BUGS, help="plant it first; to end at what finds it")
    arguments = parser.parse_args()
    begun_s, counts = time.monotonic(), dict[str, int]()
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        outcome = _run(seed, arguments.steps, arguments.bug)
        for what, many in outcome.counts.items():
            counts[what] = counts.get(what, 0) + many
        if outcome.failure is not None:
            failed += 1
            if arguments.bug:
                break
    for what in sorted(counts):
        print(f"{counts[what]:10} {what}")
    print(f"{arguments.runs} seeds, {failed} failed, {time.monotonic() - begun_s:.0f} s")
    sys.exit(1 if failed else 0)


def _run(seed: int, steps: int, bug: str | None) -> Outcome:
    if bug is not None:
        with planted(bug):
            return _told(run(plan_of(seed, steps)))
    return _told(run(plan_of(seed, steps)))


def _told(outcome: Outcome) -> Outcome:
    if outcome.failure is None:
        return outcome
    smallest = shrink(outcome)
    print(f"seed {outcome.plan.seed}: {outcome.failure}")
    print(f"with {len(smallest.plan.steps)} of {len(outcome.plan.steps)} steps: {smallest.failure}")
    print(smallest.plan)
    return outcome


if __name__ == "__main__":
    main()
