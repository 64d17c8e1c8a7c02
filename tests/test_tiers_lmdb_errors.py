"""LMDB's and the system's errors, each as what the store contract calls it."""

from __future__ import annotations

import errno
from pathlib import Path

import lmdb
import pytest

from prefixd.tiers import lmdb_errors as module
from prefixd.tiers.lmdb_errors import lmdb_errors
from prefixd.tiers.store import StoreError, StoreFull


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (lmdb.MapFullError("put"), StoreFull),
        (lmdb.DiskError("put: no space"), StoreFull),
        (lmdb.Error("commit: input/output error"), StoreError),
        (lmdb.CorruptedError("get"), StoreError),
        (OSError(errno.ENOSPC, "mkdir"), StoreFull),
        (OSError(errno.EACCES, "mkdir"), StoreError),
    ],
)
def test_each_error_has_its_kind(
    tmp_path: Path, problem: Exception, expected: type[StoreError]
) -> None:
    caught = pytest.raises(StoreError, match=f"can't write to {tmp_path}: ")
    with caught as raised, lmdb_errors("write to", tmp_path):
        raise problem
    assert type(raised.value) is expected


def test_what_is_neither_passes() -> None:
    with pytest.raises(ValueError, match="mine"), lmdb_errors("read", Path("/")):
        raise ValueError("mine")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_was_cut_short_is_a_full_device_if_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(5000))
    asked: list[tuple[int, int]] = []

    def no_room(_fd: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        raise OSError(code, "no room")

    monkeypatch.setattr(module.os, "posix_fallocate", no_room)
    with pytest.raises(StoreFull), lmdb_errors("write to", tmp_path, needed_bytes=7 * 2**20):
        raise lmdb.Error("commit: input/output error")
    assert asked == [(5000, 7 * 2**20)]
    assert [path.name for path in tmp_path.iterdir()] == ["data.mdb"]


def test_a_device_that_fails_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.mdb").write_bytes(b"x")

    def broken(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(module.os, "posix_fallocate", broken)
    with pytest.raises(StoreError) as caught, lmdb_errors("write to", tmp_path):
        raise lmdb.Error("commit: input/output error")
    assert type(caught.value) is StoreError
