"""A delete on one node reaches the others, also those that were away."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import ClaimMode, Tier
from prefixd.server.core.events import Tick
from prefixd.server.core.shares import Holder
from prefixd.server.sharing import deletes
from prefixd.server.sharing.delete_log import NO_STAMP, DeleteLog, FleetDelete, Logged, LogPace
from prefixd.server.sharing.engine_link import SharingConfig, WritePolicy
from prefixd.server.sharing.engine_store import LogPage, Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.sharing import Sharing
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Refused, Running, answer, item, key, payload, running
from tests.support.stores import LogInMemory

PATIENCE_S = 60.0
CONFIG = SharingConfig(Tier.RAM, WritePolicy.ALL, 3_600_000, 2**20)
TENANT = TenantNamespace("tenant")
ABSENT, PRESENT = pb.PRESENCE_ABSENT, pb.PRESENCE_PRESENT


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AGAIN_S", "_PUT_BACK_WITHIN_S"):
        monkeypatch.setattr(deletes, name, 0.01)
    monkeypatch.setattr(LogInMemory, "log_every_s", 0.01)


class Engine:
    """What all nodes share: values, and the records of the log."""

    def __init__(self) -> None:
        self.values: dict[Key, tuple[SharedEntry, bytes]] = {}
        self.records: list[Logged] = []
        #: Whether earlier records were dropped.
        self.trimmed = False

    def add(self, of: Key, data: bytes, stamp: int) -> None:
        """Another node offers an entry."""
        self.values[of] = (SharedEntry(of, Content(len(data), 16), crc32c(data), stamp), data)


class View(LogInMemory):
    """The engine as one node reaches it, or not."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cut_off = False

    @property
    def records(self) -> list[Logged]:  # type: ignore[override]
        return self.engine.records

    @records.setter
    def records(self, records: list[Logged]) -> None:
        self.engine.records = records

    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        return 0 if self.cut_off else super().log(records, deadline_s)

    def read_log(self, place: bytes, _deadline_s: float) -> LogPage | None:
        if self.cut_off:
            return None
        records = self.engine.records
        first = next((n for n, each in enumerate(records) if each.place == place), 0)
        return LogPage(records[first:], self.engine.trimmed)

    def find(self, keys: Sequence[Key], _deadline_s: float) -> list[SharedEntry | None]:
        values = {} if self.cut_off else self.engine.values
        return [values[each][0] if each in values else None for each in keys]

    def get(self, wanted: Sequence[Wanted], _deadline_s: float) -> list[Outcome]:
        for want in wanted:
            want.room[:] = self.engine.values[want.entry.key][1]
        return [Outcome.DONE] * len(wanted)

    def put(self, offers: Sequence[Offer], _deadline_s: float) -> list[Outcome]:
        if self.cut_off:
            return [Outcome.UNAVAILABLE] * len(offers)
        for offer in offers:
            self.engine.values[offer.entry.key] = (offer.entry, b"".join(offer.pieces))
        return [Outcome.DONE] * len(offers)

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], _deadline_s: float) -> list[Key]:
        return [each for each, _ in expiries_ms if each not in self.engine.values]

    def drop(self, keys: Sequence[Key], _deadline_s: float) -> list[Key]:
        if self.cut_off:
            return list(keys)
        for each in keys:
            self.engine.values.pop(each, None)
        return []

    def problems(self) -> list[str]:
        return []

    def health(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        pass


@dataclass
class Node:
    daemon: Running
    session: OpenSession
    view: View
    shared: Sharing

    async def save(self, *numbers: int, version: int = 0, tier: Tier = Tier.RAM) -> None:
        items = {key(number): payload(number + 100 * version) for number in numbers}
        await self.session.save(items, tier)

    async def delete(self, *keys: Key) -> list[int]:
        request = pb.DeleteRequest(session=self.session.ref, keys=keys)
        return list((await answer(self.daemon.cache.Delete(request))).results)

    async def fetch(self, *keys: Key) -> int:
        return await self.shared.fetch(list(keys), ClaimMode.RUN, monotonic() + PATIENCE_S)

    def has(self, of: Key) -> bool:
        return of in self.daemon.tables.entries

    @property
    def log(self) -> DeleteLog:
        return self.shared._deletes.log

    async def settled(self) -> None:
        """Until this node has done everything that the engine has logged."""
        done = self.shared._deletes
        records = self.view.engine.records

        def is_settled() -> bool:
            return (
                self.log.last == (records[-1] if records else None)
                and not done.waiting
                and done.stamp == (records[-1].stamp if records else NO_STAMP)
                and done._mark == (records[-1].mark if records else b"")
            )

        await self.daemon.until(is_settled)


@asynccontextmanager
async def node(
    directory: Path, engine: Engine, *flags: str, cut_off: bool = False
) -> AsyncIterator[Node]:
    view = View(engine)
    view.cut_off = cut_off
    directory.mkdir(exist_ok=True)
    async with running(directory, *flags) as daemon:
        shared = await Sharing.begin(daemon.core, view, CONFIG)
        session = await daemon.open()
        try:
            yield Node(daemon, session, view, shared)
        finally:
            await session.close()
            await shared.close()


@asynccontextmanager
async def two(tmp_path: Path) -> AsyncIterator[tuple[Engine, Node, Node]]:
    engine = Engine()
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(node(tmp_path / name, engine)) for name in "ab"
        ]
        yield engine, one, other


@in_loop
async def test_a_delete_reaches_the_other_node_also_what_is_claimed_there(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, other):
        await one.save(1, 2)
        await one.daemon.until(lambda: len(engine.values) == 2)
        assert await other.fetch(key(1), key(2)) == 2
        claimed = await other.session.claim([key(1)])
        assert await one.delete(key(1)) == [pb.DELETE_STATUS_DELETED]
        await other.daemon.until(lambda: not other.has(key(1)))
        assert other.has(key(2))
        assert await other.session.release(claimed.claim_id) == [pb.RELEASE_STATUS_LOST]
        await other.settled()
        assert other.shared.counts()["deletes_learned"] == 1
        assert one.shared.counts()["deletes_learned"] == 0
        await other.daemon.assert_sound()


@in_loop
async def test_a_key_that_is_saved_again_is_shared_again(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, other):
        await one.save(1)
        assert await one.delete(key(1)) == [pb.DELETE_STATUS_DELETED]
        await one.save(1, version=1)
        await one.settled()
        assert one.has(key(1)), "the node that deleted it knows which save came later"
        await other.settled()
        assert await other.delete(key(1)) == [pb.DELETE_STATUS_ABSENT]
        await one.daemon.until(lambda: not one.has(key(1)))
        await one.settled()
        await one.save(1, version=2)
        await one.daemon.until(lambda: key(1) in engine.values)
        assert engine.values[key(1)][1] == payload(201)
        await other.settled()
        assert await other.fetch(key(1)) == 1


@in_loop
async def test_what_a_node_offers_that_has_not_done_the_delete_is_not_fetched(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (engine, one, other):
        await one.delete(key(1))
        for each in (one, other):
            await each.settled()
            engine.add(key(1), payload(1), NO_STAMP)
            assert await each.fetch(key(1)) == 0
            assert each.shared.counts()["unvouched"] == 1
            engine.add(key(1), payload(2), engine.records[-1].stamp)
            assert await each.fetch(key(1)) == 1


@in_loop
async def test_an_offer_is_vouched_for_with_what_was_done_before_it_was_copied(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (engine, one, other):
        await one.delete(key(9))
        await other.settled()
        await other.save(1)
        await other.daemon.until(lambda: key(1) in engine.values)
        assert engine.values[key(1)][0].stamp == engine.records[0].stamp
        # It has read the next delete, and done it in memory, but not durably.
        other.shared._deletes._keys[key(8)] = False
        other.daemon.core.committers.erased = _never  # type: ignore[assignment]
        await one.delete(key(9))
        await other.daemon.until(lambda: len(other.log) == 2)
        await other.save(2)
        await other.daemon.until(lambda: key(2) in engine.values)
        assert engine.values[key(2)][0].stamp == engine.records[0].stamp


async def _never(_within_s: float) -> bool:
    return False


@in_loop
async def test_a_save_in_flight_goes_when_it_has_ended(tmp_path: Path) -> None:
    async with two(tmp_path) as (_, one, other):
        data = payload(1)
        (token,) = await other.session.granted([item(key(1), data)])
        await one.delete(key(1))
        await other.daemon.until(lambda: len(other.log) == 1)
        assert other.shared._deletes.stamp == NO_STAMP
        written = pb.WritePart(data=data, last=True, payload_crc32c=crc32c(data))
        await other.session.write(token, written)
        await other.settled()
        assert not other.has(key(1))


@in_loop
async def test_a_namespace_is_cleared_everywhere(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, other):
        mine = TENANT.stored([key(1), key(2)])
        await one.session.save({mine[0]: payload(1), key(3): payload(3)}, Tier.RAM)
        await other.session.save({mine[1]: payload(2)}, Tier.RAM)
        await one.daemon.until(lambda: len(engine.values) == 3)
        assert await other.fetch(mine[0], key(3)) == 2
        await one.session.claim([mine[0]])
        response = await answer(one.daemon.admin.Clear(pb.ClearRequest(namespace="tenant")))
        assert (response.entries, response.pinned_entries, response.erasing) == (1, 0, False)
        assert not one.has(mine[0])
        await other.daemon.until(lambda: not other.has(mine[0]) and not other.has(mine[1]))
        assert other.has(key(3))
        await one.settled()
        engine.add(mine[1], payload(2), NO_STAMP)
        assert await one.fetch(mine[1]) == 0


@in_loop
async def test_what_is_saved_after_a_clear_was_answered_stays(tmp_path: Path) -> None:
    async with two(tmp_path) as (_, one, _other):
        mine = TENANT.stored([key(1), key(2)])
        await one.session.save({mine[0]: payload(1)}, Tier.RAM)
        response = await answer(one.daemon.admin.Clear(pb.ClearRequest(namespace="tenant")))
        assert not response.erasing
        await one.session.save({mine[1]: payload(2)}, Tier.RAM)
        await one.settled()
        assert [one.has(each) for each in mine] == [False, True]


@in_loop
async def test_a_clear_that_another_one_follows_while_it_is_done_is_done_again(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (_, one, _other):
        (mine,) = TENANT.stored([key(1)])
        await one.session.save({mine: payload(1)}, Tier.RAM)
        done = one.shared._deletes

        async def settle() -> None:
            """Leave the clear to this test."""

        done._settle = settle  # type: ignore[method-assign]
        done._namespaces["tenant"] = None
        times: list[Sequence[Key]] = []

        async def delete(keys: Sequence[Key]) -> None:
            if not times:
                done._namespaces["tenant"] = None  # another clear, in the middle of the first
            times.append(keys)

        done._delete = delete  # type: ignore[method-assign]
        await done._delete_namespace("tenant")
        assert "tenant" in done._namespaces
        await done._delete_namespace("tenant")
        assert "tenant" not in done._namespaces
        del done._delete, done._settle
        assert len(times) >= 2


@in_loop
async def test_a_label_is_cleared_where_its_clients_saved(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, other):
        labelled = await other.daemon.open(label="web/chat")
        await labelled.save({key(1): payload(1)}, Tier.RAM)
        await other.save(2)
        await other.daemon.until(lambda: len(engine.values) == 2)
        await answer(one.daemon.admin.Clear(pb.ClearRequest(namespace="web/chat")))
        await other.settled()
        assert [other.has(key(n)) for n in (1, 2)] == [False, True]
        await other.daemon.until(lambda: engine.values.keys() == {key(2)})
        await labelled.close()


@in_loop
async def test_an_engine_that_does_not_drop_a_cleared_label_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the keys says that they belong to it: a search would fetch them back."""
    monkeypatch.setattr(deletes, "_DROPPED_AGAIN_S", 0.01)
    async with node(tmp_path / "a", Engine()) as one:
        labelled = await one.daemon.open(label="web/chat")
        await labelled.save({key(1): payload(1)}, Tier.RAM)
        await one.daemon.until(lambda: key(1) in one.view.engine.values)
        with monkeypatch.context() as patch:
            patch.setattr(one.view, "drop", lambda keys, _: list(keys))
            await answer(one.daemon.admin.Clear(pb.ClearRequest(namespace="web/chat")))
            await one.settled()
            assert key(1) in one.view.engine.values
            assert await one.fetch(key(1)) == 0
        await one.daemon.until(lambda: not one.view.engine.values)
        await one.daemon.until(lambda: not one.shared.counts()["waiting_withdrawals"])
        await labelled.close()


@in_loop
async def test_a_clear_of_one_tier_stays_on_its_node(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, _):
        request = pb.ClearRequest(namespace="tenant", tiers=[pb.TIER_RAM])
        assert not (await answer(one.daemon.admin.Clear(request))).erasing
        assert not engine.records


@in_loop
async def test_a_node_that_was_cut_off_learns_it_when_it_returns(tmp_path: Path) -> None:
    async with two(tmp_path) as (_, one, other):
        await other.save(1, 2)
        await other.settled()
        other.view.cut_off = True
        await one.delete(key(1))
        # Its own delete waits for the engine.
        assert await other.delete(key(2)) == [pb.DELETE_STATUS_ERASING]
        assert other.has(key(1))
        assert other.shared.counts()["waiting_deletes"]
        other.view.cut_off = False
        await other.settled()
        assert not other.has(key(1))
        await one.settled()
        assert one.shared.counts()["deletes_learned"] == 1


@in_loop
async def test_a_restart_goes_on_where_its_tiers_were(tmp_path: Path) -> None:
    engine = Engine()
    async with node(tmp_path / "a", engine) as one:
        async with node(tmp_path / "b", engine) as other:
            await one.delete(key(1))
            await other.settled()
            await other.save(1, 2, tier=Tier.SHM)
        await one.delete(key(2))
        async with node(tmp_path / "b", engine, cut_off=True) as other:
            await other.daemon.until(lambda: other.has(key(2)))
            engine.add(key(3), payload(3), NO_STAMP)
            assert not other.shared._deletes.known.is_set(), "it fetches nothing until it knows"
            other.view.cut_off = False
            await other.settled()
            assert other.has(key(1)), "that delete was done before"
            assert not other.has(key(2))
            assert await other.fetch(key(3)) == 1


@in_loop
async def test_a_restart_that_can_not_know_what_it_missed_drops_everything(tmp_path: Path) -> None:
    engine = Engine()
    async with node(tmp_path / "a", engine) as one:
        async with node(tmp_path / "b", engine) as other:
            await one.delete(key(1))
            await other.settled()
            await other.save(1, 2, tier=Tier.SHM)
        await one.delete(key(7))
        await one.settled()
        del engine.records[0]
        engine.trimmed = True
        async with node(tmp_path / "b", engine) as other:
            await other.settled()
            assert not any(other.has(key(n)) for n in (1, 2))
        assert not one.log.missing, "what the engine dropped for room is not put back"


@in_loop
async def test_a_log_that_the_engine_lost_is_put_back_by_who_knows_it(tmp_path: Path) -> None:
    engine = Engine()
    async with node(tmp_path / "a", engine) as one:
        async with node(tmp_path / "b", engine) as other:
            await other.save(1, tier=Tier.SHM)
            await other.settled()
        await one.delete(key(1))
        await one.settled()
        engine.records = []
        await one.daemon.until(lambda: engine.records)
        await one.settled()
        assert FleetDelete.decode(engine.records[0].record).keys == (key(1),)  # type: ignore[union-attr]
        async with node(tmp_path / "b", engine) as other:
            await other.settled()
            assert not other.has(key(1))


@in_loop
async def test_the_end_of_a_log_that_a_failover_lost_is_put_back(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, other):
        await one.delete(key(1))
        for each in (one, other):
            await each.settled()
            each.view.cut_off = True
        await other.daemon.until(lambda: not other.shared._deletes.waiting)
        # The new primary never had it, and gives its place to another one.
        engine.records = [Logged(b"0", FleetDelete(b"x" * 16, (key(2),)).encode())]
        await one.save(2)
        for each in (one, other):
            each.view.cut_off = False
        await one.daemon.until(lambda: len(engine.records) >= 2)
        for each in (one, other):
            await each.settled()
        assert not one.has(key(2))
        known = [FleetDelete.decode(each.record) for each in engine.records]
        assert {k for each in known if each for k in each.keys} == {key(1), key(2)}


@in_loop
async def test_a_failover_that_loses_the_end_of_a_log_costs_no_other_entries(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (engine, one, other):
        await one.save(3)
        for number in (1, 2):
            await one.delete(key(number))
        for each in (one, other):
            await each.settled()
        # Earlier records were dropped for room, long ago; the failover loses the last one.
        engine.trimmed = True
        del engine.records[1]
        await one.daemon.until(lambda: len(engine.records) >= 2)
        for each in (one, other):
            await each.settled()
        assert one.has(key(3))
        assert not one.log.missing


@in_loop
async def test_what_was_offered_before_the_records_that_are_kept_is_offered_again(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (engine, one, other):
        for each in (one, other):
            each.log._most_records = 2  # type: ignore[misc]
        await one.save(1, tier=Tier.SHM)
        await one.daemon.until(lambda: key(1) in engine.values)
        for number in range(10, 14):
            await one.delete(key(number))
        for each in (one, other):
            await each.settled()
        assert await other.fetch(key(1)) == 0
        for _ in range(2):
            await one.session.claim([key(1)])
        one.daemon.core.post(Tick(one.daemon.core.clock.now_ns(), flush=True))
        await one.daemon.until(lambda: engine.values[key(1)][0].stamp == one.log.last.stamp)  # type: ignore[union-attr]
        assert await other.fetch(key(1)) == 1


@in_loop
async def test_an_engine_that_does_not_give_its_log_costs_no_time(tmp_path: Path) -> None:
    async with node(tmp_path / "a", Engine(), cut_off=True) as one:
        await one.daemon.until(lambda: one.shared._deletes._failures >= deletes._PATIENCE)
        begun_s = monotonic()
        assert await one.fetch(key(1)) == 0
        assert monotonic() - begun_s < PATIENCE_S / 2


@in_loop
async def test_a_device_that_takes_no_mark_holds_up_no_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "_ERASED_WITHIN_S", 0.1)
    answers = threading.Event()
    async with two(tmp_path) as (_, one, other):
        await other.save(1, 2)
        store = other.daemon.core.stores[Tier.SHM]
        monkeypatch.setattr(store, "follow", lambda _mark: answers.wait(PATIENCE_S))
        for number in (1, 2):
            await one.delete(key(number))
            await other.daemon.until(lambda n=number: not other.has(key(n)))
        assert not other.shared._deletes._mark
        answers.set()
        await other.settled()


@in_loop
async def test_deleted_keys_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "MAX_KEYS", 3)
    async with two(tmp_path) as (_, one, other):
        await other.save(1, 2)
        other.daemon.core.committers.erased = _never  # type: ignore[assignment]
        for number in range(10, 16):
            await one.delete(key(number))
        await other.daemon.until(lambda: not any(map(other.has, map(key, (1, 2)))))
        assert len(other.shared._deletes._keys) <= 5


@in_loop
async def test_a_tenant_that_deletes_too_fast_is_refused_and_others_are_not(tmp_path: Path) -> None:
    async with two(tmp_path) as (engine, one, _other):
        one.shared._deletes._pace = LogPace(16)  # one record at once
        membership = one.daemon.front.sessions._open[one.session.ref.session_id]
        here = membership.holder
        membership.holder = Holder("tenant", here.session)  # type: ignore[misc]
        await one.save(3)
        assert await one.delete(key(1), key(2)) == [pb.DELETE_STATUS_ABSENT] * 2
        with pytest.raises(Refused, match="the fleet's log of deletes") as refused:
            await one.delete(key(3))
        assert refused.value.name == "limit_reached"
        assert one.has(key(3)), "what was refused was not begun"
        assert not one.shared.counts()["waiting_withdrawals"]
        membership.holder = here  # type: ignore[misc]
        assert await one.delete(key(3)) == [pb.DELETE_STATUS_DELETED]
        assert len(engine.records) == 2


@in_loop
async def test_deletes_that_the_engine_does_not_log_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "MAX_WAITING", 2)
    async with two(tmp_path) as (_, one, _other):
        one.view.cut_off = True
        for number in (1, 2):
            await one.delete(key(number))
        with pytest.raises(Refused, match="too many deletes"):
            await one.delete(key(3))
