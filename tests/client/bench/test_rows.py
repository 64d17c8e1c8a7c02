"""Rows of a run, and of another program's."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.client.bench.report import Rows, read_rows
from prefixd.client.bench.samples import Row
from prefixd.proto.errors import CallerError


def test_rows_are_found_by_who_did_what_to_how_many() -> None:
    rows = Rows([Row("a", "save", 1, 5.0), Row("a", "save", 8, 9.0), Row("b", "save", 8, 7.0)])
    assert rows.find("a", "save", 8) == Row("a", "save", 8, 9.0)
    assert rows.find("a", "restore", 8) is None
    assert [row.peer for row in rows.of("save", 8)] == ["a", "b"]
    assert len(rows.of("save")) == 3
    assert rows.peers == ["a", "b"]


def test_the_best_is_the_fastest_that_keeps_something() -> None:
    rows = Rows(
        [Row("memcpy", "restore", 8, 1.0), Row("a", "restore", 8, 9.0), Row("b", "restore", 8, 7.0)]
    )
    best = rows.best("restore", 8)
    assert best is not None
    assert best.peer == "b"
    assert rows.best("restore", 1) is None
    assert rows.batches == [8]


def test_a_crowd_is_sorted_by_its_size() -> None:
    rows = Rows([Row("a", "restore-by-16", 8, 5.0, 4.0), Row("a", "restore-by-2", 8, 9.0, 3.0)])
    assert [(count, row.gb_per_s) for count, row in rows.crowd()] == [(2, 3.0), (16, 4.0)]


def test_rows_are_read_between_whatever_else_was_said(tmp_path: Path) -> None:
    path = tmp_path / "peers.jsonl"
    path.write_text(
        "a server logs something\n"
        '{"peer": "redis", "skipped": "not installed"}\n'
        '{"peer": "redis-unix", "op": "save", "blocks": 1, "p50_ms": 4.0, "gb_per_s": 1.3}\n'
        '{"peer": "redis-unix", "op": "exists", "blocks": 1, "p50_ms": 0.06}\n'
    )
    rows = read_rows(path)
    assert rows.find("redis-unix", "save", 1) == Row("redis-unix", "save", 1, 4.0, 1.3)
    assert rows.find("redis-unix", "exists", 1) == Row("redis-unix", "exists", 1, 0.06)
    assert rows.peers == ["redis-unix"]


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"peer": "a"}', r"peers:2: this is no row: 'op'"), ("{nonsense", "peers:2: this is no row")],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "peers"
    path.write_text(f'{{"peer": "redis", "skipped": "not installed"}}\n{line}\n')
    with pytest.raises(CallerError, match=words):
        read_rows(path)


def test_a_file_that_is_not_there_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="can't be read"):
        read_rows(tmp_path / "nowhere")
