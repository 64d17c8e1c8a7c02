"""prefixctl: inspect and change a daemon, replay traffic, measure.

Exit codes: 0 good; 1 the command found something wrong; 2 the input is wrong; 3 no daemon
answers at the address. A command imports slow modules itself, so that `--help` and completion
stay fast.

The modules of this folder are groups of commands. What they print for people is drawn in `views/`.
"""

from __future__ import annotations

import logging
from typing import Annotated, Final

import typer

from . import bench, change, lab, live, look, policies, record, transfer, watch
from .command import (
    AddressOption,
    Ctl,
    JsonOption,
    PlainGroup,
    TargetsOption,
    TimeoutOption,
    command,
    parse_targets,
    unwrapped,
)
from .failures import Group

#: The panels of --help.
START: Final = "Start here"
LAB: Final = "Traces and policies"
LOOK: Final = "Look"
CHANGE: Final = "Change"

# The commands say themselves what they did not reach. `demo` kills its daemon on purpose.
logging.getLogger("prefixd.client").addHandler(logging.NullHandler())

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

    Exit codes: 0 good, 1 something is wrong, 2 bad input, 3 no daemon answers. With --json, errors
    are JSON too, on standard error.
    """
    ctx.obj = Ctl(address, as_json, timeout, parse_targets(targets))


app.callback(help=unwrapped(root.__doc__))(root)


def version(ctl: Ctl) -> None:
    """Show the versions of prefixctl and, if one answers, of the daemon."""
    from ... import __version__
    from ...proto.errors import PrefixdError
    from ...proto.kernel import FORM

    daemon_version = daemon_kernel = None
    try:
        with ctl.connect(timeout_s=1.0) as daemon:
            stats = daemon.stats()
            daemon_version, daemon_kernel = stats.daemon_version, stats.kernel or "unknown"
    except PrefixdError as problem:
        if ctl.given_address is not None:
            raise
        note = str(problem)
    else:
        note = f"prefixd {daemon_version} at {ctl.address}\n  kernel: {daemon_kernel}"
    ctl.show(
        {
            "prefixctl_version": __version__,
            "kernel": FORM,
            "daemon_version": daemon_version,
            "daemon_kernel": daemon_kernel,
        },
        lambda: f"prefixctl {__version__}\n  kernel: {FORM}\n{note}",
    )


# --help lists the panels, and the commands of each, in this order.
command(app, "demo", live.demo, panel=START)
command(app, "replay", policies.replay, panel=LAB, needs_daemon=False)
command(app, "replay-live", live.replay_live, panel=LAB)
command(app, "bench", bench.bench, panel=START)

command(app, "stats", look.stats, panel=LOOK)
command(app, "ls", look.ls, panel=LOOK)
command(app, "inspect", look.inspect, panel=LOOK)
command(app, "claims", look.claims, panel=LOOK)
command(app, "reservations", look.reservations, panel=LOOK)
command(app, "sessions", look.sessions, panel=LOOK)
command(app, "identity", look.identity, panel=LOOK)
command(app, "preview", look.preview, panel=LOOK)
command(app, "check", look.check, panel=LOOK)
command(app, "verify", look.verify, panel=LOOK)
command(app, "health", look.health, panel=LOOK)
command(app, "evict", change.evict, panel=CHANGE)
command(app, "gc", change.gc, panel=CHANGE)
command(app, "delete", change.delete, panel=CHANGE)
command(app, "clear", change.clear, panel=CHANGE)
command(app, "kick", change.kick, panel=CHANGE)
command(app, "drain", change.drain, panel=CHANGE)
command(app, "log-level", change.log_level, panel=CHANGE)
command(app, "why", look.why, panel=LOOK)
command(app, "top", look.top, panel=LOOK)
command(app, "export", transfer.export, panel=LOOK)
command(app, "import", transfer.import_, panel=CHANGE)
command(app, "watch", watch.watch, panel=LOOK)
command(app, "publish-kv-events", watch.publish_kv_events, panel=LOOK)
command(app, "version", version, panel=LOOK)

command(app, "analyze", lab.analyze, panel=LAB, needs_daemon=False)
command(app, "curve", policies.curve, panel=LAB, needs_daemon=False)
command(app, "curve-live", live.curve_live, panel=LAB)
command(app, "advise", policies.advise, panel=LAB, needs_daemon=False)
command(app, "simulate", lab.simulate, panel=LAB, needs_daemon=False)

config = typer.Typer(
    cls=PlainGroup, no_args_is_help=True, help="The configuration of the running daemon."
)
command(config, "show", change.show)
command(config, "diff", change.diff)
command(config, "reload", change.reload)
app.add_typer(config, name="config", rich_help_panel=CHANGE)
tier = typer.Typer(cls=PlainGroup, no_args_is_help=True, help="The tiers of the running daemon.")
command(tier, "resize", change.resize)
app.add_typer(tier, name="tier", rich_help_panel=CHANGE)
trace = typer.Typer(
    cls=PlainGroup, no_args_is_help=True, help="Make, record and convert request traces."
)
command(trace, "generate", lab.generate, needs_daemon=False)
command(trace, "record", record.record)
command(trace, "convert", lab.convert, needs_daemon=False)
command(trace, "formats", lab.formats, needs_daemon=False)
app.add_typer(trace, name="trace", rich_help_panel=LAB)


def main() -> None:
    """The console script."""
    app()
