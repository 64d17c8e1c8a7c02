"""Runs the fuzz tests in rounds, each with a new seed, for a given time.

    python -m tests.fuzz --minutes 30

Exit status 1: a test failed. The output of pytest has the example and how to repeat it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**32, help="of the first round"
    )
    parser.add_argument("--examples", type=int, default=300, help="of each test in a round")
    arguments = parser.parse_args()
    until_s = time.monotonic() + 60 * arguments.minutes
    environment = os.environ | {"PREFIXD_FUZZ_EXAMPLES": str(arguments.examples)}
    seed, failed = arguments.seed, 0
    while not failed and time.monotonic() < until_s:
        print(f"seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--timeout=0"]
        failed = subprocess.run(
            [*command, f"--hypothesis-seed={seed}", "tests/fuzz"], env=environment, check=False
        ).returncode
        seed += 1
    rounds = seed - arguments.seed
    print(f"{rounds} rounds of {arguments.examples} examples, {'failed' if failed else 'passed'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
