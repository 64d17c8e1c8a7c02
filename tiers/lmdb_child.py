"""The process that keeps the disk tier's rows in LMDB: `python -m prefixd.tiers.lmdb_child`.

LMDB maps its file and believes what it finds there: of 300 environments with four flipped bits
206 could not be read to the end, and 8 killed their reader. So nothing that it says is believed
here, and what it may destroy is bounded by three rules.

1. **Every start reads the file as plain bytes**, never mapped, and takes from it the newest cell
   of each slab (`lmdb_wire`), wherever it lies; of what LMDB keeps around them nothing is needed.
   They are copied into a new environment, in the room of the file before the last, which takes
   the old one's place once it is durable. A daemon's start, the end of this process, a failed or
   doubtful transaction, and a file that is full are all the same: `_renew`.
2. **No page is written twice.** LMDB takes no freed page again while a reader is open that is
   older, so one is held, from before the first write. Its lock file has no name once it is open.
   Before anything is written, the last page and the last transaction have to be those that are
   remembered here. What was acknowledged therefore lies where it was written until the copy.
3. **A batch is acknowledged when its cells were read back** from the pages that it added, with
   `pread`, and synced. What LMDB reads is held against the sequence numbers in memory.

So a flipped bit costs nothing: it is flipped back (`lmdb_wire.whole_cell`). What is worse costs
the cells that it hits; then an older one of the slab may be found, of an entry that was erased. A
later entry in its room beats it (`Records`), and its payload has a checksum.

One sync a batch: LMDB's own are off, for its order of writes does not matter here.

Memory: 16 bytes for each slab with a row. A sequence number is used by one transaction.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb

from . import lmdb_wire as wire
from .lmdb_wire import CELL, CELL_BYTES, CELL_MAGIC, CELL_ROW

_KEY: Final = struct.Struct(">I")
_GENERATION: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<QI")
_MAGIC: Final = re.compile(re.escape(CELL_MAGIC))
_ZERO_ROW: Final = bytes(wire.ROW_BYTES)
#: Read at once; pages never lie across, whatever their size.
_BLOCK_BYTES: Final = 2**20
_CELLS_AT_ONCE: Final = 16384
#: LMDB may walk in circles in a damaged file: then the kernel ends this process.
_MAX_CPU_S: Final = 60.0
#: How long the process of an earlier daemon may take to end.
_OTHER_ENDS_S: Final = 30.0


class Damage(Exception):
    """LMDB says what can't be."""


class Abandoned(Exception):
    """The daemon is gone."""


class Table:
    """The cells of `slabs` slabs in `directory`. Raises OSError, lmdb.Error, Damage."""

    def __init__(self, directory: Path, slabs: int, *, sync: bool, daemon: socket.socket) -> None:
        self._directory = directory
        self._slabs = slabs
        self._sync = sync
        self._daemon = daemon
        self._env: lmdb.Environment | None = None
        self._oldest: lmdb.Transaction | None = None
        found = sorted(
            (int(match[1]), path)
            for path in directory.iterdir()
            if (match := wire.FILE_NAME.fullmatch(path.name))
        )
        if len(found) < 2:
            raise OSError(f"{directory / 'records-*.mdb'} was deleted while it was in use")
        (_, self._spare_path), (self._number, self._path) = found[-2:]
        # What was left where a process was killed between two steps.
        for path in [path for _, path in found[:-2]] + list(directory.glob("records-*.mdb-lock")):
            path.unlink()
        self._spare_fd = os.open(self._spare_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        #: by slab: the sequence number of its cell, 0 for none; the generation in its row
        self._sequences = _numbers(slabs)
        self._generations = _numbers(slabs)
        self._sequence = 0
        #: LMDB's last page and last transaction
        self._mark = (0, 0)
        self._renew({})
        size_bytes = wire.file_bytes(slabs)
        for fd in (self._fd, self._spare_fd):
            if os.fstat(fd).st_size > size_bytes:
                os.ftruncate(fd, size_bytes)

    # ---- requests

    def apply(self, erasures: Sequence[Any], rows: Sequence[Any]) -> None:
        changed: dict[int, bytes] = {}
        for slab, generation in erasures:
            if self._sequences[slab] and generation in (None, self._generations[slab]):
                changed[slab] = _ZERO_ROW
        for slab, row in rows:
            if not 0 <= slab < self._slabs or len(row) != wire.ROW_BYTES:
                raise ValueError(f"{len(row)} bytes for slab {slab} of {self._slabs}")
            changed[slab] = row
        if not os.fstat(self._fd).st_nlink:
            raise OSError(f"{self._path} was deleted while it was in use")
        self._put(changed)

    def read(self, slab: int) -> bytes:
        return self._twice(self._read, slab)

    def chunk(self, first: int) -> list[Any] | None:
        while first < self._slabs:
            cells = self._twice(self._cells, first)
            if cells:
                return [first, cells]
            first += wire.CHUNK_SLABS
        return None

    # ---- LMDB

    def _twice(self, look: Callable[[int], bytes], slab: int) -> bytes:
        """What LMDB reads, from a new environment if it makes no sense."""
        try:
            found: bytes = look(slab)
        except (lmdb.Error, Damage):
            self._renew({})
            found = look(slab)
        return found

    def _read(self, slab: int) -> bytes:
        assert self._env is not None
        if not 0 <= slab < self._slabs or not self._sequences[slab]:
            return b""
        with self._env.begin() as transaction:
            cell = transaction.get(_KEY.pack(slab))
        return self._checked(cell, slab)[CELL_ROW]

    def _cells(self, first: int) -> bytes:
        """Those of a chunk that are not erased, joined."""
        assert self._env is not None
        end = min(first + wire.CHUNK_SLABS, self._slabs)
        wanted = [slab for slab in range(first, end) if self._sequences[slab]]
        cells = []
        if wanted:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                there = cursor.set_range(_KEY.pack(first))
                for slab in wanted:
                    key, cell = cursor.item() if there else (b"", b"")
                    if key != _KEY.pack(slab):
                        raise Damage(f"the cell of slab {slab} is not where it was put")
                    cell = self._checked(cell, slab)
                    if slab and cell[CELL_ROW] != _ZERO_ROW:
                        cells.append(cell)
                    there = cursor.next()
        return b"".join(cells)

    def _checked(self, cell: bytes | None, slab: int) -> bytes:
        if cell is None or len(cell) != CELL_BYTES:
            raise Damage(f"slab {slab} has no cell")
        if CELL.unpack_from(cell)[1] != self._sequences[slab]:
            raise Damage(f"the cell of slab {slab} is an old one")
        return cell

    def _put(self, rows: dict[int, bytes]) -> None:
        """Write rows durably: into this environment, or with everything else into a new one."""
        if not rows:
            return
        try:
            self._write(rows)
        except (lmdb.Error, OSError, Damage):
            self._renew(rows)

    def _write(self, rows: dict[int, bytes]) -> None:
        """One transaction. It is read back before it is believed."""
        assert self._env is not None
        self._sequence += 1
        cells = self._encoded(rows)
        signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_CPU_S)
        with self._env.begin(write=True) as transaction:
            # Where the next page goes comes from the file.
            if self._state() != self._mark:
                raise Damage("the environment was changed by somebody else")
            for slab, cell in cells.items():
                transaction.put(_KEY.pack(slab), cell)
        first_page = self._mark[0] + 1
        self._mark = self._state()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._read_back(self._fd, cells, first_page)
        if self._sync:
            os.fdatasync(self._fd)
        for slab, row in rows.items():
            self._sequences[slab] = self._sequence
            self._generations[slab] = _generation(row)

    def _encoded(self, rows: dict[int, bytes]) -> dict[int, bytes]:
        return {slab: wire.encode_cell(self._sequence, slab, row) for slab, row in rows.items()}

    def _read_back(self, fd: int, cells: dict[int, bytes], first_page: int) -> None:
        """Raises Damage unless cells of one transaction lie in the pages from this one on."""
        missing = set(cells.values())
        theirs = re.compile(re.escape(next(iter(missing))[:12]), re.DOTALL)
        start, end = (page * self._page_bytes for page in (first_page, self._mark[0] + 1))
        for _, block in _blocks(fd, start, end):
            for match in theirs.finditer(block):
                missing.discard(block[match.start() : match.start() + CELL_BYTES])
        if missing:
            raise Damage(f"{len(missing)} cells are not where they were written")

    def _state(self) -> tuple[int, int]:
        assert self._env is not None
        info = self._env.info()
        return info["last_pgno"], info["last_txnid"]

    # ---- from the old file to a new one

    def _renew(self, rows: dict[int, bytes]) -> None:
        """Take the newest cell of each slab from the file, whatever state it is in, and put
        them, and these rows, into a new environment that takes its place."""
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self.close()
        places = self._find()
        self._sequence = 1 + max(self._sequence, max(self._sequences, default=0))
        cells = self._encoded(rows)
        for slab in rows:
            self._sequences[slab] = self._sequence
        try:
            self._open(self._spare_path, self._spare_fd)
            self._copy(places, cells)
            if cells:
                self._read_back(self._spare_fd, cells, 0)
        except lmdb.Error:
            # A write that is cut short for want of room is an I/O error to LMDB.
            size_bytes = os.fstat(self._spare_fd).st_size
            os.posix_fallocate(self._spare_fd, size_bytes, _BLOCK_BYTES)
            raise
        if self._sync:
            os.fdatasync(self._spare_fd)
        self._number += 1
        path = self._directory / f"records-{self._number}.mdb"
        self._spare_path.rename(path)
        self._spare_path, self._path = self._path, path
        self._spare_fd, self._fd = self._fd, self._spare_fd
        if self._sync:
            directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _find(self) -> memoryview:
        """Where the newest cell of each slab lies in the file. `_sequences` are right then."""
        places, sequences = _numbers(self._slabs), _numbers(self._slabs)
        for start, block in _blocks(self._fd, 0, os.fstat(self._fd).st_size):
            behind = 0
            for match in _MAGIC.finditer(block):
                at = match.start()
                if at < behind or at + CELL_BYTES > len(block):
                    continue
                sequence, slab = _HEADER.unpack_from(block, at + 4)
                if slab < self._slabs and sequence <= sequences[slab]:
                    continue  # most are older, or copies
                found = wire.whole_cell(block[at : at + CELL_BYTES])
                if found is None:
                    continue
                behind = at + CELL_BYTES
                sequence, slab = _HEADER.unpack_from(found, 4)
                if slab < self._slabs and sequence > sequences[slab]:
                    sequences[slab] = sequence
                    places[slab] = start + at
            self._look_up()
        self._sequences = sequences
        return places

    def _copy(self, places: memoryview, changed: dict[int, bytes]) -> None:
        """Into the environment that is open. `_generations` are right then."""
        cells: list[tuple[bytes, bytes]] = []
        for slab, sequence in enumerate(self._sequences):
            if not sequence:
                continue
            cell = changed.get(slab)
            if cell is None:
                cell = wire.whole_cell(os.pread(self._fd, CELL_BYTES, places[slab]))
            if cell is None or _HEADER.unpack_from(cell, 4) != (sequence, slab):
                raise Damage(f"the cell of slab {slab} changed while it was copied")
            # A place is read before the generation takes it.
            (places[slab],) = _GENERATION.unpack_from(cell, CELL_ROW.start + 8)
            cells.append((_KEY.pack(slab), cell))
            if len(cells) == _CELLS_AT_ONCE:
                self._append(cells)
                cells = []
        self._append(cells)
        self._generations = places
        self._mark = self._state()

    def _append(self, cells: list[tuple[bytes, bytes]]) -> None:
        assert self._env is not None
        self._look_up()
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(cells, append=True)

    def _open(self, path: Path, fd: int) -> None:
        """Make an empty environment of a file, in the room that it has."""
        memory_fd = os.memfd_create("prefixd-empty", os.MFD_CLOEXEC)
        try:
            lmdb.open(f"/proc/self/fd/{memory_fd}", subdir=False, lock=False).close()
            os.pwrite(fd, os.pread(memory_fd, _BLOCK_BYTES, 0), 0)
        finally:
            os.close(memory_fd)
        lock_path = path.with_name(f"{path.name}-lock")
        lock_path.unlink(missing_ok=True)
        self._env = lmdb.open(
            str(path),
            map_size=wire.file_bytes(self._slabs),
            subdir=False,
            create=False,
            mode=0o600,
            sync=False,
            metasync=False,
            readahead=False,
            max_readers=4,
        )
        lock_path.unlink()
        self._page_bytes = self._env.stat()["psize"]
        self._oldest = self._env.begin()

    def close(self) -> None:
        if self._oldest is not None:
            self._oldest.abort()
        if self._env is not None:
            self._env.close()
        self._oldest = self._env = None

    def _look_up(self) -> None:
        """Raises Abandoned if the daemon ended meanwhile."""
        with suppress(BlockingIOError):
            if not self._daemon.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise Abandoned


def _generation(row: bytes) -> int:
    """Every kind of row has that of its entry there."""
    generation: int = _GENERATION.unpack_from(row, 8)[0]
    return generation


def _numbers(count: int) -> memoryview:
    """Zeros, u64, which take memory once they are something else."""
    return memoryview(mmap.mmap(-1, max(1, 8 * count))).cast("Q")


def _blocks(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """A range of a file, which begins and ends with a page, piece by piece."""
    while start < end:
        block = os.pread(fd, min(_BLOCK_BYTES, end - start), start)
        if not block:
            return
        yield start, block
        start += len(block)


def _wait_for_others(directory: Path) -> int:
    """Take the directory's lock, which the process of an earlier daemon may still have."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    until = time.monotonic() + _OTHER_ENDS_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(f"another process uses the records in {directory}") from None
        time.sleep(0.01)


def _is_full(problem: BaseException) -> bool:
    """Is there no room left? lmdb tells of most errors by their text alone."""
    if isinstance(problem, lmdb.MapFullError | lmdb.TxnFullError | lmdb.DiskError):
        return True
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(problem, "errno", 0) in codes or any(
        os.strerror(code) in str(problem) for code in codes
    )


def serve(daemon: socket.socket, directory: Path, slabs: int, sync: bool) -> None:
    """Answer requests until the daemon hangs up, or something fails that a new start may mend."""
    try:
        _wait_for_others(directory)
        table = Table(directory, slabs, sync=sync, daemon=daemon)
        wire.send(daemon, ["ok", None])
        requests: dict[str, Callable[..., Any]] = {
            "apply": table.apply,
            "read": table.read,
            "chunk": table.chunk,
        }
        while True:
            name, *arguments = wire.receive(daemon)
            answer: Any = requests[name](*arguments)
            wire.send(daemon, ["ok", answer])
    except (EOFError, Abandoned, ConnectionError):
        return
    except Exception as problem:
        with suppress(OSError):
            kind = "full" if _is_full(problem) else "error"
            wire.send(daemon, [kind, str(problem) or type(problem).__name__])


def main() -> None:
    """Arguments: the descriptor of a socket, the directory, its slabs, and whether to sync."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They mean the daemon, which still has to write; the end of the socket ends this.
        signal.signal(number, signal.SIG_IGN)
    fd, directory, slabs, sync = sys.argv[1:]
    serve(socket.socket(fileno=int(fd)), Path(directory), int(slabs), sync == "sync")


if __name__ == "__main__":
    main()
