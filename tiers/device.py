"""Asks whether a device answers, in a process of its own.

Nothing can interrupt a thread that waits for a device, and its process can't end before it. So the
daemon has another process (`tiers.device_child`) do first what it wants to do with a directory, and
touches the directory once that has succeeded.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

#: How long a process may take to begin, on a machine that is busy with others.
_BEGUN_WITHIN_S: Final = 5.0
#: How long to wait for the end of a killed process.
_KILLED_S: Final = 0.2
#: What is wrong with a directory whose device does not answer.
NO_ANSWER: Final = "its device does not answer"


class Asking:
    """One process that uses `directory`. For one thread; `end` is for any."""

    #: The command of the process, without its arguments. It imports nothing but `os` and `sys`.
    command: ClassVar[Sequence[str]] = (
        *(sys.executable, "-I", "-S"),
        str(Path(__file__).with_name("device_child.py")),
    )

    def __init__(self, directory: Path, mount: str = "", *, lock_name: str = "") -> None:
        """`mount`: a file system has to be mounted there; empty: it does not matter. `lock_name`:
        create the directory, and write to this file in it; empty: only read. Raises OSError."""
        self._said = b""
        self._process = subprocess.Popen(
            [*self.command, str(directory.absolute()), mount, lock_name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Signals to the daemon's process group are not meant for it.
            start_new_session=True,
        )

    def answer(self, within_s: float) -> str | None:
        """What is wrong with the directory; empty: nothing is. None: the device has not answered
        yet, this long after the process began."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        for line, patience_s in enumerate((_BEGUN_WITHIN_S, within_s), start=1):
            until_s = time.monotonic() + patience_s
            while self._said.count(b"\n") < line:
                if not poll.poll(max(0.0, until_s - time.monotonic()) * 1e3):
                    return None
                more = os.read(fd, 4096)
                if not more:
                    return ""  # it has ended, so nothing is known
                self._said += more
        return self._said.decode(errors="replace").split("\n")[1]

    def end(self) -> None:
        """Kill the process: its answer is empty then, unless the device blocks it."""
        self._process.kill()

    def close(self) -> None:
        """End the process. One that the device blocks is left to the kernel, killed."""
        self.end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        wait_for_killed(self._process, _KILLED_S)


def asked(directory: Path, mount: str, within_s: float) -> str:
    """What is wrong with a directory, as far as reading it tells; empty: nothing is."""
    asking = Asking(directory, mount)
    try:
        answer = asking.answer(within_s)
    finally:
        asking.close()
    return NO_ANSWER if answer is None else answer


def wait_for_killed(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait for a process that was killed. One that its device still holds then is left to a thread,
    which waits as long as the device does: else it would stay a zombie after that."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        waits = threading.Thread(target=process.wait, name="prefixd-killed", daemon=True)
        with suppress(RuntimeError):  # this process is exiting
            waits.start()
