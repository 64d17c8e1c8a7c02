"""Sorting in temporary files: the order, and that memory does not grow with the list."""

from __future__ import annotations

import random
import sqlite3
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from prefixd.client.ctl.disk_sort import sorted_on_disk


def test_records_come_in_the_order_of_their_numbers_and_equal_ones_as_they_came() -> None:
    drawn = random.Random(1)
    records = [
        (drawn.randrange(3), drawn.randrange(-(2**63), 2**63), b"%d" % n) for n in range(500)
    ]
    records += [(1, 7, b"first"), (1, 7, b"second"), (1, 7, b"")]
    expected = [body for _, _, body in sorted(records, key=lambda record: record[:2])]
    assert list(sorted_on_disk(iter(records))) == expected
    assert list(sorted_on_disk([])) == []


def test_memory_does_not_grow_with_the_list() -> None:
    def most_held_bytes(count: int) -> int:
        def records() -> Iterator[tuple[int, int, bytes]]:
            for number in range(count):
                yield number * 7919 % count, 0, bytes(100)

        tracemalloc.start()
        listed = sum(1 for _ in sorted_on_disk(records()))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert listed == count
        return most

    most_held_bytes(10)
    assert most_held_bytes(20_000) < most_held_bytes(2_000) + 50_000


def test_a_list_that_its_reader_gives_up_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    listed = sorted_on_disk((-number, 0, bytes(1_000)) for number in range(10_000))
    assert next(listed) == bytes(1_000)
    assert not list(tmp_path.iterdir()), "the files have no name while they are used, either"
    del listed
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_files_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def records() -> Iterator[tuple[int, int, bytes]]:
        yield 0, 0, bytes(10)
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(typer.Exit):
        list(sorted_on_disk(records()))
    assert "database or disk is full" in capsys.readouterr().err
