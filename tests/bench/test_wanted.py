"""The goals of benchmarks, applied to invented rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prefixd.client.bench.bench_report import Rows
from prefixd.client.bench.samples import Row
from tests.bench import wanted as module
from tests.bench.wanted import MeasuredGoal, best, goals_table, measured_goals
from tests.client.bench.test_bench_report import OURS, PEERS


def test_the_measured_goals() -> None:
    found = {
        one.name: (round(one.value, 3), one.good) for one in measured_goals(OURS, PEERS, 5 * 2**20)
    }
    assert found == {
        "restore of 48 blocks, prefixd-ram / memcpy": (0.8, True),
        "restore of 48 blocks, prefixd-ram / mooncake-shm": (1.5, True),
        "view of 48 blocks, prefixd-ram / memcpy": (25.0, True),
        "save of 48 blocks, prefixd-ram / redis-unix": (4.0, True),
        "restore of 48 blocks, prefixd-disk / memcpy": (0.4, False),
        "exists of 48 blocks, prefixd-ram / redis-unix": (4.0, True),
        "longest prefix of 30,000 tokens, hit / hashing": (1.2, True),
        "longest prefix of 30,000 tokens, miss / hashing": (1.5, False),
        "chain of 256 blocks of 16 tokens, all there / hashing": (2.0, True),
        "chain of 256 blocks of 16 tokens, miss on the first, beside the hash": (7.5, True),
        "look-ups that all searches cost the daemon": (3, False),
        "eviction beside 100,000 claimed entries / beside as many unclaimed": (1.125, True),
        "bytes/s of 8 processes / of one": (1.5, True),
    }
    table = goals_table(measured_goals(OURS, PEERS, 5 * 2**20), 5 * 2**20)
    assert table.rows[2] == (
        "view of 48 blocks, prefixd-ram / memcpy", "at least 20x", "25x", "yes",
    )  # fmt: skip
    assert table.rows[4][1:] == ("at least 0.6x", "0.40x", "no")


def test_the_best_is_the_fastest_that_keeps_something() -> None:
    rows = Rows(
        [Row("memcpy", "restore", 8, 1.0), Row("a", "restore", 8, 9.0), Row("b", "restore", 8, 7.0)]
    )
    assert best(rows, "restore", 8) == rows.find("b", "restore", 8)
    assert best(rows, "restore", 1) is None
    assert rows.batches == [8]


def test_the_goals_of_the_data_socket() -> None:
    rows = Rows(
        [
            Row("memcpy", "restore", 1, 1.0, 5.0),
            Row("prefixd-data", "restore", 1, 4.0, 1.3),
            Row("prefixd-grpc", "restore", 1, 12.0, 0.4),
            *(Row("prefixd-data", op, 48, 100.0, 2.5) for op in ("restore", "save", "exists")),
            *(Row("prefixd-grpc", op, 48, 190.0, 1.3) for op in ("restore", "save", "exists")),
        ]
    )
    peers = Rows([Row("mooncake-tcp", "save", 48, 300.0, 0.8)])
    found = {one.name: (one.value, one.limit) for one in measured_goals(rows, peers, 5 * 2**20)}
    assert found == {
        "restore of 48 blocks, prefixd-data / prefixd-grpc": (1.9, 2.0),
        "save of 48 blocks, prefixd-data / prefixd-grpc": (1.9, 1.7),
        "exists of 48 blocks, prefixd-data / prefixd-grpc": (1.9, 2.0),
        "save of 48 blocks, prefixd-data / mooncake-tcp": (3.0, 1.5),
        "restore of 1 block, prefixd-data / prefixd-grpc": (3.0, 2.5),
    }
    assert "prefixd-data" not in str(measured_goals(rows, peers, 2**16))


def test_small_blocks_have_goals_of_their_own() -> None:
    ram_save = Row("prefixd-disk", "save", 48, 100.0, 2.5)
    rows = Rows([*OURS.of("restore"), *OURS.of("save"), *OURS.of("view"), ram_save])
    found = {
        one.name: (one.value, one.limit, one.good)
        for one in measured_goals(rows, PEERS, 192 * 2**10)
    }
    assert found["view of 48 blocks, prefixd-ram"] == (640.0, 250, False)
    assert found["restore of 48 blocks, prefixd-ram / mooncake-shm"] == (1.5, 2, False)
    assert found["save of 48 blocks, prefixd-disk / prefixd-ram"] == (0.5, 0.35, True)


@pytest.mark.parametrize(
    ("value", "at_least", "good"),
    [(2.0, True, True), (1.9, True, False), (2.0, False, True), (2.1, False, False)],
)
def test_reaching_the_limit_is_good(value: float, at_least: bool, good: bool) -> None:
    assert MeasuredGoal("x", value, 2.0, at_least).good is good


def test_the_tables_of_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, peers = tmp_path / "rows.jsonl", tmp_path / "peers.jsonl"
    rows = [row.of_blocks(size) for size in (2**16, 5 * 2**20) for row in OURS.of("restore")]
    ours.write_text("".join(json.dumps(row.as_dict()) + "\n" for row in rows))
    peers.write_text("".join(json.dumps(row.as_dict()) + "\n" for row in PEERS.of("restore")))
    monkeypatch.setattr(sys, "argv", ["wanted", str(ours), str(peers)])
    module.main()
    large, small = capsys.readouterr().out.split("### ")[1:]
    assert large.startswith("what is wanted, blocks of 5MiB")
    assert (
        "| restore of 48 blocks, prefixd-ram / mooncake-shm | at least 1.5x | 1.50x | yes |"
        in large
    )
    assert small.startswith("what is wanted, blocks of 64KiB")
    assert "mooncake" not in small, "rows of peers without a size were used for another size"
