"""`prefixctl bench` from the command line: tables, rows, Markdown, and cleaning up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from prefixd.client.bench.run import BenchPlan
from prefixd.client.ctl import bench, private
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from tests.support.daemon import private_daemon

SMALL = ("--batches", "1,2", "--block-bytes", "20KiB", "--repeats", "1", "--clients", "2",
         "--pinned", "100")  # fmt: skip


def ctl(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of its daemons, and of their shared memory."""
    for name in ("disk", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "disk"))
    monkeypatch.setattr(private, "SHM", tmp_path / "shm")
    return tmp_path


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--disk.budget=0") as running:
        yield running


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "peers.jsonl"
    path.write_text(
        '{"peer": "memcpy", "op": "restore", "blocks": 2, "p50_ms": 2.0, "gb_per_s": 10.0}\n'
        '{"peer": "redis-unix", "op": "restore", "blocks": 2, "p50_ms": 200.0, "gb_per_s": 1.0}\n'
        '{"peer": "redis-unix", "op": "exists", "blocks": 2, "p50_ms": 0.06}\n'
    )
    return path


def test_everything_is_measured_and_nothing_is_left(temporary: Path) -> None:
    result = ctl(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert {row["peer"] for row in rows} == {
        "memcpy", "hashing", "prefixd-ram", "prefixd-shm", "prefixd-disk", "prefixd-data",
        "prefixd-grpc",
    }  # fmt: skip
    for row in rows:
        assert set(row) >= {"peer", "op", "blocks", "p50_ms"}
        assert ("gb_per_s" in row) == (row["op"].split("-")[0] in ("save", "restore", "view"))
    assert {row["blocks"] for row in rows if row["op"] == "save"} == {1, 2}
    assert [row["beside"] for row in rows if row["op"].startswith("evict")] == [0, 100, 100]
    assert [*temporary.glob("*/*")] == []


def test_a_table_beside_peers_and_rows_in_a_file(
    daemon: PrivateDaemon, peers: Path, tmp_path: Path
) -> None:
    """On a running daemon."""
    file = tmp_path / "rows.jsonl"
    result = ctl("ram", "walk", *SMALL, "--address", daemon.address, "--peers", peers,
                 "-o", file)  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = rows_of(file.read_text())
    restore = next(
        r for r in rows if (r["peer"], r["op"], r["blocks"]) == ("prefixd-ram", "restore", 2)
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    shown = [line for line in lines if line[:1] == ["prefixd-ram"]]
    assert f"{restore['gb_per_s']:.2f}" in shown[1], "in the table of two blocks"
    text = " ".join(result.stdout.split())
    assert "redis-unix - - 1.00 (0.01x) 99,000 - 60.0" in text
    assert "memcpy beside the peers, of memcpy here" in text
    assert "Python 3." in text


def test_markdown(daemon: PrivateDaemon, peers: Path) -> None:
    result = ctl("shm", *SMALL, "--address", daemon.address, "--peers", peers, "--markdown")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("- ")
    headings = [line for line in result.stdout.splitlines() if line.startswith("### ")]
    assert headings == [
        "### 1 block of 20KiB (x, +: beside the memcpy of the same run)",
        "### 2 blocks of 20KiB (x, +: beside the memcpy of the same run)",
    ]
    assert "| redis-unix | - | - | 1.00 (0.01x) | 99,000 | - | 60.0 |" in result.stdout


def test_of_smaller_blocks_the_largest_batch_is_measured_too(
    daemon: PrivateDaemon, peers: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    flags = ("--batches", "1,2", "--repeats", "1", "--block-bytes", "20KiB,8KiB")
    result = ctl("ram", *flags, "--address", daemon.address, "--peers", peers, "-o", file)
    assert result.exit_code == 0, result.output
    measured = {(row["block_bytes"], row["blocks"]) for row in rows_of(file.read_text())}
    assert measured == {(20480, 1), (20480, 2), (8192, 2)}
    titles = [line.strip() for line in result.stdout.splitlines() if " of " in line]
    assert [title.split(" (")[0] for title in titles if "(x" in title] == [
        "1 block of 20KiB", "2 blocks of 20KiB", "2 blocks of 8KiB",
    ]  # fmt: skip
    small = result.stdout.partition("2 blocks of 8KiB")[2]
    assert "redis-unix" not in small, "they don't say how large their blocks were"


def test_rows_before_the_name(daemon: PrivateDaemon) -> None:
    result = CliRunner().invoke(
        app, ["--json", "--address", daemon.address, "bench", "ram", *SMALL]
    )
    assert {row["peer"] for row in rows_of(result.stdout)} == {"memcpy", "prefixd-ram"}


def test_rows_for_a_full_disk(daemon: PrivateDaemon) -> None:
    arguments = "bench ram --batches 1 --block-bytes 4KiB --repeats 1 -o /dev/full --address"
    result = CliRunner().invoke(app, [*arguments.split(), daemon.address])
    assert result.exit_code == 1
    assert "prefixctl: /dev/full: cannot be written: no space left on device\n" in result.stderr


def test_a_running_daemon_is_left_alone_with_its_evictions(daemon: PrivateDaemon) -> None:
    result = ctl("evict", "--address", daemon.address)
    assert result.exit_code == 2
    assert "evict goes without --address" in " ".join(result.stderr.replace("│", " ").split())


def test_budgets_are_for_what_is_measured() -> None:
    flags = dict(
        flag.split("=") for flag in bench.tier_flags(BenchPlan(("ram", "disk"), (2,), 10**6))
    )
    assert int(flags["--ram.budget"]) >= 3 * 2 * 10**6
    assert int(flags["--disk.budget"]) > int(flags["--ram.budget"])
    assert flags["--shm.budget"] == "0"


def test_a_daemon_without_the_tier_says_so(daemon: PrivateDaemon) -> None:
    for parts in (["disk"], []):
        result = ctl(*parts, *SMALL, "--address", daemon.address)
        assert result.exit_code == 2
        assert "this daemon has no disk tier; name the parts to measure" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tape"], "no such part: tape; ram shm disk data grpc walk many evict"),
        (["ram", "--batches", "1,x"], "'1,x' is no list of numbers"),
        (["ram", "--batches", "0"], "a batch is at least 1"),
        (["ram", "--check-crc", "sometimes"], "--check-crc is one of always, disk, never"),
        (["ram", "--block-bytes", "5MB"], "unknown unit 'MB'"),
        (["ram", "--peers", "/nowhere/at/all"], "can't be read"),
        (["ram", "-o", "/nowhere/at/all"], "cannot be written"),
    ],
)
def test_what_makes_no_sense_is_bad_input(arguments: list[str], words: str) -> None:
    result = ctl(*arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_no_daemon_is_an_exit_code_of_its_own() -> None:
    result = ctl("ram", "--address", "/nowhere/at/all")
    assert result.exit_code == 3
    assert "no daemon answers" in result.stderr
