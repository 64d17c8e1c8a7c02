"""The change log: the events that it holds, and what a watcher gets of those that it dropped."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.proto import watch_events
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core.effects import Erase, IndexDelete, IndexPut
from prefixd.server.core.entries import EntryState
from prefixd.server.runtime import changes
from prefixd.server.runtime.changes import COST_BYTES, ChangeLog, WatchedTooSlowly
from tests.support.event_loop import in_loop
from tests.support.running import key, let_others_run


def entry(number: int) -> EntryState:
    return EntryState(
        key(number), 1, (), Tier.RAM, SaveReason.COLD, number + 1, 0, Content(1, 1), 0
    )


def put(*numbers: int) -> list[IndexPut]:
    return [IndexPut([entry(number) for number in numbers], [None] * len(numbers))]


def keys(bodies: list[bytes]) -> list[Key]:
    return [watch_events.key_of(body) for body in bodies]


@in_loop
async def test_it_has_what_happened_in_order() -> None:
    log = ChangeLog(1000 * COST_BYTES)
    log.begin()
    log.follow([*put(1, 2), Erase(Tier.RAM, ()), IndexDelete([entry(1)])])
    assert log.sequence == 4
    bodies = log.since(1, 10)
    assert keys(bodies) == [key(1), key(2), key(1)]
    assert [watch_events.is_published(body) for body in bodies] == [True, True, False]
    assert keys(log.since(2, 1)) == [key(2)]
    assert log.since(4, 10) == []
    assert not log.reaches(0)
    assert log.reaches(1)
    assert log.reaches(4)
    assert not log.reaches(5)
    assert log.size_bytes == 3 * COST_BYTES


@in_loop
async def test_nothing_is_written_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LINGER_S", 0.0)
    log = ChangeLog(1000 * COST_BYTES)
    log.follow(put(1))
    assert (log.size_bytes, log.sequence) == (0, 1)
    log.begin()
    log.follow(put(2))
    known = log.sequence
    log.end()
    log.follow(put(3))
    assert log.reaches(known), "for a while after the last watcher it goes on"
    while log.size_bytes:
        await asyncio.sleep(0)
    log.follow(put(4))
    log.begin()
    assert not log.reaches(known), "nobody wrote down what happened in between"
    with pytest.raises(WatchedTooSlowly):
        log.since(known, 1)
    assert log.since(log.sequence, 1) == []
    log.close()


@in_loop
async def test_who_comes_back_soon_goes_on() -> None:
    log = ChangeLog(1000 * COST_BYTES)
    log.begin()
    log.end()
    log.begin()
    await let_others_run()
    log.follow(put(1))
    assert log.reaches(1)
    log.end()
    log.close()


@in_loop
async def test_it_never_takes_more_than_it_may() -> None:
    log = ChangeLog(100 * COST_BYTES)
    log.begin()
    for number in range(1000):
        log.follow(put(number))
        assert log.size_bytes <= 100 * COST_BYTES
        assert keys(log.since(log.sequence - 1, 9)) == [key(number)]
    assert not log.reaches(1)
    with pytest.raises(WatchedTooSlowly):
        log.since(1, 1)
    oldest = next(number for number in range(1000) if log.reaches(number))
    assert keys(log.since(oldest, 9))[0] == key(oldest - 1)
    # A single event of the daemon may add more changes than the log holds.
    log.follow(put(*range(500)))
    assert log.size_bytes <= 100 * COST_BYTES
    assert keys(log.since(log.sequence - 1, 9)) == [key(499)]


@in_loop
async def test_what_was_lost_is_known_to_be() -> None:
    log = ChangeLog(1000 * COST_BYTES)
    log.begin()
    log.follow(put(1))
    log.lost()
    assert not log.reaches(2)
    assert log.lost_before == log.sequence == 3
    log.follow(put(2))
    assert log.reaches(3)
    assert keys(log.since(3, 9)) == [key(2)]
    # A change that can't be encoded does not prevent later ones.
    strange = entry(3)
    strange.content = strange.content._replace(token_count=-1)
    log.follow([IndexPut([strange], [None])])
    assert log.lost_before == log.sequence == 5


@in_loop
async def test_who_waits_is_woken() -> None:
    log = ChangeLog(1000 * COST_BYTES)
    log.begin()
    assert not await log.wait(1, 0.0)
    waits = [asyncio.create_task(log.wait(1, 60)) for _ in range(3)]
    await let_others_run()
    log.follow(put(1))
    assert await asyncio.gather(*waits) == [True] * 3
    assert await log.wait(1, 60)
    last = asyncio.create_task(log.wait(2, 60))
    await let_others_run()
    log.close()
    assert await last
    assert log.closed
