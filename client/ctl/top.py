"""`prefixctl top`: what a daemon does at this moment."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .admin import LOOK
from .command import Ctl, command, make_console
from .options import parse_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from .connection import AdminConnection
    from .top_board import Board

OLDEST_CLAIMS: Final = 5


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
    from .top_board import Board

    if ctl.common.targets:
        from . import fleet

        fleet.top(ctl, every, once=once)
        return
    with ctl.connect() as daemon:
        if not once and not ctl.as_json:
            with suppress(KeyboardInterrupt):
                follow(daemon, make_console(), every)
            return
        board = Board(daemon.address)
        _look(board, daemon)
        time.sleep(every)
        _look(board, daemon)
    ctl.show(messages.as_dict(board.between()), lambda: board)


def _look(board: Board, daemon: AdminConnection) -> None:
    board.take(daemon.stats(), daemon.oldest_claims(OLDEST_CLAIMS), time.monotonic())


def follow(daemon: AdminConnection, console: Console, every_s: float) -> None:
    """Show what a daemon does until interrupted. One that is restarted is found again; raises
    DaemonUnavailable if there is none at first."""
    from ...proto.errors import DaemonUnavailable, DeadlineExceeded
    from .live import live_view
    from .top_board import Board

    board = Board(daemon.address)
    _look(board, daemon)
    with live_view(console, board.__rich__) as refresh:
        while True:
            time.sleep(every_s)
            try:
                _look(board, daemon)
                board.note = ""
            except (DaemonUnavailable, DeadlineExceeded):
                board.note = "the daemon does not answer; trying again"
            refresh()
