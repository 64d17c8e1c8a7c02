"""Quotas: never more than the limit, first come first served, and every wait ends."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.proto.errors import LimitReached
from prefixd.server.runtime.quota import Quota
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import let_others_run


def quota(limit_bytes: int = 100, wait_s: float = PATIENCE_S) -> Quota:
    return Quota("tests", limit_bytes, wait_s)


class Taking:
    """A call that takes room until `end`."""

    def __init__(self, of: Quota, size_bytes: int, session: int | None = None) -> None:
        self.done = asyncio.Event()
        self.has_room = False
        self.task = asyncio.ensure_future(self._run(of, size_bytes, session))

    async def _run(self, of: Quota, size_bytes: int, session: int | None) -> None:
        async with of.room(size_bytes, session):
            self.has_room = True
            await self.done.wait()

    async def end(self) -> None:
        self.done.set()
        await self.task


@in_loop
async def test_who_finds_no_room_waits_for_its_turn() -> None:
    of = quota()
    first, second, third = (Taking(of, size) for size in (60, 60, 10))
    await let_others_run()
    assert [first.has_room, second.has_room, third.has_room] == [True, False, False]
    assert of.used_bytes == 60
    await first.end()
    await let_others_run()
    assert [second.has_room, third.has_room] == [True, True]
    assert of.used_bytes == 70
    await second.end()
    await third.end()
    assert (of.used_bytes, of.refusals) == (0, 0)


@in_loop
async def test_what_is_larger_than_all_has_it_for_itself() -> None:
    of = quota()
    small, huge = Taking(of, 1), Taking(of, 500)
    await let_others_run()
    assert not huge.has_room
    await small.end()
    await let_others_run()
    assert huge.has_room
    other = Taking(of, 1)
    await let_others_run()
    assert not other.has_room
    await huge.end()
    await other.end()
    assert of.used_bytes == 0


@in_loop
async def test_a_wait_has_an_end() -> None:
    of = quota(wait_s=0)
    async with of.room(100):
        with pytest.raises(LimitReached, match="the 100 bytes for tests were taken for 0 s"):
            async with of.room(1):
                raise AssertionError
    assert (of.used_bytes, of.refusals) == (0, 1)
    async with of.room(100):
        pass


@in_loop
async def test_who_is_cancelled_leaves_the_queue() -> None:
    of = quota()
    first, second, third = (Taking(of, size) for size in (60, 60, 40))
    await let_others_run()
    second.task.cancel()
    await let_others_run()
    assert third.has_room, "it waited behind the second only"
    # Granted and cancelled at the same moment: no room leaks.
    fourth = Taking(of, 60)
    await let_others_run()
    first.done.set()
    await first.task
    fourth.task.cancel()
    await asyncio.gather(second.task, fourth.task, return_exceptions=True)
    await third.end()
    assert of.used_bytes == 0


@in_loop
async def test_one_session_has_its_share_and_others_have_theirs() -> None:
    of = quota()
    calls = [Taking(of, 25, session=1) for _ in range(4)]
    other, nobody = Taking(of, 25, session=2), Taking(of, 25)
    await let_others_run()
    assert [call.has_room for call in calls] == [True, True, False, False]
    assert other.has_room
    assert nobody.has_room
    assert of.used_bytes == 100
    for call in (*calls[:2], other, nobody, *calls[2:]):
        await call.end()
    alone = Taking(of, 80, session=1)
    await let_others_run()
    assert alone.has_room, "above its share, but it has nothing else"
    await alone.end()
    assert (of.used_bytes, of.refusals, of._shares) == (0, 0, {})


@in_loop
async def test_a_wait_for_a_share_has_an_end_and_takes_nothing() -> None:
    of = quota(wait_s=0)
    async with of.room(50, session=1):
        with pytest.raises(LimitReached, match="the 50 bytes for tests of this session"):
            async with of.room(1, session=1):
                raise AssertionError
        async with of.room(25) as room:
            with pytest.raises(LimitReached):
                await room.belongs_to(1)
            await room.belongs_to(2)
        assert of.used_bytes == 50
    assert (of.used_bytes, of.refusals, of._shares) == (0, 2, {})


@in_loop
async def test_a_share_is_forgotten_when_its_last_call_is_cancelled_as_it_gets_room() -> None:
    of = quota()
    async with of.room(50, session=1):
        second = Taking(of, 50, session=1)
        await let_others_run()
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    assert (of.used_bytes, of._shares) == (0, {})
