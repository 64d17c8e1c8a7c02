"""`prefixctl replay`, a trace through a daemon or through the policies alone, and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...proto.vocabulary import SaveReason, Tier
from . import lab
from .command import Ctl, ExitCode, command, make_console, print_json
from .options import PathName, ReasonName, TierChoice, parse_seconds, parse_size

OFFLINE: Final = "Without --live: through the policies, no daemon needed"
LIVE: Final = "With --live: through a running daemon, with real bytes"

DEFAULT_BLOCK_BYTES: Final = 4096
DEFAULT_RECONNECT_WAIT_S: Final = 60.0


def register(app: typer.Typer) -> None:
    """Add `demo` and `replay`."""
    command(app, "demo", panel="Start here")(demo)
    command(app, "replay", panel=lab.LAB, cls=lab.JsonCommand, own_json=True)(replay)


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
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Payload of a block (--live: 4KiB unless named).",
        ),
    ] = None,
    json_file: lab.JsonFileOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Policies; unless named, all.", rich_help_panel=OFFLINE
        ),
    ] = None,
    capacity_blocks: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Capacities in blocks.", rich_help_panel=OFFLINE),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...", help="Capacities, with --block-bytes.", rich_help_panel=OFFLINE
        ),
    ] = None,
    capacity_fraction: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE,...",
            help="Capacities as shares of the different blocks.",
            rich_help_panel=OFFLINE,
        ),
    ] = None,
    touch_order: Annotated[
        str | None,
        typer.Option(
            metavar="in-order|root-mru",
            help="How a request touches its blocks; in-order unless named.",
            rich_help_panel=OFFLINE,
        ),
    ] = None,
    per_request: Annotated[
        bool,
        typer.Option(
            "--per-request", help="Every request's hits, too, in the JSON.", rich_help_panel=OFFLINE
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; unless named, one a core.", rich_help_panel=OFFLINE),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, help="Client processes; 1 unless named.", rich_help_panel=LIVE
        ),
    ] = None,
    tier: Annotated[
        TierChoice | None,
        typer.Option(help="Where blocks are saved; ram unless named.", rich_help_panel=LIVE),
    ] = None,
    reason: Annotated[
        ReasonName | None,
        typer.Option(help="The save reason; finish unless named.", rich_help_panel=LIVE),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="0: as fast as possible (unless named); 1: as the timestamps say; 10: ten times "
            "faster.",
            rich_help_panel=LIVE,
        ),
    ] = None,
    path: Annotated[
        PathName | None,
        typer.Option(
            help="local (unless named): read in place what the daemon hands over; grpc: everything "
            "by rpc, under claims.",
            rich_help_panel=LIVE,
        ),
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(help="Replays with other salts share nothing.", rich_help_panel=LIVE),
    ] = None,
    reconnect_wait: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=parse_seconds,
            help="How long to wait, in all, for a daemon that went away; 60s unless named.",
            rich_help_panel=LIVE,
        ),
    ] = None,
) -> None:
    """Replay a trace, and say what it hits.

    Without --live, every policy at every capacity, exactly. With --live, through a running
    daemon: per request, claim the longest run of its blocks that is there, read it and verify
    every byte, save the rest, release. Exits 1 on any mismatch.
    """
    offline_only = {
        "policy": policy,
        "capacity_blocks": capacity_blocks,
        "capacity": capacity,
        "capacity_fraction": capacity_fraction,
        "touch_order": touch_order,
        "per_request": per_request or None,
        "jobs": jobs,
    }
    live_only = {
        "workers": workers,
        "tier": tier,
        "reason": reason,
        "speed": speed,
        "path": path,
        "salt": salt,
        "reconnect_wait": reconnect_wait,
    }
    _refuse(offline_only if live else live_only, "goes without" if live else "needs")
    target = lab.STDOUT if json_file is None and ctl.as_json else json_file
    common = {
        "limit": limit,
        "skip_bad": skip_bad,
        "block_tokens": block_tokens,
        "block_bytes": block_bytes,
    }
    if live:
        _replay_live(ctl, trace, target, common, _given(live_only))
    else:
        _replay_offline(trace, target, common | _given(offline_only))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(options: dict[str, Any], verb: str) -> None:
    """An option that would silently do nothing is a mistake."""
    for name in _given(options):
        raise typer.BadParameter(f"--{name.replace('_', '-')} {verb} --live")


def _replay_offline(trace: str, target: str | None, options: dict[str, Any]) -> None:
    from .replay_offline import offline_view, run_offline

    with lab.bad_input():
        data, notes = run_offline(trace, **options)
    lab.warn(notes)
    lab.show(data, target, lambda: offline_view(data, options["block_bytes"]))


def _replay_live(
    ctl: Ctl, trace: str, target: str | None, common: dict[str, Any], options: dict[str, Any]
) -> None:
    from ...proto.errors import UnknownTier
    from ..lab.trace import read_trace
    from ..lab.worker import LiveOptions
    from .replay_live import run_live, tiers_of, totals_view

    block_bytes = common["block_bytes"] or DEFAULT_BLOCK_BYTES
    tier = options.get("tier", TierChoice.RAM)
    with ctl.connect() as daemon:
        present = tiers_of(daemon)
    tiers = present if tier is TierChoice.ALL else (Tier[tier.name],)
    if not set(tiers) <= set(present):
        raise UnknownTier(f"this daemon has no {tier.value} tier")
    live = LiveOptions(
        address=ctl.address,
        workers=options.get("workers", 1),
        tiers=tiers,
        reason=SaveReason[options.get("reason", ReasonName.FINISH).name],
        block_bytes=block_bytes,
        block_tokens=common["block_tokens"],
        salt=options.get("salt", ""),
        speed=options.get("speed", 0.0),
        in_place=options.get("path", PathName.LOCAL) is PathName.LOCAL,
        reconnect_wait_s=options.get("reconnect_wait", DEFAULT_RECONNECT_WAIT_S),
    )
    reader = read_trace(
        trace,
        limit=common["limit"],
        skip_bad=common["skip_bad"],
        block_tokens=common["block_tokens"],
    )
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
