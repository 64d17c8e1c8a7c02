"""Real daemons for tests, each in its own process and directories, which are removed at the end."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import DaemonUnavailable
from tests.support.ports import free_ports

T = TypeVar("T")

#: The smallest slabs: entries waste little room, and budgets can be tiny.
SMALL_SLABS: Final = ("--ram.slab=4KiB", "--shm.slab=4KiB", "--disk.slab=4KiB")
#: Zeroing a client's default 64 MiB of staging memory takes longer than most tests.
SMALL_STAGING: Final = "--server.staging=4MiB"
#: Generous, for a loaded machine: only a failing test waits this long.
WITHIN_S: Final = 60.0
#: Between two polls.
PAUSE_S: Final = 0.005


@contextmanager
def private_daemon(
    *flags: str, ram: str = "8MiB", shm: str = "8MiB", disk: str = "8MiB"
) -> Iterator[PrivateDaemon]:
    """A running daemon with these budgets. Its directories have short paths."""
    with temporary_directories() as (directory, shm_directory):
        budgets = (f"--ram.budget={ram}", f"--shm.budget={shm}", f"--disk.budget={disk}")
        command = (*SMALL_SLABS, SMALL_STAGING, *budgets, *flags)
        with PrivateDaemon(directory, shm_directory, command) as daemon:
            yield daemon


@contextmanager
def tcp_daemon(*flags: str, **budgets: str) -> Iterator[PrivateDaemon]:
    """A daemon that also listens on TCP and has a data socket. Its `tcp_address` stays the same
    after a restart."""
    (port,) = free_ports(1)
    with private_daemon(f"--server.tcp=127.0.0.1:{port}", *flags, **budgets) as daemon:
        yield daemon


def tcp_address(daemon: PrivateDaemon) -> str:
    """The TCP address of a `tcp_daemon`, read from its log."""
    (address,) = {*re.findall(r"127\.0\.0\.1:\d+(?= *['\"])", daemon.log.read_text())}
    return str(address)


@contextmanager
def temporary_directories() -> Iterator[tuple[Path, Path]]:
    """One directory in /tmp and one in /dev/shm, both removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="pd-", dir="/tmp"))
    shm_directory = Path(tempfile.mkdtemp(prefix="pd-", dir="/dev/shm"))
    try:
        yield directory, shm_directory
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(shm_directory)


def whole_lines(log: Path) -> list[str]:
    """The complete lines of another process's log, without one that is still being written."""
    return [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def metrics_of(daemon: PrivateDaemon) -> str:
    """The `host:port` of the metrics, from the log of the last start."""
    lines = [line for line in whole_lines(daemon.log) if '"metrics"' in line]
    return str(json.loads(lines[-1])["address"])


def problems_of(admin: AdminConnection) -> list[str]:
    """What is inconsistent in a daemon, and which entries can't be read back."""
    *_, verified = admin.verify()
    return [*admin.check().problems, *verified.problems]


def eventually(condition: Callable[[], T], within_s: float = WITHIN_S) -> T:
    """Poll `condition()` until it returns something true, and return that.

    For changes in another process that send no event. It pauses between two polls, because that
    process needs the processor. Fails after `within_s`.
    """
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        answer = condition()
        if answer:
            return answer
        time.sleep(PAUSE_S)
    raise AssertionError(f"did not happen within {within_s:g} s: {condition}")


def health_of(admin: AdminConnection) -> bool:
    """The first answer of the health service of a daemon that may still be starting."""

    def answers() -> list[bool]:
        with suppress(DaemonUnavailable):
            return [admin.health()]
        return []

    return eventually(answers)[0]
