"""A daemon of our own, for a demonstration or a test: started, waited for, ended."""

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

from ...proto.endpoints import MAX_SOCKET_PATH_BYTES
from ...proto.errors import DaemonUnavailable, DeadlineExceeded, PrefixdError
from .connection import AdminConnection, Health

SHM: Final = Path("/dev/shm")
MODULE: Final = "prefixd"
START_WITHIN_S: Final = 60.0
#: It is asked this often whether it serves: a daemon that recovers has better things to do.
_ASKED_EACH_S: Final = 0.02
STOP_WITHIN_S: Final = 30.0
#: Of the daemon's log, when it did not start.
_TAIL_LINES: Final = 15


class PrivateDaemon:
    """A daemon in a process of its own, below `directory`, which is short: the path of its longest
    socket may have 107 bytes. A context manager that starts and stops it; may be started again.

    `flags` are the daemon's own. Its log is `directory/log`; what it stores lies in
    `directory/disk` and in `shm_directory`. Neither directory is removed.
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
        """Of the running daemon."""
        assert self._process is not None, "the daemon is not running"
        return self._process.pid

    def admin(self, timeout_s: float = 30.0) -> AdminConnection:
        """An operator's connection to it."""
        return AdminConnection(self.address, timeout_s)

    def start(self) -> None:
        """Start it and wait until all of its tiers serve. Raises PrefixdError with the
        end of its log."""
        assert self._process is None, "the daemon is running already"
        with self.log.open("ab") as log:
            # A session of its own: the Ctrl-C that ends us must not end it under our hands.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_serving(self._process)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> int | None:
        """End it in order, and return its exit status; None if it was not running."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int | None:
        """End it as a crash would (SIGKILL)."""
        return self._end(signal.SIGKILL)

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _wait_until_serving(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + self.start_within_s
        with self.admin(timeout_s=0.5) as admin:
            while process.poll() is None:
                try:
                    if admin.health(wait_for_ready=True) is Health.SERVING and not any(
                        tier.state == "recovering" for tier in admin.stats().tiers
                    ):
                        return
                except (DaemonUnavailable, DeadlineExceeded):
                    pass  # not there yet
                time.sleep(_ASKED_EACH_S)
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
    """One for everything, with a path short enough for a socket, and one of the same name for
    the shm tier; both gone in the end."""
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
    """Being terminated, or losing the terminal, cleans up like any other end."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
