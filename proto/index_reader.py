"""Reads the index (proto.index) out of shared memory, without a lock and without the daemon."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeVar

from .errors import RecordError
from .index import (
    CHECKED_BYTES,
    CONTINUATION,
    EXTENTS,
    GENERATION_OFFSET,
    HANGING,
    HASH_SHIFT,
    HASHED,
    HEADER_BYTES,
    HEADS_MASK,
    LINK_OFFSET,
    LIVE,
    MAX_CHAIN,
    MAX_EXTENTS,
    MOVING,
    MULTIPLIER_BYTES,
    ONE_EXTENT,
    ROW_BYTES,
    SHAPE,
    STATE,
    TIER_OFFSET,
    WORDS_PER_ROW,
    PackedRows,
    Placed,
    generation_of,
    packed_rows,
    unpack_header,
)
from .kernel import native
from .limits import KEY_BYTES
from .payload import crc32c

T = TypeVar("T")

_REST_OF_CHAIN: Final = range(MAX_CHAIN - 1)
_KEY_PART: Final = slice(KEY_BYTES)
#: How often a search follows a chain that keeps changing, before it reports the key as absent.
_TRIES: Final = 8
#: How long a search waits for a writer that is amid a change, 4 ms in all: it has lost its
#: processor there.
_WAITS_S: Final = (0.0, 0.0001, 0.0003, 0.0006, 0.001, 0.002)
#: Keys that one call of the kernel looks up in a lazy sequence.
_MOST_KEYS: Final = 64
#: Equal to no shape.
_UNSETTLED: Final = -1
_generation_of: Final = struct.Struct(f"<{GENERATION_OFFSET}xQ").unpack_from
#: Number of extents, and the row that continues the list.
_EXTENTS: Final = struct.Struct("<80xII")
#: Of a continuation row: generation, position, and the row that continues the list.
_PART: Final = struct.Struct("<72xQII")


def _residue(kind: int) -> int:
    """The CRC32C of any `CHECKED_BYTES` that end in their own checksum xor `kind`.

    A CRC is linear: that of a message and its own checksum is a constant, and the xor adds the same
    to each.
    """
    return crc32c(kind.to_bytes(4, "little"))


_WHOLE_ONE_EXTENT: Final = _residue(ONE_EXTENT)
_WHOLE_EXTENTS: Final = _residue(EXTENTS)
_WHOLE_CONTINUATION: Final = _residue(CONTINUATION)


def _packed(rows: Sequence[Placed]) -> bytes:
    """The numbers and generations of rows, as the kernel takes them."""
    if isinstance(rows, PackedRows):
        return rows.packed
    return b"".join([row[:CHECKED_BYTES] + number.to_bytes(4, "little") for number, row in rows])


def _stop_of(stop_at: bool | None) -> Literal[-1, 0, 1]:
    """`stop_at` as the kernel takes it."""
    return -1 if stop_at is None else 1 if stop_at else 0


def _pieces(keys: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    """The keys that one call of the kernel looks up: a lazy sequence in pieces that grow, any other
    iterable key by key, as a search may end at any of them."""
    if isinstance(keys, list | tuple):
        yield keys
        return
    growing = isinstance(keys, Sequence)
    remaining, most = iter(keys), 1
    while some := list(islice(remaining, most)):
        yield some
        most = min(2 * most, _MOST_KEYS) if growing else 1


def _fewer_than(keys: Sequence[bytes]) -> Callable[[Any], bool]:
    """Whether the kernel's `find_rows` has not found all of these keys."""
    return lambda found: found is not None and len(found[0]) < len(keys) * ROW_BYTES


class IndexReader:
    """Looks entries up in a mapped index. Thread-safe; takes no locks. A writer that lost its
    processor amid a change is waited for, for some milliseconds once.

    It returns packed rows, for `unpack_row` and `generation_of`. A key that is not `KEY_BYTES` long
    raises struct.error or ValueError. No content of the file makes a method raise or loop: damaged
    rows, all rows of a revoked index, and those of tiers that hang are not found. `live` tells
    whether the index is valid.
    """

    def __init__(self, buffer: mmap.mmap | bytes) -> None:
        """The caller owns `buffer`, and keeps it mapped until `close`.

        Raises RecordError if it does not hold an index of this version.
        """
        layout, incarnation, multiplier = unpack_header(buffer)
        self.layout: Final = layout
        #: Of the daemon that writes the index.
        self.incarnation: Final = incarnation
        self._multiplier: Final = multiplier
        self._data: Final = buffer
        #: The shape in which a writer was stopped or killed amid a change.
        self._stuck: int | None = None
        with memoryview(buffer) as whole, whole[: layout.size_bytes] as used:
            words = used.cast("I")
            longs = used.cast("Q")
            self._header: Final = longs[: HEADER_BYTES // 8]
        heads_start = HEADER_BYTES // 4
        self._heads: Final = words[heads_start : heads_start + layout.max_heads]
        self._links: Final = words[LINK_OFFSET // 4 :: ROW_BYTES // 4]
        self._generations: Final = longs[GENERATION_OFFSET // 8 :: ROW_BYTES // 8]
        #: What the kernel is told of this index.
        self._described: Final = (
            layout.max_heads,
            layout.size_bytes // ROW_BYTES,
            multiplier.to_bytes(MULTIPLIER_BYTES, "little"),
        )
        words.release()
        longs.release()

    @classmethod
    def attach(cls, fd: int) -> IndexReader:
        """Map the index behind a descriptor, which the caller owns. It is unmapped when the last
        reference to the reader goes.

        Raises RecordError, and OSError if it can't be mapped.
        """
        try:
            return cls(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        except ValueError as problem:  # an empty file
            raise RecordError(f"no index: {problem}") from None

    @property
    def live(self) -> bool:
        """Whether the index is valid: it was not revoked."""
        return self._header[STATE] == LIVE

    @property
    def hanging(self) -> int:
        """The tiers whose device does not answer: bit n is tier n."""
        return self._header[HANGING]

    def get(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The row of each key, None where there is none."""
        return [found and found[1] for found in self.find(keys)]

    def contains(self, keys: Iterable[bytes]) -> list[bool]:
        """Whether each key is there."""
        return [found is not None for found in self.find(keys)]

    def tiers(self, keys: Iterable[bytes], stop_at: bool | None = None) -> Sequence[int]:
        """The number of the tier in which each key is; 0: it is not there. `stop_at` as in
        `find`."""
        if native and not self._header[HANGING]:
            tiers = bytearray()
            for some in _pieces(keys):
                tiers += self._settled(native.tiers, some, stop_at, lambda found: 0 in found)
                if stop_at is not None and bool(tiers[-1]) == stop_at:
                    break
            return tiers
        found = self.find(keys, stop_at)
        return [placed[1][TIER_OFFSET] if placed is not None else 0 for placed in found]

    def tier_of(self, key: bytes) -> int | None:
        """`tiers` of one key, at a fraction of the cost; None if the index is not `live`. If one
        walk along the chain does not settle it, `find` does."""
        header = self._header
        if native:
            tier: int = native.tiers(self._data, *self._described, (key,), -1)[0]
            if not tier and header[SHAPE] & MOVING:
                tier = self.tiers((key,))[0]
            if header[STATE] != LIVE:
                return None
            return tier if tier and not header[HANGING] >> tier & 1 else 0
        seen, count, mask = self._shape()
        data = self._data
        bucket = HASHED.unpack(key)[0] * self._multiplier >> HASH_SHIFT & mask
        number = self._heads[bucket if bucket < count else bucket & mask >> 1]
        start = number * ROW_BYTES
        row = data[start : start + CHECKED_BYTES] if number else b""
        if row[_KEY_PART] != key and number:
            # The chain begins with another key. Search the rest of it.
            links = self._links
            for _ in _REST_OF_CHAIN:
                number = links[number] if number < len(links) else 0
                start = number * ROW_BYTES
                row = data[start : start + CHECKED_BYTES] if number else b""
                if not number or row[_KEY_PART] == key:
                    break
        if header[STATE] != LIVE:
            return None
        if number and crc32c(row) == _WHOLE_ONE_EXTENT and row[_KEY_PART] == key:
            tier = row[TIER_OFFSET]
            return 0 if header[HANGING] >> tier & 1 else tier
        return self.tiers((key,))[0] if number or header[SHAPE] != seen else 0

    def unchanged(self, rows: Iterable[Placed]) -> bool:
        """Whether each row that was found before is there, or one of the same key and generation.

        If so after a copy of an entry's bytes, nothing overwrote them before the copy was done.
        """
        if not self.live:
            return False
        # No two entries share a generation, and a removed row loses its own at once. So comparing
        # the generation in its place says as much as a look-up, at a tenth of the cost.
        if native:
            rows = rows if isinstance(rows, PackedRows) else list(rows)
            positions = native.moved(self._data, *self._described, _packed(rows))
            if not positions:
                return positions is not None
            moved = [rows[position] for position in positions]
        else:
            generations = self._generations
            moved = [
                (number, row)
                for number, row in rows
                if not 0 < generations[number] == _generation_of(row)[0]
            ]
            if not moved:
                return self.live
        found = self._find([row[_KEY_PART] for _, row in moved])
        return all(
            now is not None and generation_of(now[1]) == generation_of(row)
            for now, (_, row) in zip(found, moved, strict=True)
        )

    def row_at(self, number: int) -> bytes | None:
        """The entry's row of that number, or None. For walks over all rows."""
        start = number * ROW_BYTES
        return self._complete(self._data[start : start + CHECKED_BYTES])

    def close(self) -> None:
        """Release the buffer. No other call may run during or after it. Idempotent."""
        for view in (self._header, self._heads, self._links, self._generations):
            view.release()

    def find(self, keys: Iterable[bytes], stop_at: bool | None = None) -> list[Placed | None]:
        """The number and row of each key, or None. `stop_at`: end with the first key that is there
        (True) or is not (False). Of an iterator, no key after it is taken; of a lazy sequence, some
        may be."""
        if hanging := self._header[HANGING]:
            return self._find_answering(keys, stop_at, hanging)
        return self._find(keys, stop_at)

    def _find_answering(
        self, keys: Iterable[bytes], stop_at: bool | None, hanging: int
    ) -> list[Placed | None]:
        """`find`, without the entries of tiers that hang."""
        results: list[Placed | None] = []
        for key in keys:
            (found,) = self._find((key,))
            if found is not None and hanging >> found[1][TIER_OFFSET] & 1:
                found = None
            results.append(found)
            if stop_at is not None and (found is not None) == stop_at:
                break
        return results

    def _find(self, keys: Iterable[bytes], stop_at: bool | None = None) -> list[Placed | None]:
        """`find` in all tiers."""
        if native:
            return self._find_natively(keys, stop_at)
        # Written out without calls: it runs for every block.
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
            tries, waited = _TRIES, False
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
                    if waited or not self._moving or not self._wait_for_writer():
                        break
                    waited, tries = True, _TRIES
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

    def _find_natively(self, keys: Iterable[bytes], stop_at: bool | None) -> list[Placed | None]:
        """`_find`."""
        results: list[Placed | None] = []
        for some in _pieces(keys):
            results += self._settled(native.find, some, stop_at, lambda found: None in found)
            if stop_at is not None and (results[-1] is not None) == stop_at:
                break
        return results

    def find_rows(
        self, keys: Iterable[bytes], stop_at: bool | None = None
    ) -> tuple[PackedRows, Sequence[int]] | None:
        """`find`, without an object for each row: the rows that are there, and the position of the
        key of each. None if one of them has not exactly one extent."""
        if native and not self._header[HANGING]:
            return self._find_rows_natively(keys, stop_at)
        found = self.find(keys, stop_at)
        rows = packed_rows([placed for placed in found if placed is not None])
        if rows is None:
            return None
        if found[len(rows) :].count(None) == len(found) - len(rows):
            return rows, range(len(rows))
        return rows, [n for n, placed in enumerate(found) if placed is not None]

    def _find_rows_natively(
        self, keys: Iterable[bytes], stop_at: bool | None
    ) -> tuple[PackedRows, Sequence[int]] | None:
        parts: list[bytes] = []
        positions: Sequence[int] = range(0)
        looked = 0
        for some in _pieces(keys):
            found = self._settled(native.find_rows, some, stop_at, _fewer_than(some))
            if found is None:
                return None
            packed, others = found
            count = len(packed) // ROW_BYTES
            parts.append(packed)
            if others is None and len(positions) == looked:
                positions = range(looked + count)
            else:
                places = range(count) if others is None else others
                positions = [*positions, *(looked + place for place in places)]
            looked += len(some)
            if (count > 0) if stop_at else stop_at is False and count < len(some):
                break
        return PackedRows(parts[0] if len(parts) == 1 else b"".join(parts)), positions

    def _settled(
        self,
        look: Callable[..., T],
        keys: Sequence[bytes],
        stop_at: bool | None,
        missed: Callable[[T], bool],
    ) -> T:
        """What the kernel finds, where `look` is one of its functions. What it does not find while
        the writer is amid a change may be there: `missed` tells whether there is any."""
        header = self._header
        tries, waited = _TRIES, False
        while True:
            seen = header[SHAPE]
            found = look(self._data, *self._described, keys, _stop_of(stop_at))
            tries -= 1
            if not missed(found) or not tries or (header[SHAPE] == seen and not seen & MOVING):
                return found
            if self._moving:
                if waited or not self._wait_for_writer():
                    return found
                waited = True

    @property
    def _moving(self) -> bool:
        return bool(self._header[SHAPE] & MOVING)

    def _wait_for_writer(self) -> bool:
        """Give a writer that is amid a change some time. False: it does not go on; it was stopped
        or killed there, and is not waited for again."""
        seen = self._header[SHAPE]
        if seen == self._stuck:
            return False
        for wait_s in _WAITS_S:
            if not self._moving:
                return True
            time.sleep(wait_s)
        if self._header[SHAPE] == seen:
            self._stuck = seen
        return not self._moving

    def _shape(self) -> tuple[int, int, int]:
        """The shape (`_UNSETTLED` while rows are moved), the number of heads, and the hash mask."""
        shape = self._header[SHAPE]
        count = min(max(shape & HEADS_MASK, 1), self.layout.max_heads)
        mask = (1 << (count - 1).bit_length()) - 1
        return _UNSETTLED if shape & MOVING else shape, count, mask

    def _complete(self, row: bytes) -> bytes | None:
        """The row of an entry, followed by the rest of its extents. None if it is not the row of an
        entry, or is incomplete."""
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
