"""The asyncio client: the same surface, the same behaviour. (client/aio.py)"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import (
    AsyncClient,
    Client,
    Hit,
    MissReason,
    Namespace,
    Reservation,
    ReserveItem,
    SaveItem,
    SavePolicy,
    SaveReason,
    SaveStatus,
    Tier,
)
from prefixd.client.aio import AsyncHit, AsyncReservation, Runner
from prefixd.client.results import ReserveStatus
from prefixd.proto.errors import CallerError, ClientClosed, InvalidKey, InvalidSize, UnknownReason
from prefixd.proto.keys import Key, prefix_key
from tests.support.daemon import eventually
from tests.support.fakes import PATIENCE_S, FakeDaemon, keys, payloads

NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)
TOKENS = list(range(100))
POLICY = SavePolicy(boundary_align_tokens=20)
LONG_MS = round(PATIENCE_S * 1e3)
ONE, TWO, THREE = ALL = [Key(key) for key in keys(3)]
DATA = payloads([3_000, 2_000, 1_000])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        yield daemon


@asynccontextmanager
async def connected(daemon: FakeDaemon, **options: Any) -> AsyncIterator[AsyncClient]:
    client = Client(daemon.address, local=False, policy=POLICY, **options)
    async with AsyncClient(client) as client_of_loop:
        yield client_of_loop


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


async def until(condition: Callable[[], object], daemon: FakeDaemon) -> None:
    await asyncio.to_thread(daemon.wait_until, condition)


# ---- the same surface


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Public methods, including inherited ones."""
    return {
        name: member
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def known(made: object) -> set[str]:
    """Public attributes and properties."""
    properties = inspect.getmembers(type(made), lambda m: isinstance(m, property))
    return {name for name in (*vars(made), *dict(properties)) if not name.startswith("_")}


#: Methods that make no call, or wait for none.
WITHOUT_A_CALL = ("announce", "chain", "would_drop")


@pytest.mark.parametrize(
    ("sync", "twin"), [(Client, AsyncClient), (Hit, AsyncHit), (Reservation, AsyncReservation)]
)
def test_both_have_the_same_methods_with_the_same_parameters(sync: type, twin: type) -> None:
    ours, theirs = methods(sync), methods(twin)
    # Methods that return a future need no twin: coroutines replace them.
    assert ours.keys() - {"claim_async", "restore_async"} == theirs.keys()
    for name, method in theirs.items():
        assert parameters(method) == parameters(ours[name]), name
        # Those that return hits or reservations make a `Pending`, which is a coroutine too.
        waits = inspect.iscoroutinefunction(method) or method.__code__.co_name == "pending"
        assert waits == (name not in WITHOUT_A_CALL), name


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any, str]]:
    return [
        (each.name, each.kind, each.default, str(each.annotation).replace("Async", ""))
        for each in inspect.signature(method).parameters.values()
    ]


def test_both_know_the_same(daemon: FakeDaemon) -> None:
    with Client(daemon.address, local=False) as client:
        hit = client.claim([ONE])
        items = [ReserveItem(ONE, 1)]
        (reservation,) = client.reserve(items, tier=Tier.RAM, reason=SaveReason.COLD)
        runner = Runner(1, 5_000)
        twins: list[tuple[object, object]] = [
            (client, AsyncClient(client)),
            (hit, AsyncHit(hit, runner)),
            (reservation, AsyncReservation(reservation, runner)),
        ]
        for made, twin in twins:
            assert known(made) == known(twin) - {"client", "hit", "reservation"}


# ---- the same behaviour


def test_a_request_from_search_to_save(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with connected(daemon) as client:
            assert await client.wait_connected()
            assert client.connected
            chain = client.chain(NAMESPACE, TOKENS, 30)
            async with await client.longest_run(chain) as hit:
                assert not hit
                assert (hit.miss, hit.entries, len(hit)) == (MissReason.ABSENT, (), 0)
            items = [SaveItem(key, data, 30) for key, data in zip(chain, DATA, strict=True)]
            outcomes = await client.save_many(items, tier=Tier.RAM, reason=SaveReason.FINISH)
            assert all(outcome.ok for outcome in outcomes)
            async with await client.longest_run(chain) as hit:
                assert hit.claimed
                assert (hit.keys, hit.token_counts, hit.token_count) == (chain[:], (30,) * 3, 90)
                assert hit.payload_bytes == 6_000
                targets = [bytearray(len(data)) for data in DATA]
                assert await hit.restore_into(targets)
                assert targets == DATA
                assert await hit.restore_into(targets[:1])
                assert await hit.read(2) == DATA[2]
                assert await hit.token_ids(0) == b""
                assert await hit.views(0) is None
                assert hit.buffers is None
                assert "AsyncHit: 3 entries" in repr(hit)
            assert hit.released
            assert not hit.lost
            assert await client.exists([*chain[:1], ONE]) == [True, False]
            assert [found.present for found in await client.probe(chain[:])] == [True] * 3
            assert client.counters["hits"] == 2
            assert client.speeds.snapshot().keys() == {"ram"}
            assert client.policy is POLICY
            assert (client.deadline_ms, client.save_timeout_ms) == (5_000, 30_000)

    run(test)
    assert not daemon.claims


def test_prefixes_and_layers(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with connected(daemon) as client:
            assert not await client.longest_prefix(NAMESPACE, TOKENS)
            parent = prefix_key(NAMESPACE, TOKENS[:40])
            assert not await client.resume(parent, TOKENS, 0, namespace=NAMESPACE)
            outcome = await client.save(
                parent,
                DATA[0],
                tier=Tier.RAM,
                reason=SaveReason.EVICT,
                token_count=40,
                layer_count=3,
            )
            assert outcome.status is SaveStatus.SAVED
            hits = [
                await client.longest_prefix(NAMESPACE, TOKENS),
                await client.resume(parent, TOKENS, namespace=NAMESPACE),
                await client.claim([parent]),
            ]
            for hit in hits:
                assert hit.token_count == 40
                assert await hit.layer(0, 2) == DATA[0][2_000:]
            assert await client.release_many(hits) == [True] * 3

    run(test)
    assert not daemon.claims


def test_reservations(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with connected(daemon) as client:
            items = [ReserveItem(key, 3, token_count=5) for key in ALL]
            one, two, three = await client.reserve(items, tier=Tier.RAM, reason=SaveReason.COLD)
            assert one.status is ReserveStatus.GRANTED
            assert (one.key, one.item, one.owner, one.age_ms) == (ONE, items[0], "", 0)
            assert (one.message, one.lost, one.granted) == ("", False, True)
            assert "AsyncReservation: granted" in repr(one)
            async with one:
                assert (await one.write(b"abc")).ok
            async with two:
                pass
            assert [outcome.ok for outcome in await client.write([(three, b"abc")])] == [True]
            assert await client.cancel([one, two, three]) == [False] * 3

    run(test)
    assert daemon.entries.keys() == {ONE, THREE}
    assert not daemon.reservations


def test_mistakes_raise(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with connected(daemon) as client:
            with pytest.raises(InvalidKey):
                await client.claim([b"short"])  # type: ignore[list-item]
            with pytest.raises(UnknownReason):
                await client.save(ONE, b"a", tier=Tier.RAM, reason=1)  # type: ignore[arg-type]
        with pytest.raises(ClientClosed):
            await client.claim([ONE])
        with pytest.raises(InvalidSize, match="max_concurrency"):
            AsyncClient(client.client, max_concurrency=0)

    run(test)


# ---- saves


def test_asynchronous_saves_take_their_place_when_their_task_starts(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with connected(daemon, max_pending_saves=1) as client:
            gate = daemon.hold("Save")
            first = asyncio.create_task(client.save_async(ONE, b"a", tier=Tier.RAM))
            await until(lambda: daemon.rpcs["Save"], daemon)
            second = await client.save_async(TWO, b"a", tier=Tier.RAM)
            assert second.status is SaveStatus.DROPPED
            assert not await client.flush(deadline_ms=1)
            gate.set()
            assert (await first).ok
            assert await client.flush()

    run(test)


def test_a_save_cancelled_before_its_turn_is_not_done(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async with connected(daemon) as client:
            gate = daemon.hold("Save")
            first = asyncio.create_task(client.save_async(ONE, b"a", tier=Tier.RAM))
            await until(lambda: daemon.rpcs["Save"], daemon)
            second = asyncio.create_task(client.save_async(TWO, b"a", tier=Tier.RAM))
            await asyncio.sleep(0)  # it starts
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.set()
            assert (await first).ok
            assert await client.flush()

    run(test)
    assert daemon.entries.keys() == {ONE}


# ---- the end


def test_closing_ends_the_calls_under_way_and_leaves_no_thread(daemon: FakeDaemon) -> None:
    async def test() -> None:
        client = AsyncClient(Client(daemon.address, local=False), max_concurrency=2)
        daemon.hold("Claim")
        tasks = [asyncio.create_task(client.claim([ONE])) for _ in range(2)]
        await until(lambda: daemon.rpcs["Claim"] == 2, daemon)
        await client.close()
        await client.close()
        assert [(await task).miss for task in tasks] == [MissReason.UNAVAILABLE] * 2
        assert not client.connected

    run(test)
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("prefixd-")])


# ---- threads, cancellation, the end


def test_calls_run_in_a_bounded_number_of_threads() -> None:
    async def test() -> None:
        runner = Runner(2, 5_000)
        both, gate = threading.Barrier(3), threading.Event()
        running: list[str] = []

        def work(*, deadline_ms: int | None = None) -> int | None:
            running.append(threading.current_thread().name)
            if len(running) <= 2:
                both.wait(PATIENCE_S)
            assert gate.wait(PATIENCE_S)
            return deadline_ms

        tasks = [asyncio.create_task(runner.run(partial(work, deadline_ms=None))) for _ in range(5)]
        await asyncio.to_thread(both.wait, PATIENCE_S)
        assert len(running) == 2
        gate.set()
        given = await asyncio.gather(*tasks)
        assert all(deadline_ms and 0 < deadline_ms <= 5_000 for deadline_ms in given)
        assert len(set(running)) == 2
        runner.close(PATIENCE_S)
        with pytest.raises(ClientClosed):
            await runner.run(partial(work))

    run(test)


def test_what_has_no_deadline_is_given_none() -> None:
    async def test() -> None:
        runner = Runner(1, 5_000)
        assert await runner.run(partial(divmod, 7, 2)) == (3, 1)
        runner.close(PATIENCE_S)

    run(test)


def test_there_is_at_least_one_thread() -> None:
    with pytest.raises(InvalidSize, match="max_concurrency"):
        Runner(0, 5_000)


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
    monkeypatch.setattr("prefixd.client.aio.monotonic", lambda: now_s[0])

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
    """When a call has ended before its task is cancelled, a thread gives its result back: the
    daemon answers the release only after the loop has continued."""
    daemon.put(ONE, b"abc")

    async def test() -> None:
        async with AsyncClient(Client(daemon.address, local=False, deadline_ms=LONG_MS)) as client:
            assert await client.wait_connected()
            gate = daemon.hold("Release")
            ended = threading.Event()
            task = asyncio.ensure_future(client.claim([ONE]))
            task.add_done_callback(lambda _: ended.set())
            await asyncio.sleep(0)  # it begins
            daemon.wait_until(lambda: daemon.claims)  # the loop is blocked meanwhile
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
        await until(lambda: not daemon.sessions, daemon)  # it is closed even so

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


def test_a_forgotten_await_before_a_hit_does_no_harm(daemon: FakeDaemon) -> None:
    async def work() -> None:
        async with AsyncClient(Client(daemon.address, local=False)) as client:
            assert (await client.save(ONE, b"abc", tier=Tier.RAM)).ok
            async with client.longest_run([ONE]) as hit:
                assert len(hit) == 1
            task = asyncio.create_task(client.longest_run([ONE]))
            assert await (await task).release()
            with pytest.raises(CallerError, match="takes a hit or a reservation"):
                async with client.reserve([ReserveItem(ONE, 3)], tier=Tier.RAM):
                    pass

    asyncio.run(work())
    daemon.wait_until(lambda: not daemon.claims and not daemon.reservations)
