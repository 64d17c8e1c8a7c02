"""Assembly of the daemon's parts: each tier gets the planned store and ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server import assembly
from prefixd.server.config.budgets import Plan, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.runtime.index import IndexWriter
from prefixd.tiers.arena_stores import DiskStore, RamStore, ShmStore
from prefixd.tiers.ledger import Admission
from prefixd.tiers.store import StoreError
from tests.support.running import MACHINE

INCARNATION = b"0123456789abcdef"
KINDS = {Tier.RAM: RamStore, Tier.SHM: ShmStore, Tier.DISK: DiskStore}


def plan(directory: Path, *flags: str) -> Plan:
    return resolve(
        load_config(
            [
                "--ram.budget=1MiB",
                "--shm.budget=2MiB",
                "--disk.budget=3MiB",
                f"--shm.directory={directory / 'shm'}",
                f"--disk.directory={directory / 'disk'}",
                *flags,
            ],
            {},
        ),
        MACHINE,
    )


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_every_tier_has_its_store(tmp_path: Path, closing: ExitStack) -> None:
    planned = plan(tmp_path, "--ram.slab=4KiB")
    for tier, tier_plan in planned.tiers.items():
        store = assembly.make_store(tier_plan, verify_at_start=False, sync=False)
        closing.callback(store.close)
        assert type(store) is KINDS[tier]
        assert store.tier is tier
        assert store.slab_bytes == tier_plan.slab_bytes
        # The budget of a tier includes its records.
        rest_bytes = tier_plan.budget_bytes - store.arena.size_bytes
        if isinstance(store, ShmStore | DiskStore):
            rest_bytes -= store.record_bytes(store.arena.size_bytes // store.slab_bytes)
            assert store.directory == tmp_path / tier.label
        assert 0 <= rest_bytes <= store.slab_bytes + 1024


@pytest.mark.parametrize("yes", [True, False])
def test_stores_check_and_sync_as_configured(
    tmp_path: Path, closing: ExitStack, *, yes: bool
) -> None:
    planned = plan(tmp_path)
    made = []
    for tier in (Tier.SHM, Tier.DISK):
        made.append(assembly.make_store(planned.tiers[tier], verify_at_start=yes, sync=yes))
        closing.callback(made[-1].close)
    shm, disk = made
    assert isinstance(shm, ShmStore)
    assert isinstance(disk, DiskStore)
    assert disk._sync is yes
    assert (shm.verify_payloads, disk.verify_payloads) == (yes, False)


def test_missing_resources_are_store_errors(tmp_path: Path) -> None:
    (tmp_path / "shm").write_text("this is no directory")
    (tmp_path / "disk").write_text("nor is this")
    planned = plan(tmp_path)
    for tier in (Tier.SHM, Tier.DISK):
        with pytest.raises(StoreError):
            assembly.make_store(planned.tiers[tier], verify_at_start=True, sync=True)


def test_ledgers_are_as_configured(tmp_path: Path, closing: ExitStack) -> None:
    planned = plan(
        tmp_path, "--shm.policy=fifo", "--shm.max_entries=7", "--disk.max_in_flight=1MiB"
    )
    stores = [
        assembly.make_store(one, verify_at_start=True, sync=True) for one in planned.tiers.values()
    ]
    for store in stores:
        closing.callback(store.close)
    ram, shm, disk = map(assembly.make_ledger, planned.tiers.values(), stores)
    assert [one.tier for one in (ram, shm, disk)] == list(Tier)
    assert (ram.policy.name, shm.policy.name, disk.policy.name) == ("lru", "fifo", "lru")
    assert (ram.max_entries, shm.max_entries, disk.max_entries) == (0, 7, 1_000_000)
    assert (ram.budget_bytes, shm.budget_bytes, disk.budget_bytes) == (2**20, 2**21, 3 * 2**20)
    # No memory is available before it is secured, and the header of an arena never is.
    assert (ram.limit_bytes, shm.limit_bytes, disk.limit_bytes) == (0, 0, 0)
    # An entry larger than the arena never fits, even if the budget is larger.
    for ledger, store in zip((ram, shm, disk), stores, strict=True):
        assert ledger.admission(store.size_bytes - store.header_bytes) is Admission.NO_ROOM
        assert ledger.admission(store.size_bytes - store.header_bytes + 1) is Admission.TOO_LARGE
    ram.grow(2**20)
    assert ram.limit_bytes == 2**20 - stores[0].header_bytes
    assert disk.max_reserved_bytes == 2**20
    assert ram.max_reserved_bytes == shm.max_reserved_bytes == 0


def test_the_state_has_all_tiers(tmp_path: Path, closing: ExitStack) -> None:
    planned = plan(tmp_path, "--shm.budget=0", "--server.curve_keys=5", "--sessions.max_sessions=3")
    stores = {}
    for tier, tier_plan in planned.tiers.items():
        stores[tier] = assembly.make_store(tier_plan, verify_at_start=True, sync=False)
        closing.callback(stores[tier].close)
    state = assembly.make_state(planned, stores, now_ns=77)
    tables = state.tables
    assert set(tables.ledgers) == set(tables.curves) == {Tier.RAM, Tier.DISK}
    assert tables.stamp_ns == 77
    assert tables.config.max_sessions == 3
    assert tables.config.curve_keys == 5
    assert state.check() == []
    without = assembly.make_state(
        plan(tmp_path, "--shm.budget=0", "--server.curve_keys=0"), stores, 1
    )
    assert without.tables.curves == {}


@pytest.mark.parametrize(
    ("flags", "entries"),
    [
        ((), 16 + 32 + 48),  # slabs of all tiers
        (("--disk.max_entries=7",), 16 + 32 + 7),
        (("--disk.max_entries=0", "--disk.slab=4KiB"), 16 + 32 + 768),
    ],
    ids=["slabs", "fewer than slabs", "small slabs"],
)
def test_the_index_has_room_for_every_entry(
    tmp_path: Path, closing: ExitStack, flags: tuple[str, ...], entries: int
) -> None:
    planned = plan(tmp_path, *flags)
    stores = {
        tier: assembly.make_store(each, verify_at_start=False, sync=False)
        for tier, each in planned.tiers.items()
    }
    for store in stores.values():
        closing.callback(store.close)
    assert assembly.max_entries(planned, stores) == entries
    index = IndexWriter(INCARNATION, assembly.max_entries(planned, stores))
    assert index.layout.max_rows >= entries
    index.close()
