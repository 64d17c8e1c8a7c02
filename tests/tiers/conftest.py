"""Puts the helpers of this folder on the import path, and opens stores for its tests."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import ROWS_SLABS, Placed  # after the path was set

from prefixd.tiers.arena_stores import DiskStore, ShmStore
from prefixd.tiers.lmdb_rows import LmdbRows


@pytest.fixture
def shm() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=[ShmStore, DiskStore], ids=["shm", "disk"])
def kind(request: pytest.FixtureRequest) -> type[ShmStore] | type[DiskStore]:
    chosen: type[ShmStore] | type[DiskStore] = request.param
    return chosen


@pytest.fixture
def directory(kind: type, shm: Path, tmp_path: Path) -> Path:
    """The directory of a test's only store, for tests that run with both kinds."""
    return (shm if kind is ShmStore else tmp_path) / "tier"


@pytest.fixture
def opened(kind: type, directory: Path) -> Iterator[Callable[..., Placed]]:
    """Opens the only store of a test, after closing the previous one."""
    made: list[Placed] = []

    def open_again(slabs: int = 64, **options: bool) -> Placed:
        while made:
            made.pop().store.close()
        if kind is DiskStore:
            options.setdefault("sync", False)
        made.append(Placed(kind, directory, slabs, **options))
        return made[-1]

    yield open_again
    while made:
        made.pop().store.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Placed]]:
    """Opens the only disk store of a test, with all syncs, after closing the previous one."""
    made: list[Placed] = []

    def open_again(slabs: int = 4096, *, sync: bool = True, **options: bool) -> Placed:
        while made:
            made.pop().store.close()
        made.append(Placed(DiskStore, tmp_path / "disk", slabs, sync=sync, **options))
        return made[-1]

    yield open_again
    while made:
        made.pop().store.close()


@pytest.fixture
def opened_rows(tmp_path: Path) -> Iterator[Callable[[], LmdbRows]]:
    """Opens the only LMDB table of a test, after closing the previous one."""
    made: list[LmdbRows] = []

    def open_again() -> LmdbRows:
        while made:
            made.pop().close()
        made.append(LmdbRows(tmp_path, ROWS_SLABS, sync=False))
        made[-1].secure(ROWS_SLABS)
        return made[-1]

    yield open_again
    while made:
        made.pop().close()
