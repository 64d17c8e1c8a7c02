"""Stores that fail while the daemon serves, and clients that stall: the affected clients are told,
nothing leaks, the accounting stays right, and all other calls go on."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import service, session_streams
from prefixd.server.core.effects import TellClaimLost
from prefixd.server.core.events import TierState
from prefixd.tiers.graves import GRAVES_FILE, Graves
from prefixd.tiers.store import Damaged, Store, StoreError
from tests.contract.faulty import Fault, FaultyStore
from tests.support.event_loop import in_loop
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    answer,
    item,
    key,
    part,
    payload,
    rest_of,
    running,
    stream,
)
from tests.support.stores import held

DATA = payload(1)
#: More than is copied on the loop.
LARGE = payload(1, 2 * 2**20)
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
PRESENT, ABSENT = pb.PRESENCE_PRESENT, pb.PRESENCE_ABSENT
SAVED, FAILED = pb.SAVE_STATUS_SAVED, pb.SAVE_STATUS_FAILED


@asynccontextmanager
async def faulty(directory: Path) -> AsyncIterator[Running]:
    """A daemon with faulty stores only."""
    budgets = [f"--{tier.label}.budget=8MiB" for tier in Tier]
    wrap = dict.fromkeys(Tier, FaultyStore)
    async with running(directory, *budgets, wrap=wrap) as daemon:
        yield daemon


def store_of(daemon: Running, tier: Tier) -> FaultyStore:
    store = daemon.core.stores[tier]
    assert isinstance(store, FaultyStore)
    return store


async def assert_empty(daemon: Running, tier: Tier) -> None:
    """Nothing is reserved, and nothing is kept."""
    await daemon.assert_idle()
    ledger, store = daemon.tables.ledgers[tier], daemon.core.stores[tier]
    assert (ledger.reserved_bytes, ledger.published_bytes) == (0, 0)
    assert (ledger.reservations, ledger.entries) == (0, 0)
    assert ledger.free_bytes == ledger.limit_bytes
    await daemon.until(lambda: not held(store))


async def save_three(session: OpenSession, data: bytes, tier: Tier) -> list[pb.SaveResult]:
    """One stream, with one message for each payload."""
    items = [item(key(number), data) for number in range(3)]
    first = pb.SaveRequest(header=session.header(items, tier), parts=[part(0, data)])
    rest = [pb.SaveRequest(parts=[part(number, data)]) for number in (1, 2)]
    return list((await answer(session.daemon.cache.Save(stream([first, *rest])))).results)


# ---- writing


@TIERS
@pytest.mark.parametrize("data", [DATA, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        (Fault.REFUSED_WRITE, FAILED, "a refused write, on purpose; retrying may help"),
        (Fault.FLIPPED_WRITE, pb.SAVE_STATUS_CRC_MISMATCH, "was sent; send it again"),
    ],
    ids=["refused", "flipped"],
)
@in_loop
async def test_a_save_whose_bytes_are_not_taken_fails_alone(
    tmp_path: Path, tier: Tier, data: bytes, fault: Fault, status: int, why: str
) -> None:
    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, tier)
        for attempt in range(1, 4):
            store.arm(fault)
            bad, *good = await save_three(session, data, tier)
            assert store.happened == [fault] * attempt
            assert bad.status == status
            assert why in bad.message
            assert [result.status for result in good] == [SAVED, SAVED]
            assert await daemon.presence(*map(key, range(3))) == [ABSENT, PRESENT, PRESENT]
            assert await session.restore(key(1)) == data
            await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers))
        await assert_empty(daemon, tier)
        if status == pb.SAVE_STATUS_CRC_MISMATCH:
            assert daemon.tables.counters.crc_mismatches == 3
        assert daemon.tables.tier_counters[tier].saves == 6
        assert [r.status for r in await save_three(session, data, tier)] == [SAVED] * 3


@TIERS
@pytest.mark.parametrize("data", [DATA, LARGE], ids=["on the loop", "beside the loop"])
@in_loop
async def test_a_save_that_cannot_be_sealed_fails_by_itself(
    tmp_path: Path, tier: Tier, data: bytes
) -> None:
    """The contract of stores excludes it. If it happens, the client is answered all the same."""
    async with faulty(tmp_path) as daemon:
        session = await daemon.open()
        store_of(daemon, tier).arm(Fault.SEAL_ERROR)
        statuses = [result.status for result in await save_three(session, data, tier)]
        assert statuses == [FAILED, SAVED, SAVED]
        assert await daemon.presence(key(0)) == [ABSENT]
        assert daemon.tables.counters.failed_saves == 1
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers))
        await assert_empty(daemon, tier)
        assert [r.status for r in await save_three(session, data, tier)] == [SAVED] * 3
        await daemon.assert_idle()


@pytest.mark.parametrize(
    ("fault", "status"),
    [(Fault.FULL, pb.SAVE_STATUS_DEVICE_FULL), (Fault.WRITE_ERROR, FAILED)],
    ids=["full", "broken"],
)
@in_loop
async def test_saves_that_cannot_be_committed_are_told_one_by_one(
    tmp_path: Path, fault: Fault, status: int
) -> None:
    """The whole batch fails, and then the second of its three entries again, by itself."""
    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, Tier.DISK)
        failing = iter([True, False, True, False])
        store.on_call = lambda name: store.arm(fault) if name == "apply" and next(failing) else None
        results = await session.save({key(number): DATA for number in range(3)}, Tier.DISK)
        assert results == [SAVED, status, SAVED]
        assert held(store).keys() == {key(0), key(2)} == set(daemon.tables.entries)
        assert daemon.tables.counters.failed_saves == 1
        store.on_call = None
        assert await session.save({key(1): DATA}, Tier.DISK) == [SAVED]
        await daemon.until(lambda: not daemon.core.unhealthy())
        await daemon.assert_idle()


# ---- forgetting


async def deleted(daemon: Running, session: OpenSession, *keys: Key) -> list[int]:
    request = pb.DeleteRequest(session=session.ref, keys=keys)
    return list((await daemon.cache.Delete(request)).results)


@in_loop
async def test_a_deleted_entry_has_no_record_any_more(tmp_path: Path) -> None:
    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, Tier.DISK)
        await session.save({key(1): DATA}, Tier.DISK)
        assert held(store).keys() == {key(1)}
        assert await deleted(daemon, session, key(1), key(2)) == [
            pb.DELETE_STATUS_DELETED,
            pb.DELETE_STATUS_ABSENT,
        ]
        assert held(store) == {}


@pytest.mark.parametrize("hangs", [False, True])
@in_loop
async def test_a_delete_that_the_device_does_not_take_says_so(
    tmp_path: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DELETE_WAIT_S", 0.02 if hangs else 60.0)
    go_on = threading.Event()

    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, Tier.DISK)
        await session.save({key(1): DATA}, Tier.DISK)

        def refuse(operation: str) -> None:
            if operation == "apply" and hangs:
                assert go_on.wait(60.0)
            elif operation == "apply":
                store.arm(Fault.WRITE_ERROR)

        store.on_call = refuse
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_ERASING]
        assert await daemon.presence(key(1)) == [ABSENT]
        store.on_call = None
        go_on.set()
        await daemon.until(lambda: not store.unerased)
        assert await deleted(daemon, session, key(1)) == [pb.DELETE_STATUS_ABSENT]


@in_loop
async def test_what_is_deleted_while_a_tier_recovers_stays_deleted_if_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with faulty(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA}, Tier.DISK)
    async with faulty(tmp_path) as daemon:
        # As if the records had not been read yet.
        disk = store_of(daemon, Tier.DISK)
        devices = daemon.core.devices
        monkeypatch.setattr(devices, "recovers", lambda tier: tier is Tier.DISK)
        monkeypatch.setattr(devices, "state", lambda _tier: TierState.RECOVERING)
        now = daemon.tables.stamp_ns
        assert await service.durable_deletes(daemon.core, [key(1)], now, monotonic() + 60.0)
        assert held(disk).keys() == {key(1), key(2)}, "the daemon ends before it reads them"
    async with faulty(tmp_path) as daemon:
        assert await daemon.presence(key(1), key(2)) == [ABSENT, PRESENT]
        assert held(store_of(daemon, Tier.DISK)).keys() == {key(2)}
        assert not (tmp_path / "disk" / GRAVES_FILE).exists()


@in_loop
async def test_what_a_delete_leaves_and_what_is_saved_after_it_is_not_noted_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would drop an acknowledged save."""
    async with faulty(tmp_path) as daemon:
        session = await daemon.open()
        pinned, in_flight, gone, never = map(key, range(4))
        await session.save({pinned: DATA, gone: DATA}, Tier.RAM)
        await session.claim([pinned])
        await session.reserve([item(in_flight, DATA)])
        devices, committers = daemon.core.devices, daemon.core.committers
        erased = committers.erased

        async def erased_after_a_save(within_s: float) -> bool:
            await session.save({gone: DATA}, Tier.RAM)
            return await erased(within_s)

        with monkeypatch.context() as patch:
            patch.setattr(devices, "recovers", lambda tier: tier is Tier.DISK)
            patch.setattr(devices, "state", lambda _tier: TierState.RECOVERING)
            patch.setattr(committers, "erased", erased_after_a_save)
            assert await deleted(daemon, session, pinned, in_flight, gone, never) == [
                pb.DELETE_STATUS_PINNED,
                pb.DELETE_STATUS_IN_FLIGHT,
                pb.DELETE_STATUS_DELETED,
                pb.DELETE_STATUS_ABSENT,
            ]
        noted = Graves(tmp_path / "disk", sync=False).read()
        assert noted.keys() == {gone, never}
        again = daemon.tables.entries.find(gone)
        assert again is not None
        assert noted[gone] < again.generation


@in_loop
async def test_no_note_of_a_delete_outlives_a_recovery_that_ends_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with faulty(tmp_path) as daemon:
        disk, notes = store_of(daemon, Tier.DISK), tmp_path / "disk" / GRAVES_FILE
        devices, recovering = daemon.core.devices, [Tier.DISK]
        noted, bury = [], disk.bury

        def bury_late(keys: Sequence[Key], generation: int) -> None:
            recovering.clear()
            bury(keys, generation)
            noted.append(notes.exists())

        monkeypatch.setattr(disk, "bury", bury_late)
        monkeypatch.setattr(devices, "recovers", lambda tier: tier in recovering)
        monkeypatch.setattr(devices, "state", lambda _tier: TierState.RECOVERING)
        now = daemon.tables.stamp_ns
        assert await service.durable_deletes(daemon.core, [key(1)], now, monotonic() + 60.0)
        assert noted == [True]
        assert not notes.exists()


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.WRITE_ERROR], ids=["full", "broken"])
@in_loop
async def test_what_cannot_be_erased_is_gone_for_clients_and_saved_again_in_peace(
    tmp_path: Path, fault: Fault
) -> None:
    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, Tier.DISK)
        await session.save({key(number): DATA for number in range(3)}, Tier.DISK)
        failed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail(operation: str) -> None:
            if operation == "apply":
                store.arm(fault)
                loop.call_soon_threadsafe(failed.set)

        store.on_call = fail
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=[pb.TIER_DISK]))
        assert await daemon.presence(*map(key, range(3))) == [ABSENT] * 3
        assert daemon.tables.ledgers[Tier.DISK].published_bytes == 0
        assert daemon.core.state.check() == []
        await failed.wait()
        assert store.unerased == 3
        # The device works again: a save of one of these keys replaces its record.
        store.on_call = None
        assert await session.save({key(1): LARGE}, Tier.DISK) == [SAVED]
        assert await session.restore(key(1)) == LARGE
        assert held(store).keys() == {key(1)}
        assert store.unerased == 0
        await daemon.until(lambda: not daemon.core.unhealthy())
        await daemon.assert_idle()
    async with faulty(tmp_path) as daemon:
        session = await daemon.open()
        assert await session.restore(key(1)) == LARGE
        await assert_same(daemon)


async def assert_same(daemon: Running) -> None:
    """The stores hold what the core's tables say, and nothing else."""
    await daemon.assert_idle()
    for tier in (Tier.SHM, Tier.DISK):
        store = daemon.core.stores[tier]
        assert store.unerased == 0
        assert held(store) == {
            key: entry.generation
            for key, entry in daemon.tables.entries.items()
            if entry.tier is tier
        }


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)
@in_loop
async def test_use_that_cannot_be_recorded_is_a_notice_and_no_more(
    tmp_path: Path, tier: Tier
) -> None:
    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, tier)
        await session.save({key(1): DATA}, tier)
        await daemon.until(lambda: not daemon.core.unhealthy())
        store.arm(Fault.USAGE_ERROR)
        daemon.core._flush()
        await daemon.until(daemon.core.notices)
        why = "usage that is not recorded, on purpose"
        assert daemon.core.notices() == {f"{tier.label} usage": why}
        assert daemon.core.unhealthy() == {}
        assert await session.restore(key(1)) == DATA
        daemon.core._flush()
        await daemon.until(lambda: not daemon.core.notices())
        await daemon.assert_idle()


# ---- reading


@TIERS
@in_loop
async def test_token_ids_that_are_damaged_are_as_bad_as_a_payload(
    tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreadable entry stays; a damaged one is dropped, after the others were sent."""
    async with faulty(tmp_path) as daemon:
        session, ids = await daemon.open(), payload(2, 400)
        items = [item(key(number), DATA, token_ids=ids) for number in (1, 2)]
        parts = [part(0, DATA), part(1, DATA)]
        first = pb.SaveRequest(header=session.header(items, tier), parts=parts)
        await answer(daemon.cache.Save(stream([first])))
        store = store_of(daemon, tier)
        good = store.token_ids
        for problem, status, there in (
            (StoreError("not now, on purpose"), pb.READ_STATUS_UNREADABLE, PRESENT),
            (Damaged("wrong bytes, on purpose"), pb.READ_STATUS_DAMAGED, ABSENT),
        ):
            both = (await session.claim([key(1), key(2)])).claim_id
            wanted = [pb.ReadRange(index=index, token_ids=True) for index in (0, 1)]
            assert await session.read(both, *wanted) == [ids, ids]
            failing = iter([problem])

            def fail(*args: Any, failing: Iterator[Exception] = failing) -> bytes:
                for wrong in failing:
                    raise wrong
                return good(*args)

            with monkeypatch.context() as patch:
                patch.setattr(store, "token_ids", fail)
                request = pb.ReadRequest(session=session.ref, claim_id=both, ranges=wanted)
                (response,) = await answer(daemon.cache.Read(request))
            first_part, second = response.parts
            assert (first_part.range, first_part.status, first_part.data) == (0, status, b"")
            assert (second.range, second.status, second.data) == (1, pb.READ_STATUS_OK, ids)
            assert await daemon.presence(key(1), key(2)) == [there, PRESENT]
            assert both in daemon.tables.claims, "what else is read under it is good"
            await session.release(both)
        assert daemon.tables.tier_counters[tier].corrupt == 1
        assert await session.restore(key(2)) == DATA
        await daemon.assert_sound()


@TIERS
@in_loop
async def test_what_a_store_cannot_read_stays_and_makes_its_tier_unhealthy(
    tmp_path: Path, tier: Tier
) -> None:
    async with faulty(tmp_path) as daemon:
        session, store = await daemon.open(), store_of(daemon, tier)
        await session.save({key(1): DATA}, tier)
        claim = (await session.claim([key(1)])).claim_id
        request = pb.ReadRequest(session=session.ref, claim_id=claim, ranges=[pb.ReadRange()])
        for _ in range(2):  # one by the client, and one by the daemon, which verifies
            store.arm(Fault.READ_ERROR)
        (response,) = await answer(daemon.cache.Read(request))
        assert [one.status for one in response.parts] == [pb.READ_STATUS_UNREADABLE]
        await daemon.until(lambda: not daemon.core.verifications.pending)
        assert daemon.core.unhealthy() == {f"{tier.label} reads": "a failed read, on purpose"}
        assert await daemon.presence(key(1)) == [PRESENT]
        assert daemon.tables.tier_counters[tier].corrupt == 0
        assert await session.read(claim) == [DATA]
        await session.send(suspect=pb.Suspect(keys=[key(1)]))
        await session.beat()
        await daemon.until(lambda: not daemon.core.unhealthy())
        await daemon.assert_sound()


# ---- everything at once


class Worker:
    """Does random things, and checks each answer. The payload of a key depends on the key."""

    KEYS = 24

    def __init__(self, session: OpenSession, seed: int, answers: Counter[str]) -> None:
        self._session = session
        self._random = random.Random(seed)
        self._answers = answers

    async def work(self, steps: int) -> None:
        doing = [self.save, self.save, self.restore, self.restore, self.evict, self.suspect]
        for _ in range(steps):
            await self._random.choice(doing)()

    def _some(self) -> list[int]:
        return self._random.sample(range(self.KEYS), self._random.randint(1, 4))

    async def save(self) -> None:
        tier = self._random.choice(list(Tier))
        payloads = {key(number): self.data(number) for number in self._some()}
        for status in await self._session.save(payloads, tier, wait_ms=60_000):
            self._answers[pb.SaveStatus.Name(status).removeprefix("SAVE_STATUS_")] += 1

    async def restore(self) -> None:
        numbers = self._some()
        claimed = await self._session.claim(map(key, numbers), pb.CLAIM_MODE_ANY)
        if not claimed.claim_id:
            return
        there = [n for n, found in zip(numbers, claimed.results, strict=True) if found.claimed]
        ranges = [pb.ReadRange(index=index) for index in range(len(there))]
        request = pb.ReadRequest(
            session=self._session.ref, claim_id=claimed.claim_id, ranges=ranges
        )
        try:
            for response in await answer(self._session.daemon.cache.Read(request)):
                for one in response.parts:
                    if one.status == pb.READ_STATUS_OK:
                        self._answers["read"] += 1
                        end = one.offset_bytes + len(one.data)
                        assert one.data == self.data(there[one.range])[one.offset_bytes : end]
        except Refused as refused:
            self._answers[f"read refused: {refused.name}"] += 1
        await self._session.release(claimed.claim_id)

    async def evict(self) -> None:
        request = pb.EvictRequest(
            free_bytes=self._random.randint(1, 2**13), tiers=self._session.daemon.tiers
        )
        await answer(self._session.daemon.admin.Evict(request))

    async def suspect(self) -> None:
        await self._session.send(suspect=pb.Suspect(keys=map(key, self._some())))

    @staticmethod
    def data(number: int) -> bytes:
        return payload(number, 1000 + 3000 * (number % 7))


RATES = {
    Fault.FULL: 0.05,
    Fault.WRITE_ERROR: 0.05,
    Fault.REFUSED_WRITE: 0.04,
    Fault.FLIPPED_WRITE: 0.04,
    Fault.READ_ERROR: 0.02,
    Fault.USAGE_ERROR: 0.1,
}


@pytest.mark.parametrize("seed", range(6))
@in_loop
async def test_whatever_fails_every_answer_is_true_and_nothing_stays(
    tmp_path: Path, seed: int
) -> None:
    answers: Counter[str] = Counter()
    stores: list[FaultyStore] = []

    def wrap(store: Store) -> FaultyStore:
        stores.append(FaultyStore(store, seed, RATES))
        return stores[-1]

    async with running(tmp_path, wrap=dict.fromkeys(Tier, wrap)) as daemon:
        everybody = [await daemon.open(f"worker {number}") for number in range(4)]
        workers = [Worker(one, 10 * seed + one.number, answers) for one in everybody]
        await asyncio.gather(*(worker.work(40) for worker in workers))
        assert any(store.happened for store in stores)
        assert daemon.core.state.check() == []

        for store in stores:
            store._rates = {}
        session = everybody[0]
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers))
        for number, tier in enumerate(Tier):
            assert await session.save({key(100 + number): DATA}, tier) == [SAVED]
            await session.restore(key(100 + number))
        daemon.core._flush()
        # A failed read is shown until a read of the same tier succeeds that began after it ended.
        verifications = daemon.core.verifications
        await daemon.until(lambda: not verifications.pending)
        await session.send(suspect=pb.Suspect(keys=[key(100 + n) for n in range(len(Tier))]))
        await session.beat()
        await daemon.until(lambda: not (verifications.pending or daemon.core.unhealthy()))
        await assert_same(daemon)
        counters, tiers = daemon.tables.counters, daemon.tables.tier_counters
        assert sum(tier.saves for tier in tiers.values()) == answers["SAVED"] + len(Tier)
        assert counters.crc_mismatches == answers["CRC_MISMATCH"]
        assert counters.duplicate_saves == answers["PRESENT"]
        assert answers["read"] > 0
        assert not [name for name in answers if name.startswith("read refused")]
        for one in everybody:
            await one.close()
        await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers))
        for tier in Tier:
            await assert_empty(daemon, tier)


# ---- clients that hold everything up


@in_loop
async def test_a_client_that_reads_none_of_its_events_loses_its_session_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_streams, "_MAX_UNREAD_EVENTS", 4)
    async with running(tmp_path) as daemon:
        lively, mute = await daemon.open("lively"), await daemon.open("mute")
        await lively.save({key(1): DATA})
        held = (await lively.claim([key(1)])).claim_id
        await mute.claim([key(1)])
        await mute.granted([item(key(2), DATA)])
        # More than flow control lets pass; then the answers to its heartbeats are too many.
        why = "x" * 200_000
        for number in range(8):
            daemon.core._listeners[mute.number].told(TellClaimLost(mute.number, number, why))
            await lively.beat()
        await mute.send(heartbeat=pb.Heartbeat(sequence=1))
        await daemon.until(lambda: mute.number not in daemon.tables.sessions)
        assert set(daemon.tables.sessions) == {lively.number}
        assert daemon.tables.entries[key(1)].pins == 1
        assert not daemon.tables.reservations
        await lively.beat()
        assert await lively.read(held) == [DATA]
        assert await lively.save({key(2): DATA}) == [SAVED]
        with pytest.raises(Refused, match="limit_reached"):
            await rest_of(mute.call)
        await daemon.assert_idle()


@TIERS
@in_loop
async def test_a_reader_that_takes_nothing_holds_up_nobody(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path, f"--{tier.label}.budget=16MiB") as daemon:
        lively, mute = await daemon.open("lively"), await daemon.open("mute")
        data = bytes(3 * limits.CHUNK_BYTES)
        await lively.save({key(1): data}, tier)
        claim = (await mute.claim([key(1)])).claim_id
        request = pb.ReadRequest(session=mute.ref, claim_id=claim, ranges=[pb.ReadRange()])
        reading = daemon.cache.Read(request)
        await daemon.until(lambda: daemon.tables.tier_counters[tier].read_bytes)
        assert await lively.restore(key(1)) == data
        assert await lively.save({key(2): data}, tier) == [SAVED]
        evict = pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers)
        await daemon.admin.Evict(evict)
        assert await daemon.presence(key(1), key(2)) == [PRESENT, ABSENT], "it is read"

        daemon.forward(3.9)
        await lively.beat()
        daemon.forward(0.1)
        assert set(daemon.tables.sessions) == {lively.number}
        await daemon.admin.Evict(evict)
        assert await daemon.presence(key(1)) == [ABSENT]
        assert await lively.save({key(3): data}, tier) == [SAVED]
        with pytest.raises(Refused, match="unknown_session"):
            await rest_of(reading)
        await daemon.assert_idle()


@in_loop
async def test_a_hundred_that_say_nothing_take_nobodys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_streams, "_PATIENCE_S", 0.05)
    async with running(tmp_path, "--sessions.max_sessions=1") as daemon:
        silent = [daemon.cache.Session() for _ in range(100)]
        session = await daemon.open()
        assert await session.save({key(1): DATA}) == [SAVED]
        for call in silent:
            with pytest.raises(Refused, match="malformed_message"):
                await rest_of(call)
        assert set(daemon.tables.sessions) == {session.number}
        assert daemon.tables.counters.sessions_opened == 1
        await daemon.assert_idle()
