"""Rows of runs and of other programs, and tables of invented ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.client.bench.bench_report import Rows, TextTable, as_markdown, read_rows, tables
from prefixd.client.bench.samples import Row
from prefixd.proto.errors import CallerError

OURS = Rows(
    [
        Row("memcpy", "restore", 48, 16.0, 16.0),
        Row("prefixd-ram", "save", 48, 50.0, 5.0),
        Row("prefixd-ram", "restore", 48, 20.0, 12.8),
        Row("prefixd-ram", "view", 48, 0.64, 400.0),
        Row("prefixd-ram", "exists", 48, 0.016),
        Row("prefixd-disk", "restore", 48, 40.0, 6.4),
        Row("hashing", "walk", 14, 0.1),
        Row("prefixd-ram", "walk-hit", 14, 0.12, None, {"rpcs": 0, "daemon_lookups": 0}),
        Row("prefixd-ram", "walk-miss", 14, 0.15, None, {"rpcs": 0, "daemon_lookups": 3}),
        Row("hashing", "chain-16", 256, 0.4),
        Row("prefixd-ram", "chain-16", 256, 0.8, None, {"rpcs": 0, "daemon_lookups": 3}),
        Row("hashing", "chain-miss-16", 1, 0.004),
        Row("prefixd-ram", "chain-miss-16", 1, 0.0115),
        Row("prefixd-ram", "evict", 1000, 6.0),
        Row("prefixd-ram", "evict-unpinned", 1000, 8.0, None, {"beside": 100_000}),
        Row("prefixd-ram", "evict-pinned", 1000, 9.0, None, {"beside": 100_000}),
        Row("prefixd-ram", "restore-by-1", 48, 20.0, 12.0),
        Row("prefixd-ram", "restore-by-8", 48, 100.0, 18.0),
    ]
)
PEERS = Rows(
    [
        Row("memcpy", "restore", 48, 20.0, 12.8),
        Row("redis-unix", "save", 48, 200.0, 1.3),
        Row("redis-unix", "restore", 48, 250.0, 1.0),
        Row("redis-unix", "exists", 48, 0.064),
        Row("mooncake-shm", "save", 48, 800.0, 0.3),
        Row("mooncake-shm", "restore", 48, 30.0, 8.9),
    ]
)


def test_a_batch_beside_the_peers() -> None:
    batch = tables(OURS, PEERS, 5 * 2**20)[0]
    assert batch.title == "48 blocks of 5MiB (x, +: beside the memcpy of the same run)"
    assert batch.columns == (
        "", "save, GB/s", "+ us a block", "restore, GB/s", "+ us a block", "view, us", "exists, us",
    )  # fmt: skip
    assert batch.rows == [
        ("memcpy", "-", "-", "16.00", "-", "-", "-"),
        ("prefixd-ram", "5.00 (0.32x)", "708", "12.80 (0.80x)", "83", "640 (25x)", "16.0"),
        ("prefixd-disk", "-", "-", "6.40 (0.40x)", "500", "-", "-"),
        ("memcpy, beside these", "-", "-", "12.80", "-", "-", "-"),
        ("redis-unix", "1.30 (0.10x)", "3,750", "1.00 (0.08x)", "4,792", "-", "64.0"),
        ("mooncake-shm", "0.30 (0.03x)", "16,250", "8.90 (0.67x)", "208", "-", "-"),
    ]


def test_searches_evictions_and_crowds() -> None:
    _, searches, evictions, crowd = tables(OURS, Rows(), 5 * 2**20)
    assert [row[0] for row in searches.rows] == [
        "longest prefix of 30,000 tokens, hit",
        "longest prefix of 30,000 tokens, miss",
        "chain of 256 blocks of 16 tokens, all there",
        "chain of 256 blocks of 16 tokens, miss on the first",
    ]
    assert searches.rows[0][1:] == ("120", "100", "1.20x", "20.0", "0", "0")
    assert searches.rows[3][1:] == ("11.5", "4.0", "2.88x", "7.5", "-", "-")
    assert evictions.rows == [
        ("nothing", "6.00", "-"),
        ("100,000 unclaimed, older entries", "8.00", "1.33x"),
        ("100,000 claimed entries", "9.00", "1.50x"),
    ]
    assert crowd.rows == [("1", "12.00", "-"), ("8", "18.00", "1.50x")]


def test_what_was_not_measured_is_left_out() -> None:
    assert tables(Rows(), PEERS, 1) == []
    only = Rows([Row("memcpy", "restore", 1, 1.0, 5.0)])
    (batch,) = tables(only, Rows(), 2**20)
    assert batch.title.startswith("1 block of 1MiB")


def test_as_markdown() -> None:
    table = TextTable("Speed", ("", "GB/s"), [("a", "1.0"), ("b", "2.0")])
    assert as_markdown(table) == (
        "### Speed\n\n|  | GB/s |\n| --- | ---: |\n| a | 1.0 |\n| b | 2.0 |"
    )


# ---- rows


def test_rows_are_found_by_who_did_what_to_how_many() -> None:
    rows = Rows([Row("a", "save", 1, 5.0), Row("a", "save", 8, 9.0), Row("b", "save", 8, 7.0)])
    assert rows.find("a", "save", 8) == Row("a", "save", 8, 9.0)
    assert rows.find("a", "restore", 8) is None
    assert [row.peer for row in rows.of("save", 8)] == ["a", "b"]
    assert len(rows.of("save")) == 3
    assert rows.peers == ["a", "b"]


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
