"""Keys that were deleted during a recovery stay deleted if it is interrupted, and the mark in a
fleet's deletes is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto.keys import Key
from prefixd.tiers.graves import GRAVES_FILE, MARK_FILE, MAX_MARK_BYTES, Graves
from prefixd.tiers.store import StoreError

A, B = Key(b"a" * 32), Key(b"b" * 32)


@pytest.mark.parametrize("sync", [False, True])
def test_noted_keys_are_read_again(tmp_path: Path, sync: bool) -> None:
    graves = Graves(tmp_path, sync=sync)
    assert graves.read() == {}
    graves.add([A, B], 7)
    graves.add([A], 5)
    graves.add([B], 9)
    assert Graves(tmp_path, sync=sync).read() == {A: 7, B: 9}
    graves.clear()
    graves.clear()
    assert graves.read() == {}
    assert list(tmp_path.iterdir()) == []


def test_a_torn_row_was_never_acknowledged(tmp_path: Path) -> None:
    graves, path = Graves(tmp_path, sync=False), tmp_path / GRAVES_FILE
    graves.add([A, B], 7)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert graves.read() == ({A: 7} if length >= len(whole) // 2 else {})
    # The next row takes the place of the torn one.
    path.write_bytes(whole[:-1])
    graves.add([B], 8)
    assert graves.read() == {A: 7, B: 8}
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert graves.read() == {}


@pytest.mark.parametrize("sync", [False, True])
def test_the_last_mark_is_read_again(tmp_path: Path, sync: bool) -> None:
    graves = Graves(tmp_path, sync=sync)
    assert graves.marked() == b""
    for mark in (b"m" * MAX_MARK_BYTES, b"short", b""):
        graves.mark(mark)
        assert Graves(tmp_path, sync=sync).marked() == mark


def test_a_torn_mark_is_none(tmp_path: Path) -> None:
    graves, path = Graves(tmp_path, sync=False), tmp_path / MARK_FILE
    graves.mark(b"first")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert graves.marked() == b""
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert graves.marked() in (b"", b"first")


def test_a_file_that_cannot_be_written_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / GRAVES_FILE).mkdir()
    graves = Graves(tmp_path, sync=False)
    for call in (lambda: graves.add([A], 1), graves.read, graves.clear):
        with pytest.raises(StoreError):
            call()
    (tmp_path / MARK_FILE).mkdir()
    for call in (lambda: graves.mark(b"m"), graves.marked):
        with pytest.raises(StoreError):
            call()
