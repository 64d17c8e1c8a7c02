"""What both tables of rows do: the flat file and LMDB."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixd.proto.payload import crc32c
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.rows import CHUNK_SLABS, ROW_BYTES, ZERO_ROW, RowFile, RowTable
from prefixd.tiers.store import StoreError

SLABS = 3 * CHUNK_SLABS + 5


def row_of(generation: int) -> bytes:
    """Like a row of an entry: with a generation and a checksum."""
    row = b"PFXE\1\0\0\0" + generation.to_bytes(8, "little")
    row += random.Random(generation).randbytes(ROW_BYTES - len(row) - 4)
    return row + crc32c(row).to_bytes(4, "little")


@pytest.fixture(params=[RowFile, LmdbRows])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., RowTable]]:
    """Opens the only table of a test, after closing the previous one."""
    made: list[RowTable] = []

    def open_again(slabs: int = SLABS) -> RowTable:
        while made:
            made.pop().close()
        made.append(request.param(tmp_path, slabs, sync=True))
        made[-1].secure(slabs)
        return made[-1]

    yield open_again
    while made:
        made.pop().close()


def rows_in(table: RowTable) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for first, rows in table.chunks():
        slabs = [slab for slab, _ in rows]
        assert slabs == sorted(slabs)
        assert all(first <= slab < first + CHUNK_SLABS for slab in slabs)
        found.update(rows)
    return found


def test_what_was_applied_is_there_in_order_of_slabs(opened: Callable[..., RowTable]) -> None:
    table = opened()
    assert rows_in(table) == {}
    rng = random.Random(3)
    held: dict[int, int] = {}
    for generation in range(1, 400, 20):
        erasures = []
        for slab in rng.sample(sorted(held), min(5, len(held))):
            right = rng.random() < 0.6
            erasures.append((slab, held[slab] if right else rng.choice([None, 10**6])))
            if right or erasures[-1][1] is None:
                del held[slab]
        rows = [(rng.randrange(1, SLABS), number) for number in range(generation, generation + 20)]
        table.apply(erasures, [(slab, row_of(number)) for slab, number in rows])
        held.update(rows)
        if generation % 100 == 1:
            table = opened()
        assert rows_in(table) == {slab: row_of(number) for slab, number in held.items()}
    for slab in (*list(held)[:5], 0, SLABS - 1):
        expected = row_of(held[slab]) if slab in held else ZERO_ROW
        assert table.read(slab) in ((expected, b"") if slab not in held else (expected,))


def test_an_erased_slab_can_be_written_in_the_same_call(opened: Callable[..., RowTable]) -> None:
    table = opened()
    table.apply([], [(7, row_of(1)), (8, row_of(2))])
    table.apply([(7, 1), (8, None), (9, 5), (10, None)], [(7, row_of(3))])
    assert rows_in(table) == rows_in(opened()) == {7: row_of(3)}


def test_more_changes_than_go_into_one_message(opened: Callable[..., RowTable]) -> None:
    table = opened()
    rows = [(slab, row_of(slab)) for slab in range(1, SLABS)]
    table.apply([], rows)
    assert rows_in(table) == dict(rows)
    table.apply([(slab, slab) for slab in range(1, SLABS - 1)], [])
    assert rows_in(table) == rows_in(opened()) == dict(rows[-1:])


def test_a_probe_is_no_row(opened: Callable[..., RowTable]) -> None:
    table = opened()
    table.probe()
    assert rows_in(table) == rows_in(opened()) == {}


def test_another_number_of_slabs_keeps_the_rows_that_fit(opened: Callable[..., RowTable]) -> None:
    opened(100).apply([], [(5, row_of(1)), (90, row_of(2))])
    assert rows_in(opened(50)) == {5: row_of(1)}
    assert rows_in(opened(20_000))[5] == row_of(1)


def test_a_closed_table_answers_with_an_error(opened: Callable[..., RowTable]) -> None:
    table = opened()
    table.close()
    table.close()
    for action in (
        table.probe,
        lambda: table.apply([], [(1, row_of(1))]),
        lambda: rows_in(table),
        lambda: table.read(1),
        lambda: table.secure(SLABS + 1_000),
    ):
        with pytest.raises(StoreError):
            action()


def test_what_was_deleted_takes_nothing(opened: Callable[..., RowTable], tmp_path: Path) -> None:
    table = opened()
    table.apply([], [(1, row_of(1))])
    for path in tmp_path.iterdir():
        path.unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="was deleted"):
            table.probe()


def test_only_a_file_of_this_user_is_taken(tmp_path: Path) -> None:
    for kind, name in ((RowFile, "records"), (LmdbRows, "records-4.mdb")):
        for make in (Path.mkdir, os.mkfifo):
            path = tmp_path / f"{kind.__name__}-{make.__name__}" / name
            path.parent.mkdir()
            make(path)
            with pytest.raises(StoreError, match=name):
                kind(path.parent, SLABS, sync=True)  # type: ignore[abstract]


def test_a_row_is_read_again_before_it_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single wrong reading, of memory or of a device, destroys nothing."""
    table = RowFile(tmp_path, 8, sync=False)
    damaged = bytes([row_of(2)[0] ^ 1]) + row_of(2)[1:]
    table.apply((), [(1, row_of(1)), (2, damaged)])
    real, lies = os.pread, [0, 0]

    def pread(fd: int, size: int, offset: int) -> bytes:
        data = bytearray(real(fd, size, offset))
        if lies[0]:
            lies[:] = lies[0] - 1, lies[1] + 1
            data[ROW_BYTES * (1 if size > ROW_BYTES else 0) + lies[1]] ^= 1
        return bytes(data)

    monkeypatch.setattr("prefixd.tiers.rows.os.pread", pread)
    for lies[0] in (0, 1, 2):
        assert rows_in(table) == {1: row_of(1), 2: damaged}
    lies[0] = 1_000
    with pytest.raises(StoreError, match="the row of slab 1 is different at each reading"):
        rows_in(table)
    table.close()
