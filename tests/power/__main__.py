"""Records daemons, and starts daemons on the files that power losses may have left.

    python -m tests.power --losses 200

Prints the results as JSON. Exit status 1: an acknowledged entry was lost, wrong bytes were served,
or a start failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from .losses import Losses, Report, record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--losses", type=int, default=200)
    parser.add_argument("--operations", type=int, default=120, help="recorded client operations")
    parser.add_argument(
        "--recordings",
        type=int,
        default=2,
        help="number of recordings that the losses are divided among",
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    arguments = parser.parse_args()
    rng, begun_s, report = random.Random(arguments.seed), time.monotonic(), Report()
    for number in range(arguments.recordings):
        losses = Losses(record(rng, arguments.operations), rng)
        each = arguments.losses // arguments.recordings
        losses.by_daemon(each + (number < arguments.losses % arguments.recordings), again_each=4)
        report.counts += losses.report.counts
        report.problems += losses.report.problems
    run = {"seed": arguments.seed, "took_s": round(time.monotonic() - begun_s)}
    json.dump({**run, **report.counts, "problems": report.problems}, sys.stdout, indent=2)
    print()
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
