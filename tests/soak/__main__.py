"""Runs clients on a daemon for a time, and compares the last tenth of it with the second.

    python -m tests.soak --minutes 60

Prints the tenths as JSON. Exit status 1: a resource grew, an operation got slower, wrong bytes were
read, or the daemon's accounting is wrong at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack

from tests.support.daemon import private_daemon, problems_of

from .samples import TENTHS, Tenth, growth, sample
from .work import Worker


def soak(minutes: float, workers: int, pause_s: float, samples: int = 20) -> dict[str, object]:
    """Run once, taking this many `samples` in each tenth."""
    tenths = [Tenth() for _ in range(TENTHS)]
    begun_s = time.monotonic()
    length_s = 60 * minutes
    lock, waiting = threading.Lock(), threading.Event()

    def note(operation: str, took_s: float) -> None:
        number = int(TENTHS * (time.monotonic() - begun_s) / length_s)
        with lock:
            tenths[min(number, TENTHS - 1)].took_s.setdefault(operation, []).append(took_s)

    with ExitStack() as stack:
        daemon = stack.enter_context(private_daemon(ram="8MiB", shm="8MiB", disk="16MiB"))
        directories = [daemon.directory / "disk", daemon.shm_directory]
        begun_s = time.monotonic()
        clients = [Worker(daemon.address, seed, pause_s, note) for seed in range(workers)]
        for worker in clients:
            worker.start()
            stack.callback(worker.stop)
        for number in range(TENTHS * samples):
            waiting.wait(
                max(0.0, begun_s + (number + 1) * length_s / (TENTHS * samples) - time.monotonic())
            )
            tenths[number // samples].samples.append(sample(daemon.pid, directories))
        for worker in clients:
            worker.stop()
        with daemon.admin() as admin:
            problems = problems_of(admin)
    return {
        "minutes": minutes,
        "operations": dict(sum((worker.counts for worker in clients), Counter())),
        "tenths": [tenth.as_dict() for tenth in tenths],
        "grew": growth(tenths),
        "wrong": [name for worker in clients for name in worker.wrong],
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=5.0, help="between two operations")
    arguments = parser.parse_args()
    report = soak(arguments.minutes, arguments.workers, arguments.pause_ms / 1000)
    json.dump(report, sys.stdout, indent=2)
    print()
    sys.exit(bool(report["grew"] or report["wrong"] or report["problems"]))


if __name__ == "__main__":
    main()
