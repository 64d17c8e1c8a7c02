"""Sorts lists that memory should not hold. SQLite does it, in temporary files without a name.

They are in $SQLITE_TMPDIR, $TMPDIR, /var/tmp or /tmp, and only this process can open them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing

from .failures import ExitCode, fail


def sorted_on_disk(records: Iterable[tuple[int, int, bytes]]) -> Iterator[bytes]:
    """The bytes of the records in the order of their two numbers, equal ones as they came. All
    records are read before the first one is given; memory holds some megabytes of them.

    The numbers fit into 64 bits with a sign. Exits when there is no room for the files.
    """
    with closing(sqlite3.connect("", isolation_level=None)) as database:
        # The file is of use to nobody after a failure.
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("CREATE TABLE record (major INTEGER, minor INTEGER, body BLOB)")
        try:
            database.execute("BEGIN")
            database.executemany("INSERT INTO record VALUES (?, ?, ?)", records)
            rows = database.execute("SELECT body FROM record ORDER BY major, minor, rowid")
            for (body,) in rows:
                yield body
        except sqlite3.OperationalError as problem:
            fail(f"the list can't be sorted in a temporary file: {problem}", ExitCode.PROBLEM)
