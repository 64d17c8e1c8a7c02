"""`prefixctl replay`, a trace through a daemon or through the policies alone, and `demo`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...proto.vocabulary import SaveReason, Tier
from . import lab
from .command import Ctl, ExitCode, command, make_console, print_json
from .options import ReasonName, TierChoice, parse_seconds, parse_size

LIVE = "With --live: through a running daemon"


class ReplayCommand(TyperCommand):
    """Lets `--json` stand alone for `--json -`, as with every other command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for argument, following in zip(args, [*args[1:], "--"], strict=True):
            given.append(argument)
            if argument == "--json" and following.startswith("--"):
                given.append(lab.STDOUT)
        return super().parse_args(ctx, given)


def register(app: typer.Typer) -> None:
    """Add `demo` and `replay`."""
    command(app, "demo", panel="Start here")(demo)
    command(app, "replay", panel=lab.LAB, cls=ReplayCommand, own_json=True)(replay)


def replay(
    ctl: Ctl,
    trace: lab.TraceArgument,
    live: Annotated[
        bool, typer.Option("--live", help="Replay through a running daemon, with real bytes.")
    ] = False,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    block_tokens: lab.BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    block_bytes: Annotated[
        int,
        typer.Option(
            metavar="SIZE", parser=parse_size, help="Payload of a block.", show_default="4KiB"
        ),
    ] = 4096,
    json_file: lab.JsonFileOption = None,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Processes.", rich_help_panel=LIVE)
    ] = 1,
    tier: Annotated[
        TierChoice, typer.Option(help="Where blocks are saved.", rich_help_panel=LIVE)
    ] = TierChoice.RAM,
    reason: Annotated[
        ReasonName, typer.Option(help="The save reason.", rich_help_panel=LIVE)
    ] = ReasonName.FINISH,
    speed: Annotated[
        float,
        typer.Option(
            min=0,
            help="0: as fast as possible; 1: as the timestamps say; 10: ten times faster.",
            rich_help_panel=LIVE,
        ),
    ] = 0.0,
    salt: Annotated[
        str, typer.Option(help="Replays with other salts share nothing.", rich_help_panel=LIVE)
    ] = "",
    reconnect_wait: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=parse_seconds,
            help="How long to wait, in all, for a daemon that went away.",
            rich_help_panel=LIVE,
        ),
    ] = 60.0,
) -> None:
    """Replay a trace.

    With --live through a running daemon: per request, claim the longest run of its blocks that
    is there, read it and verify every byte, save the rest, release. Exits 1 on any mismatch.
    """
    if not live:
        raise typer.BadParameter("say --live")
    from ..replay.live import LiveOptions
    from ..replay.trace import read_trace
    from .replay_live import run_live, tiers_of, totals_view

    target = lab.STDOUT if json_file is None and ctl.as_json else json_file
    with ctl.connect() as daemon:
        present = tiers_of(daemon)
    options = LiveOptions(
        address=ctl.address,
        workers=workers,
        tiers=present if tier is TierChoice.ALL else (Tier[tier.name],),
        reason=SaveReason[reason.name],
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        salt=salt,
        speed=speed,
        reconnect_wait_s=reconnect_wait,
    )
    reader = read_trace(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
    totals = run_live(reader, options)
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
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1_200,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
) -> None:
    """Show prefixd at work: a private daemon, three tiers, real bytes.

    Starts a daemon of its own with small budgets in a temporary directory, makes a multi-turn
    trace, replays it with a few workers through all three tiers, verifies every byte that comes
    back, and cleans up.
    """
    from .demo import DemoOptions, run_demo

    console = make_console(stderr=ctl.as_json)
    result = run_demo(DemoOptions(requests, workers, seed), console)
    if ctl.as_json:
        print_json(result.as_dict())
    if not result.good:
        raise typer.Exit(ExitCode.PROBLEM)
    if result.totals.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
