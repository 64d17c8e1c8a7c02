"""What LMDB says, in the words of the store contract."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb

from .arena import FULL_ERRORS
from .store import StoreError, StoreFull

#: What a commit needs at least, for the pages of its trees.
_MIN_NEEDED_BYTES: Final = 2**20


@contextmanager
def lmdb_errors(what: str, directory: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Raises StoreFull or StoreError for what goes wrong inside with the environment there.

    `what` is the verb of the sentence. A transaction that failed left no trace. What LMDB has no
    class for may come of a lack of room too: quotas, limits, and a write that was cut short,
    which it calls an I/O error. That is found out by asking for `needed_bytes`.
    """
    try:
        yield
    except (lmdb.Error, OSError) as problem:
        full = (
            isinstance(problem, lmdb.MapFullError | lmdb.DiskError)
            or (isinstance(problem, OSError) and problem.errno in FULL_ERRORS)
            or (type(problem) is lmdb.Error and not _has_room(directory, needed_bytes))
        )
        kind = StoreFull if full else StoreError
        raise kind(f"can't {what} {directory}: {problem}") from None


def _has_room(directory: Path, needed_bytes: int) -> bool:
    """Could the data file grow by so much? Sees full devices, quotas and limits alike."""
    data = directory / "data.mdb"
    size_bytes = data.stat().st_size if data.exists() else 0
    with tempfile.TemporaryFile(dir=directory) as probe:
        try:
            # Behind the end that the data file has, for limits on the size of a file.
            os.posix_fallocate(probe.fileno(), size_bytes, max(needed_bytes, _MIN_NEEDED_BYTES))
        except OSError as problem:
            return problem.errno not in FULL_ERRORS
    return True
