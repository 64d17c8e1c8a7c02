"""Traffic on a running daemon, `replay-live` and `curve-live`, and on a private one, `demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...proto.vocabulary import SaveReason, Tier
from . import lab
from .command import (
    REASON_NAMES,
    TIER_NAMES,
    Ctl,
    TiersOption,
    chosen,
    make_console,
    parse_reason,
    parse_tier,
    print_json,
    size_option,
    time_option,
)
from .failures import ExitCode, bad_input, exit_if
from .output_files import ForceOption, OutputOption, check_new, show_result, warn

if TYPE_CHECKING:
    from ...proto import prefixd_pb2 as pb
    from ..lab.live_replay import Totals
    from ..lab.replayer import LiveOptions
    from ..lab.trace import TraceReader
    from .connection import AdminConnection

DEFAULT_BLOCK_BYTES: Final = 4096
ALL_TIERS: Final = "all"


class PathName(StrEnum):
    """How a client on the daemon's host reads payloads."""

    LOCAL = "local"
    GRPC = "grpc"


def parse_target(text: str) -> str | Tier:
    """A tier, or `all` of them."""
    return text if text == ALL_TIERS else parse_tier(text)


def replay_live(
    ctl: Ctl,
    trace: lab.TraceArgument,
    limit: lab.LimitOption = None,
    skip_bad: lab.SkipBadOption = False,
    block_tokens: lab.KnownBlockTokensOption = None,
    block_bytes: Annotated[int, size_option("Payload of a block.")] = DEFAULT_BLOCK_BYTES,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Client processes.")] = 1,
    tier: Annotated[
        Any,
        typer.Option(
            metavar=f"{TIER_NAMES}|{ALL_TIERS}", parser=parse_target, help="Where blocks are saved."
        ),
    ] = Tier.RAM.label,
    reason: Annotated[
        SaveReason,
        typer.Option(
            metavar="REASON", parser=parse_reason, help=f"The save reason: {REASON_NAMES}."
        ),
    ] = SaveReason.FINISH.label,  # type: ignore[assignment]  # parsed like a given value
    speed: Annotated[
        float,
        typer.Option(
            min=0, help="0: as fast as possible; 1: as the timestamps say; 10: ten times faster."
        ),
    ] = 0.0,
    path: Annotated[
        PathName,
        typer.Option(
            help="local: read in place where the daemon allows it; grpc: all by rpc, under claims."
        ),
    ] = PathName.LOCAL,
    salt: Annotated[
        str | None,
        typer.Option(
            help="Replays with different salts share nothing.",
            show_default="from the content of TRACE; of standard input: another each time",
        ),
    ] = None,
    reconnect_wait: Annotated[
        float, time_option("How long to wait, in all, for a daemon that went away.")
    ] = 60.0,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Replay a trace through a running daemon, with real bytes.

    For each request: claim the longest cached run of its blocks, read it and verify every byte,
    save the other blocks, release the claim. Exits 1 on any mismatch.
    """
    from ...proto.errors import UnknownTier
    from ..lab.replayer import LiveOptions, content_salt
    from ..lab.trace import TraceReader
    from .views.live import totals_view

    check_new(output, force=force)
    with ctl.connect() as daemon:
        before = {Tier(each.tier): each for each in daemon.stats().tiers}
    present = tuple(before)
    tiers = present if tier == ALL_TIERS else (tier,)
    if not set(tiers) <= set(present):
        raise UnknownTier(f"this daemon has no {tier.label} tier")
    with bad_input():
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        block_size = reader.block_tokens
        if salt is None:
            salt = content_salt(trace)
    options = LiveOptions(
        address=ctl.address,
        workers=workers,
        tiers=tiers,
        reason=reason,
        block_bytes=block_bytes,
        block_tokens=block_size,
        salt=salt,
        speed=speed,
        in_place=path is PathName.LOCAL,
        reconnect_wait_s=reconnect_wait,
    )
    totals = run_live(reader, options)
    warn(reader.assumptions() + reader.warnings() + _notes(ctl, tiers, before, totals))
    data = {"trace": trace, "block_bytes": block_bytes, "salt": salt, **totals.as_dict()}
    show_result(
        ctl, data, lambda: totals_view(totals, f"live replay of {trace}"), output, force=force
    )
    exit_if(totals.gave_up, ExitCode.UNREACHABLE)
    exit_if(not totals.good)
    exit_if(totals.interrupted, ExitCode.INTERRUPTED)


def _notes(
    ctl: Ctl, tiers: Sequence[Tier], before: Mapping[Tier, pb.TierStats], totals: Totals
) -> list[str]:
    """What a user of the totals should know. `before`: what the tiers had before the replay."""
    from ...proto.errors import PrefixdError

    notes = []
    if totals.earlier_blocks:
        notes.append(f"{totals.earlier_blocks:,} blocks were hit that an earlier replay had left; "
                     "another --salt begins with none")  # fmt: skip
    with suppress(PrefixdError), ctl.connect() as daemon:
        after = {Tier(each.tier): each for each in daemon.stats().tiers}
        for tier in tiers:
            payload = after[tier].payload_bytes - before[tier].payload_bytes
            stored = after[tier].published_bytes - before[tier].published_bytes
            if stored > 2 * payload > 0:
                notes.append(
                    f"the blocks take {stored / payload:.3g} times their payload in the "
                    f"{tier.label} tier, as each takes whole slabs ({tier.label}.slab): larger "
                    "blocks (--block-bytes) fill it better"
                )
    return notes


def run_live(reader: TraceReader, options: LiveOptions) -> Totals:
    """Replay with a progress bar on standard error, if that is a terminal."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from ..lab.live_replay import LiveReplay
    from .views.live import figures
    from .views.progress import bar_of

    with bar_of(
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    ) as progress:
        # The bar counts requests if their number is known, else bytes of the file.
        total = reader.limit if reader.limit is not None else reader.total_bytes
        task = progress.add_task("", total=total, figures="")

        def update(totals: Totals) -> None:
            done = totals.requests if reader.limit is not None else reader.consumed_bytes
            progress.update(task, completed=done, figures=figures(totals))

        return LiveReplay(reader, options, update).run()


def curve_live(
    ctl: Ctl,
    tier: TiersOption = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE,...", help="The budgets to estimate: 64GiB,1TiB.")
    ] = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Show what the tiers of a running daemon would hit at other budgets.

    From the look-ups since its start: the hit rate of each tier at its budget, and what LRU would
    have hit at a quarter, half, twice and four times that, estimated from a sample of the keys.
    """
    from ...proto.units import parse_bytes
    from .views.live import live_view

    check_new(output, force=force)
    with bad_input():
        budgets_bytes = [parse_bytes(size) for size in lab.parse_list("size", capacity, str)]
    with ctl.connect() as daemon:
        data = live_curves(daemon, chosen(tier), budgets_bytes)
    show_result(
        ctl, data, lambda: live_view(data, by_size=bool(budgets_bytes)), output, force=force
    )


def live_curves(
    daemon: AdminConnection, tiers: Sequence[Tier], budgets_bytes: Sequence[int] = ()
) -> dict[str, Any]:
    """The curve of each of `tiers` (empty: of all), as JSON.

    `budgets_bytes` are the budgets to estimate; empty: a quarter, half, once, twice and four times
    that of each tier. Rates are null until there was a look-up. Raises CurveDisabled when the
    daemon keeps no sample, UnknownTier for a tier that it does not have.
    """
    from .message_json import label_in

    stats = daemon.stats()
    policies = {Tier(each.tier): label_in(each, "policy") for each in stats.tiers}
    return {
        "address": daemon.address,
        "uptime_ms": stats.uptime_ms,
        "tiers": [
            {
                "tier": tier.label,
                "policy": policies.get(tier),
                **_curve(daemon.curve(tier, budgets_bytes)),
            }
            for tier in tiers or policies
        ],
    }


def _curve(answer: pb.CurveResponse) -> dict[str, Any]:
    total_tokens = answer.total_tokens
    return {
        "budget_bytes": answer.budget_bytes,
        "total_tokens": total_tokens,
        "hit_tokens": answer.hit_tokens,
        "hit_rate": _share(answer.hit_tokens, total_tokens),
        "sampled_keys": answer.sampled_keys,
        "sampled_tokens": answer.sampled_tokens,
        "sample_rate": _share(answer.sampled_tokens, total_tokens),
        "points": [
            {
                "budget_bytes": point.budget_bytes,
                "times_budget": _share(point.budget_bytes, answer.budget_bytes),
                "hit_tokens": point.hit_tokens,
                "hit_rate": _share(point.hit_tokens, total_tokens),
            }
            for point in answer.points
        ],
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def demo(
    ctl: Ctl,
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 2_400,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 3,
    seed: Annotated[int, typer.Option(help="Another seed makes other traffic.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the last screen as an SVG.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Show prefixd at work: a private daemon, three tiers, real bytes, a crash.

    Starts a private daemon with small budgets in a temporary directory, makes a multi-turn trace,
    and replays it with a few workers through all three tiers. Kills the daemon in the middle,
    starts the next one, verifies every byte that comes back, and cleans up.
    """
    from .demo import DemoOptions, run_demo

    check_new(picture, force=force)
    console = make_console(stderr=ctl.as_json)
    result = run_demo(DemoOptions(requests, workers, seed), console, picture)
    if ctl.as_json:
        print_json(result.as_dict())
    exit_if(not result.good)
    exit_if(result.totals.interrupted, ExitCode.INTERRUPTED)
