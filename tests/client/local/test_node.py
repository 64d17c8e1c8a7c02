"""Reads from an index and arenas, which the tests make as the daemon makes them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from prefixd.client.counters import ClientCounters
from prefixd.client.local.arenas import FileArena, MappedArena, TierMemory
from prefixd.client.local.disk_reads import DiskReads
from prefixd.client.local.node import LocalNode
from prefixd.client.results import NO_ENTRIES, Entries, Entry
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.framed_calls import FramedCalls
from prefixd.client.wire.framed_connection import UnixPlace
from prefixd.client.wire.grpc_connection import Calls
from prefixd.client.wire.transport import Copied
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.arena_header import ARENA_HEADER_BYTES, encode_arena_header
from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.index import IndexRow, PackedRows, pack_row
from prefixd.proto.keys import Key
from prefixd.proto.payload import FlatBytes, crc32c
from prefixd.proto.vocabulary import ClaimMode, SaveReason, Tier
from prefixd.server.runtime.index import IndexWriter

INCARNATION = b"i" * 16
REF = pb.SessionRef(incarnation=INCARNATION, session_id=7)
CALLS = FramedCalls(UnixPlace("/nowhere", REF), cast(Calls, None), ClientCounters())
LATER = Deadline(600_000)
READS = DiskReads()


@pytest.fixture(scope="module", autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    READS.close()
    assert READS.join(60.0)


SLAB = 4096
SLABS = 64


def key_of(number: int) -> Key:
    return Key(bytes([number]) * 32)


@dataclass
class Made:
    """The memory of a daemon, without the daemon."""

    tier: Tier
    writer: IndexWriter
    #: The arena.
    fd: int
    node: LocalNode
    generation: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)

    def put(
        self,
        number: int,
        location: tuple[int, ...],
        payload: bytes,
        crc: int = -1,
        reason: int = SaveReason.COLD,
    ) -> Entry:
        """Write a payload to the arena, then its row to the index."""
        left = payload
        for start, length in zip(location[::2], location[1::2], strict=True):
            os.pwrite(self.fd, left[:length], start)
            left = left[length:]
        self.generation += 1
        record = EntryRecord(
            key=key_of(number),
            tier=self.tier,
            reason=cast(SaveReason, reason),
            generation=self.generation,
            created_ns=1,
            content=Content(len(payload), 512),
            location=location,
            payload_crc32c=crc32c(payload) if crc < 0 else crc,
        )
        assert self.writer.put(record)
        entry = Entry(
            record.key,
            self.tier,
            Content(len(payload), 512),
            record.payload_crc32c,
            record.generation,
            SaveReason.COLD,
        )
        self.entries[number] = entry
        return entry

    def rename(self, incarnation: bytes) -> None:
        """Let another start of the daemon take the arena."""
        os.pwrite(self.fd, encode_arena_header(incarnation, SLAB), 0)


def arena_file(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SLAB * SLABS)
    os.pwrite(fd, encode_arena_header(INCARNATION, SLAB), 0)
    return fd


NAMES = {Tier.RAM: frames.RAM, Tier.SHM: frames.SHM, Tier.DISK: frames.DISK}


@pytest.fixture(params=list(Tier), ids=lambda tier: tier.label)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    tier: Tier = request.param
    writer = IndexWriter(INCARNATION, 1000)
    fd = arena_file(tmp_path / "arena")
    handed = {
        frames.INDEX: (writer.open_reader(), writer.size_bytes),
        NAMES[tier]: (os.open(tmp_path / "arena", os.O_RDONLY), SLAB * SLABS),
    }
    made = Made(tier, writer, fd, LocalNode(handed, {}, REF, CALLS, READS))
    assert made.node.refused == {}
    assert made.node.indexed
    yield made
    writer.close()
    os.close(fd)


def payload_of(length: int, seed: int = 1) -> bytes:
    return bytes((seed * 7 + at) % 251 for at in range(length))


def copy(made: Made, *entries: Entry, check: bool = True) -> tuple[list[Copied], list[bytes]]:
    targets = [bytearray(entry.payload_bytes) for entry in entries]
    views = [memoryview(target) for target in targets]
    outcomes = made.node.copy(Entries(entries), views, [check] * len(entries), LATER)
    return outcomes, [bytes(target) for target in targets]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "location",
    [(SLAB, SLAB), (2 * SLAB, SLAB, SLAB, SLAB), (SLAB, SLAB, 9 * SLAB, 2 * SLAB, 5 * SLAB, SLAB)],
)
def test_a_payload_is_copied_from_its_extents(
    made: Made, location: tuple[int, ...], check: bool
) -> None:
    payload = payload_of(sum(location[1::2]) - 5)
    entry = made.put(1, location, payload)
    assert copy(made, entry, check=check) == ([Copied.WHOLE], [payload])


def test_nothing_is_read_from_a_tier_that_hangs(made: Made) -> None:
    entry = made.put(1, (SLAB, SLAB), payload_of(100))
    _, found = made.node.find([entry.key], ClaimMode.ANY)
    room = bytearray(100)

    def copied() -> list[Copied]:
        return made.node.copy(found, [memoryview(room)], [True], LATER)

    made.writer.set_hanging([made.tier])
    assert not made.node.find([entry.key], ClaimMode.ANY)[1]
    assert copied() == [Copied.UNREADABLE]
    assert room == bytes(100)
    made.writer.set_hanging([9])
    assert copied() == [Copied.WHOLE]
    assert room == payload_of(100)


def test_what_is_not_there_is_gone(made: Made) -> None:
    first, second = (made.put(n, (n * SLAB, SLAB), payload_of(100, n)) for n in (1, 2))
    made.writer.delete(first.key)
    outcomes, copies = copy(made, first, second)
    assert outcomes == [Copied.GONE, Copied.WHOLE]
    assert copies[1] == payload_of(100, 2)


def test_rows_that_are_known_are_not_looked_up_and_decide(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search has found them. Entries that have left since, or were saved again, are GONE."""
    index = made.node.index
    assert index is not None
    entries = [made.put(n, (n * SLAB, SLAB), payload_of(100, n)) for n in (1, 2, 3)]
    keys = [entry.key for entry in entries]
    _, found = made.node.find(keys, ClaimMode.ANY)
    assert list(found) == entries
    rooms = [bytearray(100) for _ in entries]
    views = [memoryview(room) for room in rooms]

    def copied(numbers: Sequence[int]) -> list[Copied]:
        targets = [views[n] for n in numbers]
        return made.node.copy(found.some(numbers), targets, [True] * len(numbers), LATER)

    with monkeypatch.context() as patch:
        patch.setattr(index, "find", None)
        assert copied([2, 0, 1]) == [Copied.WHOLE] * 3
        assert [bytes(room) for room in rooms] == [payload_of(100, n) for n in (1, 2, 3)]
    made.writer.delete(keys[0])
    made.put(2, (9 * SLAB, SLAB), payload_of(100, 2))
    assert copied([0, 1, 2]) == [Copied.GONE, Copied.GONE, Copied.WHOLE]


def test_another_save_of_the_same_key_is_another_entry(made: Made) -> None:
    old = made.put(1, (SLAB, SLAB), payload_of(100, 1))
    new = made.put(1, (2 * SLAB, SLAB), payload_of(100, 2))
    assert copy(made, old, new)[0] == [Copied.GONE, Copied.WHOLE]


def test_damage_is_noticed_where_it_is_looked_for(made: Made) -> None:
    entry = made.put(1, (SLAB, SLAB), payload_of(100), crc=1)
    assert copy(made, entry)[0] == [Copied.CORRUPT]
    assert copy(made, entry, check=False)[0] == [Copied.WHOLE]


class Meanwhile(TierMemory):
    """An arena that makes something happen after the last byte of each copy."""

    def __init__(self, arena: TierMemory, then: Callable[[], None]) -> None:
        self._arena = arena
        self._then = then

    def read_into(
        self, location: tuple[int, ...], target: FlatBytes, *, check: bool, deadline: Deadline
    ) -> int | None:
        crc = self._arena.read_into(location, target, check=check, deadline=deadline)
        self._then()
        return crc

    def read_all(
        self,
        rows: PackedRows,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[tuple[int, Copied]]:
        failed = self._arena.read_all(rows, targets, check, deadline)
        self._then()
        return failed

    def views(
        self, location: tuple[int, ...], offset_bytes: int, length_bytes: int
    ) -> list[memoryview] | None:
        return self._arena.views(location, offset_bytes, length_bytes)

    def written_by(self, incarnation: bytes, deadline: Deadline) -> bool:
        return self._arena.written_by(incarnation, deadline)


def meanwhile(made: Made, then: Callable[[], None]) -> None:
    made.node.arenas[made.tier] = Meanwhile(made.node.arenas[made.tier], then)


@pytest.mark.parametrize("check", [True, False])
def test_an_entry_that_leaves_during_its_copy_does_not_count(made: Made, check: bool) -> None:
    first, second = (made.put(n, (n * SLAB, SLAB), payload_of(100, n)) for n in (1, 2))
    meanwhile(made, lambda: made.writer.delete(first.key) and None)
    assert copy(made, first, second, check=check)[0] == [Copied.GONE, Copied.WHOLE]


def test_bytes_that_were_overwritten_during_the_copy_are_not_called_damage(made: Made) -> None:
    entry = made.put(1, (SLAB, SLAB), payload_of(100), crc=1)
    meanwhile(made, lambda: made.writer.delete(entry.key) and None)
    assert copy(made, entry)[0] == [Copied.GONE]


def test_an_index_that_is_revoked_during_a_copy_vouches_for_nothing(made: Made) -> None:
    entry = made.put(1, (SLAB, SLAB), payload_of(100))
    meanwhile(made, made.writer.revoke)
    assert copy(made, entry)[0] == [Copied.GONE]
    assert not made.node.indexed


def test_the_next_start_of_a_daemon_takes_what_it_writes_to(made: Made) -> None:
    """Only a RAM arena has no next start that could write to it: it ends with its daemon."""
    entry = made.put(1, (SLAB, SLAB), payload_of(100))
    meanwhile(made, lambda: made.rename(b"j" * 16))
    still = made.tier is Tier.RAM
    assert copy(made, entry)[0] == [Copied.WHOLE if still else Copied.GONE]
    assert made.node.stand([], LATER) is True


@pytest.mark.parametrize("at", range(36))
def test_a_damaged_header_of_an_arena_vouches_for_nothing(made: Made, at: int) -> None:
    entry = made.put(1, (SLAB, SLAB), payload_of(100))
    (byte,) = os.pread(made.fd, 1, at)
    os.pwrite(made.fd, bytes([byte ^ 1]), at)
    still = made.tier is Tier.RAM
    assert copy(made, entry)[0] == [Copied.WHOLE if still else Copied.GONE]


def test_an_arena_that_is_too_short_gives_nothing(made: Made) -> None:
    entry = made.put(1, (SLAB * (SLABS - 1), 2 * SLAB), payload_of(2 * SLAB))
    os.ftruncate(made.fd, SLAB * SLABS)
    assert copy(made, entry)[0] == [Copied.GONE]


def test_a_range_of_a_payload(made: Made) -> None:
    payload = payload_of(3 * SLAB)
    entry = made.put(1, (SLAB, SLAB, 4 * SLAB, 2 * SLAB), payload)
    data = made.node.read(entry, SLAB - 3, 10, LATER)
    assert data == (None if made.tier is Tier.DISK else payload[SLAB - 3 : SLAB + 7])
    made.writer.delete(entry.key)
    assert made.node.read(entry, 0, 1, LATER) is None


def test_a_range_of_a_payload_that_lies_in_one_piece(made: Made) -> None:
    payload = payload_of(2 * SLAB)
    entry = made.put(1, (SLAB, 2 * SLAB), payload)
    data = made.node.read(entry, SLAB - 3, 10, LATER)
    assert data == (None if made.tier is Tier.DISK else payload[SLAB - 3 : SLAB + 7])
    short = made.put(2, (SLAB * (SLABS - 1), 2 * SLAB), payload_of(2 * SLAB))
    assert made.node.read(short, SLAB - 3, 10, LATER) is None, (
        "the range goes beyond the end of the arena"
    )


def test_views_of_entries_in_one_piece_and_in_several(made: Made) -> None:
    payloads = [payload_of(2 * SLAB), payload_of(2 * SLAB - 1), payload_of(2 * SLAB)]
    entries = [
        made.put(1, (SLAB, 2 * SLAB), payloads[0]),
        made.put(2, (4 * SLAB, SLAB, 6 * SLAB, SLAB), payloads[1]),
        # The last extent holds the token ids.
        made.put(3, (8 * SLAB, SLAB, 10 * SLAB, SLAB, 12 * SLAB, SLAB), payloads[2]),
    ]
    found = made.node.views(Entries(entries))
    if made.tier is Tier.DISK:
        assert found is None
        return
    assert found is not None
    assert [b"".join(views) for views in found[0]] == payloads
    assert [len(views) for views in found[0]] == [1, 2, 2]


def test_views_are_good_as_long_as_their_rows_stand(made: Made) -> None:
    payload = payload_of(2 * SLAB - 1)
    entry = made.put(1, (SLAB, SLAB, 3 * SLAB, SLAB), payload)
    found = made.node.views(Entries([entry]))
    if made.tier is Tier.DISK:
        assert found is None
        return
    assert found is not None
    (views,), claim = found
    assert b"".join(views) == payload
    assert all(view.readonly for view in views)
    assert claim.stands(LATER)
    made.writer.delete(entry.key)
    assert not claim.stands(LATER)


def test_an_entry_that_was_saved_again_is_not_seen_in_the_place_of_the_old_one(made: Made) -> None:
    for extents in ((SLAB, SLAB), (SLAB, SLAB, 3 * SLAB, SLAB)):
        old = made.put(1, extents, payload_of(100, 1))
        made.put(1, (5 * SLAB, *extents[1:]), payload_of(100, 2))
        assert made.node.views(Entries([old])) is None
        assert made.node.read(old, 0, 10, LATER) is None


def test_views_and_claims_outlive_what_the_client_holds_of_a_node(made: Made) -> None:
    payload = payload_of(100)
    entry = made.put(1, (SLAB, SLAB), payload)
    found = made.node.views(Entries([entry]))
    if found is None:
        return
    (views,), claim = found
    made.node = cast(LocalNode, None)
    gc.collect()
    assert bytes(views[0]) == payload
    assert claim.stands(LATER)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_node_that_nobody_refers_to_leaves_nothing_open(made: Made) -> None:
    made.put(1, (SLAB, SLAB), payload_of(100))
    before = descriptors()
    # Descriptors that are kept: one for each mapping, and that of a file.
    made.node = cast(LocalNode, None)
    gc.collect()
    assert descriptors() == before - 2


def test_an_index_of_another_start_is_not_believed() -> None:
    writer = IndexWriter(b"j" * 16, 10)
    node = LocalNode({frames.INDEX: (writer.open_reader(), 0)}, {}, REF, CALLS, READS)
    assert not node.indexed
    assert "another start" in node.refused[frames.INDEX]
    writer.close()


@pytest.mark.parametrize("name", frames.FEATURES)
def test_what_cannot_be_used_is_refused_with_the_reason(name: str) -> None:
    fd = os.memfd_create("empty")
    node = LocalNode({name: (fd, 0)}, {}, REF, CALLS, READS)
    if name == frames.DISK:  # an empty file holds no entry
        assert not node.arenas[Tier.DISK].written_by(INCARNATION, LATER)
    else:
        assert node.refused[name]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_what_a_later_version_hands_over_is_closed() -> None:
    fd = os.memfd_create("later")
    node = LocalNode({"later": (fd, 1)}, {"ram": "switched off"}, REF, CALLS, READS)
    assert node.refused == {"ram": "switched off"}
    assert not node.indexed
    with suppress(OSError):
        os.fstat(fd)
        pytest.fail("it is still open")


@pytest.mark.parametrize("mode", ClaimMode)
def test_where_nothing_is_nothing_is_found(made: Made, mode: ClaimMode) -> None:
    assert made.node.find([key_of(1), key_of(2)], mode) == ((), NO_ENTRIES)


@pytest.mark.parametrize(
    ("mode", "positions"),
    [(ClaimMode.RUN, [0]), (ClaimMode.ANY, [0, 2])],
)
def test_a_row_that_says_nothing_ends_a_run(
    made: Made, mode: ClaimMode, positions: list[int]
) -> None:
    entries = [made.put(n, (n * SLAB, SLAB), payload_of(100, n)) for n in (1, 2, 3)]
    made.put(2, (2 * SLAB, SLAB), payload_of(100, 2), reason=99)
    keys = [entry.key for entry in entries]
    at, known = made.node.find(keys, mode)
    assert at == positions
    assert list(known) == [entries[position] for position in positions]
    rooms = [memoryview(bytearray(100)) for _ in positions]
    copies = made.node.copy(known, rooms, [True] * len(rooms), LATER)
    assert copies == [Copied.WHOLE] * len(positions)


@pytest.mark.parametrize("pieces", [1, 2])
def test_found_entries_are_those_of_their_rows(made: Made, pieces: int) -> None:
    entries = [
        made.put(n, (n * SLAB, SLAB, (n + 8) * SLAB, SLAB)[: 2 * pieces], payload_of(100 * n))
        for n in (1, 2, 3)
    ]
    _, found = made.node.find([entry.key for entry in entries], ClaimMode.RUN)
    for some, expected in [
        (found, entries),
        (found.some([2, 0]), [entries[2], entries[0]]),
        (found[1:], entries[1:]),
        (found.some(range(3)), entries),
        (found[:0], []),
    ]:
        assert list(some) == expected
        assert list(some.keys) == [entry.key for entry in expected]
        assert list(some.payload_bytes) == [entry.payload_bytes for entry in expected]
        assert list(some.token_counts) == [entry.token_count for entry in expected]
        assert list(some.generations) == [entry.generation for entry in expected]
        assert some.tier is (made.tier if expected else None)
        sizes = [entry.payload_bytes for entry in expected]
        in_all = {made.tier: (len(expected), sum(sizes))} if expected else {}
        assert some.by_tier(sizes) == in_all
    assert found.some(range(3)) is found


def test_no_target_is_left_without_its_bytes(tmp_path: Path) -> None:
    fd = arena_file(tmp_path / "arena")
    row = made_row(SLAB, SLAB)
    for arena in (MappedArena(fd, SLAB * SLABS, outlives_daemon=True), FileArena(fd)):
        for rows, targets, check in ([1, 2, 2], [2, 1, 2], [2, 2, 1]):
            rooms = [memoryview(bytearray(1)) for _ in range(targets)]
            with pytest.raises(ValueError, match=r"as many|shorter|longer"):
                arena.read_all(PackedRows(row * rows), rooms, [False] * check, LATER)
            assert all(room[0] == 0 for room in rooms[1:])
    os.close(fd)


def made_row(start: int, length_bytes: int) -> bytes:
    """The packed row of an entry there."""
    location = start, length_bytes
    entry = IndexRow(Key(bytes(32)), 1, Content(length_bytes), 0, 1, 1, location)
    return pack_row(entry, location) + bytes(4)


def test_arenas_say_who_wrote_to_them(tmp_path: Path) -> None:
    fd = arena_file(tmp_path / "arena")
    arenas: list[TierMemory] = [
        MappedArena(fd, SLAB * SLABS, outlives_daemon=True),
        FileArena(fd),
    ]
    assert all(arena.written_by(INCARNATION, LATER) for arena in arenas)
    os.pwrite(fd, bytes(ARENA_HEADER_BYTES), 0)
    assert not any(arena.written_by(INCARNATION, LATER) for arena in arenas)
    os.close(fd)
