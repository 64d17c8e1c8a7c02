"""`prefixctl top`: what a daemon does at this moment."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from .admin import LOOK
from .command import Ctl, command, make_console
from .options import parse_seconds


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "top", panel=LOOK)(top)


def top(
    ctl: Ctl,
    every: Annotated[
        float,
        typer.Option("--every", metavar="TIME", parser=parse_seconds, help="Between two looks."),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, show what happened between, and end.")
    ] = False,
) -> None:
    """Show what the daemon does now: tiers, rates, hit ratios, slow stages, the oldest claims.

    With --targets, several of them, a line each, and all together.
    Ends with Ctrl-C. Clients report with their heartbeats: what they do in place shows later.
    """
    from . import messages
    from .top_board import Board, follow, look

    if ctl.targets:
        from . import fleet

        fleet.top(ctl, every, once=once)
        return
    with ctl.connect() as daemon:
        if not once and not ctl.as_json:
            with suppress(KeyboardInterrupt):
                follow(daemon, make_console(), every)
            return
        board = Board(daemon.address)
        look(board, daemon)
        time.sleep(every)
        look(board, daemon)
    ctl.show(messages.as_dict(board.between()), lambda: board)
