"""The fields of an entry, written down once: for stores, records, the index and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from .keys import Key
from .vocabulary import SaveReason, Tier

#: Where an entry lies in an arena: offset, length, offset, length ... in bytes. Lengths are
#: multiples of the slab.
Location: TypeAlias = tuple[int, ...]


@dataclass(slots=True, unsafe_hash=True)
class EntryRecord:
    """An entry as it is stored. A value: nothing of it changes but for the checksum, which the
    writer sets that seals it. (Frozen ones take six times as long to make, for every block.)

    At `location` lies the payload, from the first byte of the first extent on, and behind it
    the token ids with their checksum (`content_bytes`), in every tier.
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
    #: Of the payload as it was stored. Until a writer sealed the entry it is not known, and 0.
    payload_crc32c: int = 0


class EntryRef(Protocol):
    """What a store has to know of an entry that it holds: `EntryRecord`, or anything like it."""

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
    """What a row of the index says of an entry."""

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
    """What a record says of an entry: `EntryRecord`, or anything like it."""

    payload_crc32c: int

    @property
    def created_ns(self) -> int: ...


#: The checksum behind the token ids of an entry; an entry without token ids has none.
TOKEN_IDS_CRC_BYTES: Final = 4


def content_bytes(payload_bytes: int, token_ids_bytes: int) -> int:
    """Bytes of an entry in its extents: the payload, then the token ids and their CRC32C."""
    if not token_ids_bytes:
        return payload_bytes
    return payload_bytes + token_ids_bytes + TOKEN_IDS_CRC_BYTES
