"""The writer of the index: a sealed memfd that readers map, see `proto.index` for its layout.

The event loop calls it in the same step in which it changes the state. The time of a call does not
depend on the number of entries, and no call waits for a reader.

An entry that can't be listed (a full chain, too many extents, no memory) is counted, and readers
miss it. What the index lists is always true.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ...proto.index import (
    CHECKED_BYTES,
    CONTINUATION_OFFSET,
    GENERATION_OFFSET,
    HANGING,
    HASH_SHIFT,
    HASHED,
    HEADER_BYTES,
    HEADS_MASK,
    INCARNATION_BYTES,
    LINK_OFFSET,
    LIVE,
    MAX_CHAIN,
    MAX_EXTENTS,
    MOVING,
    MULTIPLIER_BYTES,
    REVOKED,
    ROW_BYTES,
    SHAPE,
    STATE,
    WORDS_PER_ROW,
    IndexLayout,
    Listed,
    pack_continuation,
    pack_header,
    pack_row,
)
from ...proto.index_reader import IndexReader
from ...proto.kernel import native
from ...proto.keys import Key
from ...proto.limits import KEY_BYTES
from ...tiers.arena import SEALS
from ...tiers.files import FULL_ERRORS
from ...tiers.store import StoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Row numbers have 32 bits.
MAX_ENTRIES: Final = 2**30
#: Heads for each entry: with two, 4 of 5 rows are the first of their chain.
HEADS_PER_ENTRY: Final = 2
#: One page of heads, which has memory from the start.
FIRST_HEADS: Final = 1024
_hashed: Final = HASHED.unpack
#: Added to the shape, it counts one change.
_CHANGE: Final = MOVING << 1
_SHAPE_MASK: Final = 2**64 - 1
#: Memory is allocated in pieces of this size before it is written. If there is none, the system
#: call fails; a write to the mapping would kill the daemon.
_PIECE_BYTES: Final = 256 * 2**10
#: Rows that `expect` moves at most: a millisecond.
_MAX_MOVED: Final = 2048
#: Leaves one continuation row for each entry, on average. It is address space only.
_ROWS_PER_ENTRY: Final = 2


class IndexStats(NamedTuple):
    """Current values, except `unlisted`: the puts since the start that found no room."""

    entries: int
    continuation_rows: int
    heads: int
    unlisted: int
    memory_bytes: int
    size_bytes: int


class IndexWriter:
    """Not thread-safe: it belongs to the event loop.

    `fd` belongs to the writer and may be handed to any process: it can't be written through,
    mapped for writing, resized, or opened anew for writing.
    """

    def __init__(self, incarnation: bytes, max_entries: int) -> None:
        """`incarnation`: 16 bytes. Takes address space for `max_entries` entries; memory is
        allocated as they are put. Raises ValueError, and StoreError if the memfd can't be made."""
        if len(incarnation) != INCARNATION_BYTES:
            raise ValueError(f"an incarnation of {len(incarnation)} bytes")
        if not 0 < max_entries <= MAX_ENTRIES:
            raise ValueError(f"an index of {max_entries} entries")
        self._made_of = incarnation, max_entries
        self.layout: Final = IndexLayout(
            max_heads=max(FIRST_HEADS, HEADS_PER_ENTRY * max_entries),
            max_rows=_ROWS_PER_ENTRY * max_entries,
        )
        self.size_bytes: Final = self.layout.size_bytes
        self._multiplier: Final = secrets.randbits(8 * MULTIPLIER_BYTES) | 1
        self._multiplier_bytes: Final = self._multiplier.to_bytes(MULTIPLIER_BYTES, "little")
        self._entries = 0
        self._continuation_rows = 0
        self._unlisted = 0
        #: as in the header: the number of heads, and a count of changes
        self._shape = FIRST_HEADS
        #: the number of heads and their mask, with which every key is placed
        self._count, self._mask = FIRST_HEADS, _mask_of(FIRST_HEADS)
        #: rows that were removed, chained by their links
        self._free_row = 0
        #: the first row that was never used
        self._fresh_row = self.layout.first_row
        #: the ends of the allocated memory for rows and for heads
        self._secured_row = self.layout.first_row
        self._secured_heads = FIRST_HEADS
        self.fd, self._mapping = _sealed_memfd(self.size_bytes)
        with memoryview(self._mapping) as whole:
            words = whole.cast("I")
            longs = whole.cast("Q")
        heads_start = HEADER_BYTES // 4
        self._heads = words[heads_start : heads_start + self.layout.max_heads]
        self._links = words[LINK_OFFSET // 4 :: ROW_BYTES // 4]
        self._continuations = words[CONTINUATION_OFFSET // 4 :: ROW_BYTES // 4]
        self._generations = longs[GENERATION_OFFSET // 8 :: ROW_BYTES // 8]
        self._header = longs[: HEADER_BYTES // 8]
        words.release()
        longs.release()
        header = pack_header(self.layout, incarnation, self._multiplier)
        self._mapping[: len(header)] = header
        self._header[SHAPE] = self._shape
        self._header[STATE] = LIVE
        self._reader = IndexReader(self._mapping)

    # ---- contents

    def __len__(self) -> int:
        """The number of listed entries."""
        return self._entries

    def get(self, key: Key) -> bytes | None:
        """The packed row that a reader finds."""
        return self._reader.get((key,))[0]

    def rows(self, start: int = 0, most: int = 1024) -> tuple[list[bytes], int]:
        """Packed rows in slices, to be compared with the state: those among the next `most` numbers
        from `start` on, and the start of the next slice, 0 at the end.

        A row stays in its place: over all slices, an entry that is listed all the time is
        returned exactly once.
        """
        start = max(start, self.layout.first_row)
        end = min(start + most, self._fresh_row)
        found = (self._reader.row_at(number) for number in range(start, end))
        return [row for row in found if row is not None], end if end < self._fresh_row else 0

    def stats(self) -> IndexStats:
        """Costs a system call."""
        return IndexStats(
            entries=self._entries,
            continuation_rows=self._continuation_rows,
            heads=self._shape & HEADS_MASK,
            unlisted=self._unlisted,
            memory_bytes=os.fstat(self.fd).st_blocks * 512,
            size_bytes=self.size_bytes,
        )

    # ---- changes

    def put(self, entry: Listed) -> bool:
        """List an entry, in place of the former entry of its key.

        False if there is no room for it; its key is then not listed any more. Raises struct.error,
        and changes nothing, if a number does not fit into a row.
        """
        key, location = entry.key, entry.location
        bucket = self._bucket(key)
        before, old, length = self._find(bucket, key)
        number = 0
        if (old or length < MAX_CHAIN) and len(location) <= 2 * MAX_EXTENTS:
            number = self._write(entry, location)
        if not number:
            self._unlisted += 1
            if old:
                self._remove(bucket, before, old)
            return False
        if old:
            self._links[number] = self._links[old]
            self._link(bucket, before, number)
            self._recycle(old)
            return True
        heads = self._heads
        self._links[number] = heads[bucket]
        heads[bucket] = number
        self._entries = entries = self._entries + 1
        if self._count < HEADS_PER_ENTRY * entries:
            self._add_head()
            if self._count < HEADS_PER_ENTRY * entries:
                self._add_head()
        return True

    def put_all(self, entries: Sequence[Listed]) -> None:
        """`put` each, in this order; with the kernel in a fraction of the time. Raises as `put`
        does, with the entries before the failed one listed."""
        for _ in range(HEADS_PER_ENTRY * len(entries)):
            if self._count >= HEADS_PER_ENTRY * (self._entries + len(entries)):
                break
            self._add_head()
        at = 0
        while native and at < len(entries):
            begin = at
            at, self._free_row, self._fresh_row = native.put_rows(*self._writer(), entries, at)
            self._entries += at - begin
            if at < len(entries):
                self.put(entries[at])  # replaces another, can't be listed, or takes several rows
                at += 1
        for entry in entries[at:]:
            self.put(entry)

    def delete_all(self, keys: Sequence[Key]) -> None:
        """`delete` each; with the kernel in a fraction of the time."""
        at = 0
        while native and at < len(keys):
            at, listed, self._free_row, shape = native.delete_rows(*self._writer(), keys, at)
            self._entries -= listed
            self._shape = shape & _SHAPE_MASK
            if at < len(keys):
                self.delete(keys[at])  # has several rows
                at += 1
        for key in keys[at:]:
            self.delete(key)

    def _writer(self) -> tuple[Buffer, bytes, int, int, int, int, int]:
        """What the kernel is told."""
        return (
            self._mapping,
            self._multiplier_bytes,
            self._count,
            self._free_row,
            self._fresh_row,
            self._secured_row,
            self._shape,
        )

    def delete(self, key: Key) -> bool:
        """Remove an entry; False if it was not listed. After this, a reader that looks it up
        misses, and the entry's extents may be written."""
        bucket = self._bucket(key)
        before, number, _ = self._find(bucket, key)
        if number:
            self._remove(bucket, before, number)
        return bool(number)

    def expect(self, entries: int) -> None:
        """Add the heads for so many more entries now, if few are listed yet: dividing a chain for
        each entry takes half of the time of a put. Never raises, even when closed."""
        if self.fd < 0 or self._fresh_row - self.layout.first_row > _MAX_MOVED:
            return
        wanted = min(self.layout.max_heads, HEADS_PER_ENTRY * (self._entries + entries))
        with suppress(OSError):  # a put raises it again
            while self._secured_heads < wanted and self._secure_heads():
                pass
        wanted = min(wanted, self._secured_heads)
        heads = self._shape & HEADS_MASK
        if wanted <= heads:
            return
        numbers = []
        for number in self._heads[:heads].tolist():
            while number:
                numbers.append(number)
                number = self._links[number]
        # Readers that look a key up meanwhile try again.
        self._publish(self._shape | MOVING)
        self._heads[:heads] = memoryview(bytes(4 * heads)).cast("I")
        self._publish(self._shape + wanted - heads)  # still moving
        for number in numbers:
            start = number * ROW_BYTES
            bucket = self._bucket(self._mapping[start : start + KEY_BYTES])
            self._links[number] = self._heads[bucket]
            self._heads[bucket] = number
        self._publish((self._shape & ~MOVING) + _CHANGE)

    def set_hanging(self, tiers: Iterable[int]) -> None:
        """Say which tiers have a device that does not answer: readers don't find their entries."""
        self._header[HANGING] = sum(1 << tier for tier in tiers)

    @property
    def hanging(self) -> int:
        """What `set_hanging` said last: a bit for each tier."""
        return self._header[HANGING]

    def revoke(self) -> None:
        """Make every look-up of every reader a miss, from now on and for ever. Readers need a
        descriptor of its successor."""
        self._header[STATE] = REVOKED

    @property
    def revoked(self) -> bool:
        return self._header[STATE] != LIVE

    def make_larger(self, max_entries: int) -> bool:
        """Have its successor take so many entries. False: this one does."""
        incarnation, now = self._made_of
        self._made_of = incarnation, max(now, min(max_entries, MAX_ENTRIES))
        return self._made_of[1] > now

    def successor(self) -> IndexWriter:
        """An empty index of the same incarnation, and of the same size unless it is to be larger.
        Raises StoreError."""
        return IndexWriter(*self._made_of)

    def open_reader(self) -> int:
        """A new read-only descriptor, for a client. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap the index and close `fd`; readers keep their mappings. Idempotent."""
        if self.fd < 0:
            return
        self._reader.close()
        views = (self._heads, self._links, self._continuations, self._generations, self._header)
        for view in views:
            view.release()
        self._mapping.close()
        os.close(self.fd)
        self.fd = -1

    # ---- chains

    def _bucket(self, key: bytes) -> int:
        (word,) = _hashed(key)
        bucket: int = word * self._multiplier >> HASH_SHIFT & self._mask
        return bucket if bucket < self._count else bucket & self._mask >> 1

    def _find(self, bucket: int, key: bytes) -> tuple[int, int, int]:
        """The row before that of `key`, its own row (each 0 if there is none), and how many rows
        were passed."""
        before, number, passed = 0, self._heads[bucket], 0
        mapping, links = self._mapping, self._links
        while number:
            start = number * ROW_BYTES
            if mapping[start : start + KEY_BYTES] == key:
                break
            before, number, passed = number, links[number], passed + 1
        return before, number, passed

    def _link(self, bucket: int, before: int, number: int) -> None:
        """Make `number` the row that follows `before`, or the first of its chain."""
        if before:
            self._links[before] = number
        else:
            self._heads[bucket] = number

    def _remove(self, bucket: int, before: int, number: int) -> None:
        self._link(bucket, before, self._links[number])
        self._recycle(number)
        self._entries -= 1

    def _recycle(self, number: int) -> None:
        """Free the rows of an entry that has just been unlinked."""
        self._generations[number] = 0
        # Before its link changes: a reader that is at this row has to notice.
        self._publish(self._shape + _CHANGE)
        if not self._continuations[number]:
            self._links[number] = self._free_row
            self._free_row = number
            return
        numbers = [number]
        while number := self._continuations[number]:
            numbers.append(number)
        self._free_rows(numbers)
        self._continuation_rows -= len(numbers) - 1

    def _publish(self, shape: int) -> None:
        self._shape = self._header[SHAPE] = shape & _SHAPE_MASK
        if shape & HEADS_MASK != self._count:
            self._count = shape & HEADS_MASK
            self._mask = _mask_of(self._count)

    def _add_head(self) -> None:
        """Divide one chain: the new head gets the hashes that have its highest bit."""
        count = self._count
        if count >= self._secured_heads and not self._secure_heads():
            return
        bit = 1 << (count.bit_length() - 1)
        if not self._heads[count ^ bit]:
            self._publish(self._shape + 1)
            return
        staying: list[int] = []
        moving: list[int] = []
        number = self._heads[count ^ bit]
        while number:
            start = number * ROW_BYTES
            (word,) = HASHED.unpack(self._mapping[start : start + KEY_BYTES])
            moves = word * self._multiplier >> HASH_SHIFT & bit
            (moving if moves else staying).append(number)
            number = self._links[number]
        added = self._shape + 1
        if moving:
            self._publish(self._shape | MOVING)
            self._chain(count, moving)
            self._chain(count ^ bit, staying)
            added += _CHANGE
        self._publish(added)

    def _chain(self, bucket: int, numbers: list[int]) -> None:
        """Make a chain of these rows."""
        following = 0
        for number in reversed(numbers):
            self._links[number] = following
            following = number
        self._heads[bucket] = following

    # ---- rows

    def _write(self, entry: Listed, location: tuple[int, ...]) -> int:
        """Write the rows of an entry, without linking them. Returns the number of the first, 0 if
        there is no room. Raises struct.error, and keeps no row, if a number does not fit."""
        if len(location) > 2:
            return self._write_extents(entry, location)
        row = pack_row(entry, location)
        number = self._take_row()
        if number:
            start = number * ROW_BYTES
            self._mapping[start : start + CHECKED_BYTES] = row
        return number

    def _write_extents(self, entry: Listed, location: tuple[int, ...]) -> int:
        rest = location[2:]
        numbers: list[int] = []
        for _ in range(1 - -len(rest) // WORDS_PER_ROW):
            number = self._take_row()
            if not number:
                self._free_rows(numbers)
                return 0
            numbers.append(number)
        try:
            rows = [pack_row(entry, location, numbers[1])]
            for position, following in enumerate([*numbers[2:], 0]):
                words = rest[position * WORDS_PER_ROW : (position + 1) * WORDS_PER_ROW]
                rows.append(pack_continuation(entry.generation, position, words, following))
        except struct.error:
            self._free_rows(numbers)
            raise
        for number, row in zip(numbers, rows, strict=True):
            start = number * ROW_BYTES
            self._mapping[start : start + CHECKED_BYTES] = row
        self._continuation_rows += len(numbers) - 1
        return numbers[0]

    def _take_row(self) -> int:
        """The number of an unused row, 0 if there is none."""
        number = self._free_row
        if number:
            self._free_row = self._links[number]
            return number
        number = self._fresh_row
        if number == self._secured_row and not self._secure_rows():
            return 0
        self._fresh_row = number + 1
        return number

    def _free_rows(self, numbers: list[int]) -> None:
        for number in numbers:
            self._links[number] = self._free_row
            self._free_row = number

    # ---- memory

    def _secure_rows(self) -> bool:
        """Allocate memory for more rows. False: there is none, or the number is at its maximum."""
        start_bytes = self._secured_row * ROW_BYTES
        end_bytes = min(start_bytes + _PIECE_BYTES, self.layout.end_row * ROW_BYTES)
        secured_row = end_bytes // ROW_BYTES
        if secured_row == self._secured_row or not self._secure(start_bytes, end_bytes):
            return False
        self._secured_row = secured_row
        return True

    def _secure_heads(self) -> bool:
        """Allocate memory for more heads. False: see `_secure_rows`."""
        end = min(self._secured_heads + _PIECE_BYTES // 4, self.layout.max_heads)
        start_bytes, end_bytes = HEADER_BYTES + 4 * self._secured_heads, HEADER_BYTES + 4 * end
        if end == self._secured_heads or not self._secure(start_bytes, end_bytes):
            return False
        self._secured_heads = end
        return True

    def _secure(self, start_bytes: int, end_bytes: int) -> bool:
        try:
            os.posix_fallocate(self.fd, start_bytes, end_bytes - start_bytes)
        except OSError as problem:
            if problem.errno not in FULL_ERRORS:
                raise
            return False
        return True


def _mask_of(heads: int) -> int:
    return (1 << (heads - 1).bit_length()) - 1


def _sealed_memfd(size_bytes: int) -> tuple[int, mmap.mmap]:
    """A memfd, and the only mapping that can write to it. Raises StoreError."""
    fd = -1
    try:
        fd = os.memfd_create("prefixd-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, HEADER_BYTES + 4 * FIRST_HEADS)
        mapping = mmap.mmap(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as problem:
        if fd >= 0:
            os.close(fd)
        raise StoreError(f"can't make an index of {size_bytes} bytes: {problem}") from None
    return fd, mapping
