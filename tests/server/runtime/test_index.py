"""The writer of the index: what it lists, what it can't list, and that nothing else writes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import secrets
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import pytest

from prefixd.proto import index_reader
from prefixd.proto.entry import Content
from prefixd.proto.index import (
    INCARNATION_BYTES,
    MAX_CHAIN,
    MAX_EXTENTS,
    MOVING,
    IndexRow,
    unpack_row,
)
from prefixd.proto.index_reader import IndexReader
from prefixd.proto.keys import Key
from prefixd.server.runtime import index as runtime_index
from prefixd.server.runtime.index import (
    FIRST_HEADS,
    HEADS_PER_ENTRY,
    MAX_ENTRIES,
    IndexWriter,
)
from prefixd.tiers.store import StoreError

from ...support import index_rows
from ...support.index_rows import (
    ADDED,
    BATCH_KEYS,
    CHURNED,
    INCARNATION,
    STABLE,
    churn,
    entry_of,
    is_genuine,
    key_of,
    read,
)

PATIENCE_S = 60.0
ROUNDS = 400
FALLOC_FL_PUNCH_HOLE = 0x02 | 0x01  # with FALLOC_FL_KEEP_SIZE, which it requires
SCRIPT = Path(index_rows.__file__)


@contextmanager
def index(max_entries: int) -> Iterator[tuple[IndexWriter, IndexReader]]:
    """A writer, and a reader with a read-only descriptor."""
    writer = IndexWriter(INCARNATION, max_entries)
    fd = writer.open_reader()
    reader = IndexReader.attach(fd)
    os.close(fd)
    try:
        yield writer, reader
    finally:
        reader.close()
        writer.close()


def full(*_: object) -> None:
    """Stands in for a system call that finds no memory."""
    raise OSError(errno.ENOSPC, "full")


def all_rows(writer: IndexWriter, most: int = 100) -> list[bytes]:
    found, start = [], 0
    while True:
        rows, start = writer.rows(start, most)
        found += rows
        if not start:
            return found


def agrees(writer: IndexWriter, reader: IndexReader, model: dict[Key, IndexRow]) -> None:
    """Every way to read it gives the result of the model."""
    assert len(writer) == writer.stats().entries == len(model)
    rows = [row for row in reader.get(model) if row is not None]
    assert [unpack_row(row) for row in rows] == list(model.values())
    absent = [Key(key[:-1] + bytes([key[-1] ^ 1])) for key in model]
    assert all(map(reader.tier_of, model))
    assert list(map(reader.tier_of, absent)) == [key in model for key in absent]
    assert sorted(all_rows(writer)) == sorted(rows)
    extents = [len(entry.location) // 2 for entry in model.values()]
    continuation_rows = sum(-(-2 * (n - 1) // 9) for n in extents if n > 1)
    assert writer.stats().continuation_rows == continuation_rows


# ---- what it lists


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_says_what_a_dict_says(seed: int) -> None:
    chosen = random.Random(seed)
    model: dict[Key, IndexRow] = {}
    with index(3_000) as (writer, reader):
        for step in range(1, 12_001):
            key = key_of(chosen.randrange(2_500))
            if chosen.random() < (0.3 if step < 6_000 else 0.7):
                assert writer.delete(key) == (model.pop(key, None) is not None)
                assert writer.get(key) is None
            else:
                model[key] = entry_of(key, step)
                assert writer.put(model[key])
            row = reader.get([key])[0]
            assert (row and unpack_row(row)) == model.get(key)
            if step % 2_000 == 0:
                agrees(writer, reader, model)
        gone = [key_of(number) for number in range(2_500) if key_of(number) not in model]
        assert reader.get(gone) == [None] * len(gone)
        for key in list(model):
            writer.delete(key)
        agrees(writer, reader, {})


@pytest.fixture(params=["native", "pure"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of many rows at once, in both forms."""
    if request.param == "pure":
        monkeypatch.setattr(runtime_index, "native", None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_listed_at_once_is_listed_as_one_by_one(seed: int) -> None:
    """New keys and listed ones, with few extents and with many, some of them twice."""
    chosen = random.Random(seed)
    model: dict[Key, IndexRow] = {}
    with index(3_000) as (writer, reader):
        for step in range(400):
            entries = [
                entry_of(key_of(chosen.randrange(1_500)), 20 * step + number + 1)
                for number in range(chosen.randrange(20))
            ]
            writer.put_all(entries)
            model |= {entry.key: entry for entry in entries}
            if chosen.random() < 0.2:
                some = chosen.choices(list(model) or [key_of(0)], k=chosen.randrange(9))
                writer.delete_all([*some, key_of(9_999)])
                for gone in some:
                    model.pop(gone, None)
                assert reader.get(some) == [None] * len(some)
        agrees(writer, reader, model)
        assert writer.stats().heads >= min(2 * len(model), writer.layout.max_heads)


@pytest.mark.parametrize("seed", range(5))
def test_both_forms_write_the_same_index(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in the same order of rows and with the same count of changes."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 3**80 % 2**bits)
    written: list[bytes] = []
    for kernel in (runtime_index.native, None):
        monkeypatch.setattr(runtime_index, "native", kernel)
        chosen = random.Random(seed)
        with index(300) as (writer, reader):
            for step in range(1, 200):
                keys = [key_of(chosen.randrange(400)) for _ in range(chosen.randrange(12))]
                if chosen.random() < 0.4:
                    writer.delete_all(keys)
                else:
                    writer.put_all(
                        [
                            entry_of(key, 20 * step + n, chosen.choice((1, 1, 1, 3)))
                            for n, key in enumerate(keys)
                        ]
                    )
            written.append(bytes(writer._mapping) + repr(writer.stats()).encode())
            assert len(reader.find(map(key_of, range(400)))) == 400
    assert written[0] == written[1]


def said(entry: IndexRow, **fields: int) -> IndexRow:
    """The entry, if its client had said this of it."""
    return entry._replace(content=entry.content._replace(**fields))


@pytest.mark.usefixtures("form")
def test_an_entry_whose_number_does_not_fit_is_refused_and_those_before_it_are_listed() -> None:
    good = [entry_of(key_of(number), 1, extents=1) for number in range(3)]
    with index(100) as (writer, reader):
        for wrong in (
            said(good[0]._replace(key=key_of(7)), layer_count=2**16),
            said(good[0]._replace(key=key_of(7)), payload_bytes=2**64),
            good[0]._replace(key=key_of(7), tier=-1),
            good[0]._replace(key=key_of(7), location=(2**64, 4096)),
        ):
            with pytest.raises(struct.error):
                writer.put_all([*good, wrong, entry_of(key_of(8), 1, extents=1)])
            assert reader.contains([entry.key for entry in good]) == [True] * 3
            assert reader.contains([key_of(7), key_of(8)]) == [False] * 2
            writer.delete_all([entry.key for entry in good])
            assert len(writer) == 0


@pytest.mark.usefixtures("form")
def test_what_is_listed_at_once_and_has_no_room_is_counted() -> None:
    keys = [Key(bytes(8) + key_of(number)[8:]) for number in range(2 * MAX_CHAIN)]
    with index(100) as (writer, reader):
        writer.put_all([entry_of(key, 1, extents=1) for key in keys])
        assert reader.contains(keys) == [True] * MAX_CHAIN + [False] * MAX_CHAIN
        assert (len(writer), writer.stats().unlisted) == (MAX_CHAIN, MAX_CHAIN)
        writer.put_all([entry_of(key_of(number), 1, extents=1) for number in range(1, 301)])
        assert len(writer) == writer.stats().entries == 200
        assert writer.stats().unlisted == MAX_CHAIN + 300 - (200 - MAX_CHAIN)
        assert reader.contains(keys[:MAX_CHAIN]) == [True] * MAX_CHAIN


def test_it_grows_to_many_entries_within_its_memory() -> None:
    entries = 50_000
    keys = [Key(os.urandom(32)) for _ in range(entries)]
    location = (2**40, 2**20)
    with index(entries) as (writer, reader):
        assert writer.stats().memory_bytes < 2**15
        for number, key in enumerate(keys):
            row = IndexRow(key, number, Content(2**20, 512), 7, 1, 1, location)
            assert writer.put(row)
        stats = writer.stats()
        assert stats.heads == HEADS_PER_ENTRY * entries
        assert stats.memory_bytes <= 115 * entries
        assert stats.unlisted == 0
        rows = reader.get(keys)
        assert [row and unpack_row(row).generation for row in rows] == list(range(entries))
        for key in keys:
            assert writer.delete(key)
        assert not any(reader.contains(keys))
        for key in keys:
            assert writer.put(IndexRow(key, 1, Content(2**20, 512), 7, 1, 1, location))
        assert writer.stats().memory_bytes == stats.memory_bytes


@pytest.mark.parametrize("listed", [0, 700])
def test_with_heads_for_what_is_expected_no_chain_is_divided(
    listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index(20_000) as (writer, reader):
        model = {key_of(n): entry_of(key_of(n), n + 1, 1) for n in range(20_000)}
        entries = list(model.values())
        for entry in entries[:listed]:
            writer.put(entry)
        writer.expect(20_000 - listed)
        heads = writer.stats().heads
        assert heads == HEADS_PER_ENTRY * 20_000
        there = [row is not None for row in reader.get(model)]
        assert there == [n < listed for n in range(20_000)]
        monkeypatch.setattr(writer, "_add_head", full)
        for entry in entries[listed:]:
            assert writer.put(entry)
        assert writer.stats().heads == heads
        agrees(writer, reader, model)


def test_where_many_are_listed_or_there_is_no_memory_nothing_changes_for_what_is_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with index(20_000) as (writer, _):
        monkeypatch.setattr(os, "posix_fallocate", full)
        writer.expect(20_000)
        assert writer.stats().heads == FIRST_HEADS
        monkeypatch.undo()
        for number in range(5_000):
            writer.put(entry_of(key_of(number), 1, 1))
        heads = writer.stats().heads
        writer.expect(15_000)
        assert writer.stats().heads == heads
    writer.expect(20_000)  # as by a recovery that goes on after a stop


def test_lists_of_extents_have_rows_of_their_own() -> None:
    with index(2_000) as (writer, reader):
        model = {}
        for number, extents in enumerate((1, 2, 5, 6, 300, 2, 0, 900)):
            key = key_of(number)
            model[key] = entry_of(key, number + 1, extents)
            assert writer.put(model[key])
        agrees(writer, reader, model)
        for key, extents in zip(list(model), (300, 1, 2, 900, 0, 7, 1, 6), strict=True):
            model[key] = entry_of(key, model[key].generation + 100, extents)
            assert writer.put(model[key])
        agrees(writer, reader, model)


def test_rows_that_stand_are_visited_once_while_others_come_and_go() -> None:
    chosen, seen = random.Random(1), []
    with index(5_000) as (writer, _):
        for number in STABLE:
            writer.put(entry_of(key_of(number), 1))
        start, generation = 0, 1
        while True:
            rows, start = writer.rows(start, 64)
            seen += [unpack_row(row).key for row in rows]
            generation = churn(writer, chosen, generation, 100)
            if not start:
                break
    for number in STABLE:
        assert seen.count(key_of(number)) == 1


# ---- what it can't list


def test_a_chain_is_bounded() -> None:
    """Their hashed parts are equal, with any multiplier."""
    keys = [Key(bytes(8) + key_of(number)[8:]) for number in range(3 * MAX_CHAIN)]
    with index(1_000) as (writer, reader):
        assert [writer.put(entry_of(key, 1)) for key in keys].count(True) == MAX_CHAIN
        assert reader.contains(keys) == [True] * MAX_CHAIN + [False] * 2 * MAX_CHAIN
        assert [bool(reader.tier_of(key)) for key in keys] == reader.contains(keys)
        assert writer.stats().unlisted == 2 * MAX_CHAIN
        # Other keys are unaffected, a listed one may change, and freed room is used again.
        assert writer.put(entry_of(key_of(1), 1))
        assert writer.put(entry_of(keys[3], 2))
        assert not writer.put(entry_of(keys[-1], 2))
        assert writer.delete(keys[5])
        assert not writer.delete(keys[-1])
        assert writer.put(entry_of(keys[-1], 2))
        assert reader.contains([keys[3], keys[5], keys[-1]]) == [True, False, True]
        for number in range(500):
            writer.put(entry_of(key_of(number), 3))
        assert reader.contains(keys).count(True) == MAX_CHAIN


def test_a_list_that_is_too_long_is_not_listed_and_replaces_what_was() -> None:
    with index(2_000) as (writer, reader):
        keys = [key_of(1), key_of(2)]
        assert writer.put(entry_of(keys[0], 1))
        for key in keys:
            assert not writer.put(entry_of(key, 4, MAX_EXTENTS + 1))
        assert reader.contains(keys) == [False, False]
        assert (len(writer), writer.stats().unlisted) == (0, 2)


def test_more_entries_than_it_was_made_for_are_not_listed() -> None:
    with index(100) as (writer, reader):
        assert writer.put(entry_of(key_of(0), 1))
        assert not writer.put(entry_of(key_of(0), 2, MAX_EXTENTS))
        listed = [writer.put(entry_of(key_of(n), n, extents=1)) for n in range(1, 301)]
        assert listed == [True] * 200 + [False] * 100
        assert reader.get([key_of(0)]) == [None]
        assert writer.delete(key_of(1))
        assert writer.put(entry_of(key_of(300), 3, extents=1))
        assert reader.contains([key_of(1), key_of(300)]) == [False, True]


def test_without_memory_entries_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with index(100_000) as (writer, reader), monkeypatch.context() as patch:
        number = count()
        assert writer.put(entry_of(key_of(next(number)), 1, extents=1))
        patch.setattr(os, "posix_fallocate", full)
        while writer.put(entry_of(key_of(next(number)), 1, extents=1)):
            pass
        # Only one piece of rows has memory, and only the first heads.
        assert 2_000 < len(writer) < 3_000
        assert writer.stats().heads == 1024
        last = key_of(len(writer) - 1)
        assert not writer.put(entry_of(last, 2, extents=1))
        assert reader.get([last]) == [None]
        patch.undo()
        assert writer.put(entry_of(key_of(next(number)), 1, extents=1))
        for _ in range(2_000):
            assert writer.put(entry_of(key_of(next(number)), 1, extents=1))
        assert writer.stats().heads > 4_000


@pytest.mark.parametrize("extents", [1, 30])
def test_a_number_that_does_not_fit_changes_nothing(extents: int) -> None:
    with index(100) as (writer, reader):
        good = entry_of(key_of(1), 1, extents)
        assert writer.put(good)
        for bad in (
            said(good, payload_bytes=-1),
            said(good, layer_count=2**16),
            good._replace(location=(*good.location[:-1], 2**64)),
        ):
            for _ in range(50):
                with pytest.raises(struct.error):
                    writer.put(bad)
        agrees(writer, reader, {good.key: good})
        # No row leaked.
        assert writer.put(entry_of(key_of(2), 1, extents=800))


def test_what_it_is_made_of_is_checked() -> None:
    with pytest.raises(ValueError, match="incarnation"):
        IndexWriter(bytes(INCARNATION_BYTES - 1), 10)
    for max_entries in (0, MAX_ENTRIES + 1):
        with pytest.raises(ValueError, match="entries"):
            IndexWriter(INCARNATION, max_entries)


def test_an_index_that_can_not_be_made_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(StoreError, match="full"):
        IndexWriter(INCARNATION, 10)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


# ---- who else may write


def test_only_the_writers_own_mapping_writes() -> None:
    with index(1_000) as (writer, reader):
        size_bytes = writer.size_bytes
        assert writer.put(entry_of(key_of(1), 1))
        writable = os.open(f"/proc/self/fd/{writer.fd}", os.O_RDWR)
        try:
            for fd in (writer.fd, writable):
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"x", 0)
                for other_bytes in (0, size_bytes - 4096, size_bytes + 4096):
                    with pytest.raises(PermissionError):
                        os.ftruncate(fd, other_bytes)
                with pytest.raises(PermissionError):
                    os.posix_fallocate(fd, 0, size_bytes + 4096)
                with pytest.raises(PermissionError):
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
                libc = ctypes.CDLL(None, use_errno=True)
                size, start = ctypes.c_int64(size_bytes), ctypes.c_int64(0)
                assert libc.fallocate(fd, FALLOC_FL_PUNCH_HOLE, start, size) == -1
                assert ctypes.get_errno() == errno.EPERM
        finally:
            os.close(writable)
        assert writer.put(entry_of(key_of(2), 2))
        assert reader.contains([key_of(1), key_of(2)]) == [True, True]


def test_readers_keep_a_closed_index() -> None:
    writer = IndexWriter(INCARNATION, 100)
    writer.put(entry_of(key_of(1), 1))
    reader = IndexReader.attach(writer.fd)
    writer.close()
    writer.close()
    assert reader.contains([key_of(1), key_of(2)]) == [True, False]
    reader.close()


# ---- writers that lose their processor


@pytest.fixture(params=["native", "pure"])
def form_of_readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setattr(index_reader, "native", None)
    elif index_reader.native is None:
        pytest.skip("the native kernel was not built: no C compiler")


class Waits:
    """Stands in for the clock of readers. `then` is called in the wait of this number."""

    def __init__(self, number: int, then: Callable[[], object] = lambda: None) -> None:
        self.number, self.then = number, then
        self.waited_s: list[float] = []

    def sleep(self, wait_s: float) -> None:
        self.waited_s.append(wait_s)
        if len(self.waited_s) == self.number:
            self.then()


#: The look-ups, each of keys of which the second and the third are there.
LOOK_UPS: dict[str, Callable[[IndexReader, list[Key]], object]] = {
    "contains": lambda reader, keys: reader.contains(keys) == [False, True, True],
    "a run": lambda reader, keys: [f is None for f in reader.find(keys[1:], False)] == [False] * 2,
    "rows": lambda reader, keys: len((reader.find_rows(keys) or ((), ()))[1]) == 2,
    "tiers": lambda reader, keys: [*map(bool, reader.tiers(keys))] == [False, True, True],
    "one tier": lambda reader, keys: reader.tier_of(keys[2]),
}


@pytest.mark.usefixtures("form_of_readers")
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_a_writer_that_loses_its_processor_amid_a_change_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, look_up: str
) -> None:
    with index(10) as (writer, reader):
        writer.put(entry_of(key_of(1), 1, extents=1))
        writer._publish(writer._shape | MOVING)

        def go_on() -> None:
            writer.put(entry_of(key_of(2), 2, extents=1))
            writer._publish(writer._shape & ~MOVING)

        waits = Waits(3, go_on)
        monkeypatch.setattr(index_reader, "time", waits)
        assert LOOK_UPS[look_up](reader, [key_of(0), key_of(1), key_of(2)])
        assert len(waits.waited_s) == 3


@pytest.mark.usefixtures("form_of_readers")
def test_a_writer_that_was_killed_amid_a_change_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with index(10) as (writer, reader):
        writer.put(entry_of(key_of(1), 1))
        before = writer._shape
        writer._publish(before | MOVING)
        waits = Waits(0)
        monkeypatch.setattr(index_reader, "time", waits)
        keys = [key_of(number) for number in range(5)]
        assert reader.contains(keys) == [False, True, False, False, False]
        assert 0.002 < sum(waits.waited_s) < 0.005
        waited = len(waits.waited_s)
        assert reader.contains(keys) == [False, True, False, False, False]
        assert reader.tier_of(key_of(2)) == 0
        assert len(waits.waited_s) == waited
        writer._publish(before)
        writer.put(entry_of(key_of(2), 2))
        assert reader.contains(keys) == [False, True, True, False, False]
        assert len(waits.waited_s) == waited


# ---- readers in other processes


def test_a_reader_in_another_process_sees_only_what_was_put() -> None:
    """While the writer changes entries and divides chains, readers find every unchanged entry."""
    chosen = random.Random(1)
    with index(len(CHURNED) + len(STABLE) + len(ADDED)) as (writer, _):
        for number in STABLE:
            assert writer.put(entry_of(key_of(number), 1))
        fd = writer.open_reader()
        command = [sys.executable, str(SCRIPT), "read", str(fd), str(ROUNDS)]
        generation, added = 1, iter(ADDED)
        many = 2 * HEADS_PER_ENTRY * (len(CHURNED) + len(STABLE))
        # Until chains were divided while they read: on a busy machine one reader may be too fast.
        while writer.stats().heads <= many:
            with subprocess.Popen(
                command, pass_fds=[fd], stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "attached\n"
                while process.poll() is None:
                    generation = churn(writer, chosen, generation, 50)
                    for number in islice(added, 150):
                        writer.put(entry_of(key_of(number), 1, extents=1))
                hits, misses = map(int, process.stdout.read().split())
            assert process.returncode == 0
            assert hits > ROUNDS
            assert misses == 0
        os.close(fd)


def test_a_reader_outlives_a_writer_that_is_killed() -> None:
    for after in range(4):
        command = [sys.executable, str(SCRIPT), "write", "4000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert select.select([process.stdout], [], [], PATIENCE_S)[0]
                number = int(process.stdout.readline())
                fd = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDONLY)
                reader = IndexReader.attach(fd)
                os.close(fd)
                # Each time at another moment of the writer's work.
                read(reader, 1 + 5 * after)
            finally:
                process.send_signal(signal.SIGKILL)
        listed = [key_of(number) for number in (*STABLE, *CHURNED)]
        rows = reader.get(listed)
        for key, row in zip(listed, rows, strict=True):
            assert row is None or is_genuine(key, row)
        assert len(rows) - rows.count(None) > BATCH_KEYS
        assert rows == reader.get(listed)
        reader.close()
