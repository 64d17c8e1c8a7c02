"""Kills, stops and damages real workers and a real daemon at random moments.

    python -m tests.hostile.nemesis --kill-daemon 300 --kill-worker 300 --stop-worker 200 \
        --flip 10000

Prints the results as JSON. Exit status 1: a read returned wrong bytes, an acknowledged entry was
lost, a client raised an exception, or a daemon did not start or died by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from .run import Faults, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.nemesis", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--workers", type=int, default=8)
    for fault, many in Faults()._asdict().items():
        flag = f"--{fault.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=many, metavar="TIMES")
    arguments = parser.parse_args()
    faults = Faults(**{name: getattr(arguments, name) for name in Faults._fields})
    report = run(random.Random(arguments.seed), faults, workers=arguments.workers)
    json.dump({"seed": arguments.seed} | report.as_dict(), sys.stdout, indent=2)
    print()
    sys.exit(1 if report.harm else 0)


if __name__ == "__main__":
    main()
