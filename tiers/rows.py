"""The rows of a tier's records: their layout, and the table that has one for each slab.

Offsets are from the start of the row, integers are little-endian. A row of zeros is free.

    entry                                          continuation
    offset  bytes  type  meaning                   offset  bytes  type  meaning
    ------  -----  ----  ------------------------  ------  -----  ----  ------------------------
         0      4  raw   "PFXE"                         0      4  raw   "PFXC"
         4      1  u8    format version, 1              4      1  u8    format version, 1
         5      1  u8    tier                           5      3  raw   zeros
         6      1  u8    save reason                    8      8  u64   generation of the entry
         7      1  u8    log2 of the slab              16      4  u32   slab of the entry's row
         8      8  u64   generation                    20      4  u32   extents in rows before
        16     32  raw   key                           24      4  u32   extents in this row
        48      8  u64   bytes of payload              28     96  u32s  12 extents, see below
        56      8  i64   created, wall-clock ns       124      4  u32   CRC32C of bytes 0..123
        64      4  u32   token count
        68      4  u32   CRC32C of the payload
        72      4  u32   bytes of token ids
        76      2  u16   layer count
        78      2  u16   flags, 0; unknown: refused
        80      4  u32   extents of the entry
        84     40  u32s  5 extents: slab, slabs
       124      4  u32   CRC32C of bytes 0..123

The row of slab 0, which belongs to no entry, is the mark: the newest generation that was ever
recorded here. It outlives that entry, so that a start goes on from there even if the clock was set
back. It is written with each batch of records, and when the device is tried.

    offset  bytes  type  meaning
    ------  -----  ----  ---------------------------
         0      4  raw   "PFXM"
         4      1  u8    format version, 1
         5      3  raw   zeros
         8      8  u64   generation
        16     16  raw   random, so that each write is one
        32     92  raw   zeros
       124      4  u32   CRC32C of bytes 0..123

A row is at the position of a slab that the entry owns, so there is always a place for it: an
entry's row at its first slab, and each continuation at the first slab of the last extent that
the row before it names. A continuation names its entry, so that a stale one is never taken for
part of another entry.

Two tables hold such rows:

`RowFile`
    A file in which row i lies at its own place. It has no structure that could be damaged: a
    flipped bit hits one row. The shm tier uses it: an `apply` is a few writes to memory.
`LmdbRows` (`tiers.lmdb_rows`)
    The same table in LMDB, in a process of its own. The disk tier uses it.
"""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..proto.entry import (
    EntryRecord,
    Location,
    Recorded,
    check_content,
    content_bytes,
    content_of,
)
from ..proto.errors import InvalidSize
from ..proto.keys import Key
from ..proto.payload import crc32c
from ..proto.vocabulary import SaveReason, Tier
from .files import (
    check_linked,
    cut_file,
    open_own_file,
    pwrite_all,
    secure_range,
    sync_directory,
    write_errors,
)
from .store import StoreError

ROW_BYTES: Final = 128
ZERO_ROW: Final = bytes(ROW_BYTES)
KEY_SLICE: Final = slice(16, 48)
#: Extents in an entry's row and in a continuation.
ENTRY_EXTENTS: Final = 5
CONTINUATION_EXTENTS: Final = 12

_ENTRY_MAGIC: Final = b"PFXE"
_CONTINUATION_MAGIC: Final = b"PFXC"
_MARK_MAGIC: Final = b"PFXM"
#: The slab of the mark.
MARK_SLAB: Final = 0
_VERSION: Final = 1
_ENTRY: Final = struct.Struct("<4sBBBBQ32sQqIIIHHI10I")
#: The same with one extent, which is all that most entries have: recovery unpacks every row.
_HEAD: Final = struct.Struct("<4sBBBBQ32sQqIIIHHIII")
_EXTENTS: Final = struct.Struct("<10I")
_EXTENTS_OFFSET: Final = 84
_CONTINUATION: Final = struct.Struct("<4sBxxxQIII24I")
_CRC: Final = struct.Struct("<I")
#: The CRC32C of any bytes that are followed by their own CRC32C.
_GOOD_CRC32C: Final = 0x48674BC7
_GENERATION: Final = struct.Struct("<Q")
#: Enum lookup by value is slow, and recovery does two for each entry.
_TIERS: Final = {int(tier): tier for tier in Tier}
_REASONS: Final = {int(reason): reason for reason in SaveReason}

#: Reads the row at a slab.
RowReader = Callable[[int], bytes]


class RowRefused(Exception):
    """A row is not a record that this version can use."""


def encode_rows(entry: Recorded, slab_bytes: int) -> list[tuple[int, bytes]]:
    """The rows of an entry with their slabs: the continuations, then the entry's own row."""
    slabs = tuple(number // slab_bytes for number in entry.location)
    count = len(slabs) // 2
    payload_bytes, token_count, token_ids_bytes, layer_count = entry.content
    own = _ENTRY.pack(
        _ENTRY_MAGIC,
        _VERSION,
        entry.tier,
        entry.reason,
        slab_bytes.bit_length() - 1,
        entry.generation,
        entry.key,
        payload_bytes,
        entry.created_ns,
        token_count,
        entry.payload_crc32c,
        token_ids_bytes,
        layer_count,
        0,
        count,
        *_padded(slabs[: 2 * ENTRY_EXTENTS], ENTRY_EXTENTS),
    )
    rows = []
    named = ENTRY_EXTENTS
    while named < count:
        extents = slabs[2 * named : 2 * (named + CONTINUATION_EXTENTS)]
        row = _CONTINUATION.pack(
            _CONTINUATION_MAGIC,
            _VERSION,
            entry.generation,
            slabs[0],
            named,
            len(extents) // 2,
            *_padded(extents, CONTINUATION_EXTENTS),
        )
        rows.append((slabs[2 * named - 2], _with_crc(row)))
        named += CONTINUATION_EXTENTS
    rows.append((slabs[0], _with_crc(own)))
    return rows


def decode_entry(row: bytes, slab: int, slab_bytes: int, read_row: RowReader) -> EntryRecord:
    """The entry whose row lies at `slab`. Raises RowRefused with the reason."""
    head = _HEAD.unpack_from(row)
    magic, version, tier, reason, slab_shift, generation = head[:6]
    flags, count, first_slab, first_slabs = head[-4:]
    payload_bytes, token_ids_bytes = head[7], head[11]
    if magic != _ENTRY_MAGIC:
        raise RowRefused(f"a record begins with {_ENTRY_MAGIC!r}, not with {magic!r}")
    if version != _VERSION:
        raise RowRefused(f"the record has format {version}, this version reads {_VERSION}")
    if not has_crc(row):
        raise RowRefused("the record does not match its checksum")
    if flags:
        raise RowRefused(f"the record has flags {flags:#06x} that this version does not know")
    if tier not in _TIERS:
        raise RowRefused(f"the record is of tier {tier}, which this version does not know")
    if reason not in _REASONS:
        raise RowRefused(f"the record has save reason {reason}, which this version does not know")
    if 1 << slab_shift != slab_bytes:
        raise RowRefused(f"the record is for slabs of 2**{slab_shift} bytes, not {slab_bytes}")
    try:
        check_content(payload_bytes, head[9], token_ids_bytes, head[12])
    except InvalidSize as problem:
        raise RowRefused(str(problem)) from None
    if first_slab != slab or not count:
        raise RowRefused("the record is not at its own first slab")
    location: Location
    if count == 1:
        room_bytes = first_slabs * slab_bytes
        location = (slab * slab_bytes, room_bytes)
    else:
        slabs = list(_EXTENTS.unpack_from(row, _EXTENTS_OFFSET))
        if count > ENTRY_EXTENTS:
            slabs = _continued(slabs, count, generation, slab, read_row)
        location = tuple([number * slab_bytes for number in slabs[: 2 * count]])
        room_bytes = sum(location[1::2])
        if 0 in location[1::2]:
            raise RowRefused("an extent of the record is empty")
    needed_bytes = content_bytes(payload_bytes, token_ids_bytes)
    if not needed_bytes <= room_bytes < needed_bytes + slab_bytes:
        raise RowRefused(f"the record has {room_bytes} bytes of room for {needed_bytes}")
    return _entry_record(head, location)


def decode_checked(row: bytes, slab_bytes: int) -> EntryRecord:
    """An entry of one extent from a row that `decode_entry` has accepted before. No checks."""
    head = _HEAD.unpack_from(row)
    return _entry_record(head, (head[-2] * slab_bytes, head[-1] * slab_bytes))


def _entry_record(head: tuple[Any, ...], location: Location) -> EntryRecord:
    """The entry of an unpacked row."""
    tier, reason, _, generation, key = head[2:7]
    created_ns = head[8]
    # By position: by name it takes half a microsecond more, for every row.
    return EntryRecord(
        Key(key),
        _TIERS[tier],
        _REASONS[reason],
        generation,
        # The two are mostly equal, and then one object.
        generation if created_ns == generation else created_ns,
        content_of((head[7], head[9], head[11], head[12])),
        location,
        head[10],
    )


def generation_of(row: bytes) -> int | None:
    """The generation of the entry whose row this is. None: the row is not an entry's."""
    if not row.startswith(_ENTRY_MAGIC) or len(row) < ROW_BYTES:
        return None
    generation: int = _GENERATION.unpack_from(row, 8)[0]
    return generation


def encode_mark(generation: int) -> bytes:
    """The row of slab 0."""
    head = struct.pack("<4sB3xQ16s", _MARK_MAGIC, _VERSION, generation, os.urandom(16))
    return _with_crc(head.ljust(ROW_BYTES - _CRC.size, b"\0"))


def decode_mark(row: bytes) -> int:
    """The newest generation that was ever recorded. 0: it is not known."""
    if not row.startswith(_MARK_MAGIC + bytes([_VERSION])) or not has_crc(row):
        return 0
    generation: int = _GENERATION.unpack_from(row, 8)[0]
    return generation


def is_continuation(row: bytes) -> bool:
    """Whether this row is a continuation, damaged or not."""
    return row.startswith(_CONTINUATION_MAGIC)


def has_crc(row: bytes) -> bool:
    """Whether a row matches its checksum."""
    return len(row) == ROW_BYTES and crc32c(row) == _GOOD_CRC32C


def _continued(
    slabs: list[int], count: int, generation: int, owner: int, read_row: RowReader
) -> list[int]:
    """All extents of an entry whose first ones are `slabs`. Raises RowRefused."""
    named = ENTRY_EXTENTS
    while named < count:
        row = read_row(slabs[-2])
        if len(row) < ROW_BYTES or not (is_continuation(row) and has_crc(row)):
            raise RowRefused(f"extents from number {named} on are not there")
        _, version, of_generation, of_slab, before, here, *more = _CONTINUATION.unpack_from(row)
        expected = (_VERSION, generation, owner, named, min(count - named, CONTINUATION_EXTENTS))
        if (version, of_generation, of_slab, before, here) != expected:
            raise RowRefused(f"extents from number {named} on are those of another entry")
        slabs += more[: 2 * here]
        named += here
    return slabs


def _padded(slabs: tuple[int, ...], extents: int) -> tuple[int, ...]:
    return slabs + (0,) * (2 * extents - len(slabs))


def _with_crc(row: bytes) -> bytes:
    return row + _CRC.pack(crc32c(row))


#: Slabs that are read at once.
CHUNK_SLABS: Final = 8192
RECORDS_FILE: Final = "records"
#: How often a row without a good checksum is read before a row that differs each time is an error.
_READINGS: Final = 5

#: A slab whose row is to be erased if it has this generation. None: in any case.
Erasure = tuple[int, int | None]


class RowTable(ABC):
    """Rows of `ROW_BYTES` for the slabs 0, 1, ... of an arena.

    A call is not atomic: a failure, or the end of the process, may leave a part of it done. Every
    method may be called from any thread, one at a time. Raises StoreError, StoreFull.
    """

    @abstractmethod
    def secure(self, slabs: int) -> None:
        """Reserve room on the device for the rows of the first `slabs` slabs. Gives none back."""

    def cut(self, slabs: int) -> None:  # noqa: B027 (not every table can)
        """The slabs from `slabs` on are not there: give the room of their rows back."""

    @abstractmethod
    def apply(self, erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        """Erase, then write, in order. When it returns, all of it is durable."""

    @abstractmethod
    def read(self, slab: int) -> bytes:
        """The row of a slab. Zeros or nothing if it has none."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """The rows that are not zeros, in order and in chunks: the first slab of a range of
        `CHUNK_SLABS`, and the range's rows with their slabs. Never the row of slab 0."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice, and at any moment."""

    def probe(self, newest: int = 0) -> None:
        """Make a real write durable: the mark, with this generation."""
        self.apply((), [(MARK_SLAB, encode_mark(newest))])


class RowFile(RowTable):
    """The table in the file `records` of `directory`, for `slabs` slabs.

    `sync`: changes wait for the device. Raises StoreError if the file can't be used.
    """

    def __init__(self, directory: Path, slabs: int, *, sync: bool) -> None:
        self._path: Final = directory / RECORDS_FILE
        self._slabs: Final = slabs
        self._sync: Final = sync
        self._secured_slabs = 0
        self._fd = -1
        with write_errors(f"open the records in {directory}"):
            try:
                self._fd = open_own_file(self._path, 0o600)
                cut_file(self._fd, slabs * ROW_BYTES)
                if sync:
                    sync_directory(directory)
            except BaseException:
                self.close()
                raise

    def secure(self, slabs: int) -> None:
        first, more = self._secured_slabs, slabs - self._secured_slabs
        if more > 0:
            with write_errors(f"make room for records in {self._path.parent}"):
                secure_range(self._fd, first * ROW_BYTES, more * ROW_BYTES)
            self._secured_slabs = slabs

    def cut(self, slabs: int) -> None:
        with write_errors(f"shorten the records in {self._path.parent}"):
            cut_file(self._fd, slabs * ROW_BYTES)

    def apply(self, erasures: Sequence[Erasure], rows: Sequence[tuple[int, bytes]]) -> None:
        with write_errors(f"write records in {self._path.parent}"):
            check_linked(self._fd, self._path)
            for slab, generation in erasures:
                if generation is None or generation_of(self._pread(slab)) == generation:
                    pwrite_all(self._fd, ZERO_ROW, slab * ROW_BYTES)
            for slab, row in rows:
                pwrite_all(self._fd, row, slab * ROW_BYTES)
            if self._sync:
                os.fdatasync(self._fd)

    def read(self, slab: int) -> bytes:
        with write_errors(f"read the records in {self._path.parent}"):
            return self._pread(slab)

    def chunks(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        zeros = bytes(CHUNK_SLABS * ROW_BYTES)
        for first in range(0, self._slabs, CHUNK_SLABS):
            with write_errors(f"read the records in {self._path.parent}"):
                chunk = os.pread(self._fd, CHUNK_SLABS * ROW_BYTES, first * ROW_BYTES)
            if chunk != zeros[: len(chunk)]:
                rows = [(slab, self._stored(slab, row)) for slab, row in _used_rows(first, chunk)]
                yield first, [(slab, row) for slab, row in rows if row != ZERO_ROW]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _stored(self, slab: int, row: bytes) -> bytes:
        """The row as it is stored. A row without a good checksum is read again, because recovery
        erases such rows and a single reading may be wrong. Raises StoreError."""
        for _ in range(_READINGS):
            if has_crc(row) or row == ZERO_ROW:
                return row
            before, row = row, self.read(slab).ljust(ROW_BYTES, b"\0")
            if row == before:
                return row  # it is stored like this
        raise StoreError(f"the row of slab {slab} is different at each reading")

    def _pread(self, slab: int) -> bytes:
        return os.pread(self._fd, ROW_BYTES, slab * ROW_BYTES)


def _used_rows(first_slab: int, chunk: bytes) -> Iterator[tuple[int, bytes]]:
    for start in range(0 if first_slab else ROW_BYTES, len(chunk) - ROW_BYTES + 1, ROW_BYTES):
        row = chunk[start : start + ROW_BYTES]
        if row != ZERO_ROW:
            yield first_slab + start // ROW_BYTES, row
