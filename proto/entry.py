"""The fields of an entry, as stores, records and the index know it.

What a client says of an entry is its `Content`. It travels from the client that saves it to the one
that finds it as one value, which only the formats and messages on the way open. CONTRIBUTING.md
lists them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, cast

from .keys import Key
from .limits import MAX_PAYLOAD_BYTES
from .payload import check_layout, check_token_ids
from .vocabulary import SaveReason, Tier

#: The extents of an entry in an arena: offset, length, offset, length ... in bytes. Lengths are
#: multiples of the slab size.
Location: TypeAlias = tuple[int, ...]


class Content(NamedTuple):
    """What a client says of an entry when it saves it, and gets back with it. Alike entries of one
    save share one object.

    The order is that of the index and of the records. The native kernel relies on it.
    """

    payload_bytes: int
    #: 0: not known.
    token_count: int = 0
    token_ids_bytes: int = 0
    #: Layers of `payload_bytes / layer_count` bytes each; 0: the payload has no layer table.
    layer_count: int = 0


#: `Content._make` in a third of its time, for every block.
content_of: Final = cast("Callable[[Iterable[int]], Content]", partial(tuple.__new__, Content))


#: A field of several contents: of each one, or one number for all.
Column: TypeAlias = "Sequence[int] | int"


def contents_of(count: int, *columns: Column) -> Iterable[Content]:
    """The contents of which these are the fields. If they are alike, they are one object."""
    fields: list[int] = []
    for column in columns:
        if isinstance(column, int):
            fields.append(column)
        elif count and column.count(column[0]) == count:
            fields.append(column[0])
        else:
            all_columns = [
                repeat(column, count) if isinstance(column, int) else column for column in columns
            ]
            return map(content_of, zip(*all_columns, strict=True))
    return repeat(content_of(fields), count)


def columns_of(contents: Sequence[Content]) -> Iterable[Sequence[int]]:
    """The fields of contents, at least one, each as a column."""
    first, count = contents[0], len(contents)
    if contents.count(first) == count:
        return [(field,) * count for field in first]
    return zip(*contents, strict=True)


class HasContent:
    """Has the fields of its `content` as attributes, too."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def content(self) -> Content: ...

    @property
    def payload_bytes(self) -> int:
        return self.content.payload_bytes

    @property
    def token_count(self) -> int:
        """0: it was saved without a count."""
        return self.content.token_count

    @property
    def token_ids_bytes(self) -> int:
        return self.content.token_ids_bytes

    @property
    def layer_count(self) -> int:
        """Layers of `payload_bytes / layer_count` bytes each; 0: no layers."""
        return self.content.layer_count


#: `Content(...)`, the same object for alike entries of different saves: few differ.
shared: Final = lru_cache(maxsize=4096)(Content)


def check_content(
    payload_bytes: int, _token_count: int, token_ids_bytes: int, layer_count: int
) -> None:
    """Check the fields of a content. Raises InvalidSize for what no entry can be."""
    if not token_ids_bytes and not layer_count and 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
        return  # nearly every one, and recovery checks as many as there are
    check_layout(payload_bytes, layer_count)
    check_token_ids(token_ids_bytes)


#: A content as shared engines and exported streams have it, little-endian: layers u32, payload
#: bytes u64, tokens u32. They say by themselves what token ids there are.
_PACKED: Final = struct.Struct("<IQI")
PACKED_BYTES: Final = _PACKED.size


def pack_content(content: Content) -> bytes:
    return _PACKED.pack(content.layer_count, content.payload_bytes, content.token_count)


def unpack_content(packed: bytes | bytearray, token_ids_bytes: int = 0) -> Content:
    """Raises InvalidSize."""
    layer_count, payload_bytes, token_count = _PACKED.unpack(packed)
    content = Content(payload_bytes, token_count, token_ids_bytes, layer_count)
    check_content(*content)
    return content


@dataclass(slots=True, unsafe_hash=True)
class EntryRecord(HasContent):
    """An entry as it is stored. Immutable but for the checksum, which the writer sets when it seals
    the entry. (A frozen dataclass takes six times as long to create, for every block.)

    `location` holds the payload, from the first byte of the first extent on, followed by the token
    ids with their checksum (`content_bytes`). This is the same in every tier.
    """

    key: Key
    tier: Tier
    reason: SaveReason
    #: Unique and increasing: two saves of one key differ in it.
    generation: int
    #: Wall-clock ns since 1970.
    created_ns: int
    content: Content
    location: Location
    #: Of the payload as it was stored; 0 until the writer seals the entry.
    payload_crc32c: int = 0


class EntryRef(Protocol):
    """The fields that a store needs of an entry that it holds, such as an `EntryRecord`."""

    @property
    def key(self) -> Key: ...
    @property
    def generation(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def token_ids_bytes(self) -> int: ...
    @property
    def location(self) -> Location: ...


class Listed(EntryRef, Protocol):
    """The fields of an entry in a row of the index."""

    @property
    def content(self) -> Content: ...
    @property
    def payload_crc32c(self) -> int: ...
    @property
    def tier(self) -> int: ...
    @property
    def reason(self) -> int: ...


class Recorded(Listed, Protocol):
    """The fields of an entry in a record, such as an `EntryRecord`."""

    payload_crc32c: int

    @property
    def created_ns(self) -> int: ...


#: The checksum after the token ids of an entry. An entry without token ids has none.
TOKEN_IDS_CRC_BYTES: Final = 4


def content_bytes(payload_bytes: int, token_ids_bytes: int) -> int:
    """The bytes of an entry in its extents: the payload, then the token ids and their CRC32C."""
    if not token_ids_bytes:
        return payload_bytes
    return payload_bytes + token_ids_bytes + TOKEN_IDS_CRC_BYTES
