"""What the commands over traces found, as tables for people. Input is the JSON that they write, but
for `replay-live`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto.units import format_bytes, format_duration, percent
from ...lab import report
from ...lab.optimal import OPTIMAL
from ...lab.page import label
from ...lab.simulate import TouchOrder
from .text_tables import make_table, pairs_table, size

Json = Mapping[str, Any]

#: At how many capacities `curve_view` shows a curve.
CURVE_ROWS: Final = 16


def seconds(value: float) -> str:
    """`59m12s`, `850ms`."""
    return format_duration(round(value * 1e9) if value >= 1 else round(value * 1e3) * 10**6)


def written(data: Json) -> RenderableType:
    """The trace that was made or converted."""
    trace, saving = data["trace"], data["saving"]
    rows: list[tuple[str, RenderableType]] = [
        ("requests", f"{trace['requests']:,} in {seconds(trace['duration_s'])}"),
        ("prompt tokens", f"{trace['prompt_tokens']:,}"),
        ("blocks", f"{trace['blocks']:,}, {trace['unique_blocks']:,} different, "
                   f"{data['block_tokens']} tokens each"),
        ("unlimited cache", f"hits {percent(saving['infinite_block_hit_rate'])} of the blocks, "
                            f"{percent(saving['infinite_hit_rate'])} of the tokens"),
    ]  # fmt: skip
    if "formats" in data:
        formats = ", ".join(f"{count:,} of {name}" for name, count in data["formats"].items())
        rows.insert(0, ("records read", formats))
    if data["output"] != "-":
        rows.insert(0, ("written", data["output"]))
    return pairs_table(rows)


def recorded_view(data: Json) -> RenderableType:
    """The trace that was recorded."""
    output = data["output"]
    paths = [output] if isinstance(output, str) else output
    rows: list[tuple[str, RenderableType]] = [
        ("requests", f"{data['requests']:,} in {seconds(data['seconds'])}"),
        ("prompt tokens", f"{data['prompt_tokens']:,}"),
        ("blocks", f"{data['blocks']:,}, {data['hit_blocks']:,} of them hit"),
        ("clients", f"{data['most_recording_sessions']:,} at once"),
    ]
    if data["requests"] and paths != ["-"]:
        rows.insert(0, ("written", ", ".join(paths)))
    return pairs_table(rows)


def formats_view(rows: Sequence[Json]) -> RenderableType:
    """The formats that `trace convert` reads, each with an example."""
    parts: list[RenderableType] = []
    for row in rows:
        parts.append(Text.assemble((row["name"], "bold"), f"  {row['about']}"))
        parts += [Text(f"  {line}", style="dim") for line in row["example"]]
    return Group(*parts)


def analysis(data: Json) -> RenderableType:
    """What `analyze` found."""
    trace, sharing, saving = data["trace"], data["sharing"], data["saving"]
    reuse, popularity, sessions = data["reuse"], data["popularity"], data["sessions"]
    blocks, unique = trace["blocks"], trace["unique_blocks"]

    def of(count: int, whole: int) -> str:
        return f"{count:,}  ({percent(count / whole)})" if whole else f"{count:,}"

    head = pairs_table(
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
    spread = make_table("distribution|>" + "|>".join(figures))
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
    """How much memory in which tiers, and what reordering would add."""
    reorder = data["reorder"]
    block = f"{format_bytes(data['stored_block_bytes'])} a block"
    head = pairs_table(
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
    table = make_table("tier|>budget|>at most|>share of the saves|>hit rate up to here")
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


def replay_view(data: Json, block_bytes: int | None = None) -> RenderableType:
    """The trace in a line, then a row for each replay."""
    results = data["results"]
    parts: list[RenderableType] = [trace_line(data["trace"]), results_table(results, block_bytes)]
    if any("worth" in row for row in results):
        parts.append(worth_table(results, block_bytes))
    parts += [
        parts_table(results, name)
        for name in ("over_time", "by_owner")
        if any(name in row for row in results)
    ]
    return Group(*parts)


def worth_table(results: Sequence[Json], block_bytes: int | None = None) -> Table:
    """What each policy saves."""
    table = make_table(
        "policy|>capacity|>hit rate|>TTFT saved|>GPU hours saved|>money saved|>a month",
        name_columns=2,
    )
    for row in results:
        worth, capacity = row["worth"], row["capacity_blocks"]
        money = [
            "-" if amount is None else f"{amount:,.2f}"
            for amount in (worth["money_saved"], worth["money_saved_per_month"])
        ]
        table.add_row(
            label(row["policy"]),
            format_bytes(capacity * block_bytes) if block_bytes else f"{capacity:,}",
            percent(row["overall_hit_rate"]),
            seconds(worth["ttft_saved_s"]),
            f"{worth['gpu_hours_saved']:,.2f}",
            *money,
        )
    return table


def parts_table(results: Sequence[Json], name: str) -> Table:
    """The hit rate over time or by owner, of the best policy at each capacity."""
    shown = [results[n] for n in report.best_results(results) if results[n]["policy"] != OPTIMAL]
    heads = [f">{label(row['policy'])}, {row['capacity_blocks']:,}" for row in shown]
    first = "from" if name == "over_time" else "model, tenant"
    table = make_table("|".join([first, ">prompt tokens", *heads]))
    for index, part in enumerate(shown[0][name] if shown else ()):
        if name == "over_time":
            title = seconds(part["from_s"])
        else:
            title = ", ".join(filter(None, (part["model"], part["tenant"]))) or "-"
        rates = (percent(row[name][index]["hit_rate"]) for row in shown)
        table.add_row(title, f"{part['prompt_tokens']:,}", *rates)
    return table


def results_table(results: Sequence[Json], block_bytes: int | None = None) -> Table:
    """A row for each replay."""
    sizes = ">size|" if block_bytes else ""
    table = make_table(
        f"policy|>capacity|{sizes}>hit rate|>hit tokens|>p10|>p50|>p90"
        "|>resident|>evictions|>ghosts|>moves per access|>seconds",
        name_columns=2,
    )
    for row in results:
        capacity, spread = row["capacity_blocks"], row["hit_tokens_per_request"]
        order = row["touch_order"]
        name = label(row["policy"])
        table.add_row(
            name if order == TouchOrder.IN_ORDER else f"{name}, {order}",
            f"{capacity:,}",
            *((format_bytes(capacity * block_bytes),) if block_bytes else ()),
            percent(row["overall_hit_rate"]),
            f"{row['total_hit_tokens']:,}",
            *(f"{spread[figure]:,}" for figure in ("p10", "p50", "p90")),
            *(f"{row[figure]:,}" for figure in ("final_cache_blocks", "evictions", "ghost_blocks")),
            f"{row['moves_per_access']:.2f}",
            f"{row['seconds']:.2f}",
        )
    return table


def curve_view(data: Json) -> RenderableType:
    """The trace in a line, the curve at some capacities, its knee, the samples, the replays."""
    block_bytes, knee = data["block_bytes"], data["curve"]["knee"]
    best = data["trace"]["infinite_hit_tokens"]
    sizes = ">size|" if block_bytes else ""
    table = make_table(f">capacity|{sizes}>LRU hit rate|>hit tokens|>of unlimited|mark")
    points = data["curve"]["points"]
    last, steps = len(points) - 1, max(1, min(CURVE_ROWS, len(points)) - 1)
    shown = [points[last * step // steps] for step in range(steps + 1)]
    if knee is not None:
        shown.append(knee)
    for capacity, point in sorted({row["capacity_blocks"]: row for row in shown}.items()):
        table.add_row(
            f"{capacity:,}",
            *((format_bytes(capacity * block_bytes),) if block_bytes else ()),
            percent(point["hit_rate"]),
            f"{point['hit_tokens']:,}",
            percent(point["hit_tokens"] / best if best else 0.0),
            "knee" if point is knee else "",
        )
    parts: list[RenderableType] = [trace_line(data["trace"]), table]
    if data["sampled"]:
        parts.append(_samples_table(data["sampled"]))
    if data["results"]:
        parts.append(results_table(data["results"], block_bytes))
    return Group(*parts)


def _samples_table(sampled: Sequence[Json]) -> Table:
    table = make_table(">sampled|>blocks|>mean error|>largest error|>knee|>seconds")
    for sample in sampled:
        knee = sample["knee"]
        table.add_row(
            percent(sample["sample_rate"]),
            f"{sample['sampled_blocks']:,}",
            percent(sample["mean_absolute_error"]),
            percent(sample["max_absolute_error"]),
            "none" if knee is None else f"{knee['capacity_blocks']:,}",
            f"{sample['seconds']:.2f}",
        )
    return table


def trace_line(trace: Json) -> Text:
    """The trace in numbers, and what an unlimited cache hits of it."""
    return Text(
        f"{trace['requests']:,} requests, {trace['prompt_tokens']:,} prompt tokens, "
        f"{trace['blocks']:,} blocks, {trace['unique_blocks']:,} different; an unlimited cache "
        f"hits {trace['infinite_hit_tokens']:,} tokens ({percent(trace['infinite_hit_rate'])})"
    )


def fleet_view(data: Json) -> RenderableType:
    """The trace and the fleet in a line each, then the sources of hits, the blocks that were moved,
    and other fleets."""
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
    prompt_tokens = data["total_prompt_tokens"]
    table = make_table("hits from|>blocks|>tokens|>of the prompts")
    for source, _, name in report.SOURCES:
        tokens = data[f"{name}_tokens"]
        share = percent(tokens / prompt_tokens if prompt_tokens else 0.0)
        table.add_row(source, f"{data[f'{name}_blocks']:,}", f"{tokens:,}", share)
    blocks = sum(data[f"{name}_blocks"] for _, _, name in report.SOURCES)
    share = percent(data["overall_hit_rate"])
    table.add_row("in all", f"{blocks:,}", f"{data['total_hit_tokens']:,}", share, style="bold")
    return table


def _moves_table(data: Json) -> Table:
    total = data["moved"]["total"]
    sized, timed = total["bytes"] is not None, total["bytes_per_second"] is not None
    bytes_ = ("|>bytes" if sized else "") + ("|>a second" if timed else "")
    table = make_table(f"moved|>blocks|>tokens{bytes_}")
    for move, name in report.MOVES:
        moved = data["moved"][name]
        cells = [f"{moved['blocks']:,}", f"{moved['tokens']:,}"]
        cells += [size(moved["bytes"])] if sized else []
        cells += [f"{size(moved['bytes_per_second'])}/s"] if timed else []
        table.add_row(move, *cells, style="bold" if name == "total" else None)
    return table


def _balance_line(data: Json) -> str:
    prefilled = [node["prefilled_tokens"] for node in data["per_node"]]
    mean = sum(prefilled) / len(prefilled)
    return (
        f"A node prefills {min(prefilled):,} to {max(prefilled):,} tokens, {mean:,.0f} on average."
    )


def _comparison_table(data: Json) -> Table:
    rows: dict[str, dict[str, str]] = {}
    for each in data["compared"]:
        rows.setdefault(each["route"], {})[report.sharing(each)] = percent(each["overall_hit_rate"])
    ways = "|>".join(next(iter(rows.values())))
    table = make_table(f"route|>{ways}", title="hit rate by route")
    table.columns[0].no_wrap = True
    for route, rates in rows.items():
        table.add_row(route, *rates.values())
    return table
