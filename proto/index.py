"""The format of the index: where the bytes of every published entry lie.

The index is a hash table in a sealed memfd. Only the daemon's event loop writes it
(`server.runtime.index`). A client gets the descriptor, maps it read-only, and takes no lock
(`proto.index_reader`). A row that is found is right. A reader that is overtaken by changes again
and again may miss a row, as if the entry were not cached.

The file has a size from the start and is sparse: memory grows with the entries. It is a header,
the heads of the hash chains (u32 row numbers), and rows of 96 bytes. Row n lies at byte 96 * n;
row number 0 ends a chain. Integers are little-endian.

    header
    offset  bytes  type  meaning
    ------  -----  ----  ------------------------------------------------------------------
         0      8  raw   magic, "PFXINDEX"
         8      4  u32   format version, 1
        12      4  u32   H, the most heads that there can be
        16      4  u32   R, the most rows that there can be
        20     16  raw   incarnation of the daemon that writes it
        36     16  u128  random odd multiplier of the hash
        52      4  u32   CRC32C of bytes 0..51
       128      8  u64   state: LIVE, or the index is not valid
       136      8  u64   shape: number of heads (32 bits), a bit that is set while rows are moved
                         between chains (MOVING), and a count of changes (31 bits)
       144      8  u64   the tiers whose device does not answer: bit n is tier n. Searches pass over
                         their entries, and no read of them should begin. It is a hint, added after
                         the first builds of version 1: a writer that does not know it leaves 0, and
                         a reader that does not know it loses only time.

    H heads of 4 bytes from byte 4096; R rows from the first multiple of 96 after the heads.

    row of an entry
         0     32  raw   key
        32      8  u64   generation; zeroed when the row is removed
        40      8  u64   payload bytes
        48      8  u64   offset of the first extent in the tier's arena
        56      8  u64   length of the first extent
        64      4  u32   token count
        68      4  u32   CRC32C of the payload
        72      4  u32   bytes of token ids
        76      2  u16   layer count
        78      1  u8    tier
        79      1  u8    save reason
        80      4  u32   number of extents
        84      4  u32   row that continues the list of extents, or 0
        88      4  u32   CRC32C of bytes 0..87, xor the kind of row
        92      4  u32   next row of the hash chain, not covered by the checksum

    row that continues a list of extents
         0     72  u64   offsets and lengths, nine numbers
        72      8  u64   generation of the entry
        80      4  u32   position of this row in the list, from 0
        84      4  u32   row that continues the list after this one, or 0
        88      4  u32   CRC32C of bytes 0..87, xor the kind of row
        92      4  u32   not used

Hash: the first 8 bytes of the key as an integer, times the multiplier, without the 64 low bits.
Linear hashing: with n heads, take the hash modulo the next power of two (at or above n), and if
there is no such head yet, modulo half of that. Each new head divides one chain in two, so the table
grows in small steps. Clients choose keys, and a client on this host can read the multiplier.
Therefore a chain has at most MAX_CHAIN rows, and an entry whose chain is full is not listed.

What readers rely on:

- A row is complete before it is linked, and never changes while it is linked: a new generation is a
  new row in place of the old one. Links and heads are aligned 4-byte stores.
- A row is unlinked, and its generation zeroed, before `IndexWriter.delete` returns and the extents
  can be reused. A reader that copies the bytes and *then* finds the row, or its generation at the
  same place, has a good copy.
- A reader may hold the number of a row that was removed and used again. It then sees another key,
  or bytes of both rows, which the checksum refuses. If it does not find its key and `shape` has
  changed, its walk may have followed a moved row, and it tries again, a bounded number of times. A
  writer that loses its processor while it moves rows gets 4 ms to go on, and after that no more.
- Stores become visible in program order, and loads happen in it, as on x86-64. On other processors
  the checksum still refuses mixtures.
- A writer that dies at any instruction leaves rows that are right, and misses.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from mmap import mmap
from typing import Final, Literal, NamedTuple, TypeAlias, overload

from .entry import Content, HasContent, content_of, contents_of
from .entry import Listed as Listed
from .errors import RecordError
from .keys import Key
from .limits import KEY_BYTES
from .payload import crc32c

MAGIC: Final = b"PFXINDEX"
VERSION: Final = 1
ROW_BYTES: Final = 96
#: The part of a row that a reader copies: all but the link, which may change while the row is used.
CHECKED_BYTES: Final = 92
HEADER_BYTES: Final = 4096
MAX_CHAIN: Final = 16
#: With slabs of 64 KiB this is enough for 256 MiB in the worst fragmentation.
MAX_EXTENTS: Final = 4096
#: Offsets and lengths in a row that continues a list.
WORDS_PER_ROW: Final = 9

#: Positions in the header, as u64.
STATE: Final = 16
SHAPE: Final = 17
HANGING: Final = 18
LIVE: Final = 0x4556494C_58444E49
REVOKED: Final = 0
HEADS_MASK: Final = 2**32 - 1
MOVING: Final = 1 << 32

#: Kinds of row: an entry with one extent at most, an entry with more, the rest of such a list. Each
#: kind alters the checksum, so one comparison tells that a row is complete and of which kind it
#: is. They differ in half of their bits, so that no small damage turns one into another.
ONE_EXTENT: Final = 0x3333_3333
EXTENTS: Final = 0x5555_5555
CONTINUATION: Final = 0x6666_6666

INCARNATION_BYTES: Final = 16
MULTIPLIER_BYTES: Final = 16
#: The part of a key that is hashed, and the low bits of the product, which are not used.
HASHED: Final = struct.Struct(f"<Q{KEY_BYTES - 8}x")
HASH_SHIFT: Final = 64

#: Offsets in a row.
GENERATION_OFFSET: Final = 32
EXTENTS_OFFSET: Final = 80
CONTINUATION_OFFSET: Final = 84
TIER_OFFSET: Final = 78
REASON_OFFSET: Final = 79
LINK_OFFSET: Final = 92

#: The number of a row, and the row as it was found there.
Placed: TypeAlias = "tuple[int, bytes]"

_HEADER: Final = struct.Struct(f"<8sIII{INCARNATION_BYTES}s{MULTIPLIER_BYTES}s")
_ENTRY: Final = struct.Struct("<32sQQQQIIIHBBII")
#: The fields of a content, in its order.
_CONTENT: Final = struct.Struct("<40xQ16xI4xIH")
#: The others but for the location: key, generation, CRC32C of the payload, tier, reason.
_REST: Final = struct.Struct("<32sQ28xI6xBB")
#: Generation, offset, length, tier and number of extents.
_PLACE: Final = struct.Struct("<32xQ8xQQ14xBxI")
_CONTINUATION: Final = struct.Struct(f"<{WORDS_PER_ROW}QQII")
_U32: Final = struct.Struct("<I")
_GENERATION: Final = struct.Struct(f"<{GENERATION_OFFSET}xQ")
_pack_entry: Final = _ENTRY.pack
_pack_u32: Final = _U32.pack


class _RowFields(NamedTuple):
    key: Key
    generation: int
    content: Content
    payload_crc32c: int
    tier: int
    reason: int
    location: tuple[int, ...]


class IndexRow(_RowFields, HasContent):
    """An unpacked row, see the table above. `tier` and `reason` are numbers of the vocabulary."""

    __slots__ = ()


class IndexLayout(NamedTuple):
    """The positions in an index of some size."""

    max_heads: int
    max_rows: int

    @property
    def first_row(self) -> int:
        """The number of the first row."""
        return -(-(HEADER_BYTES + 4 * self.max_heads) // ROW_BYTES)

    @property
    def end_row(self) -> int:
        """One more than the number of the last row."""
        return self.first_row + self.max_rows

    @property
    def size_bytes(self) -> int:
        """The size of the file: whole pages."""
        return -(-self.end_row * ROW_BYTES // HEADER_BYTES) * HEADER_BYTES


def pack_header(layout: IndexLayout, incarnation: bytes, multiplier: int) -> bytes:
    """The part of the header that never changes."""
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        *layout,
        incarnation,
        multiplier.to_bytes(MULTIPLIER_BYTES, "little"),
    )
    return fields + _U32.pack(crc32c(fields))


def unpack_header(buffer: mmap | bytes) -> tuple[IndexLayout, bytes, int]:
    """The layout, incarnation and multiplier of an index. Raises RecordError if `buffer` does not
    hold an index of this version."""
    if len(buffer) < HEADER_BYTES:
        raise RecordError(f"an index of {len(buffer)} bytes")
    fixed = buffer[: _HEADER.size]
    magic, version, max_heads, max_rows, incarnation, multiplier = _HEADER.unpack(fixed)
    if magic != MAGIC or version != VERSION:
        raise RecordError(f"no index of version {VERSION}: {magic!r}, version {version}")
    if buffer[_HEADER.size : _HEADER.size + 4] != _U32.pack(crc32c(fixed)):
        raise RecordError("the header of the index is damaged")
    layout = IndexLayout(max_heads, max_rows)
    if not max_heads or layout.size_bytes > len(buffer):
        raise RecordError(f"an index of {len(buffer)} bytes for {max_rows} rows")
    return layout, incarnation, int.from_bytes(multiplier, "little")


def pack_row(entry: Listed, location: tuple[int, ...], continuation: int = 0) -> bytes:
    """The row of an entry without its link. `location` is that of the entry, which takes a call to
    look up. Raises struct.error for a number that does not fit."""
    offset, length = location[:2] or (0, 0)
    payload_bytes, token_count, token_ids_bytes, layer_count = entry.content
    fields = _pack_entry(
        entry.key,
        entry.generation,
        payload_bytes,
        offset,
        length,
        token_count,
        entry.payload_crc32c,
        token_ids_bytes,
        layer_count,
        entry.tier,
        entry.reason,
        len(location) // 2,
        continuation,
    )
    # Written out without a call: it runs for every block that is saved.
    return fields + _pack_u32(crc32c(fields) ^ (EXTENTS if len(location) > 2 else ONE_EXTENT))


def pack_continuation(
    generation: int, position: int, words: tuple[int, ...], continuation: int
) -> bytes:
    """A row of at most `WORDS_PER_ROW` offsets and lengths, without its link."""
    padding = (0,) * (WORDS_PER_ROW - len(words))
    fields = _CONTINUATION.pack(*words, *padding, generation, position, continuation)
    return fields + _pack_u32(crc32c(fields) ^ CONTINUATION)


def unpack_row(row: bytes) -> IndexRow:
    """Unpack a row as `IndexReader` returns it. Raises RecordError if its length is wrong."""
    if len(row) < CHECKED_BYTES:
        raise RecordError(f"an index row of {len(row)} bytes")
    _, offset, length, _, extents = _PLACE.unpack_from(row)
    location: tuple[int, ...] = (offset, length) if extents else ()
    rest = 2 * (extents - 1) if extents > 1 else 0
    if len(row) != CHECKED_BYTES + 8 * rest:
        raise RecordError(f"an index row of {len(row)} bytes for {extents} extents")
    if rest:
        location += struct.unpack_from(f"<{rest}Q", row, CHECKED_BYTES)
    return IndexRow(*entry_of(row), location)


def place_of(row: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Generation, tier and location of a row as `IndexReader` returns it: what a copy needs."""
    generation, offset, length, tier, extents = _PLACE.unpack_from(row)
    if extents == 1:
        return generation, tier, (offset, length)
    return generation, tier, unpack_row(row).location


def entry_of(row: bytes) -> tuple[Key, int, Content, int, int, int]:
    """The fields of a row without its location: key, generation, content, CRC32C of the payload,
    tier, reason."""
    key, generation, crc, tier, reason = _REST.unpack_from(row)
    return key, generation, content_of(_CONTENT.unpack_from(row)), crc, tier, reason


def generation_of(row: bytes) -> int:
    """The generation in a packed row. Raises RecordError if the row is too short."""
    if len(row) < CHECKED_BYTES:
        raise RecordError(f"an index row of {len(row)} bytes")
    generation: int = _GENERATION.unpack_from(row)[0]
    return generation


# ---- many rows at once


class PackedRows(Sequence["Placed"]):
    """Rows with one extent each, in one piece of memory: `ROW_BYTES` each, as in the index, but
    with the number of the row in place of its link.

    A field of all of them is a column, read when somebody asks for it. To make an object of each
    row takes longer than all else that a small block needs beside its copy.
    """

    __slots__ = ("_columns", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed: Final = packed
        self._columns: dict[int, list[int]] = {}

    def _column(self, format: Literal["H", "I", "Q"], offset: int) -> list[int]:
        """The numbers at this offset of each row. Don't change them."""
        column = self._columns.get(offset)
        if column is None:
            words = memoryview(self.packed).cast(format)
            if sys.byteorder != "little":
                swapped = array(format, self.packed)
                swapped.byteswap()
                words = memoryview(swapped)
            size = words.itemsize
            column = self._columns[offset] = words[offset // size :: ROW_BYTES // size].tolist()
        return column

    @property
    def generations(self) -> list[int]:
        return self._column("Q", GENERATION_OFFSET)

    @property
    def payload_bytes(self) -> list[int]:
        return self._column("Q", 40)

    @property
    def offsets(self) -> list[int]:
        return self._column("Q", 48)

    @property
    def lengths(self) -> list[int]:
        return self._column("Q", 56)

    @property
    def token_counts(self) -> list[int]:
        return self._column("I", 64)

    @property
    def payload_crc32c(self) -> list[int]:
        return self._column("I", 68)

    @property
    def contents(self) -> Iterable[Content]:
        """The content of each, one object where all are alike."""
        ids_bytes, layer_counts = self._column("I", 72), self._column("H", 76)
        return contents_of(
            len(self), self.payload_bytes, self.token_counts, ids_bytes, layer_counts
        )

    @property
    def tiers(self) -> Sequence[int]:
        return self.packed[TIER_OFFSET::ROW_BYTES]

    @property
    def reasons(self) -> Sequence[int]:
        return self.packed[REASON_OFFSET::ROW_BYTES]

    @property
    def extents(self) -> list[int]:
        """How many extents each entry has."""
        return self._column("I", EXTENTS_OFFSET)

    @property
    def keys(self) -> list[Key]:
        packed = self.packed
        starts = range(0, len(packed), ROW_BYTES)
        return [Key(packed[start : start + KEY_BYTES]) for start in starts]

    @property
    def numbers(self) -> list[int]:
        """Where each row is."""
        return self._column("I", LINK_OFFSET)

    def some(self, indices: Iterable[int]) -> PackedRows:
        """Those rows, in this order."""
        packed = self.packed
        starts = [index * ROW_BYTES for index in indices]
        return PackedRows(b"".join([packed[start : start + ROW_BYTES] for start in starts]))

    def __len__(self) -> int:
        return len(self.packed) // ROW_BYTES

    def __bool__(self) -> bool:
        return bool(self.packed)

    @overload
    def __getitem__(self, index: int) -> Placed: ...
    @overload
    def __getitem__(self, index: slice) -> PackedRows: ...
    def __getitem__(self, index: int | slice) -> Placed | PackedRows:
        if isinstance(index, slice):
            return self.some(range(*index.indices(len(self))))
        start = range(0, len(self.packed), ROW_BYTES)[index]
        end = start + CHECKED_BYTES
        return _U32.unpack_from(self.packed, end)[0], self.packed[start:end]


def packed_rows(placed: Sequence[Placed]) -> PackedRows | None:
    """The same rows in one piece. None if one of them does not have exactly one extent."""
    if isinstance(placed, PackedRows):
        return placed
    packed = b"".join([row + _pack_u32(number) for number, row in placed])
    if len(packed) != ROW_BYTES * len(placed):
        return None  # a row that is longer than others
    rows = PackedRows(packed)
    return rows if rows.extents.count(1) == len(rows) else None
