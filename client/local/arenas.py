"""The arenas of the tiers, read in place: mapped memory for ram and shm, a file for disk.

Nothing is validated here: an arena returns the bytes that are at a place at this moment. Whether
they are those of an entry, the index shows after the copy (`node.LocalNode`).
"""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final
from weakref import finalize

from ...proto.arena_header import ARENA_HEADER_BYTES, read_arena_incarnation
from ...proto.errors import RecordError
from ...proto.index import ROW_BYTES, PackedRows
from ...proto.kernel import native
from ...proto.payload import (
    RELEASE_BYTES,
    FlatBytes,
    all_buffers_of,
    copy,
    copy_crc32c,
    crc32c,
    crc32c_of,
    views_of,
)
from ..wire.deadline import Deadline
from ..wire.transport import Copied
from .disk_reads import DeviceHangs, DiskReads

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Read and checksummed in pieces of this size, so that the checksum finds its bytes in the CPU
#: cache.
_PIECE_BYTES: Final = 2**20
#: What one call of the kernel reads from the page cache, in some milliseconds: an abandoned
#: restore ends after it.
_CALL_BYTES: Final = 32 * 2**20
#: Buffers that one `preadv` takes.
_IOV_MAX: Final = 1024


class TierMemory(ABC):
    """One tier's memory. Thread-safe."""

    @abstractmethod
    def read_into(
        self, location: tuple[int, ...], target: FlatBytes, *, check: bool, deadline: Deadline
    ) -> int | None:
        """Copy the first `len(target)` bytes of the extents at `location` into `target`.

        Returns the CRC32C of the copied bytes; None without `check`. Raises OSError if the bytes
        can't be read until the deadline, or the arena does not hold so many. Nothing writes into
        `target` after this has returned or raised.
        """

    @abstractmethod
    def read_all(
        self,
        rows: PackedRows,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[tuple[int, Copied]]:
        """`read_into` for the entries of these rows, and compare their CRC32C where `check` says
        so.

        Returns the positions of those that are not WHOLE, with what became of them. Raises OSError,
        if the same could be wrong with all of them, and ValueError unless there are as many targets
        and `check` as rows.
        """

    def _read_row(
        self,
        rows: PackedRows,
        position: int,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> bool:
        """Read one of them. False: its CRC32C is another one."""
        crc = self.read_into(
            (rows.offsets[position], rows.lengths[position]),
            targets[position],
            check=check[position],
            deadline=deadline,
        )
        return crc in (None, rows.payload_crc32c[position])

    def views(
        self,
        location: tuple[int, ...],  # noqa: ARG002
        offset_bytes: int,  # noqa: ARG002
        length_bytes: int,  # noqa: ARG002
    ) -> list[memoryview] | None:
        """A range of the extents in place, read-only, one view for each extent. None: it can only
        be copied. Raises OSError."""
        return None

    def views_all(self, rows: PackedRows) -> list[list[memoryview]] | None:  # noqa: ARG002
        """The payloads of such entries in place. None: they can only be copied. Raises OSError."""
        return None

    @abstractmethod
    def written_by(self, incarnation: bytes, deadline: Deadline) -> bool:
        """Whether this start of the daemon is the last one that wrote to the arena. False also if
        that can't be read until the deadline."""


class MappedArena(TierMemory):
    """Memory, mapped read-only. It is unmapped when the last view of it goes."""

    def __init__(self, fd: int, size_bytes: int, *, outlives_daemon: bool) -> None:
        """The caller keeps `fd`. `outlives_daemon`: the next start of the daemon may write to the
        same memory. Raises OSError, ValueError."""
        self._view: Final = memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ))
        self._outlives_daemon: Final = outlives_daemon

    def read_into(
        self,
        location: tuple[int, ...],
        target: FlatBytes,
        *,
        check: bool,
        deadline: Deadline,  # noqa: ARG002  # memory does not wait
    ) -> int | None:
        if len(location) == 2:
            # Nearly every entry has one extent: skip the loop over extents.
            start, extent_bytes = location
            size_bytes = len(target)
            view = self._view[start : start + size_bytes]
            if size_bytes > extent_bytes or len(view) != size_bytes:
                raise _beyond_the_end()
            if check:
                return copy_crc32c(target, view)
            copy(target, view)
            return None
        crc = at = 0
        for view in self.views(location, 0, len(target)):
            room = target[at : at + len(view)]
            if check:
                crc = copy_crc32c(room, view, crc)
            else:
                copy(room, view)
            at += len(view)
        return crc if check else None

    def read_all(
        self,
        rows: PackedRows,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[tuple[int, Copied]]:
        if native:
            wrong = native.restore(rows.packed, all_buffers_of(targets), check, self._view)
            return [(position, Copied.CORRUPT) for position in wrong]
        # Copies small blocks without a call for each.
        whole, end_bytes = self._view, len(self._view)
        wrong = []
        for position, (start, extent_bytes, target, checked, saved) in enumerate(
            zip(rows.offsets, rows.lengths, targets, check, rows.payload_crc32c, strict=True)
        ):
            size_bytes = len(target)
            stop = start + size_bytes
            if (
                size_bytes < RELEASE_BYTES
                and size_bytes <= extent_bytes
                and stop <= end_bytes
                and isinstance(target, memoryview)
            ):
                target[:] = whole[start:stop]
                right = not checked or crc32c(target) == saved
            else:
                right = self._read_row(rows, position, targets, check, deadline)
            if not right:
                wrong.append(position)
        return [(position, Copied.CORRUPT) for position in wrong]

    def views_all(self, rows: PackedRows) -> list[list[memoryview]] | None:
        whole, end_bytes = self._view, len(self._view)
        found: list[list[memoryview]] = []
        for start, extent_bytes, length_bytes in zip(
            rows.offsets, rows.lengths, rows.payload_bytes, strict=True
        ):
            stop = start + length_bytes
            if length_bytes > extent_bytes or stop > end_bytes:
                raise _beyond_the_end()
            found.append([whole[start:stop]])
        return found

    def views(
        self, location: tuple[int, ...], offset_bytes: int, length_bytes: int
    ) -> list[memoryview]:
        views = []
        for start, part_bytes in _parts(location, offset_bytes, length_bytes):
            view = self._view[start : start + part_bytes]
            if len(view) != part_bytes:
                raise _beyond_the_end()
            views.append(view)
        return views

    def written_by(self, incarnation: bytes, deadline: Deadline) -> bool:  # noqa: ARG002
        return not self._outlives_daemon or _incarnation(self._view) == incarnation


class FileArena(TierMemory):
    """A file on a disk, read with `preadv`, which reports a broken sector as an error. Reading a
    mapping would kill the process."""

    def __init__(self, fd: int, reads: DiskReads | None = None) -> None:
        """The caller keeps `fd`. `reads`: the client's threads for what is not in the page cache.
        Raises OSError."""
        self._fd: Final = os.dup(fd)
        self._reads: Final = reads or DiskReads()
        # Closed together with the object, so that no thread reads from a reused descriptor.
        finalize(self, os.close, self._fd).atexit = False

    def read_into(
        self, location: tuple[int, ...], target: FlatBytes, *, check: bool, deadline: Deadline
    ) -> int | None:
        self._reads.check_answers()
        return self._read(location, target, deadline, check=check)

    def read_all(
        self,
        rows: PackedRows,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[tuple[int, Copied]]:
        if not len(rows) == len(targets) == len(check):
            raise ValueError("there are not as many targets as rows")
        failed: list[tuple[int, Copied]] = []
        buffers = all_buffers_of(targets)
        at = 0
        while at < len(targets):
            try:
                self._reads.check_answers()
                filled, wrong = self._cached_rows(rows, at, buffers, check)
                failed += [(at + position, Copied.CORRUPT) for position in wrong]
                at += filled
                if filled:
                    continue
                # The page cache lacks a part of it, or may do so.
                if not self._read_row(rows, at, targets, check, deadline):
                    failed.append((at, Copied.CORRUPT))
            except (TimeoutError, DeviceHangs) as problem:
                # The others would not come in time either.
                return failed + [(n, outcome_of(problem)) for n in range(at, len(targets))]
            except OSError as problem:
                failed.append((at, outcome_of(problem)))
            at += 1
        return failed

    def _read(
        self, location: tuple[int, ...], target: FlatBytes, deadline: Deadline, *, check: bool
    ) -> int | None:
        crc = at = 0
        parts = list(_parts(location, 0, len(target)))
        for number, (start, part_bytes) in enumerate(parts):
            taken_bytes, crc = self._cached(start, target[at : at + part_bytes], crc, check=check)
            at += taken_bytes
            if taken_bytes < part_bytes:
                rest = [(start + taken_bytes, part_bytes - taken_bytes), *parts[number + 1 :]]
                for piece in self._reads.pieces(self, self._fd, rest, deadline):
                    room = target[at : at + len(piece)]
                    if check:
                        crc = copy_crc32c(room, piece, crc)
                    else:
                        copy(room, piece)
                    at += len(piece)
                break
        return crc if check else None

    def _cached_rows(
        self,
        rows: PackedRows,
        at: int,
        buffers: Sequence[Buffer | Sequence[Buffer]],
        check: Sequence[bool],
    ) -> tuple[int, list[int]]:
        """Read entries from position `at` on, up to the first one that the page cache does not have
        as a whole. Returns how many, and the positions from `at` of those whose CRC32C is another
        one."""
        if not native:
            return 0, []  # each entry is read by itself
        rest = rows.packed[at * ROW_BYTES :]
        return native.read_rows(rest, buffers[at:], check[at:], self._fd, _CALL_BYTES)

    def _cached(self, start: int, room: FlatBytes, crc: int, *, check: bool) -> tuple[int, int]:
        """Read what the page cache has, from `start` up to the first byte that it lacks. Returns
        the number of bytes, and their CRC32C, continuing `crc`."""
        at = 0
        while at < len(room):
            piece = room[at : at + _PIECE_BYTES]
            try:
                read_bytes = os.preadv(
                    self._fd, views_of(piece)[:_IOV_MAX], start + at, os.RWF_NOWAIT
                )
            except BlockingIOError:
                break
            except OSError as problem:
                if problem.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    break  # this file system can't tell what it has
                raise
            if not read_bytes:
                break  # the end of the file, or a kernel that says so of what it does not have
            if check:
                crc = crc32c_of(piece[:read_bytes], crc)
            at += read_bytes
        return at, crc

    def written_by(self, incarnation: bytes, deadline: Deadline) -> bool:
        header = memoryview(bytearray(ARENA_HEADER_BYTES))
        try:
            self._read((0, len(header)), header, deadline, check=False)
        except OSError:
            return False  # it can't be told
        return _incarnation(header) == incarnation


def outcome_of(problem: OSError) -> Copied:
    """What became of a copy that this ended. The exception itself is not kept: its frames refer to
    the arena, and would keep a dead daemon's until the cycle collector runs."""
    if isinstance(problem, DeviceHangs):
        return Copied.UNREADABLE
    return Copied.GONE  # a call to the daemon will say more, if there is time left


def _parts(
    location: tuple[int, ...], offset_bytes: int, length_bytes: int
) -> Iterator[tuple[int, int]]:
    """Where a range of an entry lies in the arena: start and length of each piece."""
    for start, extent_bytes in zip(location[::2], location[1::2], strict=True):
        if not length_bytes:
            return
        if offset_bytes >= extent_bytes:
            offset_bytes -= extent_bytes
            continue
        part_bytes = min(extent_bytes - offset_bytes, length_bytes)
        yield start + offset_bytes, part_bytes
        length_bytes -= part_bytes
        offset_bytes = 0
    if length_bytes:
        raise _beyond_the_end()


def _incarnation(header: memoryview | bytes) -> bytes | None:
    try:
        return read_arena_incarnation(header)
    except RecordError:
        return None


def _beyond_the_end() -> OSError:
    return OSError("the arena does not hold so many bytes")
