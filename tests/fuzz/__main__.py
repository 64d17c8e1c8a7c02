"""Fuzzing for so many minutes, round by round, each with another seed.

    python -m tests.fuzz --minutes 30

Exit status 1: something was found; what pytest printed has the example and how to repeat it.
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
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of round one")
    parser.add_argument("--examples", type=int, default=300, help="of each test, a round")
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
    print(f"{rounds} rounds of {arguments.examples} examples, {'found' if failed else 'nothing'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
