"""Measures a daemon's memory under each flood of `tests/hostile/test_floods.py`.

    python tests/bench/bench_floods.py

Prints for each flood the memory before (without tiers), the largest growth, the configured bound
for the flood, and the memory afterwards.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.hostile import test_floods

MIB = 2**20


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{'MiB':66}{'before':>8}{'grew by':>9}{'bound':>7}{'after':>7}")
    for name, flood in vars(test_floods).items():
        if not name.startswith("test_"):
            continue
        begin = len(test_floods.WATCHED)
        flood()
        for watch in test_floods.WATCHED[begin:]:
            print(
                f"{name.removeprefix('test_'):66}{watch.before_bytes / MIB:8.1f}"
                f"{watch.grown_bytes / MIB:9.1f}{watch.bound_bytes / MIB:7.0f}"
                f"{watch.after_bytes / MIB:7.1f}"
            )


if __name__ == "__main__":
    main()
