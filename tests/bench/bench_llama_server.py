"""Time to the first token: llama-server alone, and behind `prefixd-llama-server`, in one run.

    LLAMA_SERVER=/path/to/llama-server python -m tests.bench.bench_llama_server model.gguf [letters]

Prints a table in milliseconds: the best and the median of `ROUNDS`, with a prompt of that many
letters. The daemon, the servers and their sockets are private.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.support.daemon import eventually, private_daemon
from tests.support.unix_http import Connection

ROUNDS: Final = 5
WITHIN_S: Final = 600.0
#: Tokens of a stream beside which other prompts are evaluated and saved.
_STREAMED: Final = 300
#: Of a prompt, what a diverging one has in common with it.
COMMON: Final = 0.88


def text(length: int, seed: int) -> str:
    letters = random.Random(seed)
    return "".join(chr(letters.randrange(97, 123)) for _ in range(length))


class Bench:
    """One server, with or without the wrapper."""

    def __init__(self, model: str, folder: Path, flags: list[str], daemon: str | None) -> None:
        self.listens = folder / f"{time.monotonic_ns()}.sock"
        command = [os.environ["LLAMA_SERVER"], "-m", model, "--host", str(self.listens), *flags]
        if daemon is not None:
            own = [sys.executable, "-m", "prefixd.client.llama_server", "--address", daemon]
            command = [*own, "--idle-save", "0.2", "--log-level", "warning", "--", *command]
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.listens.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(self._ready, WITHIN_S)

    def _ready(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.call("GET", "/health")[0] == 200
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = Connection(self.listens, WITHIN_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def first_token_ms(self, prompt: str, wanted: int = 4) -> float:
        """Milliseconds from the request to the first event of its stream."""
        body = {"prompt": prompt, "n_predict": wanted, "temperature": 0, "stream": True}
        connection = Connection(self.listens, WITHIN_S)
        began_s = time.perf_counter()
        connection.request("POST", "/completion", json.dumps(body))
        answer = connection.getresponse()
        answer.readline()
        took_s = time.perf_counter() - began_s
        answer.read()
        connection.close()
        return 1e3 * took_s

    def identified(self) -> bool:
        models = json.loads(self.call("GET", "/prefixd/stats")[1])["models"]
        return any(model["identity"] for model in models.values())

    def saved(self) -> bool:
        stats = json.loads(self.call("GET", "/prefixd/stats")[1])
        slots = [slot for model in stats["models"].values() for slot in model["slots"]]
        return not stats["pending_saves"] and all(
            slot["tokens"] - slot["saved"] < slot["tokens"] / 4
            for slot in slots
            if slot["tokens"] >= 512
        )


@contextmanager
def running(model: str, flags: list[str], daemon: str | None = None) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        bench = Bench(model, Path(folder), flags, daemon)
        bench.start()
        try:
            yield bench
        finally:
            bench.kill()


def measure(bench: Bench, letters: int, cached: bool) -> dict[str, list[float]]:
    """The cases of the table."""
    found: dict[str, list[float]] = {}

    def note(case: str, milliseconds: float) -> None:
        found.setdefault(case, []).append(milliseconds)

    def settle(condition: Callable[[], bool]) -> None:
        if cached:
            eventually(condition, WITHIN_S)

    def restart() -> None:
        bench.kill()
        bench.start()
        settle(bench.identified)

    settle(bench.identified)
    for number in range(ROUNDS):
        prompt = text(letters, number)
        note("cold", bench.first_token_ms(prompt))
        settle(bench.saved)
        note("same prompt, same process", bench.first_token_ms(prompt))
        restart()
        note("same prompt after kill -9", bench.first_token_ms(prompt))
        restart()
        kept = int(COMMON * letters)
        diverging = prompt[:kept] + text(letters - kept, 100 + number)
        note(f"diverging at {COMMON:.0%} after kill -9", bench.first_token_ms(diverging))
        settle(bench.saved)
    return found


def decode_speeds(bench: Bench, letters: int) -> tuple[float, float]:
    """Tokens per second of a stream, alone and while other slots are saved again and again."""

    def stream(wanted: int) -> float:
        body = {"prompt": "a", "n_predict": wanted, "temperature": 0, "ignore_eos": True}
        timings = json.loads(bench.call("POST", "/completion", body)[1])["timings"]
        return float(timings["predicted_per_second"])

    alone = stream(_STREAMED)
    stop = threading.Event()

    def others() -> None:
        number = 1_000
        while not stop.is_set():
            number += 1
            bench.first_token_ms(text(letters, number), 1)

    # What the other prompts cost without saves is in neither figure: compare with plain.
    thread = threading.Thread(target=others)
    thread.start()
    beside = stream(_STREAMED)
    stop.set()
    thread.join()
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file; $LLAMA_SERVER is the server")
    parser.add_argument("letters", type=int, nargs="?", default=2_944, help="of a prompt")
    arguments = parser.parse_args()
    model, letters = arguments.model, arguments.letters
    flags = ["-c", str(2 * letters), "-np", "1", "-t", "1"]
    columns: dict[str, dict[str, list[float]]] = {}
    speeds: dict[str, tuple[float, float]] = {}
    with private_daemon(ram="16MiB", shm="2GiB", disk="0") as daemon:
        for name, more, address in (
            ("llama-server, --cache-ram 0", ["--cache-ram", "0"], None),
            ("llama-server", [], None),
            ("prefixd-llama-server", [], daemon.address),
        ):
            with running(model, [*flags, *more], address) as bench:
                columns[name] = measure(bench, letters, address is not None)
            two = ["-c", str(4 * letters), "-np", "2", "-t", "1", *more]
            with running(model, two, address) as bench:
                speeds[name] = decode_speeds(bench, letters)
    sys.stdout.write(f"| first token, ms: best, median | {' | '.join(columns)} |\n")
    sys.stdout.write(f"| --- |{' ---: |' * len(columns)}\n")
    for case in columns["prefixd-llama-server"]:
        cells = (
            f"{min(c[case]):,.0f}, {statistics.median(c[case]):,.0f}" for c in columns.values()
        )
        sys.stdout.write(f"| {case} | {' | '.join(cells)} |\n")
    cells = (f"{alone:.0f}, {beside:.0f}" for alone, beside in speeds.values())
    sys.stdout.write(f"| tokens/s of a stream, beside other prompts | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
