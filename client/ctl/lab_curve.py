"""`prefixctl curve`, the hit rate at every capacity, and `prefixctl advise`, what to buy."""

from __future__ import annotations

from typing import Annotated

import typer

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from . import lab
from .command import Ctl, command
from .options import TiersOption, chosen, parse_seconds, parse_size

PICTURES = "Pictures and pages"
SAMPLE = "Sampling"
LIMITS = "What there is of each tier; without any of these, all is RAM"
WANTED = "What is wanted"


def register(app: typer.Typer) -> None:
    """Add `curve`, `curve-live` and `advise`."""
    app.command("curve", cls=lab.JsonCommand, rich_help_panel=lab.LAB)(curve)
    command(app, "curve-live", panel=lab.LAB, cls=lab.JsonCommand, own_json=True)(curve_live)
    app.command("advise", cls=lab.JsonCommand, rich_help_panel=lab.LAB)(advise)


def curve(
    ctx: typer.Context,
    trace: lab.TraceArgument,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    block_bytes: lab.BlockBytesOption = None,
    touch_order: lab.TouchOrderOption = "in-order",
    points: Annotated[int, typer.Option(min=2, help="Points of the curve to write.")] = 256,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    policy: lab.PoliciesOption = None,
    capacity_blocks: lab.CapacityBlocksOption = None,
    capacity: lab.CapacityOption = None,
    capacity_fraction: lab.CapacityFractionOption = None,
    jobs: lab.JobsOption = None,
    sample_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE,...",
            help="Also estimate the curve from this share of the blocks, and say how far off "
            "the estimate is.",
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
            help="Nothing but the estimate, in the memory of the sample: for huge traces.",
            rich_help_panel=SAMPLE,
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Another seed, another sample.", rich_help_panel=SAMPLE)
    ] = 0,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw it.", rich_help_panel=PICTURES)
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="One page with all of it.", rich_help_panel=PICTURES),
    ] = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Show the hit rate at every capacity.

    One pass over a trace gives the exact hit tokens of LRU for every number of
    blocks, and the knee, where more memory starts to pay less. Other policies are
    replayed at single capacities; with --html at some shares of the different
    blocks, unless capacities are named.
    """
    from ..lab.charts import curve_picture
    from ..lab.report import render_report
    from .replay_offline import ALL_POLICIES, DEFAULT_FRACTIONS, curve_view, run_curve

    target = lab.json_target(ctx, json_file)
    if html is not None and not sample_only and not (capacity_blocks or capacity):
        capacity_fraction = capacity_fraction or DEFAULT_FRACTIONS
    with lab.bad_input():
        data, notes = run_curve(
            trace,
            exact=not sample_only,
            sample_rate=sample_rate,
            sample_blocks=sample_blocks,
            seed=seed,
            points=points,
            policy=policy or ALL_POLICIES,
            capacity_blocks=capacity_blocks,
            capacity=capacity,
            block_bytes=block_bytes,
            capacity_fraction=capacity_fraction,
            block_tokens=block_tokens,
            touch_order=touch_order,
            limit=limit,
            skip_bad=skip_bad,
            jobs=jobs,
        )
    lab.warn(notes)
    if svg is not None:
        lab.write_text(svg, curve_picture(data))
    if html is not None:
        lab.write_text(html, render_report(data))
    lab.show(data, target, lambda: curve_view(data))


def curve_live(
    ctl: Ctl,
    tier: TiersOption = None,
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE,...", help="The budgets to estimate: 64GiB,1TiB."),
    ] = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Show what the tiers of a running daemon would hit at other budgets.

    From what it was asked for since its start: the hit rate of each tier at its
    budget, and what LRU would have hit at a quarter, half, twice and four times
    that, estimated from a sample of its keys.
    """
    from ...proto.units import parse_bytes
    from .live_curve import live_curves, live_view
    from .replay_offline import parse_list

    target = lab.STDOUT if json_file is None and ctl.as_json else json_file
    with lab.bad_input():
        budgets_bytes = [parse_bytes(size) for size in parse_list("size", capacity, str)]
    with ctl.connect() as daemon:
        data = live_curves(daemon, chosen(tier), budgets_bytes)
    lab.show(data, target, lambda: live_view(data, by_size=bool(budgets_bytes)))


def advise(
    ctx: typer.Context,
    trace: lab.TraceArgument,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV state of a token, all layers: 131072 or 128KiB."),
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(
            metavar="L,H,D,B",
            help="Or the model's layers, KV heads, head dimension, bytes of a number: "
            "32,8,128,2 is Llama 3 8B in 16 bits.",
        ),
    ] = None,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    hit_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Prompt tokens to hit: 0.3 or 30%.", rich_help_panel=WANTED
        ),
    ] = None,
    fraction_of_best: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Or this much of what a cache without limits hits.",
            rich_help_panel=WANTED,
        ),
    ] = "0.9",
    ram: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_size, help="As 64GiB.", rich_help_panel=LIMITS),
    ] = None,
    shm: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_size, help="As 64GiB.", rich_help_panel=LIMITS),
    ] = None,
    disk: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_size, help="As 2TiB.", rich_help_panel=LIMITS),
    ] = None,
    reorder_window: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=parse_seconds,
            help="How long requests may wait to be sorted by prefix.",
            show_default="10s",
        ),
    ] = 10.0,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Say how much memory buys which hit rate, tier by tier.

    From the exact LRU curve: the working set, 20 % of headroom, the budgets of
    RAM, /dev/shm and disk, what sorting requests by shared prefix would add, and
    a piece of prefixd.toml.
    """
    from ..lab import advise as adviser
    from ..lab.curve import curve_of
    from ..lab.trace import TraceReader
    from . import lab_views as views
    from .progress import Rereading, reading

    target = lab.json_target(ctx, json_file)
    limits = {"ram": ram, "shm": shm, "disk": disk}
    with lab.bad_input():
        size = _token_bytes(bytes_per_token, model_shape)
        wanted = None if hit_rate is None else _share(hit_rate)
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        requests = (
            list(reading(reader, "reading"))
            if trace == lab.STDOUT  # which can be read once only
            else Rereading(reader, "measuring", "dividing", "reordering")
        )
        found = adviser.advise(
            requests,
            lambda given: curve_of(given, block_tokens=block_tokens),
            bytes_per_token=size,
            block_tokens=block_tokens,
            hit_rate=wanted,
            fraction_of_best=_share(fraction_of_best),
            limits={tier: size for tier, size in limits.items() if size is not None},
            window_ms=round(reorder_window * 1000),
        )
    data = {"path": trace, "model_shape": model_shape, **found.to_json()}
    lab.warn(reader.warnings())
    lab.show(data, target, lambda: views.advice(data))


def _token_bytes(bytes_per_token: str | None, model_shape: str | None) -> int:
    from ...proto.units import parse_bytes
    from ..lab.advise import model_bytes_per_token

    if (bytes_per_token is None) == (model_shape is None):
        raise ValueError("say how big a token's KV state is: --bytes-per-token or --model-shape")
    if model_shape is not None:
        return model_bytes_per_token(model_shape)
    assert bytes_per_token is not None
    return parse_bytes(bytes_per_token)


def _share(text: str) -> float:
    """`0.3` or `30%`."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no share: write 0.3 or 30%") from None
