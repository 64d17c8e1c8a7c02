"""Puts a daemon together from its plan: stores, ledgers, state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ..proto.keys import Key
from ..proto.vocabulary import Tier
from ..tiers.arena import Arena
from ..tiers.disk import DiskStore
from ..tiers.eviction import EvictionPolicy, make_policy
from ..tiers.extents import ExtentAllocator
from ..tiers.ledger import Ledger
from ..tiers.ram import RamStore
from ..tiers.shm import ShmStore
from ..tiers.store import Store
from .budgets import Plan, TierPlan
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
        return ShmStore(
            plan.directory, plan.budget_bytes, plan.slab_bytes, verify_payloads=verify_at_start
        )
    return DiskStore(plan.directory, plan.budget_bytes, sync=sync)


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
