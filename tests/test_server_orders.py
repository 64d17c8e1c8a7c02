"""What the stores are told: nothing that fails there reaches whoever gave the order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from prefixd.proto.record import RecordHead
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.committer import CommitResult
from prefixd.server.orders import StoreOrders
from prefixd.tiers.disk import DiskStore
from prefixd.tiers.ram import RamStore
from prefixd.tiers.shm import ShmStore
from prefixd.tiers.store import Store, StoreError, StoreFull, Usage

from .contract.faulty import Fault, FaultyStore
from .daemon import eventually
from .running import PATIENCE_S, SLAB, key

USAGES = (Usage(key(1), 77, 5),)


class Told:
    """Orders for three faulty stores, and what came of their commits."""

    def __init__(self, directory: Path) -> None:
        stores: list[Store] = [
            RamStore(16 * SLAB, SLAB),
            ShmStore(directory / "shm", 16 * SLAB, SLAB),
            DiskStore(directory / "disk", 2**20, sync=False),
        ]
        self.stores = {store.tier: FaultyStore(store) for store in stores}
        self.results: SimpleQueue[CommitResult] = SimpleQueue()
        self.orders = StoreOrders(self.stores, self.results.put)

    def close(self) -> None:
        self.orders.close()
        for store in self.stores.values():
            store.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.close()


def test_a_store_that_blocks_is_told_through_its_committer(told: Told) -> None:
    store = told.stores[Tier.DISK]
    head = RecordHead(key(1), 1, 4, 16, 0, SaveReason.COLD, Tier.DISK, 1)
    writer = store.writer(head, ())
    writer.write(b"1234")
    writer.seal()
    told.orders.commit(Tier.DISK, [(7, writer)])
    assert told.results.get(timeout=PATIENCE_S) == CommitResult((7,), None)
    told.orders.record_usage(Tier.DISK, USAGES)
    told.orders.close()
    (entry,) = store.recover({}).entries
    assert (entry.last_used_ns, entry.hits) == (77, 5)


def test_the_others_are_told_at_once(told: Told) -> None:
    store = told.stores[Tier.SHM].inner
    assert isinstance(store, ShmStore)
    told.orders.record_usage(Tier.SHM, USAGES)
    with store._usage.begin() as txn:
        assert txn.get(key(1)) is not None
    told.orders.erase(Tier.SHM, (key(1),))
    with store._usage.begin() as txn:
        assert txn.get(key(1)) is None
    told.orders.erase(Tier.RAM, (key(1),))
    told.orders.record_usage(Tier.RAM, USAGES)
    assert told.orders.ill() == {}


def test_a_store_that_fails_is_ill_until_it_works_again(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.stores[Tier.SHM].arm(Fault.WRITE_ERROR)
    told.orders.erase(Tier.SHM, (key(1),))
    assert told.orders.ill() == {"shm store": "a failed write, on purpose"}
    told.orders.erase(Tier.SHM, (key(1),))
    assert told.orders.ill() == {}

    def fail(_usages: object) -> None:
        raise StoreError("it broke")

    monkeypatch.setattr(told.stores[Tier.SHM], "record_usage", fail)
    told.orders.record_usage(Tier.SHM, USAGES)
    assert told.orders.ill() == {"shm store": "it broke"}


def test_a_full_dev_shm_is_no_illness(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.stores[Tier.SHM].arm(Fault.FULL)
    told.orders.erase(Tier.SHM, (key(1),))

    def full(_usages: object) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(told.stores[Tier.SHM], "record_usage", full)
    told.orders.record_usage(Tier.SHM, USAGES)
    assert told.orders.ill() == {}


def test_a_committer_that_is_ill_is_shown(told: Told) -> None:
    told.stores[Tier.DISK].arm(Fault.WRITE_ERROR)
    told.orders.erase(Tier.DISK, (key(1),))
    eventually(told.orders.ill)
    assert told.orders.ill() == {"disk commit": "a failed write, on purpose"}
