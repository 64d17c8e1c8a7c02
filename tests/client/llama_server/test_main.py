"""The wrapper in the place of llama-server: where it listens, signals, exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.llama_server.main import run
from tests.support.daemon import WITHIN_S, eventually
from tests.support.unix_http import call
from tests.support.warm import WARM

ROOT = Path(__file__).resolve().parents[3]
WRAPPER = ("-m", "prefixd.client.llama_server")
P = "".join(chr(97 + (n * n + 7 * n) % 26) for n in range(1_000))


@contextmanager
def wrapper(
    daemon: PrivateDaemon, tmp_path: Path, *server: str, own: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The running wrapper, and the socket where it listens in the place of its server."""
    listens = tmp_path / "listens.sock"
    command = [
        *(*WARM, *WRAPPER, "--address", daemon.address, "--min-tokens", "64", *own, "--"),
        *(sys.executable, "-m", "tests.support.fake_llama"),
        *("--host", str(listens), "--tell", str(tmp_path / "told"), *server),
    ]
    # llama-server's first argument is its program; this one has three.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    try:
        yield process, listens
    finally:
        process.kill()
        process.communicate()


def ready(listens: Path) -> bool:
    try:
        return call(listens, "GET", "/health")[0] == 200
    except OSError:
        return False


def told(tmp_path: Path) -> tuple[int, Path]:
    """The signal that the server got, and its folder."""
    number, folder = (tmp_path / "told").read_text().split()
    return int(number), Path(folder)


def test_sigterm_saves_and_is_passed_on(daemon: PrivateDaemon, tmp_path: Path) -> None:
    own = ("--idle-save", "3600")
    prompt = {"prompt": P, "n_predict": 4}
    with wrapper(daemon, tmp_path, "-m", "term", "--exit", "7", own=own) as (process, listens):
        eventually(lambda: ready(listens))
        status, answer = call(listens, "POST", "/completion", prompt)
        assert status == 200
        grown = {"prompt": P + "more of it, " * 10, "n_predict": 4}
        _, answer = call(listens, "POST", "/completion", grown)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 7
    number, folder = told(tmp_path)
    assert number == signal.SIGTERM
    assert not folder.exists()
    with wrapper(daemon, tmp_path, "-m", "term", own=own) as (_, listens):
        eventually(lambda: ready(listens))
        _, again = call(listens, "POST", "/completion", grown)
        assert again["content"] == answer["content"]
        assert again["timings"]["prompt_n"] == 1
        _, stats = call(listens, "GET", "/prefixd/stats")
        assert stats["requests"] == {"restored": 1}


def test_the_status_of_a_server_that_ends_by_itself(daemon: PrivateDaemon, tmp_path: Path) -> None:
    with wrapper(daemon, tmp_path, "--exit", "3") as (process, listens):
        eventually(lambda: ready(listens))
        call(listens, "POST", "/exit")
        assert process.wait(WITHIN_S) == 3
    assert not told(tmp_path)[1].exists()


def test_other_signals_are_passed_on(daemon: PrivateDaemon, tmp_path: Path) -> None:
    with wrapper(daemon, tmp_path) as (process, listens):
        eventually(lambda: ready(listens))
        process.send_signal(signal.SIGHUP)
        assert process.wait(WITHIN_S) == 0
    assert told(tmp_path)[0] == signal.SIGHUP


def test_a_killed_wrapper_leaves_no_server(daemon: PrivateDaemon, tmp_path: Path) -> None:
    with wrapper(daemon, tmp_path) as (process, listens):
        eventually(lambda: ready(listens))
        (child,) = children(process.pid)
        process.kill()
        process.wait(WITHIN_S)
        eventually(lambda: not Path(f"/proc/{child}").exists() or ended(child))


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return list(map(int, found))


def ended(pid: int) -> bool:
    """Whether it is only waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_that_cannot_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--", "/nonexistent/llama-server", "--host", "/tmp/pd-none.sock"]) == 1
    assert "/nonexistent/llama-server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give either"),
        (["--"], "after --"),
        (["--upstream", "http://localhost:1", "--", "llama-server"], "give either"),
        (["--upstream", "http://localhost:1"], "needs --slots"),
        (["--min-tokens", "-1", "--", "llama-server"], "min_tokens"),
        (["--", "llama-server", "--port"], "no value"),
    ],
)
def test_mistakes(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert why in capsys.readouterr().err
