"""Measures the cost of tracing, off and on.

    python tests/bench/bench_tracing.py --turns 100 --base ../before

`--base` is another checkout, with its own `.venv`, to compare with (default: this one with tracing
off). Three daemons run at once, and 20 calls of each take turns. Prints medians, and the median
ratios of the turns. Spans are created but not exported.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
BLOCKS, BLOCK_BYTES, CALLS = 48, 4000, 20
OPERATIONS = ("walk", "claim and release", "restore", "save ram", "save shm")


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "big")).digest()


def serve(mode: str, checkout: str) -> None:
    """Run a daemon and a client of a checkout, and time the operations that are read from stdin."""
    sys.path.insert(0, checkout)
    from prefixd.client import Client, SaveItem, Tier
    from tests.support.daemon import private_daemon

    flags: tuple[str, ...] = ()
    traced: dict[str, Any] = {}
    if mode == "on":
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        os.environ["OTEL_TRACES_EXPORTER"] = "none"
        trace.set_tracer_provider(TracerProvider())
        flags, traced = ("--server.tracing=otel",), {"tracing": True}
    with (
        private_daemon(*flags, ram="64MiB", shm="64MiB", disk="0") as daemon,
        Client(daemon.address, **traced) as client,
    ):
        client.wait_connected(deadline_ms=60_000)
        keys = [key(number) for number in range(BLOCKS)]
        payload = os.urandom(BLOCK_BYTES)
        saved = client.save_many([SaveItem(key, payload, 16) for key in keys], tier=Tier.RAM)
        assert all(outcome.ok for outcome in saved), saved
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        hit = client.longest_run(keys, claim=False)
        numbers = iter(range(BLOCKS, 2**62))

        def save(tier: Tier) -> None:
            client.save(key(next(numbers)), payload, tier=tier)

        calls: tuple[Callable[[], object], ...] = (
            lambda: client.longest_run(keys, claim=False),
            lambda: client.longest_run(keys).release(),
            lambda: hit.restore_into(buffers),
            lambda: save(Tier.RAM),
            lambda: save(Tier.SHM),
        )
        gc.disable()
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            call = calls[int(line)]
            took_us = []
            for _ in range(CALLS):
                began_ns = time.perf_counter_ns()
                call()
                took_us.append((time.perf_counter_ns() - began_ns) / 1e3)
            print(json.dumps(took_us), flush=True)


class Child:
    def __init__(self, mode: str, checkout: Path) -> None:
        python = checkout / ".venv/bin/python"
        self._process = subprocess.Popen(
            [
                str(python) if checkout != HERE else sys.executable,
                *(__file__, "--serve", mode, str(checkout)),
            ],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready", "the daemon did not start"
        self.took_us: list[float] = []

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline() or "null")

    def turn(self, operation: int) -> float:
        """The median of 20 calls."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{operation}\n")
        self._process.stdin.flush()
        took_us = self._read()
        self.took_us += took_us
        return statistics.median(took_us)

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--base", type=Path, default=HERE)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    children = {
        mode: Child(mode, arguments.base.resolve() if mode == "base" else HERE)
        for mode in ("base", "off", "on")
    }
    print(f"{'':18}" + "".join(f"{mode + ' us':>10}{'ratio':>8}" for mode in children))
    for operation, name in enumerate(OPERATIONS):
        ratios: dict[str, list[float]] = {mode: [] for mode in children}
        for child in children.values():
            child.took_us = []
        for turn in range(arguments.turns):
            order = [*children]
            order = order[turn % len(order) :] + order[: turn % len(order)]
            medians_us = {mode: children[mode].turn(operation) for mode in order}
            for mode, median_us in medians_us.items():
                ratios[mode].append(median_us / medians_us["base"])
        print(
            f"{name:18}"
            + "".join(
                f"{statistics.median(child.took_us):10.1f}{statistics.median(ratios[mode]):8.3f}"
                for mode, child in children.items()
            ),
            flush=True,
        )
    for child in children.values():
        child.close()


if __name__ == "__main__":
    main()
