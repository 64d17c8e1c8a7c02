"""Measures how calls end whose disk hangs: a real device (`tests/support/hanging_device`), root.

    python tests/bench/bench_hangs.py                # every call of the API, and 1,000 buffers
    python tests/bench/bench_hangs.py --buffers 0    # the calls only

Each call gets a client of its own, whose entries are not in the page cache. The device hangs, the
call is made, and the device answers again once it has ended. A line has the longest time of a call
beyond its deadline, and for asyncio the longest time for which the event loop stood still.

Then restores are given up, by their deadline or by cancelling them, while the device hangs. Their
buffers are filled with something else, the device answers, and what it still had to bring must
change none of their bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.every_call import ENTRIES, OnHangingDisk, on_hanging_disk


def calls(disk: OnHangingDisk, deadline_ms: int) -> bool:
    """Whether every call ended."""
    good = True
    for local in (True, False):
        for asynchronous in (False, True):
            ends = list(disk.ends(deadline_ms, local=local, asynchronous=asynchronous))
            good &= all(end.took_s is not None for end in ends)
            late = sorted(ends, key=lambda end: -(end.took_s or 1e9))
            line = {
                "transport": "local" if local else "TCP",
                "asyncio": asynchronous,
                "calls": len(ends),
                "deadline_ms": deadline_ms,
                "longest_ms": {end.name: round((end.took_s or 1e9) * 1e3, 1) for end in late[:6]},
                "loop_still_ms": round(max(end.still_s for end in ends) * 1e3, 1),
                "raised": [f"{end.name}: {end.what}" for end in ends if "raised" in end.what],
            }
            print(json.dumps(line), flush=True)
    return good


def buffers(disk: OnHangingDisk, rounds: int) -> bool:
    """Whether no byte of a buffer changed."""
    chance = random.Random(1)
    with disk.client(5_000, local=True) as client:
        keys = disk.entries(client, ENTRIES)
        changed = sum(not disk.reuse(client, keys, chance) for _ in range(rounds))
    print(json.dumps({"restores_given_up": rounds, "buffers_that_changed": changed}), flush=True)
    return not changed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deadline-ms", type=int, default=300)
    parser.add_argument("--buffers", type=int, default=1000)
    arguments = parser.parse_args()
    with on_hanging_disk() as disk:
        good = calls(disk, arguments.deadline_ms)
        good &= buffers(disk, arguments.buffers)
    sys.exit(not good)


if __name__ == "__main__":
    main()
