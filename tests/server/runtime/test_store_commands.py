"""What the stores are told: nothing that fails there reaches whoever gave the order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from prefixd.proto.entry import EntryRecord
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime.committer import CommitResult
from prefixd.server.runtime.store_commands import StoreOrders
from prefixd.tiers.arena_stores import DiskStore, RamStore, ShmStore
from prefixd.tiers.store import Store, Usage
from tests.contract.faulty import Fault, FaultyStore
from tests.support.daemon import eventually
from tests.support.running import PATIENCE_S, SLAB, key
from tests.support.stores import held, make_ready, record_of, sealed

RECORDED = pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)


class Told:
    """Orders for three faulty stores, and what came of their commits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stores = {store.tier: FaultyStore(store) for store in self._open()}
        for store in self.stores.values():
            make_ready(store)
        self.results: SimpleQueue[CommitResult] = SimpleQueue()
        self.orders = StoreOrders(self.stores, self.results.put)

    def _open(self) -> list[Store]:
        return [
            RamStore(16 * SLAB, SLAB),
            ShmStore(self.directory / "shm", 2**20, SLAB),
            DiskStore(self.directory / "disk", 2**20, SLAB, sync=False),
        ]

    def saved(self, tier: Tier) -> EntryRecord:
        store = self.stores[tier]
        writer = sealed(store, record_of(store, key(1), 4, 1, (SLAB, SLAB)), b"1234")
        self.orders.commit(tier, [(7, writer)])
        assert self.results.get(timeout=PATIENCE_S) == CommitResult((7,), None)
        return writer.entry

    def reopened(self) -> dict[Tier, Store]:
        """What another start of the daemon opens."""
        self.close()
        self.stores = {store.tier: FaultyStore(store) for store in self._open()}
        return dict(self.stores)

    def close(self) -> None:
        for close in self.orders.closings():
            close()
        for store in self.stores.values():
            store.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.close()


@RECORDED
def test_saves_and_their_use_are_written(told: Told, tier: Tier) -> None:
    entry = told.saved(tier)
    told.orders.record_usage(tier, (Usage(entry, 77, 5),))
    ((found,),) = [batch.entries for batch in told.reopened()[tier].recover()]
    assert (found.record, found.last_used_ns, found.hits) == (entry, 77, 5)


@RECORDED
def test_what_is_forgotten_is_erased_soon(told: Told, tier: Tier) -> None:
    entry = told.saved(tier)
    assert held(told.stores[tier]) == {key(1): 1}
    told.orders.forget(tier, [entry])
    eventually(lambda: told.stores[tier].unerased == 0)
    assert held(told.stores[tier]) == {}


def test_a_tier_without_records_has_nothing_to_write(told: Told) -> None:
    store = told.stores[Tier.RAM]
    entry = record_of(store, key(1), 4, 1, (0, SLAB))
    told.orders.forget(Tier.RAM, [entry])
    told.orders.record_usage(Tier.RAM, (Usage(entry, 77, 5),))
    for close in told.orders.closings():
        close()
    assert store.happened == []
    assert told.orders.unhealthy() == {}


@RECORDED
def test_a_store_that_fails_is_unhealthy_by_its_name(told: Told, tier: Tier) -> None:
    entry = told.saved(tier)
    told.stores[tier].arm(Fault.USAGE_ERROR)
    told.orders.record_usage(tier, (Usage(entry, 77, 5),))
    eventually(told.orders.notices)
    assert told.orders.notices() == {f"{tier.label} usage": "use that is not recorded, on purpose"}
    assert told.orders.unhealthy() == {}, "they are hints"
    told.orders.record_usage(tier, (Usage(entry, 77, 5),))
    eventually(lambda: not told.orders.notices())


def test_a_shm_tier_whose_files_were_deleted_is_unhealthy(told: Told) -> None:
    """What is written there is lost, however well it is written."""
    entry = told.saved(Tier.SHM)
    for file in (told.directory / "shm").iterdir():
        file.unlink()
    told.orders.forget(Tier.SHM, [entry])
    eventually(told.orders.unhealthy)
    assert "was deleted while it was in use" in told.orders.unhealthy()["shm commit"]
