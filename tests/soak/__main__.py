"""Runs clients on a daemon for a time, and compares the last tenth of it with the one in which the
tenth minute ends, or with the second.

    python -m tests.soak --minutes 60 --reconnects 10000 --kills 1000

Clients are closed and opened again, and processes that hold claims, views and half a save are
killed, in an even pace. Prints the tenths as JSON, and what the daemon still holds when all clients
have left. Each tenth is also a line of stderr when it ends, for a run that is cut off. Exit status
1: a resource grew, an operation got slower, wrong bytes were read, something is left, or
the daemon's accounting is wrong at the end.
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

from .killed import Killed
from .samples import TENTHS, Tenth, growth, left, sample, settled
from .work import Worker

_LEFT_WITHIN_S = 60.0


def soak(
    minutes: float,
    workers: int,
    pause_s: float,
    samples: int = 20,
    *,
    reconnects: int = 0,
    kills: int = 0,
) -> dict[str, object]:
    """Run once, taking this many `samples` in each tenth. 0 `reconnects`: after some hundred
    operations each."""
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
        life_s = length_s * workers / reconnects if reconnects else None
        clients = [Worker(daemon.address, seed, pause_s, note, life_s) for seed in range(workers)]
        killed = Killed(daemon.address, length_s / kills if kills else None)
        for worker in (*clients, killed):
            worker.start()
            stack.callback(worker.stop)
        for number in range(TENTHS * samples):
            waiting.wait(
                max(0.0, begun_s + (number + 1) * length_s / (TENTHS * samples) - time.monotonic())
            )
            tenth = tenths[number // samples]
            tenth.samples.append(sample(daemon.pid, directories))
            if len(tenth.samples) == samples:
                with lock:
                    print(json.dumps(tenth.as_dict()), file=sys.stderr, flush=True)
        for worker in (*clients, killed):
            worker.stop()
        with daemon.admin() as admin:
            remains = left(admin, _LEFT_WITHIN_S)
            problems = problems_of(admin)
    return {
        "minutes": minutes,
        "operations": dict(sum((worker.counts for worker in clients), Counter())),
        "killed": killed.count,
        "tenths": [tenth.as_dict() for tenth in tenths],
        "compared with": settled(minutes) + 1,
        "grew": growth(tenths, settled(minutes)),
        "left": remains,
        "wrong": [name for worker in clients for name in worker.wrong],
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pause-ms", type=float, default=5.0, help="between two operations")
    parser.add_argument("--reconnects", type=int, default=0, help="of all workers together")
    parser.add_argument("--kills", type=int, default=0, help="of processes with a client")
    arguments = parser.parse_args()
    report = soak(
        arguments.minutes,
        arguments.workers,
        arguments.pause_ms / 1000,
        reconnects=arguments.reconnects,
        kills=arguments.kills,
    )
    json.dump(report, sys.stdout, indent=2)
    print()
    sys.exit(any(report[name] for name in ("grew", "wrong", "left", "problems")))


if __name__ == "__main__":
    main()
