"""Builds the parts of a daemon from its plan: stores, ledgers, state, sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..proto.errors import ConfigError
from ..proto.keys import Key
from ..proto.vocabulary import Tier
from ..tiers.arena_stores import DiskStore, RamStore, ShmStore
from ..tiers.eviction import EvictionPolicy, make_policy
from ..tiers.extents import ExtentAllocator
from ..tiers.file_calls import CallsApart
from ..tiers.files import HERE
from ..tiers.ledger import Ledger
from ..tiers.store import Store
from ..tiers.tier_shares import NamespaceShare
from .config.budgets import Plan, TierPlan
from .config.machine import make_source
from .config.options import Config
from .core.state import MetaState
from .runtime.clock import Clock
from .runtime.index import IndexWriter
from .runtime.listeners import Tracing
from .runtime.loop import Core
from .runtime.pressure import Pressure, Watermarks
from .runtime.process_memory import give_back_free_heap
from .runtime.staging import StagingPool
from .sharing.engine_link import SharingConfig, WritePolicy
from .sharing.engine_store import SharedStore
from .sharing.sharing import Sharing

if TYPE_CHECKING:
    from .sharing.object_store import ObjectStore

#: Under memory pressure, a client that has not saved for this time loses its staging memory.
_STAGING_IDLE_NS: Final = 10**9


def make_store(plan: TierPlan, *, verify_at_start: bool, sync: bool, later: bool = False) -> Store:
    """The store of one tier. `later`: that of the disk is not open yet, and another process makes
    its calls that may hang. Raises StoreError if the system can't provide what it needs."""
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
        later=later,
        calls=CallsApart() if later else HERE,
    )


def max_entries(plan: Plan, stores: Mapping[Tier, Store]) -> int:
    """The number of entries that all tiers can hold at their largest budgets, or as they were
    found."""
    most = 0
    for tier, given in plan.tiers.items():
        slabs = max(given.max_budget_bytes, stores[tier].found_budget_bytes) // given.slab_bytes
        most += min(given.max_entries or slabs, slabs)
    return most


def make_ledger(plan: TierPlan, store: Store) -> Ledger:
    """The accounting of one tier. It starts without room, and grows as the arena is secured. Where
    an earlier start left more than fits, the tier is as large until it has recovered."""
    budget_bytes = max(plan.budget_bytes, store.found_budget_bytes)
    return Ledger(
        plan.tier,
        budget_bytes,
        _policy(plan, budget_bytes - sum(plan.shares.values())),
        max_entries=plan.max_entries,
        max_reserved_bytes=plan.max_in_flight_bytes,
        extents=ExtentAllocator(0, plan.slab_bytes, store.header_bytes),
        arena_bytes=store.size_bytes,
        shares=[
            NamespaceShare(name, share_bytes, _policy(plan, share_bytes))
            for name, share_bytes in plan.shares.items()
        ],
    )


def _policy(plan: TierPlan, capacity_bytes: int) -> EvictionPolicy[Key]:
    return make_policy(plan.policy, capacity_bytes, max_ghosts=plan.max_entries or None)


#: For how long after a restart a key that was never heard of may be one that an earlier start had.
_UNSURE_NS: Final = 15 * 60 * 10**9


def make_state(plan: Plan, stores: Mapping[Tier, Store], now_ns: int) -> MetaState:
    """The state of a start at `now_ns`. Its stamps are above all that the stores have recorded, as
    far as they are open: the clock may have been set back since."""
    return MetaState(
        replace(
            plan.config.sessions.state_config(),
            curve_keys=plan.config.server.curve_keys,
            ram_use=bool(plan.config.shared.engine),
            journal_bytes=plan.config.server.journal_bytes,
            unsure_ns=_UNSURE_NS if plan.restarted else 0,
        ),
        {t: make_ledger(tier, stores[t]) for t, tier in plan.tiers.items()},
        {tier: store.stored_bytes for tier, store in stores.items()},
        frozenset(tier for tier, store in stores.items() if store.recorded),
        now_ns,
        max((store.newest for store in stores.values()), default=0),
    )


def make_core(
    plan: Plan,
    stores: Mapping[Tier, Store],
    index: IndexWriter,
    executor: Executor,
    clock: Clock,
    tracing: Tracing | None = None,
) -> Core:
    state = make_state(plan, stores, clock.now_ns())
    if tracing is None:
        return Core(state, stores, index, executor, clock)
    from .tracing import TracedCore  # imports OpenTelemetry

    core = TracedCore(state, stores, index, executor, clock)
    core.trace(tracing)
    return core


@contextmanager
def tracing_of(config: Config) -> Iterator[Tracing | None]:
    """The tracing that is configured, if any; flushed on exit. Raises ConfigError."""
    if config.server.tracing == "none":
        yield None
        return
    from . import tracing  # imports OpenTelemetry

    provider = tracing.make_provider()
    try:
        yield tracing.OtelTracing(provider)
    finally:
        tracing.shut_down(provider)


def make_pressure(config: Config, core: Core, stagings: StagingPool) -> Pressure | None:
    """The watch on memory pressure, if a source is configured. Raises ConfigError."""
    options = config.pressure
    source = make_source(options.source)
    if source is None:
        return None
    return Pressure(
        core,
        source,
        Watermarks(options.high_watermark, options.low_watermark, options.max_stalled),
        [Tier[name.upper()] for name in options.tiers.split(",") if name],
        relieve=(
            partial(stagings.give_back_idle, _STAGING_IDLE_NS),
            lambda: core.executor.submit(give_back_free_heap),
        ),
    )


async def begin_sharing(config: Config, core: Core) -> Sharing:
    """Start sharing entries with other nodes. Raises ConfigError for an unusable engine."""
    shared = config.shared
    tier = Tier[shared.tier.upper()]
    if tier not in core.stores:
        raise ConfigError(f"shared.tier: the tier {shared.tier} has no budget")
    store = _shared_store(config)
    return await Sharing.begin(
        core,
        store,
        SharingConfig(
            tier=tier,
            write=WritePolicy(shared.write),
            life_ms=shared.life_ns // 1_000_000,
            memory_bytes=shared.memory_bytes,
        ),
    )


def check_sharing(config: Config) -> None:
    """Check what a start would need of the configured engine, without connecting to it. Raises
    ConfigError."""
    shared = config.shared
    if shared.engine:
        with _explained("shared.engine", shared.engine):
            make = _maker(config)
            if shared.engine.startswith("s3:"):
                make().close()
    if shared.capacity:
        with _explained("shared.capacity", shared.capacity):
            _bucket(shared.capacity, shared.fleet).close()


@contextmanager
def _explained(option: str, url: str) -> Iterator[None]:
    """Turns what goes wrong with an engine or a bucket into a ConfigError."""
    try:
        yield
    except ImportError as problem:
        s3 = url.startswith("s3:")
        raise ConfigError(
            f"{option}: it needs more than is installed ({problem}): "
            f"{'pip install obstore' if s3 else 'pip install redis'}"
        ) from None
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError(f"{option}: {problem}") from None


def _shared_store(config: Config) -> SharedStore:
    """Raises ConfigError."""
    shared = config.shared
    with _explained("shared.engine", shared.engine):
        make = _maker(config)
        if not shared.capacity:
            return make()
    with _explained("shared.capacity", shared.capacity):
        bucket = _bucket(shared.capacity, shared.fleet)
        from .sharing.behind import Behind
    with _explained("shared.engine", shared.engine), ExitStack() as stack:
        stack.callback(bucket.close)
        store = Behind(make(), bucket)
        stack.pop_all()
        return store


def _bucket(url: str, fleet: str) -> ObjectStore:
    """Its library is imported only here. Raises ImportError and ValueError."""
    from .sharing.object_store import ObjectStore

    return ObjectStore(url, fleet)


def _maker(whole: Config) -> Callable[[], SharedStore]:
    """Makes the store of the configured engine, whose library is imported only here. The files that
    it takes have been read."""
    config = whole.shared
    urls = config.engine.split(",")
    if urls[0].startswith("s3:"):
        if len(urls) > 1 or config.payloads == "nodes":
            raise ValueError("s3 takes one bucket, and stores payloads itself")
        return partial(_bucket, urls[0], config.fleet)
    from .sharing.redis_nodes import seeds_of
    from .sharing.redis_store import RedisStore

    seeds_of(urls)
    password = _password(config.password_file)
    if config.payloads == "engine":
        return partial(RedisStore, urls, config.fleet, password=password)
    from .sharing.peers import PeerStore, peer_security

    if not config.address:
        raise ConfigError(
            'shared.address: shared.payloads is "nodes": set it to the address of this node'
        )
    own = (whole.server.tls_cert, whole.server.tls_key) if config.peer_ca else ("", "")
    security = peer_security(config.peer_ca, *own, config.peer_token_file)

    def make() -> PeerStore:
        locations = RedisStore(urls, config.fleet, password=password, prefix=b"px1-at")
        return PeerStore(locations, config.address, security)

    return make


def _password(path: str) -> str | None:
    """The password in a file; None without a file. Raises ConfigError."""
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"shared.password_file: can't be read: {problem}") from None
