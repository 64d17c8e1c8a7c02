"""`curve` and `advise` from the command line: tables, JSON, pictures, one sentence on bad input."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from prefixd.client.ctl.main import app
from prefixd.client.lab.trace import Request, write_trace


def ctl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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


class EmbeddedData(HTMLParser):
    """Finds the JSON in a page."""

    data: Any = None
    _inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.data = json.loads(data)
            self._inside = False


def test_curve(trace: Path) -> None:
    found = json_of("curve", trace)
    assert found["title"] == "trace.jsonl"
    assert found["trace"]["requests"] == 40
    assert found["trace"]["infinite_hit_tokens"] == 39 * 512 + 35 * 512
    last = found["curve"]["points"][-1]
    assert last["hit_tokens"] == found["trace"]["infinite_hit_tokens"]
    assert found["results"] == found["sampled"] == []
    result = ctl("curve", trace)
    assert result.exit_code == 0
    assert f"{39 * 512 + 35 * 512:,}" in result.stdout
    assert "knee" in result.stdout


def test_curve_with_everything(trace: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("html", "svg", "json")}
    result = ctl(
        "curve", trace, "--policy", "lru,arc", "--capacity-blocks", "3,20", "--sample-rate", "1",
        "--block-bytes", "1MiB", "--jobs", 1,
        "--html", files["html"], "--svg", files["svg"], "-o", files["json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(files["json"].read_text())
    assert [(r["policy"], r["capacity_blocks"]) for r in found["results"]] == [
        ("lru", 3), ("lru", 20), ("arc", 3), ("arc", 20),
    ]  # fmt: skip
    lru = [r["total_hit_tokens"] for r in found["results"][:2]]
    at = {p["capacity_blocks"]: p["hit_tokens"] for p in found["curve"]["points"]}
    assert lru[0] == at[3]
    assert found["sampled"][0]["max_absolute_error"] == 0
    assert found["curve"]["points"][-1]["capacity_bytes"] % (1 << 20) == 0
    page = EmbeddedData()
    page.feed(files["html"].read_text(encoding="utf-8"))
    assert {"version": 1, **page.data} == found
    assert "<svg" in files["svg"].read_text(encoding="utf-8")


def test_a_page_compares_all_policies_without_being_asked(trace: Path, tmp_path: Path) -> None:
    found = json_of("curve", trace, "--html", tmp_path / "r.html", "--jobs", 1)
    assert {r["policy"] for r in found["results"]} == {
        "lru",
        "lfu",
        "fifo",
        "s3fifo",
        "arc",
        "optimal",
    }
    named = json_of("curve", trace, "--html", tmp_path / "n.html", "--capacity-blocks", 7)
    assert {r["capacity_blocks"] for r in named["results"]} == {7}


def test_json_is_not_written_under_the_name_of_a_page(trace: Path, tmp_path: Path) -> None:
    found = ctl("curve", trace, "-o", tmp_path / "x.html")
    assert found.exit_code == 2
    assert "--output writes JSON" in found.stderr
    assert "--html" in found.stderr
    assert not (tmp_path / "x.html").exists()


def test_a_page_says_what_hits_save(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = json_of(
        "curve", trace, "--html", page, "--prefill-tokens-per-s", 1000, "--gpu-hour", 3.6,
        "--gpus", 2, "--block-bytes", "1MiB",
    )  # fmt: skip
    # 40 requests hit (0, 512, 1024) tokens in an unlimited cache; money is 2 GPUs' seconds / 1000.
    tokens = found["trace"]["infinite_hit_tokens"]
    best = max(found["results"], key=lambda row: row["total_hit_tokens"])
    assert best["worth"]["money_saved"] == pytest.approx(best["total_hit_tokens"] / 1000 * 2 / 1000)
    assert best["total_hit_tokens"] <= tokens
    assert best["capacity_bytes"] == best["capacity_blocks"] << 20
    knee = found["curve"]["knee"]
    assert knee["worth"]["gpu_hours_saved"] == pytest.approx(knee["hit_tokens"] / 1000 * 2 / 3600)
    text = page.read_text()
    parser = EmbeddedData()
    parser.feed(text)
    assert parser.data["curve"]["knee"]["worth"] == knee["worth"]
    assert parser.data["prices"] == {"prefill_tokens_per_s": 1000, "gpu_hour": 3.6, "gpus": 2}
    for words in ("What it saves", "saved a month", "GPU hours saved", "at most", "MiB"):
        assert words in text
    without = tmp_path / "without.html"
    json_of("curve", trace, "--html", without)
    assert "What it saves" not in without.read_text()


def test_results_as_csv(trace: Path, tmp_path: Path) -> None:
    """The table of a command, or its figures as one row; the names are those of the JSON."""
    for name, arguments in {
        "replay": ("--policy", "lru,fifo", "--capacity-blocks", "5,9", "--over-time", "2"),
        "curve": ("--points", "4"),
        "simulate": ("--nodes", "2", "--compare"),
        "analyze": (),
    }.items():
        path = tmp_path / f"{name}.csv"
        found = json_of(name, trace, *arguments, "-o", path)
        assert found["version"] == 1
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        match name:
            case "replay":
                wanted = found["results"]
                assert rows[0]["hit_tokens_per_request.p50"]
                assert "over_time" not in rows[0]
            case "curve":
                wanted = found["curve"]["points"]
            case "simulate":
                wanted = [found, *found["compared"]]
                assert rows[1]["moved.total.blocks"] == str(
                    found["compared"][0]["moved"]["total"]["blocks"]
                )
            case _:
                wanted = [found]
        assert len(rows) == len(wanted)
        wanted = [{k: v for k, v in want.items() if k != "version"} for want in wanted]
        for row, want in zip(rows, wanted, strict=True):
            plain = {k: v for k, v in want.items() if isinstance(v, str | int)}
            assert plain
            assert {k: row[k] for k in plain} == {k: str(v) for k, v in plain.items()}


def test_curve_from_a_sample_only(trace: Path, tmp_path: Path) -> None:
    arguments = ("curve", trace, "--sample-only", "--sample-rate", "1.0")
    found = json_of(*arguments, "--html", tmp_path / "r.html")
    assert found["curve"]["sample_rate"] == 1
    assert found["trace"]["blocks"] == 120
    assert found["trace"]["infinite_hit_tokens"] == 39 * 512 + 35 * 512
    assert "LRU, estimated" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert ctl(*arguments, "--capacity-blocks", 5).exit_code == 2


def test_advise(trace: Path) -> None:
    arguments = ("advise", trace, "--model-shape", "2,4,64,2", "--hit-rate", "25%")
    found = json_of(*arguments, "--disk", "1GiB", "--ram", "4MiB")
    assert found["bytes_per_token"] == 2 * 2 * 4 * 64 * 2
    assert found["wanted_hit_rate"] == 0.25
    assert found["hit_rate"] >= 0.25
    assert [t["limit_bytes"] for t in found["tiers"]] == [4 << 20, 0, 1 << 30]
    assert found["tiers"][0]["budget_bytes"] == 4 << 20
    result = ctl(*arguments, "--disk", "1GiB", "--ram", "4MiB")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert 'budget = "4MiB"' in text
    assert "working set" in text
    assert "20 % headroom" in text
    assert "Sorting requests by shared prefix within 10s windows" in text
    by_size = json_of("advise", trace, "--bytes-per-token", "2KiB", "--fraction-of-best", "0.5")
    assert by_size["bytes_per_token"] == 2048
    assert by_size["wanted_hit_rate"] == pytest.approx(by_size["best_hit_rate"] / 2)
    from_stdin = CliRunner().invoke(
        app, ["advise", "-", "--bytes-per-token", "2KiB", "--json"], input=trace.read_bytes()
    )
    assert json.loads(from_stdin.stdout)["unique_blocks"] == by_size["unique_blocks"]
    tight = ctl("advise", trace, "--bytes-per-token", "1MiB", "--ram", "600MiB")
    assert "find no room within these limits" in " ".join(tight.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("curve", "{bad}"), "bad.jsonl:1: the line is not JSON"),
        (("curve", "{trace}", "--policy", "clock", "--capacity-blocks", "5"), "'clock'"),
        (("curve", "{trace}", "--capacity-blocks", "-5"), "negative"),
        (("curve", "{trace}", "--capacity-blocks", "five"), "'five' is no number of blocks"),
        (("curve", "{trace}", "--touch-order", "up"), "unknown touch order 'up'"),
        (("curve", "{trace}", "--sample-rate", "2"), "2.0"),
        (("curve", "{trace}", "--svg", "{absent}/x.svg"), "cannot be written: no such file"),
        (("curve", "{trace}", "--html", "{absent}/x"), "cannot be written: no such file"),
        (("advise", "{trace}"), "--bytes-per-token, --model-shape or --model-config"),
        (("advise", "{trace}", "--bytes-per-token", "8GB"), "unknown unit 'GB'"),
        (("advise", "{trace}", "--model-shape", "1,2"), "is no model shape"),
        (("advise", "{trace}", "--bytes-per-token", "1", "--hit-rate", "x"), "is no share"),
        (("advise", "{trace}", "--bytes-per-token", "1", "--hit-rate", "1"), "no cache hits"),
        (("advise", "{bad}", "--bytes-per-token", "1"), "bad.jsonl:1: the line is not JSON"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    trace: Path, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    names = {"trace": trace, "bad": bad, "absent": tmp_path / "absent"}
    result = ctl(*(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert problem in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
