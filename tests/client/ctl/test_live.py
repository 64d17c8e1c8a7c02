"""`prefixctl replay-live` and `replay`: what they print, and how they exit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from prefixd.client.client import Client
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.replayer import keys_of_ids, replay_namespace
from prefixd.client.lab.trace import write_trace
from prefixd.client.lab.workloads import generate
from prefixd.client.saves import SaveItem
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from tests.support.daemon import private_daemon

REQUESTS = 60


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--disk.budget=0") as running:
        yield running


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl.gz"
    write_trace(path, generate("multi-turn", requests=REQUESTS, seed=2))
    return path


def run(daemon: PrivateDaemon, *arguments: object) -> Result:
    words = ["--address", daemon.address, "replay-live", *map(str, arguments)]
    return CliRunner().invoke(app, words)


def test_a_live_replay_ends_with_its_tables(daemon: PrivateDaemon, trace: Path) -> None:
    result = run(daemon, trace, "--salt", "tables", "--tier", "all", "--workers", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-1] == "0 mismatches"
    for words in ("hit rate by tokens", "hit rate by requests", "verified", "p50 ms", "p99 ms"):
        assert words in result.stdout
    for step in ("walk", "claim", "restore", "save"):
        assert any(line.strip().startswith(step) for line in lines)


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "--workers", "1"]])
def test_json_on_standard_output(daemon: PrivateDaemon, trace: Path, arguments: list[str]) -> None:
    result = run(daemon, trace, "--limit", 10, "--salt", "json", *arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["requests"] == 10
    assert data["mismatches"] == 0
    assert data["block_bytes"] == 4096
    assert data["trace"] == str(trace)


def test_json_before_the_name_and_into_a_file(
    daemon: PrivateDaemon, trace: Path, tmp_path: Path
) -> None:
    before = CliRunner().invoke(
        app, ["--json", "--address", daemon.address, "replay-live", str(trace), "--limit", "3"]
    )
    assert json.loads(before.stdout)["requests"] == 3
    file = tmp_path / "result.json"
    shown = run(daemon, trace, "--limit", 3, "-o", file)
    assert json.loads(file.read_text())["requests"] == 3
    assert shown.stdout.endswith("0 mismatches\n")


def test_what_an_earlier_replay_left_is_said_and_so_is_what_slabs_waste(
    daemon: PrivateDaemon, trace: Path
) -> None:
    for again in (False, True):
        result = run(daemon, trace, "--salt", "again", "--block-bytes", "300", "--json")
        data = json.loads(result.stdout)
        # The second time, every block that was there is hit by the first request that has it.
        assert bool(data["earlier_blocks"]) is again
        assert ("that an earlier replay had left" in result.stderr) is again
        assert ("as each takes whole slabs (ram.slab)" in result.stderr) is not again
    first, second = (
        json.loads(
            CliRunner()
            .invoke(
                app,
                ["--json", "--address", daemon.address, "replay-live", "-"],
                input=trace.read_bytes(),
            )
            .stdout
        )
        for _ in range(2)
    )
    assert first["salt"] != second["salt"]
    assert second["earlier_blocks"] == 0


def test_the_policies_need_no_daemon(trace: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["--address", "/nowhere/at/all", "replay", str(trace), "--json", "--policy", "lru",
         "--capacity-blocks", "100"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["trace"]["requests"] == REQUESTS
    assert [(row["policy"], row["capacity_blocks"]) for row in data["results"]] == [("lru", 100)]
    table = CliRunner().invoke(app, ["replay", str(trace), "--capacity-fraction", "0.5"])
    assert "LRU" in table.stdout


def test_blocks_that_are_not_what_they_must_be_are_mismatches(
    daemon: PrivateDaemon, tmp_path: Path
) -> None:
    """Another client saved other bytes under the keys of blocks 1 and 3."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [0, 1, 2, 3]}\n'
    )
    root = replay_namespace(4096, 512, "foreign").root
    foreign = [SaveItem(Key(key), bytes(4096), 512) for key in keys_of_ids(root, [1, 3])]
    good = run(daemon, trace, "--salt", "foreign", "--json")
    assert json.loads(good.stdout)["saves"] == {"saved": 4}
    with Client(daemon.address) as client, daemon.admin() as admin:
        admin.evict(2**40, [])
        client.save_many(foreign, tier=Tier.RAM, reason=SaveReason.EVICT)
    bad = run(daemon, trace, "--salt", "foreign", "--json")
    assert json.loads(bad.stdout)["mismatches"] == 0, "a run from block 0 on has none of them"
    worse = run(daemon, trace, "--salt", "foreign")
    assert worse.exit_code == 1
    assert worse.stdout.endswith("2 mismatches\n")
    assert "- block 1 at 1 has other bytes" in worse.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "lru"], "--policy"),
        (["--tier", "disk"], "no disk tier"),
        (["--tier", "tape"], "tape"),
        (["--block-bytes", "4KB"], "4KB"),
        (["--workers", "0"], "--workers"),
        (["--speed", "-1"], "--speed"),
    ],
)
def test_options_that_make_no_sense_are_bad_input(
    daemon: PrivateDaemon, trace: Path, arguments: list[str], words: str
) -> None:
    result = run(daemon, trace, *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("command", ["replay", "replay-live"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no request"),
        ("nonsense\n", ":1:"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n', "hash_ids"),
    ],
)
def test_a_trace_that_is_none_is_bad_input(
    daemon: PrivateDaemon, tmp_path: Path, content: str, words: str, command: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    result = CliRunner().invoke(app, ["--address", daemon.address, command, str(path)])
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_bad_lines_may_be_skipped_and_are_told(daemon: PrivateDaemon, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    path.write_text(good + "nonsense\n" + good)
    result = run(daemon, path, "--skip-bad", "--salt", "skip", "--json")
    assert result.exit_code == 0
    data: Any = json.loads(result.stdout)
    assert (data["requests"], data["hit_tokens"]) == (2, 512)
    assert "1 bad line" in result.stderr


def test_no_daemon_is_an_exit_code_of_its_own(trace: Path) -> None:
    result = CliRunner().invoke(app, ["--address", "/nowhere/at/all", "replay-live", str(trace)])
    assert result.exit_code == 3
    assert "no daemon answers" in result.stderr
