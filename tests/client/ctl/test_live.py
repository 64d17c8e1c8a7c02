"""A view that is drawn again and again."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from prefixd.client.ctl.live import live_view


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width), file


def test_a_terminal_is_drawn_over_and_a_pipe_gets_every_view() -> None:
    texts = ["first", "second", "third"]
    for terminal in (True, False):
        to, file = console(terminal=terminal)
        views = iter(texts)
        with live_view(to, lambda views=views: Text(next(views))) as refresh:  # type: ignore[misc]
            refresh()
            refresh()
        assert all(text in file.getvalue() for text in texts)
        assert ("\x1b[" in file.getvalue()) is terminal
