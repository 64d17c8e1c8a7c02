"""Views that are redrawn in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live


@contextmanager
def live_view(console: Console, view: Callable[[], RenderableType]) -> Iterator[Callable[[], None]]:
    """Redraw `view()` in place with every call of what this gives; into a pipe, print it again."""
    if not console.is_terminal:
        console.print(view())
        yield lambda: console.print(view())
        return
    with Live(view(), console=console, auto_refresh=False) as live:
        yield lambda: live.update(view(), refresh=True)
