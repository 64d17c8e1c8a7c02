"""The file that llama-server makes of a slot, and takes back. Pure: bytes in, bytes out.

All numbers are little-endian.

    u32  magic "ggsq"
    u32  version            2, 3 and 4 are known
    u32  words
    i32  words x word       the tokens; packed: -1, 1, n, n tokens, 0 (more for media)
         state              one or more sections, to the end of the file

The state of a model with full attention is one section. One with sliding windows has a second, of
the cells within the window; hybrid models add a recurrent state. What is behind the first section
is the remainder: it belongs to exactly these tokens, and stays unread. Recurrent models have
nothing else.

    u32  streams
         for each stream: u32 cells, and if there are any:
             cells x (i32 position, u32 1, i32 sequence)
             u32 transposed, u32 layers, from version 4 on 8 bytes about rotated cells
             layers x K, layers x V:
                 i32 type, u64 bytes of a row, cells x row                      or, transposed V:
                 i32 type, u32 bytes of an element, u32 rows, rows x cells x element

A slot's cells are in one stream. So the first section can be cut by tokens: row i of every layer
belongs to token i. In a cache that slots share, the cells lie in any order; `SlotFile.sorted` puts
them in that of the tokens.

llama-server ends with an assertion on a file that is a byte too short, so nothing that was not read
to its end here, or that is not the same bytes as when it was, may be handed to it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

MAGIC: Final = 0x67677371
VERSIONS: Final = range(2, 5)
#: From this version on, a section says how its cells are rotated.
_ROTATES: Final = 4
_ROTATION_BYTES: Final = 8
_HEAD_BYTES: Final = 12
_CELL_BYTES: Final = 12
#: More is no file of a server that exists, and would take long to read.
_MOST_STREAMS: Final = 4096
_MOST_LAYERS: Final = 4096


class BadSlotFile(ValueError):
    """The bytes are no slot file, or not a whole one."""


class UnknownVersion(BadSlotFile):
    """A slot file of a version that is not known here: its tokens can't be read."""


class Region(NamedTuple):
    """K or V of one layer, as it begins in the file."""

    head: bytes
    #: Bytes of one token, all rows together.
    token_bytes: int
    #: Rows of a transposed V, whose elements of one token lie apart; 0: a token is one piece.
    rows: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The form of a section, the same for any number of tokens. Equal for equal models, caches and
    builds; `streams` is the server's number of slots and says nothing about the rows."""

    version: int
    packed: bool
    transposed: int
    layers: int
    rotation: bytes
    regions: tuple[Region, ...]
    streams: int = field(compare=False)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all regions."""
        return sum(region.token_bytes for region in self.regions)

    def file_bytes(self, token_count: int) -> int:
        """The length of a file of that many tokens, without a remainder."""
        return self._offsets(token_count)[-1] + 4 * (self.streams - 1)

    def _offsets(self, token_count: int) -> list[int]:
        """Where each region's rows begin in a file whose cells are in the first stream, and where
        the last one ends."""
        words = token_count + 4 if self.packed else token_count
        first = _HEAD_BYTES + 4 * words + 8 + _CELL_BYTES * token_count + 8 + len(self.rotation)
        ends = accumulate(
            (len(region.head) + region.token_bytes * token_count for region in self.regions),
            initial=first,
        )
        heads = [*(len(region.head) for region in self.regions), 0]
        return [end + head for end, head in zip(ends, heads, strict=True)]

    def write_frame(self, file: memoryview, tokens: Tokens) -> None:
        """Everything but the rows, into a zeroed file of `file_bytes(len(tokens))`."""
        count = len(tokens)
        words = np.concatenate(([-1, 1, count], tokens, [0])) if self.packed else tokens
        cells = np.zeros((count, 3), "<i4")
        cells[:, 0], cells[:, 1] = np.arange(count), 1
        frame = b"".join(
            (
                struct.pack("<3I", MAGIC, self.version, len(words)),
                np.asarray(words, "<i4").tobytes(),
                struct.pack("<2I", self.streams, count),
                cells.tobytes(),
                struct.pack("<2I", self.transposed, self.layers),
                self.rotation,
            )
        )
        file[: len(frame)] = frame
        for region, offset in zip(self.regions, self._offsets(count), strict=False):
            file[offset - len(region.head) : offset] = region.head

    def rows(self, file: memoryview, token_count: int, first: int, last: int) -> list[memoryview]:
        """The places of tokens `first` to `last` (exclusive) in a file that `write_frame` began, in
        the order of a block. Not for a transposed V, whose tokens lie in pieces: see `fill`."""
        return [
            file[offset + first * region.token_bytes : offset + last * region.token_bytes]
            for region, offset in zip(self.regions, self._offsets(token_count), strict=False)
        ]

    def fill(self, file: memoryview, token_count: int, first: int, block: memoryview) -> None:
        """Put a whole block, the rows from token `first` on, into a file of `token_count`."""
        count, offset = len(block) // self.token_bytes, 0
        for region, start in zip(self.regions, self._offsets(token_count), strict=False):
            size = region.token_bytes * count
            source = np.frombuffer(block, np.uint8, size, offset)
            rows = _as_rows(file, region, start, token_count)
            rows[:, first : first + count] = source.reshape(len(rows), count, -1)
            offset += size


def _as_rows(
    file: memoryview, region: Region, offset: int, token_count: int
) -> npt.NDArray[np.uint8]:
    """A region as (rows, tokens, bytes of one token in a row)."""
    flat = np.frombuffer(file, np.uint8, region.token_bytes * token_count, offset)
    return flat.reshape(max(1, region.rows), token_count, -1)


@dataclass(frozen=True, slots=True)
class SlotSection:
    """One attention cache of a file."""

    layout: SlotLayout
    start: int
    end: int
    #: Which of the streams has the cells.
    stream: int
    positions: Tokens
    #: Where the rows of each region begin.
    offsets: tuple[int, ...]


class SlotFile:
    """A slot file whose head was read. `memory` is referenced."""

    def __init__(self, memory: memoryview) -> None:
        """Raises BadSlotFile, and UnknownVersion for one that only llama-server understands."""
        self.memory = memory
        self._reader = reader = _Reader(memory, 0)
        magic, self.version, words = reader.u32(), reader.u32(), reader.u32()
        if magic != MAGIC:
            raise BadSlotFile("it does not begin as a slot file does")
        if self.version not in VERSIONS:
            raise UnknownVersion(f"version {self.version} of slot files is not known")
        found = reader.i32s(words)
        self.packed = bool(words and found[0] == -1)
        if self.packed:
            if words < 4 or found[1] != 1 or found[2] != words - 4 or found[-1] != 0:
                raise BadSlotFile("it contains media, or packs its tokens in an unknown way")
            found = found[3:-1]
        if (found < 0).any():
            raise BadSlotFile("it contains media")
        #: The tokens of the slot: a copy, which is kept longer than the memory.
        self.tokens: Tokens = found.copy()
        self._state_at = reader.at

    @cached_property
    def base(self) -> SlotSection | None:
        """The first section, with one cell for each token; None: there is no such section."""
        try:
            found = _section(_Reader(self.memory, self._state_at), self.version, self.packed)
        except BadSlotFile:
            return None
        return found if found.layout.regions and self._covers(found) else None

    def _covers(self, section: SlotSection) -> bool:
        """Whether a section has one cell for each token."""
        count = len(self.tokens)
        found = section.positions
        return len(found) == count and bool((np.sort(found) == np.arange(count)).all())

    @property
    def remainder(self) -> memoryview:
        """What is behind the first section: the state of exactly these tokens. Empty for a model
        with full attention, everything for a recurrent one."""
        return self.memory[self._state_at if self.base is None else self.base.end :]

    @property
    def layout(self) -> SlotLayout:
        """The form of the first section. Raises BadSlotFile if there is none."""
        return self._base().layout

    def _base(self) -> SlotSection:
        if self.base is None:
            raise BadSlotFile("it has no keys and values for each of its tokens")
        return self.base

    def sorted(self) -> SlotFile:
        """Itself, or a copy of it with the cells in the order of the tokens."""
        section = self._base()
        order = np.argsort(section.positions, kind="stable")
        if (order == np.arange(len(order))).all():
            return self
        memory = memoryview(bytearray(self.memory))
        for region, offset in zip(section.layout.regions, section.offsets, strict=True):
            rows = _as_rows(memory, region, offset, len(order))
            rows[:] = _as_rows(self.memory, region, offset, len(order))[:, order]
        cells = section.start + 4 * (2 + section.stream)
        table = np.frombuffer(memory, "<i4", 3 * len(order), cells).reshape(-1, 3)
        table[:] = table[order]
        return SlotFile(memory)

    def block(self, first: int, last: int) -> list[Any]:
        """The rows of tokens `first` to `last` (exclusive) of a sorted file: slices of it, and of a
        transposed V a copy."""
        section = self._base()
        count = len(self.tokens)
        found: list[Any] = []
        for region, offset in zip(section.layout.regions, section.offsets, strict=True):
            if region.rows:
                rows = _as_rows(self.memory, region, offset, count)[:, first:last]
                found.append(np.ascontiguousarray(rows).reshape(-1))
            else:
                size = region.token_bytes
                found.append(self.memory[offset + first * size : offset + last * size])
        return found

    def with_an_older_cell(self) -> list[Any] | None:
        """The file with one more cell, of zeros, before each sliding window, in pieces; None: it
        needs none.

        llama-server uses a restored window only if it reaches one token further back than the
        window that it saves itself. No later token can attend to that cell.
        """
        try:
            reader = _Reader(self.memory, self._state_at)
            first = _section(reader, self.version, self.packed)
            window = _section(reader, self.version, self.packed)
        except BadSlotFile:
            return None
        if reader.at != len(self.memory) or not self._covers(first):
            return None
        oldest = int(window.positions.min())
        if oldest == 0:
            return None
        layout, count = window.layout, len(window.positions)
        cells = window.start + 4 * (1 + window.stream)
        sequence = self.memory[cells + 4 + 8 : cells + 4 + 12]
        out: list[Any] = [
            self.memory[:cells],
            struct.pack("<I2i", count + 1, oldest - 1, 1),
            sequence,
            self.memory[cells + 4 : cells + 4 + _CELL_BYTES * count],
            struct.pack("<2I", layout.transposed, layout.layers),
            layout.rotation,
        ]
        for region, offset in zip(layout.regions, window.offsets, strict=True):
            rows = _as_rows(self.memory, region, offset, count)
            older = np.zeros((rows.shape[0], 1, rows.shape[2]), np.uint8)
            out += [region.head, np.concatenate((older, rows), axis=1).tobytes()]
        out.append(bytes(4 * (layout.streams - 1 - window.stream)))
        return out


class _Reader:
    """Reads numbers from a place on. Everything beyond the end raises BadSlotFile."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory = memory
        self.at = at

    def take(self, size: int) -> memoryview:
        found = self._memory[self.at : self.at + size]
        if len(found) < size:
            raise BadSlotFile("it ends too early")
        self.at += size
        return found

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def i32s(self, count: int) -> Tokens:
        return np.frombuffer(self.take(4 * count), "<i4")


def _section(reader: _Reader, version: int, packed: bool) -> SlotSection:
    start = reader.at
    streams = reader.u32()
    if not 0 < streams <= _MOST_STREAMS:
        raise BadSlotFile(f"{streams} streams")
    stream = 0
    while not (count := reader.u32()):
        stream += 1
        if stream == streams:
            raise BadSlotFile("no cells")
    cells = reader.i32s(3 * count).reshape(count, 3)
    if (cells[:, 1] != 1).any():
        raise BadSlotFile("a cell that several sequences share")
    transposed, layers = reader.u32(), reader.u32()
    if transposed > 1 or layers > _MOST_LAYERS:
        raise BadSlotFile("no attention cache")
    rotation = bytes(reader.take(_ROTATION_BYTES)) if version >= _ROTATES else b""
    regions, offsets = [], []
    for number in range(2 * layers):
        head = bytes(reader.take(12))
        if transposed and number >= layers:
            _, element_bytes, rows = struct.unpack("<i2I", head)
            token_bytes = element_bytes * rows
        else:
            _, token_bytes = struct.unpack("<iQ", head)
            rows = 0
        if not token_bytes:
            raise BadSlotFile("a layer without bytes")
        offsets.append(reader.at)
        reader.take(token_bytes * count)
        regions.append(Region(head, token_bytes, rows))
    if any(reader.u32() for _ in range(streams - 1 - stream)):
        raise BadSlotFile("cells in several streams")
    layout = SlotLayout(version, packed, transposed, layers, rotation, tuple(regions), streams)
    return SlotSection(layout, start, reader.at, stream, cells[:, 0], tuple(offsets))


def common_tokens(one: Tokens | Sequence[int], other: Tokens | Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    count = min(len(one), len(other))
    unlike = np.flatnonzero(np.asarray(one[:count]) != np.asarray(other[:count]))
    return int(unlike[0]) if len(unlike) else count
