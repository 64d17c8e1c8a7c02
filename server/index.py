"""The index in /dev/shm: written here, by the event loop, in the same step as the state.

It is what readers on this host walk without asking anybody, and the directory from which the
shm tier recovers. One transaction per event, however many entries the event moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import lmdb

from ..proto.index import CLAIMED, INCARNATION_ROW, INDEX_DIRECTORY, IndexRow, pack_row, unpack_row
from ..proto.keys import Key
from ..proto.limits import KEY_BYTES
from ..proto.vocabulary import Tier
from ..tiers.store import Location
from .effects import IndexClaim, IndexDelete, IndexPut
from .tables import Entry

IndexChange: TypeAlias = IndexPut | IndexDelete | IndexClaim


_MAX_READERS = 1024
#: A cache line for each reader, and the header before them.
_LOCK_FILE_BYTES = (_MAX_READERS + 64) * 64


class IndexFailed(Exception):
    """The index could not take a change; what readers see may be stale."""


class Index:
    """The one writer of the index. Not thread-safe: it belongs to the event loop.

    `map_bytes` bounds what it may grow to; the file is only as large as its rows.
    """

    def __init__(self, directory: Path, incarnation: bytes, map_bytes: int) -> None:
        path = directory / INDEX_DIRECTORY
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _secure_lock_file(path / "lock.mdb")
        self._env = lmdb.open(
            str(path),
            map_size=map_bytes,
            # It lies in memory and dies with the node: there is nothing to sync to.
            sync=False,
            metasync=False,
            # A store into a mapped page of a full /dev/shm would be a SIGBUS; a write is ENOSPC.
            writemap=False,
            # Pages carry our rows only, and whoever reads them may read the payloads anyway.
            meminit=False,
            max_readers=_MAX_READERS,
        )
        self._put(INCARNATION_ROW, incarnation)

    def _put(self, key: bytes, value: bytes) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(key, value)

    def locations(self, tier: Tier) -> dict[Key, Location]:
        """Where the entries of one tier lie, as it stands."""
        found: dict[Key, Location] = {}
        with self._env.begin() as txn:
            for key, data in txn.cursor():
                if len(key) == KEY_BYTES:
                    row = unpack_row(data)
                    if row.tier == tier:
                        found[Key(key)] = row.location
        return found

    def delete(self, keys: Iterable[Key]) -> None:
        """Forget keys that no entry owns. Raises IndexFailed."""
        self.apply(IndexDelete(key) for key in keys)

    def claimed(self) -> set[Key]:
        """The entries that were claimed when the index was last written."""
        with self._env.begin() as txn:
            cursor = txn.cursor()
            found: set[Key] = set()
            if cursor.set_range(CLAIMED):
                for key in cursor.iternext(values=False):
                    if not key.startswith(CLAIMED):
                        break
                    if len(key) == len(CLAIMED) + KEY_BYTES:
                        found.add(Key(key[len(CLAIMED) :]))
            return found

    def apply(self, changes: Iterable[IndexChange]) -> None:
        """Make changes, in order, in one transaction.

        Raises IndexFailed if nothing of it was done.
        """
        try:
            with self._env.begin(write=True) as txn:
                for change in changes:
                    match change:
                        case IndexPut():
                            txn.put(change.entry.key, pack_row(_row(change.entry)))
                        case IndexDelete():
                            txn.delete(change.key)
                        case IndexClaim(claimed=True):
                            txn.put(CLAIMED + change.key, b"")
                        case IndexClaim():
                            txn.delete(CLAIMED + change.key)
        except lmdb.Error as problem:
            raise IndexFailed(str(problem)) from problem

    def keys(self) -> set[Key]:
        """Every key that a reader would find."""
        with self._env.begin() as txn:
            return {
                Key(key) for key in txn.cursor().iternext(values=False) if len(key) == KEY_BYTES
            }

    def get(self, key: Key) -> IndexRow | None:
        with self._env.begin() as txn:
            data = txn.get(key)
            return None if data is None else unpack_row(data)

    def close(self) -> None:
        self._env.close()


def _secure_lock_file(path: Path) -> None:
    """Give LMDB's table of readers its pages. It is written through a mapping: in a /dev/shm that
    is full its first use would be a SIGBUS; like this it is an OSError, here and now."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


def _row(entry: Entry) -> IndexRow:
    return IndexRow(
        tier=entry.tier,
        reason=entry.reason,
        layer_count=entry.layer_count,
        token_count=entry.token_count,
        payload_crc32c=entry.payload_crc32c,
        token_ids_bytes=entry.token_ids_bytes,
        generation=entry.generation,
        payload_bytes=entry.payload_bytes,
        location=entry.location,
    )
