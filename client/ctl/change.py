"""The operators' commands that change a running daemon: delete, kick, drain, config ..."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.vocabulary import Tier
from .admin import CHANGE, find_key
from .command import Ctl, ExitCode, command, fail, print_json
from .options import (
    LONG_TIMEOUT_S,
    TIER_NAMES,
    LogLevel,
    TiersOption,
    chosen,
    parse_seconds,
    parse_size,
    parse_tier,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...proto import prefixd_pb2 as pb


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(app, "delete", panel=CHANGE)(delete)
    command(app, "clear", panel=CHANGE)(clear)
    command(app, "kick", panel=CHANGE)(kick)
    command(app, "drain", panel=CHANGE)(drain)
    command(app, "log-level", panel=CHANGE)(log_level)
    config = typer.Typer(no_args_is_help=True, help="The configuration of the running daemon.")
    command(config, "show")(show)
    command(config, "diff")(diff)
    command(config, "reload")(reload)
    app.add_typer(config, name="config", rich_help_panel=CHANGE)
    tier = typer.Typer(no_args_is_help=True, help="The tiers of the running daemon.")
    command(tier, "resize")(resize)
    app.add_typer(tier, name="tier", rich_help_panel=CHANGE)


def delete(
    ctl: Ctl,
    key: Annotated[str, typer.Argument(help="Hexadecimal; a beginning that is unique will do.")],
) -> None:
    """Drop one entry.

    Exits 1 when it stays, because it is being read or saved, or is not there.
    """
    from ...proto import prefixd_pb2 as pb
    from .messages import enum_label

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        found = find_key(daemon, key)
        (status,) = daemon.drop([found])
    word = enum_label(pb.DeleteStatus.DESCRIPTOR, status)
    ctl.show({"key": found.hex(), "status": word}, lambda: f"{found.hex()}: {word}")
    if status != pb.DELETE_STATUS_DELETED:
        raise typer.Exit(ExitCode.PROBLEM)


def clear(
    ctl: Ctl,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="LABEL", help="As `stats` lists it.")
    ],
    tier: TiersOption = None,
) -> None:
    """Drop what clients with a label saved since the daemon's start.

    The label is what clients say of themselves. Exits 1 when some of it stays, because it is read.
    """
    from . import messages, render

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.clear(namespace, chosen(tier))
    ctl.show(messages.as_dict(response), lambda: render.cleared_view(namespace, response))
    if response.pinned_entries:
        raise typer.Exit(ExitCode.PROBLEM)


def kick(
    ctl: Ctl, session: Annotated[int, typer.Argument(help="As `sessions` lists it.", min=1)]
) -> None:
    """End a session: what it claims and reserves is released.

    Its client opens another one with its next call.
    """
    with ctl.connect() as daemon:
        daemon.kick(session)
    ctl.show({"session": session}, lambda: f"session {session} was ended")


def drain(
    ctl: Ctl,
    within: Annotated[
        float,
        typer.Option("--within", metavar="TIME", parser=parse_seconds, help="The longest wait."),
    ] = 60.0,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the daemon when it is drained, or after TIME.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Serve again.")] = False,
) -> None:
    """Take no new sessions, claims and saves, and wait for those there are.

    The daemon stays drained until --resume, and says so to probes and to /readyz. What lies in its
    memory can still be read in place. Exits 1 when something is held after TIME.
    """
    from . import messages, render

    if stop and resume:
        fail("say --stop or --resume, not both", ExitCode.BAD_INPUT)
    with ctl.connect(within + LONG_TIMEOUT_S) as daemon:
        response = daemon.drain(0.0 if resume else within, stop=stop, resume=resume)
    ctl.show(
        messages.as_dict(response),
        lambda: "serving again" if resume else render.drained_view(response, stop=stop),
    )
    if not resume and not response.drained:
        raise typer.Exit(ExitCode.PROBLEM)


def log_level(
    ctl: Ctl, level: Annotated[LogLevel, typer.Argument(help="What is logged, and worse.")]
) -> None:
    """Log more or less until the next start or reload."""
    with ctl.connect() as daemon:
        before = daemon.set_log_level(level.value)
    ctl.show(
        {"before": before, "level": level.value}, lambda: f"{level.value}; it was {before} before"
    )


def resize(
    ctl: Ctl,
    tier: Annotated[
        Tier, typer.Argument(metavar=TIER_NAMES, parser=parse_tier, help="Which tier.")
    ],
    budget: Annotated[int, typer.Argument(metavar="SIZE", parser=parse_size, help="12GiB.")],
) -> None:
    """Give a tier another budget until the next start.

    The next victims leave where it is smaller, at once; what is claimed stays, or the resize is
    refused. Write the size into the configuration, too: `config diff` shows what differs.
    """
    from . import messages, render

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.resize(tier, budget)
    ctl.show(messages.as_dict(response), lambda: render.resized_view(tier.label, response))


def show(ctl: Ctl) -> None:
    """Show every option as it is now."""
    with ctl.connect() as daemon:
        running = dict(sorted(daemon.configure(apply=False).running.items()))
    ctl.show(running, lambda: "\n".join(f"{name} = {value}" for name, value in running.items()))


def diff(ctl: Ctl) -> None:
    """Show what file, environment and flags say differently by now."""
    with ctl.connect() as daemon:
        _show(ctl, daemon.configure(apply=False), "changes with a reload")


def reload(ctl: Ctl) -> None:
    """Read the configuration again and change what can be changed, as SIGHUP does.

    Exits 1 when something needs a restart.
    """
    with ctl.connect() as daemon:
        response = daemon.configure(apply=True)
    _show(ctl, response, "changed")
    if not all(each.live for each in response.changed):
        raise typer.Exit(ExitCode.PROBLEM)


def _show(ctl: Ctl, response: pb.ConfigureResponse, live: str) -> None:
    from .command import make_console
    from .messages import as_dict

    if ctl.as_json:
        print_json({"changed": [as_dict(each) for each in response.changed]})
        return
    if not response.changed:
        typer.echo("nothing differs")
        return
    make_console().print(changed_table(response.changed, live))


def changed_table(changed: Iterable[pb.ChangedOption], live: str) -> RenderableType:
    """Options that differ. `live`: what is said of those that need no restart."""
    from .render import make_table

    table = make_table("option", "running", "configured", "")
    for each in changed:
        table.add_row(
            each.option, each.running, each.configured, live if each.live else "needs a restart"
        )
    return table
