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
        board = Board(daemon.address)
        _look(board, daemon)
        if once or ctl.as_json:
            time.sleep(every)
            _look(board, daemon)
            ctl.show(messages.as_dict(board.between()), lambda: board)
            return
        with suppress(KeyboardInterrupt):
            _follow(board, daemon, every)


def _look(board: Board, daemon: AdminConnection) -> None:
    board.take(daemon.stats(), daemon.oldest_claims(OLDEST_CLAIMS), time.monotonic())


def _follow(board: Board, daemon: AdminConnection, every_s: float) -> None:
    from ...proto.errors import DaemonUnavailable, DeadlineExceeded
    from .live import live_view

    with live_view(make_console(), board.__rich__) as refresh:
        while True:
            time.sleep(every_s)
            try:
                _look(board, daemon)
                board.note = ""
            except (DaemonUnavailable, DeadlineExceeded):
                board.note = "the daemon does not answer; trying again"
            refresh()
