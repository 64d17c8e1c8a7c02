"""Preloads `recorder.c` into processes and reads its log."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

_RECORD: Final = struct.Struct("<IIQQqqQ")
_MAGIC: Final = 0x504C5750
_SOURCE: Final = Path(__file__).with_name("recorder.c")


class Kind(IntEnum):
    """The kinds of records in `recorder.c`, and MARK, which only this module writes."""

    WRITE = 1
    RESIZE = 2
    EXTEND = 3
    PUNCH = 4
    SYNC = 5
    CREATE = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    END = 11
    MARK = 12


class Event(NamedTuple):
    """The beginning of a call, or (END) the end of the call with the same number."""

    kind: Kind
    number: int
    inode: int
    offset_bytes: int
    #: END: the return value of the call; EXTEND and PUNCH: the length
    result: int
    #: written bytes, names, or the text of a mark
    data: bytes


class Recording:
    """A log that processes append to while they run."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.path: Final = directory / "recording"
        self.path.touch()
        self.root: Final = root
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._marks = 0

    @contextmanager
    def preloaded(self) -> Iterator[None]:
        """Record all processes that are started in this context, and their children."""
        added = {
            "LD_PRELOAD": str(recorder()),
            "PREFIXD_POWER_LOG": str(self.path),
            "PREFIXD_POWER_ROOT": str(self.root),
        }
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def mark(self, text: str) -> int:
        """Insert a mark among the records. Returns its number."""
        self._marks += 1
        data = text.encode()
        head = _RECORD.pack(_MAGIC, Kind.MARK, self._marks, 0, 0, 0, len(data))
        assert os.write(self._fd, head + data) == len(head) + len(data)
        return self._marks

    def close(self) -> None:
        os.close(self._fd)

    def events(self) -> list[Event]:
        """All records so far. Raises AssertionError if the log is malformed."""
        log, found, at = memoryview(self.path.read_bytes()), [], 0
        while at < len(log):
            magic, kind, number, inode, offset, result, length = _RECORD.unpack_from(log, at)
            assert magic == _MAGIC, f"no record at {at}"
            at += _RECORD.size
            found.append(
                Event(Kind(kind), number, inode, offset, result, bytes(log[at : at + length]))
            )
            at += length
        assert at == len(log)
        return found


@functools.cache
def compiler() -> str | None:
    """The path of a C compiler, if one is installed."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def recorder() -> Path:
    """The path of the library, which is compiled once per process and removed at its end."""
    found = compiler()
    assert found is not None
    keep = _compiled_directory()
    library = Path(keep.name) / "recorder.so"
    subprocess.run(
        [found, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"], check=True
    )
    return library


@functools.cache
def _compiled_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="prefixd-recorder-")
