"""The stored form of an entry on shm and disk: header, metadata, padding, payload, trailer.

Offsets are from the start of the record, integers are little-endian. "before": may be used
before the header's checksum has matched, and only as it says here.

    offset  bytes  type  meaning                                        before
    ------  -----  ----  ---------------------------------------------  --------------------------
         0      4  raw   magic, "PFXD"                                  yes, refused unless equal
         4      2  u16   format version, 1                              yes, refused unless equal
         6      2  u16   flags, 0; a reader refuses those it lacks      no
         8      4  u32   M, bytes of metadata                           to bound the checksum: at
                                                                        most MAX_METADATA_BYTES
                                                                        and what the buffer holds
        12      4  u32   token count of the state                       no
        16      8  u64   P, bytes of payload                            no
        24      8  u64   generation                                     no
        32      8  i64   created, wall-clock ns since 1970              no
        40      1  u8    save reason (SaveReason of prefixd.proto)      no
        41      1  u8    tier (Tier of prefixd.proto)                   no
        42      2  u16   layer count; 0: no layer table                 no
        44      4  u32   CRC32C of bytes 0..43, then of the metadata    it is the check
        48      M  map   metadata, msgpack                              no
      48+M  < 64   raw   zeros, until the payload is 64-byte aligned    no, refused unless zero
    offset      P  raw   payload                                        never: see the trailer
  offset+P      4  u32   CRC32C of the payload                          it is the payload's check

Metadata: `key` (32 bytes) and, if the writer gave them, `token_ids` (u32 little-endian; a
padded block with its -1), from which `layout.verify_token_ids` recomputes the key. A reader ignores
names that it does not know, so that later versions can add some; what a reader has to know in
order to read a record right gets a flag.

With a layer count L, L divides P and layer i is the i-th of L equal regions of the payload.

`encode_head` and `decode_head` handle everything before the payload. The head is checked
whole: no bit of it can flip unnoticed. The payload is checked by whoever moves it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgpack

from .errors import InvalidSize, RecordError
from .keys import TOKEN_BYTES, Key, check_key
from .layout import check_layout, check_token_ids
from .layout import crc32c as crc32c
from .limits import KEY_BYTES, MAX_TOKEN_IDS_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC: Final = b"PFXD"
VERSION: Final = 1
HEADER_BYTES: Final = 48
TRAILER_BYTES: Final = 4
ALIGNMENT_BYTES: Final = 64
#: Token ids and as much again as names of later versions may need.
MAX_METADATA_BYTES: Final = MAX_TOKEN_IDS_BYTES + 4096

_FIELDS: Final = struct.Struct("<4sHHIIQQqBBH")
_CRC: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a record says of its payload. `reason` and `tier` are numbers of prefixd.proto."""

    key: Key
    generation: int
    payload_bytes: int
    token_count: int
    layer_count: int
    reason: int
    tier: int
    created_ns: int
    token_ids: bytes = b""


def encode_head(head: RecordHead) -> bytes:
    """Header, metadata and padding; its length is `head_bytes_for(len(head.token_ids))`, and
    the offset of the payload.

    Raises `InvalidKey` or `InvalidSize` for what a record can't say.
    """
    check_key(head.key)
    check_layout(head.payload_bytes, head.layer_count)
    check_token_ids(len(head.token_ids))
    metadata: dict[str, bytes] = {"key": head.key}
    if head.token_ids:
        metadata["token_ids"] = head.token_ids
    packed: bytes = msgpack.packb(metadata, use_bin_type=True)
    try:
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            0,
            len(packed),
            head.token_count,
            head.payload_bytes,
            head.generation,
            head.created_ns,
            head.reason,
            head.tier,
            head.layer_count,
        )
    except struct.error as problem:
        raise InvalidSize(f"a number does not fit into a record: {problem}") from None
    check = _CRC.pack(crc32c(packed, crc32c(fields)))
    return (fields + check + packed).ljust(head_bytes_for(len(head.token_ids)), b"\0")


def decode_head(buffer: Buffer) -> tuple[RecordHead, int]:
    """The head of the record that `buffer` begins with, and the offset of its payload.

    `buffer` may hold more than the head. Copies the token ids, nothing else. Raises
    `RecordError` for anything but a whole, undamaged head.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < HEADER_BYTES:
        raise RecordError(f"a record begins with {HEADER_BYTES} bytes, here are {len(view)}")
    (
        magic,
        version,
        flags,
        metadata_bytes,
        token_count,
        payload_bytes,
        generation,
        created_ns,
        reason,
        tier,
        layer_count,
    ) = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        raise RecordError(f"a record begins with {MAGIC!r}, not with {magic!r}")
    if version != VERSION:
        raise RecordError(f"the record has format {version}, this version reads {VERSION}")
    if metadata_bytes > MAX_METADATA_BYTES:
        raise RecordError(f"no record has {metadata_bytes} bytes of metadata")
    payload_offset = _payload_offset(metadata_bytes)
    if payload_offset > len(view):
        raise RecordError(f"the head is cut off: {len(view)} bytes of {payload_offset}")
    packed = view[HEADER_BYTES : HEADER_BYTES + metadata_bytes]
    (stored_crc,) = _CRC.unpack_from(view, _FIELDS.size)
    if crc32c(packed, crc32c(view[: _FIELDS.size])) != stored_crc:
        raise RecordError("the record's head does not match its checksum")
    padding = view[HEADER_BYTES + metadata_bytes : payload_offset]
    if padding != bytes(len(padding)):
        raise RecordError("the padding of the record is not zero")
    if flags:
        raise RecordError(f"the record has flags {flags:#06x} that this version does not know")
    key, token_ids = _decode_metadata(packed)
    try:
        check_layout(payload_bytes, layer_count)
    except InvalidSize as problem:
        raise RecordError(str(problem)) from None
    head = RecordHead(
        key=key,
        generation=generation,
        payload_bytes=payload_bytes,
        token_count=token_count,
        layer_count=layer_count,
        reason=reason,
        tier=tier,
        created_ns=created_ns,
        token_ids=token_ids,
    )
    return head, payload_offset


def _decode_metadata(packed: memoryview) -> tuple[Key, bytes]:
    try:
        metadata: Any = msgpack.unpackb(packed, raw=False)
    except ValueError as problem:  # what every error of msgpack is
        raise RecordError(f"the record's metadata is no msgpack: {problem}") from None
    if not isinstance(metadata, dict):
        raise RecordError("the record's metadata is no map")
    key, token_ids = metadata.get("key"), metadata.get("token_ids", b"")
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise RecordError(f"the record's key is not {KEY_BYTES} bytes")
    if not isinstance(token_ids, bytes) or len(token_ids) % TOKEN_BYTES:
        raise RecordError("the record's token ids are no 32-bit integers")
    return Key(key), token_ids


def head_bytes_for(token_ids_bytes: int) -> int:
    """Bytes before the payload of a record with so many bytes of token ids (0: none). Exact."""
    # {"key": 32 bytes} is 1 + 4 + 2 + 32; another name is 10 and the length of its value.
    metadata_bytes = 39
    if token_ids_bytes:
        length_bytes = 2 if token_ids_bytes < 2**8 else 3 if token_ids_bytes < 2**16 else 5
        metadata_bytes += 10 + length_bytes + token_ids_bytes
    return _payload_offset(metadata_bytes)


def record_bytes(head_bytes: int, payload_bytes: int) -> int:
    """Bytes of a whole record: what it takes from a tier's budget, before any allocation unit."""
    return head_bytes + payload_bytes + TRAILER_BYTES


def _payload_offset(metadata_bytes: int) -> int:
    return -(-(HEADER_BYTES + metadata_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ---- payload


def encode_trailer(payload_crc32c: int) -> bytes:
    """The 4 bytes behind the payload."""
    return _CRC.pack(payload_crc32c)


def decode_trailer(buffer: Buffer) -> int:
    """The payload's CRC32C, from exactly the bytes behind it. Raises `RecordError`."""
    view = memoryview(buffer)
    if view.nbytes != TRAILER_BYTES:
        raise RecordError(
            f"a record ends with {TRAILER_BYTES} bytes of CRC32C, here are {view.nbytes}"
        )
    crc: int = _CRC.unpack(view)[0]
    return crc
