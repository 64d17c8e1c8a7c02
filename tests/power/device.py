"""The files that a device may hold after a power loss, derived from the recorded calls.

- A write is safe once a sync of its file that began after the write had ended has completed. Every
  sector (512 or 4,096 bytes) of any other write may or may not be stored: independently of its
  neighbours, a sector holds what it held at some time since the last such sync.
- The length of a file becomes safe like its bytes. Until then, it may be any length since.
- A name is safe once its directory was synced after the name was created, changed or removed. Of
  the later changes in one directory, a loss keeps the first few, as file systems keep their order.
  Changes in different directories are independent of each other and of the bytes of files.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from .recording import Event, Kind

_NAMES: Final = (Kind.CREATE, Kind.RENAME, Kind.UNLINK, Kind.MKDIR, Kind.RMDIR)
#: Which unsafe changes survive a loss.
CHOICES: Final = ("nothing", "everything", "some", "few", "most", "the first", "all but one")


@dataclass(eq=False)
class _Change:
    """A change of a file: `data` (may be empty) written at `offset_bytes`, and the length that the
    change sets, if any."""

    offset_bytes: int
    data: bytes
    size_bytes: int | None
    #: the file has at least this length afterwards
    least_bytes: int
    ended: bool = False


@dataclass(eq=False)
class _File:
    safe: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)


def _resized(data: bytearray, size_bytes: int) -> None:
    if size_bytes < len(data):
        del data[size_bytes:]
    else:
        data.extend(bytes(size_bytes - len(data)))


def _apply(data: bytearray, change: _Change) -> None:
    if change.size_bytes is not None:
        _resized(data, change.size_bytes)
    if len(data) < change.least_bytes:
        _resized(data, change.least_bytes)
    end = min(change.offset_bytes + len(change.data), len(data))
    data[change.offset_bytes : end] = change.data[: end - change.offset_bytes]


@dataclass(eq=False)
class _NameChange:
    kind: Kind
    directory: str
    names: tuple[str, ...]
    file: _File
    ended: bool = False


class Device:
    """The files below a directory, updated call by call."""

    def __init__(self) -> None:
        #: by inode number, which file systems use again
        self._files: dict[int, _File] = {}
        self._names: dict[str, _File] = {}
        self._directories: set[str] = {""}
        self._pending_names: list[_NameChange] = []
        #: calls that have not ended, by number
        self._changes: dict[int, tuple[_File, _Change]] = {}
        self._name_changes: dict[int, _NameChange] = {}
        #: the changes that each unfinished sync makes safe when it succeeds, by its number
        self._syncs: dict[int, tuple[_File | None, list[object]]] = {}

    @classmethod
    def of(cls, root: Path) -> Device:
        """A device with the files now below `root`, all of them safe."""
        device = cls()
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if path.is_dir():
                device._directories.add(name)
            else:
                device._names[name] = _File(bytearray(path.read_bytes()))
                device._files[path.stat().st_ino] = device._names[name]
        return device

    # ---- recorded calls

    def add(self, event: Event) -> None:
        """Apply the next record. Writes to files whose creation was not recorded are ignored."""
        if event.kind is Kind.MARK:
            return
        if event.kind is Kind.END:
            self._end(event)
        elif event.kind is Kind.SYNC:
            self._begin_sync(event)
        elif event.kind in _NAMES:
            self._begin_name(event)
        elif event.inode in self._files:
            self._begin_change(event)

    def _begin_change(self, event: Event) -> None:
        file = self._files[event.inode]
        start, length = event.offset_bytes, event.result
        if event.kind is Kind.WRITE:
            change = _Change(start, event.data, None, start + len(event.data))
        elif event.kind is Kind.EXTEND:
            change = _Change(0, b"", None, start + length)
        elif event.kind is Kind.PUNCH:
            change = _Change(start, bytes(length), None, 0)
        else:
            assert event.kind is Kind.RESIZE
            # The cut-off part reads as zeros if the file grows again.
            longest = max([len(file.safe), *(c.least_bytes for c in file.pending)])
            change = _Change(start, bytes(max(0, longest - start)), start, 0)
        file.pending.append(change)
        self._changes[event.number] = file, change

    def _begin_name(self, event: Event) -> None:
        names = tuple(event.data.decode().split("\0"))
        parents = {str(PurePosixPath(name).parent) for name in names}
        assert len(parents) == 1, f"a name moves between directories: {names}"
        directory = parents.pop()
        file = _File()
        if event.kind is Kind.CREATE:
            self._files[event.inode] = file
        change = _NameChange(event.kind, "" if directory == "." else directory, names, file)
        self._pending_names.append(change)
        self._name_changes[event.number] = change

    def _begin_sync(self, event: Event) -> None:
        file = self._files.get(event.inode)
        covered: list[object]
        if file is not None:
            covered = [change for change in file.pending if change.ended]
        else:
            name = event.data.decode()
            covered = [c for c in self._pending_names if c.directory == name and c.ended]
        self._syncs[event.number] = file, covered

    def _end(self, event: Event) -> None:
        if event.number in self._syncs:
            file, covered = self._syncs.pop(event.number)
            if event.result == 0:
                self._secure(file, covered)
        elif event.number in self._name_changes:
            named = self._name_changes.pop(event.number)
            if event.result < 0:
                self._pending_names.remove(named)
            named.ended = True
        elif event.number in self._changes:
            changed, change = self._changes.pop(event.number)
            if event.result < 0:
                changed.pending.remove(change)
            elif change.size_bytes is None and 0 < event.result < len(change.data):
                change.data = change.data[: event.result]
                change.least_bytes = change.offset_bytes + event.result
            change.ended = True

    def _secure(self, file: _File | None, covered: Iterable[object]) -> None:
        for one in covered:
            if isinstance(one, _Change):
                assert file is not None
                if one in file.pending:
                    _apply(file.safe, one)
                    file.pending.remove(one)
            elif one in self._pending_names:
                assert isinstance(one, _NameChange)
                self._rename(self._names, self._directories, one)
                self._pending_names.remove(one)

    @staticmethod
    def _rename(names: dict[str, _File], directories: set[str], change: _NameChange) -> None:
        first, *second = change.names
        if change.kind is Kind.CREATE:
            names[first] = change.file
        elif change.kind is Kind.MKDIR:
            directories.add(first)
        elif change.kind is Kind.RMDIR:
            directories.discard(first)
        elif change.kind is Kind.UNLINK:
            names.pop(first, None)
        elif first in names:
            names[second[0]] = names.pop(first)

    # ---- losses

    @property
    def unsafe(self) -> int:
        """The number of changes that a loss now may undo."""
        return len(self._pending_names) + sum(len(file.pending) for file in self._files.values())

    def written(self) -> dict[str, bytes]:
        """All files without a loss, as the running machine sees them."""
        return self.lost(random.Random(0), "everything", 4096)

    def lost(self, rng: random.Random, choice: str, sector_bytes: int) -> dict[str, bytes]:
        """The files after a loss now; `choice` is one of `CHOICES`."""
        names, directories = dict(self._names), set(self._directories)
        for directory in sorted({change.directory for change in self._pending_names}):
            pending = [c for c in self._pending_names if c.directory == directory]
            for change in pending[: _first(rng, choice, len(pending))]:
                self._rename(names, directories, change)
        found = {}
        for name, file in names.items():
            parents = {str(parent) for parent in PurePosixPath(name).parents} - {"."}
            if parents <= directories:
                found[name] = _after_loss(file, rng, choice, sector_bytes)
        return found


def _first(rng: random.Random, choice: str, count: int) -> int:
    if choice == "nothing":
        return 0
    if choice in ("everything", "all but one"):
        return count
    return rng.randint(0, count)


def _after_loss(file: _File, rng: random.Random, choice: str, sector_bytes: int) -> bytes:
    pending = file.pending
    if choice == "the first":
        pending = pending[: rng.randint(0, len(pending))]
    missing = rng.randrange(len(pending)) if choice == "all but one" and pending else -1
    part = {"nothing": 0.0, "few": 0.05, "some": 0.5, "most": 0.95}.get(choice, 1.0)
    # The changes of each sector, in order. A loss keeps a random number of them.
    touching: dict[int, list[_Change]] = {}
    for number, change in enumerate(pending):
        if number == missing:
            continue
        end = change.offset_bytes + len(change.data)
        for sector in range(change.offset_bytes // sector_bytes, -(-end // sector_bytes)):
            touching.setdefault(sector, []).append(change)
    data = bytearray(file.safe)
    sizes = [len(data)]
    for change in pending:
        before = sizes[-1] if change.size_bytes is None else change.size_bytes
        sizes.append(max(before, change.least_bytes))
    size_bytes = sizes[-1] if choice == "everything" else sizes[_first(rng, choice, len(pending))]
    longest = max(sizes)
    _resized(data, longest)
    for sector, changes in touching.items():
        count = sum(rng.random() < part for _ in changes) if part < 1 else len(changes)
        low, high = sector * sector_bytes, (sector + 1) * sector_bytes
        for change in changes[:count]:
            start = max(low, change.offset_bytes)
            end = min(high, change.offset_bytes + len(change.data), longest)
            if start < end:
                at = start - change.offset_bytes
                data[start:end] = change.data[at : at + end - start]
    _resized(data, size_bytes)
    return bytes(data)


def build(files: dict[str, bytes], root: Path) -> None:
    """Create the files below `root`, which is empty."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
