"""Deleted entries leave the shared engine, and no search brings them back."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import LimitReached
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import ClaimMode, Tier
from prefixd.server.api import service
from prefixd.server.core.events import Tick
from prefixd.server.core.shares import Holder
from prefixd.server.sharing import deletes
from prefixd.server.sharing.engine_link import SharingConfig, WritePolicy
from prefixd.server.sharing.engine_store import Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.sharing import Sharing
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Refused, Running, answer, key, payload, running
from tests.support.stores import LogInMemory

PATIENCE_S = 60.0
CONFIG = SharingConfig(Tier.RAM, WritePolicy.ALL, 3_600_000, 2**20)


class Engine(LogInMemory):
    """An engine in this process. `before`: called with each call's name, on its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, tuple[SharedEntry, bytes]] = {}
        self.answers = True
        self.before: Callable[[str], None] = lambda _: None

    def find(self, keys: Sequence[Key], _deadline_s: float) -> list[SharedEntry | None]:
        there = [self.values[each][0] if each in self.values else None for each in keys]
        self.before("find")
        return there

    def get(self, wanted: Sequence[Wanted], _deadline_s: float) -> list[Outcome]:
        self.before("get")
        for want in wanted:
            want.room[:] = self.values[want.entry.key][1]
        return [Outcome.DONE] * len(wanted)

    def put(self, offers: Sequence[Offer], _deadline_s: float) -> list[Outcome]:
        self.before("put")
        for offer in offers:
            self.values[offer.entry.key] = (offer.entry, b"".join(offer.pieces))
        return [Outcome.DONE] * len(offers)

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], _deadline_s: float) -> list[Key]:
        return [each for each, _ in expiries_ms if each not in self.values]

    def drop(self, keys: Sequence[Key], _deadline_s: float) -> list[Key]:
        self.before("drop")
        if not self.answers:
            return list(keys)
        for each in keys:
            self.values.pop(each, None)
        return []

    def problems(self) -> list[str]:
        return []

    def health(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass

    def add(self, of: Key, data: bytes) -> None:
        """Another node, which has done all deletes, offers an entry."""
        stamp = self.records[-1].stamp if self.records else 0
        self.values[of] = (SharedEntry(of, Content(len(data), 16), crc32c(data), stamp), data)


class Gate:
    """Stops a call of the engine until the test lets it go on."""

    def __init__(self, engine: Engine, call: str) -> None:
        self.came, self._go_on = threading.Event(), threading.Event()
        self._call = call
        engine.before = self._wait

    def _wait(self, call: str) -> None:
        if call == self._call:
            self.came.set()
            assert self._go_on.wait(PATIENCE_S)

    def open(self) -> None:
        self._go_on.set()


@asynccontextmanager
async def sharing(
    tmp_path: Path, config: SharingConfig = CONFIG
) -> AsyncIterator[tuple[Running, OpenSession, Engine, Sharing]]:
    engine = Engine()
    async with running(tmp_path) as daemon:
        shared = await Sharing.begin(daemon.core, engine, config)
        session = await daemon.open()
        try:
            yield daemon, session, engine, shared
        finally:
            engine.before = lambda _: None
            await session.close()
            await shared.close()


async def deleted(daemon: Running, session: OpenSession, *keys: Key) -> list[int]:
    request = pb.DeleteRequest(session=session.ref, keys=keys)
    return list((await answer(daemon.cache.Delete(request))).results)


async def fetched(shared: Sharing, *keys: Key) -> int:
    return await shared.fetch(list(keys), ClaimMode.RUN, monotonic() + PATIENCE_S)


@in_loop
async def test_a_delete_reaches_the_engine_and_no_search_brings_the_entry_back(
    tmp_path: Path,
) -> None:
    async with sharing(tmp_path) as (daemon, session, engine, shared):
        await session.save({key(n): payload(n) for n in range(3)}, Tier.RAM)
        await daemon.until(lambda: len(engine.values) == 3)
        engine.add(key(7), payload(7))
        gone = await deleted(daemon, session, key(1), key(7))
        assert gone == [pb.DELETE_STATUS_DELETED, pb.DELETE_STATUS_ABSENT]
        assert engine.values.keys() == {key(0), key(2)}, "also what only the engine had"
        assert await fetched(shared, key(1)) == 0
        assert shared.counts()["withdrawn"] == 2
        # What is saved under the key later is offered like anything else.
        await session.save({key(1): payload(9)}, Tier.RAM)
        await daemon.until(lambda: key(1) in engine.values)
        assert engine.values[key(1)][1] == payload(9)


@in_loop
async def test_an_entry_that_stays_stays_in_the_engine(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (daemon, session, engine, shared):
        await session.save({key(1): payload(1)}, Tier.RAM)
        await daemon.until(lambda: key(1) in engine.values)
        await session.claim([key(1)])
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_PINNED]
        assert key(1) in engine.values
        assert not shared.counts()["waiting_withdrawals"]


@in_loop
async def test_clear_reaches_the_engine(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (daemon, session, engine, _):
        other = await daemon.open(label="other")
        await session.save({key(1): payload(1)}, Tier.RAM)
        await other.save({key(n): payload(n) for n in (2, 3)}, Tier.RAM)
        await daemon.until(lambda: len(engine.values) == 3)
        response = await answer(daemon.admin.Clear(pb.ClearRequest(namespace="other")))
        assert (response.entries, response.erasing) == (2, False)
        assert engine.values.keys() == {key(1)}
        engine.answers = False
        await other.save({key(4): payload(4)}, Tier.RAM)
        response = await answer(daemon.admin.Clear(pb.ClearRequest(namespace="other")))
        assert (response.entries, response.erasing) == (1, True)
        await other.close()


@in_loop
async def test_an_engine_that_does_not_answer_is_asked_again_and_not_believed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "_DROPPED_AGAIN_S", 0.01)
    async with sharing(tmp_path) as (daemon, session, engine, shared):
        engine.add(key(1), payload(1))
        engine.answers = False
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_ERASING]
        assert await fetched(shared, key(1)) == 0
        assert shared.counts()["waiting_withdrawals"] == 1
        engine.answers = True
        await daemon.until(lambda: not engine.values)
        await daemon.until(lambda: not shared.counts()["waiting_withdrawals"])
        await daemon.until(lambda: not shared.counts()["waiting_deletes"])
        engine.add(key(1), payload(2))
        assert await fetched(shared, key(1)) == 1, "it was saved again elsewhere"


@in_loop
async def test_an_engine_that_hangs_delays_a_delete_by_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DELETE_WAIT_S", 0.02)
    async with sharing(tmp_path) as (daemon, session, engine, shared):
        engine.add(key(1), payload(1))
        gate = Gate(engine, "drop")
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_ERASING]
        gate.open()
        await daemon.until(lambda: not shared.counts()["waiting_withdrawals"])
        assert not engine.values


@in_loop
async def test_a_fetch_that_found_the_entry_before_its_delete_does_not_save_it(
    tmp_path: Path,
) -> None:
    async with sharing(tmp_path, replace(CONFIG, write=WritePolicy.NONE)) as opened:
        daemon, session, engine, shared = opened
        for number in (1, 2):
            engine.add(key(number), payload(number))
        gate = Gate(engine, "find")
        fetching = daemon.core.supervisor.task("fetch", _ignored(fetched(shared, key(1), key(2))))
        await daemon.until(gate.came.is_set)
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_ABSENT]
        gate.open()
        await fetching
        absent = pb.PRESENCE_ABSENT
        assert await daemon.presence(key(1), key(2)) == [absent, absent], "a run ends at a hole"
        assert await fetched(shared, key(2)) == 1


async def _ignored(work: object) -> None:
    await work  # type: ignore[misc]


@in_loop
async def test_an_offer_under_way_is_taken_back(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (daemon, session, engine, shared):
        gate = Gate(engine, "put")
        await session.save({key(1): payload(1)}, Tier.RAM)
        await daemon.until(gate.came.is_set)
        await session.save({key(2): payload(2), key(3): payload(3)}, Tier.RAM)
        gone = await deleted(daemon, session, key(1), key(2))
        assert gone == [pb.DELETE_STATUS_DELETED] * 2
        gate.open()
        await daemon.until(lambda: engine.values.keys() == {key(3)})
        await daemon.until(lambda: not shared.counts()["waiting_withdrawals"])
        assert engine.values.keys() == {key(3)}


@in_loop
async def test_the_keys_that_are_held_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "MAX_HELD", 2)
    async with sharing(tmp_path) as (daemon, session, engine, _):
        engine.answers = False
        await session.save({key(3): payload(3)}, Tier.RAM)
        erasing = [pb.DELETE_STATUS_ERASING] * 2
        assert await deleted(daemon, session, key(1), key(2)) == erasing
        with pytest.raises(Refused, match="deletes that the shared engine has not done"):
            await deleted(daemon, session, key(3))
        assert await daemon.presence(key(3)) == [pb.PRESENCE_PRESENT], "a later call deletes it"


@in_loop
async def test_a_tenant_leaves_deletes_to_others(tmp_path: Path) -> None:
    async with sharing(tmp_path) as (_, _session, engine, shared):
        engine.answers = False
        greedy, held = Holder("greedy", 1), shared._withdrawals
        with suppress(LimitReached):
            for number in range(deletes.MAX_HELD):
                held.hold([key(number)], greedy)
        assert 0 < len(held) <= deletes.MAX_HELD / 2
        before = len(held)
        held.hold([key(0)], greedy)
        assert len(held) == before, "what is held already takes no more room"
        held.hold([key(2**32)], Holder("honest", 2))
        assert key(2**32) in held
        held.release([key(0), key(0)])
        held.hold([key(2**33)], Holder("honest", 2))
        assert held._shares.used == len(held) == before + 1


@in_loop
async def test_a_later_save_is_offered_and_does_not_let_the_deleted_entry_live_longer(
    tmp_path: Path,
) -> None:
    async with sharing(tmp_path, replace(CONFIG, write=WritePolicy.SECOND_USE)) as opened:
        daemon, session, engine, shared = opened
        engine.add(key(1), payload(1))
        assert await fetched(shared, key(1)) == 1
        engine.answers = False
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_ERASING]
        await session.save({key(1): payload(2)}, Tier.SHM)
        for _ in range(2):
            await session.claim([key(1)])
        daemon.core.post(Tick(daemon.core.clock.now_ns(), flush=True))
        await daemon.until(lambda: engine.values[key(1)][1] == payload(2))
        await daemon.until(lambda: not shared.counts()["waiting_withdrawals"])
