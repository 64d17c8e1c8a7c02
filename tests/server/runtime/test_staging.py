"""Staging memory: clients write to it, the daemon copies from it, and nothing can resize it."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto.errors import UnknownStaging
from prefixd.server.runtime import staging as module
from prefixd.server.runtime.staging import Staging, StagingPool
from tests.support.event_loop import in_loop
from tests.support.running import ManualClock

SIZE = 4 * 4096


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging(SIZE)
    yield made
    made.close()


def test_what_a_client_writes_is_seen_at_once(staging: Staging) -> None:
    with mmap.mmap(staging.fd, SIZE) as theirs:
        theirs[100:105] = b"hello"
        assert bytes(staging.view(100, 5)) == b"hello"
        theirs[100:105] = b"again"
        assert bytes(staging.view(99, 7)) == b"\0again\0"


def test_views_can_only_be_read(staging: Staging) -> None:
    view = staging.view(0, 4)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize(
    ("offset", "length"), [(SIZE, 1), (0, SIZE + 1), (SIZE - 1, 2), (2**63, 2**63), (2**64 - 1, 1)]
)
def test_what_is_beyond_it_is_refused(staging: Staging, offset: int, length: int) -> None:
    with pytest.raises(UnknownStaging, match=f"it has {SIZE}"):
        staging.view(offset, length)


def test_its_last_byte_is_part_of_it(staging: Staging) -> None:
    assert len(staging.view(0, SIZE)) == SIZE
    assert bytes(staging.view(SIZE - 1, 1)) == b"\0"
    assert bytes(staging.view(SIZE, 0)) == b""


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_no_client_can_resize_it_and_make_the_daemon_fault(staging: Staging, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(staging.fd, size)
    assert os.fstat(staging.fd).st_size == SIZE


def test_after_its_end_it_is_an_answer_and_views_in_use_stay_good(staging: Staging) -> None:
    with mmap.mmap(staging.fd, SIZE) as theirs:
        theirs[:4] = b"data"
    view = staging.view(0, 4)
    staging.close()
    assert bytes(view) == b"data", "a copy that still runs"
    with pytest.raises(UnknownStaging, match="is over"):
        staging.view(0, 4)


def test_memory_that_there_is_none_of_is_an_error_and_leaks_nothing() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises((OSError, OverflowError)):
        Staging(2**62)
    assert set(Path("/proc/self/fd").iterdir()) == before


# ---- all areas together


class AtOnce(Executor):
    """Runs each task at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def pool_of(areas: int, clock: ManualClock) -> StagingPool:
    return StagingPool(SIZE, areas * SIZE, AtOnce(), clock)


@in_loop
async def test_an_area_has_its_memory_before_it_is_used(clock: ManualClock) -> None:
    pool = pool_of(2, clock)
    memory = pool.open(1)
    assert memory.resident_bytes == SIZE == pool.used_bytes
    assert pool.open(1) is memory
    with pool.using(1) as used:
        assert used is memory
    pool.close(1)
    pool.close(1)
    assert (len(pool), pool.used_bytes) == (0, 0)
    with pytest.raises(UnknownStaging, match="has no staging memory"), pool.using(1):
        pass
    pool.close_all()


@in_loop
async def test_beyond_the_bound_there_is_none(clock: ManualClock) -> None:
    pool = pool_of(2, clock)
    for session in (1, 2):
        pool.open(session)
    for _ in range(3):
        with pytest.raises(UnknownStaging, match="save over gRPC"):
            pool.open(3)
    assert (len(pool), pool.used_bytes, pool.refusals) == (2, 2 * SIZE, 3)
    pool.close(1)
    pool.open(3)
    assert pool.used_bytes == 2 * SIZE
    pool.close_all()
    assert pool.used_bytes == 0


@in_loop
async def test_what_is_idle_is_given_back_and_comes_again(clock: ManualClock) -> None:
    pool = pool_of(2, clock)
    memory = pool.open(1)
    kept = os.dup(memory.fd)
    with mmap.mmap(kept, SIZE) as theirs:
        clock.forward(module.IDLE_S - 1)
        with pool.using(1):
            clock.forward(module.IDLE_S)
            pool.give_back_idle()
            assert pool.used_bytes == SIZE, "it is in use"
        clock.forward(module.IDLE_S - 1)
        pool.give_back_idle()
        assert pool.used_bytes == SIZE
        theirs[:4] = b"data"
        clock.forward(1)
        pool.give_back_idle()
        assert (pool.used_bytes, os.fstat(kept).st_blocks) == (0, 0)
        assert theirs[:4] == bytes(4), "the client may keep its mapping, but not the pages"
    os.close(kept)
    # A copy would now find zeros that the client never wrote.
    with pytest.raises(UnknownStaging, match="save this over gRPC"), pool.using(1):
        pass
    again = pool.open(1)
    assert (pool.used_bytes, again.resident_bytes) == (SIZE, SIZE)
    with pool.using(1) as used:
        assert used is again
    pool.close_all()


@in_loop
async def test_who_has_use_for_it_takes_it_from_the_longest_idle(clock: ManualClock) -> None:
    pool = pool_of(2, clock)
    for session in (1, 2):
        pool.open(session)
        clock.forward(1)
    clock.forward(module.IDLE_S / 2 - 3)
    with pytest.raises(UnknownStaging):
        pool.open(3)
    clock.forward(1)
    with pool.using(2):
        pool.open(3)
    assert [session in pool for session in (1, 2, 3)] == [False, True, True]
    with pytest.raises(UnknownStaging, match="other sessions use"):
        pool.open(1)
    assert pool.used_bytes == 2 * SIZE
    pool.close(2)
    pool.open(1)
    with pool.using(1):
        pass
    pool.close_all()


@pytest.mark.parametrize("sessions", [1, 4, 5, 8, 9, 16, 32])
@in_loop
async def test_no_session_has_twice_as_much_as_another_however_many_there_are(
    clock: ManualClock, sessions: int
) -> None:
    """Those that came first give theirs up for smaller ones, once for each halving."""
    large = 8 * module.MIN_AREA_BYTES
    pool = StagingPool(large, 4 * large, AtOnce(), clock)
    refused = 0
    for _ in range(2):
        for session in range(sessions):
            try:
                with pool.using(session):
                    clock.forward(0.001)
            except UnknownStaging:
                refused += 1
                pool.open(session)
            assert pool.used_bytes <= pool.total_bytes
    sizes = {pool.open(session).size_bytes for session in range(sessions)}
    halvings = max(0, sessions - 1).bit_length() - 2
    assert min(sizes) == large >> max(0, halvings)
    assert max(sizes) <= 2 * min(sizes)
    assert len(pool) == sessions
    assert refused <= 2 * sessions
    assert pool.refusals == 0
    pool.close_all()


@in_loop
async def test_the_smallest_parts_are_not_divided(clock: ManualClock) -> None:
    pool = StagingPool(4 * module.MIN_AREA_BYTES, 4 * module.MIN_AREA_BYTES, AtOnce(), clock)
    for session in range(4):
        pool.open(session)
    for session in range(4):
        pool.open(session)
    with pytest.raises(UnknownStaging, match="save over gRPC"):
        pool.open(5)
    assert (pool.used_bytes, pool.refusals) == (pool.total_bytes, 1)
    pool.close_all()


@in_loop
async def test_its_timer_gives_back_what_is_idle(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.001)
    pool = pool_of(1, clock)
    pool.open(1)
    clock.forward(3600)
    while pool.used_bytes:
        await asyncio.sleep(0)
    assert pool._timer is None
    pool.open(1)
    assert pool.used_bytes == SIZE
    pool.close_all()


class Later(Executor):
    """Runs its tasks when `work` is called."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Any, ...]] = []
        self.promised: list[Future[Any]] = []

    def submit(self, *task: Any) -> Future[Any]:  # type: ignore[override]  # no keywords here
        self.tasks.append(task)
        self.promised.append(Future())
        return self.promised[-1]

    def work(self) -> None:
        for (function, *arguments), promised in zip(self.tasks, self.promised, strict=True):
            promised.set_result(function(*arguments))


def is_open(memory: Staging, inode: int) -> bool:
    try:
        return os.fstat(memory.fd).st_ino == inode
    except OSError:
        return False


@in_loop
async def test_populating_outlives_the_session_and_takes_nothing(clock: ManualClock) -> None:
    """The number of the descriptor may belong to another file by then."""
    executor = Later()
    pool = StagingPool(SIZE, SIZE, executor, clock)
    memory = pool.open(1)
    inode = os.fstat(memory.fd).st_ino
    pool.close(1)
    other = os.memfd_create("other")
    executor.work()
    assert os.fstat(other).st_blocks == 0
    assert not is_open(memory, inode)
    os.close(other)
    pool.close_all()


@in_loop
async def test_the_memory_of_a_session_that_ends_is_unmapped_on_another_thread(
    clock: ManualClock,
) -> None:
    """Unmapping takes up to a second. Nothing can use the memory meanwhile."""
    executor = Later()
    pool = StagingPool(SIZE, SIZE, executor, clock)
    memory = pool.open(1)
    inode = os.fstat(memory.fd).st_ino
    view = memory.view(0, 4)
    pool.close(1)
    assert is_open(memory, inode)
    assert (len(pool), pool.used_bytes) == (0, 0)
    with pytest.raises(UnknownStaging, match="is over"):
        memory.view(0, 4)
    assert bytes(view) == bytes(4), "a copy that still runs"
    executor.work()
    assert not is_open(memory, inode)
    pool.close_all()


@in_loop
async def test_an_executor_that_ends_leaves_no_memory_behind(clock: ManualClock) -> None:
    """Neither of tasks that it has begun, nor of others."""
    executor = Later()
    pool = StagingPool(SIZE, 3 * SIZE, executor, clock)
    memories = [pool.open(session) for session in (1, 2, 3)]
    inodes = [os.fstat(memory.fd).st_ino for memory in memories]
    pool.close(1)
    pool.close(2)
    pool.close_all()
    cancelled, failed = executor.promised[-2:]
    assert cancelled.cancel()
    failed.set_exception(RuntimeError("the process died"))
    assert not any(map(is_open, memories, inodes))
    for function, *arguments in executor.tasks[:3]:
        function(*arguments)
