"""Puts a daemon together from its plan: stores, ledgers, state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..proto.errors import ConfigError
from ..proto.keys import Key
from ..proto.vocabulary import Tier
from ..tiers.disk import DiskStore
from ..tiers.eviction import EvictionPolicy, make_policy
from ..tiers.extents import ExtentAllocator
from ..tiers.ledger import Ledger
from ..tiers.ram import RamStore
from ..tiers.shm import ShmStore
from ..tiers.store import Store
from .config.budgets import Plan, TierPlan
from .config.options import Shared
from .core.state import MetaState
from .runtime.index import IndexWriter
from .runtime.loop import Core
from .sharing.common import SharingConfig, WritePolicy
from .sharing.sharing import Sharing


def make_store(plan: TierPlan, *, verify_at_start: bool, sync: bool) -> Store:
    """The store of one tier. Raises StoreError if the system can't give it what it needs."""
    if plan.tier is Tier.RAM:
        return RamStore(plan.budget_bytes, plan.slab_bytes, max_budget_bytes=plan.max_budget_bytes)
    assert plan.directory is not None
    if plan.tier is Tier.SHM:
        return ShmStore(
            plan.directory,
            plan.budget_bytes,
            plan.slab_bytes,
            verify_payloads=verify_at_start,
            max_budget_bytes=plan.max_budget_bytes,
        )
    return DiskStore(
        plan.directory,
        plan.budget_bytes,
        plan.slab_bytes,
        sync=sync,
        max_budget_bytes=plan.max_budget_bytes,
    )


def make_index(plan: Plan, incarnation: bytes) -> IndexWriter:
    """An index with room for every entry that the tiers could hold. Raises StoreError."""
    return IndexWriter(incarnation, max_entries(plan))


def max_entries(plan: Plan) -> int:
    """Entries that the tiers could hold together, as large as they may become."""
    return sum(
        min(tier.max_entries or tier.max_budget_bytes, tier.max_budget_bytes // tier.slab_bytes)
        for tier in plan.tiers.values()
    )


def make_ledger(plan: TierPlan, store: Store) -> Ledger:
    """The accounting of one tier. Its room grows from nothing as the arena is secured."""
    policy: EvictionPolicy[Key] = make_policy(
        plan.policy, plan.budget_bytes, max_ghosts=plan.max_entries or None
    )
    return Ledger(
        plan.tier,
        plan.budget_bytes,
        policy,
        max_entries=plan.max_entries,
        max_reserved_bytes=plan.max_in_flight_bytes,
        extents=ExtentAllocator(0, plan.slab_bytes, store.header_bytes),
        arena_bytes=store.size_bytes,
    )


def make_state(plan: Plan, stores: Mapping[Tier, Store], now_ns: int) -> MetaState:
    return MetaState(
        replace(
            plan.config.sessions.state_config(),
            curve_keys=plan.config.server.curve_keys,
            ram_use=bool(plan.config.shared.engine),
            journal_bytes=plan.config.server.journal_bytes,
        ),
        {t: make_ledger(tier, stores[t]) for t, tier in plan.tiers.items()},
        {tier: store.stored_bytes for tier, store in stores.items()},
        frozenset(tier for tier, store in stores.items() if store.recorded),
        now_ns,
    )


async def begin_sharing(config: Shared, core: Core) -> Sharing:
    """What this node shares with others. Raises ConfigError for an engine that it can't have."""
    try:
        from .sharing.redis_store import RedisStore
    except ImportError as problem:
        raise ConfigError(
            f"shared.engine needs more than is installed: pip install 'prefixd[shared]' ({problem})"
        ) from None
    password = None
    if config.password_file:
        try:
            password = Path(config.password_file).read_text().strip()
        except OSError as problem:
            raise ConfigError(f"shared.password_file can't be read: {problem}") from None
    tier = Tier[config.tier.upper()]
    if tier not in core.stores:
        raise ConfigError(f"shared.tier is {config.tier}, which has no budget")
    try:
        store = RedisStore(config.engine.split(","), config.fleet, password=password)
    except ValueError as problem:
        raise ConfigError(f"shared.engine: {problem}") from None
    return await Sharing.begin(
        core,
        store,
        SharingConfig(
            tier=tier,
            write=WritePolicy(config.write),
            life_ms=config.life_ns // 1_000_000,
            memory_bytes=config.memory_bytes,
        ),
    )
