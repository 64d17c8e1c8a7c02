"""The disk tier: an LMDB environment (tables in `proto.disk`) that survives power loss.

`apply` is one write transaction for everything it is given, payloads and metadata together,
and returns after the fsync. Erased pages are reused from the second transaction after on, and
not while a reader of an older state is there: this and the fragmentation of mixed sizes (1.24 x
the live bytes, measured) is why the map is larger than the budget.

One process may have the environment open for writing, and only once: py-lmdb refuses a second
open within a process, the daemon's lock file keeps another daemon out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Final

import lmdb

from ..proto.copying import copy, copy_crc32c, unset_bytearray
from ..proto.disk import (
    CHUNK_BYTES,
    CHUNK_KEY_BYTES,
    CHUNKS,
    HEADS,
    TABLES,
    USAGE,
    USAGE_BYTES,
    chunk_count,
    chunk_key,
    chunk_length,
    chunk_ranges,
    decode_usage,
    encode_usage,
)
from ..proto.errors import RecordError
from ..proto.keys import Key
from ..proto.limits import KEY_BYTES
from ..proto.record import (
    TRAILER_BYTES,
    RecordHead,
    crc32c,
    decode_head,
    decode_trailer,
    encode_head,
    encode_trailer,
    head_bytes_for,
)
from ..proto.vocabulary import Tier
from .lmdb_errors import lmdb_errors
from .store import (
    Buffer,
    EntryWriter,
    Location,
    Recovery,
    Store,
    StoredEntry,
    StoreError,
    Usage,
)

MAX_READERS: Final = 1024
#: Beyond the budget, whatever its size: room for batches that replace others.
_MAP_SLACK_BYTES: Final = 64 * 2**20
#: LMDB's own numbers: before a page's content, and before a row in it.
_PAGE_HEADER_BYTES: Final = 16
_ROW_HEADER_BYTES: Final = 8


def default_map_bytes(budget_bytes: int) -> int:
    """How large the file may become: half as much again as the budget, and some slack.

    It is address space, not disk, until fragmentation needs it; a reader that stays forever
    can't grow the file beyond it. It only changes with the budget, at a restart: LMDB can't
    change it while anybody reads.
    """
    map_bytes = budget_bytes + budget_bytes // 2 + _MAP_SLACK_BYTES
    return -(-map_bytes // _MAP_SLACK_BYTES) * _MAP_SLACK_BYTES


class DiskWriter(EntryWriter):
    """Collects a payload in chunks of its own memory.

    A copy, although LMDB copies once more: the checksum has to be that of the bytes that are
    stored, and a client may still write to what it handed over.
    """

    def __init__(self, head: RecordHead) -> None:
        self.head = head
        self.location = ()
        self.chunks: list[bytearray] = []
        self.crc = 0
        self.sealed = False
        self._written_bytes = 0

    @property
    def written_bytes(self) -> int:
        return self._written_bytes

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if self._written_bytes + len(view) > self.head.payload_bytes:
            raise ValueError(
                f"{self._written_bytes + len(view)} bytes for a payload of "
                f"{self.head.payload_bytes}"
            )
        for index, part in chunk_ranges(self._written_bytes, len(view)):
            if index == len(self.chunks):
                length_bytes = chunk_length(self.head.payload_bytes, index)
                self.chunks.append(unset_bytearray(length_bytes))
            room = memoryview(self.chunks[index])[part]
            self.crc = copy_crc32c(room, view[: len(room)], self.crc)
            view = view[len(room) :]
            self._written_bytes += len(room)

    def seal(self) -> int:
        if self._written_bytes != self.head.payload_bytes:
            raise ValueError(f"{self._written_bytes} bytes of {self.head.payload_bytes}")
        self.sealed = True
        return self.crc


class DiskStore(Store):
    """The environment in `directory`, which is made if it is not there.

    `verify_payloads`: `recover` reads every payload and compares its checksum. `mode` is that of
    the data file; readers also need to write to the lock file, where LMDB keeps its table of
    readers. Raises StoreError if it can't be opened.
    """

    tier: ClassVar[Tier] = Tier.DISK
    blocking: ClassVar[bool] = True

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        *,
        map_bytes: int = 0,
        sync: bool = True,
        verify_payloads: bool = False,
        mode: int = 0o640,
    ) -> None:
        self.directory: Final = directory
        self.verify_payloads: Final = verify_payloads
        with self._errors("open"):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._env = lmdb.open(
                str(directory),
                map_size=map_bytes or default_map_bytes(budget_bytes),
                # A directory of its own, so that its permissions guard data and lock file.
                subdir=True,
                # Both: a commit that was acknowledged survives power loss. Without metasync
                # the last one may not.
                sync=sync,
                metasync=sync,
                # Through a writable map a full disk is a SIGBUS, and a stray write of this
                # process is in the file. With write() it is an error of one transaction.
                writemap=False,
                # Without it a cold 5 MiB entry is read page by page: 0.05 GB/s, not 1.5.
                readahead=True,
                # Zeroes what is left of the last page of a run: no stray memory in the file.
                meminit=True,
                # Readers of other processes announce themselves in the lock file, so that
                # their pages are not reused.
                lock=True,
                # One for each read transaction at a time, in this process and all clients.
                max_readers=MAX_READERS,
                max_dbs=TABLES,
                mode=mode,
            )
            self._heads = self._env.open_db(HEADS)
            self._chunks = self._env.open_db(CHUNKS)
            self._usage = self._env.open_db(USAGE)
            (directory / "lock.mdb").chmod(mode | (mode & 0o040) >> 1 | 0o600)
            # Slots of clients that were killed would keep old pages from being reused.
            self._env.reader_check()
        self._page_bytes: Final[int] = self._env.stat()["psize"]
        # What is longer than this with its key gets pages of its own: two rows fit in a page.
        self._max_row_bytes: Final = (self._page_bytes - _PAGE_HEADER_BYTES) // 2 // 2 * 2 - 2

    # ---- budget

    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        """The pages of its chunks, and twice the size of the rows that share pages with
        others: pages of a B-tree are at least half full."""
        chunks = chunk_count(payload_bytes)
        last_bytes = chunk_length(payload_bytes, chunks - 1)
        return (
            self._row_bytes(KEY_BYTES, head_bytes_for(token_ids_bytes) + TRAILER_BYTES)
            + self._row_bytes(CHUNK_KEY_BYTES, CHUNK_BYTES) * (chunks - 1)
            + self._row_bytes(CHUNK_KEY_BYTES, last_bytes)
            + self._row_bytes(KEY_BYTES, USAGE_BYTES)
        )

    def _row_bytes(self, key_bytes: int, value_bytes: int) -> int:
        pages = self._own_pages(key_bytes, value_bytes)
        shared_bytes = _ROW_HEADER_BYTES + key_bytes + (8 if pages else value_bytes)
        return pages * self._page_bytes + 2 * (shared_bytes + 2)

    def _own_pages(self, key_bytes: int, value_bytes: int) -> int:
        """Pages that a value has for itself; 0: it lies in the page of its key."""
        if _ROW_HEADER_BYTES + key_bytes + value_bytes <= self._max_row_bytes:
            return 0
        return -(-(_PAGE_HEADER_BYTES + value_bytes) // self._page_bytes)

    # ---- writing

    def writer(self, head: RecordHead, location: Location) -> EntryWriter:
        if location:
            raise ValueError("the disk tier is addressed by key")
        return DiskWriter(head)

    def apply(self, sealed: Sequence[EntryWriter], erased: Iterable[Key]) -> None:
        writers: list[DiskWriter] = []
        for writer in sealed:
            if not isinstance(writer, DiskWriter) or not writer.sealed:
                raise ValueError("only sealed writers of this store can be applied")
            writers.append(writer)
        needed_bytes = sum(writer.head.payload_bytes for writer in writers)
        with self._errors("write to", needed_bytes):
            # Readers that were killed since; 1 us when there is none.
            self._env.reader_check()
            with self._env.begin(write=True) as txn:
                for key in erased:
                    self._erase(txn, key)
                for writer in writers:
                    self._erase(txn, writer.head.key)
                    self._insert(txn, writer)
        for writer in writers:
            writer.chunks = []

    def _insert(self, txn: lmdb.Transaction, writer: DiskWriter) -> None:
        head = writer.head
        txn.put(head.key, encode_head(head) + encode_trailer(writer.crc), db=self._heads)
        for index, chunk in enumerate(writer.chunks):
            txn.put(chunk_key(head.key, index), chunk, db=self._chunks)

    def _erase(self, txn: lmdb.Transaction, key: Key) -> None:
        if not txn.delete(key, db=self._heads):
            return
        txn.delete(key, db=self._usage)
        self._erase_chunks(txn, key)

    def _erase_chunks(self, txn: lmdb.Transaction, key: Key) -> None:
        with txn.cursor(db=self._chunks) as cursor:
            found = cursor.set_range(key)
            while found and bytes(cursor.key())[:KEY_BYTES] == key:
                cursor.delete()
                # The cursor now is at the row behind, or at the end with an empty key.
                found = bool(cursor.key())

    # ---- reading

    def read(
        self,
        head: RecordHead,
        location: Location,  # noqa: ARG002  # addressed by key
        offset_bytes: int,
        length_bytes: int,
    ) -> list[memoryview]:
        if offset_bytes < 0 or offset_bytes + length_bytes > head.payload_bytes:
            raise StoreError(f"a payload of {head.payload_bytes} bytes does not reach so far")
        views: list[memoryview] = []
        with self._errors("read from"), self._env.begin(db=self._chunks, buffers=True) as txn:
            for index, part in chunk_ranges(offset_bytes, length_bytes):
                chunk = txn.get(chunk_key(head.key, index))
                expected_bytes = chunk_length(head.payload_bytes, index)
                if chunk is None or len(chunk) != expected_bytes:
                    found = "missing" if chunk is None else f"{len(chunk)} bytes"
                    raise StoreError(
                        f"chunk {index} of {head.key.hex()} is {found}, "
                        f"it should have {expected_bytes} bytes"
                    )
                own = memoryview(unset_bytearray(part.stop - part.start))
                copy(own, chunk[part])
                views.append(own.toreadonly())
        return views

    def token_ids(
        self,
        head: RecordHead,
        location: Location,  # noqa: ARG002  # addressed by key
        token_ids_bytes: int,
    ) -> bytes:
        with self._errors("read from"), self._env.begin(db=self._heads, buffers=True) as txn:
            row = txn.get(head.key)
            if row is None:
                raise StoreError(f"the head of {head.key.hex()} is missing")
            token_ids = self._decode(head.key, row)[0].token_ids
        if len(token_ids) != token_ids_bytes:
            raise StoreError(f"{len(token_ids)} bytes of token ids, not {token_ids_bytes}")
        return token_ids

    def held_keys(self) -> set[Key] | None:
        with self._errors("read from"), self._env.begin(db=self._heads) as txn:
            return {Key(key) for key in txn.cursor().iternext(keys=True, values=False)}

    # ---- recovery

    def recover(
        self,
        directory: Mapping[Key, Location],  # noqa: ARG002  # keeps its own
    ) -> Recovery:
        """Every entry whose head is whole and whose chunks are all there; the rest is erased.

        Least recently used first. Rows are written in one transaction with their head, so it is
        enough to compare the number of chunks and of their pages with what the heads say: it
        takes no page of payload from the disk. Only if they differ, or with
        `verify_payloads`, each chunk is looked at; the latter also compares the checksums.
        """
        entries: list[StoredEntry] = []
        dropped: list[tuple[Key, str]] = []
        with self._errors("recover"), self._env.begin(buffers=True) as txn:
            rows = pages = 0
            for key_view, row in txn.cursor(db=self._heads):
                key = Key(bytes(key_view))
                try:
                    head, crc = self._decode(key, row)
                except StoreError as problem:
                    dropped.append((key, str(problem)))
                    continue
                entries.append(self._stored_entry(txn, head, crc))
                chunks = chunk_count(head.payload_bytes)
                last_bytes = chunk_length(head.payload_bytes, chunks - 1)
                rows += chunks
                pages += (chunks - 1) * self._own_pages(CHUNK_KEY_BYTES, CHUNK_BYTES)
                pages += self._own_pages(CHUNK_KEY_BYTES, last_bytes)
            found = txn.stat(self._chunks)
            whole = not dropped and found["entries"] == rows and found["overflow_pages"] == pages
            if self.verify_payloads or not whole:
                damages = [self._damage(txn, entry) for entry in entries]
                checked = list(zip(entries, damages, strict=True))
                entries = [entry for entry, damage in checked if not damage]
                dropped += [(entry.head.key, damage) for entry, damage in checked if damage]
        if not whole or dropped:
            self._erase_strangers({entry.head.key for entry in entries})
        entries.sort(key=lambda entry: (entry.last_used_ns, entry.head.created_ns))
        return Recovery(entries=entries, dropped=dropped)

    def _damage(self, txn: lmdb.Transaction[memoryview], entry: StoredEntry) -> str:
        """What is wrong with an entry's chunks; nothing: an empty string."""
        head, crc = entry.head, 0
        for index in range(chunk_count(head.payload_bytes)):
            chunk = txn.get(chunk_key(head.key, index), db=self._chunks)
            if chunk is None:
                return f"chunk {index} is missing"
            if len(chunk) != chunk_length(head.payload_bytes, index):
                return f"chunk {index} has {len(chunk)} bytes"
            if self.verify_payloads:
                crc = crc32c(chunk, crc)
        if self.verify_payloads and crc != entry.payload_crc32c:
            return "the payload does not match its checksum"
        return ""

    def _stored_entry(
        self, txn: lmdb.Transaction[memoryview], head: RecordHead, crc: int
    ) -> StoredEntry:
        last_used_ns, hits = head.created_ns, 0
        row = txn.get(head.key, db=self._usage)
        if row is not None and len(row) == USAGE_BYTES:
            last_used_ns, hits = decode_usage(row)
        return StoredEntry(
            head=head, location=(), payload_crc32c=crc, last_used_ns=last_used_ns, hits=hits
        )

    def _erase_strangers(self, kept: set[Key]) -> None:
        """Erase every row whose key is not among `kept`, in whatever table."""
        with self._errors("recover"), self._env.begin(write=True) as txn:
            for table in (self._heads, self._usage, self._chunks):
                cursor = txn.cursor(db=table)
                found = cursor.first()
                while found:
                    if Key(bytes(cursor.key())[:KEY_BYTES]) in kept:
                        found = cursor.next()
                    else:
                        cursor.delete()
                        found = bool(cursor.key())

    def _decode(self, key: Key, row: memoryview) -> tuple[RecordHead, int]:
        """The head and the payload's CRC32C of a row of `heads`; raises StoreError."""
        try:
            head, payload_offset = decode_head(row)
            crc = decode_trailer(row[payload_offset:])
        except RecordError as problem:
            raise StoreError(str(problem)) from None
        if head.key != key:
            raise StoreError(f"the head is that of {head.key.hex()}")
        return head, crc

    # ---- the rest

    def record_usage(self, usages: Sequence[Usage]) -> None:
        with self._errors("write to"), self._env.begin(write=True) as txn:
            heads = txn.cursor(db=self._heads)
            for usage in usages:
                # What was erased meanwhile must not leave a row behind.
                if heads.set_key(usage.key):
                    row = encode_usage(usage.last_used_ns, usage.hits)
                    txn.put(usage.key, row, db=self._usage)

    def close(self) -> None:
        self._env.close()

    def _errors(self, what: str, needed_bytes: int = 0) -> AbstractContextManager[None]:
        return lmdb_errors(what, self.directory, needed_bytes)
