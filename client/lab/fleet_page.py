"""The page of a simulated fleet: where its hits come from, what moves, and other ways to share.

Input is the data of `fleet.fleet_document`; the page around it is the other reports'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ...proto.units import format_bytes, percent
from .report import cards, count, figure, render_page, table

Json = Mapping[str, Any]

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
        parts.append(_comparison(data))
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


def _comparison(data: Json) -> str:
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
