"""Time to the first token: llama-server alone, and behind `prefixd-llama-server`, in one run.

    LLAMA_SERVER=/path/to/llama-server python -m tests.bench.bench_llama_server [--model FILE]

Prints a table in milliseconds: the best and the median of the rounds, and the median of the ratios
to the first server, in each round by turns, as other work on the machine is never the same. Without
a model it makes one of 19 million parameters, in which late tokens cost twice the average, as most
of the work is attention. `--layers 8 --feed-forward 4096` has 27 million, and attention has a share
as in large models. The daemon, the servers and their sockets are private.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.engines.tiny_models import write_gguf
from tests.support.daemon import eventually, private_daemon
from tests.support.unix_http import Connection

ROUNDS: Final = 5
WITHIN_S: Final = 600.0
#: Tokens of a stream beside which other prompts are evaluated and saved. It gets few while one of
#: them is evaluated, so they are shorter.
_STREAMED: Final = 100
_BESIDE: Final = 768
#: Letters only: some builds fail on answers of a random model that are no UTF-8.
GREEDY: Final = {"temperature": 0, "grammar": "root ::= [a-z]+"}
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
        self._command, self._cached = command, daemon is not None
        self._process: subprocess.Popen[bytes] | None = None
        #: What llama-server itself says that it took to evaluate the last prompt.
        self.evaluated_ms = 0.0

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
        body = {"prompt": prompt, "n_predict": wanted, **GREEDY, "stream": True}
        connection = Connection(self.listens, WITHIN_S)
        began_s = time.perf_counter()
        connection.request("POST", "/completion", json.dumps(body))
        answer = connection.getresponse()
        answer.readline()
        took_ms = 1e3 * (time.perf_counter() - began_s)
        last = [line for line in answer.read().splitlines() if line][-1]
        connection.close()
        self.evaluated_ms = json.loads(last.removeprefix(b"data: "))["timings"]["prompt_ms"]
        return took_ms

    def settle(self, condition: Callable[[], bool]) -> None:
        """Wait for the cache, if there is one."""
        if self._cached:
            eventually(condition, WITHIN_S)

    def identified(self) -> bool:
        models = json.loads(self.call("GET", "/prefixd/stats")[1])["models"]
        return any(model["identity"] for model in models.values())

    def saved(self) -> bool:
        stats = json.loads(self.call("GET", "/prefixd/stats")[1])
        slots = [slot for model in stats["models"].values() for slot in model["slots"]]
        return not stats["pending_saves"] and all(
            not slot["busy"] and slot["tokens"] - slot["saved"] < slot["tokens"] / 4
            for slot in slots
            if slot["busy"] or slot["tokens"] >= 512
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


Times = dict[str, list[float]]


def measure(benches: dict[str, Bench], letters: int, rounds: int) -> dict[str, Times]:
    """The cases of the table, of each server."""
    found: dict[str, Times] = {name: {} for name in benches}

    def by_turns(case: str, prompt: str, number: int, *, killed: bool) -> None:
        names = list(benches)
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            bench = benches[name]
            if killed:
                bench.kill()
                bench.start()
                bench.settle(bench.identified)
            took_ms = bench.first_token_ms(prompt)
            found[name].setdefault(case, []).append(took_ms)
            if case == "cold":
                # How fast a process evaluates is its own luck; nothing of it is the wrapper's.
                beside = found[name].setdefault("cold, beside the server's own evaluation", [])
                beside.append(took_ms - bench.evaluated_ms)
            bench.settle(bench.saved)

    for bench in benches.values():
        bench.settle(bench.identified)
    kept = int(COMMON * letters)
    for number in range(rounds):
        prompt = text(letters, number)
        by_turns("cold", prompt, number, killed=False)
        by_turns("same prompt, same process", prompt, number, killed=False)
        # What a server has in its slot costs it nothing: no cache can be faster than that.
        case = f"another end, behind {COMMON:.0%} of it"
        one, other = (prompt[:kept] + text(letters - kept, seed + number) for seed in (100, 200))
        by_turns(f"{case}, same process", one, number, killed=False)
        by_turns("same prompt after `kill -9`", prompt, number, killed=True)
        by_turns(f"{case}, after `kill -9`", other, number, killed=True)
    return found


def decode_speeds(bench: Bench) -> tuple[float, float]:
    """Tokens per second of a stream, alone and while other slots are saved again and again."""

    def stream(wanted: int) -> float:
        body = {"prompt": "a", "n_predict": wanted, **GREEDY, "ignore_eos": True}
        timings = json.loads(bench.call("POST", "/completion", body)[1])["timings"]
        return float(timings["predicted_per_second"])

    alone = stream(_STREAMED)
    stop = threading.Event()

    def others() -> None:
        number = 1_000
        while not stop.is_set():
            number += 1
            bench.first_token_ms(text(_BESIDE, number), 1)

    # What the other prompts cost without saves is in neither figure: compare with plain.
    thread = threading.Thread(target=others)
    thread.start()
    beside = stream(_STREAMED)
    stop.set()
    thread.join()
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a GGUF file; without one it makes one")
    parser.add_argument("--layers", type=int, default=32, help="of the model that it makes")
    parser.add_argument("--feed-forward", type=int, default=512, help="their width, there")
    parser.add_argument("--letters", type=int, default=2_944, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    letters = arguments.letters
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-")))
        model = arguments.model
        if model is None:
            model = str(folder / "model.gguf")
            write_gguf(Path(model), layers=arguments.layers, feed_forward=arguments.feed_forward)
        daemon = stack.enter_context(private_daemon(ram="16MiB", shm="2GiB", disk="0"))
        kinds: list[tuple[str, list[str], str | None]] = [
            ("llama-server, --cache-ram 0", ["--cache-ram", "0"], None),
            ("llama-server", [], None),
            ("prefixd-llama-server", [], daemon.address),
        ]
        flags = ["-t", "1", "-np", "1", "-c", str(2 * letters)]
        with ExitStack() as servers:
            benches = {
                name: servers.enter_context(running(model, [*flags, *more], address))
                for name, more, address in kinds
            }
            columns = measure(benches, letters, arguments.rounds)
        _print_times(columns)
        speeds = {}
        for name, more, address in kinds:
            two = ["-t", "1", "-np", "2", "-c", str(4 * letters), *more]
            with running(model, two, address) as bench:
                bench.settle(bench.identified)
                speeds[name] = decode_speeds(bench)
    cells = [f"{alone:.0f}, {beside:.0f}" for alone, beside in speeds.values()]
    _print_rows([["tokens/s of a stream, beside other prompts", *cells]])


def _print_times(columns: dict[str, Times]) -> None:
    first, *_ = columns.values()
    rows = [["first token, ms: best, median, ratio", *columns], ["---", *["---:"] * len(columns)]]
    for case, base in first.items():
        cells = []
        for times in columns.values():
            ratios = [one / other for one, other in zip(times[case], base, strict=True)]
            median = statistics.median(times[case])
            cells.append(f"{min(times[case]):,.0f}, {median:,.0f}, {statistics.median(ratios):.3f}")
        rows.append([case, *cells])
    _print_rows(rows)


def _print_rows(rows: list[list[str]]) -> None:
    sys.stdout.writelines(f"| {' | '.join(row)} |\n" for row in rows)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
