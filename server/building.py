"""Puts a daemon together from its plan: stores, ledgers, state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import lmdb

from ..proto.index import INDEX_DIRECTORY
from ..proto.keys import Key
from ..proto.vocabulary import Tier
from ..tiers.arena import Arena
from ..tiers.disk import DiskStore
from ..tiers.eviction import EvictionPolicy, make_policy
from ..tiers.extents import ExtentAllocator
from ..tiers.ledger import Ledger
from ..tiers.ram import RamStore
from ..tiers.shm import USAGE_DIRECTORY, ShmStore
from ..tiers.store import Store
from .budgets import Plan, TierPlan
from .index import Index
from .state import MetaState

#: Room for a row of the index; measured 130 B, and LMDB copies pages before it changes them.
_INDEX_ROW_BYTES: Final = 512
_MIN_INDEX_BYTES: Final = 64 * 2**20
_MAX_INDEX_BYTES: Final = 8 * 2**30


def make_store(plan: TierPlan, *, verify_at_start: bool, sync: bool) -> Store:
    """The store of one tier. Raises StoreError if the system can't give it what it needs."""
    if plan.tier is Tier.RAM:
        return RamStore(plan.budget_bytes, plan.slab_bytes)
    assert plan.directory is not None
    if plan.tier is Tier.SHM:
        _lengthen(plan.directory / USAGE_DIRECTORY)
        return ShmStore(
            plan.directory, plan.budget_bytes, plan.slab_bytes, verify_payloads=verify_at_start
        )
    _lengthen(plan.directory)
    return DiskStore(plan.directory, plan.budget_bytes, sync=sync)


def make_index(directory: Path, incarnation: bytes, map_bytes: int) -> Index:
    """The index, see there. Raises IndexFailed if there can't be one."""
    _lengthen(directory / INDEX_DIRECTORY)
    return Index(directory, incarnation, map_bytes)


def _lengthen(directory: Path) -> None:
    """Give the file of an LMDB environment the length that its head says it has.

    It may be shorter, for pages that were never needed. But if it was cut short, a page behind its
    end is a SIGBUS of whoever looks at it, and nobody is told why; a page of zeros is an error.
    What can't be opened is left to whoever opens it.
    """
    data = directory / "data.mdb"
    with suppress(lmdb.Error, OSError):
        with closing(lmdb.open(str(directory), readonly=True, lock=False)) as environment:
            pages, page_bytes = environment.info()["last_pgno"] + 1, environment.stat()["psize"]
        if data.stat().st_size < pages * page_bytes:
            os.truncate(data, pages * page_bytes)


def make_ledger(plan: TierPlan) -> Ledger:
    """The books of one tier. An arena's room grows from nothing as its pages are secured."""
    policy: EvictionPolicy[Key] = make_policy(
        plan.policy, plan.budget_bytes, max_ghosts=plan.max_entries or None
    )
    extents = ExtentAllocator(0, plan.slab_bytes) if plan.slab_bytes else None
    return Ledger(
        plan.tier,
        plan.budget_bytes,
        policy,
        max_entries=plan.max_entries,
        max_reserved_bytes=plan.max_in_flight_bytes,
        extents=extents,
    )


def make_state(plan: Plan, stores: Mapping[Tier, Store], now_ns: int) -> MetaState:
    return MetaState(
        replace(plan.config.sessions.state_config(), curve_keys=plan.config.server.curve_keys),
        {tier: make_ledger(tier_plan) for tier, tier_plan in plan.tiers.items()},
        {tier: store.stored_bytes for tier, store in stores.items()},
        frozenset(tier for tier, store in stores.items() if store.blocking),
        now_ns,
    )


def arena_of(store: Store) -> Arena | None:
    """The arena of a store that has one."""
    return store.arena if isinstance(store, RamStore | ShmStore) else None


def index_map_bytes(plan: Plan) -> int:
    """What the index may grow to: a row for every entry that the tiers could hold."""
    entries = sum(
        tier.max_entries or tier.budget_bytes // (tier.slab_bytes or 4096)
        for tier in plan.tiers.values()
    )
    return min(_MAX_INDEX_BYTES, max(_MIN_INDEX_BYTES, entries * _INDEX_ROW_BYTES))
