"""The work of `prefixctl replay` and `curve`: from a trace to the data that they write as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.progress import MofNCompleteColumn

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...proto.units import parse_bytes
from ...tiers.eviction import POLICIES
from ..lab.columns import TraceColumns, TraceSummary
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
from ..lab.trace import Request, read_trace
from .views.progress import bar, reading

T = TypeVar("T")
Name = TypeVar("Name", bound=StrEnum)
ALL_POLICIES: Final = ",".join(POLICIES)
#: The capacities when none is named, as shares of the different blocks.
DEFAULT_FRACTIONS: Final = "0.01,0.05,0.1,0.2,0.5"


def run_replay(
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

    `policy` and the capacities are comma-separated lists. Capacities are numbers of blocks, sizes
    (`64GiB`, rounded down to blocks of `block_bytes`) and fractions of the different blocks; all
    that are given are replayed, or `DEFAULT_FRACTIONS` when none is. `jobs` is the number of
    processes, None for one per CPU.

    Raises ValueError (`TraceError` for the trace) with a sentence that says what is wrong.
    """
    order = parse_name("touch order", touch_order, TouchOrder)
    cells_for = _plan(policy, order, capacity_blocks, capacity, block_bytes, capacity_fraction)
    reader = read_trace(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
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

    `sample_rate` (`0.01,0.1`) and `sample_blocks` (`8192`) add curves from samples, with their
    error. Without `exact`, the one requested sample is the curve, and memory does not grow with the
    trace. Capacities, as for `run_replay`, add replays of the policies; the default is none.

    Raises ValueError (`TraceError` for the trace) with a sentence that says what is wrong.
    """
    order = parse_name("touch order", touch_order, TouchOrder)
    samplings = _samplings(sample_rate, sample_blocks, seed)
    wants_replays = any((capacity_blocks, capacity, capacity_fraction))
    if not exact and (len(samplings) != 1 or wants_replays):
        raise ValueError("without the exact curve it takes one sample, and no capacities")
    cells_for = _plan(policy, order, capacity_blocks, capacity, block_bytes, capacity_fraction)
    reader = read_trace(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
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
    data = report_data(
        title_of(trace),
        summary,
        curve,
        results=results,
        sampled=sampled,
        block_bytes=block_bytes,
        most_points=points,
    )
    return data, reader.warnings()


def title_of(trace: str) -> str:
    """The name of a trace in reports."""
    return "standard input" if trace == "-" else Path(trace).name


def parse_list(what: str, text: str | None, kind: Callable[[str], T]) -> list[T]:
    """The values of a comma-separated list, each once. None is an empty list.

    Raises ValueError that says `what` an item should be.
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
    """The member with this value. Raises ValueError with the known values."""
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
    """A function from the number of different blocks to the cells to replay. Raises ValueError for
    bad options before the trace is read."""
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
    """Keyword arguments for `sampled_curve`. Raises ValueError for bad ones."""
    samplings: list[dict[str, Any]] = [
        *({"rate": rate} for rate in parse_list("sampling rate", rates, float)),
        *({"max_blocks": size} for size in parse_list("number of blocks", sizes, int)),
    ]
    for sampling in samplings:
        sampled_curve((), **sampling)  # checks them
    return [{**sampling, "seed": seed} for sampling in samplings]


class _Stream:
    """The blocks and lengths of requests, as a curve takes them. Counts the blocks."""

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
