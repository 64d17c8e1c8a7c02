"""The index in /dev/shm: written here, by the event loop, in the same step as the state.

It is what readers on this host walk without asking anybody, and the directory from which the
shm tier recovers. One transaction per event, however many entries the event moved.

Readers trust it: a row that stands says that nothing was written to its extents. Where a row
can't be removed (a full /dev/shm), nobody may believe the index any more, and that has to work
without any room: `revoke` overwrites the incarnation, by which readers know their daemon, in the
pages that hold it. `mend` brings the index up to date and gives it back its incarnation.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import lmdb
import structlog

from ..proto.errors import RecordError
from ..proto.index import CLAIMED, INCARNATION_ROW, INDEX_DIRECTORY, IndexRow, pack_row, unpack_row
from ..proto.keys import Key
from ..proto.limits import KEY_BYTES
from ..proto.vocabulary import Tier
from ..tiers.store import Location, StoreError
from .effects import IndexClaim, IndexDelete, IndexPut
from .tables import Entry

log = structlog.get_logger("prefixd.index")

IndexChange: TypeAlias = IndexPut | IndexDelete | IndexClaim

_MAX_READERS: Final = 1024
#: A cache line for each reader, and the header before them.
_LOCK_FILE_BYTES: Final = (_MAX_READERS + 64) * 64
#: What LMDB says of a file or of pages that it can't make anything of.
_DAMAGE: Final = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


class IndexFailed(StoreError):
    """The index could not be opened or changed; of the change nothing was done."""


class Index:
    """The one writer of the index. Not thread-safe: it belongs to the event loop.

    `map_bytes` bounds what it may grow to; the file is only as large as its rows. An index that
    is damaged is replaced by an empty one. Raises IndexFailed if there can't be one.
    """

    def __init__(self, directory: Path, incarnation: bytes, map_bytes: int) -> None:
        #: why it does not say what the state says; None: it does
        self.problem: str | None = None
        #: Does nobody believe it?
        self.revoked = False
        self._incarnation = incarnation
        path = directory / INDEX_DIRECTORY
        with ExitStack() as opened, _failing(f"open the index {path}"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _secure_lock_file(path / "lock.mdb")
            self._env = _open(path, incarnation, map_bytes)
            opened.callback(self._env.close)
            # Kept open: when it is needed there may be no descriptor left.
            self._fd = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
            opened.pop_all()

    def _put(self, key: bytes, value: bytes) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(key, value)

    # ---- what it says

    def rows(self) -> Iterator[tuple[Key, bytes]]:
        """Every key that a reader would find, with its row as it is stored."""
        with self._env.begin() as txn:
            for key, data in txn.cursor():
                if len(key) == KEY_BYTES:
                    yield Key(key), data

    def keys(self) -> set[Key]:
        """Every key that a reader would find."""
        return {key for key, _ in self.rows()}

    def get(self, key: Key) -> IndexRow | None:
        with self._env.begin() as txn:
            data = txn.get(key)
            return None if data is None else unpack_row(data)

    def locations(self, tier: Tier) -> dict[Key, Location]:
        """Where the entries of one tier lie, as far as that can be read."""
        found: dict[Key, Location] = {}
        for key, data in self.rows():
            try:
                row = unpack_row(data)
            except RecordError:
                continue
            if row.tier == tier:
                found[key] = row.location
        return found

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

    def differences(self, entries: Mapping[Key, Entry]) -> list[IndexChange]:
        """What has to change for it to say exactly what the state says."""
        changes: list[IndexChange] = []
        listed = dict(self.rows())
        changes += (IndexDelete(key) for key in listed.keys() - entries.keys())
        changes += (
            IndexPut(entry)
            for key, entry in entries.items()
            if listed.get(key) != pack_row(_row(entry))
        )
        pinned = {key for key, entry in entries.items() if entry.pins and entry.tier is Tier.SHM}
        claimed = self.claimed()
        changes += (IndexClaim((key,), claimed=False) for key in claimed - pinned)
        changes += (IndexClaim((key,), claimed=True) for key in pinned - claimed)
        return changes

    # ---- changes

    def change(self, changes: list[IndexChange]) -> None:
        """Make changes, in order, in one transaction; whatever fails is left to `mend`.

        Never raises, and when it returns, no reader finds what was deleted.
        """
        if self.revoked:
            return
        try:
            self.apply(changes)
        except IndexFailed as failure:
            self.problem = str(failure)
            log.error("index_failed", error=str(failure), changes=len(changes))
            self._delete_or_revoke([c for c in changes if isinstance(c, IndexDelete)])

    def _delete_or_revoke(self, deletions: list[IndexDelete]) -> None:
        """An entry that is missing is a miss; one that stands is believed."""
        if not deletions:
            return
        try:
            self.apply(deletions)
        except IndexFailed:
            self.revoke()

    def apply(self, changes: Iterable[IndexChange]) -> None:
        """Make changes, in order, in one transaction.

        Raises IndexFailed if nothing of it was done.
        """
        with _failing("change the index"), self._env.begin(write=True) as txn:
            for change in changes:
                match change:
                    case IndexPut():
                        txn.put(change.entry.key, pack_row(_row(change.entry)))
                    case IndexDelete():
                        txn.delete(change.key)
                    case IndexClaim(claimed=True):
                        for key in change.keys:
                            txn.put(CLAIMED + key, b"")
                    case IndexClaim():
                        for key in change.keys:
                            txn.delete(CLAIMED + key)

    def distrust(self, why: str) -> None:
        """It may say what is wrong: nobody believes it until it is mended."""
        self.problem = why
        self.revoke()

    def revoke(self) -> None:
        """Let nobody believe what it says any more, from now on. Needs no room.

        Overwrites the incarnation wherever it stands in the file: where it is now, and in the
        pages of earlier transactions that somebody may still read.
        """
        self.revoked = True
        nobody = bytes(len(self._incarnation))
        with closing(mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)) as pages:
            place = pages.find(self._incarnation)
            while place >= 0:
                os.pwrite(self._fd, nobody, place)
                place = pages.find(self._incarnation, place + 1)
        log.error("index_revoked", why=self.problem)

    def mend(self, entries: Mapping[Key, Entry]) -> None:
        """Try to make it say what the state says, and be believed again. Never raises."""
        try:
            with _failing("mend the index"):
                # As long as there is no room, a write says so much sooner than a comparison.
                nobody = bytes(len(self._incarnation))
                self._put(INCARNATION_ROW, nobody if self.revoked else self._incarnation)
                self.apply(self.differences(entries))
                self._put(INCARNATION_ROW, self._incarnation)
        except IndexFailed as failure:
            self.problem = str(failure)
        else:
            if self.problem is not None:
                log.info("index_mended", entries=len(entries))
            self.problem, self.revoked = None, False

    def forget_dead_readers(self) -> None:
        """A client that was killed in the middle of a look-up would keep old pages from being
        reused, and the index would grow with every change."""
        self._env.reader_check()

    def close(self) -> None:
        """Idempotent. What it says is still there."""
        if self._fd >= 0:
            self._env.close()
            os.close(self._fd)
            self._fd = -1


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raises IndexFailed for what goes wrong inside. `what` is what can't be done then."""
    try:
        yield
    except (lmdb.Error, OSError) as problem:
        raise IndexFailed(f"can't {what}: {problem}") from problem


def _open(path: Path, incarnation: bytes, map_bytes: int) -> lmdb.Environment:
    """The environment, under the name of this start."""
    try:
        return _sound(path, incarnation, map_bytes)
    except _DAMAGE as problem:
        # It can be made anew; what it knew of the shm tier is lost.
        log.error("index_replaced", path=str(path), error=str(problem))
        # Both: the lock file counts transactions, and would go on with those of the old one.
        for name in ("data.mdb", "lock.mdb"):
            (path / name).unlink(missing_ok=True)
        _secure_lock_file(path / "lock.mdb")
        return _sound(path, incarnation, map_bytes)


def _sound(path: Path, incarnation: bytes, map_bytes: int) -> lmdb.Environment:
    with ExitStack() as opened:
        environment = _environment(path, map_bytes)
        opened.callback(environment.close)
        with environment.begin(write=True) as txn:
            # Opening it does not touch every page; this does.
            for _ in txn.cursor():
                pass
            txn.put(INCARNATION_ROW, incarnation)
        opened.pop_all()
        return environment


def _environment(path: Path, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(
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
