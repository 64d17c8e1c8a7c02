"""The HTML report and the chart: every figure comes from the data, and the page fetches nothing."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from prefixd.client.lab import page as page_module
from prefixd.client.lab.page import SCRIPT, STYLE, count, value_at
from prefixd.client.lab.report import render_report
from prefixd.proto.units import format_bytes, percent
from tests.support.chromium import browser, find_chromium
from tests.support.page import Page

Json = dict[str, Any]
POLICIES = ("lru", "lfu", "fifo", "s3fifo", "arc")
CAPACITIES = (0, 100, 4096, 30_000)


def point(capacity: int) -> Json:
    hit_tokens = 400_000 * capacity // (capacity + 3000)
    return {
        "capacity_blocks": capacity,
        "hit_tokens": hit_tokens,
        "hit_rate": hit_tokens / 1_000_000,
    }


def result(policy: str, capacity: int) -> Json:
    hit_tokens = point(capacity)["hit_tokens"] * (100 - 3 * POLICIES.index(policy)) // 100
    return {
        "policy": policy,
        "capacity_blocks": capacity,
        "touch_order": "in-order",
        "total_hit_tokens": hit_tokens,
        "total_prompt_tokens": 1_000_000,
        "overall_hit_rate": hit_tokens / 1_000_000,
        "final_cache_blocks": capacity * 3 // 4 if policy == "s3fifo" else capacity,
        "evictions": 1234 + capacity,
        "ghost_blocks": capacity // 3,
        "accesses": 40_000,
        "seconds": 0.25,
    }


def report_data(**changes: Any) -> Json:
    capacities = [round(2 ** (n / 4)) for n in range(64)]
    data: Json = {
        "title": "a </script><!-- <b> & 'trace'",
        "prefixd_version": "1.2.3",
        "block_tokens": 512,
        "block_bytes": None,
        "prices": None,
        "trace": {
            "requests": 1200,
            "blocks": 40_000,
            "unique_blocks": 50_000,
            "prompt_tokens": 1_000_000,
            "infinite_hit_tokens": 378_901,
            "infinite_hit_rate": 0.378901,
        },
        "curve": {
            "policy": "lru",
            "points": [point(c) for c in sorted(set(capacities))],
            "knee": {**point(8000), "capacity_bytes": 8000 << 20},
        },
        "sampled": [
            {
                "sample_rate": 0.01,
                "mean_absolute_error": 0.0042,
                "points": [point(c) for c in sorted(set(capacities))],
            }
        ],
        "results": [result(p, c) for c in CAPACITIES for p in POLICIES],
    }
    return {**data, **changes}


def test_every_figure_of_the_page_is_the_datas() -> None:
    data = report_data()
    page = Page(render_report(data))
    assert page.data == data
    assert len(page.figures) > 100
    for path, text, _ in page.figures:
        value = value_at(data, path)
        forms = {count(value), percent(value), format_bytes(round(value))}
        assert any(form in text for form in forms), (path, text, forms)
    shown = {path for path, _, _ in page.figures}
    for index in range(len(data["results"])):
        for name in ("overall_hit_rate", "total_hit_tokens", "final_cache_blocks", "evictions"):
            assert f"results.{index}.{name}" in shown


def test_numbers_in_the_tables_all_say_where_they_come_from() -> None:
    """Without the marked figures no number is left in any cell."""
    html = render_report(report_data())
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html, re.DOTALL)
    assert len(cells) > 100
    for cell in cells:
        rest = re.sub(r"<span data-figure=.*?</span>", "", cell)
        # Names of policies and the widths of bars are left.
        rest = re.sub(r"<[^>]*>|S3-FIFO", "", rest)
        assert not re.search(r"\d", rest), cell


def test_the_best_policy_of_a_row_stands_out() -> None:
    html = render_report(report_data())
    best = re.findall(r'<td class="best"><span data-figure="results\.(\d+)\.overall', html)
    indexes = [int(index) for index in best]
    assert [POLICIES[i % 5] for i in indexes if i >= 5] == ["lru"] * 3
    assert [i for i in indexes if i < 5] == [0, 1, 2, 3, 4]  # capacity 0: all the same


def test_style_and_script_know_the_page_they_are_for() -> None:
    html = render_report(report_data())
    page = Page(html)
    classes = {
        word
        for _, name, value in page.attributes
        if name == "class"
        for word in (value or "").split()
    }
    # These only label things for readers of the source.
    for name in set(" ".join(classes).split()) - {"lru-curve", "s-0"}:
        assert f".{name}" in STYLE, name
    for name in re.findall(r'getElementById\("(\w+)"\)', SCRIPT):
        assert f'id="{name}"' in html
    for name in re.findall(r'querySelector(?:All)?\("(\w+)\.(\w+)"\)', SCRIPT):
        assert f'<{name[0]} class="{name[1]}"' in html
    assert "</" not in SCRIPT + STYLE


def test_titles_cannot_break_out() -> None:
    html = render_report(report_data())
    assert html.count("</script>") == 2
    assert "<!--" not in html
    assert "a &lt;/script&gt;" in html


def test_nothing_is_fetched() -> None:
    html = render_report(report_data())
    page = Page(html)
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "xlink:href"), (tag, name, value)
        if name == "href":
            assert value == "data:,"
    assert not re.search(r"https?:|@import|url\(|//[a-z]", html.replace("data:", ""))
    assert "default-src 'none'" in html


@pytest.mark.parametrize(
    "changes",
    [
        {"results": []},
        {"sampled": []},
        {"block_bytes": 64 << 20},
        {"results": [{**result("arc", 100), "policy": "mine"}]},
        {"results": [result("lru", 100), {**result("lru", 100), "touch_order": "root-mru"}]},
    ],
)
def test_reports_of_other_shapes(changes: Json) -> None:
    data = report_data(**changes)
    page = Page(render_report(data))
    assert page.data == data
    assert ("Policies" in page.texts) == bool(data["results"])
    assert ("sampled" in " ".join(page.texts)) == bool(data["sampled"])
    assert ("GiB" in " ".join(page.texts)) == bool(data["block_bytes"])
    assert ("root-mru" in page.texts) == (len(data["results"]) == 2)


def test_a_curve_without_knee_or_hits() -> None:
    points = [{"capacity_blocks": 1, "hit_tokens": 0, "hit_rate": 0.0}]
    trace = {**report_data()["trace"], "infinite_hit_rate": 0.0, "infinite_hit_tokens": 0}
    curve = {"policy": "lru", "points": points, "knee": None}
    data = report_data(trace=trace, curve=curve, results=[], sampled=[])
    assert "hit rate at the knee" not in Page(render_report(data)).texts
    assert answer(data) == "No prompt begins as an earlier one does: a cache hits nothing."


def answer(data: Json) -> str:
    """The first paragraph of the page, which answers without another."""
    found = re.search(r'<p class="answer">(.*?)</p>', render_report(data), re.DOTALL)
    assert found is not None
    return re.sub(r"<[^>]*>", "", found[1])


def test_the_first_paragraph_answers() -> None:
    data = report_data(
        block_bytes=1 << 20, prices={"prefill_tokens_per_s": 8000.0, "gpu_hour": 2.5, "gpus": 2}
    )
    for row in data["results"]:
        row["capacity_bytes"] = row["capacity_blocks"] << 20
    data["results"][CAPACITIES.index(4096) * 5 + POLICIES.index("arc")]["total_hit_tokens"] = 10**6
    data["curve"]["knee"]["worth"] = {
        "ttft_saved_s": 0.5, "gpu_hours_saved": 12.34, "money_saved": 30.85,
        "money_saved_per_month": 1234.5,
    }  # fmt: skip
    assert answer(data) == (
        "7.81GiB is where more memory starts to pay less: LRU hits 29.09 % of the prompt tokens "
        "there; a cache without limits, 37.89 %. On average that saves 0.5 s of a request's time "
        "to first token, and over the whole trace 12.3 GPU hours, which cost 30.85; with the same "
        "traffic all the time, 1,234 a month. Of the replayed policies, the best is LRU from 0B to "
        "100MiB, ARC at 4GiB, LRU at 29.3GiB. As given: a block takes 1MiB, a replica of 2 GPUs "
        "prefills 8,000 tokens a second, a GPU hour costs 2.5."
    )


def test_an_answer_says_nothing_of_what_was_not_given() -> None:
    assert answer(report_data(results=[result("lru", 100)])) == (
        "8,000 blocks is where more memory starts to pay less: LRU hits 29.09 % of the prompt "
        "tokens there; a cache without limits, 37.89 %."
    )


def test_the_optimum_is_no_policy_to_choose_and_keeps_nothing_to_show() -> None:
    best = {**result("lru", 100), "policy": "optimal", "total_hit_tokens": 10**6}
    data = report_data(results=[result("lru", 100), result("arc", 100), best])
    assert answer(data).endswith("the best is LRU at 100 blocks.")
    html = render_report(data)
    assert "results.2.total_hit_tokens" in html
    assert "results.2.evictions" not in html


def test_an_estimate_says_so() -> None:
    data = report_data(results=[], sampled=[])
    data["curve"]["sample_rate"] = 0.02
    page = Page(render_report(data))
    text = " ".join(page.texts)
    assert ("curve.sample_rate", "2.00 %") in [figure[:2] for figure in page.figures]
    assert "LRU, estimated" in text
    assert "exact" not in text
    assert "The line is exact" in " ".join(Page(render_report(report_data())).texts)


def test_the_marks_are_where_their_values_are() -> None:
    data = report_data()
    svg = page_module.curve_chart(data, 900, 430)
    root = ElementTree.fromstring(svg)
    x_min, x_max = float(root.get("data-x-min", "")), float(root.get("data-x-max", ""))
    frame = page_module.Frame(900, 430, x_min, x_max, float(root.get("data-y-max", "")))
    assert frame.x(x_min) == frame.left
    assert frame.x(x_max) == 900 - frame.right
    assert frame.y(0) == 430 - frame.bottom
    line = next(e for e in root.iter("polyline") if "lru-curve" in e.get("class", ""))
    steps = [tuple(map(float, step.split(","))) for step in line.get("points", "").split()]
    shown = [p for p in data["curve"]["points"] if x_min <= p["capacity_blocks"] <= x_max]
    for (x, y), p in zip(steps, shown, strict=True):
        assert x == pytest.approx(frame.x(p["capacity_blocks"]), abs=0.06)
        assert y == pytest.approx(frame.y(p["hit_rate"]), abs=0.06)
    for circle in root.iter("circle"):
        if figure := circle.get("data-figure"):
            of = value_at(data, figure.rsplit(".", 1)[0])
            assert float(circle.get("cx", "")) == pytest.approx(
                frame.x(of["capacity_blocks"]), abs=0.06
            )
            assert float(circle.get("cy", "")) == pytest.approx(
                frame.y(of["overall_hit_rate"]), abs=0.06
            )


@pytest.mark.parametrize("top", [0.0104, 0.05, 0.1, 0.37, 0.999, 1.04])
def test_axis_steps_are_round_and_reach_the_top(top: float) -> None:
    steps = page_module.nice_steps(top)
    assert steps[0] == 0
    assert steps[-1] >= top - 1e-9
    assert 2 <= len(steps) <= 7
    assert steps[-2] < top


def test_axis_labels() -> None:
    assert page_module.powers_between(48, 200_000, 6) == [64, 256, 1024, 4096, 16384, 65536]


def test_the_chart_as_a_file_of_its_own() -> None:
    data = report_data(block_bytes=64 << 20)
    picture = page_module.curve_picture(data)
    root = ElementTree.fromstring(picture)
    texts = " ".join(root.itertext())
    for words in ("unlimited 37.89 %", "knee 8,000 blocks", "GiB", data["title"]):
        assert words in texts
    for policy in ("LRU", "LFU", "FIFO", "S3-FIFO", "ARC"):
        assert policy in texts
    assert "var(" not in picture, "a viewer without CSS variables shows it, too"
    assert "#0b62a8" in picture
    assert "#62b5f5" not in picture, "the colours are those on white"
    assert page_module.curve_picture(data) == picture


@pytest.mark.parametrize(("width", "scrolls"), [(400, True), (1280, False)])
def test_a_table_that_scrolls_says_so(tmp_path: Path, width: int, scrolls: bool) -> None:
    """On a phone too. The page itself never scrolls sideways."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs Chromium")
    path = tmp_path / "report.html"
    path.write_text(render_report(report_data()), encoding="utf-8")
    with browser(chromium, tmp_path / "profile") as tab:
        tab.size(width, 900)
        tab.open(path.as_uri())
        tab.until("document.readyState == 'complete'")
        said = "[...document.querySelectorAll('p.more')].map((p) => !p.hidden)"
        wider = (
            "[...document.querySelectorAll('div.scroll')].map((d) => d.scrollWidth > d.clientWidth)"
        )
        tab.until(f"JSON.stringify({said}) == JSON.stringify({wider})")
        assert any(tab.evaluate(said)) is scrolls
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert not tab.logged


def test_the_report_in_chromium(tmp_path: Path) -> None:
    """No console message, no request, figures as in the data, and the script has run."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium; the other tests here read the same page without it")
    path = tmp_path / "report.html"
    path.write_text(render_report(report_data()), encoding="utf-8")
    run = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
            "--v=0", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in run.stderr, run.stderr
    page = Page(run.stdout)
    assert page.data == report_data()
    assert len(page.figures) == len(Page(render_report(report_data())).figures)
    # The script offers the data as a file: it has read it and has not failed before.
    assert re.search(r'<a id="save" href="blob:[^"]*" download="report.json">', run.stdout)
