"""A private daemon for a demonstration, a measurement or a test."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from ...proto import prefixd_pb2 as pb
from ...proto.endpoints import MAX_SOCKET_PATH_BYTES
from ...proto.errors import DaemonUnavailable, DeadlineExceeded, PrefixdError
from .connection import AdminConnection

SHM: Final = Path("/dev/shm")
MODULE: Final = "prefixd"
START_WITHIN_S: Final = 60.0
#: Seconds between two health checks while it starts. More frequent ones would slow it down.
_POLL_EVERY_S: Final = 0.02
#: A tier is unavailable while its store takes more than a second to open, too.
_NOT_YET: Final = (pb.TIER_STATE_RECOVERING, pb.TIER_STATE_UNAVAILABLE)
STOP_WITHIN_S: Final = 30.0
#: How much of the log is shown when the daemon does not start.
_TAIL_LINES: Final = 15


class PrivateDaemon:
    """A daemon in a process of its own. A context manager that starts and stops it; it may be
    started again.

    `directory` holds its sockets, its log (`log`) and its disk tier (`disk`). It must be a short
    path, because that of a socket may have 107 bytes. `shm_directory` holds the shm tier. Neither
    is removed. `flags` are options of the daemon.
    """

    def __init__(
        self,
        directory: Path,
        shm_directory: Path,
        flags: Sequence[str],
        *,
        start_within_s: float = START_WITHIN_S,
    ) -> None:
        self.directory = directory
        self.shm_directory = shm_directory
        self.start_within_s = start_within_s
        self.log = directory / "log"
        self.address = f"unix:{directory / 'd.sock'}"
        self._command = [
            *(sys.executable, "-m", MODULE),
            *("--server.address", self.address),
            *("--disk.directory", str(directory / "disk")),
            *("--shm.directory", str(shm_directory)),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the running daemon."""
        assert self._process is not None, "the daemon is not running"
        return self._process.pid

    def admin(self, timeout_s: float = 30.0) -> AdminConnection:
        """An operator's connection to it."""
        return AdminConnection(self.address, timeout_s)

    def start(self) -> None:
        """Start it and wait until all of its tiers serve. Raises PrefixdError with the end of its
        log."""
        process = self._begin()
        try:
            self._wait_until_serving(process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> int | None:
        """Stop it with SIGTERM. Returns its exit status, None if it was not running."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int | None:
        """Kill it with SIGKILL, as a crash would."""
        return self._end(signal.SIGKILL)

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the process, and wait for nothing."""
        assert self._process is None, "the daemon is running already"
        with self.log.open("ab") as log:
            # A session of its own, so that a Ctrl-C for this process does not reach the daemon.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process

    def _wait_until_serving(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + self.start_within_s
        with self.admin(timeout_s=0.5) as admin:
            while process.poll() is None:
                try:
                    if admin.health() and not any(
                        tier.state in _NOT_YET for tier in admin.stats().tiers
                    ):
                        return
                except (DaemonUnavailable, DeadlineExceeded):
                    pass  # not there yet
                time.sleep(_POLL_EVERY_S)
                if time.monotonic() > deadline_s:
                    raise PrefixdError(
                        f"the daemon did not start within {self.start_within_s:g} s:\n{self.tail()}"
                    )
        raise PrefixdError(
            f"the daemon ended at once with status {process.returncode}:\n{self.tail()}"
        )

    def _end(self, number: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(number)
        try:
            return process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


@contextmanager
def temporary_directories(purpose: str) -> Iterator[tuple[Path, Path]]:
    """Yields a directory with a path short enough for a socket, and one for the shm tier. Removes
    both at the end."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MAX_SOCKET_PATH_BYTES // 2:
        parent = Path("/tmp")
    directory = Path(tempfile.mkdtemp(prefix=f"prefixd-{purpose}-", dir=parent))
    shm_directory = (SHM if SHM.is_dir() else directory) / directory.name
    try:
        shm_directory.mkdir(mode=0o700)
        yield directory, shm_directory
    finally:
        shutil.rmtree(shm_directory, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit, so that context managers clean up."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
