"""One HTML file with the curve, the policies and what stayed resident.

Nothing is fetched: style, script, charts and the data are inside. Everything that the page
shows as a number comes from that data, and says from where: `data-figure` is the path to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from ... import __version__
from ...proto.units import format_bytes, percent
from .charts import curve_chart, curve_legend, label
from .curve import DEFAULT_POINTS, LruCurve, curve_error
from .page import Format, Json, cards, count, figure, render_page, table
from .simulate import ReplayResult


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


#: (what is said of it, the class of its colour, the start of its names in the data)
SOURCES = (
    ("the node itself", "local", "local_hit"),
    ("the shared tier", "shared", "shared_hit"),
    ("other nodes", "peer", "peer_hit"),
)


MOVES = (
    ("read from the shared tier", "shared_reads"),
    ("written to the shared tier", "shared_writes"),
    ("read from other nodes", "peer_reads"),
    ("in all", "total"),
)


#: Of more nodes than this, the page shows those that prefill the most.
MOST_NODES = 64


def render_fleet(data: Json) -> str:
    """The whole page for the data of `fleet_document`."""
    parts = [_main_figures(data), _sources(data), _moves(data), _nodes(data)]
    if data["compared"]:
        parts.append(_fleet_comparison(data))
    return render_page(
        data,
        "What a fleet of nodes makes of this trace.",
        parts,
        f"Blocks of {figure(data, 'block_tokens', count)} tokens; a request hits the longest run "
        "of blocks from its first that its node finds anywhere when it arrives. Nothing takes time "
        "in this simulation.",
    )


def _main_figures(data: Json) -> str:
    return cards(
        data,
        [
            ("requests", "trace.requests", count),
            ("prompt tokens", "trace.prompt_tokens", count),
            ("unlimited hit rate", "trace.infinite_hit_rate", percent),
            ("nodes", "nodes", count),
            ("hit rate of this fleet", "overall_hit_rate", percent),
            ("hit tokens", "total_hit_tokens", count),
        ],
    )


def sharing(data: Json) -> str:
    """How a fleet shares, in a word or two."""
    if data["shared_blocks"]:
        return "both" if data["peer_reads"] else "shared tier"
    return "peer reads" if data["peer_reads"] else "nothing shared"


def _sources(data: Json) -> str:
    prompt_tokens = data["total_prompt_tokens"]
    rows = []
    for said, colour, name in SOURCES:
        tokens = f"{name}_tokens"
        rows.append(
            [
                f'<td><i class="from from-{colour}"></i> {said}</td>',
                f"<td>{figure(data, f'{name}_blocks', count)}</td>",
                f"<td>{figure(data, tokens, count)}</td>",
                f'<td class="meter">{_bar([(colour, data[tokens])], prompt_tokens)}</td>',
            ]
        )
    rows.append(
        [
            "<td>nowhere: prefilled</td>",
            "<td></td>",
            f"<td>{figure(data, 'prefilled_tokens', count)}</td>",
            f'<td class="meter">{_bar([], prompt_tokens)}</td>',
        ]
    )
    shared = (
        f"a shared tier of {figure(data, 'shared_blocks', count)} blocks "
        f"(written: {escape(data['write'])})"
        if data["shared_blocks"]
        else "no shared tier"
    )
    peers = "and reads from other nodes" if data["peer_reads"] else "and no reads from other nodes"
    return (
        "<h2>Where the prompt tokens come from</h2>"
        f"<p>Routed {escape(data['route'])} to nodes of "
        f"{figure(data, 'capacity_blocks', count)} blocks each, with {shared} {peers}. The bars "
        "are shares of all prompt tokens.</p>" + table(["from", "blocks", "tokens", "share"], rows)
    )


def _bar(parts: Iterable[tuple[str, int]], whole: int) -> str:
    inside = "".join(
        f'<i class="from-{colour}" style="width:{100 * tokens / whole if whole else 0:.2f}%"></i>'
        for colour, tokens in parts
    )
    return f'<div class="bar stack">{inside}</div>'


def _moves(data: Json) -> str:
    sized = data["bytes_per_token"] is not None
    timed = data["moved"]["total"]["bytes_per_second"] is not None
    rows = []
    for said, name in MOVES:
        at = f"moved.{name}"
        cells = [f"<td>{said}</td>", f"<td>{figure(data, f'{at}.blocks', count)}</td>"]
        cells.append(f"<td>{figure(data, f'{at}.tokens', count)}</td>")
        if sized:
            cells.append(f"<td>{figure(data, f'{at}.bytes', format_bytes)}</td>")
        if timed:
            cells.append(f"<td>{figure(data, f'{at}.bytes_per_second', _bytes)}</td>")
        rows.append(cells)
    head = ["", "blocks", "tokens", *(["bytes"] if sized else []), *(["a second"] if timed else [])]
    size = (
        f" A token is {figure(data, 'bytes_per_token', format_bytes)}; a second is one of the "
        "trace, on average."
        if sized
        else ""
    )
    return (
        "<h2>What moves over the network</h2><p>Blocks that a node reads from elsewhere, and those "
        f"that enter the shared tier.{size}</p>" + table(head, rows)
    )


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _nodes(data: Json) -> str:
    nodes: Sequence[Json] = data["per_node"]
    busiest = sorted(range(len(nodes)), key=lambda index: -nodes[index]["prefilled_tokens"])
    most = max(node["prompt_tokens"] for node in nodes)
    shown = sorted(busiest[:MOST_NODES])
    rows = []
    for index in shown:
        at, node = f"per_node.{index}", nodes[index]
        rows.append(
            [
                f'<td><span data-figure="{at}">{index}</span></td>',
                f"<td>{figure(data, f'{at}.requests', count)}</td>",
                f"<td>{figure(data, f'{at}.hit_tokens', count)}</td>",
                f"<td>{figure(data, f'{at}.prefilled_tokens', count)}</td>",
                f'<td class="meter">{_bar([("local", node["hit_tokens"])], most)}</td>',
            ]
        )
    note = f" Of more nodes, the {MOST_NODES} busiest." if len(nodes) > MOST_NODES else ""
    return (
        "<h2>Nodes</h2><p>What each was given, and what it had to prefill. The bars are hit "
        f"tokens over the prompt tokens of the node with the most.{note}</p>"
        + table(["node", "requests", "hit tokens", "prefilled", "hits"], rows)
    )


def _fleet_comparison(data: Json) -> str:
    compared: Sequence[Json] = data["compared"]
    ways = list(dict.fromkeys(sharing(each) for each in compared))
    best = max(each["total_hit_tokens"] for each in compared)
    rows = []
    for route in dict.fromkeys(each["route"] for each in compared):
        cells = {}
        for index, each in enumerate(compared):
            if each["route"] == route:
                style = ' class="best"' if each["total_hit_tokens"] == best else ""
                rate = figure(data, f"compared.{index}.overall_hit_rate", percent)
                tokens = figure(data, f"compared.{index}.total_hit_tokens", count)
                cells[sharing(each)] = f"<td{style}>{rate}<small>{tokens} tokens</small></td>"
        rows.append([f"<td>{escape(route)}</td>", *(cells.get(way, "<td></td>") for way in ways)])
    return (
        "<h2>Other routes, other ways to share</h2><p>The same nodes and trace: hit tokens over "
        "prompt tokens; the best stands out.</p>" + table(["route", *ways], rows)
    )
