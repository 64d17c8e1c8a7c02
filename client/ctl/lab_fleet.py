"""`prefixctl simulate`: what several nodes would hit, and what sharing blocks would add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from . import lab

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ..lab.trace import Request

SHARING = "What the nodes share; without any of these, nothing"

Json = Mapping[str, Any]


def register(app: typer.Typer) -> None:
    """Add `simulate`."""
    app.command("simulate", cls=lab.JsonCommand, rich_help_panel=lab.LAB)(simulate)


def simulate(
    ctx: typer.Context,
    trace: lab.TraceArgument,
    nodes: Annotated[int, typer.Option(metavar="N", help="How many nodes.")] = 16,
    route: Annotated[
        str,
        typer.Option(
            metavar="round-robin|hash|least-loaded|prefix-aware", help="Which node gets a request."
        ),
    ] = "round-robin",
    capacity_blocks: Annotated[
        int, typer.Option(metavar="N", help="Blocks that each node holds.")
    ] = 4096,
    shared_blocks: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Blocks that a shared tier holds; 0: there is none.",
            rich_help_panel=SHARING,
        ),
    ] = 0,
    write: Annotated[
        str,
        typer.Option(
            metavar="all|second-use",
            help="What enters the shared tier: every block that was not found, or every block of "
            "which this is not the first use.",
            rich_help_panel=SHARING,
        ),
    ] = "all",
    peer_reads: Annotated[
        bool,
        typer.Option(
            "--peer-reads", help="Nodes read from each other too.", rich_help_panel=SHARING
        ),
    ] = False,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="KV state of a token, all layers, as 128KiB: shows bytes and bandwidth.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Every route too, sharing nothing, by peer reads, by shared tier."
        ),
    ] = False,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="One page with all of it.")
    ] = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Say what a fleet of nodes would hit.

    Each node has an LRU of its own. A request's blocks are walked from the
    root: one in its node's LRU is a local hit, one in the shared tier's LRU a
    shared hit, with --peer-reads one in another node's LRU a peer hit; the first
    in none of them ends the walk. Then what gave blocks is touched for them, all
    blocks of the request enter the node's LRU, and what --write says enters the
    shared one, always leaf first, root last.

    [bold]round-robin[/]: request r (from 0) goes to node r mod N.
    [bold]hash[/]: by the CRC32 of the first two blocks.
    [bold]least-loaded[/]: to the node that has prefilled the fewest tokens so far.
    [bold]prefix-aware[/]: to the node that will have prefilled the fewest with it.
    """
    from ..lab.fleet import Fleet, Route, Write, fleet_document, simulate_fleet
    from ..lab.report import render_fleet
    from ..lab.trace import TraceColumns, TraceReader
    from .progress import counting, reading
    from .replay_offline import parse_name

    target = lab.json_target(ctx, json_file)
    with lab.bad_input():
        asked = Fleet(
            nodes,
            capacity_blocks,
            parse_name("route", route, Route),
            shared_blocks,
            parse_name("write policy", write, Write),
            peer_reads,
        )
        token_bytes = None if bytes_per_token is None else _token_bytes(bytes_per_token)
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        times = _Times(reading(reader, "reading"))
        columns = TraceColumns.load(times)
        others = asked.alternatives() if compare else []
        fleets = dict.fromkeys([asked, *others])
        results = {
            fleet: simulate_fleet(columns, fleet, block_tokens=block_tokens)
            for fleet in counting(fleets, len(fleets), "simulating")
        }
        data = fleet_document(
            "standard input" if trace == lab.STDOUT else Path(trace).name,
            {**columns.summary(block_tokens).to_json(), "duration_s": times.duration_s},
            results[asked],
            compared=[results[fleet] for fleet in others],
            block_tokens=block_tokens,
            bytes_per_token=token_bytes,
        )
    lab.warn(reader.warnings())
    if html is not None:
        lab.write_text(html, render_fleet(data))
    lab.show(data, target, lambda: fleet_view(data))


def _token_bytes(text: str) -> int:
    from ...proto.units import parse_bytes

    size_bytes = parse_bytes(text)
    if size_bytes < 1:
        raise ValueError(f"a token must have at least one byte, got {text}")
    return size_bytes


class _Times:
    """Requests, and the time from the earliest to the latest of them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self._first_ms: int | None = None
        self._last_ms = 0

    @property
    def duration_s(self) -> float:
        return 0.0 if self._first_ms is None else (self._last_ms - self._first_ms) / 1000

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            time_ms = request.timestamp_ms
            self._first_ms = time_ms if self._first_ms is None else min(self._first_ms, time_ms)
            self._last_ms = max(self._last_ms, time_ms)
            yield request


def fleet_view(data: Json) -> RenderableType:
    """The trace and the fleet in a line each, then tables: sources, moves, other fleets."""
    from rich.console import Group
    from rich.text import Text

    from .replay_offline import trace_line

    parts: list[RenderableType] = [
        trace_line(data["trace"]),
        Text(_fleet_line(data)),
        _sources_table(data),
        _moves_table(data),
        Text(_balance_line(data)),
    ]
    if data["compared"]:
        parts.append(_comparison_table(data))
    return Group(*parts)


def _fleet_line(data: Json) -> str:
    nodes = data["nodes"]
    shared = (
        f"a shared tier of {data['shared_blocks']:,} blocks ({data['write']})"
        if data["shared_blocks"]
        else "no shared tier"
    )
    return (
        f"{nodes:,} {'node' if nodes == 1 else 'nodes'} of {data['capacity_blocks']:,} blocks, "
        f"{data['route']}, {shared}, {'with' if data['peer_reads'] else 'no'} peer reads"
    )


def _sources_table(data: Json) -> Table:
    from ...proto.units import percent
    from ..lab.report import SOURCES
    from .render import make_table

    prompt_tokens = data["total_prompt_tokens"]
    numbers = ("blocks", "tokens", "of the prompts")
    table = make_table("hits from", *numbers, right=numbers)
    for said, _, name in SOURCES:
        tokens = data[f"{name}_tokens"]
        share = percent(tokens / prompt_tokens if prompt_tokens else 0.0)
        table.add_row(said, f"{data[f'{name}_blocks']:,}", f"{tokens:,}", share)
    blocks = sum(data[f"{name}_blocks"] for _, _, name in SOURCES)
    share = percent(data["overall_hit_rate"])
    table.add_row("in all", f"{blocks:,}", f"{data['total_hit_tokens']:,}", share, style="bold")
    return table


def _moves_table(data: Json) -> Table:
    from ..lab.report import MOVES
    from .render import make_table, size

    total = data["moved"]["total"]
    sized, timed = total["bytes"] is not None, total["bytes_per_second"] is not None
    numbers = ["blocks", "tokens"]
    numbers += [*(["bytes"] if sized else []), *(["a second"] if timed else [])]
    table = make_table("moved", *numbers, right=numbers)
    for said, name in MOVES:
        moved = data["moved"][name]
        cells = [f"{moved['blocks']:,}", f"{moved['tokens']:,}"]
        cells += [size(moved["bytes"])] if sized else []
        cells += [f"{size(moved['bytes_per_second'])}/s"] if timed else []
        table.add_row(said, *cells, style="bold" if name == "total" else None)
    return table


def _balance_line(data: Json) -> str:
    prefilled = [node["prefilled_tokens"] for node in data["per_node"]]
    mean = sum(prefilled) / len(prefilled)
    return (
        f"A node prefills {min(prefilled):,} to {max(prefilled):,} tokens, {mean:,.0f} on average."
    )


def _comparison_table(data: Json) -> Table:
    from ...proto.units import percent
    from ..lab.report import sharing
    from .render import make_table

    rows: dict[str, dict[str, str]] = {}
    for each in data["compared"]:
        rows.setdefault(each["route"], {})[sharing(each)] = percent(each["overall_hit_rate"])
    ways = list(next(iter(rows.values())))
    table = make_table("route", *ways, title="hit rate by route", right=ways)
    table.columns[0].no_wrap = True
    for route, rates in rows.items():
        table.add_row(route, *rates.values())
    return table
