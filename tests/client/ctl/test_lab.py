"""Commands over traces: tables, JSON, exit codes, one sentence on bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from prefixd.client.ctl import lab
from prefixd.client.ctl.main import app
from prefixd.client.lab.formats import readable
from prefixd.client.lab.trace import Request, TraceReader, format_request, write_trace
from prefixd.client.lab.workloads import PROFILES


def ctl(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def json_of(*arguments: object) -> Any:
    result = ctl(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [Request(1000 * n, 1200, 10, (0, 1 + n % 5, 100 + n)) for n in range(40)]
    write_trace(path, requests)
    return path


def test_profile_names_in_the_help_are_the_profiles() -> None:
    assert lab.PROFILE_NAMES.split("|") == list(PROFILES)
    text = lab.generate.__doc__ or ""
    for name in PROFILES:
        assert f"[bold]{name}[/]" in text


@pytest.mark.parametrize("name", list(PROFILES))
def test_generate(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out.jsonl.gz"
    arguments = ("trace", "generate", "--profile", name, "-n", 60, "--seed", 3, "-o", path)
    found = json_of(*arguments)
    once = path.read_bytes()
    requests = list(TraceReader(path))
    assert found["trace"]["requests"] == len(requests) == 60
    assert found["trace"]["blocks"] == sum(len(r.hash_ids) for r in requests)
    assert found["trace"]["unique_blocks"] == len({i for r in requests for i in r.hash_ids})
    assert (found["profile"], found["seed"], found["block_tokens"]) == (name, 3, 512)
    result = ctl(*arguments, "--force")
    assert result.exit_code == 0
    assert "60 in " in result.stdout
    assert path.read_bytes() == once


def test_generate_to_standard_output_leaves_the_table_to_standard_error() -> None:
    result = ctl("trace", "generate", "--profile", "code", "-n", 5, "-o", "-")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 5
    assert all(json.loads(line)["hash_ids"] for line in result.stdout.splitlines())
    assert "requests" in result.stderr
    both = ctl("trace", "generate", "--profile", "code", "-n", 5, "-o", "-", "--json")
    assert both.exit_code == 2
    assert both.stdout == ""
    assert "cannot both go to standard output" in both.stderr


def test_convert(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"token_ids": [1, 2, 3, 4, 5]}\n{"token_ids": [1, 2, 3, 4]}\nbad\n')
    arguments = ("trace", "convert", source, "-o", output, "--block-tokens", 4, "--skip-bad")
    found = json_of(*arguments)
    assert found["formats"] == {"token-ids": 2}
    assert found["bad_records"] == 1
    assert [r.hash_ids for r in TraceReader(output)] == [(0, 1), (0,)]
    result = ctl(*arguments, "--force")
    assert "2 of token-ids" in result.stdout
    assert "note: 1 bad record skipped" in result.stderr


def test_convert_reads_standard_input(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    result = ctl("trace", "convert", "-", "-o", output, stdin=b'{"prompt": "hello"}\n')
    assert result.exit_code == 0, result.stderr
    assert list(TraceReader(output)) == [Request(0, 2, 0, (0,))]


def test_formats_are_listed_with_examples() -> None:
    shown = ctl("trace", "formats").stdout
    for row in readable():
        assert row.name in shown
    listed = json.loads(ctl("--json", "trace", "formats").stdout)["formats"]
    assert [row["name"] for row in listed] == [row.name for row in readable()]


def test_a_failed_convert_leaves_the_earlier_trace(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"token_ids": [1, 2]}\n')
    assert ctl("trace", "convert", source, "-o", output, "--force").exit_code == 0
    before = output.read_bytes()
    output.chmod(0o640)
    source.write_text('{"token_ids": [1, 2]}\nbad\n')
    assert ctl("trace", "convert", source, "-o", output, "--force").exit_code == 2
    assert output.read_bytes() == before
    source.write_text('{"token_ids": [1, 2, 3]}\n')
    assert ctl("trace", "convert", source, "-o", output, "--force").exit_code == 0
    assert output.read_bytes() != before
    assert output.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_analyze(trace: Path, tmp_path: Path) -> None:
    found = json_of("analyze", trace)
    assert found["trace"]["requests"] == 40
    assert found["sharing"]["common_prefix_blocks"] == 1
    assert found["saving"]["infinite_hit_tokens"] == 39 * 512 + 35 * 512
    result = ctl("analyze", trace, "-o", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == found
    assert f"{39 * 512 + 35 * 512:,} tokens" in result.stdout
    assert "shared prefix, tokens" in result.stdout
    before_name = ctl("--json", "analyze", trace)
    assert json.loads(before_name.stdout) == found
    assert json_of("analyze", trace, "--limit", 5)["trace"]["requests"] == 5


def test_lengths_that_disagree_are_told_once(trace: Path) -> None:
    result = ctl("analyze", trace, "--block-tokens", 256)
    assert result.exit_code == 2
    assert "--block-tokens 256 contradicts the trace: its blocks have 400 to 599" in result.stderr
    with trace.open("ab") as file:
        file.write(format_request(Request(99_000, 1200, 1, (0, 1))))
    result = ctl("analyze", trace, "--block-tokens", 512)
    assert result.exit_code == 0
    assert result.stderr.count("input_length disagrees") == 1
    assert "1 of 41 requests, first in line 41" in result.stderr


def test_json_may_stand_alone(trace: Path) -> None:
    result = ctl("analyze", trace, "--json")
    assert json.loads(result.stdout)["trace"]["requests"] == 40
    result = ctl("analyze", trace, "--json", "--limit", 3)
    assert json.loads(result.stdout)["trace"]["requests"] == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("analyze", "absent.jsonl"), "absent.jsonl: cannot be opened: no such file"),
        (("analyze", "{bad}"), "bad.jsonl:1: the line is not JSON (Expecting value at column 1)"),
        (("analyze", "{bad}", "--skip-bad"), "no request in it, all lines are bad; the first: "),
        (("analyze", "{trace}", "-o", "{absent}/x"), "cannot be written: no such file"),
        (("analyze", "{trace}", "--block-tokens", "0"), "--block-tokens is at least 1"),
        (("trace", "generate", "--profile", "x", "-o", "-"), "there is no profile 'x'"),
        (("trace", "generate", "--profile", "rag", "-o", "{absent}/t"), "cannot be written"),
        (("trace", "convert", "{bad}", "-o", "{out}"), "bad.jsonl:1: the line is not JSON"),
        (("trace", "convert", "{trace}", "-o", "{trace}", "--force"), "is a file to read"),
        (("trace", "convert", "{trace}", "-o", "-", "--time-unit", "h"), "the time unit is s, ms"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    trace: Path, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    names = {"trace": trace, "bad": bad, "absent": tmp_path / "absent", "out": tmp_path / "out"}
    before = trace.read_bytes()
    result = ctl(*(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert problem in " ".join(result.stderr.split()).replace("│ ", "")
    assert "Traceback" not in result.output
    assert trace.read_bytes() == before
