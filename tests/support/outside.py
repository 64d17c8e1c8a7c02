"""Daemons in their own processes, for tests of the process itself: started in unusual ways and
places, and seen through their rpcs only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.endpoints import admin_address
from tests.support.daemon import (
    SMALL_SLABS,
    SMALL_STAGING,
    WITHIN_S,
    health_of,
    temporary_directories,
    whole_lines,
)
from tests.support.namespaces import Host
from tests.support.running import Outside, answer
from tests.support.warm import WARM

FLAGS: Final = (
    *SMALL_SLABS,
    SMALL_STAGING,
    "--ram.budget=1MiB",
    "--shm.budget=1MiB",
    "--disk.budget=4MiB",
    "--sessions.heartbeat=1m",
)
#: Without the disk tier's processes, a start takes a third of the time.
RAM_ALONE: Final = ("--shm.budget=0", "--disk.budget=0")


#: A daemon in the network namespace of a host. Everything else is the machine's.
_ON_HOST: Final = """
import ctypes, os, sys
from prefixd.server import daemon
with open({space!r}) as space:
    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0x40000000):
        sys.exit(os.strerror(ctypes.get_errno()))
daemon.main(sys.argv[1:])
"""


#: A daemon that asks its shared engine for clock and settings each second, for
#: `DaemonProcess.run_with`. If the engine is not reached at once, the next time is a minute later.
ASKS_OFTEN: Final = """
import sys
from prefixd.server import daemon
from prefixd.server.sharing import sharing
assert sharing._SETTINGS_EVERY_S == 60
sharing._SETTINGS_EVERY_S = 1.0
daemon.main(sys.argv[1:])
"""


class DaemonProcess(PrivateDaemon):
    """A daemon whose start may fail, and whose code a script may patch before it runs."""

    def run_with(self, script: str) -> None:
        """From the next start on, run this script, which must call `daemon.main(sys.argv[1:])`."""
        end_of_interpreter = self._command.index("--server.address")
        self._command[:end_of_interpreter] = [*WARM, "-c", script]

    def run_on(self, host: Host) -> None:
        """From the next start on, run on this host."""
        self.run_with(_ON_HOST.format(space=host.space))

    def start_unwell(self) -> None:
        """Start it, and wait until it listens, well or not."""
        self._begin()
        with self.admin(timeout_s=WITHIN_S) as admin:
            health_of(admin)

    def attempt(self, *flags: str, before: Sequence[str] = ()) -> Ended:
        """Start it with flags that make it end by itself. `before`: a command that runs it."""
        done = subprocess.run(
            [*before, *self._command, *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def wait(self) -> int:
        """Wait until the daemon ends by itself. Returns its exit status."""
        process, self._process = self._process, None
        assert process is not None, "the daemon is not running"
        try:
            return process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of its log with this event, oldest first."""
        lines = (line for line in whole_lines(self.log) if line.startswith("{"))
        return [line for line in map(json.loads, lines) if line["event"] == event]

    @asynccontextmanager
    async def client(self, address: str = "") -> AsyncIterator[Outside]:
        """A client that knows only the daemon's address."""
        made = Outside(address or self.address, admin_address(address or self.address))
        try:
            yield made
        finally:
            await made.close()


@dataclass(frozen=True)
class Ended:
    """The exit status and output of a daemon that ended by itself."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The error message that it ended with, after its log."""
        assert "Traceback" not in self.err
        last = self.err.splitlines()[-1]
        assert last.startswith("prefixd: "), self.err
        return last.removeprefix("prefixd: ")


@contextmanager
def daemon_process(*flags: str) -> Iterator[DaemonProcess]:
    """A daemon that is not started yet, and that is stopped at the end."""
    with temporary_directories() as (directory, shm_directory):
        daemon = DaemonProcess(directory, shm_directory, (*FLAGS, *flags))
        try:
            yield daemon
        finally:
            daemon.stop()


async def assert_sound(client: Outside) -> None:
    """Check through rpcs that the daemon is consistent, serves, and has the right bytes."""
    assert await client.problems() == []
    stats = await answer(client.admin.Stats(pb.StatsRequest()))
    assert stats.health == "serving", stats.health


def python(script: str) -> list[str]:
    """A command that runs `script` and then replaces itself with the command behind it."""
    return [sys.executable, "-c", f"import os, sys\n{script}\nos.execv(sys.argv[1], sys.argv[1:])"]
