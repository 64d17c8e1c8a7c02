"""A process that is forked from a warm helper behaves like a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm import WARM

COLD = (sys.executable, "-X", "cold")
#: True in a fork of a helper, which has imported the daemon.
IS_WARM = "'prefixd.server.daemon' in sys.modules"
SEEN = """
import gc, json, os, signal, sys, threading
print(json.dumps({
    "arguments": sys.argv,
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "first of path": sys.path[0],
    "standard input": sys.stdin.read(),
    "passed on": [os.read(int(fd), 100).decode() for fd in sys.argv[1:]],
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors],
    "parent": os.getppid(),
    "leads a session": os.getsid(0) == os.getpid(),
    "group": os.getpgrp() == os.getpid() or os.getpgrp(),
    "handlers": {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "collects": gc.isenabled(),
    "threads": threading.active_count(),
    "is main": __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals(),
}))
"""


def ran(
    interpreter: tuple[str, ...], script: str, *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*interpreter, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.fixture(params=["interrupt handled", "interrupt ignored"])
def _interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shells start what runs in their background with the interrupt ignored."""
    ignored = request.param == "interrupt ignored"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupt")
@pytest.mark.parametrize("new_session", [False, True])
def test_a_fork_sees_what_a_new_interpreter_sees(tmp_path: Path, new_session: bool) -> None:
    seen = []
    for interpreter in (COLD, WARM):
        reads = [os.pipe() for _ in range(3)]
        for number, (_, write_fd) in enumerate(reads):
            os.write(write_fd, b"%d" % number)
        passed = [read_fd for read_fd, _ in reads]
        done = ran(
            interpreter,
            SEEN,
            *map(str, passed),
            input="some lines\n",
            cwd=tmp_path,
            env={**os.environ, "OF_THIS_TEST": "ä = 1"},
            pass_fds=passed,
            start_new_session=new_session,
        )
        for fds in reads:
            for fd in fds:
                os.close(fd)
        assert (done.returncode, done.stderr) == (0, "")
        seen.append(json.loads(done.stdout))
    cold, warm = seen
    assert cold["passed on"] == ["0", "1", "2"]
    del cold["arguments"], warm["arguments"]  # the descriptors differ
    assert warm == cold
    assert ran(WARM, f"import sys; print({IS_WARM})").stdout == "True\n"
    assert ran(COLD, f"import sys; print({IS_WARM})").stdout == "False\n"


@pytest.mark.parametrize(
    "script",
    [
        "print('said'); import sys; sys.exit(3)",
        "import sys; sys.stdout.write('said'); sys.exit('a reason')",
        "import sys; sys.exit(None)",
        "import sys; sys.exit(-1)",
        "import atexit; atexit.register(print, 'at its end')",
        "import threading as t; t.Timer(0.01, print, ['from a thread']).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os._exit(7)",
    ],
)
def test_a_fork_ends_as_a_new_interpreter_does(script: str) -> None:
    cold, warm = (ran(interpreter, script) for interpreter in (COLD, WARM))
    assert (warm.returncode, warm.stdout, warm.stderr) == (
        cold.returncode,
        cold.stdout,
        cold.stderr,
    )


def test_an_unhandled_exception_is_printed() -> None:
    failed = ran(WARM, "print('said'); 1 / 0")
    assert (failed.returncode, failed.stdout) == (1, "said\n")
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_an_interrupt_ends_a_fork_as_a_new_interpreter() -> None:
    """Compared with a new interpreter, since the process that runs the tests may ignore SIGINT."""
    cold, warm = (
        ran(interpreter, "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
        for interpreter in (COLD, WARM)
    )
    assert warm.returncode == cold.returncode
    assert ("KeyboardInterrupt" in warm.stderr) == ("KeyboardInterrupt" in cold.stderr)


def test_processes_that_a_fork_starts_are_forks_and_its_children() -> None:
    program = f"""
import subprocess, sys
inner = "import os, sys; print(os.getppid(), {IS_WARM})"
print(subprocess.run([{sys.executable!r}, "-X", "warm", "-c", inner], capture_output=True).stdout)
"""
    with subprocess.Popen([*WARM, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    assert output == f"b'{process.pid} True\\n'\n"


def test_a_module_runs_with_its_name() -> None:
    done = subprocess.run(
        [*WARM, "-m", "prefixd", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("prefixd ")


def test_another_python_environment_gets_a_new_interpreter() -> None:
    script = f"import sys; print({IS_WARM}, sys.flags.hash_randomization)"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    assert ran(WARM, script, env=environment).stdout == "False 0\n"


def test_a_failed_start_raises_the_usual_exception(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ran(WARM, "pass", cwd=tmp_path / "nowhere")
