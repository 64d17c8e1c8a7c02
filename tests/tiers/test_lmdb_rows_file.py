"""The LMDB files of the disk tier's rows: their content, and how they are replaced."""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import ROWS_SLABS, place_of, records_file
from structlog.testing import capture_logs
from test_rows import row_of, rows_in

from prefixd.tiers import lmdb_child, lmdb_wire
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.store import StoreError, StoreFull
from tests.support.lengths import times
from tests.support.warm import WARM

Opened = Callable[[], LmdbRows]


def test_every_flipped_bit_of_a_cell_is_flipped_back() -> None:
    cell = lmdb_wire.encode_cell(5, 7, row_of(9))
    for bit in range(32, 8 * len(cell)):
        flipped = bytearray(cell)
        flipped[bit // 8] ^= 1 << bit % 8
        assert lmdb_wire.whole_cell(bytes(flipped)) == cell
        flipped[(bit // 8 + 40) % 148] ^= 0x41
        assert lmdb_wire.whole_cell(bytes(flipped)) is None
    assert lmdb_wire.whole_cell(cell[:-1]) is None


def test_no_page_is_written_twice(opened_rows: Opened, tmp_path: Path) -> None:
    """Except for the two meta pages, which recovery does not need."""
    table = opened_rows()
    rng = random.Random(1)
    file = records_file(tmp_path)
    before, used = file.read_bytes(), 0
    renewed = changes = 0
    for number in range(1, 600):
        table.apply([(rng.randrange(1, 300), None)], [(rng.randrange(1, 300), row_of(number))])
        now = records_file(tmp_path)
        data = now.read_bytes()
        # The pages from before the last change.
        if now == file:
            changes += data[2 * mmap.PAGESIZE : used] != before[2 * mmap.PAGESIZE : used]
            differing = [
                at
                for at in range(0, len(data), mmap.PAGESIZE)
                if data[at : at + mmap.PAGESIZE] != before[at : at + mmap.PAGESIZE]
            ]
            used = max(used, differing[-1] + mmap.PAGESIZE)
        else:
            renewed, file, used = renewed + 1, now, 0
        before = data
    assert renewed >= 2
    assert changes == 0
    assert rows_in(table) == rows_in(opened_rows())


class Stepped:
    """A table in this process that counts every slice."""

    def __init__(self, directory: Path, slabs: int) -> None:
        for number in range(2):
            path = directory / f"records-{number}.mdb"
            path.touch()
            os.truncate(path, lmdb_wire.file_bytes(slabs))
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs
        self.table = lmdb_child.Table(directory, slabs, sync=False, daemon=theirs)
        self.slabs = slabs

    def close(self) -> None:
        for file in (self.table._current, self.table._spare):
            file.close()
            os.close(file.fd)
        self._ours.close()
        self._theirs.close()

    def rows(self) -> dict[int, bytes]:
        return {slab: cell[lmdb_wire.CELL_ROW] for slab, cell in self.table._cells(0, self.slabs)}


@pytest.fixture
def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepped]:
    monkeypatch.setattr(lmdb_child, "_MIN_SLICE_SLABS", 1)
    one = Stepped(tmp_path, 20_000)
    yield one
    one.close()


@pytest.mark.parametrize("batch", [1, 48, 400])
def test_no_put_copies_more_than_its_share(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """A file that gets full is replaced in slices, none of which is more than a few times the
    mean, and nobody has to look for cells in the old one."""
    table, rng = stepped.table, random.Random(batch)
    held = {slab: row_of(slab) for slab in range(1, 20_000)}
    table.apply([], list(held.items())[:10_000])
    table.apply([], list(held.items())[10_000:])
    copied = 0

    def counted(first: int, end: int) -> list[tuple[int, bytes]]:
        nonlocal copied
        found = checked(first, end)
        copied += len(found)
        return found

    def find() -> None:
        raise AssertionError("all cells are looked for")

    checked = table._checked
    monkeypatch.setattr(table, "_checked", counted)
    monkeypatch.setattr(table, "_find", find)
    table._copy_slice(20_000)
    first_number, puts, copied_by, left = table._number, 0, [], []
    while table._number < first_number + 3:
        copied = 0
        number, left_before = table._number, table._current.pages_left
        rows = [
            (slab, row_of(rng.randrange(10**6))) for slab in rng.sample(range(1, 20_000), batch)
        ]
        table.apply([], rows)
        held.update(rows)
        puts += 1
        copied_by.append(copied)
        if table._number > number:
            left.append(left_before)
    assert max(copied_by) <= 8 * sum(copied_by) / puts
    assert all(table._current.pages / 64 < pages for pages in left)
    assert stepped.rows() == held


def test_idle_it_copies_on(stepped: Stepped) -> None:
    table = stepped.table
    table.apply([], [(slab, row_of(slab)) for slab in range(1, 8_000)])
    number = table._number
    while not table.copying:
        table.apply([], [(slab, row_of(slab + 1)) for slab in range(1, 1_000)])
    while table.copying:
        table.copy_slice_idle()
    assert table._number == number + 1
    expected = {slab: row_of(slab + (slab < 1_000)) for slab in range(1, 8_000)}
    assert stepped.rows() == expected


@pytest.mark.parametrize("failing", ["write", "sync", "reset"])
def test_a_copy_that_fails_costs_no_put(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The spare file is not needed until it is complete."""
    monkeypatch.setattr(lmdb_child, "_UNSYNCED_BYTES", 1)
    table, rng = stepped.table, random.Random(3)
    held = {slab: row_of(slab) for slab in range(1, 8_000)}
    table.apply([], list(held.items()))
    number, failures = table._number, 0
    real = getattr(lmdb_child.CellFile, failing)

    def fails(file: lmdb_child.CellFile, *arguments: object, **options: object) -> object:
        nonlocal failures
        if file is table._spare and failures < 5 and rng.random() < 0.3:
            failures += 1
            raise OSError("no")
        return real(file, *arguments, **options)

    monkeypatch.setattr(lmdb_child.CellFile, failing, fails)
    while table._number < number + 2 or failures < 5:
        rows = [(slab, row_of(rng.randrange(10**6))) for slab in rng.sample(range(1, 8_000), 300)]
        table.apply([], rows)
        held.update(rows)
    assert stepped.rows() == held


@pytest.mark.parametrize("seed", range(times(4, 8)))
def test_a_process_killed_in_the_middle_of_a_copy_loses_nothing(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The old file is valid until the new one is complete; neither brings erased rows back."""
    slow = (
        "import prefixd.tiers.lmdb_child as child; "
        "child._MIN_SLICE_SLABS, child._IDLE_S = 1, 60; child.main()"
    )
    monkeypatch.setattr(LmdbRows, "command", (*WARM, "-c", slow))
    table, rng = opened_rows(), random.Random(seed)
    held: dict[int, bytes] = {slab: row_of(slab) for slab in range(1, ROWS_SLABS)}
    table.apply([], list(held.items()))
    for number in range(1, 60 + 30 * seed):
        gone = rng.sample(sorted(held), 5)
        rows = [
            (slab, row_of(10_000 * number + slab)) for slab in rng.sample(range(1, ROWS_SLABS), 5)
        ]
        table.apply([(slab, None) for slab in gone], rows)
        for slab in gone:
            del held[slab]
        held.update(rows)
        if number % 40 == 0:
            os.kill(table.pid, signal.SIGKILL)
            with pytest.raises(StoreError):
                table.probe()
            assert rows_in(table) == held
    os.kill(table.pid, signal.SIGKILL)
    assert rows_in(opened_rows()) == held


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_damage_of_what_lmdb_begins_with_costs_nothing(
    opened_rows: Opened, tmp_path: Path, page: int, seed: int
) -> None:
    """The two meta pages are damaged while it runs. LMDB finds everything through them."""
    table = opened_rows()
    rng = random.Random(seed)
    acknowledged: dict[int, bytes] = {}
    for number in range(1, 60):
        slab = rng.randrange(1, 500)
        try:
            table.apply([], [(slab, row_of(number))])
            acknowledged[slab] = row_of(number)
        except StoreError:
            acknowledged.pop(slab, None)
        if number % 5 == 0:
            with records_file(tmp_path).open("r+b") as file:
                place = page * mmap.PAGESIZE + rng.randrange(16, 152)
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    found = rows_in(opened_rows())
    assert {slab: found.get(slab) for slab in acknowledged} == acknowledged


def test_what_was_mended_is_logged(opened_rows: Opened, tmp_path: Path) -> None:
    opened_rows().apply([], [(1, row_of(1)), (2, row_of(2))])
    opened_rows().close()
    path, place = records_file(tmp_path), place_of(tmp_path, row_of(1))
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([row_of(1)[0] ^ 4]))
    with capture_logs() as logs:
        table = opened_rows()
        assert rows_in(table) == {1: row_of(1), 2: row_of(2)}
    assert [(line["event"], line["what"][:12]) for line in logs] == [
        ("records_mended", "1 rows had a")
    ]
    # The root page of the tree is damaged while it runs.
    with records_file(tmp_path).open("r+b") as file:
        for page in (0, 1):
            file.seek(page * mmap.PAGESIZE + 16)
            file.write(b"\xff" * 120)
    with capture_logs() as logs:
        table.apply([], [(3, row_of(3))])
    assert [line["what"][:15] for line in logs] == ["collected anew:"]
    assert rows_in(table) == {1: row_of(1), 2: row_of(2), 3: row_of(3)}


@pytest.mark.parametrize("content", [b"", b"x" * 100_000, bytes(4096), b"\xff" * 5])
def test_a_file_that_is_none_of_lmdb_is_an_empty_one(
    opened_rows: Opened, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "records-7.mdb").write_bytes(content)
    table = opened_rows()
    assert rows_in(table) == {}
    table.apply([], [(1, row_of(1))])
    assert rows_in(opened_rows()) == {1: row_of(1)}


def test_the_only_file_that_is_left_holds(opened_rows: Opened, tmp_path: Path) -> None:
    table = opened_rows()
    table.apply([], [(1, row_of(1))])
    table.close()
    kept = records_file(tmp_path)
    for path in tmp_path.iterdir():
        if path != kept:
            path.unlink()
    kept.rename(tmp_path / "records-0.mdb")
    assert rows_in(opened_rows()) == {1: row_of(1)}


def test_a_device_without_room_refuses_and_goes_on(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond its secured size, as on a full device."""
    table = opened_rows()
    script = (
        "import resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({64 * 2**10},) * 2); "
        "import prefixd.tiers.lmdb_child as child; child.main()"
    )
    table.apply([], [(1, row_of(1))])
    with monkeypatch.context() as patch:
        patch.setattr(LmdbRows, "command", (*WARM, "-c", script))
        table = opened_rows()
        table.apply([], [(2, row_of(2))])
        with pytest.raises(StoreFull):
            table.apply([], [(slab, row_of(slab)) for slab in range(1, 1_000)])
    # There is room again.
    table.apply([(slab, None) for slab in range(1, 100)], [(500, row_of(3))])
    found = rows_in(opened_rows())
    assert not found.keys() & set(range(1, 100))
    assert found[500] == row_of(3)
