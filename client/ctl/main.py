"""prefixctl: inspect and change a daemon, replay traffic, measure.

Exit codes: 0 good; 1 the command found something wrong; 2 the input is wrong; 3 no daemon
answers at the address. A command imports slow modules itself, so that `--help` and completion
stay fast.

The modules of this folder are groups of commands. What they print for people is drawn in `views/`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from . import bench, change, lab, live, look, policies, transfer, watch
from .command import (
    AddressOption,
    Ctl,
    Group,
    JsonOption,
    TargetsOption,
    TimeoutOption,
    command,
    parse_targets,
)

#: The panels of --help.
START: Final = "Start here"
LAB: Final = "Traces and policies"
LOOK: Final = "Look"
CHANGE: Final = "Change"

app = typer.Typer(
    name="prefixctl",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _print_version(requested: bool) -> None:
    if requested:
        from ... import __version__

        typer.echo(f"prefixctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    address: AddressOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    targets: TargetsOption = None,
    version: Annotated[  # noqa: ARG001  # its callback does it
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version of prefixctl and exit.",
        ),
    ] = False,
) -> None:
    """Inspect and change a prefixd daemon, replay traffic through it, measure it.

    A daemon at the default address is found without --address.

    Exit codes: 0 good, 1 something is wrong, 2 bad input, 3 no daemon answers.
    """
    ctx.obj = Ctl(address, as_json, timeout, parse_targets(targets))


def version(ctl: Ctl) -> None:
    """Show the versions of prefixctl and, if one answers, of the daemon."""
    from ... import __version__
    from ...proto.errors import PrefixdError

    daemon_version = None
    try:
        with ctl.connect(timeout_s=1.0) as daemon:
            daemon_version = daemon.stats().daemon_version
    except PrefixdError as problem:
        if ctl.given_address is not None:
            raise
        note = str(problem)
    else:
        note = f"prefixd {daemon_version} at {ctl.address}"
    ctl.show(
        {"prefixctl_version": __version__, "daemon_version": daemon_version},
        lambda: f"prefixctl {__version__}\n{note}",
    )


def _lab_command(group: typer.Typer, name: str, *, panel: str | None = None) -> Any:
    """Register a command that needs no daemon. It has its own `--json FILE`."""
    return group.command(name, cls=lab.JsonCommand, rich_help_panel=panel)


# --help lists the panels, and the commands of each, in this order.
command(app, "demo", panel=START)(live.demo)
_lab_command(app, "replay", panel=LAB)(policies.replay)
command(app, "replay-live", panel=LAB, cls=lab.JsonCommand, own_json=True)(live.replay_live)
command(app, "bench", panel=START, cls=lab.JsonCommand, own_json=True)(bench.bench)

command(app, "stats", panel=LOOK)(look.stats)
command(app, "ls", panel=LOOK)(look.ls)
command(app, "inspect", panel=LOOK)(look.inspect)
command(app, "claims", panel=LOOK)(look.claims)
command(app, "reservations", panel=LOOK)(look.reservations)
command(app, "sessions", panel=LOOK)(look.sessions)
command(app, "preview", panel=LOOK)(look.preview)
command(app, "check", panel=LOOK)(look.check)
command(app, "verify", panel=LOOK)(look.verify)
command(app, "health", panel=LOOK)(look.health)
command(app, "evict", panel=CHANGE)(change.evict)
command(app, "gc", panel=CHANGE)(change.gc)
command(app, "delete", panel=CHANGE)(change.delete)
command(app, "clear", panel=CHANGE)(change.clear)
command(app, "kick", panel=CHANGE)(change.kick)
command(app, "drain", panel=CHANGE)(change.drain)
command(app, "log-level", panel=CHANGE)(change.log_level)
command(app, "why", panel=LOOK)(look.why)
command(app, "top", panel=LOOK)(look.top)
command(app, "export", panel=LOOK)(transfer.export)
command(app, "import", panel=CHANGE)(transfer.import_)
command(app, "watch", panel=LOOK)(watch.watch)
command(app, "publish-kv-events", panel=LOOK)(watch.publish_kv_events)
command(app, "version", panel=LOOK)(version)

_lab_command(app, "analyze", panel=LAB)(lab.analyze)
_lab_command(app, "curve", panel=LAB)(policies.curve)
command(app, "curve-live", panel=LAB, cls=lab.JsonCommand, own_json=True)(live.curve_live)
_lab_command(app, "advise", panel=LAB)(policies.advise)
_lab_command(app, "simulate", panel=LAB)(lab.simulate)

config = typer.Typer(no_args_is_help=True, help="The configuration of the running daemon.")
command(config, "show")(change.show)
command(config, "diff")(change.diff)
command(config, "reload")(change.reload)
app.add_typer(config, name="config", rich_help_panel=CHANGE)
tier = typer.Typer(no_args_is_help=True, help="The tiers of the running daemon.")
command(tier, "resize")(change.resize)
app.add_typer(tier, name="tier", rich_help_panel=CHANGE)
trace = typer.Typer(no_args_is_help=True, help="Make and convert request traces.")
_lab_command(trace, "generate")(lab.generate)
_lab_command(trace, "convert")(lab.convert)
app.add_typer(trace, name="trace", rich_help_panel=LAB)


def main() -> None:
    """The console script."""
    app()
