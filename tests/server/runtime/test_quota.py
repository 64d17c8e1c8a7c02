"""Quotas: never more than the limit, first come first served, and every wait ends."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.proto.errors import LimitReached
from prefixd.server.core.shares import Holder
from prefixd.server.runtime.quota import Quota
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import let_others_run


def quota(limit_bytes: int = 100, wait_s: float = PATIENCE_S) -> Quota:
    return Quota("tests", limit_bytes, wait_s)


class Taking:
    """A call that takes room until `end`."""

    def __init__(self, of: Quota, size_bytes: int, session: int = 0) -> None:
        self.done = asyncio.Event()
        self.has_room = False
        self.task = asyncio.ensure_future(self._run(of, size_bytes, session))

    async def _run(self, of: Quota, size_bytes: int, session: int) -> None:
        async with of.room(size_bytes, Holder(session=session)):
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
        with pytest.raises(LimitReached, match=r"all of the 100 .* are taken; waited 0 s"):
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
    assert (of.used_bytes, of.refusals) == (0, 0)


@in_loop
async def test_a_wait_for_a_share_has_an_end_and_takes_nothing() -> None:
    of, one = quota(wait_s=0), Holder(session=1)
    async with of.room(50, one):
        with pytest.raises(LimitReached, match="50 of the 100 bytes for tests are yours"):
            async with of.room(1, one):
                raise AssertionError
        async with of.room(25) as room:
            with pytest.raises(LimitReached):
                await room.belongs_to(one)
            await room.belongs_to(Holder(session=2))
        assert of.used_bytes == 50
    assert (of.used_bytes, of.refusals) == (0, 2)


@in_loop
async def test_room_is_given_back_by_whom_it_belongs_to_however_the_call_ended() -> None:
    of = quota()
    async with of.room(50, Holder(session=1)):
        second = Taking(of, 50, session=1)
        await let_others_run()
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    assert of.used_bytes == 0
    done = asyncio.Event()

    async def moved() -> None:
        async with of.room(40) as room:
            await room.belongs_to(Holder(session=1))
            await done.wait()

    async with of.room(40, Holder(session=1)):
        waiting = asyncio.ensure_future(moved())
        await let_others_run()
    await let_others_run()
    assert of.shares.held_by(Holder(session=1)) == 40, "it was moved as soon as it could be"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (of.used_bytes, of.shares.held_by(Holder(session=1))) == (0, 0)


@in_loop
async def test_sessions_have_their_turns_one_after_the_other() -> None:
    """However many calls of one session came before."""
    of = quota()
    first = Taking(of, 100, session=9)
    many = [Taking(of, 60, session=1) for _ in range(5)]
    one = Taking(of, 60, session=2)
    await let_others_run()
    await first.end()
    await let_others_run()
    assert [many[0].has_room, one.has_room] == [True, False]
    await many[0].end()
    await let_others_run()
    assert [many[1].has_room, one.has_room] == [False, True]
    for call in (one, *many[1:]):
        await call.end()
    assert of.used_bytes == 0


@in_loop
async def test_who_holds_room_keeps_nobody_from_theirs_by_asking_for_too_much() -> None:
    of = quota()
    held, greedy = Taking(of, 30, session=1), Taking(of, 90, session=1)
    other = Taking(of, 30, session=2)
    await let_others_run()
    assert [held.has_room, greedy.has_room, other.has_room] == [True, False, True]
    for call in (held, other, greedy):
        await call.end()
