"""The rows of the disk tier: LMDB, in a process of its own (`tiers.lmdb_child`).

LMDB maps its file, and damage there can kill the process that reads it: of 1,000 rounds of flipped
bits under a writer 6 were killed. So LMDB runs in a child that may be killed, and whose every
answer may be wrong. Everything that was acknowledged is in the file, in cells that can be found
without LMDB: the next call starts a new child, which collects them.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import structlog

from . import lmdb_wire as wire
from .device import wait_for_killed
from .files import HERE, FileCalls, open_own_file, secure_range, sync_directory, write_errors
from .rows import Erasure, RowTable
from .store import StoreError, StoreFull

log = structlog.get_logger("prefixd.records")

#: What the two files take together: a fixed part, and a part for each slab.
TABLE_FIXED_BYTES: Final = 2 * (wire.FILE_FIXED_BYTES + mmap.PAGESIZE)
TABLE_SLAB_BYTES: Final = 2 * wire.FILE_SLAB_BYTES
#: How long `close` waits for a call that is under way. A process that the device blocks for longer
#: is left to the kernel, killed or not.
CLOSE_S: Final = 5.0
#: What a call may take before its process is killed and the call fails. It is this long because a
#: device may be slow. A start copies all rows, and may take the other two in addition.
CALL_S: Final = 30.0
START_S: Final = 60.0
START_SLAB_S: Final = 50e-6
#: How long to wait for a killed process to end.
_KILLED_S: Final = 1.0


class LmdbRows(RowTable):
    """The table in the files `records-N.mdb` of `directory`, for `slabs` slabs.

    With `sync`, changes wait for the device. Only the first call waits for the process to start.
    That takes 5 to 8 us of CPU a row, and at most `START_S` plus `START_SLAB_S` for each slab. A
    later call takes at most `CALL_S`, also when it finds the file damaged and copies all rows. A
    process that the device blocks is killed; until it has ended, calls fail at once. Raises
    StoreError if the files can't be used.
    """

    #: The command of the process, without its arguments.
    command: ClassVar[Sequence[str]] = (sys.executable, "-m", f"{__package__}.lmdb_child")

    def __init__(self, directory: Path, slabs: int, *, sync: bool, calls: FileCalls = HERE) -> None:
        self._calls: Final = calls
        self._directory: Final = directory.absolute()
        self._slabs: Final = slabs
        self._sync: Final = sync
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        #: A process that was killed and has not ended.
        self._held: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._secured_bytes = 0
        #: Descriptors of both files. The process renames them.
        self._fds: list[int] = []
        with write_errors(f"open the records in {directory}"):
            try:
                for path in self._paths():
                    self._fds.append(open_own_file(path, 0o600, calls))
                if sync:
                    sync_directory(directory, calls)
                self._start()
            except BaseException:
                self.close()
                raise

    def _paths(self) -> list[Path]:
        """The two files with the highest numbers; names for those that are missing."""
        numbers = sorted(
            int(match[1])
            for path in self._directory.iterdir()
            if (match := wire.FILE_NAME.fullmatch(path.name))
        )
        if not numbers:
            numbers = [0, 1]
        elif len(numbers) == 1:
            # It is the valid one, whichever it was: it gets the higher number.
            if not numbers[0]:
                (self._directory / "records-0.mdb").rename(self._directory / "records-1.mdb")
                numbers = [1]
            numbers.insert(0, numbers[0] - 1)
        return [self._directory / f"records-{number}.mdb" for number in numbers[-2:]]

    # ---- the table

    def secure(self, slabs: int) -> None:
        upto_bytes = wire.file_bytes(slabs)
        if upto_bytes <= self._secured_bytes:
            return
        with write_errors(f"make room for records in {self._directory}"):
            if self._closed:
                raise StoreError(f"the records in {self._directory} are closed")
            for fd in self._fds:
                more_bytes = upto_bytes - self._secured_bytes
                secure_range(fd, self._secured_bytes, more_bytes, self._calls)
        self._secured_bytes = upto_bytes

    def apply(self, erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        for start in range(0, len(erasures), wire.MAX_CHANGES):
            self._call("apply", erasures[start : start + wire.MAX_CHANGES], [])
        for start in range(0, len(rows), wire.MAX_CHANGES):
            self._call("apply", [], rows[start : start + wire.MAX_CHANGES])

    def read(self, slab: int) -> bytes:
        row: bytes = self._call("read", slab)
        return row

    def chunks(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        first = 0
        while (found := self._call("chunk", first)) is not None:
            try:
                begin, cells = found
                rows = [
                    wire.CELL.unpack_from(cells, start)[2:]
                    for start in range(0, len(cells), wire.CELL_BYTES)
                ]
                good = first <= begin <= rows[0][0] <= rows[-1][0] < begin + wire.CHUNK_SLABS
            except (TypeError, ValueError, IndexError, struct.error):
                good = False
            if not good:
                raise StoreError(f"can't read the records in {self._directory}: invalid chunk")
            yield begin, rows
            first = begin + wire.CHUNK_SLABS

    def close(self) -> None:
        """Takes at most `CLOSE_S`, and a second. The process is killed: everything that it has
        acknowledged is durable, and the next one does the rest again."""
        self._closed = True
        held = self._lock.acquire(timeout=CLOSE_S)
        try:
            self._end(0)
            if self._held is not None:  # no later call looks for its end
                wait_for_killed(self._held, 0)
        finally:
            if held:
                self._lock.release()
        while self._fds:
            os.close(self._fds.pop())

    # ---- the process

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._process is None else self._process.pid

    def _call(self, *request: Any) -> Any:
        """Send a request and wait for the answer. Raises StoreError, StoreFull. The next call
        starts a new process then."""
        with self._lock:
            try:
                if self._closed:
                    raise StoreError(f"the records in {self._directory} are closed")
                if self._process is None:
                    self._start()
                assert self._connection is not None
                if not self._ready:
                    self._answer(self._connection, START_S + self._slabs * START_SLAB_S)
                    self._ready = True
                self._connection.settimeout(CALL_S)
                wire.send(self._connection, list(request))
                return self._answer(self._connection, CALL_S)
            except TimeoutError:
                self._end(0)
                raise StoreError(
                    f"can't use the records in {self._directory}: their process did not answer "
                    "in time"
                ) from None
            except (OSError, EOFError, ValueError) as problem:
                ended = self._end(_KILLED_S)
                raise StoreError(
                    f"can't use the records in {self._directory}: their process "
                    + (f"ended with {ended}" if ended is not None else f"is lost: {problem}")
                ) from None
            except BaseException:
                self._end(_KILLED_S)
                raise

    def _answer(self, connection: socket.socket, within_s: float) -> Any:
        kind, what, *more = wire.receive(connection, time.monotonic() + within_s)
        if kind == "ok":
            (notes,) = more
            if not isinstance(notes, list):
                raise ValueError("not an answer")
            for note in notes:
                log.warning("records_mended", directory=str(self._directory), what=note)
            return what
        error = StoreFull if kind == "full" else StoreError
        raise error(f"can't write records in {self._directory}: {what}")

    def _start(self) -> None:
        """Raises OSError."""
        if self._held is not None:
            if self._held.poll() is None:
                raise OSError("the previous one was killed, and the device still holds it")
            self._held = None
        ours, theirs = socket.socketpair()
        try:
            arguments = [str(theirs.fileno()), str(self._directory), str(self._slabs)]
            self._process = subprocess.Popen(
                [*self.command, *arguments, "sync" if self._sync else "-"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Signals to the daemon's process group are not meant for it.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection, self._ready = ours, False

    def _end(self, within_s: float) -> int | None:
        """Hang up, wait, kill. Returns the exit status, or None if the process has not ended. A
        call that another thread has under way fails."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is None:
            return None
        for wait_s in (within_s, _KILLED_S):
            with suppress(subprocess.TimeoutExpired):
                return process.wait(wait_s)
            process.kill()
        self._held = process
        return None
