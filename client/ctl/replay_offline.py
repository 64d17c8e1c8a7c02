"""`prefixctl replay` without a daemon, and `prefixctl curve`: from a trace file to the data
that the commands write as JSON, and the tables that people read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...proto.units import format_bytes, parse_bytes, percent
from ...tiers.eviction import POLICIES
from ..lab.charts import label
from ..lab.curve import DEFAULT_POINTS, LruCurve, exact_curve, sampled_curve
from ..lab.report import report_data
from ..lab.simulate import (
    Cell,
    ReplayResult,
    TouchOrder,
    available_jobs,
    replay_all,
    replay_document,
)
from ..lab.trace import Request, TraceColumns, TraceReader, TraceSummary
from .progress import bar, reading
from .render import make_table

Json = Mapping[str, Any]
T = TypeVar("T")
Name = TypeVar("Name", bound=StrEnum)

ALL_POLICIES = ",".join(POLICIES)
#: Capacities when none are named: shares of the different blocks.
DEFAULT_FRACTIONS = "0.01,0.05,0.1,0.2,0.5"


def run_offline(
    trace: str,
    *,
    policy: str = ALL_POLICIES,
    capacity_blocks: str | None = None,
    capacity: str | None = None,
    block_bytes: int | None = None,
    capacity_fraction: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    touch_order: str = TouchOrder.IN_ORDER,
    per_request: bool = False,
    limit: int | None = None,
    skip_bad: bool = False,
    jobs: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Replay a trace at every (policy, capacity): the JSON document, and notes on the input.

    The plural options are comma-separated lists: policy names; capacities in blocks, as sizes
    (`64GiB`, whole blocks of `block_bytes`) or as fractions of the different blocks, all of
    which are added up; without any, `DEFAULT_FRACTIONS`. `touch_order` may be a list too.
    `jobs` is the number of processes (None: one for each CPU).

    Raises ValueError (`TraceError` for the trace) with one sentence about what was wrong.
    """
    order = parse_name("touch order", touch_order, TouchOrder)
    cells_for = _plan(policy, order, capacity_blocks, capacity, block_bytes, capacity_fraction)
    reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
    columns = TraceColumns.load(reading(reader, "reading"))
    results = _replays(columns, cells_for(columns.unique_blocks), block_tokens, per_request, jobs)
    document = replay_document(columns.summary(block_tokens), results)
    return {"block_tokens": block_tokens, **document}, reader.warnings()


def run_curve(
    trace: str,
    *,
    exact: bool = True,
    sample_rate: str | None = None,
    sample_blocks: str | None = None,
    seed: int = 0,
    points: int = DEFAULT_POINTS,
    policy: str = ALL_POLICIES,
    capacity_blocks: str | None = None,
    capacity: str | None = None,
    block_bytes: int | None = None,
    capacity_fraction: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    touch_order: str = TouchOrder.IN_ORDER,
    limit: int | None = None,
    skip_bad: bool = False,
    jobs: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The LRU curve of a trace: the data of `report_data`, and notes on the input.

    `sample_rate` (`0.01,0.1`) and `sample_blocks` (`8192`) add curves from samples, with
    their error. Without `exact` the one sample that is asked for is the curve, and memory
    does not grow with the trace. Capacities, written as for `run_offline`, add replays of
    the policies there; without any there are none.

    Raises ValueError (`TraceError` for the trace) with one sentence about what was wrong.
    """
    order = parse_name("touch order", touch_order, TouchOrder)
    samplings = _samplings(sample_rate, sample_blocks, seed)
    wants_replays = any((capacity_blocks, capacity, capacity_fraction))
    if not exact and (len(samplings) != 1 or wants_replays):
        raise ValueError("without the exact curve it takes one sample, and no capacities")
    cells_for = _plan(policy, order, capacity_blocks, capacity, block_bytes, capacity_fraction)
    reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
    settings: dict[str, Any] = {"block_tokens": block_tokens, "touch_order": order}
    results: Sequence[ReplayResult] = ()
    sampled: list[LruCurve] = []
    if exact:
        columns = TraceColumns.load(reading(reader, "reading"))
        summary = columns.summary(block_tokens).to_json()
        curve = exact_curve(columns, **settings)
        sampled = [sampled_curve(columns, **sampling, **settings) for sampling in samplings]
        if wants_replays:
            results = _replays(columns, cells_for(columns.unique_blocks), block_tokens, False, jobs)
    else:
        stream = _Stream(reading(reader, "sampling"))
        curve = sampled_curve(stream, **samplings[0], **settings)
        summary = _estimated_summary(curve, stream.blocks)
    title = "standard input" if trace == "-" else Path(trace).name
    data = report_data(
        title,
        summary,
        curve,
        results=results,
        sampled=sampled,
        block_bytes=block_bytes,
        most_points=points,
    )
    return data, reader.warnings()


def parse_list(what: str, text: str | None, kind: Callable[[str], T]) -> list[T]:
    """The values of a comma-separated list without repeats; none for None.

    Raises ValueError with `what` it should have been.
    """
    values = []
    for part in (text or "").split(","):
        try:
            if part.strip():
                values.append(kind(part.strip()))
        except ValueError:
            raise ValueError(f"{part.strip()!r} is no {what}") from None
    if text is not None and not values:
        raise ValueError(f"no {what} given")
    return list(dict.fromkeys(values))


def parse_name(what: str, text: str, names: type[Name]) -> Name:
    """A member by its value. Raises ValueError with the values that there are."""
    try:
        return names(text)
    except ValueError:
        raise ValueError(f"unknown {what} {text!r}, known are {', '.join(names)}") from None


def _plan(
    policy: str,
    touch_order: TouchOrder,
    capacity_blocks: str | None,
    capacity: str | None,
    block_bytes: int | None,
    capacity_fraction: str | None,
) -> Callable[[int], list[Cell]]:
    """The cells for a number of different blocks; what is wrong is said before reading."""
    if block_bytes is not None and block_bytes < 1:
        raise ValueError(f"a block must have at least one byte, got {block_bytes}")
    if capacity is not None and block_bytes is None:
        raise ValueError("a capacity in bytes needs the bytes of a block (--block-bytes)")
    if capacity_blocks is capacity is capacity_fraction is None:
        capacity_fraction = DEFAULT_FRACTIONS
    blocks = parse_list("number of blocks", capacity_blocks, int)
    sizes = [parse_bytes(size) for size in parse_list("size", capacity, str)]
    fractions = parse_list("fraction", capacity_fraction, float)
    policies = parse_list("policy", policy, str)
    for name in policies:
        for count in (0, *blocks):
            Cell(name, count)
    for fraction in fractions:
        if not 0 <= fraction < float("inf"):
            raise ValueError(f"a fraction of the blocks must not be negative, got {fraction}")

    def cells(unique_blocks: int) -> list[Cell]:
        capacities = [
            *blocks,
            *(size // (block_bytes or 1) for size in sizes),
            *(round(fraction * unique_blocks) for fraction in fractions),
        ]
        return [Cell(p, c, touch_order) for p in policies for c in dict.fromkeys(capacities)]

    return cells


def _samplings(rates: str | None, sizes: str | None, seed: int) -> list[dict[str, Any]]:
    """Keyword arguments of `sampled_curve`, checked."""
    samplings: list[dict[str, Any]] = [
        *({"rate": rate} for rate in parse_list("sampling rate", rates, float)),
        *({"max_blocks": size} for size in parse_list("number of blocks", sizes, int)),
    ]
    for sampling in samplings:
        sampled_curve((), **sampling)
    return [{**sampling, "seed": seed} for sampling in samplings]


class _Stream:
    """Requests as a curve takes them, counting their blocks."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self.blocks = 0

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int]]:
        for request in self._requests:
            self.blocks += len(request.hash_ids)
            yield request.hash_ids, request.input_length


def _estimated_summary(curve: LruCurve, blocks: int) -> dict[str, Any]:
    summary = TraceSummary(
        curve.requests,
        blocks,
        curve.unique_blocks,
        curve.prompt_tokens,
        curve.infinite_hit_tokens,
    )
    return summary.to_json()


def _replays(
    columns: TraceColumns,
    cells: Sequence[Cell],
    block_tokens: int,
    per_request: bool,
    jobs: int | None,
) -> list[ReplayResult]:
    with bar(MofNCompleteColumn()) as progress:
        task = progress.add_task("replaying", total=len(cells))
        return replay_all(
            columns,
            cells,
            block_tokens=block_tokens,
            per_request=per_request,
            jobs=available_jobs() if jobs is None else jobs,
            on_result=lambda _result: progress.advance(task),
        )


def offline_view(data: Json, block_bytes: int | None = None) -> RenderableType:
    """The trace in a line, and every replay in a row."""
    return Group(trace_line(data["trace"]), results_table(data["results"], block_bytes))


def results_table(results: Sequence[Json], block_bytes: int | None = None) -> Table:
    """One row for each replay."""
    sizes = ("size",) if block_bytes else ()
    numbers = (
        "capacity", *sizes, "hit rate", "hit tokens", "p10", "p50", "p90",
        "resident", "evictions", "ghosts", "moves per access", "seconds",
    )  # fmt: skip
    table = make_table("policy", *numbers, right=numbers, name_columns=2)
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


def curve_view(data: Json, most_rows: int = 16) -> RenderableType:
    """The trace in a line, the curve at some capacities, its knee, the samples, the replays."""
    block_bytes, knee = data["block_bytes"], data["curve"]["knee"]
    best = data["trace"]["infinite_hit_tokens"]
    sizes = ("size",) if block_bytes else ()
    numbers = ("capacity", *sizes, "LRU hit rate", "hit tokens", "of unlimited")
    table = make_table(*numbers, "mark", right=numbers)
    points = data["curve"]["points"]
    last, steps = len(points) - 1, max(1, min(most_rows, len(points)) - 1)
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
    numbers = ("sampled", "blocks", "mean error", "largest error", "knee", "seconds")
    table = make_table(*numbers, right=numbers)
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
