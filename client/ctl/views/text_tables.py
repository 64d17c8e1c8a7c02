"""Tables that fit a terminal, bars of budgets, and numbers as people write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from ....proto.namespaces import printable
from ....proto.units import format_duration
from ....proto.units import percent as share_text
from ....proto.vocabulary import Tier, label_of

if TYPE_CHECKING:
    from ....proto import prefixd_pb2 as pb

BAR_MIN_WIDTH: Final = 8
BAR_MAX_WIDTH: Final = 30
#: Tables with more rows are drawn by `_line` instead of Rich, and look the same.
MANY_ROWS: Final = 100
#: Hexadecimal digits of a key that are shown in a table.
KEY_DIGITS: Final = 16
NS_PER_MS: Final = 1_000_000
TIER_STYLES: Final = {"ram": "cyan", "shm": "magenta", "disk": "yellow"}


# ---- numbers and names


def percent(part: float, whole: float) -> str:
    """`37.4 %`, or a dash when the whole is 0."""
    return share_text(part / whole if whole else None, 1)


def size(count: float) -> str:
    """Bytes with about three digits: `31.9MiB`, `880B`, `1.04GiB`."""
    rounded = float(round(count))
    for name in ("B", "KiB", "MiB", "GiB", "TiB"):
        if rounded < 1000:
            return f"{rounded:.3g}{name}"
        rounded /= 1024
    return f"{rounded:.3g}PiB"


def age(duration_ns: int) -> str:
    """A rough duration: `850ms`, `12s`, `3m4s`. One below 0, as of a clock that differs from ours,
    is `0s`."""
    unit_ns = NS_PER_MS if duration_ns < 1_000 * NS_PER_MS else 1_000 * NS_PER_MS
    return format_duration(max(0, duration_ns // unit_ns * unit_ns))


def tier_name(tier: int | str) -> Text:
    """The name of a tier in its colour. `tier` is its number on the wire, or its name."""
    label = tier if isinstance(tier, str) else label_of(Tier, tier)
    return Text(label, style=f"bold {TIER_STYLES.get(label, 'white')}")


def used_bytes(tier: pb.TierStats) -> int:
    """What counts against the budget of a tier."""
    return tier.published_bytes + tier.reserved_bytes


# ---- tables


def make_table(
    columns: str, *, title: str | None = None, caption: str | None = None, name_columns: int = 1
) -> Table:
    """A plain table with columns such as `tier|policy||>entries`. A `>` aligns a column to the
    right, as for numbers. A column without a name is for a bar.

    In a narrow terminal the table comes in several parts. Each begins with the first
    `name_columns`, which tell the rows apart.
    """
    table = FittedTable(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
    )
    table.name_columns = name_columns
    for column in columns.split("|"):
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right or column in ("key", "tier"),
            min_width=None if column else BAR_MIN_WIDTH,
        )
    return table


def pairs_table(
    rows: Iterable[tuple[str, RenderableType]], *, title: str | None = None, style: str = "bold"
) -> Table:
    """A name and a value in each row. `style` is for the names."""
    table = Table(
        box=None,
        show_header=False,
        pad_edge=False,
        title=title,
        title_style="bold",
        title_justify="left",
    )
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(printable(value)) if isinstance(value, str) else value)
    return table


class FittedTable(Table):
    """A table that loses nothing in a narrow terminal. Columns that do not fit follow below, in
    further tables that begin with the same first columns."""

    #: How many of the first columns tell the rows apart.
    name_columns = 1

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """As in Rich, except that strings are shown as they are, without markup. Clients choose
        many of them."""
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
            if len(rows) > MANY_ROWS and _are_plain(rows, widths):
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
        if self.caption is not None:  # not of the last table, which may be narrow
            yield Text(str(self.caption), "table.caption")

    @property
    def _padding_width(self) -> int:
        return self._get_padding_width(0)

    def _parts(self, console: Console, options: ConsoleOptions) -> list[dict[int, int]]:
        """For each table, its columns and their widths: as many columns as fit without breaking a
        word."""
        unbounded = options.update(max_width=10_000)
        measured = [self._measured(console, unbounded, column) for column in self.columns]
        most = [each.maximum for each in measured]
        least = [
            each.maximum if column.no_wrap else each.minimum
            for each, column in zip(measured, self.columns, strict=True)
        ]
        names = list(range(min(self.name_columns, len(least))))
        # A blank follows each column but the last, and stands at both ends.
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
        """The longest word and the longest cell of a column, header and padding included."""
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
    """Whether every cell is a text of one line and one style that fits."""
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
    """The width of each column. The room that is left after the minimum of all goes to the
    narrowest columns first."""
    widths = {index: least[index] for index in part}
    while sum(widths.values()) < room:
        growing = [index for index in part if widths[index] < most[index]]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    while sum(widths.values()) > room:  # a word is longer than the terminal is wide
        widths[max(part, key=widths.__getitem__)] -= 1
    return widths


# ---- bars


class TierBar:
    """The budget of a tier as a bar: pinned bytes, other published bytes, reserved bytes, free."""

    def __init__(self, tier: pb.TierStats) -> None:
        style = TIER_STYLES.get(label_of(Tier, tier.tier), "white")
        self._budget_bytes = tier.budget_bytes
        self._parts = [
            (tier.pinned_bytes, f"bold bright_{style}"),
            (max(0, tier.published_bytes - tier.pinned_bytes), style),
            (tier.reserved_bytes, "white"),
        ]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(BAR_MIN_WIDTH, BAR_MAX_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, BAR_MAX_WIDTH)
        full, empty = ("#", "-") if options.ascii_only else ("━", "─")
        budget, done, cells = self._budget_bytes, 0, 0
        for part, style in self._parts:
            done += part
            # Rounded up: a cell is drawn free only if all of it is. A part of 0 bytes gets no cell.
            end = min(width, -(-done * width // budget)) if budget and part else cells
            yield Segment(full * (end - cells), Style.parse(style))
            cells = max(cells, end)
        yield Segment(empty * (width - cells), Style.parse("bright_black"))
