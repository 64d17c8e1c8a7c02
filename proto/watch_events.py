"""Encodes the events of a Watch: each once, however many clients watch.

A body is a `WatchEvent` in protobuf's encoding. Its fields always have this order:

| offset | bytes | |
|---|---|---|
| 0 | 2 | tag and `kind` |
| 2 | 2 | tag and `tier` |
| 4 | 34 | tag, length and `key` |
| 38 | 9 | tag and `sequence` |
| 47 | 9 | tag and `generation` |
| 56 | 9 | if published: tag and `payload_bytes` |
| 65 | 5 | if published: tag and `token_count` |
| 70 | 2 | if published: tag and `reason` |
| 72 | | if published: `parent` if it is known, and `namespace` |

Message objects would take four times as long, in the daemon's event loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from struct import Struct
from typing import Final

from .keys import Key
from .namespaces import TAG_BYTES
from .vocabulary import SaveReason, Tier

PUBLISHED: Final = 1
EVICTED: Final = 2
_PUBLISHED: Final = Struct("<BBBBH32sBQBQBQBIBB").pack
_EVICTED: Final = Struct("<BBBBH32sBQBQ").pack
_U64: Final = Struct("<Q")
_KEY: Final = slice(6, 38)
_TAG: Final = slice(38 - TAG_BYTES, 38)
_GENERATION_AT: Final = 48
#: Tag and length of fields of 32 bytes: field 3, and field 9.
_KEY_TAG: Final = 0x1A | 32 << 8
_PARENT_TAG: Final = b"\x4a\x20"
_NO_PARENT: Final = b"\x4a\x00"
_NAMESPACE_TAG: Final = b"\x52"
_TOKEN_IDS_TAG: Final = b"\x5a"
#: The three fields of a WatchResponse.
_INCARNATION_TAG: Final = b"\x0a"
_EVENT_TAG: Final = b"\x12"
_SEQUENCE_TAG: Final = b"\x19"


def published(
    tier: Tier,
    key: Key,
    sequence: int,
    generation: int,
    payload_bytes: int,
    token_count: int,
    reason: SaveReason,
    parent: bytes | None,
    namespace: str,
) -> bytes:
    """The body of an event: a key was published. `parent`: as in `effects.IndexPut`."""
    body = _PUBLISHED(
        0x08, PUBLISHED, 0x10, tier, _KEY_TAG, key, 0x21, sequence, 0x29, generation,
        0x31, payload_bytes, 0x3D, token_count, 0x40, reason,
    )  # fmt: skip
    if parent:
        body += _PARENT_TAG + parent
    elif parent is not None:
        body += _NO_PARENT
    return body + _namespace(namespace) if namespace else body


def evicted(tier: Tier, key: Key, sequence: int, generation: int) -> bytes:
    """The body of an event: a key is no longer published."""
    return _EVICTED(
        0x08, EVICTED, 0x10, tier, _KEY_TAG, key, 0x21, sequence, 0x29, generation
    )  # fmt: skip


def is_published(body: bytes) -> bool:
    return body[1] == PUBLISHED


def tier_number(body: bytes) -> int:
    """The number of an event's tier. To make a `Tier` of it would double the time of the event."""
    return body[3]


def key_of(body: bytes) -> Key:
    return Key(body[_KEY])


def tag_of(body: bytes) -> bytes:
    """The tag of the key's namespace (`namespaces.tag_of`), if it belongs to one."""
    return body[_TAG]


def generation_of(body: bytes) -> int:
    generation: int = _U64.unpack_from(body, _GENERATION_AT)[0]
    return generation


def with_token_ids(body: bytes, token_ids: bytes) -> bytes:
    """An encoded event with the token ids of its entry added."""
    return b"".join((body, _TOKEN_IDS_TAG, _varint(len(token_ids)), token_ids))


def response(incarnation: bytes, bodies: Iterable[bytes], sequence: int) -> bytes:
    """A `WatchResponse`, encoded."""
    parts = [_INCARNATION_TAG, _varint(len(incarnation)), incarnation]
    for body in bodies:
        parts += (_EVENT_TAG, _varint(len(body)), body)
    parts += (_SEQUENCE_TAG, _U64.pack(sequence))
    return b"".join(parts)


@functools.lru_cache(maxsize=128)
def _namespace(label: str) -> bytes:
    encoded = label.encode()
    return _NAMESPACE_TAG + _varint(len(encoded)) + encoded


def _varint(number: int) -> bytes:
    if number < 0x4000:
        return _SHORT[number] if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80,)) + _varint(number >> 7)


_SHORT: Final = [bytes((number,)) for number in range(0x80)]
