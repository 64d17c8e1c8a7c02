"""From a plan to its parts: each tier gets the store and the books that it was planned with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prefixd.proto.index import INDEX_DIRECTORY
from prefixd.proto.vocabulary import Tier
from prefixd.server import building
from prefixd.server.budgets import Plan, resolve
from prefixd.server.config import load_config
from prefixd.server.index import Index, IndexFailed
from prefixd.tiers.disk import DiskStore
from prefixd.tiers.ram import RamStore
from prefixd.tiers.shm import ShmStore
from prefixd.tiers.store import StoreError

from .running import MACHINE, key

INCARNATION = b"0123456789abcdef"
MAP_BYTES = 2**20
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
        store = building.make_store(tier_plan, verify_at_start=False, sync=False)
        closing.callback(store.close)
        assert type(store) is KINDS[tier]
        assert store.tier is tier
        arena = building.arena_of(store)
        assert (arena is None) == (tier is Tier.DISK)
        if arena is not None:
            assert arena.size_bytes == tier_plan.budget_bytes
        if isinstance(store, ShmStore | DiskStore):
            assert store.directory == tmp_path / tier.label


@pytest.mark.parametrize("yes", [True, False])
def test_stores_check_and_sync_as_they_are_told(
    tmp_path: Path, closing: ExitStack, *, yes: bool
) -> None:
    planned = plan(tmp_path)
    made = []
    for tier in (Tier.SHM, Tier.DISK):
        made.append(building.make_store(planned.tiers[tier], verify_at_start=yes, sync=yes))
        closing.callback(made[-1].close)
    shm, disk = made
    assert isinstance(shm, ShmStore)
    assert shm.verify_payloads is yes
    assert isinstance(disk, DiskStore)
    flags = disk._env.flags()
    assert (flags["sync"], flags["metasync"]) == (yes, yes)


def test_what_the_system_does_not_give_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "shm").write_text("this is no directory")
    (tmp_path / "disk").write_text("nor is this")
    planned = plan(tmp_path)
    for tier in (Tier.SHM, Tier.DISK):
        with pytest.raises(StoreError):
            building.make_store(planned.tiers[tier], verify_at_start=True, sync=True)


def test_books_are_as_configured(tmp_path: Path) -> None:
    planned = plan(
        tmp_path, "--shm.policy=fifo", "--shm.max_entries=7", "--disk.max_in_flight=1MiB"
    )
    ram, shm, disk = (building.make_ledger(one) for one in planned.tiers.values())
    assert [one.tier for one in (ram, shm, disk)] == list(Tier)
    assert (ram.policy.name, shm.policy.name, disk.policy.name) == ("lru", "fifo", "lru")
    assert (ram.max_entries, shm.max_entries, disk.max_entries) == (0, 7, 1_000_000)
    assert (ram.budget_bytes, shm.budget_bytes, disk.budget_bytes) == (2**20, 2**21, 3 * 2**20)
    # An arena has no room before its pages are secured; the disk has all of it.
    assert (ram.limit_bytes, shm.limit_bytes, disk.limit_bytes) == (0, 0, 3 * 2**20)
    assert disk.max_reserved_bytes == 2**20
    assert ram.max_reserved_bytes == shm.max_reserved_bytes == 0


def test_the_state_has_the_tiers_that_there_are(tmp_path: Path, closing: ExitStack) -> None:
    planned = plan(tmp_path, "--shm.budget=0", "--server.curve_keys=5", "--sessions.max_sessions=3")
    stores = {}
    for tier, tier_plan in planned.tiers.items():
        stores[tier] = building.make_store(tier_plan, verify_at_start=True, sync=False)
        closing.callback(stores[tier].close)
    state = building.make_state(planned, stores, now_ns=77)
    tables = state.tables
    assert set(tables.ledgers) == set(tables.curves) == {Tier.RAM, Tier.DISK}
    assert tables.stamp_ns == 77
    assert tables.config.max_sessions == 3
    assert tables.config.curve_keys == 5
    assert state.check() == []
    without = building.make_state(plan(tmp_path, "--server.curve_keys=0"), stores, 1)
    assert without.tables.curves == {}


@pytest.mark.parametrize(
    ("flags", "map_bytes"),
    [
        ((), 512 * 1_000_048),  # entries of the disk tier, and slabs of the arenas
        (("--disk.max_entries=100",), 64 * 2**20),
        (("--disk.max_entries=0", "--disk.budget=64GiB"), 8 * 2**30),
    ],
    ids=["all tiers", "at least", "at most"],
)
def test_the_index_has_room_for_every_entry(
    tmp_path: Path, flags: tuple[str, ...], map_bytes: int
) -> None:
    assert building.index_map_bytes(plan(tmp_path, *flags)) == map_bytes


# ---- the index


def test_an_index_is_kept_as_it_was(tmp_path: Path) -> None:
    rows = write_index(tmp_path)
    assert read_index(tmp_path) == rows


def test_an_index_with_a_bad_page_is_made_anew_or_does_not_need_it(tmp_path: Path) -> None:
    """Wherever it is: at the root, where opening it finds it, or at a leaf."""
    rows = write_index(tmp_path)
    data = tmp_path / INDEX_DIRECTORY / "data.mdb"
    good = data.read_bytes()
    found = []
    for place in range(2 * 4096, len(good), 4096):
        data.write_bytes(good[:place] + b"\xa5" * 4096 + good[place + 4096 :])
        with capture_logs() as logs:
            found.append(read_index(tmp_path))
        said = [(line["event"], line["path"]) for line in logs]
        assert said == ([] if found[-1] else [("index_replaced", str(data.parent))])
    assert all(one in ({}, rows) for one in found)
    assert found.count({}) > 10
    assert rows in found, "pages that nothing refers to"


def test_an_index_for_which_there_is_no_room_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_index(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(IndexFailed, match="No space left"):
            read_index(tmp_path)
    assert read_index(tmp_path) == rows


def write_index(directory: Path) -> dict[bytes, bytes]:
    """What a daemon of before left."""
    rows = {bytes(key(number)): bytes(60) for number in range(1000)}
    index = Index(directory, INCARNATION, MAP_BYTES)
    for some in range(0, 1000, 100):
        with index._env.begin(write=True) as txn:
            for number in range(some, some + 100):
                txn.put(key(number), rows[key(number)])
    index.close()
    return rows


def read_index(directory: Path) -> dict[bytes, bytes]:
    """What a daemon finds, whose index it can then change."""
    index = building.make_index(directory, INCARNATION, MAP_BYTES)
    try:
        rows: dict[bytes, bytes] = dict(index.rows())
        index._put(key(1), bytes(60))
        return rows
    finally:
        index.close()
