"""llama-server itself behind `prefixd-llama-server`, on small models that the tests make. By counts
of cached tokens, and with the answers of a plain llama-server that was warm.

The same prompt gives the same text. Where another part of it is evaluated in one go, llama-server's
own numbers differ a little, and random models have close seconds: then answers agree if their
probabilities do, up to the first close second.

`make engines-llama-server` runs this file with `$LLAMA_SERVER`, or with a server that it builds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prefixd.client.ctl.private import PrivateDaemon
from tests.engines.tiny_models import (
    write_gemma,
    write_gguf,
    write_hybrid,
    write_lora,
    write_mamba,
)
from tests.support.daemon import eventually, private_daemon
from tests.support.lengths import LONG
from tests.support.ports import free_ports
from tests.support.unix_http import Connection, call

pytest.importorskip("gguf")
SERVER = os.environ.get("LLAMA_SERVER", "")
if not SERVER or not Path(SERVER).exists():
    pytest.skip("$LLAMA_SERVER names no llama-server", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 300.0
#: Tokens.
LARGEST_BLOCK = 256
#: `PREFIXD_LONG=1`: as many kills as the page speaks of.
KILLS = 50 if LONG else 4
WRITERS: dict[str, Callable[[Path], None]] = {
    "plain": write_gguf,
    "other": lambda path: write_gguf(path, seed=8),
    "recurrent": write_mamba,
    "hybrid": write_hybrid,
    "windows": lambda path: write_gemma(path, window=256, layers=6),
    "only windows": lambda path: write_gemma(path, window=256),
}


#: Letters only: some builds fail on answers of a random model that are no UTF-8.
GREEDY: dict[str, Any] = {"temperature": 0, "grammar": "root ::= [a-z]+"}
#: Log probabilities that differ by less are close.
CLOSE = 0.25


class Answer(NamedTuple):
    """A greedy completion."""

    text: str
    #: The tokens.
    chosen: list[int]
    #: For each token, the likeliest ones and their log probabilities.
    likeliest: list[dict[int, float]]
    cached: int
    evaluated: int

    def agrees(self, expected: Answer) -> bool:
        pairs = zip(self.likeliest, expected.likeliest, strict=False)
        for number, (mine, theirs) in enumerate(pairs):
            for first, logprob in list(theirs.items())[:1]:  # drafted tokens have none
                if mine and abs(mine.get(first, -99.0) - logprob) > CLOSE:
                    return False
            if self.chosen[number] != expected.chosen[number]:
                return True  # a close second; what follows is another text
        return True


def text(length: int, seed: int) -> str:
    letters = random.Random(seed)
    return "".join(chr(letters.randrange(97, 123)) for _ in range(length))


P = text(1_500, 1)
DIVERGING = P[:1_300] + text(200, 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, write in WRITERS.items():
        write(folder / f"{name}.gguf")
    return folder


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="16MiB", shm="512MiB", disk="0") as daemon:
        yield daemon


class Server:
    """A llama-server, plain or behind the wrapper, on a Unix socket."""

    def __init__(self, command: list[str], own: list[str], folder: Path, log: Path) -> None:
        self._command, self._own, self._log = command, own, log
        self._listens = folder / "listens.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, listens: tuple[str, ...] = ("--host",)) -> None:
        """`listens`: the option before the path where it listens."""
        command = [*self._own, *self._command, *listens, str(self._listens)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._listens.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        eventually(self._ready, WITHIN_S)

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text(errors="replace")[-4_000:]
        with suppress(OSError):
            return self.call("GET", "/health")[0] == 200
        return False

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(WITHIN_S)
            self.process = None

    def restart(self, number: int = signal.SIGKILL) -> None:
        self.end(number)
        self.start()

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return call(self._listens, method, path, body, WITHIN_S)

    def ask(self, prompt: str, wanted: int = 8, **more: Any) -> Answer:
        body = {"prompt": prompt, "n_predict": wanted, "n_probs": 8, **GREEDY, **more}
        status, answer = self.call("POST", "/completion", body)
        assert status == 200, answer
        likeliest = [
            {each["id"]: each["logprob"] for each in token["top_logprobs"]}
            for token in answer["completion_probabilities"]
        ]
        chosen = [token["id"] for token in answer["completion_probabilities"]]
        timings = answer["timings"]
        return Answer(answer["content"], chosen, likeliest, timings["cache_n"], timings["prompt_n"])

    def begin(self, prompt: str) -> None:
        """Hang up after the first token of a stream."""
        connection = Connection(self._listens, WITHIN_S)
        body = {"prompt": prompt, "n_predict": 500, "stream": True, **GREEDY}
        connection.request("POST", "/completion", json.dumps(body))
        assert connection.getresponse().readline().startswith(b"data: ")
        connection.close()

    def stats(self) -> Any:
        return self.call("GET", "/prefixd/stats")[1]

    def settled(self) -> None:
        """Wait until every slot is saved as far as it will be."""
        eventually(self._saved, WITHIN_S)

    def _saved(self) -> bool:
        stats = self.stats()
        slots = [slot for model in stats["models"].values() for slot in model["slots"]]
        return not stats["pending_saves"] and all(
            not slot["busy"] and slot["tokens"] - slot["saved"] < slot["tokens"] / 4
            for slot in slots
            if slot["busy"] or slot["tokens"] >= 512
        )


@contextmanager
def server(
    models: Path, name: str | None, *flags: str, daemon: PrivateDaemon | None = None, slots: int = 1
) -> Iterator[Server]:
    """`name` None: the flags say where its models are."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp")))
        command = [
            *(SERVER, *(["-m", str(models / f"{name}.gguf")] if name else [])),
            *("-c", str(4_096 * slots)),
            *("-np", str(slots), "-t", "1", "-tb", "1", *flags),
        ]
        own = []
        if daemon is not None:
            wrapper = [sys.executable, "-m", "prefixd.client.llama_server"]
            own = [*wrapper, "--address", daemon.address, "--idle-save", "0.2", "--"]
        made = Server(command, own, folder, models / "log")
        made.start()
        stack.callback(made.end, signal.SIGKILL)
        yield made


def warm(models: Path, name: str, prompts: list[str], *flags: str, wanted: int = 8) -> list[Answer]:
    """What a plain server says when it has the prompt already."""
    with server(models, name, *flags) as plain:
        answers = []
        for prompt in prompts:
            plain.ask(prompt, wanted)
            answers.append(plain.ask(prompt, wanted))
        return answers


CASES = [
    ("plain",),
    ("plain", "-ctk", "q8_0", "-ctv", "q8_0"),
    ("plain", "-fa", "off"),
    ("recurrent",),
    ("hybrid",),
    ("windows",),
    ("windows", "--swa-full"),
    ("only windows",),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_prompts_survive_the_server(
    daemon: PrivateDaemon, models: Path, case: tuple[str, ...]
) -> None:
    name, *flags = case
    prompts = [P, DIVERGING, P[:700], P]
    expected = warm(models, name, prompts, *flags)
    with server(models, name, *flags, daemon=daemon) as cached:
        first = cached.ask(P)
        assert first.agrees(expected[0])
        assert (first.cached + first.evaluated) == expected[0].cached + expected[0].evaluated
        cached.settled()
        cached.restart()
        again = cached.ask(P)
        stats = cached.stats()
        assert stats["requests"] == {"restored": 1}, stats
        assert (again.text, again.evaluated) == (expected[0].text, 1)
        cached.restart()
        # After a restore, prompts that share less of it, and the first one again.
        cached.ask(P)
        for prompt, answer in zip(prompts[1:], expected[1:], strict=True):
            assert cached.ask(prompt).agrees(answer)
        cached.settled()
        cached.restart()
        last = cached.ask(DIVERGING)
        assert last.agrees(expected[1])
        assert last.cached >= 1_280, "the blocks before, or its own state"


def test_blocks_are_shared_whatever_the_number_of_slots(
    daemon: PrivateDaemon, models: Path
) -> None:
    (expected,) = warm(models, "plain", [P])
    with server(models, "plain", "--no-kv-unified", daemon=daemon, slots=3) as one:
        one.ask(P)
        one.settled()
    with server(models, "plain", "--kv-unified", daemon=daemon, slots=2) as two:
        answer = two.ask(P)
        assert (answer.text, answer.evaluated) == (expected.text, 1)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("other", []),
        ("plain", ["--rope-freq-base", "20000"]),
        ("plain", ["--rope-freq-scale", "0.5"]),
        ("plain", ["-ctk", "q8_0"]),
    ],
)
def test_foreign_states_are_never_restored(
    daemon: PrivateDaemon, models: Path, name: str, flags: list[str]
) -> None:
    (expected,) = warm(models, name, [P], *flags)
    with server(models, "plain", daemon=daemon) as one:
        one.ask(P)
        one.settled()
    with server(models, name, *flags, daemon=daemon) as two:
        answer = two.ask(P)
        assert answer.cached == 0
        assert answer.agrees(expected)


def test_a_router_of_several_models(daemon: PrivateDaemon, models: Path, tmp_path: Path) -> None:
    for name in ("plain", "hybrid"):
        (tmp_path / f"{name}.gguf").symlink_to(models / f"{name}.gguf")
    with server(models, None, "--models-dir", str(tmp_path), daemon=daemon) as cached:
        before = {name: cached.ask(P, model=name) for name in ("plain", "hybrid")}
        cached.settled()
        cached.restart()
        for name, answer in before.items():
            again = cached.ask(P, model=name)
            assert again.evaluated == 1
            assert again.agrees(answer)
        assert cached.stats()["requests"] == {"restored": 2}


def test_chats_in_turn_with_a_summary_that_takes_the_slot(
    daemon: PrivateDaemon, models: Path
) -> None:
    """The agents' pattern: a turn evaluates what is new, and at most a block."""
    with server(models, "plain", daemon=daemon) as cached:
        chat: list[dict[str, str]] = []

        def turn(messages: list[dict[str, str]]) -> tuple[str, str, int]:
            """The prompt, the answer, and how many tokens were evaluated."""
            status, made = cached.call("POST", "/apply-template", {"messages": messages})
            assert status == 200, made
            body = {"messages": messages, "max_tokens": 16, **GREEDY}
            status, answer = cached.call("POST", "/v1/chat/completions", body)
            assert status == 200, answer
            said = answer["choices"][0]["message"]["content"]
            return made["prompt"], said, answer["timings"]["prompt_n"]

        def tokens(prompt: str) -> list[int]:
            body = {"content": prompt, "add_special": True, "parse_special": True}
            return list(cached.call("POST", "/tokenize", body)[1]["tokens"])

        known: list[int] = []
        for number in range(4):
            chat.append({"role": "user", "content": text(100 if number else 3_000, 10 + number)})
            prompt, answer, evaluated = turn(chat)
            chat.append({"role": "assistant", "content": answer})
            if known:
                seen = tokens(prompt)
                common = sum(
                    1
                    for _ in takewhile(lambda two: two[0] == two[1], zip(known, seen, strict=False))
                )
                assert common > 2_900, "the template keeps what was said"
                new = len(seen) - common
                assert evaluated <= new + LARGEST_BLOCK, f"turn {number}: {evaluated} of {new} new"
            known = tokens(prompt + answer)
            turn([{"role": "user", "content": "Summarise: " + text(700, 20 + number)}])


def test_twelve_conversations_at_six_a_time_on_four_slots(
    daemon: PrivateDaemon, models: Path
) -> None:
    prompts = [text(700, seed) for seed in range(100, 112)]
    expected = warm(models, "plain", prompts)
    with (
        server(models, "plain", daemon=daemon, slots=4) as cached,
        ThreadPoolExecutor(6) as six,
    ):
        for _ in range(2):
            answers = list(six.map(cached.ask, prompts))
            assert all(one.agrees(other) for one, other in zip(answers, expected, strict=True))
        assert sum(answer.cached for answer in answers) >= 0.9 * 12 * 700


def test_streams_that_are_cancelled(daemon: PrivateDaemon, models: Path) -> None:
    prompts = [text(1_000, 300 + number) for number in range(4)]
    expected = warm(models, "plain", prompts)
    with server(models, "plain", daemon=daemon, slots=2) as cached, ThreadPoolExecutor(4) as four:
        list(four.map(cached.begin, prompts))
        cached.settled()
        cached.restart()
        for prompt, answer in zip(prompts, expected, strict=True):
            again = cached.ask(prompt)
            assert again.agrees(answer)
            assert again.cached >= 768, "its blocks"


def test_adapters_of_the_server_and_of_a_request(daemon: PrivateDaemon, models: Path) -> None:
    write_lora(models / "lora.gguf", 3)
    flags = ["--lora", str(models / "lora.gguf")]
    half = [{"id": 0, "scale": 0.5}]
    with server(models, "plain", *flags) as plain:
        plain.ask(P)
        one = plain.ask(P)
    with server(models, "plain", *flags) as plain:
        plain.call("POST", "/lora-adapters", half)
        plain.ask(P)
        other = plain.ask(P)
    assert not one.agrees(other)
    with server(models, "plain", *flags, daemon=daemon) as cached:
        assert cached.ask(P).agrees(one)
        cached.settled()
        # Of one request: what it leaves is for nobody.
        assert cached.ask(P, lora=half).agrees(other)
        again = cached.ask(P)
        assert (again.text, again.evaluated) == (one.text, 1)
        # Of all from now on.
        cached.call("POST", "/lora-adapters", half)
        answer = cached.ask(P)
        assert answer.agrees(other)
        assert answer.cached == 0
        cached.settled()
        cached.call("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}])
        again = cached.ask(P)
        assert (again.text, again.evaluated) == (one.text, 1)
        cached.call("POST", "/lora-adapters", half)
        assert cached.ask(P).evaluated == 1


def test_a_draft_model(daemon: PrivateDaemon, models: Path) -> None:
    long = text(2_600, 11)
    flags = ["-md", str(models / "plain.gguf")]
    if "--spec-type" in subprocess.run([SERVER, "--help"], capture_output=True, text=True).stdout:
        flags += ["--spec-type", "draft-simple"]
    expected, _ = warm(models, "plain", [long, P], *flags)
    with server(models, "plain", *flags, daemon=daemon) as cached:
        cached.ask(long)
        cached.settled()
        cached.ask(P)
        cached.settled()
        cached.restart()
        again = cached.ask(long)
        assert again.agrees(expected)
        assert again.evaluated == 1
        cached.restart()
        assert cached.ask(P).cached == 0
        assert cached.stats()["missed"] == {"small gain": 1}


def test_before_a_server_that_somebody_else_started(
    daemon: PrivateDaemon, models: Path, tmp_path: Path
) -> None:
    (expected,) = warm(models, "plain", [P])
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    (port,) = free_ports(1)
    command = [SERVER, "-m", str(models / "plain.gguf"), "-c", "4096", "-np", "1", "-t", "1"]
    command += ["--port", str(port), "--slot-save-path", str(slots), "--cache-ram", "0"]
    wrapper = [sys.executable, "-m", "prefixd.client.llama_server", "--address", daemon.address]
    wrapper += ["--upstream", f"http://127.0.0.1:{port}", "--slots", str(slots)]
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder, ExitStack() as stack:
        own = [*wrapper, "--idle-save", "0.2", "--listen"]
        cached = Server([], own, Path(folder), models / "log")

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        server = start()
        stack.callback(cached.end, signal.SIGKILL)
        cached.start(listens=())
        assert cached.ask(P).agrees(expected)
        cached.settled()
        server.kill()
        server.wait()
        start()
        eventually(cached._ready, WITHIN_S)
        again = cached.ask(P)
        assert (again.text, again.evaluated) == (expected.text, 1)
        # The wrapper alone.
        cached.end(signal.SIGKILL)
        cached.start(listens=())
        assert cached.ask(P).evaluated == 1
        assert not list(slots.iterdir())


def test_kills_at_random_moments(models: Path) -> None:
    """Of the server with its wrapper, and of the daemon. No answer is another one, and afterwards
    everything works."""
    prompts = [text(600 + 50 * seed, 200 + seed) for seed in range(4)]
    expected = dict(zip(prompts, warm(models, "plain", prompts, wanted=24), strict=True))
    moments = random.Random(5)
    with (
        private_daemon(ram="16MiB", shm="128MiB", disk="0") as own,
        server(models, "plain", daemon=own, slots=2) as cached,
    ):
        wrong: list[str] = []
        for kill in range(2 * KILLS):
            answered = threading.Event()

            def ask(prompt: str, answered: threading.Event = answered) -> None:
                with suppress(OSError, AssertionError, ValueError, KeyError):
                    if not cached.ask(prompt, 24).agrees(expected[prompt]):
                        wrong.append(prompt)
                answered.set()

            threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
            for thread in threads:
                thread.start()
            answered.wait(moments.random())
            if kill % 2:
                own.kill()
                own.start()
            else:
                cached.restart()
            for thread in threads:
                thread.join()
            assert not wrong
        for prompt in prompts:
            assert cached.ask(prompt, 24).agrees(expected[prompt])
