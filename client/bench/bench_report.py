"""Rows of runs, and tables with their ratios, for people and for BENCHMARKS.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...proto.errors import CallerError
from ...proto.units import format_bytes
from .run import ALONE, EVICTED, HASHING, PINNED, UNPINNED, searches
from .samples import BLOCK_BYTES, Row
from .transfers import CROWD_OP, MEMCPY


class Rows:
    """Rows, found by peer, operation and number of blocks. Of equal ones the last counts."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._all = list(rows)
        self._rows = {(row.peer, row.op, row.blocks): row for row in self._all}

    def of_size(self, block_bytes: int, *, or_unsaid: bool = False) -> Rows:
        """The rows with blocks of that size. `or_unsaid`: also those that do not say their size."""
        unsaid = block_bytes if or_unsaid else None
        return Rows(row for row in self._all if row.more.get(BLOCK_BYTES, unsaid) == block_bytes)

    @property
    def block_sizes(self) -> list[int]:
        """The sizes of blocks in the rows, ascending."""
        return sorted({row.more[BLOCK_BYTES] for row in self._all if BLOCK_BYTES in row.more})

    def find(self, peer: str, op: str, blocks: int) -> Row | None:
        return self._rows.get((peer, op, blocks))

    def of(self, op: str, blocks: int | None = None) -> list[Row]:
        """The rows of every peer for this operation."""
        rows = self._rows.values()
        return [row for row in rows if row.op == op and blocks in (None, row.blocks)]

    def crowd(self) -> list[tuple[int, Row]]:
        """(number of processes, row) of restores by several processes, the fewest first."""
        found = [
            (int(row.op.removeprefix(CROWD_OP)), row)
            for row in self._rows.values()
            if row.op.startswith(CROWD_OP)
        ]
        return sorted(found, key=lambda each: each[0])

    @property
    def peers(self) -> list[str]:
        """All peers, in the order of their first rows."""
        return list(dict.fromkeys(row.peer for row in self._rows.values()))

    @property
    def batches(self) -> list[int]:
        """How many blocks were moved at once, ascending."""
        return sorted({row.blocks for row in self._rows.values() if row.op == "restore"})


def read_rows(path: Path) -> Rows:
    """Read rows from JSON lines. Ignores rows of peers that were skipped.

    Raises CallerError with the line that is wrong.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CallerError(f"{path}: can't be read: {(error.strerror or '').lower()}") from None
    except UnicodeDecodeError:
        raise CallerError(f"{path}: can't be read: it is no text in UTF-8") from None
    for number, line in enumerate(lines, start=1):
        # The file may also have log lines of the peers.
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
            if "skipped" not in found:
                rows.append(Row.from_dict(found))
        except (ValueError, KeyError, TypeError) as error:
            raise CallerError(f"{path}:{number}: this is no row: {error}") from None
    return Rows(rows)


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells of text. The first column has names, the others have numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(rows: Rows, peers: Rows, block_bytes: int) -> list[TextTable]:
    """Tables of everything that was measured, each batch beside the peers."""
    made = [_batch_table(rows, peers, blocks, block_bytes) for blocks in rows.batches]
    made += [_search_table(rows), _eviction_table(rows), _crowd_table(rows)]
    return [table for table in made if table.rows]


def _batch_table(rows: Rows, peers: Rows, blocks: int, block_bytes: int) -> TextTable:
    """Ratios compare with the memcpy of the same run."""
    lines = []
    for run in (rows, peers):
        floor = run.find(MEMCPY, "restore", blocks)
        for peer in run.peers:
            name = "memcpy, beside these" if run is peers and peer == MEMCPY else peer
            save, restore = run.find(peer, "save", blocks), run.find(peer, "restore", blocks)
            view, exists = run.find(peer, "view", blocks), run.find(peer, "exists", blocks)
            if restore is None:
                continue
            lines.append(
                (
                    name,
                    _speed(save, floor),
                    _cost(save, floor),
                    _speed(restore, floor if restore is not floor else None),
                    _cost(restore, floor if restore is not floor else None),
                    "-" if view is None else f"{_us(view)}{_times(floor, view)}",
                    "-" if exists is None else _us(exists),
                )
            )
    title = f"{blocks} {'block' if blocks == 1 else 'blocks'} of {format_bytes(block_bytes)}"
    columns = (
        "", "save, GB/s", "+ us a block", "restore, GB/s", "+ us a block", "view, us", "exists, us",
    )  # fmt: skip
    return TextTable(f"{title} (x, +: beside the memcpy of the same run)", columns, lines)


def _cost(row: Row | None, floor: Row | None) -> str:
    """The time that a block takes in addition to its memcpy."""
    if row is None or floor is None:
        return "-"
    return f"{(row.p50_ms - floor.p50_ms) * 1e3 / row.blocks:,.0f}"


def _speed(row: Row | None, floor: Row | None) -> str:
    if row is None or row.gb_per_s is None:
        return "-"
    return f"{row.gb_per_s:.2f}{_times(floor, row)}"


def _times(floor: Row | None, row: Row) -> str:
    """The speed as a multiple of `floor`'s."""
    return "" if floor is None else f" ({_ratio(floor.p50_ms / row.p50_ms)})"


def _us(row: Row) -> str:
    return f"{row.p50_ms * 1e3:,.{1 if row.p50_ms < 0.1 else 0}f}"


def _ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"


def _search_table(rows: Rows) -> TextTable:
    lines = []
    for what, op, hashing_op in searches():
        for row in rows.of(op):
            alone = rows.find(HASHING, hashing_op, row.blocks)
            if row.peer == HASHING or alone is None:
                continue
            beside_us = (row.p50_ms - alone.p50_ms) * 1e3
            lines.append(
                (
                    what,
                    _us(row),
                    _us(alone),
                    _ratio(row.p50_ms / alone.p50_ms),
                    f"{beside_us:.1f}",
                    f"{row.more.get('rpcs', '-')}",
                    f"{row.more.get('daemon_lookups', '-')}",
                )
            )
    columns = (
        "", "us", "hashing alone, us", "x hashing", "beside it, us", "rpcs", "daemon's look-ups",
    )  # fmt: skip
    return TextTable("searches (rpcs and look-ups: of all of them together)", columns, lines)


def _eviction_table(rows: Rows) -> TextTable:
    lines = []
    alone = next(iter(rows.of(ALONE, EVICTED)), None)
    names = {ALONE: "nothing", UNPINNED: "unclaimed, older entries", PINNED: "claimed entries"}
    for op, name in names.items():
        for row in rows.of(op, EVICTED):
            beside = name if op == ALONE else f"{row.more.get('beside', 0):,} {name}"
            ratio = "-" if alone in (None, row) else _ratio(row.p50_ms / alone.p50_ms)
            lines.append((beside, f"{row.p50_ms * 1e3 / EVICTED:.2f}", ratio))
    columns = ("beside", "us per entry", "x nothing")
    return TextTable(f"eviction of {EVICTED:,} entries, rpc included", columns, lines)


def _crowd_table(rows: Rows) -> TextTable:
    found = rows.crowd()
    lines = []
    for count, row in found:
        one = found[0][1]
        lines.append(
            (
                f"{count}",
                f"{row.gb_per_s or 0:.2f}",
                "-" if row is one else _ratio((row.gb_per_s or 0) / (one.gb_per_s or 1)),
            )
        )
    columns = ("processes that restore", "all together, GB/s", "x one")
    return TextTable("many clients at once, ram", columns, lines)


def as_markdown(table: TextTable) -> str:
    """A table in Markdown, under a heading."""
    ruler = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [table.columns, tuple(ruler), *table.rows]
    return "\n".join([f"### {table.title}", "", *[f"| {' | '.join(line)} |" for line in lines]])
