"""The fields of an entry, as stores, records and the index know it.

CONTRIBUTING.md says where else a new field goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from .keys import Key
from .vocabulary import SaveReason, Tier

#: The extents of an entry in an arena: offset, length, offset, length ... in bytes. Lengths are
#: multiples of the slab size.
Location: TypeAlias = tuple[int, ...]


@dataclass(slots=True, unsafe_hash=True)
class EntryRecord:
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
    payload_bytes: int
    token_count: int
    #: 0: the payload has no layer table.
    layer_count: int
    token_ids_bytes: int
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
    def token_count(self) -> int: ...
    @property
    def payload_crc32c(self) -> int: ...
    @property
    def layer_count(self) -> int: ...
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
