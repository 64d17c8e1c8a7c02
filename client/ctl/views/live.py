"""Live replays in a terminal, and what other budgets of a running daemon would hit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto.units import percent
from ...lab.live_replay import Totals
from ...lab.replayer import STEPS
from .text_tables import make_table, pairs_table, size, tier_name
from .text_tables import percent as percent_of

Json = Mapping[str, Any]


def figures(totals: Totals) -> str:
    """The state of a replay in one line: `hit rate 8.9 %  412MiB/s verified  20MiB/s saved ...`."""
    seconds = totals.wall_seconds or 1.0
    line = (
        f"hit rate {percent_of(totals.hit_tokens, totals.prompt_tokens)}  "
        f"{size(totals.verified_bytes / seconds)}/s verified  "
        f"{size(totals.saved_bytes / seconds)}/s saved  "
        f"{totals.mismatches:,} mismatches"
    )
    if totals.unavailable_requests:
        line += f"  {totals.unavailable_requests:,} unavailable"
    return line


def totals_view(totals: Totals, title: str) -> RenderableType:
    """The tables after a replay, then problems. The number of mismatches comes last."""
    tables = (_summary(totals, title), _latency_table(totals))
    return Group(*tables, *troubles(totals), mismatch_line(totals))


def troubles(totals: Totals) -> list[Text]:
    """What went wrong, except for the number of mismatches."""
    lines = []
    if totals.interrupted:
        lines.append(Text("stopped before the end", style="yellow"))
    if totals.gave_up:
        lines.append(Text("the daemon was away for too long; gave up", style="bold red"))
    if totals.workers_lost:
        lines.append(Text(f"{totals.workers_lost} workers died", style="bold red"))
    return lines + [Text(f"- {sentence}", style="red") for sentence in totals.described]


def mismatch_line(totals: Totals) -> Text:
    """`0 mismatches`, green if there are none."""
    style = "bold red" if totals.mismatches else "bold green"
    return Text(f"{totals.mismatches:,} mismatches", style=style)


def _summary(totals: Totals, title: str) -> Table:
    seconds = totals.wall_seconds
    per_second = totals.requests / seconds if seconds else 0.0
    saves = ", ".join(f"{count:,} {status}" for status, count in sorted(totals.saves.items()))
    rpcs = ", ".join(f"{count:,} {name}" for name, count in sorted(totals.rpcs.items()) if count)
    rows: list[tuple[str, RenderableType]] = [
        ("requests", f"{totals.requests:,} in {seconds:.1f} s ({per_second:,.0f}/s)"),
        (
            "hit rate by tokens",
            f"{100 * totals.hit_rate:.2f} %  "
            f"({totals.hit_tokens:,} of {totals.prompt_tokens:,} tokens)",
        ),
        (
            "hit rate by requests",
            f"{100 * totals.request_hit_rate:.2f} %  "
            f"({totals.requests_with_hit:,} of {totals.requests:,})",
        ),
        ("verified", f"{size(totals.verified_bytes)}, every byte of {totals.hit_blocks:,} "
                     "blocks"),
        ("saved", f"{size(totals.saved_bytes)}; blocks: {saves or 'none'}"),
        *([("of earlier replays", f"{totals.earlier_blocks:,} of the blocks that were hit")]
          if totals.earlier_blocks else []),
        ("rpcs", rpcs or "none"),
    ]  # fmt: skip
    if totals.unavailable_requests or totals.reconnects:
        rows.append(
            (
                "daemon away",
                f"{totals.unavailable_requests:,} requests without an answer, "
                f"{totals.reconnects:,} reconnects",
            )
        )
    if totals.lost_blocks:
        rows.append(("lost", f"{totals.lost_blocks:,} claimed blocks that never arrived whole"))
    return pairs_table(rows, title=title, style="dim")


def _latency_table(totals: Totals) -> Table:
    table = make_table("latency|>calls|>p50 ms|>p99 ms")
    for step in STEPS:
        latencies = totals.latencies[step]
        if latencies.count:
            quantiles = (latencies.quantile(0.5), latencies.quantile(0.99))
            table.add_row(step, f"{latencies.count:,}", *[f"{ns / 1e6:.3f}" for ns in quantiles])
    return table


def live_view(data: Json, *, by_size: bool = False) -> RenderableType:
    """A line for each tier: its hit rate now, and estimates at other budgets. `by_size` names these
    budgets by their size instead of as multiples of the tier's own."""
    tiers = data["tiers"]
    labels = [
        f">at {size(point['budget_bytes'])}"
        if by_size
        else f">at {point['times_budget'] or 0:.3g}x"
        for point in tiers[0]["points"]
    ]
    estimates = "".join(f"{label}|" for label in labels)
    table = make_table(f"tier|policy|>budget|>looked for|>hit rate now|{estimates}>sampled")
    for tier in tiers:
        share = tier["sample_rate"]
        table.add_row(
            tier_name(tier["tier"]),
            tier["policy"],
            size(tier["budget_bytes"]),
            f"{tier['total_tokens']:,} tokens",
            percent(tier["hit_rate"], 1),
            *[percent(point["hit_rate"], 1) for point in tier["points"]],
            f"{tier['sampled_keys']:,} keys" + (f", {100 * share:.3g} %" if share else ""),
        )
    note = (
        "Estimated: what LRU would have hit since the daemon started, had it had that budget "
        "all the time. How far the estimate at the budget that there is lies from the hit rate "
        "now says how good it is."
    )
    return Group(table, Text(note, style="dim"))
