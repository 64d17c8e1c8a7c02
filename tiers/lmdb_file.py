"""One file with an LMDB environment of cells (`lmdb_wire`), of which no page is written twice.

LMDB does not reuse a freed page while an older reader is open, so a reader is kept open from before
the first write. Before each write, the environment's last page and last transaction have to be
those that are remembered here. So everything that was written stays where it is until `reset`.
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
#: Read at once. No page crosses the boundary of a block, whatever the page size.
BLOCK_BYTES: Final = 2**20
#: LMDB may loop forever in a damaged file. The kernel ends this process then.
_MAX_CPU_S: Final = 60.0


class Damage(Exception):
    """LMDB returned something that can't be true."""


class CellFile:
    """The existing file `path`, for the cells of `slabs` slabs.

    Call `reset` before anything else that needs LMDB. Raises OSError, lmdb.Error, Damage.
    """

    def __init__(self, path: Path, slabs: int, *, sync: bool) -> None:
        self.path = path
        self.fd: Final = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._map_bytes: Final = wire.file_bytes(slabs)
        self._sync: Final = sync
        self._env: lmdb.Environment | None = None
        self._oldest: lmdb.Transaction | None = None
        self._page_bytes = mmap.PAGESIZE
        #: LMDB's last page and last transaction.
        self._mark = (0, 0)
        self._synced_page = 0

    @property
    def pages(self) -> int:
        """Pages that have room on the device. The file may be shorter than the map."""
        return min(self._map_bytes, os.fstat(self.fd).st_size) // self._page_bytes

    @property
    def pages_left(self) -> int:
        return self.pages - self.pages_used

    @property
    def pages_used(self) -> int:
        return self._mark[0] + 1

    def pages_of(self, cells: int) -> int:
        """About how many pages a transaction that changes this many cells takes at most. It copies
        every page that it changes."""
        assert self._env is not None
        stat = self._env.stat()
        return int(min(cells, stat["leaf_pages"]) + stat["branch_pages"] + cells // 16 + 16)

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that were added since the last `sync`."""
        return (self._mark[0] - self._synced_page) * self._page_bytes

    def reset(self) -> None:
        """Make the file an empty environment. It keeps its size."""
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
        """Close the environment. The file stays open."""
        if self._oldest is not None:
            self._oldest.abort()
        if self._env is not None:
            self._env.close()
        self._oldest = self._env = None

    # ---- cells

    def cells(self, slabs: Sequence[int]) -> list[bytes]:
        """The cells of these slabs. They have to be all slabs with a cell between the first and
        the last of them. Only the lengths of the cells are checked."""
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
        """Write one transaction, and read it back from the pages that it added. `sync` makes it
        durable.

        `cells`: (slab, cell), in order of the slabs. With `append`, no slab in the file comes after
        the first of them; without it, all cells have the same sequence number.
        """
        assert self._env is not None
        if not cells:
            return
        signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_CPU_S)
        try:
            with self._env.begin(write=True) as transaction:
                # LMDB reads from the file where the next page goes.
                if self._state() != self._mark:
                    raise Damage("the environment was changed by another process")
                items = [(_KEY.pack(slab), cell) for slab, cell in cells]
                transaction.cursor().putmulti(items, append=append)
        except lmdb.MapFullError:
            raise
        except lmdb.Error:
            # LMDB reports a full device as an I/O error. Here it is reported as what it is.
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
        """Raises Damage unless all these cells can be read from `first_page` on. Their first
        `alike_bytes` bytes are the same."""
        missing = set(cells)
        start_of_cell = re.compile(re.escape(cells[0][:alike_bytes]), re.DOTALL)
        start, end = (page * self._page_bytes for page in (first_page, self._mark[0] + 1))
        for _, block in blocks(self.fd, start, end):
            for match in start_of_cell.finditer(block):
                missing.discard(block[match.start() : match.start() + CELL_BYTES])
        if missing:
            raise Damage(f"{len(missing)} cells are not where they were written")

    def _state(self) -> tuple[int, int]:
        assert self._env is not None
        info = self._env.info()
        return info["last_pgno"], info["last_txnid"]


def blocks(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """A range of whole pages of a file, block by block."""
    while start < end:
        block = os.pread(fd, min(BLOCK_BYTES, end - start), start)
        if not block:
            return
        yield start, block
        start += len(block)
