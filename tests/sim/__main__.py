"""Runs simulated daemons and clients, each run from a seed; with --fleet, nodes that share.

    python -m tests.sim --seed 17 --runs 1000

Prints each seed that breaks a promise, with the promise and the fewest steps found that still
break it. Exit status 1: a seed broke a promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext

from .bugs import BUGS, FLEET_BUGS, planted
from .fleet import fleet_plan_of, run_fleet
from .plan import plan_of
from .run import Outcome, run
from .shrink import shrink


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, help="client steps in each run")
    parser.add_argument("--fleet", action="store_true", help="several nodes on one engine")
    parser.add_argument(
        "--bug",
        choices=BUGS | FLEET_BUGS,
        help="plant this bug, and stop at the first seed that finds it",
    )
    arguments = parser.parse_args()
    begun_s, counts = time.monotonic(), dict[str, int]()
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        outcome = _run(seed, arguments)
        for name, count in outcome.counts.items():
            counts[name] = counts.get(name, 0) + count
        if outcome.failure is not None:
            failed += 1
            if arguments.bug:
                break
    for name in sorted(counts):
        print(f"{counts[name]:10} {name}")
    print(f"{arguments.runs} seeds, {failed} failed, {time.monotonic() - begun_s:.0f} s")
    sys.exit(1 if failed else 0)


def _run(seed: int, arguments: argparse.Namespace) -> Outcome:
    run_plan = run_fleet if arguments.fleet else run
    plan_a_run = fleet_plan_of if arguments.fleet else plan_of
    plan = plan_a_run(seed, arguments.steps) if arguments.steps else plan_a_run(seed)
    with planted(arguments.bug) if arguments.bug else nullcontext():
        outcome = run_plan(plan)
        if outcome.failure is not None:
            _report(outcome, shrink(outcome, run=run_plan))
    return outcome


def _report(outcome: Outcome, smallest: Outcome) -> None:
    print(f"seed {outcome.plan.seed}: {outcome.failure}")
    print(f"with {len(smallest.plan.steps)} of {len(outcome.plan.steps)} steps: {smallest.failure}")
    print(smallest.plan)


if __name__ == "__main__":
    main()
