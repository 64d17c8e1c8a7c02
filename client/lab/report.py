"""One HTML file with the curve, the policies and what stayed resident.

Nothing is fetched: style, script, charts and the data are inside. Everything that the page
shows as a number comes from that data, and says from where: `data-figure` is the path to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from ... import __version__
from ...proto.units import format_bytes, percent
from .charts import curve_chart, curve_legend, label, value_at
from .curve import DEFAULT_POINTS, LruCurve, curve_error
from .page import SCRIPT, STYLE
from .simulate import ReplayResult

Json = Mapping[str, Any]
Format = Callable[[Any], str]


def report_data(
    title: str,
    trace: Json,
    curve: LruCurve,
    *,
    results: Sequence[ReplayResult] = (),
    sampled: Sequence[LruCurve] = (),
    block_bytes: int | None = None,
    most_points: int = DEFAULT_POINTS,
) -> dict[str, Any]:
    """What `prefixctl curve` writes as JSON, and what the page and the plots are drawn from.

    `trace` is a `TraceSummary` as JSON. `block_bytes` adds sizes to the capacities. Sampled
    curves are compared with `curve`, at its points.
    """
    prompt_tokens = trace["prompt_tokens"]
    best = trace["infinite_hit_tokens"] / prompt_tokens if prompt_tokens else 0.0
    return {
        "title": title,
        "prefixd_version": __version__,
        "block_tokens": curve.block_tokens,
        "block_bytes": block_bytes,
        "trace": {**trace, "infinite_hit_rate": best},
        "curve": _curve_json(curve, most_points, block_bytes),
        "sampled": [
            {
                **_curve_json(estimate, most_points, block_bytes),
                **asdict(curve_error(curve, estimate)),
            }
            for estimate in sampled
        ],
        "results": [result.to_json() for result in results],
    }


def _curve_json(curve: LruCurve, most_points: int, block_bytes: int | None) -> dict[str, Any]:
    written = curve.to_json(most_points=most_points, block_bytes=block_bytes)
    if curve.sample is not None:
        written["sample_rate"] = curve.sample.rate
        written["sampled_blocks"] = curve.sample.blocks
    return written


def count(value: float) -> str:
    """`182,790`."""
    return f"{value:,.0f}"


def render_report(data: Json) -> str:
    """The whole page for the data of `report_data`."""
    parts = [_curve_cards(data), _curve(data)]
    if data["results"]:
        parts += [_comparison(data), _residency(data)]
    return render_page(
        data,
        "What a prefix cache makes of this trace, by capacity and policy.",
        parts,
        f"Blocks of {figure(data, 'block_tokens', count)} tokens; a request hits the longest run "
        "of blocks from its first that is resident when it arrives.",
    )


def render_page(data: Json, subtitle: str, parts: Sequence[str], footer: str) -> str:
    """A page around its parts, with the data in it.

    `data` has a `title` and a `prefixd_version`; `parts` and `footer` are HTML.
    """
    title = escape(str(data["title"]))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # The browser itself holds the promise that nothing is fetched.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">",
            '<link rel="icon" href="data:,">',
            f"<title>{title}: prefix-cache report</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{title}</h1>",
            f'<p class="soft">{escape(subtitle)}</p>',
            *parts,
            f"<footer>prefixd {escape(str(data['prefixd_version']))}. {footer} "
            '<a id="save" hidden>Save the data (JSON)</a></footer></main>',
            f'<script type="application/json" id="data">{_embedded(data)}</script>',
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _embedded(data: Json) -> str:
    # Nothing in a string may close the script element or open a comment in it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def figure(data: Json, path: str, form: Format) -> str:
    """The value at a dotted path as HTML that says where it comes from."""
    return f'<span data-figure="{path}">{escape(form(value_at(data, path)))}</span>'


def cards(data: Json, figures: Sequence[tuple[str, str, Format]]) -> str:
    """The main figures, each a name, the path of its value and how that is written."""
    inside = "".join(
        f'<div class="card"><b>{figure(data, path, form)}</b><span class="name">{name}</span></div>'
        for name, path, form in figures
    )
    return f'<div class="cards">{inside}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table from the HTML of its column names and of its rows' whole cells (`<td>...</td>`)."""
    names = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        '<p class="more" hidden>There are more columns: scroll the table sideways.</p>'
    )


def _curve_cards(data: Json) -> str:
    figures: list[tuple[str, str, Format]] = [
        ("requests", "trace.requests", count),
        ("prompt tokens", "trace.prompt_tokens", count),
        ("different blocks", "trace.unique_blocks", count),
        ("unlimited hit rate", "trace.infinite_hit_rate", percent),
    ]
    if data["curve"]["knee"] is not None:
        if data["block_bytes"]:
            figures.append(("memory at the knee", "curve.knee.capacity_bytes", format_bytes))
        else:
            figures.append(("blocks at the knee", "curve.knee.capacity_blocks", count))
        figures.append(("hit rate at the knee", "curve.knee.hit_rate", percent))
    return cards(data, figures)


def _curve(data: Json) -> str:
    estimated = "sample_rate" in data["curve"]
    origin = (
        f"estimated from {figure(data, 'curve.sample_rate', percent)} of the blocks, and least "
        "sure where a cache holds only a few of them"
        if estimated
        else "exact: one pass over the trace gives LRU at every capacity"
    )
    legend = "".join(
        f'<li><svg width="26" height="14">{sign}</svg>{text}</li>'
        for sign, text in curve_legend(data, lambda path: figure(data, path, percent))
    )
    charts = "".join(
        f'<figure class="{name}">{curve_chart(data, width, height)}'
        '<output class="tip"></output></figure>'
        for name, width, height in (("wide", 900, 430), ("narrow", 390, 330))
    )
    return (
        "<h2>Hit rate by capacity</h2>"
        f"<p>The share of prompt tokens that need no prefill. The line is {origin}. "
        "Marks are single replays.</p>"
        f'{charts}<ul class="legend">{legend}</ul>'
    )


def _comparison(data: Json) -> str:
    results = data["results"]
    columns = list(dict.fromkeys((r["policy"], r["touch_order"]) for r in results))
    orders = {order for _, order in columns}
    names = [
        escape(label(policy)) + (f" <small>{escape(order)}</small>" if len(orders) > 1 else "")
        for policy, order in columns
    ]
    rows = []
    for capacity in sorted({r["capacity_blocks"] for r in results}):
        at = {
            (r["policy"], r["touch_order"]): (index, r)
            for index, r in enumerate(results)
            if r["capacity_blocks"] == capacity
        }
        best = max(r["total_hit_tokens"] for _, r in at.values())
        first = next(iter(at.values()))[0]
        cells = [f"<td>{figure(data, f'results.{first}.capacity_blocks', count)} blocks</td>"]
        for column in columns:
            if column not in at:
                cells.append("<td></td>")
                continue
            index, result = at[column]
            style = ' class="best"' if result["total_hit_tokens"] == best else ""
            rate = figure(data, f"results.{index}.overall_hit_rate", percent)
            tokens = figure(data, f"results.{index}.total_hit_tokens", count)
            cells.append(f"<td{style}>{rate}<small>{tokens} tokens</small></td>")
        rows.append(cells)
    return (
        "<h2>Policies</h2><p>Hit tokens of the whole trace over its prompt tokens, at each "
        "capacity; the best of a row stands out.</p>" + table(["capacity", *names], rows)
    )


def _residency(data: Json) -> str:
    rows = []
    order = sorted(
        range(len(data["results"])), key=lambda i: (data["results"][i]["capacity_blocks"], i)
    )
    for index in order:
        result = data["results"][index]
        at = f"results.{index}"
        capacity = result["capacity_blocks"]
        share = result["final_cache_blocks"] / capacity if capacity else 0.0
        meter = f'<i class="p-{escape(result["policy"])}" style="width:{100 * share:.1f}%"></i>'
        rows.append(
            [
                f"<td>{escape(label(result['policy']))}</td>",
                f"<td>{figure(data, f'{at}.capacity_blocks', count)}</td>",
                f"<td>{figure(data, f'{at}.final_cache_blocks', count)}</td>",
                f'<td class="meter"><div class="bar" title="{percent(share)}">{meter}</div></td>',
                f"<td>{figure(data, f'{at}.ghost_blocks', count)}</td>",
                f"<td>{figure(data, f'{at}.evictions', count)}</td>",
            ]
        )
    return (
        "<h2>Residency</h2><p>What each policy kept at the end of the trace, how many blocks it "
        "remembers without holding them (ghosts), and how many it evicted on the way.</p>"
        + table(["policy", "capacity", "resident", "of capacity", "ghosts", "evictions"], rows)
    )
