"""The stores that do I/O: threads of their own, and a watchdog that notices when they hang.

A device that does not answer blocks every thread that calls it. So each blocking store has threads
of its own, and calls for other tiers never wait for them. All I/O that is under way is recorded
with the time at which it began. While the oldest of it is older than `hung_after_ns`, the store is
hung: a health condition, and the state refuses its saves and finds nothing in it (`TierChanged`).
To notice this without traffic too, a thread for each store writes something every
`probe_interval_ns`. When the I/O ends, however it ends, the store is not hung any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Final, TypeVar

import structlog

from ...proto.vocabulary import Tier
from ...tiers.store import Store, StoreError
from ..core.events import TierChanged, TierState
from .clock import Clock
from .gate import stopping
from .supervision import Health, Supervisor

T = TypeVar("T")

log = structlog.get_logger("prefixd.devices")


class DoesNotAnswer(StoreError):
    """The store was not asked, because its device hangs at this moment."""


#: Threads for each blocking store: copies of saves, reads, verification.
_THREADS: Final = 4
#: How often the age of the oldest I/O is looked at.
_LOOK_S: Final = 0.25


class OutstandingIo:
    """The I/O of one store that is under way. On any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = count()
        #: when each I/O began, by number
        self._began_ns: dict[int, int] = {}

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around calls of the store that may wait for its device."""
        number = next(self._numbers)
        self._began_ns[number] = self._clock.monotonic_ns()
        try:
            yield
        finally:
            del self._began_ns[number]

    def oldest_ns(self) -> int:
        """For how long the oldest I/O is under way. 0: there is none."""
        began_ns = list(self._began_ns.values())
        return self._clock.monotonic_ns() - min(began_ns) if began_ns else 0


class Devices:
    """The blocking stores of a daemon, and the state of each tier.

    Belongs to the event loop; `executor` and `io` may be used from any thread. `changed` is called
    with every change of a tier's state.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        shared: Executor,
        clock: Clock,
        health: Health,
        changed: Callable[[TierChanged], None],
    ) -> None:
        self._stores = stores
        self._shared = shared
        self._clock = clock
        self._health = health
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._unavailable: set[Tier] = set()
        self._recovering: set[Tier] = set()
        self._hung: set[Tier] = set()
        #: the tiers whose arenas a task is securing
        self.securing: Final[set[Tier]] = set()
        self.io: Final = {
            tier: OutstandingIo(clock) for tier, store in stores.items() if store.blocking
        }
        self._pools = {
            tier: ThreadPoolExecutor(_THREADS, f"prefixd-{tier.label}") for tier in self.io
        }
        self._closing = threading.Event()
        self._look_handle: asyncio.TimerHandle | None = None

    # ---- states of tiers

    def state(self, tier: Tier) -> TierState:
        if tier in self._unavailable:
            return TierState.UNAVAILABLE
        if tier in self._hung:
            return TierState.HUNG
        return TierState.RECOVERING if tier in self._recovering else TierState.SERVING

    @property
    def hung(self) -> Set[Tier]:
        """The tiers whose devices don't answer."""
        return self._hung

    def check_answers(self, tier: Tier) -> None:
        """Raises DoesNotAnswer. On any thread."""
        if tier in self._hung:
            raise DoesNotAnswer("its device does not answer")

    def recovering(self, tier: Tier, recovers: bool) -> None:
        """The recovery of a tier begins or ends."""
        self._set(self._recovering, tier, recovers)

    def unavailable(self, tier: Tier, why: str) -> None:
        """The store of a tier can't be opened; `why` is empty once it is open."""
        part = f"{tier.label} tier"
        if why:
            self._health.conditions[part] = f"{why}; it is tried again"
            self._health.notices.pop(part, None)
        else:
            self._health.conditions.pop(part, None)
        self._set(self._unavailable, tier, bool(why))

    def recovers(self, tier: Tier) -> bool:
        """Are its records not all read yet, even if its device can't be used at the moment?"""
        return tier in self._recovering

    def _set(self, tiers: set[Tier], tier: Tier, there: bool) -> None:
        before = self.state(tier)
        (tiers.add if there else tiers.discard)(tier)
        if self.state(tier) is not before:
            self._changed(TierChanged(tier, self.state(tier), self._clock.now_ns()))

    # ---- threads

    def executor(self, tier: Tier) -> Executor:
        """The threads for long calls of this tier's store."""
        return self._pools.get(tier, self._shared)

    def run(self, tier: Tier, call: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Make a long call of a store on a thread. Raises Draining once the threads have ended:
        the daemon has stopped."""
        try:
            return self._loop.run_in_executor(self.executor(tier), call, *args)
        except RuntimeError:
            raise stopping() from None

    def under_way(self, tier: Tier) -> AbstractContextManager[None]:
        """`OutstandingIo.under_way`, for any tier."""
        io = self.io.get(tier)
        return nullcontext() if io is None else io.under_way()

    def oldest_ns(self, tier: Tier) -> int:
        """`OutstandingIo.oldest_ns`, for any tier. On any thread."""
        io = self.io.get(tier)
        return io.oldest_ns() if io is not None else 0

    # ---- the watchdog

    def watch(self, supervisor: Supervisor, *, probe_interval_ns: int, hung_after_ns: int) -> None:
        """Begin to watch, until `close`."""
        for tier in self.io:
            probing = partial(self._probe, self._stores[tier], probe_interval_ns / 1e9)
            supervisor.thread(f"{tier.label} probe", probing)
        self._look_every(hung_after_ns)

    def _look_every(self, hung_after_ns: int) -> None:
        self._look_handle = self._loop.call_later(_LOOK_S, self._look_every, hung_after_ns)
        self.look(hung_after_ns)

    def look(self, hung_after_ns: int) -> None:
        """Find the devices that hang, and those that answer again."""
        for tier, io in self.io.items():
            oldest_ns = io.oldest_ns()
            hangs = oldest_ns > hung_after_ns
            part = f"{tier.label} device"
            if hangs:
                self._health.conditions[part] = (
                    f"it has not answered for {oldest_ns // 10**9} s: the tier takes no saves and "
                    "gives no claims until it does"
                )
            if hangs != (tier in self._hung):
                if hangs:
                    log.error("device_hangs", tier=tier.label, oldest_ms=oldest_ns // 10**6)
                else:
                    log.warning("device_answers", tier=tier.label)
                    self._health.conditions.pop(part, None)
                self._set(self._hung, tier, hangs)

    def _probe(self, store: Store, interval_s: float) -> None:
        """On a thread of its own."""
        part = f"{store.tier.label} probe"
        conditions = self._health.conditions
        while not self._closing.wait(interval_s):
            if not store.is_open:
                continue
            try:
                with self.io[store.tier].under_way():
                    store.probe()
            except StoreError as problem:
                if part not in conditions:
                    log.error("probe_failed", tier=store.tier.label, error=str(problem))
                conditions[part] = str(problem)
            else:
                if conditions.pop(part, None) is not None:
                    log.warning("probe_succeeds", tier=store.tier.label)

    # ---- the end

    def stop(self) -> None:
        """Begin no more probes, and change no state."""
        self._closing.set()
        if self._look_handle is not None:
            self._look_handle.cancel()

    def close(self) -> None:
        """End the threads. Blocks as long as a device hangs."""
        self.stop()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
