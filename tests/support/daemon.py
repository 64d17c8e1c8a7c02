"""Real daemons for tests: in processes and directories of their own, gone in the end."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon

T = TypeVar("T")

#: Slabs as small as they can be: entries take what they need, and budgets can be tiny.
SMALL_SLABS: Final = ("--ram.slab=4KiB", "--shm.slab=4KiB", "--disk.slab=4KiB")
#: To zero the 64 MiB that a client has by default takes longer than most tests.
SMALL_STAGING: Final = "--server.staging=4MiB"
#: Two seconds on a loaded machine are nothing. Only a test that fails waits for it.
WITHIN_S: Final = 60.0
#: Between two questions.
PAUSE_S: Final = 0.005


@contextmanager
def private_daemon(
    *flags: str, ram: str = "8MiB", shm: str = "8MiB", disk: str = "8MiB"
) -> Iterator[PrivateDaemon]:
    """A daemon that serves, with these budgets; its directories have short paths."""
    with temporary_directories() as (directory, shm_directory):
        budgets = (f"--ram.budget={ram}", f"--shm.budget={shm}", f"--disk.budget={disk}")
        command = (*SMALL_SLABS, SMALL_STAGING, *budgets, *flags)
        with PrivateDaemon(directory, shm_directory, command) as daemon:
            yield daemon


@contextmanager
def tcp_daemon(*flags: str, **budgets: str) -> Iterator[PrivateDaemon]:
    """The same, which listens on TCP too, and has a data socket: at `tcp_address`, also after it
    was started again."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with private_daemon(f"--server.tcp=127.0.0.1:{port}", *flags, **budgets) as daemon:
        yield daemon


def tcp_address(daemon: PrivateDaemon) -> str:
    """Where a `tcp_daemon` listens, as it said itself."""
    (address,) = {*re.findall(r"127\.0\.0\.1:\d+(?= *['\"])", daemon.log.read_text())}
    return str(address)


@contextmanager
def temporary_directories() -> Iterator[tuple[Path, Path]]:
    """One below /tmp, one below /dev/shm, both removed in the end."""
    directory = Path(tempfile.mkdtemp(prefix="pd-", dir="/tmp"))
    shm_directory = Path(tempfile.mkdtemp(prefix="pd-", dir="/dev/shm"))
    try:
        yield directory, shm_directory
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(shm_directory)


def whole_lines(log: Path) -> list[str]:
    """What another process has logged; not a line that it is in the middle of."""
    return [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def metrics_of(daemon: PrivateDaemon) -> str:
    """Where its metrics are, `host:port`, as its last start said."""
    lines = [line for line in whole_lines(daemon.log) if '"metrics"' in line]
    return str(json.loads(lines[-1])["address"])


def problems_of(admin: AdminConnection) -> list[str]:
    """What does not add up in a daemon, and what can't be read back from it."""
    *_, verified = admin.verify()
    return [*admin.check().problems, *verified.problems]


def eventually(what: Callable[[], T], within_s: float = WITHIN_S) -> T:
    """Ask `what()` again and again until it says something true, and return that.

    For what happens elsewhere and sends no event. Between two questions there is a pause: what is
    waited for needs the processor. Fails when `within_s` is over.
    """
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        answer = what()
        if answer:
            return answer
        time.sleep(PAUSE_S)
    raise AssertionError(f"did not happen within {within_s:g} s: {what}")
