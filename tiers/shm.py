"""The shm tier: whole records in a file of /dev/shm, which survive a restart of the daemon.

    extents of an entry:  head (proto.record) | payload, 64-byte aligned | trailer | unused

Which entries there are is not written here but in the daemon's index, whose rows give the key
and the location; `recover` believes a row only if the record that it points to does. Usage,
which changes all the time, has a small LMDB environment of its own beside the arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Final

import lmdb

from ..proto.disk import USAGE_BYTES, decode_usage, encode_usage
from ..proto.errors import RecordError
from ..proto.keys import Key
from ..proto.limits import MAX_TOKEN_IDS_BYTES
from ..proto.record import (
    TRAILER_BYTES,
    RecordHead,
    crc32c,
    decode_head,
    decode_trailer,
    encode_head,
    encode_trailer,
    head_bytes_for,
    record_bytes,
)
from ..proto.vocabulary import Tier
from .arena import DEFAULT_SLAB_BYTES, Arena, ArenaWriter, check_slab, whole_slabs
from .extents import ExtentAllocator
from .lmdb_errors import lmdb_errors
from .store import (
    EntryWriter,
    Location,
    Recovery,
    Store,
    StoredEntry,
    StoreError,
    Usage,
)

ARENA_FILE: Final = "arena"
USAGE_DIRECTORY: Final = "usage"
#: A usage row with its share of half-empty pages, and of pages that a commit replaces.
_USAGE_ROW_BYTES: Final = 256
_USAGE_SLACK_BYTES: Final = 16 * 2**20


class ShmStore(Store):
    """An arena of `budget_bytes`, rounded down to whole slabs, in `directory` below /dev/shm.

    Its pages are secured by whoever made it (`arena.secure_segments`) before entries are placed
    in them. `verify_payloads`: `recover` compares the checksum of every payload. One process at
    a time: the daemon's lock file sees to it. Raises StoreError if there can't be such an arena.
    """

    tier: ClassVar[Tier] = Tier.SHM
    blocking: ClassVar[bool] = False

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        *,
        verify_payloads: bool = True,
        mode: int = 0o640,
    ) -> None:
        check_slab(slab_bytes)
        self.directory: Final = directory
        self.slab_bytes: Final = slab_bytes
        self.verify_payloads: Final = verify_payloads
        try:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            # LMDB would give it the mode of a file, in which nobody but root can look.
            (directory / USAGE_DIRECTORY).mkdir(mode=0o700, exist_ok=True)
        except OSError as problem:
            raise StoreError(f"can't make the shm tier: {problem}") from None
        size_bytes = budget_bytes - budget_bytes % slab_bytes
        self.arena: Final = Arena.file(directory / ARENA_FILE, size_bytes, mode)
        with self._errors():
            self._usage = lmdb.open(
                str(directory / USAGE_DIRECTORY),
                map_size=size_bytes // slab_bytes * _USAGE_ROW_BYTES + _USAGE_SLACK_BYTES,
                # Nothing here outlives the memory that it is in.
                sync=False,
                metasync=False,
                # With write() a full /dev/shm is an error; through the map it is a SIGBUS.
                writemap=False,
                # One process, one thread. And the lock file is a writable map: see above.
                lock=False,
                mode=0o600,
            )

    def stored_bytes(self, payload_bytes: int, token_ids_bytes: int) -> int:
        whole_bytes = record_bytes(head_bytes_for(token_ids_bytes), payload_bytes)
        return whole_slabs(whole_bytes, self.slab_bytes)

    def payload_offset(self, token_ids_bytes: int) -> int:
        """Where in an entry's extents its payload begins."""
        return head_bytes_for(token_ids_bytes)

    def writer(self, head: RecordHead, location: Location) -> EntryWriter:
        before = encode_head(head)
        return ArenaWriter(self.arena, head, location, before=before, after=encode_trailer)

    def apply(
        self,
        sealed: Sequence[EntryWriter],  # noqa: ARG002  # written where they stay
        erased: Iterable[Key],
    ) -> None:
        """The bytes are where they belong; the usage of what was erased is forgotten."""
        keys = list(erased)
        if keys:
            with self._errors(), self._usage.begin(write=True) as txn:
                for key in keys:
                    txn.delete(key)

    def read(
        self, head: RecordHead, location: Location, offset_bytes: int, length_bytes: int
    ) -> list[memoryview]:
        """As in the contract; `head.token_ids` has to have its length, if not its content."""
        if offset_bytes < 0 or offset_bytes + length_bytes > head.payload_bytes:
            raise StoreError(f"a payload of {head.payload_bytes} bytes does not reach so far")
        payload_offset = head_bytes_for(len(head.token_ids))
        return self.arena.views(location, payload_offset + offset_bytes, length_bytes)

    def token_ids(self, head: RecordHead, location: Location, token_ids_bytes: int) -> bytes:
        found, _ = self._decode_head(head.key, location)
        if len(found.token_ids) != token_ids_bytes:
            raise StoreError(f"{len(found.token_ids)} bytes of token ids, not {token_ids_bytes}")
        return found.token_ids

    # ---- recovery

    def recover(self, directory: Mapping[Key, Location]) -> Recovery:
        """Every entry of `directory` whose record is whole; least recently used first."""
        entries: list[StoredEntry] = []
        dropped: list[tuple[Key, str]] = []
        # Finds rows beyond the arena's memory and rows that overlap.
        extents = ExtentAllocator(self.arena.secured_bytes, self.slab_bytes)
        with self._errors(), self._usage.begin() as txn:
            for key, location in directory.items():
                try:
                    extents.claim(location)
                except ValueError as problem:
                    dropped.append((key, str(problem)))
                    continue
                try:
                    entries.append(self._stored_entry(key, location, txn.get(key)))
                except StoreError as problem:
                    extents.free(location)
                    dropped.append((key, str(problem)))
        self._forget_strangers({entry.head.key for entry in entries})
        entries.sort(key=lambda entry: (entry.last_used_ns, entry.head.created_ns))
        return Recovery(entries=entries, dropped=dropped)

    def _stored_entry(self, key: Key, location: Location, usage: bytes | None) -> StoredEntry:
        head, payload_offset = self._decode_head(key, location)
        stored_bytes = self.stored_bytes(head.payload_bytes, len(head.token_ids))
        if stored_bytes != sum(location[1::2]):
            raise StoreError(f"{sum(location[1::2])} bytes for a record of {stored_bytes}")
        trailer = self.arena.gather(location, payload_offset + head.payload_bytes, TRAILER_BYTES)
        stored_crc = decode_trailer(trailer)
        if self.verify_payloads:
            crc = 0
            for view in self.read(head, location, 0, head.payload_bytes):
                crc = crc32c(view, crc)
            if crc != stored_crc:
                raise StoreError("the payload does not match its checksum")
        last_used_ns, hits = head.created_ns, 0
        if usage is not None and len(usage) == USAGE_BYTES:
            last_used_ns, hits = decode_usage(usage)
        return StoredEntry(
            head=head,
            location=location,
            payload_crc32c=stored_crc,
            last_used_ns=last_used_ns,
            hits=hits,
        )

    def _decode_head(self, key: Key, location: Location) -> tuple[RecordHead, int]:
        """The head at a location and the offset of its payload; raises StoreError."""
        bound_bytes = min(sum(location[1::2]), head_bytes_for(MAX_TOKEN_IDS_BYTES))
        views = self.arena.views(location, 0, bound_bytes)
        try:
            head, payload_offset = decode_head(views[0] if len(views) == 1 else b"".join(views))
        except RecordError as problem:
            raise StoreError(str(problem)) from None
        if head.key != key or head.tier != Tier.SHM:
            raise StoreError(f"the record there is {head.key.hex()} of tier {head.tier}")
        return head, payload_offset

    def _forget_strangers(self, kept: set[Key]) -> None:
        with self._errors(), self._usage.begin(write=True) as txn:
            with txn.cursor() as cursor:
                strangers = [key for key in cursor.iternext(values=False) if key not in kept]
            for key in strangers:
                txn.delete(key)

    # ---- the rest

    def record_usage(self, usages: Sequence[Usage]) -> None:
        with self._errors(), self._usage.begin(write=True) as txn:
            for usage in usages:
                txn.put(usage.key, encode_usage(usage.last_used_ns, usage.hits))

    def held_keys(self) -> set[Key] | None:
        return None

    def close(self) -> None:
        self._usage.close()
        self.arena.close()

    def _errors(self) -> AbstractContextManager[None]:
        return lmdb_errors("use", self.directory / USAGE_DIRECTORY)
