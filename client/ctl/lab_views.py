"""What the policy lab found, as tables for people. Input: the JSON that the commands write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...proto.units import format_duration
from .render import make_table

Json = Mapping[str, Any]


def percent(share: float) -> str:
    """`37.36 %`."""
    return f"{100 * share:.2f} %"


def seconds(value: float) -> str:
    """`59m12s`, `850ms`."""
    return format_duration(round(value * 1e9) if value >= 1 else round(value * 1e3) * 10**6)


def written(data: Json) -> RenderableType:
    """A trace that was made or converted."""
    trace, saving = data["trace"], data["saving"]
    rows: list[tuple[str, str]] = [
        ("requests", f"{trace['requests']:,} in {seconds(trace['duration_s'])}"),
        ("prompt tokens", f"{trace['prompt_tokens']:,}"),
        ("blocks", f"{trace['blocks']:,}, {trace['unique_blocks']:,} different, "
                   f"{data['block_tokens']} tokens each"),
        ("unlimited cache", f"hits {percent(saving['infinite_block_hit_rate'])} of the blocks, "
                            f"{percent(saving['infinite_hit_rate'])} of the tokens"),
    ]  # fmt: skip
    if "shapes" in data:
        shapes = ", ".join(f"{count:,} by {name}" for name, count in data["shapes"].items())
        rows.insert(0, ("records read", shapes))
    if data["output"] != "-":
        rows.insert(0, ("written", data["output"]))
    return _pairs(rows)


def analysis(data: Json) -> RenderableType:
    """Everything that `analyze` found."""
    trace, sharing, saving = data["trace"], data["sharing"], data["saving"]
    reuse, popularity, sessions = data["reuse"], data["popularity"], data["sessions"]
    blocks, unique = trace["blocks"], trace["unique_blocks"]

    def of(count: int, whole: int) -> str:
        return f"{count:,}  ({percent(count / whole)})" if whole else f"{count:,}"

    head = _pairs(
        [
            ("requests", f"{trace['requests']:,} in {seconds(trace['duration_s'])}"),
            ("prompt tokens", f"{trace['prompt_tokens']:,}"),
            ("block references", f"{blocks:,} of {data['block_tokens']} tokens"),
            ("different blocks", f"{unique:,}"),
            ("  used by one request", of(sharing["single_use_blocks"], unique)),
            ("  shared by several", of(sharing["shared_blocks"], unique)),
            ("reusable references", of(sharing["reused_references"], blocks)),
            ("  behind a whole prefix", of(sharing["prefix_hit_blocks"], blocks)),
            ("common to all requests", f"{sharing['common_prefix_blocks']:,} blocks"),
            ("requests that share nothing", of(sharing["requests_without_shared_prefix"],
                                               trace["requests"])),
            ("potential saving", f"{saving['infinite_hit_tokens']:,} tokens  "
                                 f"({percent(saving['infinite_hit_rate'])} of the prompts)"),
            ("hottest block", f"{popularity['hottest_block_references']:,} references"),
            ("hottest 1 % of the blocks", _references(popularity["top_1_percent_reference_share"])),
            ("hottest 10 %", _references(popularity["top_10_percent_reference_share"])),
            ("reused within a minute", percent(reuse["within_1_minute_share"])),
            ("reused within ten", percent(reuse["within_10_minutes_share"])),
            ("first turns", of(sessions["first_turn_requests"], trace["requests"])),
        ]
    )  # fmt: skip
    figures = ("mean", "p10", "p50", "p90", "p99", "max")
    spread = make_table("distribution", *figures, right=figures)
    for name, row in (
        ("prompt, tokens", trace["input_length_tokens"]),
        ("output, tokens", trace["output_length_tokens"]),
        ("shared prefix, tokens", sharing["shared_prefix_tokens"]),
        ("reuse distance, blocks", reuse["distance_blocks"]),
        ("session depth, turns", sessions["depth_turns"]),
    ):
        spread.add_row(
            name, *(f"{row[figure]:,.{1 if figure == 'mean' else 0}f}" for figure in figures)
        )
    spread.add_row("reuse time", *(seconds(reuse["time_ms"][figure] / 1000) for figure in figures))
    return Group(head, spread)


def _references(share: float) -> str:
    return f"{percent(share)} of the references"


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
