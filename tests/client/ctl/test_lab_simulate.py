"""`simulate` from the command line: tables, JSON, the page, one sentence on bad input."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from prefixd.client.ctl.main import app
from prefixd.client.ctl.views.lab import fleet_view
from prefixd.client.lab.fleet import Fleet, Route, WriteRule, simulate_fleet
from prefixd.client.lab.trace import Request, TraceColumns, TraceReader, write_trace
from tests.support.page import Page


def ctl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def json_of(*arguments: object) -> Any:
    result = ctl("simulate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [Request(5000 + 100 * n, 1500, 10, (0, 1 + n % 5, 100 + n % 31)) for n in range(81)]
    write_trace(path, requests)
    return path


def test_the_options_reach_the_simulation(trace: Path) -> None:
    found = json_of(
        trace, "--nodes", 3, "--route", "hash", "--capacity-blocks", 9,
        "--shared-blocks", 12, "--write", "second-use", "--peer-reads", "--block-tokens", 500,
        "--limit", 70, "--bytes-per-token", "2KiB",
    )  # fmt: skip
    fleet = Fleet(3, 9, Route.HASH, 12, WriteRule.SECOND_USE, peer_reads=True)
    columns = TraceColumns.load(TraceReader(trace, limit=70))
    wanted = simulate_fleet(columns, fleet, block_tokens=500)
    document = wanted.to_json(bytes_per_token=2048, duration_s=6.9)
    assert {**document, "seconds": found["seconds"]}.items() <= found.items()
    assert found["trace"] == {**columns.summary(500).to_json(), "duration_s": 6.9}
    assert min(wanted.local.tokens, wanted.shared.tokens, wanted.peer.tokens) > 0
    assert found["compared"] == []


def test_a_fleet_shares_nothing_unless_told(trace: Path) -> None:
    found = json_of(trace)
    assert (found["nodes"], found["capacity_blocks"], found["route"]) == (16, 4096, "round-robin")
    assert (found["shared_blocks"], found["peer_reads"]) == (0, False)
    assert found["total_hit_tokens"] == found["local_hit_tokens"] > 0
    assert found["moved"]["total"]["blocks"] == 0
    before_name = CliRunner().invoke(app, ["simulate", "-", "--json"], input=trace.read_bytes())
    assert json.loads(before_name.stdout)["title"] == "standard input"


def test_compare(trace: Path) -> None:
    asked = (trace, "--nodes", 4, "--capacity-blocks", 8, "--shared-blocks", 40)
    found = json_of(*asked, "--compare")
    assert [(r["route"], r["shared_blocks"], r["peer_reads"]) for r in found["compared"]] == [
        (route, *way) for route in Route for way in ((0, False), (0, True), (40, False))
    ]
    for each in found["compared"]:
        alone = json_of(
            trace, "--nodes", 4, "--capacity-blocks", 8, "--route", each["route"],
            "--shared-blocks", each["shared_blocks"], *["--peer-reads"] * each["peer_reads"],
        )  # fmt: skip
        assert alone["total_hit_tokens"] == each["total_hit_tokens"]


def test_the_page_and_the_json_hold_the_same(trace: Path, tmp_path: Path) -> None:
    html, target = tmp_path / "r.html", tmp_path / "r.json"
    result = ctl("simulate", trace, "--html", html, "-o", target, "--compare")
    assert result.exit_code == 0, result.output
    page = Page(html.read_text(encoding="utf-8")).data
    assert {"version": 1, **page} == json.loads(target.read_text())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_are_whole_at_every_width(trace: Path, width: int) -> None:
    data = json_of(
        trace, "--shared-blocks", 9, "--peer-reads", "--compare", "--bytes-per-token", "128KiB"
    )
    # As large as the numbers of a real trace get.
    for name in ("local", "shared", "peer"):
        data[f"{name}_hit_tokens"] = data["total_hit_tokens"] = 987_654_321_012
    for moved in data["moved"].values():
        moved.update(tokens=987_654_321_012, bytes=900 << 50, bytes_per_second=900.0 * 2**40)
    console = Console(file=StringIO(), width=width)
    console.print(fleet_view(data))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= width
    for first in ("the node itself", "read from the shared tier", "round-robin", "least-loaded"):
        assert any(" ".join(line).startswith(first) for line in lines), first
    assert "nothing shared" in text
    assert text.count("987,654,321,012") == 3 + 1 + 4
    assert text.count("900PiB") == text.count("900TiB/s") == 4


def test_what_people_see(trace: Path) -> None:
    shown = " ".join(ctl("simulate", trace, "--nodes", 1, "--shared-blocks", 5).stdout.split())
    assert "81 requests" in shown
    assert "1 node of 4,096 blocks, round-robin, a shared tier of 5 blocks (all)" in shown
    assert "no peer reads" in shown
    assert "a second" not in shown
    found = json_of(trace, "--nodes", 1, "--shared-blocks", 5)
    assert f"{found['total_hit_tokens']:,}" in shown
    sized = ctl("simulate", trace, "--nodes", 1, "--shared-blocks", 5, "--bytes-per-token", 1024)
    assert "a second" in sized.stdout
    assert "route" not in shown.replace("round-robin", "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("{trace}", "--nodes", "0"), "a fleet has 1 to 4,096 nodes, got 0"),
        (("{trace}", "--nodes", "-3"), "a fleet has 1 to 4,096 nodes, got -3"),
        (("{trace}", "--route", "random"), "unknown route 'random', known are round-robin, hash"),
        (("{trace}", "--write", "never"), "unknown write policy 'never', known are all, second"),
        (("{trace}", "--shared-blocks", "-1"), "shared blocks must not be negative, got -1"),
        (("{trace}", "--capacity-blocks", "-1"), "of a node must not be negative, got -1"),
        (("{trace}", "--bytes-per-token", "1GB"), "unknown unit 'GB'"),
        (("{trace}", "--bytes-per-token", "0"), "at least one byte, got 0"),
        (("{trace}", "--html", "{absent}/x"), "cannot be written: no such file"),
        (("{trace}", "-o", "{absent}/x"), "cannot be written: no such file"),
        (("{bad}",), "bad.jsonl:1: the line is not JSON"),
        (("{absent}",), "absent"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    trace: Path, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    names = {"trace": trace, "bad": bad, "absent": tmp_path / "absent"}
    result = ctl("simulate", *(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_says_the_rules() -> None:
    shown = " ".join(ctl("simulate", "--help").stdout.split())
    for route in Route:
        assert f"{route}:" in shown
    assert "leaf first" in shown
