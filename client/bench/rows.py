"""Rows of a run, or of another program's, to be looked up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ...proto.errors import CallerError
from .crowd import CROWD_OP
from .moving import MEMCPY
from .samples import BLOCK_BYTES, Row


class Rows:
    """Rows, found by who did what to how many blocks; of equal ones the last counts."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._all = list(rows)
        self._rows = {(row.peer, row.op, row.blocks): row for row in self._all}

    def of_size(self, block_bytes: int, *, or_unsaid: bool = False) -> Rows:
        """Those about blocks of that size, or of a size that they don't say."""
        unsaid = block_bytes if or_unsaid else None
        return Rows(row for row in self._all if row.more.get(BLOCK_BYTES, unsaid) == block_bytes)

    @property
    def block_sizes(self) -> list[int]:
        """How large the blocks are that rows speak of, ascending."""
        return sorted({row.more[BLOCK_BYTES] for row in self._all if BLOCK_BYTES in row.more})

    def find(self, peer: str, op: str, blocks: int) -> Row | None:
        return self._rows.get((peer, op, blocks))

    def of(self, op: str, blocks: int | None = None) -> list[Row]:
        """Everybody who did it."""
        rows = self._rows.values()
        return [row for row in rows if row.op == op and blocks in (None, row.blocks)]

    def best(self, op: str, blocks: int) -> Row | None:
        """Who was fastest; memcpy keeps nothing, so it does not count."""
        able = [row for row in self.of(op, blocks) if row.peer != MEMCPY]
        return min(able, key=lambda row: row.p50_ms, default=None)

    def crowd(self) -> list[tuple[int, Row]]:
        """What several processes restored at once, by how many they were."""
        found = [
            (int(row.op.removeprefix(CROWD_OP)), row)
            for row in self._rows.values()
            if row.op.startswith(CROWD_OP)
        ]
        return sorted(found, key=lambda each: each[0])

    @property
    def peers(self) -> list[str]:
        """In the order of their first rows."""
        return list(dict.fromkeys(row.peer for row in self._rows.values()))

    @property
    def batches(self) -> list[int]:
        """The sizes of the batches that were moved, ascending."""
        return sorted({row.blocks for row in self._rows.values() if row.op == "restore"})


def read_rows(path: Path) -> Rows:
    """Rows as JSON, one a line; lines of a peer that was skipped count for nothing.

    Raises CallerError with the line that is wrong.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"{path}: can't be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        # Peers that log to the same place have lines of their own.
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
            if "skipped" not in found:
                rows.append(Row.from_dict(found))
        except (ValueError, KeyError, TypeError) as error:
            raise CallerError(f"{path}:{number}: this is no row: {error}") from None
    return Rows(rows)
