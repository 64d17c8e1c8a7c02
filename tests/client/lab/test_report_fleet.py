"""The page of a simulated fleet: every figure comes from the data, for all kinds of data."""

from __future__ import annotations

import re
from typing import Any

import pytest

from prefixd.client.lab.fleet import Fleet, fleet_document, simulate_fleet
from prefixd.client.lab.page import STYLE, count, value_at
from prefixd.client.lab.report import MOST_NODES, render_fleet, sharing
from prefixd.client.lab.trace import Request, TraceColumns
from prefixd.proto.units import format_bytes, percent
from tests.support.page import Page

Json = dict[str, Any]


def document(fleet: Fleet, *, compare: bool = True, bytes_per_token: int | None = 4096) -> Json:
    requests = [Request(n, 2000, 1, (0, n % 7, 100 + n * n % 40, 200 + n)) for n in range(300)]
    trace = TraceColumns.load(requests)
    compared = [simulate_fleet(trace, each) for each in fleet.alternatives()] if compare else []
    return fleet_document(
        "a </script><!-- <b> & 'trace'",
        {**trace.summary(512).to_json(), "duration_s": 0.3},
        simulate_fleet(trace, fleet),
        compared=compared,
        bytes_per_token=bytes_per_token,
    )


SHAPES = [
    {"fleet": Fleet(3, 20, shared_blocks=100, peer_reads=True)},
    {"fleet": Fleet(3, 20), "compare": False, "bytes_per_token": None},
    {"fleet": Fleet(1, 0)},
    {"fleet": Fleet(200, 5, peer_reads=True)},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_figure_of_the_page_is_the_datas(shape: Json) -> None:
    data = document(**shape)
    page = Page(render_fleet(data))
    assert page.data == data
    shown = {path: text for path, text, _ in page.figures}
    for path, text in shown.items():
        if re.fullmatch(r"per_node\.\d+", path):
            assert path == f"per_node.{text}"
            continue
        value = value_at(data, path)
        assert text in {count(value), percent(value), format_bytes(round(value))}, (path, value)
    for path in ("total_hit_tokens", "local_hit_tokens", "shared_hit_tokens", "peer_hit_tokens"):
        assert shown[path] == f"{data[path]:,}"
    for index, each in enumerate(data["compared"]):
        path = f"compared.{index}.total_hit_tokens"
        assert shown[path] == f"{each['total_hit_tokens']:,}"
    assert ("moved.total.bytes_per_second" in shown) == (data["bytes_per_token"] is not None)


def test_numbers_in_the_tables_all_say_where_they_come_from() -> None:
    cells = re.findall(r"<td[^>]*>(.*?)</td>", render_fleet(document(**SHAPES[0])), re.DOTALL)
    assert len(cells) > 60
    for cell in cells:
        rest = re.sub(r"<span data-figure=.*?</span>|<[^>]*>", "", cell)
        assert not re.search(r"\d", rest), cell


def test_the_busiest_of_many_nodes() -> None:
    data = document(**SHAPES[3])
    page = Page(render_fleet(data))
    shown = {int(text) for path, text, _ in page.figures if re.fullmatch(r"per_node\.\d+", path)}
    assert len(shown) == MOST_NODES
    prefilled = [node["prefilled_tokens"] for node in data["per_node"]]
    assert sorted((prefilled[i] for i in shown), reverse=True) == sorted(prefilled)[:-65:-1]
    assert f"the {MOST_NODES} busiest" in " ".join(page.texts)


def test_bars_fit_and_the_style_knows_the_page() -> None:
    html = render_fleet(document(**SHAPES[0]))
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", html)]
    assert widths
    assert all(0 <= width <= 100 for width in widths)
    classes = {
        word
        for _, name, value in Page(html).attributes
        if name == "class"
        for word in (value or "").split()
    }
    for name in classes:
        assert f".{name}" in STYLE, name


def test_titles_cannot_break_out() -> None:
    html = render_fleet(document(**SHAPES[1]))
    assert html.count("</script>") == 2
    assert "<!--" not in html


def test_ways_to_share() -> None:
    def way(shared_blocks: int, peer_reads: bool) -> str:
        return sharing({"shared_blocks": shared_blocks, "peer_reads": peer_reads})

    assert [way(0, False), way(0, True), way(5, False), way(5, True)] == [
        "nothing shared", "peer reads", "shared tier", "both",
    ]  # fmt: skip
