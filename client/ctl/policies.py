"""What policies, capacities and fleets would hit of a trace: replay, curve, advise, simulate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from . import lab
from .command import parse_seconds, parse_size, root_options

if TYPE_CHECKING:
    from ..lab.trace import Request

#: Panels of options in --help.
PICTURES: Final = "Pictures and pages"
SAMPLE: Final = "Sampling"
LIMITS: Final = "The most of each tier; without any of these, all is RAM"
GOAL: Final = "The goal"
SHARING: Final = "What the nodes share; without any of these, nothing"


def replay(
    ctx: typer.Context,
    trace: lab.TraceArgument,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    block_bytes: lab.BlockBytesOption = None,
    policy: lab.PoliciesOption = None,
    capacity_blocks: lab.CapacityBlocksOption = None,
    capacity: lab.CapacityOption = None,
    capacity_fraction: lab.CapacityFractionOption = None,
    touch_order: lab.TouchOrderOption = "in-order",
    per_request: Annotated[
        bool, typer.Option("--per-request", help="Add the hits of every request to the JSON.")
    ] = False,
    jobs: lab.JobsOption = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Replay a trace through the policies, and show what each hits at each capacity.

    Exact, and without a daemon: replay-live sends a trace through one.
    """
    from .policy_runs import ALL_POLICIES, run_replay
    from .views.lab import replay_view

    target = lab.json_target(root_options(ctx), json_file)
    with lab.bad_input():
        data, notes = run_replay(
            trace,
            policy=policy or ALL_POLICIES,
            capacity_blocks=capacity_blocks,
            capacity=capacity,
            block_bytes=block_bytes,
            capacity_fraction=capacity_fraction,
            block_tokens=block_tokens,
            touch_order=touch_order,
            per_request=per_request,
            limit=limit,
            skip_bad=skip_bad,
            jobs=jobs,
        )
    lab.warn(notes)
    lab.show(data, target, lambda: replay_view(data, block_bytes))


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
        str | None,
        typer.Option(metavar="FILE", help="Draw the curve.", rich_help_panel=PICTURES),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write a page with all results.", rich_help_panel=PICTURES
        ),
    ] = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Show the hit rate at every capacity.

    One pass over a trace gives the exact hit tokens of LRU for every number of
    blocks, and the knee, where more memory starts to pay less. The other policies
    are replayed at the capacities that are named; with --html also without any, at
    some shares of the different blocks.
    """
    from ..lab.charts import curve_picture
    from ..lab.report import render_report
    from .policy_runs import ALL_POLICIES, DEFAULT_FRACTIONS, run_curve
    from .views.lab import curve_view

    target = lab.json_target(root_options(ctx), json_file)
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
            help="Or the model's layers, KV heads, head dimension and bytes per number: "
            "32,8,128,2 is Llama 3 8B in 16 bits.",
        ),
    ] = None,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
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
    """Say how much memory a hit rate takes, tier by tier.

    From the exact LRU curve: the working set, 20 % of headroom, the budgets of
    RAM, /dev/shm and disk, what sorting requests by shared prefix would add, and
    a piece of prefixd.toml.
    """
    from ..lab import advise as adviser
    from ..lab.curve import curve_of
    from ..lab.trace import read_trace
    from .views.lab import advice
    from .views.progress import Rereading, reading

    target = lab.json_target(root_options(ctx), json_file)
    limits = {"ram": ram, "shm": shm, "disk": disk}
    with lab.bad_input():
        token_bytes = _token_bytes(bytes_per_token, model_shape)
        reader = read_trace(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        requests = (
            list(reading(reader, "reading"))
            if trace == lab.STDOUT  # standard input can be read only once
            else Rereading(reader, "measuring", "dividing", "reordering")
        )
        found = adviser.advise(
            requests,
            lambda given: curve_of(given, block_tokens=block_tokens),
            bytes_per_token=token_bytes,
            block_tokens=block_tokens,
            hit_rate=None if hit_rate is None else _share(hit_rate),
            fraction_of_best=_share(fraction_of_best),
            limits={tier: size for tier, size in limits.items() if size is not None},
            window_ms=round(reorder_window * 1000),
        )
    data = {"path": trace, "model_shape": model_shape, **found.to_json()}
    lab.warn(reader.warnings())
    lab.show(data, target, lambda: advice(data))


def _token_bytes(bytes_per_token: str | None, model_shape: str | None) -> int:
    from ...proto.units import parse_bytes
    from ..lab.advise import parse_model_shape

    if (bytes_per_token is None) == (model_shape is None):
        raise ValueError("say how big a token's KV state is: --bytes-per-token or --model-shape")
    if model_shape is not None:
        return parse_model_shape(model_shape).bytes_per_token
    assert bytes_per_token is not None
    return parse_bytes(bytes_per_token)


def _share(text: str) -> float:
    """`0.3` or `30%`."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no share: write 0.3 or 30%") from None


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
            help="Blocks that a shared tier holds; 0 means no shared tier.",
            rich_help_panel=SHARING,
        ),
    ] = 0,
    write: Annotated[
        str,
        typer.Option(
            metavar="all|second-use",
            help="What enters the shared tier: every block that was not found, or only blocks that "
            "were used before.",
            rich_help_panel=SHARING,
        ),
    ] = "all",
    peer_reads: Annotated[
        bool,
        typer.Option(
            "--peer-reads", help="Nodes also read from each other.", rich_help_panel=SHARING
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
            "--compare",
            help="Also simulate every route: without sharing, with peer reads, with a shared tier.",
        ),
    ] = False,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with all results.")
    ] = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Say what a fleet of nodes would hit.

    Each node has its own LRU. A request's blocks are looked up from the root on: a
    block in its node's LRU is a local hit, one in the shared tier's LRU a shared
    hit and, with --peer-reads, one in another node's LRU a peer hit. The first
    block in none of them ends the look-up. Then the places that gave blocks count
    these as used, all blocks of the request enter the node's LRU, and the blocks
    that --write names enter the shared one; always leaf first, root last.

    [bold]round-robin[/]: request r (from 0) goes to node r mod N.
    [bold]hash[/]: by the CRC32 of the first two blocks.
    [bold]least-loaded[/]: to the node that has prefilled the fewest tokens so far.
    [bold]prefix-aware[/]: to the node that will have prefilled the fewest with it.
    """
    from ...proto.units import parse_bytes
    from ..lab.columns import TraceColumns
    from ..lab.fleet import Fleet, Route, Write, fleet_document, simulate_fleet
    from ..lab.fleet_page import render_fleet
    from ..lab.trace import read_trace
    from .policy_runs import parse_name, title_of
    from .views.lab import fleet_view
    from .views.progress import counting, reading

    target = lab.json_target(root_options(ctx), json_file)
    with lab.bad_input():
        requested = Fleet(
            nodes,
            capacity_blocks,
            parse_name("route", route, Route),
            shared_blocks,
            parse_name("write policy", write, Write),
            peer_reads,
        )
        token_bytes = None if bytes_per_token is None else parse_bytes(bytes_per_token)
        if token_bytes is not None and token_bytes < 1:
            raise ValueError(f"a token must have at least one byte, got {bytes_per_token}")
        reader = read_trace(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        timed = _Timed(reading(reader, "reading"))
        columns = TraceColumns.load(timed)
        others = requested.alternatives() if compare else []
        fleets = dict.fromkeys([requested, *others])
        results = {
            fleet: simulate_fleet(columns, fleet, block_tokens=block_tokens)
            for fleet in counting(fleets, len(fleets), "simulating")
        }
        data = fleet_document(
            title_of(trace),
            {**columns.summary(block_tokens).to_json(), "duration_s": timed.duration_s},
            results[requested],
            compared=[results[fleet] for fleet in others],
            block_tokens=block_tokens,
            bytes_per_token=token_bytes,
        )
    lab.warn(reader.warnings())
    if html is not None:
        lab.write_text(html, render_fleet(data))
    lab.show(data, target, lambda: fleet_view(data))


class _Timed:
    """Passes requests on, and measures the time from the earliest to the latest of them."""

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
