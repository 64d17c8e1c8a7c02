"""One file with an LMDB environment of cells (`lmdb_wire`): no page of it is written twice.

LMDB takes no freed page again while a reader is open that is older, so one is held, from before
the first write. Before anything is written, the last page and the last transaction have to be
those that are remembered here. So what was written lies where it was written until `reset`.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import lmdb

from . import lmdb_wire as wire
from .lmdb_wire import CELL_BYTES

_KEY: Final = struct.Struct(">I")
#: Read at once; pages never lie across, whatever their size.
BLOCK_BYTES: Final = 2**20
#: LMDB may walk in circles in a damaged file: then the kernel ends this process.
_MAX_CPU_S: Final = 60.0


class Damage(Exception):
    """LMDB says what can't be."""


class CellFile:
    """The file `path`, which is there, for the cells of `slabs` slabs.

    `reset` comes before anything else that needs LMDB. Raises OSError, lmdb.Error, Damage.
    """

    def __init__(self, path: Path, slabs: int, *, sync: bool) -> None:
        self.path = path
        self.fd: Final = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._map_bytes: Final = wire.file_bytes(slabs)
        self._sync: Final = sync
        self._env: lmdb.Environment | None = None
        self._oldest: lmdb.Transaction | None = None
        self._page_bytes = mmap.PAGESIZE
        #: LMDB's last page and last transaction
        self._mark = (0, 0)
        self._synced_page = 0

    @property
    def pages(self) -> int:
        """Pages that have room. A device may have less than the map: then the file is shorter."""
        return min(self._map_bytes, os.fstat(self.fd).st_size) // self._page_bytes

    @property
    def pages_left(self) -> int:
        return self.pages - self.pages_used

    @property
    def pages_used(self) -> int:
        return self._mark[0] + 1

    def pages_of(self, cells: int) -> int:
        """About how many pages a transaction that changes `cells` takes at most: it copies every
        page that it changes."""
        assert self._env is not None
        stat = self._env.stat()
        return int(min(cells, stat["leaf_pages"]) + stat["branch_pages"] + cells // 16 + 16)

    @property
    def unsynced_bytes(self) -> int:
        """What was added since the last `sync`."""
        return (self._mark[0] - self._synced_page) * self._page_bytes

    def reset(self) -> None:
        """Make it an empty environment, in the room that it has."""
        self.close()
        memory_fd = os.memfd_create("prefixd-empty", os.MFD_CLOEXEC)
        try:
            lmdb.open(f"/proc/self/fd/{memory_fd}", subdir=False, lock=False).close()
            os.pwrite(self.fd, os.pread(memory_fd, BLOCK_BYTES, 0), 0)
        finally:
            os.close(memory_fd)
        lock_path = self.path.with_name(f"{self.path.name}-lock")
        lock_path.unlink(missing_ok=True)
        self._env = lmdb.open(
            str(self.path),
            map_size=self._map_bytes,
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
        self._mark, self._synced_page = self._state(), 0

    def close(self) -> None:
        """The environment; the file stays open."""
        if self._oldest is not None:
            self._oldest.abort()
        if self._env is not None:
            self._env.close()
        self._oldest = self._env = None

    # ---- cells

    def get(self, slab: int) -> bytes:
        """The cell of a slab that has one."""
        return self.cells([slab])[0]

    def cells(self, slabs: Sequence[int]) -> list[bytes]:
        """The cells of these slabs, which are all that are there between the first and the last
        of them. Nothing is known of a cell but its length."""
        assert self._env is not None
        found = []
        with self._env.begin() as transaction:
            cursor = transaction.cursor()
            if slabs and cursor.set_range(_KEY.pack(slabs[0])):
                for slab, (key, cell) in zip(slabs, cursor.iternext(), strict=False):
                    if key != _KEY.pack(slab) or len(cell) != CELL_BYTES:
                        raise Damage(f"the cell of slab {slab} is not where it was put")
                    found.append(cell)
        if len(found) < len(slabs):
            raise Damage(f"slab {slabs[len(found)]} has no cell")
        return found

    def write(self, cells: Sequence[tuple[int, bytes]], *, append: bool = False) -> None:
        """One transaction, read back from the pages that it added; `sync` makes it durable.

        `cells`: with their slabs, in order of these. `append`: none of the slabs that are there is
        behind the first of them; otherwise all are of one sequence number.
        """
        assert self._env is not None
        if not cells:
            return
        signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_CPU_S)
        try:
            with self._env.begin(write=True) as transaction:
                # Where the next page goes comes from the file.
                if self._state() != self._mark:
                    raise Damage("the environment was changed by another process")
                items = [(_KEY.pack(slab), cell) for slab, cell in cells]
                transaction.cursor().putmulti(items, append=append)
        except lmdb.MapFullError:
            raise
        except lmdb.Error:
            # A write that is cut short for want of room is an I/O error to LMDB.
            os.posix_fallocate(self.fd, os.fstat(self.fd).st_size, BLOCK_BYTES)
            raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        first_page = self._mark[0] + 1
        self._mark = self._state()
        self._read_back([cell for _, cell in cells], first_page, 4 if append else 12)

    def sync(self) -> None:
        if self._sync:
            os.fdatasync(self.fd)
        self._synced_page = self._mark[0]

    def _read_back(self, cells: Sequence[bytes], first_page: int, alike_bytes: int) -> None:
        """Raises Damage unless all these cells can be read from `first_page` on. The first
        `alike_bytes` bytes are the same in all of them."""
        missing = set(cells)
        theirs = re.compile(re.escape(cells[0][:alike_bytes]), re.DOTALL)
        start, end = (page * self._page_bytes for page in (first_page, self._mark[0] + 1))
        for _, block in blocks(self.fd, start, end):
            for match in theirs.finditer(block):
                missing.discard(block[match.start() : match.start() + CELL_BYTES])
        if missing:
            raise Damage(f"{len(missing)} cells are not where they were written")

    def _state(self) -> tuple[int, int]:
        assert self._env is not None
        info = self._env.info()
        return info["last_pgno"], info["last_txnid"]


def blocks(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """A range of a file, which begins and ends with a page, piece by piece."""
    while start < end:
        block = os.pread(fd, min(BLOCK_BYTES, end - start), start)
        if not block:
            return
        yield start, block
        start += len(block)
