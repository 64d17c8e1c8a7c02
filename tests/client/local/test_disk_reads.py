"""Reads that have to wait for a disk: deadlines, hanging devices, buffers of calls that ended.

The device is a function here, so that a test decides when it answers.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import AsyncClient, Client, MissReason, SaveReason, Tier
from prefixd.client.local import arenas, disk_reads
from prefixd.client.local.arenas import FileArena
from prefixd.client.local.disk_reads import PIECE_BYTES, DiskReads
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.lookups import CALL_THREADS
from prefixd.client.wire.deadline import ABANDONMENT, Abandonment, Deadline
from prefixd.client.wire.transport import Copied
from prefixd.proto.entry import Content
from prefixd.proto.index import IndexRow, PackedRows, pack_row
from prefixd.proto.kernel import native
from prefixd.proto.keys import Key
from prefixd.proto.payload import Pieces, crc32c
from tests.support.daemon import PrivateDaemon, private_daemon
from tests.support.event_loop import PATIENCE_S, run

LATER = Deadline(86_400_000)  # of a whole run
PAYLOAD_BYTES = 3 * PIECE_BYTES + 5


class Device:
    """A disk that answers when it may. Files have no page in the cache."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Semaphore(0)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self.asked.release()
        assert self.answers.wait(PATIENCE_S)
        return os.preadv(fd, buffers, offset)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(FileArena, "_cached", lambda _this, _start, _room, crc, **_: (0, crc))
    monkeypatch.setattr(FileArena, "_cached_rows", lambda *_: (0, []))
    made = Device()
    yield made
    made.answers.set()


@pytest.fixture
def reads(device: Device) -> Iterator[DiskReads]:
    made = DiskReads(device.read)
    yield made
    device.answers.set()
    made.close()
    assert made.join(PATIENCE_S)


@pytest.fixture
def arena(tmp_path: Path, reads: DiskReads) -> FileArena:
    path = tmp_path / "arena"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    try:
        return FileArena(fd, reads)
    finally:
        os.close(fd)


DATA = os.urandom(PAYLOAD_BYTES + 1000)


def test_what_is_not_in_the_cache_is_read_by_a_thread(arena: FileArena) -> None:
    target = bytearray(PAYLOAD_BYTES)
    crc = arena.read_into(
        (7, PIECE_BYTES + 1, 0, PAYLOAD_BYTES), memoryview(target), check=True, deadline=LATER
    )
    expected = DATA[7 : 8 + PIECE_BYTES] + DATA
    assert target == expected[:PAYLOAD_BYTES]
    assert crc == crc32c(target)


def test_only_the_rest_is_read_by_a_thread(
    arena: FileArena, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(_this: FileArena, start: int, room: memoryview, crc: int, **_: Any) -> Any:
        some = min(100, len(room))
        room[:some] = DATA[start : start + some]
        return some, crc32c(room[:some], crc)

    monkeypatch.setattr(FileArena, "_cached", cached)
    target = bytearray(500)
    crc = arena.read_into((3, 500), memoryview(target), check=True, deadline=LATER)
    assert (target, crc) == (DATA[3:503], crc32c(DATA[3:503]))
    assert device.asked.acquire(blocking=False)
    assert arena.read_into((3, 99), memoryview(target)[:99], check=False, deadline=LATER) is None
    assert not device.asked.acquire(blocking=False)


def test_a_range_beyond_the_end_is_an_error(arena: FileArena) -> None:
    target = memoryview(bytearray(20))
    with pytest.raises(OSError, match="so many bytes"):
        arena.read_into((len(DATA) - 10, 20), target, check=False, deadline=LATER)


def test_a_device_that_hangs_costs_the_deadline_and_writes_nothing_later(
    arena: FileArena, device: Device, reads: DiskReads
) -> None:
    device.answers.clear()
    target = bytearray(b"\xa5" * PAYLOAD_BYTES)
    with pytest.raises(TimeoutError):
        arena.read_into((0, PAYLOAD_BYTES), memoryview(target), check=True, deadline=Deadline(20))
    device.answers.set()
    reads.close()
    assert reads.join(PATIENCE_S), "the threads have read everything by now"
    assert target == b"\xa5" * PAYLOAD_BYTES


def test_while_a_read_is_stuck_others_fail_at_once(
    arena: FileArena, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.answers.clear()
    target = memoryview(bytearray(10))
    while not device.asked.acquire(blocking=False):  # on a busy machine a thread may begin none
        with pytest.raises(TimeoutError):
            arena.read_into((0, 10), target, check=False, deadline=Deadline(20))
    monkeypatch.setattr(disk_reads, "STUCK_S", 0.0)
    with pytest.raises(OSError, match="has not answered"):
        arena.read_into((0, 10), target, check=False, deadline=LATER)
    assert not arena.written_by(bytes(16), LATER)
    device.answers.set()
    monkeypatch.setattr(disk_reads, "STUCK_S", PATIENCE_S)
    arena.read_into((0, 10), target, check=False, deadline=LATER)
    assert target == DATA[:10]


def test_a_read_that_was_given_up_is_not_begun(
    arena: FileArena, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the device answers again, it has nothing to read that no caller waits for."""
    monkeypatch.setattr(disk_reads, "STUCK_S", PATIENCE_S)
    device.answers.clear()
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for _ in range(10):
        with pytest.raises(TimeoutError):
            arena.read_into((0, PAYLOAD_BYTES), target, check=False, deadline=Deadline(5))
    device.answers.set()
    arena.read_into((0, 10), target[:10], check=False, deadline=LATER)
    begun = 0
    while device.asked.acquire(blocking=False):
        begun += 1
    assert begun <= disk_reads.MAX_THREADS + 1


def test_each_entry_of_a_batch_has_its_own_result(
    arena: FileArena, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be read costs the others nothing; what comes too late ends the batch."""
    targets = [memoryview(bytearray(10)) for _ in range(4)]
    placed = [rows_at(0, 10), rows_at(len(DATA) - 5, 10), rows_at(20, 10), rows_at(30, 10, crc=1)]
    rows = PackedRows(b"".join(placed))
    failed = arena.read_all(rows, targets, [True] * 4, LATER)
    assert (targets[0], targets[2]) == (DATA[:10], DATA[20:30])
    assert failed == [(1, Copied.GONE), (3, Copied.CORRUPT)]
    device.answers.clear()
    late = arena.read_all(rows, targets, [True] * 4, Deadline(5))
    assert late == [(n, Copied.GONE) for n in range(4)]
    monkeypatch.setattr(disk_reads, "STUCK_S", 0.0)
    hangs = arena.read_all(rows, targets, [True] * 4, LATER)
    assert hangs == [(n, Copied.UNREADABLE) for n in range(4)]


def test_a_read_that_failed_keeps_no_arena(tmp_path: Path, reads: DiskReads) -> None:
    """A process that does little else runs no cycle collector for hours, and the arena may be that
    of a daemon that has ended."""
    (tmp_path / "arena").write_bytes(DATA)
    with (tmp_path / "arena").open("rb") as file:
        arena = FileArena(file.fileno(), reads)
    target = memoryview(bytearray(10))
    beyond = PackedRows(rows_at(len(DATA) - 5, 10))
    gc.disable()
    try:
        assert arena.read_all(beyond, [target], [True], LATER) == [(0, Copied.GONE)]
        with pytest.raises(OSError, match="so many bytes"):
            arena.read_into((len(DATA) - 5, 10), target, check=True, deadline=LATER)
        kept = weakref.ref(arena)
        del arena
        reads.close()
        assert reads.join(PATIENCE_S)
        assert kept() is None
    finally:
        gc.enable()


def rows_at(start: int, length_bytes: int, *, crc: int | None = None) -> bytes:
    """The packed row of an entry there; `crc`: another CRC32C than its bytes have."""
    data = DATA[start : start + length_bytes]
    saved = crc32c(data) if crc is None else crc
    location = start, length_bytes
    entry = IndexRow(Key(bytes(32)), 7, Content(length_bytes, 1), saved, Tier.DISK, 1, location)
    return pack_row(entry, location) + bytes(4)


@pytest.mark.parametrize("form", [native, None], ids=["native", "pure"])
def test_a_batch_is_read_from_the_cache_as_far_as_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    """In pieces of the caller, checked; whatever is beyond the end of the file is asked of the
    device, and costs the others nothing."""
    if form is None:
        monkeypatch.setattr(arenas, "native", None)
    (tmp_path / "arena").write_bytes(DATA)
    reads = DiskReads()
    with (tmp_path / "arena").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        arena = FileArena(file.fileno(), reads)
    places = [(0, PAYLOAD_BYTES), (5, 3000), (len(DATA) - 10, 20), (100, 9), (200, 9)]
    sizes = [PAYLOAD_BYTES, 2999, 20, 9, 9]
    check = [True, False, True, True, True]
    wrong = {1: 1, 4: 1}
    rows = PackedRows(b"".join(rows_at(*place, crc=wrong.get(n)) for n, place in enumerate(places)))
    pieces = [memoryview(bytearray(part)) for part in (1, PAYLOAD_BYTES - 501, 500)]
    targets: list[Any] = [Pieces(pieces), *(memoryview(bytearray(size)) for size in sizes[1:])]
    failed = arena.read_all(rows, targets, check, LATER)
    assert failed == [(2, Copied.GONE), (4, Copied.CORRUPT)]
    for number, (start, _) in enumerate(places):
        if number != 2:
            assert targets[number].tobytes() == DATA[start : start + sizes[number]]
    too_long = [memoryview(bytearray(size + 1)) for size in (20, 9)]
    beyond = PackedRows(rows.packed[2 * 96 : 4 * 96])
    try:
        assert len(arena.read_all(beyond, too_long, [True] * 2, LATER)) == 2
    except OSError:
        assert form is native  # all of a batch are checked before anything is read
    reads.close()
    assert reads.join(PATIENCE_S)


def test_the_end_of_a_file_in_the_cache_is_asked_of_the_device(tmp_path: Path) -> None:
    """Some kernels say of what is not in the cache that the file has ended."""
    path = tmp_path / "arena"
    path.write_bytes(bytes(10))
    with path.open("rb") as file:
        arena = FileArena(file.fileno())
    assert arena._cached(10, memoryview(bytearray(1)), 7, check=True) == (0, 7)


def test_threads_and_memory_are_bounded(arena: FileArena, device: Device) -> None:
    device.answers.clear()
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for _ in range(20):
        with pytest.raises(TimeoutError):
            arena.read_into((0, PAYLOAD_BYTES), target, check=False, deadline=Deadline(1))
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("prefixd-disk") for name in names) <= disk_reads.MAX_THREADS


def test_an_abandoned_read_ends_at_once(arena: FileArena, device: Device) -> None:
    device.answers.clear()
    abandonment = Abandonment()
    token = ABANDONMENT.set(abandonment)
    try:
        deadline = Deadline(600_000)
    finally:
        ABANDONMENT.reset(token)

    def leave() -> None:
        assert device.asked.acquire(timeout=PATIENCE_S)
        abandonment.abandon()

    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(TimeoutError, match="nobody waits"):
        arena.read_into((0, 10), memoryview(bytearray(10)), check=False, deadline=deadline)
    leaving.join()
    with pytest.raises(TimeoutError, match="nobody waits"):
        arena.read_into((0, 10), memoryview(bytearray(10)), check=False, deadline=deadline)


# ---- the whole client


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="16MiB", disk="64MiB") as made:
        yield made


def use(client: Client, device: Device) -> None:
    """Have the client read disk entries from `device`."""
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    transport._reads._read = device.read


KEYS = [Key(bytes([number]) * 32) for number in range(4)]
PAYLOAD = os.urandom(100_000)


def save(client: Client, tier: Tier) -> None:
    for key in KEYS:
        client.delete([key])
        assert client.save(key, PAYLOAD, tier=tier, reason=SaveReason.EVICT).ok


def test_a_restore_ends_with_its_deadline_and_its_buffers_are_left_alone(
    daemon: PrivateDaemon, device: Device
) -> None:
    with Client(daemon.address) as client:
        save(client, Tier.DISK)
        use(client, device)
        hit = client.longest_run(KEYS, claim=False)
        device.answers.clear()
        buffers = [bytearray(b"\xa5" * len(PAYLOAD)) for _ in KEYS]
        result = hit.restore_into(buffers, deadline_ms=30)
        assert (result.run, result.miss) == (0, MissReason.DEADLINE)
        device.answers.set()
        others = [bytearray(len(PAYLOAD)) for _ in KEYS]
        assert hit.restore_into(others, deadline_ms=600_000).run == len(KEYS)
        assert buffers == [b"\xa5" * len(PAYLOAD)] * len(KEYS)


@pytest.mark.parametrize("claim", [True, False])
def test_while_a_disk_hangs_the_daemon_is_not_asked_for_its_bytes(
    daemon: PrivateDaemon, device: Device, monkeypatch: pytest.MonkeyPatch, claim: bool
) -> None:
    """It could not read them either, and would only hold up the call."""
    memory = Key(b"n" * 32)
    with Client(daemon.address) as client:
        save(client, Tier.DISK)
        assert client.save(memory, PAYLOAD, tier=Tier.RAM).ok
        use(client, device)
        found = client.longest_run(KEYS, claim=claim), client.claim([*KEYS, memory])
        device.answers.clear()
        device.asked = threading.Semaphore(0)
        room = bytearray(len(PAYLOAD))
        asked = False
        while not asked:  # 20 ms may be over before the device is asked
            assert not found[0].restore_into([room], deadline_ms=20)
            asked = device.asked.acquire(blocking=False)
        monkeypatch.setattr(disk_reads, "STUCK_S", 0.0)
        before = client.counters["rpcs"]
        rooms = [bytearray(len(PAYLOAD)) for _ in range(5)]
        for hit, wanted in zip(found, ([False] * 4, [False] * 4 + [True]), strict=True):
            result = hit.restore_into(rooms[: len(hit)], deadline_ms=600_000)
            assert list(result.restored) == wanted
            assert result.miss is MissReason.UNREADABLE
        assert rooms[4] == PAYLOAD
        assert client.counters["rpcs"] == before
        device.answers.set()
        for hit in found:
            hit.release()


def test_a_hanging_disk_delays_no_other_tier(
    daemon: PrivateDaemon, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with AsyncClient(Client(daemon.address), max_concurrency=2) as client:
            await asyncio.to_thread(save, client.client, Tier.DISK)
            use(client.client, device)
            hit = await client.longest_run(KEYS, claim=False)
            device.answers.clear()
            rooms = [[bytearray(len(PAYLOAD))] for _ in range(8)]
            while not device.asked.acquire(blocking=False):  # as above
                lost = [hit.restore_into(room, indices=[0], deadline_ms=50) for room in rooms]
                assert not any(await asyncio.gather(*lost))
            monkeypatch.setattr(disk_reads, "STUCK_S", 0.0)
            memory = Key(b"m" * 32)
            assert (await client.save(memory, PAYLOAD, tier=Tier.RAM)).ok
            room = bytearray(len(PAYLOAD))
            assert await client.restore_keys([memory], [room])
            assert room == PAYLOAD
            device.answers.set()

    run(scenario())


def test_the_buffers_of_a_cancelled_restore_are_the_callers_again(
    daemon: PrivateDaemon, device: Device
) -> None:
    async def scenario() -> None:
        async with AsyncClient(Client(daemon.address)) as client:
            await asyncio.to_thread(save, client.client, Tier.DISK)
            use(client.client, device)
            hit = await client.longest_run(KEYS, claim=False)
            device.answers.clear()
            buffers = [bytearray(len(PAYLOAD)) for _ in KEYS]
            restoring = asyncio.create_task(hit.restore_into(buffers, deadline_ms=600_000))
            await asyncio.to_thread(device.asked.acquire, timeout=PATIENCE_S)
            restoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await restoring
            for buffer in buffers:
                buffer[:] = b"\xa5" * len(buffer)
            device.answers.set()
            others = [bytearray(len(PAYLOAD)) for _ in KEYS]
            assert (await hit.restore_into(others, deadline_ms=600_000)).run == len(KEYS)
            assert buffers == [b"\xa5" * len(PAYLOAD)] * len(KEYS)

    run(scenario())


def test_cancelling_the_future_of_a_restore_ends_it_before_its_task_goes_on(
    daemon: PrivateDaemon, device: Device
) -> None:
    async def scenario(client: Client) -> None:
        use(client, device)
        hit = client.longest_run(KEYS, claim=False)
        device.answers.clear()
        buffers = [bytearray(len(PAYLOAD)) for _ in KEYS]
        future = hit.restore_async(buffers, deadline_ms=600_000)

        async def awaits() -> None:
            await asyncio.wrap_future(future)

        awaiting = asyncio.create_task(awaits())
        await asyncio.to_thread(device.asked.acquire, timeout=PATIENCE_S)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        assert future.done()
        for buffer in buffers:
            buffer[:] = b"\xa5" * len(buffer)
        device.answers.set()
        others = [bytearray(len(PAYLOAD)) for _ in KEYS]
        assert (await asyncio.to_thread(hit.restore_into, others, deadline_ms=600_000)).run == len(
            KEYS
        )
        assert buffers == [b"\xa5" * len(PAYLOAD)] * len(KEYS)

    with Client(daemon.address) as client:
        save(client, Tier.DISK)
        run(scenario(client))


def test_restores_that_wait_for_a_disk_hold_up_no_futures_of_memory(
    daemon: PrivateDaemon, device: Device
) -> None:
    with Client(daemon.address) as client:
        save(client, Tier.DISK)
        memory = Key(b"m" * 32)
        assert client.save(memory, PAYLOAD, tier=Tier.RAM).ok
        use(client, device)
        hit = client.longest_run(KEYS, claim=False)
        device.answers.clear()
        waiting = [
            hit.restore_async([bytearray(len(PAYLOAD)) for _ in KEYS], deadline_ms=600_000)
            for _ in range(2 * CALL_THREADS)
        ]
        assert device.asked.acquire(timeout=PATIENCE_S)
        room = bytearray(len(PAYLOAD))
        claimed = client.claim_async([memory]).result(PATIENCE_S)
        assert claimed.restore_async([room]).result(PATIENCE_S).run == 1
        assert room == PAYLOAD
        for future in waiting:
            future.cancel()
        assert all(future.done() for future in waiting)
        device.answers.set()
