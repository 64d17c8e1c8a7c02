"""Tables that fit a terminal, whatever is in them and however many rows there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from ...proto.namespaces import printable

#: Tables of more rows are drawn by lines of our own, which look the same.
MANY_ROWS: Final = 100


class FittedTable(Table):
    """A table that loses nothing in a narrow terminal: columns that do not fit follow below, in
    further tables that begin with the same first columns."""

    #: those that say which row it is
    name_columns = 1

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """As ever, but what is in a string is shown as it is: much of it comes from clients."""
        super().add_row(
            *(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **how
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._parts(console, options)
        for number, widths in enumerate(parts):
            table = Table(
                box=self.box,
                padding=self.padding,
                title=None if number else self.title,
                title_justify=self.title_justify,
                title_style=self.title_style,
                caption=self.caption if number == len(parts) - 1 else None,
                caption_justify=self.caption_justify,
            )
            columns = [self.columns[index] for index in widths]
            for column, width in zip(columns, widths.values(), strict=True):
                table.add_column(
                    column.header,
                    justify=column.justify,
                    no_wrap=column.no_wrap,
                    overflow="fold",
                    width=width - self._padding_width,
                )
            rows = list(zip(*(column.cells for column in columns), strict=True))
            if len(rows) > MANY_ROWS and table.caption is None and _are_plain(rows, widths):
                # Rich takes a millisecond for a row.
                *head, end = console.render_lines(table, options, pad=False, new_lines=True)
                for line in head:
                    yield from line
                for row in rows:
                    yield from _line(row, columns, widths)
                yield from end
                continue
            for row in rows:
                table.add_row(*row)
            yield table

    @property
    def _padding_width(self) -> int:
        return self._get_padding_width(0)

    def _parts(self, console: Console, options: ConsoleOptions) -> list[dict[int, int]]:
        """The columns of each table with their widths: as many as fit without breaking a word."""
        unbounded = options.update(max_width=10_000)
        measured = [self._measured(console, unbounded, column) for column in self.columns]
        most = [each.maximum for each in measured]
        least = [
            each.maximum if column.no_wrap else each.minimum
            for each, column in zip(measured, self.columns, strict=True)
        ]
        names = list(range(min(self.name_columns, len(least))))
        # Between two columns, and at both ends.
        rooms = [options.max_width - self._extra_width + n for n in range(len(least))][::-1]
        parts = [[*names]]
        for index in range(len(names), len(least)):
            part = [*parts[-1], index]
            if sum(least[i] for i in part) > rooms[len(part) - 1] and len(part) > len(names) + 1:
                parts.append([*names, index])
            else:
                parts[-1] = part
        return [_widths(part, least, most, rooms[len(part) - 1]) for part in parts]

    def _measured(self, console: Console, options: ConsoleOptions, column: Column) -> Measurement:
        """Of its header and cells, each padded: the longest word, and the longest of all."""
        least = most = column.min_width or 0
        for cell in (Text(str(column.header)), *column.cells):
            if isinstance(cell, Text):
                most = max(most, cell.cell_len)
                least = max(least, *map(cell_len, cell.plain.split() or ("",)))
            else:
                found = Measurement.get(console, options, cell)
                least, most = max(least, found.minimum), max(most, found.maximum)
        return Measurement(least + self._padding_width, most + self._padding_width)


def _are_plain(rows: Iterable[Sequence[RenderableType]], widths: Mapping[int, int]) -> bool:
    """Is every cell a text of one line and one style that fits?"""
    room = [width - 1 for width in widths.values()]
    return all(
        isinstance(cell, Text) and not cell.spans and cell.cell_len <= most
        for row in rows
        for cell, most in zip(row, room, strict=True)
    )


def _line(
    row: Sequence[RenderableType], columns: Sequence[Column], widths: Mapping[int, int]
) -> Iterator[Segment]:
    """One row, as Rich draws it in a box without lines between its columns."""
    plain = " "
    for cell, column, width in zip(row, columns, widths.values(), strict=True):
        assert isinstance(cell, Text)
        blank = " " * (width - 1 - cell.cell_len)
        before, after = (blank, "") if column.justify == "right" else ("", blank)
        if cell.style:
            style = cell.style if isinstance(cell.style, Style) else Style.parse(cell.style)
            yield Segment(plain + before)
            yield Segment(cell.plain, style)
            plain = f"{after}  "
        else:
            plain += f"{before}{cell.plain}{after}  "
    yield Segment(f"{plain}\n")


def _widths(part: Sequence[int], least: list[int], most: list[int], room: int) -> dict[int, int]:
    """By column: what it needs, and of what is left those get more first that have least."""
    widths = {index: least[index] for index in part}
    while sum(widths.values()) < room:
        growing = [index for index in part if widths[index] < most[index]]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    while sum(widths.values()) > room:  # a word is longer than the terminal is wide
        widths[max(part, key=widths.__getitem__)] -= 1
    return widths
