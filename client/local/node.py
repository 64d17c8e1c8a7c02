"""What the daemon handed over: its index, its arenas and its disk tier, to be read in place.

Reading without asking is optimistic: look an entry up, copy its bytes, look it up again. The
daemon removes the row of an entry, and commits that, before anything is written to its extents;
a row of the same generation afterwards therefore says that the copy is good.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import lmdb

from ...proto import disk, local
from ...proto import prefixd_pb2 as pb
from ...proto.errors import RecordError
from ...proto.index import INCARNATION_ROW, IndexRow, generation_of, unpack_row
from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ..results import Entry
from .calls import LocalCalls
from .environments import Environment
from .staging import StagingMemory


class Arena:
    """A tier's memory, mapped read-only. Takes over `fd`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            self._mapping = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)

    def views(self, row: IndexRow, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """A range of a payload where it lies, one view per extent."""
        skip_bytes = row.payload_offset + offset_bytes
        views: list[memoryview] = []
        for start, extent_bytes in zip(row.location[::2], row.location[1::2], strict=True):
            if not length_bytes:
                break
            if skip_bytes >= extent_bytes:
                skip_bytes -= extent_bytes
                continue
            taken_bytes = min(extent_bytes - skip_bytes, length_bytes)
            begin = start + skip_bytes
            views.append(self._view[begin : begin + taken_bytes])
            length_bytes -= taken_bytes
            skip_bytes = 0
        return views

    def close(self) -> None:
        """Unmap it, now or when the last view into it is gone."""
        self._view.release()
        with suppress(BufferError):
            self._mapping.close()


class LocalNode:
    """Read access to one start of a daemon. Thread-safe.

    `refused` says which feature is missing, and why.
    """

    def __init__(
        self,
        response: pb.HandOverResponse,
        fds: dict[str, int],
        ref: pb.SessionRef,
        calls: LocalCalls,
    ) -> None:
        """Takes over `fds` and `calls`. `ref`: the session that they were handed to."""
        self.ref: Final = ref
        self.calls: Final = calls
        self._incarnation: Final = ref.incarnation
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False
        self.refused: Final = dict(response.refused)
        self._index: Environment | None = None
        self._disk: Environment | None = None
        self.arenas: Final[dict[int, Arena]] = {}
        self.staging: StagingMemory | None = None
        sizes = {local.RAM: response.ram_arena_bytes, local.SHM: response.shm_arena_bytes}
        tiers = {local.RAM: Tier.RAM, local.SHM: Tier.SHM}
        for name, fd in fds.items():
            try:
                if name in tiers:
                    self.arenas[tiers[name]] = Arena(fd, sizes[name])
                elif name == local.STAGING:
                    self.staging = StagingMemory(fd, response.staging_bytes)
                else:
                    self._open_environment(name, fd)
            except (OSError, ValueError, lmdb.Error) as problem:
                self.refused[name] = str(problem)

    def _open_environment(self, name: str, fd: int) -> None:
        try:
            if name == local.INDEX:
                self._index = Environment(fd)
            elif name == local.DISK:
                self._disk = Environment(fd, disk.CHUNKS)
        finally:
            os.close(fd)

    @property
    def indexed(self) -> bool:
        """Can entries be looked up here?"""
        return self._index is not None

    def readable(self, tier: int) -> bool:
        """Can entries of that tier be read here?"""
        return tier in self.arenas or (tier == Tier.DISK and self._disk is not None)

    def enter(self) -> bool:
        """Before anything that looks at the node's memory, which is not taken away before
        `leave`. False: it was closed already, and there is nothing to leave."""
        with self._lock:
            if self._closing:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    # ---- looking up: what the index holds under keys, all of one moment. Raises lmdb.Error, and
    # RecordError when nobody may believe the index: whoever asks has to ask the daemon.

    def get(self, keys: Iterable[Key]) -> list[bytes | None]:
        """The packed rows of keys; None where there is none."""
        with self._begin() as txn:
            self._check(txn)
            return [txn.get(key) for key in keys]

    def get_run(self, keys: Iterable[Key]) -> list[tuple[Key, bytes]]:
        """Keys and packed rows up to the first key that is not there; `keys` may be lazy, no
        more than one beyond the last hit is taken."""
        found: list[tuple[Key, bytes]] = []
        with self._begin() as txn:
            self._check(txn)
            for key in keys:
                data = txn.get(key)
                if data is None:
                    break
                found.append((key, data))
        return found

    def get_first(self, keys: Iterable[Key]) -> tuple[int, Key, bytes] | None:
        """The first key that is there, with its position and its packed row."""
        with self._begin() as txn:
            self._check(txn)
            for position, key in enumerate(keys):
                data = txn.get(key)
                if data is not None:
                    return position, key, data
        return None

    def _begin(self) -> Any:
        # Not typed: what it reads is bytes here, and would be views with other arguments.
        assert self._index is not None, "asked without an index"
        return self._index.lmdb.begin()

    def _check(self, txn: Any) -> None:
        if txn.get(INCARNATION_ROW) != self._incarnation:
            # Another start writes it now, of arenas that we don't have; or its daemon could not
            # keep it true.
            raise RecordError("the index is not that of this session's daemon")

    def rows(self, keys: Iterable[Key]) -> list[IndexRow | None]:
        """The rows of keys; None where there is none."""
        return [None if data is None else unpack_row(data) for data in self.get(keys)]

    def unchanged(self, entries: Sequence[Entry], rows: Mapping[Key, bytes]) -> bool:
        """Are the rows of all entries still those, or else at least of the same generation?"""
        found = self.get(entry.key for entry in entries)
        return all(
            data is not None
            and (data == rows.get(entry.key) or generation_of(data) == entry.generation)
            for data, entry in zip(found, entries, strict=True)
        )

    # ---- reading

    def views(self, row: IndexRow, offset_bytes: int, length_bytes: int) -> list[memoryview]:
        """A range of a payload in an arena, in place. Nothing of it is verified, and it is only
        good while the entry is claimed, or if its row is unchanged after it was copied."""
        return self.arenas[row.tier].views(row, offset_bytes, length_bytes)

    def disk_chunks(
        self, key: Key, offset_bytes: int, length_bytes: int
    ) -> Iterator[tuple[int, memoryview]]:
        """A range of a payload on disk, chunk by chunk: offset from its start, bytes.

        The views belong to a read transaction that ends with the iteration: copy, don't keep.
        Raises RecordError when a chunk is missing.
        """
        assert self._disk is not None
        with self._disk.lmdb.begin(db=self._disk.table, buffers=True) as txn:
            done_bytes = 0
            for index, part in disk.chunk_ranges(offset_bytes, length_bytes):
                chunk = txn.get(disk.chunk_key(key, index))
                if chunk is None or len(chunk) < part.stop:
                    raise RecordError(f"chunk {index} of {key.hex()} is not there")
                yield done_bytes, memoryview(chunk)[part]
                done_bytes += part.stop - part.start

    def close(self) -> None:
        """Give everything back, as soon as nobody is using it. Views that are held keep their
        arena mapped."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            busy = self._users
        self.calls.close()
        if not busy:
            self._close()

    def _close(self) -> None:
        for arena in self.arenas.values():
            arena.close()
        self.arenas.clear()
        if self.staging is not None:
            self.staging.close()
        for environment in (self._index, self._disk):
            if environment is not None:
                environment.close()
        self._index = self._disk = None
