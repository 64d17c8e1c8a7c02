"""A stream of entries, as `prefixctl export` writes and `import` reads it: a file, or a pipe.

It begins with `MAGIC`. Behind that comes a record for each entry, and one that ends the stream and
says how many there were, so that a stream that was cut off is known as such. A record is a header,
the payload, and the token ids. Integers are little-endian.

| offset | bytes | what |
|---:|---:|---|
| 0 | 4 | `pxe1`, or `pxe.` for the last one |
| 4 | 4 | layers; 0: no layer table |
| 8 | 8 | payload bytes; of the last one: how many records there were |
| 16 | 8 | tokens; 0: not known. Of the last one: payload bytes of all records |
| 24 | 4 | bytes of token ids |
| 28 | 4 | save reason |
| 32 | 4 | CRC32C of the payload, as it was when the entry was saved |
| 36 | 4 | CRC32C of the token ids |
| 40 | 32 | key; zeros in the last one |
| 72 | 4 | CRC32C of the 72 bytes before |

Nothing of it is trusted: what does not add up is refused with the number of the record and where it
begins, before anything of that record is used. A key can't be proved by a payload, though: whoever
wrote the stream could put any state under any key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from ...proto.keys import Key
from ...proto.limits import MAX_LAYERS, MAX_PAYLOAD_BYTES, MAX_TOKEN_IDS_BYTES
from ...proto.payload import crc32c
from ...proto.vocabulary import SaveReason

MAGIC: Final = b"prefixd entries 1\n"
_ENTRY: Final = b"pxe1"
_END: Final = b"pxe."
_FIELDS: Final = struct.Struct("<4sIQQIIII32s")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
#: What a header announces is believed only as far as it comes.
_PIECE_BYTES: Final = 16 * 2**20
_MAX_TOKENS: Final = 2**32 - 1


class BrokenStream(ValueError):
    """What is read is not what was written. `good_bytes`: up to where it was."""

    def __init__(self, message: str, good_bytes: int) -> None:
        super().__init__(message)
        self.good_bytes: Final = good_bytes


@dataclass(frozen=True, slots=True)
class Exported:
    """One entry, whole and checked."""

    key: Key
    reason: SaveReason
    token_count: int
    layer_count: int
    payload: bytes | bytearray
    payload_crc32c: int
    token_ids: bytes


class StreamWriter:
    """Appends records to a stream. The file is the caller's."""

    def __init__(self, file: BinaryIO, entries: int = 0, payload_bytes: int = 0) -> None:
        """`entries` and `payload_bytes`: of the records before; without any it begins."""
        self._file = file
        self.entries = entries
        self.payload_bytes = payload_bytes

    def begin(self) -> None:
        self._file.write(MAGIC)

    def put(self, entry: Exported) -> None:
        """Raises OSError."""
        self._header(
            _ENTRY,
            entry.layer_count,
            len(entry.payload),
            entry.token_count,
            len(entry.token_ids),
            entry.reason,
            entry.payload_crc32c,
            crc32c(entry.token_ids),
            entry.key,
        )
        self._file.write(entry.payload)
        self._file.write(entry.token_ids)
        self.entries += 1
        self.payload_bytes += len(entry.payload)

    def end(self) -> None:
        self._header(_END, 0, self.entries, self.payload_bytes, 0, 0, 0, 0, bytes(32))

    def _header(self, *fields: object) -> None:
        packed = _FIELDS.pack(*fields)
        self._file.write(packed + _CHECK.pack(crc32c(packed)))


class StreamReader:
    """The entries of a stream, each after it was checked. The file is the caller's."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        #: of the records that were whole, and where the next one begins
        self.entries = 0
        self.payload_bytes = 0
        self.good_bytes = 0

    def __iter__(self) -> Iterator[Exported]:
        """Ends with the stream. Raises BrokenStream, OSError."""
        if self._file.read(len(MAGIC)) != MAGIC:
            raise BrokenStream("this is no stream of entries, or one of another version", 0)
        self.good_bytes = len(MAGIC)
        while (entry := self._next()) is not None:
            yield entry

    def _next(self) -> Exported | None:
        header = self._take(HEADER_BYTES, "its header")
        fields = header[: _FIELDS.size]
        if _CHECK.unpack(header[_FIELDS.size :])[0] != crc32c(fields):
            raise self._broken("its header does not match its checksum")
        magic, layers, size_bytes, tokens, ids_bytes, reason, crc, ids_crc, key = _FIELDS.unpack(
            fields
        )
        if magic == _END:
            if (size_bytes, tokens) != (self.entries, self.payload_bytes):
                raise self._broken(f"the stream ends with {size_bytes} records, and has others")
            if self._file.read(1):
                raise self._broken("something follows the end of the stream")
            return None
        if magic != _ENTRY:
            raise self._broken("it is of no known kind")
        if (
            not 0 < size_bytes <= MAX_PAYLOAD_BYTES
            or not ids_bytes <= MAX_TOKEN_IDS_BYTES
            or ids_bytes % 4
            or tokens > _MAX_TOKENS
            or layers > MAX_LAYERS
            or (layers and size_bytes % layers)
            or reason not in SaveReason.__members__.values()
        ):
            raise self._broken("it says what no entry can be")
        payload = self._take(size_bytes, "its payload")
        if crc32c(payload) != crc:
            raise self._broken("its payload does not match its checksum")
        token_ids = bytes(self._take(ids_bytes, "its token ids"))
        if crc32c(token_ids) != ids_crc:
            raise self._broken("its token ids do not match their checksum")
        self.entries += 1
        self.payload_bytes += size_bytes
        self.good_bytes += HEADER_BYTES + size_bytes + ids_bytes
        return Exported(Key(key), SaveReason(reason), tokens, layers, payload, crc, token_ids)

    def _take(self, length_bytes: int, what: str) -> bytearray:
        taken = bytearray()
        while len(taken) < length_bytes:
            piece = self._file.read(min(_PIECE_BYTES, length_bytes - len(taken)))
            if not piece:
                raise self._broken(f"the stream ends within {what}")
            taken += piece
        return taken

    def _broken(self, why: str) -> BrokenStream:
        where = f"record {self.entries + 1}, at byte {self.good_bytes:,}"
        return BrokenStream(f"{where}: {why}", self.good_bytes)
