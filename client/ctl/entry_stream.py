"""The format of the streams that `prefixctl export` writes and `import` reads.

A stream begins with `MAGIC`. A record for each entry follows, then an end record with the number of
entries, so that a stream that was cut off is recognized. A record is a header, the payload, and the
token ids. Integers are little-endian.

| offset | bytes | what |
|---:|---:|---|
| 0 | 4 | `pxe1`, or `pxe.` for the end record |
| 4 | 16 | the content (`proto.entry.pack_content`) |
| 20 | 4 | zeros |
| 24 | 4 | bytes of token ids |
| 28 | 4 | save reason |
| 32 | 4 | CRC32C of the payload when the entry was saved |
| 36 | 4 | CRC32C of the token ids |
| 40 | 32 | key |
| 72 | 4 | CRC32C of the 72 bytes before |

The end record has the number of entries at offset 8, 8 bytes, and the payload bytes of all entries
at 16, 8 bytes; the rest but its first and last 4 bytes are zeros.

Nothing in it is trusted. A record that fails a check is refused, with its number and position,
before any of it is used. But a payload does not prove its key: the writer of a stream can put any
state under any key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from ...proto.entry import PACKED_BYTES, Content, pack_content, unpack_content
from ...proto.errors import InvalidSize
from ...proto.keys import Key
from ...proto.payload import crc32c
from ...proto.vocabulary import SaveReason

MAGIC: Final = b"prefixd entries 1\n"
_ENTRY: Final = b"pxe1"
_END: Final = b"pxe."
_FIELDS: Final = struct.Struct(f"<4s{PACKED_BYTES}sIIIII32s")
_END_FIELDS: Final = struct.Struct("<4s4xQQ48x")
_CHECK: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECK.size
#: Payloads are read in pieces, so that a false length in a header allocates little.
_PIECE_BYTES: Final = 16 * 2**20


class BrokenStream(ValueError):
    """The stream is damaged, or is none. The first `good_bytes` are whole records."""

    def __init__(self, message: str, good_bytes: int) -> None:
        super().__init__(message)
        self.good_bytes: Final = good_bytes


@dataclass(frozen=True, slots=True)
class Exported:
    """One whole, verified entry."""

    key: Key
    reason: SaveReason
    content: Content
    payload: bytes | bytearray
    payload_crc32c: int
    token_ids: bytes


class StreamWriter:
    """Appends records to a stream. The caller opens and closes the file."""

    def __init__(self, file: BinaryIO, entries: int = 0, payload_bytes: int = 0) -> None:
        """`entries` and `payload_bytes` are those of the records that the stream has already."""
        self._file = file
        self.entries = entries
        self.payload_bytes = payload_bytes

    def begin(self) -> None:
        """Begin a new stream. Raises OSError."""
        self._file.write(MAGIC)

    def put(self, entry: Exported) -> None:
        """Append an entry. Raises OSError."""
        self._header(
            _FIELDS,
            _ENTRY,
            pack_content(entry.content),
            0,
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
        """Append the end record. Raises OSError."""
        self._header(_END_FIELDS, _END, self.entries, self.payload_bytes)

    def _header(self, form: struct.Struct, *fields: object) -> None:
        packed = form.pack(*fields)
        self._file.write(packed + _CHECK.pack(crc32c(packed)))


class StreamReader:
    """Iterates over the entries of a stream, and verifies each. The caller closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        #: Entries and payload bytes so far, and the position behind the last whole record.
        self.entries = 0
        self.payload_bytes = 0
        self.good_bytes = 0

    def __iter__(self) -> Iterator[Exported]:
        """Ends at the end record. Raises BrokenStream, OSError."""
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
        magic, packed, zeros, ids_bytes, reason, crc, ids_crc, key = _FIELDS.unpack(fields)
        if magic == _END:
            _, entries, payload_bytes = _END_FIELDS.unpack(fields)
            if (entries, payload_bytes) != (self.entries, self.payload_bytes):
                raise self._broken(f"the stream ends with {entries} records, and has others")
            if self._file.read(1):
                raise self._broken("something follows the end of the stream")
            return None
        if magic != _ENTRY:
            raise self._broken("it is of no known kind")
        try:
            content = unpack_content(packed, ids_bytes)
        except InvalidSize:
            content = None
        if content is None or zeros or reason not in SaveReason.__members__.values():
            raise self._broken("it says what no entry can be")
        payload = self._take(content.payload_bytes, "its payload")
        if crc32c(payload) != crc:
            raise self._broken("its payload does not match its checksum")
        token_ids = bytes(self._take(ids_bytes, "its token ids"))
        if crc32c(token_ids) != ids_crc:
            raise self._broken("its token ids do not match their checksum")
        self.entries += 1
        self.payload_bytes += len(payload)
        self.good_bytes += HEADER_BYTES + len(payload) + ids_bytes
        return Exported(Key(key), SaveReason(reason), content, payload, crc, token_ids)

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
