"""The wrapper in the place of llama-server: where it listens, signals, exit status."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.llama_server.main import run
from tests.support.daemon import WITHIN_S, eventually
from tests.support.unix_http import call
from tests.support.warm import WARM

#: Each test starts several interpreters.
pytestmark = pytest.mark.timeout(300)
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
        *(sys.executable, *WRAPPER, "--address", daemon.address, "--min-tokens", "64", *own, "--"),
        *(sys.executable, "-m", "tests.support.fake_llama"),
        *("--host", str(listens), "--tell", str(tmp_path / "told"), *server),
    ]
    # A new interpreter, because the wrapper itself forks its server. llama-server's first argument
    # is its program; this one has three.
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
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


def accepts(listens: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(listens))
        except OSError:
            return False
        return True


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


def test_the_status_of_a_server_that_is_killed(daemon: PrivateDaemon, tmp_path: Path) -> None:
    with wrapper(daemon, tmp_path) as (process, listens):
        eventually(lambda: ready(listens))
        (child,) = children(process.pid)
        os.kill(child, signal.SIGKILL)
        assert process.wait(WITHIN_S) == 128 + signal.SIGKILL


def test_a_second_signal_ends_it_at_once(daemon: PrivateDaemon, tmp_path: Path) -> None:
    own = ("--idle-save", "3600", "--save-timeout", "600000")
    with wrapper(daemon, tmp_path, "-m", "twice", "--exit", "7", own=own) as (process, listens):
        eventually(lambda: ready(listens))
        call(listens, "POST", "/completion", {"prompt": P, "n_predict": 4})
        eventually(lambda: saved(listens))
        call(listens, "POST", "/completion", {"prompt": P + "more of it, " * 10, "n_predict": 4})
        call(listens, "POST", "/hang")
        process.send_signal(signal.SIGTERM)
        # It listens no more, and saves. A call would wait for the server that hangs.
        eventually(lambda: not accepts(listens))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 7


def saved(listens: Path) -> bool:
    """Whether the slot's state was taken."""
    _, stats = call(listens, "GET", "/prefixd/stats")
    return bool(stats["saves"]) and not stats["pending_saves"]


def test_the_users_own_folder_of_slots(daemon: PrivateDaemon, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "notes").write_text("kept")
    server = ("-m", "folder", "--slot-save-path", str(mine))
    for outcome in ("missed", "restored"):
        with wrapper(daemon, tmp_path, *server) as (process, listens):
            eventually(lambda listens=listens: ready(listens))
            call(listens, "POST", "/completion", {"prompt": P, "n_predict": 4})
            _, stats = call(listens, "GET", "/prefixd/stats")
            assert stats["requests"] == {outcome: 1}
            process.send_signal(signal.SIGTERM)
            process.wait(WITHIN_S)
    assert told(tmp_path)[1] == mine
    assert not list(mine.glob("*.bin"))
    assert (mine / "notes").exists()


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
        (["--", "llama-server", "--api-key-file", "/nonexistent"], "/nonexistent"),
        (["--upstream", "127.0.0.1:1", "--slots", "/tmp"], "an address like"),
        (["--upstream", "http://a", "--slots", "/tmp", "--listen", "a"], "HOST:PORT"),
        (["--upstream", "http://a", "--slots", "/tmp", "--listen", "a:65536"], "HOST:PORT"),
    ],
)
def test_mistakes(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert why in capsys.readouterr().err


# ---- a server that somebody else started


def listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


class Upstream:
    """A fake llama-server on TCP, and the wrapper before it."""

    def __init__(self, daemon: PrivateDaemon, tmp_path: Path) -> None:
        self.slots = tmp_path / "slots"
        self.slots.mkdir(mode=0o700)
        self.listens = tmp_path / "gateway.sock"
        self.port = 0
        self.environment = dict(os.environ)
        self._daemon, self._told = daemon, tmp_path / "port"
        self._processes: list[subprocess.Popen[bytes]] = []

    def server(self, *more: str) -> subprocess.Popen[bytes]:
        """Start it, on the same port as before."""
        self._told.unlink(missing_ok=True)
        command = [*WARM, "-m", "tests.support.fake_llama", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--tell-port", str(self._told), "--cache-ram", "0"]
        process = self._start([*command, "--slot-save-path", str(self.slots), *more])
        eventually(lambda: self._told.exists() and bool(self._told.read_text()))
        self.port = int(self._told.read_text())
        return process

    def gateway(self, *more: str, port: int | None = None) -> subprocess.Popen[bytes]:
        command = [*WARM, *WRAPPER, "--address", self._daemon.address, "--min-tokens", "64"]
        command += ["--upstream", f"http://127.0.0.1:{port or self.port}"]
        command += ["--slots", str(self.slots), "--listen", str(self.listens)]
        return self._start([*command, *more])

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stderr=subprocess.PIPE)
        self._processes.append(process)
        return process

    def ask(self, prompt: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return call(
            self.listens, "POST", "/completion", {"prompt": prompt, "n_predict": 4}, headers=headers
        )

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def upstream(daemon: PrivateDaemon, tmp_path: Path) -> Iterator[Upstream]:
    made = Upstream(daemon, tmp_path)
    yield made
    made.end()


def test_before_a_server_that_runs(upstream: Upstream) -> None:
    server = upstream.server("-m", "upstream")
    gateway = upstream.gateway("--idle-save", "3600")
    eventually(lambda: ready(upstream.listens))
    _, first = upstream.ask(P)
    eventually(lambda: saved(upstream.listens))
    # It is restarted while the wrapper runs.
    server.kill()
    server.wait(WITHIN_S)
    assert upstream.ask(P)[0] == 503
    server = upstream.server("-m", "upstream")
    _, again = upstream.ask(P)
    assert (again["content"], again["timings"]["prompt_n"]) == (first["content"], 1)
    # The wrapper ends without it, and saves before.
    grown = P + "more of it, " * 10
    _, longer = upstream.ask(grown)
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(WITHIN_S) == 0
    assert server.poll() is None
    server.kill()
    server.wait(WITHIN_S)
    upstream.server("-m", "upstream")
    upstream.gateway()
    eventually(lambda: ready(upstream.listens))
    _, restored = upstream.ask(grown)
    assert (restored["content"], restored["timings"]["prompt_n"]) == (longer["content"], 1)
    assert not list(upstream.slots.glob("prefixd-*"))


def test_a_server_that_is_another_model_now(upstream: Upstream) -> None:
    server = upstream.server("-m", "upstream one")
    upstream.gateway()
    eventually(lambda: ready(upstream.listens))
    upstream.ask(P)
    eventually(lambda: saved(upstream.listens))
    server.kill()
    server.wait(WITHIN_S)
    upstream.server("-m", "upstream two")
    assert upstream.ask(P)[1]["timings"]["cache_n"] == 0


def test_before_a_server_that_is_not_there_yet(upstream: Upstream) -> None:
    upstream.server("-m", "upstream later").kill()
    upstream.gateway()
    eventually(lambda: listening(upstream.listens))
    assert upstream.ask(P)[0] == 503
    upstream.server("-m", "upstream later")
    eventually(lambda: ready(upstream.listens))
    assert upstream.ask(P)[0] == 200


def test_a_key_from_the_environment_is_for_its_own_calls(upstream: Upstream) -> None:
    upstream.server("-m", "upstream key", "--api-key", "secret")
    upstream.environment["LLAMA_API_KEY"] = "secret,other"
    upstream.gateway()
    eventually(lambda: ready(upstream.listens))
    headers = {"Authorization": "Bearer secret"}

    def identified() -> bool:
        _, stats = call(upstream.listens, "GET", "/prefixd/stats", headers=headers)
        return any(model["identity"] for model in stats["models"].values())

    eventually(identified)
    assert upstream.ask(P)[0] == 401
    assert upstream.ask(P, headers)[0] == 200


def test_two_wrappers_with_one_folder(upstream: Upstream) -> None:
    upstream.server("-m", "upstream twice")
    upstream.gateway()
    eventually(lambda: ready(upstream.listens))
    other = upstream.gateway("--listen", str(upstream.listens) + ".other.sock")
    _, said = other.communicate(timeout=WITHIN_S)
    assert other.returncode == 1
    assert b"another prefixd-llama-server uses" in said
    assert upstream.ask(P)[0] == 200


def test_a_folder_that_the_server_does_not_use(upstream: Upstream, tmp_path: Path) -> None:
    """It is a plain proxy then, and says why."""
    upstream.server("-m", "upstream folder")
    (tmp_path / "other").mkdir(mode=0o700)
    gateway = upstream.gateway("--slots", str(tmp_path / "other"))
    eventually(lambda: ready(upstream.listens))
    for _ in range(2):
        assert upstream.ask(P)[0] == 200
    _, stats = call(upstream.listens, "GET", "/prefixd/stats")
    assert stats["bypassed"] == {"not prepared": 2}
    gateway.kill()
    assert gateway.stderr is not None
    assert b"prompts of this llama-server are not kept" in gateway.stderr.read()
