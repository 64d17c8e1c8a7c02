"""Progress bars on standard error, and views that are redrawn in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ..command import make_console

if TYPE_CHECKING:
    from ....proto import prefixd_pb2 as pb
    from ...lab.trace import Request, RequestReader

T = TypeVar("T")

#: Items between two updates of a bar.
_STRIDE = 256
#: Seconds between two lines where no bar can be drawn.
_LINE_EVERY_S = 5.0


def reading(source: RequestReader, title: str) -> Iterator[Request]:
    """The requests of `source`, with a bar of the bytes of its files."""
    with bar(TaskProgressColumn()) as progress:
        task = progress.add_task(title, total=source.total_bytes)
        for count, request in enumerate(source):
            if not count % _STRIDE:
                progress.update(task, completed=source.consumed_bytes)
            yield request
        progress.update(task, completed=source.consumed_bytes, total=source.consumed_bytes)


class Rereading:
    """A file that is read again, with a bar, each time it is iterated."""

    def __init__(self, source: RequestReader, *titles: str) -> None:
        """`titles` are for one pass each. The last one also serves every later pass."""
        self._source = source
        self._titles = list(titles)

    def __iter__(self) -> Iterator[Request]:
        title = self._titles.pop(0) if len(self._titles) > 1 else self._titles[0]
        return reading(self._source, title)


def counting(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """The items, with a bar of how many of `total` have come."""
    with bar(MofNCompleteColumn()) as progress:
        yield from progress.track(items, total=total, description=title)


def permille_bar(
    steps: Iterable[pb.VerifyResponse], title: str, describe: Callable[[pb.VerifyResponse], str]
) -> Iterator[pb.VerifyResponse]:
    """The steps of a verification, with a bar of how much is done, and `describe(step)` beside it.
    When standard error is no terminal, a line every few seconds instead."""
    console = make_console(stderr=True)
    due_s = time.monotonic() + _LINE_EVERY_S
    with bar(TaskProgressColumn(), TextColumn("{task.fields[about]}")) as progress:
        task = progress.add_task(title, total=1_000, about="")
        for step in steps:
            progress.update(task, completed=step.progress_permille, about=describe(step))
            if not console.is_terminal and time.monotonic() >= due_s:
                console.print(f"{title}: {step.progress_permille / 1000:.0%}, {describe(step)}")
                due_s = time.monotonic() + _LINE_EVERY_S
            yield step


def bar(*columns: ProgressColumn) -> Progress:
    """A bar with a title and these columns for amounts."""
    return bar_of(TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())


def bar_of(*columns: ProgressColumn) -> Progress:
    """A bar of these columns. Draws nothing unless standard error is a terminal."""
    console = make_console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def live_view(console: Console, view: Callable[[], RenderableType]) -> Iterator[Callable[[], None]]:
    """Yields a function that redraws `view()` in place, or prints it again when the console is no
    terminal."""
    if not console.is_terminal:
        console.print(view())
        yield lambda: console.print(view())
        return
    with Live(view(), console=console, auto_refresh=False) as live:
        yield lambda: live.update(view(), refresh=True)
