"""The process that keeps the disk tier's rows in LMDB: `python -m prefixd.tiers.lmdb_child`.

LMDB maps its file and trusts its content: of 300 environments with four flipped bits 206 could not
be read to the end, and 8 killed their reader. So everything that LMDB returns is checked here, and
four rules limit what it can destroy.

1. **Every start reads the file as plain bytes**, never mapped, and takes the newest cell of each
   slab (`lmdb_wire`) from it, wherever it lies. Nothing else that LMDB stores is needed. The cells
   are copied into the spare file, which replaces the old one once it is durable. A start of the
   daemon, the end of this process, and a failed or doubtful transaction are all handled like this
   (`_renew`).
2. **No page is written twice** (`lmdb_file`). An acknowledged cell therefore stays where it was
   written until the whole file is replaced.
3. **A batch is acknowledged after its cells were read back** with `pread` from the pages that it
   added, and synced. What LMDB reads later is compared with the sequence numbers in memory.
4. **A file is replaced before it is full, a slice at a time.** Once half of its initial room is
   used, each put also copies cells into the spare file, in order of slabs. The share of the
   remaining slabs that it copies is the share of the remaining pages that it took. New cells of
   slabs that were copied already go into both files, into the old one first: the spare file has no
   cell that is not acknowledged. When all is copied and durable, the spare file takes over. Until
   then nothing needs it: if it fails, the copy starts again. While no requests come, larger slices
   are copied.

So a single flipped bit costs nothing: it is repaired (`lmdb_wire.whole_cell`). Worse damage costs
the cells that it hits. An older cell of the slab may be found then, of an erased entry. A later
entry in its room takes precedence (`Records`), and its payload has a checksum.

There is one sync a batch. LMDB's own syncs are off, because its order of writes does not matter
here. The spare file is synced whenever `_UNSYNCED_BYTES` were added to it, so that no sync takes
long.

Memory: 16 bytes for each slab with a row. Each transaction has its own sequence number.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb

from . import lmdb_wire as wire
from .lmdb_file import CellFile, Damage, blocks
from .lmdb_wire import CELL_BYTES, CELL_MAGIC, CELL_ROW

_GENERATION: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<QI")
_MAGIC: Final = re.compile(re.escape(CELL_MAGIC))
_ZERO_ROW: Final = bytes(wire.ROW_BYTES)
_CELLS_AT_ONCE: Final = 16384
#: The smallest slice: any slice takes some pages, however small it is.
_MIN_SLICE_SLABS: Final = 1024
#: Slices that are copied while no requests come, and the pause after which that begins.
_IDLE_SLICE_SLABS: Final = 4096
_IDLE_S: Final = 0.05
#: The part of a file's pages that should be unused when the copy ends.
_SPARE_PART: Final = 1 / 32
_UNSYNCED_BYTES: Final = 4 * 2**20
#: How long the process of an earlier daemon may take to end.
_OTHER_ENDS_S: Final = 30.0


class Abandoned(Exception):
    """The daemon has ended."""


class Table:
    """The cells of `slabs` slabs in `directory`. Raises OSError, lmdb.Error, Damage."""

    def __init__(self, directory: Path, slabs: int, *, sync: bool, daemon: socket.socket) -> None:
        self._directory = directory
        self._slabs = slabs
        self._sync = sync
        self._daemon = daemon
        found = sorted(
            (int(match[1]), path)
            for path in directory.iterdir()
            if (match := wire.FILE_NAME.fullmatch(path.name))
        )
        if len(found) < 2:
            raise OSError(f"{directory / 'records-*.mdb'} was deleted while it was in use")
        (_, spare_path), (self._number, path) = found[-2:]
        # A process that was killed between two steps may have left these.
        for left in [path for _, path in found[:-2]] + list(directory.glob("records-*.mdb-lock")):
            left.unlink()
        self._current = CellFile(path, slabs, sync=sync)
        self._spare = CellFile(spare_path, slabs, sync=sync)
        #: By slab: the sequence number of its cell (0: no cell), and the generation in its row.
        self._sequences = _numbers(slabs)
        self._generations = _numbers(slabs)
        self._sequence = 0
        #: How many slabs were copied into the spare file. None: no copy is under way.
        self._copied: int | None = None
        #: Pages that the current file used when it took over.
        self._first_pages = 0
        #: Sentences for the daemon's log.
        self.notes: list[str] = []
        self._renew()
        size_bytes = wire.file_bytes(slabs)
        for file in (self._current, self._spare):
            if os.fstat(file.fd).st_size > size_bytes:
                os.ftruncate(file.fd, size_bytes)

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
        if not os.fstat(self._current.fd).st_nlink:
            raise OSError(f"{self._current.path} was deleted while it was in use")
        if changed:
            self._put(changed)

    def read(self, slab: int) -> bytes:
        if not 0 <= slab < self._slabs or not self._sequences[slab]:
            return b""
        return self._cells(slab, slab + 1)[0][1][CELL_ROW]

    def chunk(self, first: int) -> list[Any] | None:
        """The first slab of the next chunk that has any, and its cells that are not erased."""
        while first < self._slabs:
            found = self._cells(first, first + wire.CHUNK_SLABS)
            cells = [cell for slab, cell in found if slab and cell[CELL_ROW] != _ZERO_ROW]
            if cells:
                return [first, b"".join(cells)]
            first += wire.CHUNK_SLABS
        return None

    # ---- LMDB

    def _cells(self, first: int, end: int) -> list[tuple[int, bytes]]:
        """`_checked`, from a new environment if this one is damaged."""
        try:
            return self._checked(first, end)
        except (lmdb.Error, Damage) as problem:
            self._renew(problem)
            return self._checked(first, end)

    def _checked(self, first: int, end: int) -> list[tuple[int, bytes]]:
        """The cells of a range of slabs, checked, in order: (slab, cell)."""
        sequences = self._sequences
        slabs = [slab for slab in range(first, min(end, self._slabs)) if sequences[slab]]
        found = []
        for slab, stored in zip(slabs, self._current.cells(slabs), strict=True):
            cell = wire.whole_cell(stored)
            if cell is None or cell[4:16] != _HEADER.pack(sequences[slab], slab):
                raise Damage(f"the cell of slab {slab} is damaged, or an old one")
            found.append((slab, cell))
        return found

    def _put(self, rows: dict[int, bytes]) -> None:
        """Write rows durably."""
        try:
            if self._current.pages_left < self._current.pages_of(len(rows)):
                # A large batch, whose pages the file may not have room for.
                self._copy_slice(self._slabs)
            try:
                self._write(rows)
            except lmdb.MapFullError:
                self._copy_slice(self._slabs)
                self._write(rows)
        except (lmdb.Error, OSError, Damage) as problem:
            self._renew(problem)
            self._write(rows)

    def _write(self, rows: dict[int, bytes]) -> None:
        """Write one transaction, and copy the slice that is due with it."""
        self._sequence += 1
        sequence, before = self._sequence, self._current.pages_used
        cells = [
            (slab, wire.encode_cell(sequence, slab, row)) for slab, row in sorted(rows.items())
        ]
        self._current.write(cells)
        self._current.sync()
        for slab, row in rows.items():
            self._sequences[slab] = sequence
            self._generations[slab] = _generation(row)
        # The transaction is durable, whatever happens from here on.
        if self._copied is not None:
            copied = self._copied
            self._write_spare([cell for cell in cells if cell[0] < copied], append=False)
        left, used = self._current.pages_left, self._current.pages_used
        if left <= used - self._first_pages:
            took, usable = used - before, left - int(self._current.pages * _SPARE_PART)
            part = 1.0 if usable <= 0 else took / (took + usable)
            rest = self._slabs - (self._copied or 0)
            self._copy_slice(max(_MIN_SLICE_SLABS, int(rest * part) + 1))

    # ---- the next file, slice by slice

    @property
    def copying(self) -> bool:
        return self._copied is not None

    def copy_slice_idle(self) -> None:
        """Copy the next slice while no requests come."""
        try:
            self._copy_slice(_IDLE_SLICE_SLABS)
        except (lmdb.Error, Damage) as problem:
            self._renew(problem)

    def _copy_slice(self, slabs: int) -> None:
        """Copy the cells of the next `slabs` into the spare file. Starts a copy if none is under
        way. After the last slab the spare file takes over."""
        if self._copied is None:
            try:
                self._spare.reset()
            except (lmdb.Error, OSError):
                return  # the next put tries it again
            self._copied = 0
        end = min(self._copied + slabs, self._slabs)
        while self._copied is not None and self._copied < end:
            upto = min(self._copied + _CELLS_AT_ONCE, end)
            cells = self._checked(self._copied, upto)
            self._copied = upto
            self._write_spare(cells, append=True)
            self._check_daemon()
        if self._copied == self._slabs:
            self._take_spare()

    def _write_spare(self, cells: list[tuple[int, bytes]], *, append: bool) -> None:
        """If this fails, the next put starts the copy again."""
        try:
            self._spare.write(cells, append=append)
            if self._spare.unsynced_bytes >= _UNSYNCED_BYTES:
                self._spare.sync()
        except (lmdb.Error, OSError, Damage):
            self._spare.close()
            self._copied = None

    def _take_spare(self) -> None:
        """The spare file has everything: make it durable, and the current one."""
        self._spare.sync()
        self._number += 1
        path = self._directory / f"records-{self._number}.mdb"
        self._spare.path.rename(path)
        self._spare.path = path
        self._current, self._spare = self._spare, self._current
        self._spare.close()
        self._copied = None
        self._first_pages = self._current.pages_used
        if self._sync:
            directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    # ---- the next file, from a file in any state

    def _renew(self, problem: Exception | None = None) -> None:
        """Copy the newest cell of each slab from the current file, whatever its state, into the
        spare one, which takes over."""
        if problem is not None:
            self.notes.append(f"collected anew: {problem or type(problem).__name__}")
        self._current.close()
        self._copied = None
        places = self._find()
        self._sequence = max(self._sequence, max(self._sequences, default=0))
        self._spare.reset()
        self._copy(places)
        self._take_spare()

    def _find(self) -> memoryview:
        """Where the newest cell of each slab lies in the file. Also sets `_sequences`."""
        places, sequences = _numbers(self._slabs), _numbers(self._slabs)
        fd = self._current.fd
        for start, block in blocks(fd, 0, os.fstat(fd).st_size):
            behind = 0
            for match in _MAGIC.finditer(block):
                at = match.start()
                if at < behind or at + CELL_BYTES > len(block):
                    continue
                sequence, slab = _HEADER.unpack_from(block, at + 4)
                if slab < self._slabs and sequence <= sequences[slab]:
                    continue  # most cells are older ones, or copies
                found = wire.whole_cell(block[at : at + CELL_BYTES])
                if found is None:
                    continue
                behind = at + CELL_BYTES
                sequence, slab = _HEADER.unpack_from(found, 4)
                if slab < self._slabs and sequence > sequences[slab]:
                    sequences[slab] = sequence
                    places[slab] = start + at
            self._check_daemon()
        self._sequences = sequences
        return places

    def _copy(self, places: memoryview) -> None:
        """Copy the cells at `places` into the empty spare file. Also sets `_generations`."""
        cells: list[tuple[int, bytes]] = []
        repaired = 0
        for slab, sequence in enumerate(self._sequences):
            if not sequence:
                continue
            stored = os.pread(self._current.fd, CELL_BYTES, places[slab])
            cell = wire.whole_cell(stored)
            if cell is None or cell[4:16] != _HEADER.pack(sequence, slab):
                raise Damage(f"the cell of slab {slab} changed while it was copied")
            repaired += cell != stored
            # The array is reused: from here on it has the slab's generation.
            places[slab] = _generation(cell[CELL_ROW])
            cells.append((slab, cell))
            if len(cells) == _CELLS_AT_ONCE:
                self._spare.write(cells, append=True)
                self._check_daemon()
                cells = []
        self._spare.write(cells, append=True)
        self._generations = places
        if repaired:
            self.notes.append(f"{repaired} rows had a flipped bit, which was flipped back")

    def _check_daemon(self) -> None:
        """Raises Abandoned if the daemon has ended."""
        with suppress(BlockingIOError):
            if not self._daemon.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise Abandoned


def _generation(row: bytes) -> int:
    """The generation of a row's entry, which every kind of row has in the same place."""
    generation: int = _GENERATION.unpack_from(row, 8)[0]
    return generation


def _numbers(count: int) -> memoryview:
    """`count` zeros, u64. Memory is used only once they change."""
    return memoryview(mmap.mmap(-1, max(1, 8 * count))).cast("Q")


def _lock_directory(directory: Path) -> int:
    """Take the directory's lock. The process of an earlier daemon may still hold it for a while."""
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
    """Whether a device or the map is full. For most errors lmdb gives nothing but a text."""
    if isinstance(problem, lmdb.MapFullError | lmdb.TxnFullError | lmdb.DiskError):
        return True
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(problem, "errno", 0) in codes or any(
        os.strerror(code) in str(problem) for code in codes
    )


def serve(daemon: socket.socket, directory: Path, slabs: int, sync: bool) -> None:
    """Answer requests until the daemon hangs up, or until a failure that a new start may solve."""
    try:
        _lock_directory(directory)
        table = Table(directory, slabs, sync=sync, daemon=daemon)
        _answer(daemon, table, None)
        requests: dict[str, Callable[..., Any]] = {
            "apply": table.apply,
            "read": table.read,
            "chunk": table.chunk,
        }
        while True:
            while table.copying and not select.select([daemon], [], [], _IDLE_S)[0]:
                table.copy_slice_idle()
            name, *arguments = wire.receive(daemon)
            _answer(daemon, table, requests[name](*arguments))
    except (EOFError, Abandoned, ConnectionError):
        return
    except Exception as problem:
        with suppress(OSError):
            kind = "full" if _is_full(problem) else "error"
            wire.send(daemon, [kind, str(problem) or type(problem).__name__])


def _answer(daemon: socket.socket, table: Table, answer: Any) -> None:
    notes, table.notes = table.notes, []
    wire.send(daemon, ["ok", answer, notes])


def main() -> None:
    """Arguments: the descriptor of a socket, the directory, its slabs, and whether to sync."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # These are for the daemon, which still has to write. This process ends with the socket.
        signal.signal(number, signal.SIG_IGN)
    fd, directory, slabs, sync = sys.argv[1:]
    serve(socket.socket(fileno=int(fd)), Path(directory), int(slabs), sync == "sync")


if __name__ == "__main__":
    main()
