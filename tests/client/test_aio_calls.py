"""Blocking calls under asyncio: cancellation, load, the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import AsyncClient, Client, MissReason, ReserveItem, SaveReason, Tier
from prefixd.client.aio_calls import Runner
from prefixd.client.owner import Owner
from prefixd.proto.errors import ClientClosed, InvalidSize
from prefixd.proto.keys import Key
from tests.support.fakes import PATIENCE_S, FakeDaemon, keys

ONE, TWO = (Key(key) for key in keys(2))
LONG_MS = round(PATIENCE_S * 1e3)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        yield daemon


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


async def until(condition: Callable[[], object], daemon: FakeDaemon) -> None:
    await asyncio.to_thread(daemon.wait_until, condition)


def test_calls_run_in_a_bounded_number_of_threads() -> None:
    async def test() -> None:
        runner = Runner(2, 5_000, Owner())
        both, gate = threading.Barrier(3), threading.Event()
        running: list[str] = []

        def work(*, deadline_ms: int | None = None) -> int | None:
            running.append(threading.current_thread().name)
            if len(running) <= 2:
                both.wait(PATIENCE_S)
            assert gate.wait(PATIENCE_S)
            return deadline_ms

        tasks = [asyncio.create_task(runner.run(work, deadline_ms=None)) for _ in range(5)]
        await asyncio.to_thread(both.wait, PATIENCE_S)
        assert len(running) == 2
        gate.set()
        given = await asyncio.gather(*tasks)
        assert all(deadline_ms and 0 < deadline_ms <= 5_000 for deadline_ms in given)
        assert len(set(running)) == 2
        runner.close(PATIENCE_S)
        with pytest.raises(ClientClosed):
            await runner.run(work)

    run(test)


def test_what_has_no_deadline_is_given_none() -> None:
    async def test() -> None:
        runner = Runner(1, 5_000, Owner())
        assert await runner.run(divmod, 7, 2) == (3, 1)
        runner.close(PATIENCE_S)

    run(test)


def test_there_is_at_least_one_thread() -> None:
    with pytest.raises(InvalidSize, match="max_concurrency"):
        Runner(0, 5_000, Owner())


def test_what_a_cancelled_call_claims_or_reserves_is_given_back(daemon: FakeDaemon) -> None:
    daemon.put(ONE, b"abc")

    async def test() -> None:
        async with AsyncClient(Client(daemon.address, local=False)) as client:
            calls: dict[str, Awaitable[Any]] = {
                "Claim": client.claim([ONE]),
                "Reserve": client.reserve(
                    [ReserveItem(TWO, 3)], tier=Tier.RAM, reason=SaveReason.COLD
                ),
            }
            for name, call in calls.items():
                gate = daemon.hold(name)
                task = asyncio.ensure_future(call)
                await until(lambda name=name: daemon.rpcs[name], daemon)  # type: ignore[misc]
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                gate.set()
            await until(lambda: daemon.rpcs["Release"] and daemon.rpcs["Cancel"], daemon)
            await until(lambda: not daemon.claims and not daemon.reservations, daemon)

    run(test)


def test_a_call_that_waits_for_a_thread_uses_up_its_time(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("prefixd.client.aio_calls.monotonic", lambda: now_s[0])

    async def test() -> None:
        async with AsyncClient(Client(daemon.address, local=False), max_concurrency=1) as client:
            gate = daemon.hold("Claim")
            first = asyncio.create_task(client.claim([ONE]))
            await until(lambda: daemon.rpcs["Claim"], daemon)
            second = asyncio.create_task(client.claim([ONE]))
            third = asyncio.create_task(client.claim([ONE], deadline_ms=60_000))
            await asyncio.sleep(0)  # both begin, and wait
            now_s[0] += 10.0
            gate.set()
            assert (await first).miss is MissReason.ABSENT
            assert (await second).miss is MissReason.DEADLINE
            assert (await third).miss is MissReason.ABSENT
            assert daemon.rpcs["Claim"] == 2

    run(test)


def test_calls_that_wait_hold_up_no_others(daemon: FakeDaemon) -> None:
    daemon.put(ONE, b"abc")

    async def test() -> None:
        async with AsyncClient(Client(daemon.address, local=False), max_concurrency=1) as client:
            (theirs,) = await client.reserve(
                [ReserveItem(TWO, 3)], tier=Tier.RAM, reason=SaveReason.COLD
            )
            waiting = [asyncio.create_task(client.claim([TWO], wait_ms=30_000)) for _ in range(8)]
            await until(lambda: daemon.rpcs["Claim"] == 8, daemon)
            assert await client.exists([ONE]) == [True]
            assert (await theirs.write(b"abc")).ok
            assert [len(hit) for hit in await asyncio.gather(*waiting)] == [1] * 8
            assert await client.release_many([task.result() for task in waiting]) == [True] * 8

    run(test)


def test_the_loop_never_waits_for_the_daemon(daemon: FakeDaemon) -> None:
    """A call that has ended when its task is cancelled is given back by a thread: the daemon only
    answers the release when the loop has gone on."""
    daemon.put(ONE, b"abc")

    async def test() -> None:
        async with AsyncClient(Client(daemon.address, local=False, deadline_ms=LONG_MS)) as client:
            assert await client.wait_connected()
            gate = daemon.hold("Release")
            ended = threading.Event()
            task = asyncio.ensure_future(client.claim([ONE]))
            task.add_done_callback(lambda _: ended.set())
            await asyncio.sleep(0)  # it begins
            daemon.wait_until(lambda: daemon.claims)  # the loop stands still meanwhile
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: daemon.rpcs["Release"], daemon)
            gate.set()
            await until(lambda: not daemon.claims, daemon)

    run(test)


def test_closing_does_not_stop_the_loop(daemon: FakeDaemon) -> None:
    async def test() -> None:
        client = AsyncClient(Client(daemon.address, local=False, deadline_ms=LONG_MS))
        gate = daemon.hold("Save")
        save = asyncio.create_task(
            client.save_async(ONE, b"abc", tier=Tier.RAM, deadline_ms=LONG_MS)
        )
        await until(lambda: daemon.rpcs["Save"], daemon)
        closing = asyncio.create_task(client.close(deadline_ms=LONG_MS))
        await asyncio.sleep(0)  # it begins, and waits for the save
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        gate.set()
        assert (await save).ok
        await until(lambda: not daemon.sessions, daemon)  # it is closed all the same

    run(test)


def test_a_call_that_is_cancelled_before_its_turn_is_not_made(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with AsyncClient(Client(daemon.address, local=False), max_concurrency=1) as client:
            gate = daemon.hold("Claim")
            first = asyncio.create_task(client.claim([ONE]))
            await until(lambda: daemon.rpcs["Claim"], daemon)
            second = asyncio.create_task(client.claim([TWO]))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.set()
            await first
            assert await client.exists([ONE]) == [False]
            assert daemon.rpcs["Claim"] == 1

    run(test)
