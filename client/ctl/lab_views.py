"""What the policy lab found, as tables for people. Input: the JSON that the commands write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...proto.units import format_bytes, format_duration, percent
from .render import make_table

Json = Mapping[str, Any]


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


def advice(data: Json) -> RenderableType:
    """How much memory, split over which tiers, and what reordering would add."""
    reorder = data["reorder"]
    block = f"{format_bytes(data['stored_block_bytes'])} a block"
    head = _pairs(
        [
            ("wanted", f"{percent(data['wanted_hit_rate'])} of the prompt tokens; without any "
                       f"limit {percent(data['best_hit_rate'])}"),
            ("capacity", f"{data['capacity_blocks']:,} of {data['unique_blocks']:,} different "
                         f"blocks: LRU hits {percent(data['hit_rate'])}"),
            ("working set", f"{format_bytes(data['working_set_bytes'])}  ({block})"),
            ("budget", f"{format_bytes(data['budget_bytes'])}  (+ {100 * data['headroom']:g} % "
                       "headroom: saves in flight, pinned entries, another day's traffic)"),
        ]
    )  # fmt: skip
    numbers = ("budget", "at most", "share of the saves", "hit rate up to here")
    table = make_table("tier", *numbers, right=numbers)
    for tier in data["tiers"]:
        limit = tier["limit_bytes"]
        table.add_row(
            tier["tier"],
            format_bytes(tier["budget_bytes"]),
            "no limit" if limit is None else format_bytes(limit),
            percent(tier["save_share"]),
            percent(tier["hit_rate_up_to_here"]),
        )
    lines: list[RenderableType] = [head, table]
    if data["missing_bytes"]:
        missing = format_bytes(data["missing_bytes"])
        lines.append(Text(f"{missing} of the budget find no room within these limits.", "yellow"))
    if sum(tier["budget_bytes"] > 0 for tier in data["tiers"]) > 1:
        lines.append(
            Text(
                "The split: fastest tier first. A save never moves, so divide the saves by ranges "
                "of the key, in these shares; all tiers then forget blocks of the same age and "
                f"act as one. Replayed so, this trace hits {percent(data['split_hit_rate'])}."
            )
        )
    lines += [Text(), Text(_reordering(reorder)), Text(), Text(data["toml"].rstrip(), "cyan")]
    return Group(*lines)


def _reordering(reorder: Json) -> str:
    added, window = reorder["added_hit_tokens"], seconds(reorder["window_ms"] / 1000)
    text = (
        f"Sorting requests by shared prefix within {window} windows would make it "
        f"{percent(reorder['hit_rate'])} ({added:+,} tokens)"
    )
    blocks = reorder["same_hit_rate_capacity_blocks"]
    if added > 0 and blocks is not None:
        text += f", or need only {blocks:,} blocks for the same"
    return text + "."


def _references(share: float) -> str:
    return f"{percent(share)} of the references"


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
