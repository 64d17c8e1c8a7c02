"""HTML reports: a curve with its policies, and a simulated fleet.

Every number on a page comes from the data that is embedded in it; `data-figure` is its path there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby
from typing import Any, TypeVar

from ... import __version__
from ...proto.units import format_bytes, percent
from .breakdown import Prices
from .curve import DEFAULT_POINTS, LruCurve, curve_error
from .optimal import OPTIMAL
from .page import (
    Format,
    Json,
    cards,
    count,
    curve_chart,
    curve_legend,
    figure,
    label,
    render_page,
    table,
    value_at,
)
from .simulate import ReplayResult

K = TypeVar("K")

#: Where a fleet's hits come from: description, class of the colour, start of the names in the data.
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
#: What hits save: name, field of `worth`, form.
_SAVINGS: tuple[tuple[str, str, Format], ...] = (
    ("TTFT saved", "ttft_saved_s", lambda seconds: f"{seconds:,.3g} s"),
    ("GPU hours saved", "gpu_hours_saved", lambda hours: f"{hours:,.1f}"),
    ("saved", "money_saved", lambda money: f"{money:,.2f}"),
    ("saved a month", "money_saved_per_month", lambda money: f"{money:,.0f}"),
)
#: With more nodes than this, the page shows those that prefill the most.
MOST_NODES = 64


# ---- curves


def report_data(
    title: str,
    trace: Json,
    curve: LruCurve,
    *,
    results: Sequence[ReplayResult] = (),
    sampled: Sequence[LruCurve] = (),
    block_bytes: int | None = None,
    most_points: int = DEFAULT_POINTS,
    prices: Prices | None = None,
    duration_s: float = 0.0,
) -> dict[str, Any]:
    """The data that `prefixctl curve` writes as JSON, and that the page and the plots show.

    `trace` is a `TraceSummary` as JSON, and `duration_s` how long the trace lasts. `block_bytes`
    adds sizes to the capacities, `prices` what hit tokens save to the results and to the knee.
    Sampled curves are compared with `curve`, at its points.
    """
    sizes: dict[str, Any] = {"most_points": most_points, "block_bytes": block_bytes}
    data: dict[str, Any] = {
        "title": title,
        "prefixd_version": __version__,
        "block_tokens": curve.block_tokens,
        "block_bytes": block_bytes,
        "prices": None if prices is None else asdict(prices),
        "trace": trace,
        "curve": curve.to_json(**sizes),
        "sampled": [
            {**estimate.to_json(**sizes), **asdict(curve_error(curve, estimate))}
            for estimate in sampled
        ],
        "results": [result.to_json() for result in results],
    }
    for row in data["results"] if block_bytes is not None else ():
        row["capacity_bytes"] = row["capacity_blocks"] * block_bytes
    knee = data["curve"]["knee"]
    if prices is not None:
        requests = trace["requests"]
        for row in data["results"]:
            row["worth"] = prices.worth(row["total_hit_tokens"], requests, duration_s)
        if knee is not None:
            knee["worth"] = prices.worth(knee["hit_tokens"], requests, duration_s)
    return data


def render_report(data: Json) -> str:
    """The whole page for the data of `report_data`."""
    parts = [_answer(data), _curve_cards(data), _curve(data)]
    if data["results"]:
        parts += [_comparison(data), _worth(data), _residency(data)]
    return render_page(
        data,
        "What a prefix cache makes of this trace, by capacity and policy.",
        parts,
        f"Blocks of {figure(data, 'block_tokens', count)} tokens; a request hits the longest run "
        "of blocks from its first that is resident when it arrives.",
    )


def _answer(data: Json) -> str:
    """Which policy, how much memory, what it saves, and what was given to say so."""
    if not data["trace"]["infinite_hit_tokens"]:
        return (
            '<p class="answer">No prompt begins as an earlier one does: a cache hits nothing.</p>'
        )
    sentences = []
    knee = data["curve"]["knee"]
    if knee is not None:
        at = "curve.knee"
        sentences.append(
            f"<b>{_size(data, at)}</b> is where more memory starts to pay less: LRU hits "
            f"{figure(data, f'{at}.hit_rate', percent)} of the prompt tokens there; a cache "
            f"without limits, {figure(data, 'trace.infinite_hit_rate', percent)}."
        )
        if "worth" in knee:
            saved = {
                name: figure(data, f"{at}.worth.{field}", form)
                for name, field, form in _SAVINGS
                if knee["worth"][field] is not None
            }
            sentence = (
                f"On average that saves {saved['TTFT saved']} of a request's time to first token, "
                f"and over the whole trace {saved['GPU hours saved']} GPU hours"
            )
            if "saved" in saved:
                sentence += f", which cost {saved['saved']}"
            if "saved a month" in saved:
                sentence += (
                    f"; with the same traffic all the time, {saved['saved a month']} a month"
                )
            sentences.append(f"{sentence}.")
    sentences.append(_best_policies(data))
    given = []
    if data["block_bytes"]:
        given.append(f"a block takes {figure(data, 'block_bytes', format_bytes)}")
    if data["prices"] is not None:
        prefill = figure(data, "prices.prefill_tokens_per_s", _number)
        gpus = data["prices"]["gpus"]
        replica = f"a replica of {figure(data, 'prices.gpus', count)} GPU{'s' * (gpus > 1)}"
        given.append(f"{replica} prefills {prefill} tokens a second")
        if data["prices"]["gpu_hour"] is not None:
            given.append(f"a GPU hour costs {figure(data, 'prices.gpu_hour', _number)}")
    if given:
        sentences.append(f'<span class="soft">As given: {", ".join(given)}.</span>')
    return f'<p class="answer">{" ".join(filter(None, sentences))}</p>'


def _best_policies(data: Json) -> str:
    """Which policy hits the most, by ranges of the replayed capacities; of one policy, nothing."""
    results = data["results"]
    if len({each["policy"] for each in results} - {OPTIMAL}) < 2:
        return ""
    ranges = []
    for policy, same in groupby(best_results(results), lambda n: str(results[n]["policy"])):
        sizes = [_size(data, f"results.{n}") for n in same]
        where = f"at {sizes[0]}" if len(sizes) == 1 else f"from {sizes[0]} to {sizes[-1]}"
        ranges.append(f"<b>{escape(label(policy))}</b> {where}")
    return f"Of the replayed policies, the best is {', '.join(ranges)}."


def best_results(results: Sequence[Json]) -> list[int]:
    """Of each capacity, the smallest first, which result hits the most. The optimum is none to
    choose where there is another."""
    best: dict[int, int] = {}
    for n, each in enumerate(results):
        capacity = each["capacity_blocks"]
        best[capacity] = max(best.get(capacity, n), n, key=lambda m: _rank(results[m]))
    return [best[capacity] for capacity in sorted(best)]


def _rank(result: Json) -> tuple[bool, int]:
    return result["policy"] != OPTIMAL, result["total_hit_tokens"]


def _size(data: Json, at: str) -> str:
    """The capacity of a result or of the knee, in bytes where those of a block are known."""
    if value_at(data, at).get("capacity_bytes") is not None and data["block_bytes"]:
        return figure(data, f"{at}.capacity_bytes", format_bytes)
    return f"{figure(data, f'{at}.capacity_blocks', count)} blocks"


def _number(value: float) -> str:
    """`8,000`, `2.5`."""
    return f"{value:,.10g}"


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
            (r["policy"], r["touch_order"]): f"results.{index}"
            for index, r in enumerate(results)
            if r["capacity_blocks"] == capacity
        }
        cells = _rates(data, at)
        first = next(iter(at.values()))
        row = [_capacity(data, first)]
        rows.append(row + [cells.get(column, "") for column in columns])
    return (
        "<h2>Policies</h2><p>Hit tokens of the whole trace over its prompt tokens, at each "
        "capacity, and below it their number; the best policy of a row stands out. The optimum "
        "knows the future: what it hits more than the best policy is what a better policy could "
        "gain at most.</p>" + table(["capacity", *names], rows)
    )


def _capacity(data: Json, result: str) -> str:
    """The cell with the capacity of a result."""
    cell = f"{figure(data, f'{result}.capacity_blocks', count)} blocks"
    if "capacity_bytes" in value_at(data, result):
        cell = f"<td>{cell}<small>{figure(data, f'{result}.capacity_bytes', format_bytes)}</small>"
        cell += "</td>"
    return cell


def _worth(data: Json) -> str:
    """What the best policy saves at each capacity, and what the optimum would save; nothing if the
    prices are not known."""
    results = data["results"]
    if "worth" not in results[0]:
        return ""
    shown = [each for each in _SAVINGS if results[0]["worth"][each[1]] is not None]
    rows = []
    bounds = {
        each["capacity_blocks"]: n for n, each in enumerate(results) if each["policy"] == OPTIMAL
    }
    for best in best_results(results):
        bound = bounds.get(results[best]["capacity_blocks"])
        row = [_capacity(data, f"results.{best}"), escape(label(results[best]["policy"]))]
        for _, field, form in shown:
            cell = figure(data, f"results.{best}.worth.{field}", form)
            if bound not in (None, best):
                most = figure(data, f"results.{bound}.worth.{field}", form)
                cell = f"<td>{cell}<small>at most {most}</small></td>"
            row.append(cell)
        rows.append(row)
    return (
        "<h2>What it saves</h2><p>The best policy at each capacity and what its hits save; below, "
        "what those of the optimum would. TTFT, the time to first token, is a mean over all "
        "requests, without their waiting for each other. Money is in the currency of the price of "
        "a GPU hour; a month is one of the same traffic all the time.</p>"
        + table(["capacity", "best policy", *(name for name, _, _ in shown)], rows)
    )


def _rates(data: Json, paths: dict[K, str]) -> dict[K, str]:
    """Cells with the hit rates of the results at these paths; the best stands out."""
    tokens = {key: value_at(data, f"{path}.total_hit_tokens") for key, path in paths.items()}
    best = max(
        (tokens[key] for key, path in paths.items()
         if value_at(data, path).get("policy") != OPTIMAL), default=-1,
    )  # fmt: skip
    cells = {}
    for key, path in paths.items():
        style = ' class="best"' if tokens[key] == best else ""
        rate = figure(data, f"{path}.overall_hit_rate", percent)
        hits = figure(data, f"{path}.total_hit_tokens", count)
        cells[key] = f"<td{style}>{rate}<small>{hits}</small></td>"
    return cells


def _residency(data: Json) -> str:
    rows = []
    policies = [n for n, each in enumerate(data["results"]) if each["policy"] != OPTIMAL]
    order = sorted(policies, key=lambda n: (data["results"][n]["capacity_blocks"], n))
    for index in order:
        result = data["results"][index]
        at = f"results.{index}"
        capacity = result["capacity_blocks"]
        share = result["final_cache_blocks"] / capacity if capacity else 0.0
        meter = f'<i class="p-{escape(result["policy"])}" style="width:{100 * share:.1f}%"></i>'
        rows.append(
            [
                escape(label(result["policy"])),
                figure(data, f"{at}.capacity_blocks", count),
                figure(data, f"{at}.final_cache_blocks", count),
                f'<td class="meter"><div class="bar" title="{percent(share)}">{meter}</div></td>',
                figure(data, f"{at}.ghost_blocks", count),
                figure(data, f"{at}.evictions", count),
            ]
        )
    if not rows:
        return ""
    return (
        "<h2>Residency</h2><p>What each policy kept at the end of the trace, how many blocks it "
        "remembers without holding them (ghosts), and how many it evicted on the way.</p>"
        + table(["policy", "capacity", "resident", "of capacity", "ghosts", "evictions"], rows)
    )


# ---- fleets


def render_fleet(data: Json) -> str:
    """The whole page for the data of `fleet_document`."""
    main_figures: list[tuple[str, str, Format]] = [
        ("requests", "trace.requests", count),
        ("prompt tokens", "trace.prompt_tokens", count),
        ("unlimited hit rate", "trace.infinite_hit_rate", percent),
        ("nodes", "nodes", count),
        ("hit rate of this fleet", "overall_hit_rate", percent),
        ("hit tokens", "total_hit_tokens", count),
    ]
    parts = [cards(data, main_figures), _sources(data), _moves(data), _nodes(data)]
    if data["compared"]:
        parts.append(_alternatives(data))
    return render_page(
        data,
        "What a fleet of nodes makes of this trace.",
        parts,
        f"Blocks of {figure(data, 'block_tokens', count)} tokens; a request hits the longest run "
        "of blocks from its first that its node finds anywhere when it arrives. Nothing takes time "
        "in this simulation.",
    )


def sharing(data: Json) -> str:
    """How a fleet shares, in a word or two."""
    if data["shared_blocks"]:
        return "both" if data["peer_reads"] else "shared tier"
    return "peer reads" if data["peer_reads"] else "nothing shared"


def _sources(data: Json) -> str:
    prompt_tokens = data["total_prompt_tokens"]
    rows = [
        [
            f'<i class="from from-{colour}"></i> {description}',
            figure(data, f"{name}_blocks", count),
            figure(data, f"{name}_tokens", count),
            _bar([(colour, data[f"{name}_tokens"])], prompt_tokens),
        ]
        for description, colour, name in SOURCES
    ]
    prefilled = figure(data, "prefilled_tokens", count)
    rows.append(["nowhere: prefilled", "", prefilled, _bar([], prompt_tokens)])
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
    return f'<td class="meter"><div class="bar stack">{inside}</div></td>'


def _moves(data: Json) -> str:
    columns: list[tuple[str, str, Format]] = [
        ("blocks", "blocks", count),
        ("tokens", "tokens", count),
    ]
    size = ""
    if data["bytes_per_token"] is not None:
        columns.append(("bytes", "bytes", format_bytes))
        size = (
            f" A token is {figure(data, 'bytes_per_token', format_bytes)}; a second is one of the "
            "trace, on average."
        )
    if data["moved"]["total"]["bytes_per_second"] is not None:
        columns.append(("a second", "bytes_per_second", lambda rate: format_bytes(round(rate))))
    rows = [
        [description, *(figure(data, f"moved.{move}.{name}", form) for _, name, form in columns)]
        for description, move in MOVES
    ]
    head = ["", *(name for name, _, _ in columns)]
    return (
        "<h2>What moves over the network</h2><p>Blocks that a node reads from elsewhere, and those "
        f"that enter the shared tier.{size}</p>" + table(head, rows)
    )


def _nodes(data: Json) -> str:
    nodes: Sequence[Json] = data["per_node"]
    busiest = sorted(range(len(nodes)), key=lambda index: -nodes[index]["prefilled_tokens"])
    most = max(node["prompt_tokens"] for node in nodes)
    rows = []
    for index in sorted(busiest[:MOST_NODES]):
        at = f"per_node.{index}"
        rows.append(
            [
                f'<span data-figure="{at}">{index}</span>',
                figure(data, f"{at}.requests", count),
                figure(data, f"{at}.hit_tokens", count),
                figure(data, f"{at}.prefilled_tokens", count),
                _bar([("local", nodes[index]["hit_tokens"])], most),
            ]
        )
    note = f" Of more nodes, the {MOST_NODES} busiest." if len(nodes) > MOST_NODES else ""
    return (
        "<h2>Nodes</h2><p>What each was given, and what it had to prefill. The bars are hit "
        f"tokens over the prompt tokens of the node with the most.{note}</p>"
        + table(["node", "requests", "hit tokens", "prefilled", "hits"], rows)
    )


def _alternatives(data: Json) -> str:
    compared: Sequence[Json] = data["compared"]
    ways = list(dict.fromkeys(sharing(each) for each in compared))
    routes = dict.fromkeys(each["route"] for each in compared)
    cells = _rates(
        data, {(each["route"], sharing(each)): f"compared.{i}" for i, each in enumerate(compared)}
    )
    rows = [[escape(route), *(cells.get((route, way), "") for way in ways)] for route in routes]
    return (
        "<h2>Other routes, other ways to share</h2><p>The same nodes and trace: hit tokens over "
        "prompt tokens; the best stands out.</p>" + table(["route", *ways], rows)
    )
