"""`replay` and `curve` with all their options: JSON, tables, sentences on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from prefixd.client.ctl.lab import parse_list
from prefixd.client.ctl.main import app
from prefixd.client.ctl.views.lab import curve_view, replay_view
from prefixd.client.lab.report import render_report
from prefixd.client.lab.simulate import Cell, TouchOrder, replay
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader, write_trace
from prefixd.tiers.eviction import POLICIES


def run(command: str, trace: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The JSON and the notes of a command. Raises ValueError with its sentence on bad input."""
    flags = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    result = CliRunner().invoke(app, [command, trace, *flags, "--json"])
    if result.exit_code:
        assert result.exit_code == 2, result.output
        raise ValueError(" ".join(result.stderr.replace("│", " ").split()))
    return json.loads(result.stdout), result.stderr.splitlines()


def run_replay(trace: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    return run("replay", trace, **options)


def run_curve(trace: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    return run("curve", trace, **options)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    requests = [
        Request(
            n, 500 + 500 * (n % 4), 10, (0, 1 + n % 5, 10 + n * n % 23, 40 + n % 31)[: 1 + n % 4]
        )
        for n in range(200)
    ]
    write_trace(path, requests)
    return str(path)


@pytest.mark.parametrize("command", ["replay", "curve", "analyze"])
def test_an_offline_command_loads_no_client(trace: str, command: str) -> None:
    """It would take as long to start as a small trace to replay, and memory beside a large one."""
    code = (
        "import sys; from prefixd.client.ctl.main import app\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'grpc', 'google.protobuf', 'prefixd.client.client'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", code, command, trace, "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def text(view: RenderableType) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def cells(data: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["policy"], row["capacity_blocks"]) for row in data["results"]]


def test_every_pair_of_policies_and_capacities(trace: str) -> None:
    data, notes = run_replay(trace, policy="lru, arc", capacity_blocks="3,0,8,3", per_request=True)
    assert cells(data) == [(p, c) for p in ("lru", "arc") for c in (3, 0, 8)]
    columns = TraceColumns.load(TraceReader(trace))
    assert data["trace"] == columns.summary(512).to_json()
    for row in data["results"]:
        wanted = replay(columns, Cell(row["policy"], row["capacity_blocks"]), per_request=True)
        assert {**wanted.to_json(), "seconds": row["seconds"]} == row
        assert len(row["per_request"]) == 200
    assert "blocks of 512 tokens, assumed: 500 to 666 tokens" in notes[0]
    # The ids of this trace are no tree.
    assert "requests have an id after another id than before" in notes[1]


def test_capacities_in_bytes_and_fractions(trace: str) -> None:
    unique = TraceColumns.load(TraceReader(trace)).unique_blocks
    data, _ = run_replay(
        trace,
        policy="fifo",
        capacity_blocks="7",
        capacity="10KiB,1023B,1MiB",
        block_bytes=1024,
        capacity_fraction="0.5,2",
    )
    assert [c for _, c in cells(data)] == [7, 10, 0, 1024, round(unique / 2), 2 * unique]


def test_defaults_are_all_policies_at_shares_of_the_blocks(trace: str) -> None:
    data, _ = run_replay(trace)
    unique = data["trace"]["unique_blocks"]
    capacities = dict.fromkeys(round(share * unique) for share in (0.01, 0.05, 0.1, 0.2, 0.5))
    assert cells(data) == [(policy, c) for policy in (*POLICIES, "optimal") for c in capacities]
    assert "per_request" not in data["results"][0]


def test_touch_order_block_tokens_and_limit_reach_the_replay(trace: str) -> None:
    data, _ = run_replay(
        trace, capacity_blocks="4", policy="lru", touch_order="root-mru", block_tokens=600, limit=90
    )
    columns = TraceColumns.load(TraceReader(trace, limit=90))
    wanted = replay(columns, Cell("lru", 4, TouchOrder.ROOT_MRU), block_tokens=600)
    assert data["results"][0]["total_hit_tokens"] == wanted.total_hit_tokens
    assert (data["trace"]["requests"], data["block_tokens"]) == (90, 600)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "lru,mru"}, "unknown policy 'mru', known are lru, lfu, fifo, s3fifo, arc"),
        ({"policy": ","}, "no policy given"),
        ({"capacity_blocks": "5,-1"}, "the capacity must not be negative, got -1"),
        ({"capacity_blocks": "5.5"}, "'5.5' is no number of blocks"),
        ({"capacity": "1GiB"}, r"needs the bytes of a block \(--block-bytes\)"),
        ({"capacity": "1GB", "block_bytes": 1}, "'1GB' has an unknown unit 'GB'"),
        ({"capacity": "1GiB", "block_bytes": 0}, "a size is at least 1 byte"),
        ({"capacity_fraction": "-0.5"}, "must not be negative, got -0.5"),
        ({"capacity_fraction": "inf"}, "must not be negative"),
        ({"touch_order": "leaf"}, "unknown touch order 'leaf', known are in-order, root-mru"),
        ({"block_tokens": 0}, "--block-tokens is at least 1"),
    ],
)
def test_bad_options_are_told_before_anything_is_read(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        run_replay("there is no such file", **options)
    assert "no such file" not in str(caught.value)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    path.write_text(good + "{}\n" + good)
    for run in (run_replay, run_curve):
        with pytest.raises(ValueError, match=r"bad.jsonl:2: "):
            run(str(path))
    data, notes = run_replay(str(path), skip_bad=True, policy="lru", capacity_blocks="1")
    assert data["trace"]["requests"] == 2
    assert "1 bad line" in notes[1]


def test_a_fraction_means_infinity_nowhere() -> None:
    assert parse_list("number", None, int) == []
    assert parse_list("number", " 3 ,1,3", int) == [3, 1]


def test_the_table(trace: str) -> None:
    data, _ = run_replay(trace, policy="s3fifo", capacity_blocks="20", touch_order="root-mru")
    shown = text(replay_view(data, block_bytes=1 << 20))
    row = data["results"][0]
    for expected in (
        "200 requests",
        "S3-FIFO, root-mru",
        "20MiB",
        f"{row['total_hit_tokens']:,}",
        f"{100 * row['overall_hit_rate']:.2f} %",
        f"{row['moves_per_access']:.2f}",
    ):
        assert expected in shown


def test_curve_with_samples_and_replays(trace: str) -> None:
    data, _ = run_curve(
        trace,
        sample_rate="0.5",
        sample_blocks="20",
        capacity_blocks="10",
        policy="lru,arc",
        block_bytes=4096,
        points=30,
    )
    curve = {point["capacity_blocks"]: point for point in data["curve"]["points"]}
    assert len(curve) <= 30
    assert (
        data["curve"]["knee"]["capacity_bytes"] == 4096 * data["curve"]["knee"]["capacity_blocks"]
    )
    lru = data["results"][0]
    assert lru["total_hit_tokens"] == curve[10]["hit_tokens"]
    assert data["sampled"][0]["sample_rate"] == pytest.approx(0.5)
    assert data["sampled"][1]["sampled_blocks"] == 20
    assert data["title"] == "trace.jsonl"
    assert "trace.jsonl" in render_report(data)
    shown = text(curve_view(data))
    assert "knee" in shown
    assert "ARC" in shown
    assert f"{data['sampled'][0]['sampled_blocks']:,}" in shown


def test_no_replays_unless_capacities_are_named(trace: str) -> None:
    data, _ = run_curve(trace)
    assert (data["results"], data["sampled"]) == ([], [])
    assert "200 requests" in text(curve_view(data))


def test_a_streamed_sample_is_the_curve(trace: str) -> None:
    exact, _ = run_curve(trace)
    data, _ = run_curve(trace, sample_only=True, sample_rate="1")
    assert data["curve"]["sample_rate"] == 1.0
    assert data["curve"]["knee"] == exact["curve"]["knee"]
    assert data["trace"] == exact["trace"]
    assert data["sampled"] == []
    text(curve_view(data))
    for options in ({}, {"sample_rate": "0.1,0.2"}, {"sample_rate": "1", "capacity_blocks": "5"}):
        with pytest.raises(ValueError, match="it takes one sample, and no capacities"):
            run_curve(trace, sample_only=True, **options)


def test_a_trace_without_hits(tmp_path: Path) -> None:
    path = tmp_path / "cold.jsonl"
    write_trace(path, [Request(0, 1000, 1, (1, 2)), Request(0, 0, 1, ())])
    data, _ = run_curve(str(path), sample_rate="0.5")
    assert data["curve"]["knee"] is None
    assert "none" in text(curve_view(data))


@pytest.mark.parametrize(
    "options", [{"sample_rate": "0"}, {"sample_rate": "x"}, {"sample_blocks": "0"}]
)
def test_bad_samples_are_told_before_anything_is_read(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sampl") as caught:
        run_curve("there is no such file", **options)
    assert "no such file" not in str(caught.value)


def test_what_hits_are_worth_and_when_they_come(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [Request(1000 * n, 1000, 1, (n % 2, 2 + n % 2), tenant="ab"[n % 2])
                for n in range(10)]  # fmt: skip
    write_trace(path, requests, 512)
    data, _ = run_replay(
        str(path), policy="lru", capacity_blocks="4", prefill_tokens_per_s=1000, gpu_hour=3.6,
        gpus=2, over_time=2, warm_up="2s",
    )  # fmt: skip
    (row,) = data["results"]
    assert "per_request" not in row
    assert row["total_hit_tokens"] == 8_000
    assert row["worth"]["ttft_saved_s"] == 0.8
    assert row["worth"]["money_saved"] == pytest.approx(8 * 2 / 3600 * 3.6)
    assert [part["hit_rate"] for part in row["over_time"]] == [0.6, 1.0]
    assert row["after_warm_up"]["hit_rate"] == 1.0
    assert [(each["tenant"], each["hit_rate"]) for each in row["by_owner"]] == [
        ("a", 0.8), ("b", 0.8),
    ]  # fmt: skip
    assert data["version"] == 1
    with pytest.raises(ValueError, match="money needs the speed of prefill"):
        run_replay(str(path), gpu_hour=1)
