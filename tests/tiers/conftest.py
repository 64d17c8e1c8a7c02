"""Lets the files of this folder import their helpers, and opens stores for them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import Placed  # after the path was set

from prefixd.tiers.disk import DiskStore
from prefixd.tiers.shm import ShmStore


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
    """That of the one store of a test of both kinds."""
    return (shm if kind is ShmStore else tmp_path) / "tier"


@pytest.fixture
def opened(kind: type, directory: Path) -> Iterator[Callable[..., Placed]]:
    """Opens the one store of a test, closing the one before."""
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
