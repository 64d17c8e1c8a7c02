"""No deleted entry comes back from a bucket behind the engine, whatever either of them loses.

Objects outlive the log of deletes, the nodes, and what the engine knows. Each test first deletes an
entry in some trouble, and then asks every node that is left, old and new."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import Tier
from prefixd.server.core.events import Tick
from prefixd.server.sharing import deletes
from prefixd.server.sharing.behind import Behind
from prefixd.server.sharing.delete_log import NO_STAMP, FleetDelete, Logged
from prefixd.server.sharing.engine_store import Offer, SharedEntry
from prefixd.server.sharing.object_store import ObjectStore
from prefixd.server.sharing.sharing import Sharing
from tests.server.sharing.test_behind import Far, soon
from tests.server.sharing.test_deletes import CONFIG, TENANT, Engine, Node, View
from tests.support.event_loop import in_loop
from tests.support.running import answer, key, payload, running
from tests.support.stores import LogInMemory

DELETED, ERASING = pb.DELETE_STATUS_DELETED, pb.DELETE_STATUS_ERASING


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AGAIN_S", "_PUT_BACK_WITHIN_S"):
        monkeypatch.setattr(deletes, name, 0.01)
    monkeypatch.setattr(deletes, "_DROPPED_AGAIN_S", 0.01)
    monkeypatch.setattr(LogInMemory, "log_every_s", 0.01)


@dataclass
class NodeBefore(Node):
    """A node before a bucket."""

    store: Behind
    far: Far

    @property
    def stamped(self) -> bool:
        """Whether it vouches for what it offers."""
        return self.shared._deletes.stamp != NO_STAMP


class NumberedView(View):
    """An engine that gives no place of its log twice, also if it lost it: Redis names them by the
    time."""

    def __init__(self, engine: Engine, places: Iterator[int]) -> None:
        super().__init__(engine)
        self._places = places

    def log(self, records: Sequence[bytes], _deadline_s: float) -> int:
        if self.cut_off:
            return 0
        self.records += [Logged(b"%d" % next(self._places), record) for record in records]
        return len(records)


class Fleet:
    """An engine, and a bucket behind it. Both outlive the nodes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = Engine()
        self.places = itertools.count()
        self.memory = MemoryStore()
        self.bucket = ObjectStore("", "test", self.memory)

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[NodeBefore]:
        view, far = NumberedView(self.engine, self.places), Far(self.memory)
        store = Behind(view, far)
        (self.path / name).mkdir(exist_ok=True)
        async with running(self.path / name) as daemon:
            shared = await Sharing.begin(daemon.core, store, CONFIG)
            session = await daemon.open()
            made = NodeBefore(daemon, session, view, shared, store, far)
            await daemon.until(lambda: made.stamped)
            try:
                yield made
            finally:
                await session.close()
                await shared.close()

    def has(self, number: int) -> bool:
        """Whether the bucket has an object of this key."""
        return self.bucket.find([key(number)], soon()) != [None]

    def forget(self) -> None:
        """The engine and all nodes lose every entry that they share. The log stays."""
        self.engine.values.clear()

    def empty(self) -> None:
        """The engine restarts without anything."""
        self.engine.values, self.engine.records, self.engine.trimmed = {}, [], False


async def save(fleet: Fleet, node: NodeBefore, *numbers: int, tier: Tier = Tier.RAM) -> None:
    """Save entries, so that only the bucket and this node have them."""
    await node.save(*numbers, tier=tier)
    await node.daemon.until(lambda: all(map(fleet.has, numbers)))
    fleet.forget()


@in_loop
async def test_what_nobody_else_has_comes_from_the_bucket(tmp_path: Path) -> None:
    """What all other tests must not see is there when nothing was deleted."""
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one:
        await save(fleet, one, 1, 2, 3)
    async with fleet.node("b") as other:
        assert await other.fetch(key(1), key(2), key(3)) == 3
        assert await other.session.restore(key(2)) == payload(2)
        counts = other.shared.counts()
        assert (counts["bucket_fetched"], counts["bucket_offered"]) == (3, 0)
        assert counts["unvouched"] == 0
        await other.daemon.assert_sound()


@in_loop
async def test_a_log_is_begun_once_by_nodes_before_a_bucket(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        for each in (one, other):
            await each.settled()
        assert len(fleet.engine.records) == 1
        record = FleetDelete.decode(fleet.engine.records[0].record)
        assert record is not None
        assert not record.keys
        assert not record.namespace
        assert other.shared.counts()["deletes_learned"] == 0


@in_loop
async def test_a_delete_reaches_the_bucket(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await save(fleet, one, 1)
        assert await other.fetch(key(1)) == 1
        assert await other.delete(key(1)) == [DELETED]
        assert not fleet.has(1)
        await one.settled()
        assert await one.fetch(key(1)) == 0
        # What is saved again is shared again, on any node.
        await one.save(1, version=1)
        await one.daemon.until(lambda: fleet.has(1))
        fleet.forget()
        await other.settled()
        assert await other.fetch(key(1)) == 1
        assert await other.session.restore(key(1)) == payload(101)


async def deleted_out_of_reach(fleet: Fleet, one: NodeBefore, *others: NodeBefore) -> None:
    """Save on one node, and delete there while the bucket can't be reached."""
    await save(fleet, one, 1)
    one.far.cut_off = True
    assert await one.delete(key(1)) == [ERASING], "the bucket still has it"
    assert fleet.has(1)
    for each in (one, *others):
        await each.daemon.until(lambda: len(fleet.engine.records) == 2)
        await each.settled()


@in_loop
async def test_a_delete_while_the_bucket_is_out_of_reach(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await deleted_out_of_reach(fleet, one, other)
        assert await other.fetch(key(1)) == 0
        assert await one.fetch(key(1)) == 0
        assert one.shared.counts()["waiting_withdrawals"] == 1
        one.far.cut_off = False
        await one.daemon.until(lambda: not fleet.has(1))
        await one.daemon.until(lambda: not one.shared.counts()["waiting_withdrawals"])


@in_loop
async def test_a_node_that_is_killed_before_the_bucket_knows_of_its_delete(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("b") as other:
        async with fleet.node("a") as one:
            await deleted_out_of_reach(fleet, one)
        assert fleet.has(1), "nobody drops it any more"
        await other.settled()
        assert await other.fetch(key(1)) == 0
        async with fleet.node("a") as again, fleet.node("c") as third:
            assert await again.fetch(key(1)) == 0
            assert await third.fetch(key(1)) == 0


@in_loop
async def test_an_engine_that_lost_its_log_and_every_node_that_knew_it(tmp_path: Path) -> None:
    """Nothing remembers the delete. No object is believed any more."""
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one:
        await save(fleet, one, 2)
        await deleted_out_of_reach(fleet, one)
    fleet.empty()
    async with fleet.node("b") as other:
        assert fleet.has(1)
        assert await other.fetch(key(1)) == 0
        assert await other.fetch(key(2)) == 0
        # Entries of the new log are.
        await other.save(3)
        await other.daemon.until(lambda: fleet.has(3))
    fleet.forget()
    async with fleet.node("c") as third:
        assert await third.fetch(key(1)) == 0
        assert await third.fetch(key(3)) == 1


@in_loop
async def test_an_engine_that_is_emptied_before_the_first_delete(tmp_path: Path) -> None:
    """As long as no delete was logged, nodes of other engines vouch without a stamp. Such a one
    would hold for the next log, too."""
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one:
        await save(fleet, one, 1)
        stale = fleet.bucket.find([key(1)], soon())
        assert stale[0] is not None
        assert stale[0].stamp != NO_STAMP
    fleet.empty()
    async with fleet.node("b") as other:
        assert await other.delete(key(1)) == [pb.DELETE_STATUS_ABSENT]
        assert not fleet.has(1)
        # A write that was under way all this time.
        put(fleet, stale[0])
        unstamped = SharedEntry(key(2), Content(len(payload(2)), 16), crc32c(payload(2)), NO_STAMP)
        put(fleet, unstamped, payload(2))
        for each in (1, 2):
            assert await other.fetch(key(each)) == 0
    fleet.empty()
    async with fleet.node("c") as third:
        for each in (1, 2):
            assert fleet.has(each)
            assert await third.fetch(key(each)) == 0


def put(fleet: Fleet, entry: SharedEntry, data: bytes = payload(1)) -> None:
    fleet.bucket.put([Offer(entry, [memoryview(data)], 2**50)], soon())


@in_loop
async def test_nodes_that_know_the_log_put_it_back_and_write_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await save(fleet, one, 2, tier=Tier.SHM)
        await deleted_out_of_reach(fleet, one, other)
        before = {record.record for record in fleet.engine.records}
        fleet.empty()
        for each in (one, other):
            await each.daemon.until(
                lambda: before <= {record.record for record in fleet.engine.records}
            )
            await each.settled()
        assert await other.fetch(key(1)) == 0
        assert await other.fetch(key(2)) == 0, "its stamp is of the lost log"
        one.far.cut_off = False
        stale = fleet.bucket.find([key(2)], soon())
        for _ in range(2):
            await one.session.claim([key(2)])
        one.daemon.core.post(Tick(one.daemon.core.clock.now_ns(), flush=True))
        # The engine has it first.
        await one.daemon.until(lambda: fleet.bucket.find([key(2)], soon()) != stale)
        fleet.forget()
        assert await other.fetch(key(2)) == 1, "its node vouched for it anew"
        assert await other.fetch(key(1)) == 0


@in_loop
async def test_a_log_that_has_forgotten_the_delete(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await deleted_out_of_reach(fleet, one, other)
        for node in (one, other):
            node.log._most_records = 2  # type: ignore[misc]
        for number in range(10, 14):
            await one.delete(key(number))
        for node in (one, other):
            await node.settled()
            assert key(1) not in node.log._deleted, "or this tests nothing"
        assert fleet.has(1)
        assert await other.fetch(key(1)) == 0
    fleet.engine.records, fleet.engine.trimmed = fleet.engine.records[-2:], True
    async with fleet.node("c") as third:
        assert await third.fetch(key(1)) == 0


@in_loop
async def test_a_write_that_ends_after_the_delete(tmp_path: Path) -> None:
    """By a node that had not done it, whenever that is."""
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await save(fleet, one, 1)
        (late,) = fleet.bucket.find([key(1)], soon())
        assert late is not None
        assert await one.delete(key(1)) == [DELETED]
        put(fleet, late)
        await other.settled()
        for each in (one, other):
            assert await each.fetch(key(1)) == 0


@in_loop
async def test_a_node_that_can_not_read_the_log_does_not_read_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await save(fleet, one, 1)
        other.view.cut_off = True
        one.far.cut_off = True
        assert await one.delete(key(1)) == [ERASING]
        await one.settled()
        monkeypatch.setattr("prefixd.server.sharing.behind.LOG_READ_WITHIN_S", 0.0)
        assert await other.fetch(key(1)) == 0
        monkeypatch.undo()
        other.view.cut_off = False
        await other.settled()
        assert await other.fetch(key(1)) == 0


@in_loop
async def test_a_namespace_is_cleared_in_the_bucket_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        (mine,) = TENANT.stored([key(1)])
        await one.session.save({mine: payload(1)}, Tier.RAM)
        await one.daemon.until(lambda: fleet.bucket.find([mine], soon()) != [None])
        fleet.forget()
        one.far.drops = other.far.drops = False
        await answer(one.daemon.admin.Clear(pb.ClearRequest(namespace="tenant")))
        for each in (one, other):
            await each.settled()
        assert fleet.bucket.find([mine], soon()) != [None]
        for each in (one, other):
            assert await each.fetch(mine) == 0


@in_loop
async def test_entries_of_a_cleared_label_leave_the_bucket_when_it_can_be_reached(
    tmp_path: Path,
) -> None:
    """Nothing in their keys says to whom they belong."""
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one:
        labelled = await one.daemon.open(label="web/chat")
        await labelled.save({key(1): payload(1)}, Tier.RAM)
        await one.daemon.until(lambda: fleet.has(1))
        fleet.forget()
        one.far.cut_off = True
        await answer(one.daemon.admin.Clear(pb.ClearRequest(namespace="web/chat")))
        await one.settled()
        assert await one.fetch(key(1)) == 0
        one.far.cut_off = False
        await one.daemon.until(lambda: not fleet.has(1))
        await labelled.close()


@in_loop
async def test_what_a_later_save_did_not_replace_in_the_bucket(tmp_path: Path) -> None:
    """The engine has the later one, and the bucket still what was deleted."""
    fleet = Fleet(tmp_path)
    async with fleet.node("a") as one, fleet.node("b") as other:
        await save(fleet, one, 1)
        one.far.drops = False
        assert await one.delete(key(1)) == [ERASING]
        await one.settled()
        one.far.cut_off = True
        one.shared._withdrawals.release([key(1)])  # or it is dropped again, and saved again
        await one.save(1, version=1)
        await one.daemon.until(lambda: key(1) in fleet.engine.values)
        await other.settled()
        assert fleet.has(1)
        assert await other.fetch(key(1)) == 1
        assert await other.session.restore(key(1)) == payload(101)
    fleet.forget()
    async with fleet.node("c") as third:
        assert await third.fetch(key(1)) == 0
