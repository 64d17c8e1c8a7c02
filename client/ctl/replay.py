"""`prefixctl replay`, a trace through the policies, `replay-live`, through a daemon, and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...proto.vocabulary import SaveReason, Tier
from . import lab
from .command import Ctl, ExitCode, command, make_console, print_json
from .options import (
    REASON_NAMES,
    TIER_NAMES,
    PathName,
    parse_reason,
    parse_seconds,
    parse_size,
    parse_tier,
)

DEFAULT_BLOCK_BYTES: Final = 4096
ALL_TIERS: Final = "all"


def register(app: typer.Typer) -> None:
    """Add `demo`, `replay` and `replay-live`."""
    command(app, "demo", panel="Start here")(demo)
    app.command("replay", cls=lab.JsonCommand, rich_help_panel=lab.LAB)(replay)
    command(app, "replay-live", panel=lab.LAB, cls=lab.JsonCommand, own_json=True)(replay_live)


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
        bool, typer.Option("--per-request", help="Every request's hits, too, in the JSON.")
    ] = False,
    jobs: lab.JobsOption = None,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Replay a trace through the policies, and say what each hits at each capacity.

    Exactly, and without a daemon: `replay-live` sends a trace through one.
    """
    from .replay_offline import ALL_POLICIES, offline_view, run_offline

    target = lab.json_target(ctx, json_file)
    with lab.bad_input():
        data, notes = run_offline(
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
    lab.show(data, target, lambda: offline_view(data, block_bytes))


def parse_target(text: str) -> str | Tier:
    """A tier, or `all` of them."""
    return text if text == ALL_TIERS else parse_tier(text)


def replay_live(
    ctl: Ctl,
    trace: lab.TraceArgument,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    block_bytes: Annotated[
        int, typer.Option(metavar="SIZE", parser=parse_size, help="Payload of a block.")
    ] = DEFAULT_BLOCK_BYTES,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Client processes.")] = 1,
    tier: Annotated[
        Any,
        typer.Option(
            metavar=f"{TIER_NAMES}|{ALL_TIERS}", parser=parse_target, help="Where blocks are saved."
        ),
    ] = Tier.RAM.label,
    reason: Annotated[
        SaveReason,
        typer.Option(metavar=REASON_NAMES, parser=parse_reason, help="The save reason."),
    ] = SaveReason.FINISH.label,  # type: ignore[assignment]  # parsed like what is given
    speed: Annotated[
        float,
        typer.Option(
            min=0,
            help="0: as fast as possible; 1: as the timestamps say; 10: ten times faster.",
        ),
    ] = 0.0,
    path: Annotated[
        PathName,
        typer.Option(
            help="local: read in place what the daemon hands over; grpc: everything by rpc, under "
            "claims."
        ),
    ] = PathName.LOCAL,
    salt: Annotated[str, typer.Option(help="Replays with other salts share nothing.")] = "",
    reconnect_wait: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=parse_seconds,
            help="How long to wait, in all, for a daemon that went away.",
        ),
    ] = 60.0,
    json_file: lab.JsonFileOption = None,
) -> None:
    """Replay a trace through a running daemon, with real bytes.

    Per request: claim the longest run of its blocks that is there, read it and verify every byte,
    save the rest, release. Exits 1 on any mismatch.
    """
    from ...proto.errors import UnknownTier
    from ..lab.replayer import LiveOptions
    from ..lab.trace import TraceReader
    from .replay_live import run_live, tiers_of, totals_view

    target = lab.STDOUT if json_file is None and ctl.as_json else json_file
    with ctl.connect() as daemon:
        present = tiers_of(daemon)
    tiers = present if tier == ALL_TIERS else (tier,)
    if not set(tiers) <= set(present):
        raise UnknownTier(f"this daemon has no {tier.label} tier")
    live = LiveOptions(
        address=ctl.address,
        workers=workers,
        tiers=tiers,
        reason=reason,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        salt=salt,
        speed=speed,
        in_place=path is PathName.LOCAL,
        reconnect_wait_s=reconnect_wait,
    )
    reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
    totals = run_live(reader, live)
    lab.warn(reader.warnings())
    data = {"trace": trace, "block_bytes": block_bytes, **totals.as_dict()}
    lab.show(data, target, lambda: totals_view(totals, f"live replay of {trace}"))
    if totals.gave_up:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if not totals.good:
        raise typer.Exit(ExitCode.PROBLEM)
    if totals.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def demo(
    ctl: Ctl,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 2_400,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write its end as an SVG, too.")
    ] = None,
) -> None:
    """Show prefixd at work: a private daemon, three tiers, real bytes, a crash.

    Starts a daemon of its own with small budgets in a temporary directory, makes a multi-turn
    trace, replays it with a few workers through all three tiers, kills the daemon in the middle
    and starts the next one, verifies every byte that comes back, and cleans up.
    """
    from .demo import DemoOptions, run_demo

    console = make_console(stderr=ctl.as_json)
    result = run_demo(DemoOptions(requests, workers, seed), console, picture)
    if ctl.as_json:
        print_json(result.as_dict())
    if not result.good:
        raise typer.Exit(ExitCode.PROBLEM)
    if result.totals.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
