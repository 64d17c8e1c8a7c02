"""What policies would hit of a trace at which capacity: `replay`, `curve` and `advise`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import lab
from .command import Ctl, size_option, time_option
from .failures import bad_input
from .output_files import (
    STDOUT,
    ForceOption,
    OutputOption,
    check_new,
    show_result,
    warn,
    write_text,
)

if TYPE_CHECKING:
    from ..lab.breakdown import Prices
    from ..lab.curve import LruCurve
    from ..lab.model_config import KvSize
    from ..lab.simulate import Cell, ReplayResult, TouchOrder
    from ..lab.trace import TraceColumns

#: Panels of options in --help.
PICTURES: Final = "Pictures and pages"
SAMPLE: Final = "Sampling"
WORTH: Final = "What hits are worth"
LIMITS: Final = "The most of each tier; without any of these, all is RAM"
GOAL: Final = "The goal"
PrefillOption = Annotated[
    float | None,
    typer.Option(
        "--prefill-tokens-per-s",
        metavar="N",
        help="Prompt tokens that a replica of the model computes in a second: shows the time to "
        "first token and the GPU hours that hits save.",
        rich_help_panel=WORTH,
    ),
]
GpuHourOption = Annotated[
    float | None,
    typer.Option(
        "--gpu-hour",
        metavar="PRICE",
        help="Price of a GPU for an hour: shows money, too.",
        rich_help_panel=WORTH,
    ),
]
GpusOption = Annotated[
    int, typer.Option("--gpus", min=1, help="GPUs of a replica.", rich_help_panel=WORTH)
]
#: The capacities when none is named, as shares of the different blocks.
DEFAULT_FRACTIONS: Final = "0.01,0.05,0.1,0.2,0.5"


def replay(
    ctl: Ctl,
    trace: lab.TraceArgument,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    block_tokens: lab.KnownBlockTokensOption = None,
    block_bytes: lab.BlockBytesOption = None,
    policy: lab.PoliciesOption = None,
    capacity_blocks: lab.CapacityBlocksOption = None,
    capacity: lab.CapacityOption = None,
    capacity_fraction: lab.CapacityFractionOption = None,
    touch_order: lab.TouchOrderOption = "in-order",
    per_request: Annotated[
        bool, typer.Option("--per-request", help="Add the hits of every request to the JSON.")
    ] = False,
    prefill_tokens_per_s: PrefillOption = None,
    gpu_hour: GpuHourOption = None,
    gpus: GpusOption = 1,
    over_time: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show the hit rate in N parts of the time."),
    ] = None,
    warm_up: Annotated[
        float | None,
        time_option("Show the hit rate after this time, too: 10m.", show_default=False),
    ] = None,
    jobs: lab.JobsOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Replay a trace through the policies: what each hits at each capacity.

    Exact, and without a daemon: replay-live sends a trace through one. `optimal` is
    no policy but Belady's bound: the most blocks that any cache of this size could
    hit, if it knew the future.
    """
    from ..lab.breakdown import Requests
    from ..lab.simulate import TouchOrder
    from ..lab.trace import TraceColumns, TraceReader
    from .views.lab import replay_view
    from .views.progress import reading

    check_new(output, force=force)
    with bad_input():
        order = lab.parse_name("touch order", touch_order, TouchOrder)
        cells = _cells(policy, order, capacity_blocks, capacity, block_bytes, capacity_fraction)
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        block_size = reader.block_tokens
        prices = _prices(prefill_tokens_per_s, gpu_hour, gpus)
        requests = Requests(reading(reader, "reading"))
        columns = TraceColumns.load(requests)
        divided = bool(over_time or warm_up is not None or requests.owners > 1)
        results = _replays(columns, cells, block_size, per_request or divided, jobs)
        rows = [result.to_json() for result in results]
        for result, row in zip(results, rows, strict=True):
            if prices is not None:
                row["worth"] = prices.worth(
                    result.total_hit_tokens, len(columns), requests.duration_s
                )
            if result.per_request is not None and divided:
                if over_time:
                    row["over_time"] = requests.over_time(*result.per_request, over_time)
                if warm_up is not None:
                    row["after_warm_up"] = requests.after(*result.per_request, warm_up)
                if requests.owners > 1:
                    row["by_owner"] = requests.by_owner(*result.per_request)
            if not per_request:
                row.pop("per_request", None)
        notes = lab.notes_on(reader, columns)
        data = {
            "block_tokens": block_size,
            "duration_s": requests.duration_s,
            "assumptions": reader.assumptions(),
            "trace": columns.summary(block_size).to_json(),
            "results": rows,
        }
    show_result(
        ctl,
        data,
        lambda: replay_view(data, block_bytes),
        output,
        force=force,
        rows=rows,
    )
    warn(notes)


def curve(
    ctl: Ctl,
    trace: lab.TraceArgument,
    block_tokens: lab.KnownBlockTokensOption = None,
    block_bytes: lab.BlockBytesOption = None,
    touch_order: lab.TouchOrderOption = "in-order",
    points: Annotated[int, typer.Option(min=2, help="Points of the curve to write.")] = 256,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    policy: lab.PoliciesOption = None,
    capacity_blocks: lab.CapacityBlocksOption = None,
    capacity: lab.CapacityOption = None,
    capacity_fraction: lab.CapacityFractionOption = None,
    prefill_tokens_per_s: PrefillOption = None,
    gpu_hour: GpuHourOption = None,
    gpus: GpusOption = 1,
    jobs: lab.JobsOption = None,
    sample_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE,...",
            help="Also estimate the curve from this share of the blocks, and show the error of "
            "the estimate.",
            rich_help_panel=SAMPLE,
        ),
    ] = None,
    sample_blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="The same from at most N blocks.", rich_help_panel=SAMPLE
        ),
    ] = None,
    sample_only: Annotated[
        bool,
        typer.Option(
            "--sample-only",
            help="Only the estimate, which needs memory for the sample alone: for huge traces.",
            rich_help_panel=SAMPLE,
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Another seed takes another sample.", rich_help_panel=SAMPLE)
    ] = 0,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the curve.", rich_help_panel=PICTURES)
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write a page with all results.", rich_help_panel=PICTURES
        ),
    ] = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Show the hit rate at every capacity.

    One pass over a trace gives the exact hit tokens of LRU for every number of
    blocks, and the knee, where more memory starts to pay less. The other policies
    are replayed at the capacities that are named; with --html also without any, at
    some shares of the different blocks.
    """
    from ..lab.breakdown import Requests
    from ..lab.curve import exact_curve, sampled_curve
    from ..lab.page import curve_picture
    from ..lab.report import render_report, report_data
    from ..lab.simulate import TouchOrder
    from ..lab.trace import TraceColumns, TraceReader, TraceSummary
    from .views.lab import curve_view
    from .views.progress import reading

    check_new(output, svg, html, force=force)
    if html is not None and not sample_only and not (capacity_blocks or capacity):
        capacity_fraction = capacity_fraction or DEFAULT_FRACTIONS
    with_replays = any((capacity_blocks, capacity, capacity_fraction))
    with bad_input():
        samplings = _samplings(sample_rate, sample_blocks, seed)
        prices = _prices(prefill_tokens_per_s, gpu_hour, gpus)
        if sample_only and (len(samplings) != 1 or with_replays):
            raise ValueError("without the exact curve it takes one sample, and no capacities")
        order = lab.parse_name("touch order", touch_order, TouchOrder)
        cells = _cells(policy, order, capacity_blocks, capacity, block_bytes, capacity_fraction)
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        settings: dict[str, Any] = {"block_tokens": reader.block_tokens, "touch_order": order}
        notes: list[str] = []
        results: list[ReplayResult] = []
        sampled: list[LruCurve] = []
        if sample_only:
            timed = Requests(reading(reader, "sampling"))
            blocks_of = ((request.hash_ids, request.input_length) for request in timed)
            found = sampled_curve(blocks_of, **samplings[0], **settings)
        else:
            timed = Requests(reading(reader, "reading"))
            columns = TraceColumns.load(timed)
            found = exact_curve(columns, **settings)
            notes = lab.collision_notes(trace, columns.collisions)
            sampled = [sampled_curve(columns, **sampling, **settings) for sampling in samplings]
            if with_replays:
                results = _replays(columns, cells, reader.block_tokens, False, jobs)
        summary = TraceSummary(
            found.requests,
            timed.blocks,
            found.unique_blocks,
            found.prompt_tokens,
            found.infinite_hit_tokens,
        )
        data = report_data(
            lab.title_of(trace),
            summary.to_json(),
            found,
            results=results,
            sampled=sampled,
            block_bytes=block_bytes,
            most_points=points,
            prices=prices,
            duration_s=timed.duration_s,
        )
    notes = reader.assumptions() + reader.warnings() + notes
    if svg is not None:
        write_text(svg, curve_picture(data), force=force)
    if html is not None:
        write_text(html, render_report(data), force=force)
    show_result(
        ctl, data, lambda: curve_view(data), output, force=force, rows=data["curve"]["points"]
    )
    warn(notes)


def _cells(
    policy: str | None,
    order: TouchOrder,
    capacity_blocks: str | None,
    capacity: str | None,
    block_bytes: int | None,
    capacity_fraction: str | None,
) -> Callable[[int], list[Cell]]:
    """A function from the number of different blocks to the cells to replay. Raises ValueError for
    bad options, before the trace is read."""
    from ...proto.units import parse_bytes
    from ...tiers.eviction import POLICIES
    from ..lab.optimal import OPTIMAL
    from ..lab.simulate import Cell

    if capacity is not None and block_bytes is None:
        raise ValueError("a capacity in bytes needs the bytes of a block (--block-bytes)")
    if capacity_blocks is capacity is capacity_fraction is None:
        capacity_fraction = DEFAULT_FRACTIONS
    blocks = lab.parse_list("number of blocks", capacity_blocks, int)
    sizes = [parse_bytes(size) for size in lab.parse_list("size", capacity, str)]
    fractions = lab.parse_list("fraction", capacity_fraction, float)
    policies = [*POLICIES, OPTIMAL] if policy is None else lab.parse_list("policy", policy, str)
    for name in policies:
        for count in (0, *blocks):
            Cell(name, count)  # checks both
    for fraction in fractions:
        if not 0 <= fraction < float("inf"):
            raise ValueError(f"a fraction of the blocks must not be negative, got {fraction}")

    def cells(unique_blocks: int) -> list[Cell]:
        capacities = [
            *blocks,
            *(size // (block_bytes or 1) for size in sizes),
            *(round(fraction * unique_blocks) for fraction in fractions),
        ]
        return [Cell(p, c, order) for p in policies for c in dict.fromkeys(capacities)]

    return cells


def _replays(
    columns: TraceColumns,
    cells_for: Callable[[int], list[Cell]],
    block_tokens: int,
    per_request: bool,
    jobs: int | None,
) -> list[ReplayResult]:
    from ..lab.simulate import available_jobs, replay_all
    from .views.progress import counting

    cells = cells_for(columns.unique_blocks)
    replays = replay_all(
        columns,
        cells,
        block_tokens=block_tokens,
        per_request=per_request,
        jobs=available_jobs() if jobs is None else jobs,
    )
    with closing(replays):  # so that no process goes on after Ctrl-C
        done = dict(counting(replays, len(cells), "replaying"))
    return [done[index] for index in range(len(cells))]


def _prices(prefill_tokens_per_s: float | None, gpu_hour: float | None, gpus: int) -> Prices | None:
    from ..lab.breakdown import Prices

    if prefill_tokens_per_s is not None:
        return Prices(prefill_tokens_per_s, gpu_hour, gpus)
    if gpu_hour is not None:
        raise ValueError("money needs the speed of prefill, too (--prefill-tokens-per-s)")
    return None


def _samplings(rates: str | None, sizes: str | None, seed: int) -> list[dict[str, Any]]:
    """Keyword arguments for `sampled_curve`. Raises ValueError for bad ones."""
    from ..lab.curve import sampled_curve

    samplings: list[dict[str, Any]] = [
        *({"rate": rate} for rate in lab.parse_list("sampling rate", rates, float)),
        *({"max_blocks": size} for size in lab.parse_list("number of blocks", sizes, int)),
    ]
    for sampling in samplings:
        sampled_curve((), **sampling)  # checks them
    return [{**sampling, "seed": seed} for sampling in samplings]


def advise(
    ctl: Ctl,
    trace: lab.TraceArgument,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV state of a token, all layers: 131072 or 128KiB."),
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(
            metavar="L,H,D,B",
            help="Or the model's layers, KV heads, head dimension and bytes per number: "
            "32,8,128,2 is Llama 3 8B in 16 bits.",
        ),
    ] = None,
    model_config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Or the model's config.json, as Hugging Face has it: latent attention, sliding "
            "windows and hybrids are known.",
        ),
    ] = None,
    kv_dtype_bytes: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Bytes of a number in the KV cache (default: as config.json says)."
        ),
    ] = None,
    block_tokens: lab.KnownBlockTokensOption = None,
    hit_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="The share of prompt tokens to hit: 0.3 or 30%.",
            rich_help_panel=GOAL,
        ),
    ] = None,
    fraction_of_best: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Or a share of the hits of a cache without limits.",
            rich_help_panel=GOAL,
        ),
    ] = "0.9",
    ram: Annotated[int | None, size_option("As 64GiB.", panel=LIMITS)] = None,
    shm: Annotated[int | None, size_option("As 64GiB.", panel=LIMITS)] = None,
    disk: Annotated[int | None, size_option("As 2TiB.", panel=LIMITS)] = None,
    reorder_window: Annotated[
        float, time_option("How long requests may wait to be sorted by prefix.", show_default="10s")
    ] = 10.0,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Say how much memory a hit rate takes, tier by tier.

    From the exact LRU curve: the working set, 20 % of headroom, the budgets of
    RAM, /dev/shm and disk, what sorting requests by shared prefix would add, and
    a piece of prefixd.toml.
    """
    from ..lab import advise as adviser
    from ..lab.trace import TraceReader
    from .views.lab import advice
    from .views.progress import Rereading, reading

    check_new(output, force=force)
    limits = {"ram": ram, "shm": shm, "disk": disk}
    with bad_input():
        token_bytes, model = _token_bytes(
            bytes_per_token, model_shape, model_config, kv_dtype_bytes
        )
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        requests = (
            list(reading(reader, "reading"))
            if trace == STDOUT  # standard input can be read only once
            else Rereading(reader, "measuring", "dividing", "reordering")
        )
        found = adviser.advise(
            requests,
            bytes_per_token=token_bytes,
            block_tokens=reader.block_tokens,
            hit_rate=None if hit_rate is None else _share(hit_rate),
            fraction_of_best=_share(fraction_of_best),
            limits={tier: size for tier, size in limits.items() if size is not None},
            window_ms=round(reorder_window * 1000),
        )
    data = {
        "path": trace,
        "model_shape": model_shape,
        "model": None if model is None else model.to_json(),
        **found.to_json(),
    }
    show_result(ctl, data, lambda: advice(data), output, force=force)
    if model is not None:
        warn([f"{model_config}: {model.bytes_per_token:,} bytes a token, {model.how}"])
    warn(reader.assumptions() + reader.warnings())


def _token_bytes(
    bytes_per_token: str | None,
    model_shape: str | None,
    model_config: str | None,
    kv_dtype_bytes: float | None,
) -> tuple[int, KvSize | None]:
    from ...proto.units import parse_bytes
    from ..lab.advise import model_bytes_per_token
    from ..lab.model_config import kv_size

    if [bytes_per_token, model_shape, model_config].count(None) != 2:
        raise ValueError(
            "say how big a token's KV state is: --bytes-per-token, --model-shape or --model-config"
        )
    if kv_dtype_bytes is not None and (model_config is None or not 0 < kv_dtype_bytes <= 16):
        raise ValueError("--kv-dtype-bytes is above 0, at most 16, and goes with --model-config")
    if model_config is not None:
        size = kv_size(model_config, kv_dtype_bytes)
        if not size.bytes_per_token:
            raise ValueError(f"{model_config}: no layer of this model keeps a KV state per token")
        return size.bytes_per_token, size
    if model_shape is not None:
        return model_bytes_per_token(model_shape), None
    assert bytes_per_token is not None
    return parse_bytes(bytes_per_token), None


def _share(text: str) -> float:
    """`0.3` or `30%`."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no share: write 0.3 or 30%") from None
