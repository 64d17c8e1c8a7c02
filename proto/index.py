"""The index: where the bytes of every published entry lie, readable without asking the daemon.

A hash table in a sealed memfd. The daemon's event loop alone writes it (`server.runtime.index`);
a client gets the descriptor, maps it read-only, and takes no lock. A row that is found is right.
A reader that is overtaken by changes again and again may miss a row, as if it were not cached.

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
       128      8  u64   state: LIVE, or nothing in the index may be believed
       136      8  u64   shape: number of heads (32 bits), a bit that is set while rows are moved
                         between chains (MOVING), and a count of changes (31 bits)

    heads: H u32 from byte 4096. Rows: R of them, from the first multiple of 96 behind the heads.

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
        84      4  u32   row that carries on the list of extents, or 0
        88      4  u32   CRC32C of bytes 0..87, xor the kind of row
        92      4  u32   next row of the hash chain, not covered by the checksum

    row that carries on a list of extents
         0     72  u64   offsets and lengths, nine numbers
        72      8  u64   generation of the entry
        80      4  u32   position of this row in the list, from 0
        84      4  u32   row that carries on from here, or 0
        88      4  u32   CRC32C of bytes 0..87, xor the kind of row
        92      4  u32   not used

Hash: the first 8 bytes of the key as an integer, times the multiplier, without the 64 low bits.
Linear hashing: with n heads, take the hash modulo the next power of two (at or above n), and if
there is no such head yet, modulo half of that. A head more divides one chain in two, so the table
grows by small steps. Clients choose keys, and one on this host can read the multiplier, therefore
a chain has at most MAX_CHAIN rows; an entry that finds its chain full is not listed.

What readers rely on:

- A row is written whole before it is linked, and is never changed while it is linked: a new
  generation is a new row in the place of the old one. Links and heads are aligned 4-byte stores.
- A row is unlinked, and its generation zeroed, before `IndexWriter.delete` returns and the extents
  can be reused. A reader that copied the bytes and *then* finds the row, or its generation in its
  place, has a good copy.
- A reader may hold the number of a row that was removed and used again. It then sees another key,
  or bytes of both that the checksum refuses. Not having found its key, it looks at `shape`; if
  that changed, its walk may have been led astray and it tries again, a bounded number of times.
- Stores become visible in program order, and loads are done in it, as on x86-64. On other
  processors the checksum still refuses mixtures.
- A writer that dies at any instruction leaves good rows, and misses.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from .entry import Listed as Listed
from .errors import RecordError
from .keys import Key
from .layout import crc32c
from .limits import KEY_BYTES

MAGIC: Final = b"PFXINDEX"
VERSION: Final = 1
ROW_BYTES: Final = 96
#: What a reader copies of a row: all but the link, which may change while the row stands.
CHECKED_BYTES: Final = 92
HEADER_BYTES: Final = 4096
MAX_CHAIN: Final = 16
_REST_OF_CHAIN: Final = range(MAX_CHAIN - 1)
#: At slabs of 64 KiB: at least 256 MiB, in the worst case of fragmentation.
MAX_EXTENTS: Final = 4096
#: Offsets and lengths in a row that carries on a list.
WORDS_PER_ROW: Final = 9

#: Positions in the header, as u64.
STATE: Final = 16
SHAPE: Final = 17
LIVE: Final = 0x4556494C_58444E49
REVOKED: Final = 0
HEADS_MASK: Final = 2**32 - 1
MOVING: Final = 1 << 32

#: Kinds of row. Each has its own checksum, so one comparison says that a row is whole and of
#: which kind it is: an entry with one extent at most, with more, or the rest of such a list.
#: They differ in half of their bits, so that no small damage turns one into another.
ONE_EXTENT: Final = 0x3333_3333
EXTENTS: Final = 0x5555_5555
CONTINUATION: Final = 0x6666_6666

INCARNATION_BYTES: Final = 16
MULTIPLIER_BYTES: Final = 16
#: The part of a key that is hashed, and what of the product is not used.
HASHED: Final = struct.Struct(f"<Q{KEY_BYTES - 8}x")
HASH_SHIFT: Final = 64

#: Offsets in a row.
GENERATION_OFFSET: Final = 32
CONTINUATION_OFFSET: Final = 84
TIER_OFFSET: Final = 78
LINK_OFFSET: Final = 92

_HEADER: Final = struct.Struct(f"<8sIII{INCARNATION_BYTES}s{MULTIPLIER_BYTES}s")
_ENTRY: Final = struct.Struct("<32sQQQQIIIHBBII")
#: Generation, offset, length, tier and number of extents.
_PLACE: Final = struct.Struct("<32xQ8xQQ14xBxI")
_CONTINUATION: Final = struct.Struct(f"<{WORDS_PER_ROW}QQII")
_U32: Final = struct.Struct("<I")
#: Number of extents and the row that carries on.
_EXTENTS: Final = struct.Struct("<80xII")
#: Generation, position and the row that carries on from a continuation row.
_PART: Final = struct.Struct("<72xQII")
_GENERATION: Final = struct.Struct(f"<{GENERATION_OFFSET}xQ")
_generation_of: Final = _GENERATION.unpack_from
_pack_entry: Final = _ENTRY.pack
_pack_u32: Final = _U32.pack
_KEY_PART: Final = slice(KEY_BYTES)
#: Walks along a chain that keeps changing before a key counts as absent.
_TRIES: Final = 8
#: Equal to no shape.
_UNSETTLED: Final = -1


def _residue(kind: int) -> int:
    """The CRC32C of any `CHECKED_BYTES` that end in their own checksum xor `kind`.

    A CRC is linear: over a message and its own checksum it is a constant, and the xor adds the
    same to each.
    """
    return crc32c(_U32.pack(kind))


_WHOLE_ONE_EXTENT: Final = _residue(ONE_EXTENT)
_WHOLE_EXTENTS: Final = _residue(EXTENTS)
_WHOLE_CONTINUATION: Final = _residue(CONTINUATION)


#: The number of a row, and the row as it was found there.
Placed: TypeAlias = "tuple[int, bytes]"


class IndexRow(NamedTuple):
    """A row, unpacked. See the table above; `tier` and `reason` are numbers of the vocabulary."""

    key: Key
    generation: int
    payload_bytes: int
    token_count: int
    payload_crc32c: int
    token_ids_bytes: int
    layer_count: int
    tier: int
    reason: int
    location: tuple[int, ...]


class Layout(NamedTuple):
    """Where things lie in an index of some size."""

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
        """Of the file: whole pages."""
        return -(-self.end_row * ROW_BYTES // HEADER_BYTES) * HEADER_BYTES


def pack_header(layout: Layout, incarnation: bytes, multiplier: int) -> bytes:
    """The part of the header that never changes."""
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        *layout,
        incarnation,
        multiplier.to_bytes(MULTIPLIER_BYTES, "little"),
    )
    return fields + _U32.pack(crc32c(fields))


def pack_row(entry: Listed, location: tuple[int, ...], continuation: int = 0) -> bytes:
    """The row of an entry without its link. `location`: that of the entry, which takes a call to
    find. Raises struct.error for a number that has no room."""
    offset, length = location[:2] or (0, 0)
    fields = _pack_entry(
        entry.key,
        entry.generation,
        entry.payload_bytes,
        offset,
        length,
        entry.token_count,
        entry.payload_crc32c,
        entry.token_ids_bytes,
        entry.layer_count,
        entry.tier,
        entry.reason,
        len(location) // 2,
        continuation,
    )
    # Written out, without a call: it runs for every block that is saved.
    return fields + _pack_u32(crc32c(fields) ^ (EXTENTS if len(location) > 2 else ONE_EXTENT))


def pack_continuation(
    generation: int, position: int, words: tuple[int, ...], continuation: int
) -> bytes:
    """A row of at most `WORDS_PER_ROW` offsets and lengths, without its link."""
    padding = (0,) * (WORDS_PER_ROW - len(words))
    fields = _CONTINUATION.pack(*words, *padding, generation, position, continuation)
    return fields + _pack_u32(crc32c(fields) ^ CONTINUATION)


def unpack_row(row: bytes) -> IndexRow:
    """What a row says, as `IndexReader` gives it. Raises RecordError if it has no row's length."""
    if len(row) < CHECKED_BYTES:
        raise RecordError(f"an index row of {len(row)} bytes")
    key, generation, payload, offset, length, tokens, crc, ids, layers, tier, reason, extents, _ = (
        _ENTRY.unpack_from(row)
    )
    location: tuple[int, ...] = (offset, length) if extents else ()
    rest = 2 * (extents - 1) if extents > 1 else 0
    if len(row) != CHECKED_BYTES + 8 * rest:
        raise RecordError(f"an index row of {len(row)} bytes for {extents} extents")
    if rest:
        location += struct.unpack_from(f"<{rest}Q", row, CHECKED_BYTES)
    return IndexRow(key, generation, payload, tokens, crc, ids, layers, tier, reason, location)


def place_of(row: bytes) -> tuple[int, int, tuple[int, ...]]:
    """What a copy needs of a row, as `IndexReader` gives it: generation, tier, location."""
    generation, offset, length, tier, extents = _PLACE.unpack_from(row)
    if extents == 1:
        return generation, tier, (offset, length)
    return generation, tier, unpack_row(row).location


#: What a row says of its entry but for where it lies: key, generation, payload bytes, token count,
#: CRC32C of the payload, bytes of token ids, layer count, tier, reason.
entry_of: Final = struct.Struct("<32sQQ16xIIIHBB").unpack_from


def generation_of(row: bytes) -> int:
    """Of a packed row. Raises RecordError if it has no row's length."""
    if len(row) < CHECKED_BYTES:
        raise RecordError(f"an index row of {len(row)} bytes")
    generation: int = _GENERATION.unpack_from(row)[0]
    return generation


class IndexReader:
    """Looks entries up in a mapped index. Thread-safe; takes no locks.

    Rows are returned packed: `unpack_row` and `generation_of` read them. Keys are `KEY_BYTES`
    long, else struct.error is raised. No content of the file makes a method raise or loop: what is
    damaged or revoked is not found. `live` tells whether the index as a whole may be believed.
    """

    def __init__(self, buffer: mmap.mmap | bytes) -> None:
        """`buffer` stays the caller's, who keeps it mapped until `close`.

        Raises RecordError if it holds no index of this version.
        """
        if len(buffer) < HEADER_BYTES:
            raise RecordError(f"an index of {len(buffer)} bytes")
        fixed = buffer[: _HEADER.size]
        magic, version, max_heads, max_rows, incarnation, multiplier = _HEADER.unpack(fixed)
        if magic != MAGIC or version != VERSION:
            raise RecordError(f"no index of version {VERSION}: {magic!r}, version {version}")
        if buffer[_HEADER.size : _HEADER.size + 4] != _U32.pack(crc32c(fixed)):
            raise RecordError("the header of the index is damaged")
        self.layout: Final = Layout(max_heads, max_rows)
        if not max_heads or self.layout.size_bytes > len(buffer):
            raise RecordError(f"an index of {len(buffer)} bytes for {max_rows} rows")
        #: of the daemon that writes it
        self.incarnation: Final[bytes] = incarnation
        self._multiplier: Final = int.from_bytes(multiplier, "little")
        self._data: Final = buffer
        self._owned: mmap.mmap | None = None
        with memoryview(buffer) as whole, whole[: self.layout.size_bytes] as used:
            words = used.cast("I")
            longs = used.cast("Q")
            self._header: Final = longs[: HEADER_BYTES // 8]
        heads_start = HEADER_BYTES // 4
        self._heads: Final = words[heads_start : heads_start + max_heads]
        self._links: Final = words[LINK_OFFSET // 4 :: ROW_BYTES // 4]
        self._generations: Final = longs[GENERATION_OFFSET // 8 :: ROW_BYTES // 8]
        words.release()
        longs.release()

    @classmethod
    def attach(cls, fd: int) -> IndexReader:
        """Map the index behind a descriptor, which stays the caller's; `close` unmaps it.

        Raises RecordError, and OSError if it can't be mapped.
        """
        try:
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as problem:  # an empty file
            raise RecordError(f"no index: {problem}") from None
        try:
            reader = cls(mapping)
        except RecordError:
            mapping.close()
            raise
        reader._owned = mapping
        return reader

    @property
    def live(self) -> bool:
        """May the index be believed?"""
        return self._header[STATE] == LIVE

    def get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The row of each key, None where there is none."""
        return [found and found[1] for found in self.find(keys)]

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """Which keys are there."""
        return [found is not None for found in self.find(keys)]

    def has(self, key: bytes) -> bool | None:
        """Is it there? None: the index may not be believed. What one walk can't say `find` does."""
        seen, count, mask = self._shape()
        data = self._data
        bucket = HASHED.unpack(key)[0] * self._multiplier >> HASH_SHIFT & mask
        number = self._heads[bucket if bucket < count else bucket & mask >> 1]
        start = number * ROW_BYTES
        row = data[start : start + CHECKED_BYTES] if number else b""
        if row[_KEY_PART] != key and number:
            # Another key of that bucket; the rest of the chain.
            links = self._links
            for _ in _REST_OF_CHAIN:
                number = links[number] if number < len(links) else 0
                start = number * ROW_BYTES
                row = data[start : start + CHECKED_BYTES] if number else b""
                if not number or row[_KEY_PART] == key:
                    break
        if self._header[STATE] != LIVE:
            return None
        if number and crc32c(row) == _WHOLE_ONE_EXTENT and row[_KEY_PART] == key:
            return True
        return bool(number or self._header[SHAPE] != seen) and any(self.contains((key,)))

    def unchanged(self, rows: Iterable[Placed]) -> bool:
        """Does each row that was found before still stand, or one of its key and generation?

        True after bytes were copied: nothing was written over them before the copy was done.
        """
        if not self.live:
            return False
        # A generation is that of one entry, and its row has another one as soon as it is removed:
        # to look into its place says as much as a look-up, at a tenth of the cost.
        generations = self._generations
        moved = [
            (number, row)
            for number, row in rows
            if not 0 < generations[number] == _generation_of(row)[0]
        ]
        if not moved:
            return self.live
        found = self.get(row[_KEY_PART] for _, row in moved)
        return all(
            now is not None and generation_of(now) == generation_of(row)
            for now, (_, row) in zip(found, moved, strict=True)
        )

    def row_at(self, number: int) -> bytes | None:
        """The entry's row of that number, if there stands one; for those who visit all."""
        start = number * ROW_BYTES
        return self._complete(self._data[start : start + CHECKED_BYTES])

    def close(self) -> None:
        """Give the buffer back; nothing may be called during or after it. Idempotent."""
        for view in (self._header, self._heads, self._links, self._generations):
            view.release()
        if self._owned is not None:
            self._owned.close()

    def find(self, keys: Iterable[bytes], stop_at: bool | None = None) -> list[Placed | None]:
        """One row with its place, or None, for each key. `stop_at`: the first key that is there
        (True), or is not (False), is the last. `keys` may be lazy: none behind it is taken."""
        # Written out, without calls: it runs for every block.
        data, heads, links, header = self._data, self._heads, self._links, self._header
        multiplier, hashed_word, checksum = self._multiplier, HASHED.unpack, crc32c
        key_part, whole, rows = _KEY_PART, _WHOLE_ONE_EXTENT, len(self._generations)
        results: list[Placed | None] = []
        add = results.append
        live = header[STATE] == LIVE
        seen, count, mask = self._shape()
        for key in keys:
            (word,) = hashed_word(key)
            hashed = word * multiplier >> HASH_SHIFT
            found: bytes | None = None
            tries = _TRIES
            while live:
                bucket = hashed & mask
                if bucket >= count:
                    bucket &= mask >> 1
                steps = MAX_CHAIN
                number = heads[bucket]
                if number >= rows:
                    number = 0
                while number:
                    start = number * ROW_BYTES
                    row = data[start : start + CHECKED_BYTES]
                    if row[key_part] == key:
                        found = row if checksum(row) == whole else self._complete(row)
                        if found is None:
                            seen = _UNSETTLED
                        break
                    steps -= 1
                    number = links[number] if steps else 0
                    if number >= rows:
                        number = 0
                if found is not None or header[SHAPE] == seen:
                    break
                tries -= 1
                if not tries:
                    break
                seen, count, mask = self._shape()
            if found is None:
                add(None)
                if stop_at is False:
                    break
            else:
                add((number, found))
                if stop_at:
                    break
        return results

    def _shape(self) -> tuple[int, int, int]:
        """`shape` while no row is being moved, the number of heads, and a hash's mask for them."""
        shape = self._header[SHAPE]
        count = min(max(shape & HEADS_MASK, 1), self.layout.max_heads)
        mask = (1 << (count - 1).bit_length()) - 1
        return _UNSETTLED if shape & MOVING else shape, count, mask

    def _complete(self, row: bytes) -> bytes | None:
        """The row of an entry, with the rest of its extents behind it. None if it is none, or if
        not all of it is there."""
        checksum = crc32c(row)
        if checksum == _WHOLE_ONE_EXTENT:
            return row
        if checksum != _WHOLE_EXTENTS or len(row) != CHECKED_BYTES:
            return None
        generation = generation_of(row)
        extents, number = _EXTENTS.unpack_from(row)
        missing = 2 * (extents - 1)
        if not 0 < missing < 2 * MAX_EXTENTS:
            return None
        parts = [row]
        for position in range(-(-missing // WORDS_PER_ROW)):
            start = number * ROW_BYTES
            part = self._data[start : start + CHECKED_BYTES]
            if len(part) != CHECKED_BYTES or crc32c(part) != _WHOLE_CONTINUATION:
                return None
            found, at, number = _PART.unpack_from(part)
            if found != generation or at != position:
                return None
            words = min(missing, WORDS_PER_ROW)
            missing -= words
            parts.append(part[: 8 * words])
        return b"".join(parts)
