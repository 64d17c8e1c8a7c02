"""A progress bar on standard error while a file is read or requests are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from .command import make_console

T = TypeVar("T", covariant=True)

#: Items between two looks at the bar.
_STRIDE = 256
#: Between two lines where there is no bar.
_LINE_EVERY_S = 5.0


class Measured(Protocol[T]):
    """Something to read that knows how much of its file is read (`TraceReader`, `Converter`)."""

    @property
    def consumed_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int | None: ...

    def __iter__(self) -> Iterator[T]: ...


def reading(source: Measured[T], what: str) -> Iterator[T]:
    """The items of `source`, with a bar of the bytes of its file."""
    with bar(TaskProgressColumn()) as progress:
        task = progress.add_task(what, total=source.total_bytes)
        for count, item in enumerate(source):
            if not count % _STRIDE:
                progress.update(task, completed=source.consumed_bytes)
            yield item
        progress.update(task, completed=source.consumed_bytes, total=source.consumed_bytes)


class Rereading(Generic[T]):
    """A file that is read once for every time it is iterated, each time with its bar."""

    def __init__(self, source: Measured[T], *whats: str) -> None:
        self._source = source
        self._whats = list(whats)

    def __iter__(self) -> Iterator[T]:
        """Read again, under the next of the titles `whats`, or under the last one."""
        what = self._whats.pop(0) if len(self._whats) > 1 else self._whats[0]
        return reading(self._source, what)


def counting(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with a bar of how many of `total` have come."""
    with bar(MofNCompleteColumn()) as progress:
        task = progress.add_task(what, total=total)
        count = 0
        for count, item in enumerate(items, 1):
            if not count % _STRIDE:
                progress.update(task, completed=count)
            yield item
        progress.update(task, completed=count)


class Progressing(Protocol):
    """Says how much of a whole is done."""

    @property
    def progress_permille(self) -> int: ...


P = TypeVar("P", bound=Progressing)


def of_a_whole(steps: Iterable[P], what: str, line: Callable[[P], str]) -> Iterator[P]:
    """The steps, with a bar of how much is done. Where standard error is no terminal, a `line`
    about it every few seconds."""
    console = make_console(stderr=True)
    due_s = time.monotonic() + _LINE_EVERY_S
    with bar(TaskProgressColumn(), TextColumn("{task.fields[about]}")) as progress:
        task = progress.add_task(what, total=1_000, about="")
        for step in steps:
            progress.update(task, completed=step.progress_permille, about=line(step))
            if not console.is_terminal and time.monotonic() >= due_s:
                console.print(f"{what}: {step.progress_permille / 1000:.0%}, {line(step)}")
                due_s = time.monotonic() + _LINE_EVERY_S
            yield step


@contextmanager
def bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """A bar with these columns for amounts; nothing at all unless a person is looking."""
    console = make_console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        yield progress
