"""prefixctl: look into a daemon, make room in it, replay traffic through it.

Exit codes: 0 good; 1 the command found something wrong; 2 the input is wrong; 3 no daemon
answers at the address. Modules that cost time to import are imported by the command that
needs them: `--help` and completion stay fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import admin, bench, change, lab, lab_curve, lab_fleet, replay, top, transfer, watch, why
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

app = typer.Typer(
    name="prefixctl",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """Look into a prefixd daemon, make room in it, replay traffic through it.

    A daemon that listens at the default address is found by itself.

    Exit codes: 0 good, 1 something is wrong, 2 bad input, 3 no daemon there.
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


# The panels of --help come in this order.
replay.register(app)
bench.register(app)
admin.register(app)
change.register(app)
why.register(app)
top.register(app)
transfer.register(app)
watch.register(app)
command(app, "version", panel=admin.LOOK)(version)
lab.register(app)
lab_curve.register(app)
lab_fleet.register(app)


def main() -> None:
    """The console script."""
    app()
