"""Group commit: everything that waits for a store goes into its next `apply`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from ...proto.limits import LATENCY_BOUNDS_NS
from ...proto.vocabulary import Tier
from ...tiers.store import EntryRef, EntryWriter, Store, StoreError, StoreFull, Usage
from ..core.counters import Histogram
from .clock import Clock
from .listeners import Step

log = structlog.get_logger("prefixd.committer")

#: How often a store that failed is tried again, even without traffic.
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How the commit of these sealed writes ended: all of them in the same way."""

    tokens: tuple[int, ...]
    error: StoreError | None
    #: when each step was, if `Committer.time_steps` was called
    steps: tuple[Step, ...] = ()


@dataclass(slots=True)
class _Batch:
    sealed: list[tuple[int, EntryWriter]] = field(default_factory=list)
    #: entries were forgotten, and their records are to be erased
    erase: bool = False
    usages: list[Usage] = field(default_factory=list)
    #: to be told whether the erasures of this batch are durable
    tell: list[Callable[[bool], None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sealed or self.erase or self.usages)


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[bool], durable: bool) -> None:
    """On any thread: give `done` its result, if anything still waits for it."""

    def set_result() -> None:
        if not done.done():
            done.set_result(durable)

    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(set_result)


class Committer:
    """One thread in front of one store that has records.

    `done` is called once for every token, whatever the store does: on the committer's thread, or
    within `commit` if the store does not block and all is well.
    `failure` says what went wrong last; None: all is well. A store that failed is tried with a
    real write (`Store.probe`) until one succeeds: nothing else clears the failure. `full` says that
    its device has no room for a save, until it has; `usage_failure` is about usage hints, which
    lie in a file of their own. `died` is called on the thread if it ends before `close`.
    """

    def __init__(
        self,
        store: Store,
        done: Callable[[CommitResult], None],
        *,
        retry_s: float = _RETRY_S,
        under_way: Callable[[], AbstractContextManager[None]] = nullcontext,
        died: Callable[[BaseException], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`under_way`: entered around every call that does I/O."""
        self._store = store
        self._done = done
        self._retry_s = retry_s
        self._under_way = under_way
        self._died = died
        self._pending = _Batch()
        self._wakeup = threading.Condition()
        self._closing = False
        self._clock = clock or Clock()
        #: when `commit` was called with each token, on the monotonic clock
        self._began_ns: dict[int, int] = {}
        #: nanoseconds from a complete payload to the result of its commit
        self.latency = Histogram(LATENCY_BOUNDS_NS)
        #: nanoseconds that the device took to make the payloads of a commit durable
        self.sync = Histogram(LATENCY_BOUNDS_NS)
        self.failure: str | None = None
        self.full: str | None = None
        self.usage_failure: str | None = None
        self._wall_ns: Callable[[], int] | None = None
        self._steps: list[Step] = []
        if store.blocking:
            store.step = self._step
        self._thread = threading.Thread(
            target=self._live, name=f"prefixd-{store.tier.label}-commit", daemon=True
        )
        self._thread.start()

    def time_steps(self, wall_ns: Callable[[], int]) -> None:
        """From now on, say in each result when its steps were, by `wall_ns`."""
        self._wall_ns = wall_ns
        self._store.step = self._step

    # ---- on the event loop

    def commit(self, writes: Sequence[tuple[int, EntryWriter]]) -> None:
        self._began_ns.update(dict.fromkeys((t for t, _ in writes), self._clock.monotonic_ns()))
        if not self._store.blocking and self.failure is None:
            # Writing a few rows in memory takes less time than waking the thread, which handles
            # what fails.
            failure = self._attempt(partial(self._store.apply, [writer for _, writer in writes]))
            if failure is None:
                self._tell([token for token, _ in writes], None)
                return
        with self._wakeup:
            self._pending.sealed += writes
            self._wakeup.notify()

    def erase(self) -> None:
        """Have the records of what the store forgot erased soon."""
        with self._wakeup:
            self._pending.erase = True
            self._wakeup.notify()

    def erased(self, tell: Callable[[bool], None]) -> None:
        """Call `tell`, on the thread, after the next attempt to erase what was forgotten: with
        whether that is durable."""
        with self._wakeup:
            self._pending.erase = True
            self._pending.tell.append(tell)
            self._wakeup.notify()

    def record_usage(self, usages: Sequence[Usage]) -> None:
        with self._wakeup:
            self._pending.usages += usages
            self._wakeup.notify()

    def close(self) -> None:
        """Finish what is pending, then end the thread. Blocks."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join()

    # ---- on the thread

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as problem:
            log.critical("committer_died", tier=self._store.tier.label, exc_info=problem)
            if self._died is not None:
                self._died(problem)

    def _run(self) -> None:
        last = False
        while not last:
            batch, last = self._next_batch()
            if batch or self._unwell or self._store.unerased:
                failure = self._apply(batch)
                self._judge(failure)
                for tell in batch.tell:
                    tell(failure is None)
                if batch.usages:
                    self._record(batch.usages)

    @property
    def _unwell(self) -> bool:
        return self.failure is not None or self.full is not None

    def _next_batch(self) -> tuple[_Batch, bool]:
        """What is to be done now, and whether it is the last batch. The batch is empty when a store
        that failed is to be tried again: an unhealthy daemon gets no traffic, so the next save may
        never come."""
        with self._wakeup:
            while not self._pending and not self._closing:
                again = self._unwell or self._store.unerased
                if not self._wakeup.wait(self._retry_s if again else None):
                    break
            batch, self._pending = self._pending, _Batch()
            return batch, self._closing

    def _apply(self, batch: _Batch) -> StoreError | None:
        """Apply everything at once, or else each save by itself. Returns what is wrong with the
        store."""
        tokens = [token for token, _ in batch.sealed]
        failure = None
        if self.failure is not None or (self.full is not None and not tokens):
            failure = self._attempt(self._store.probe)
        if failure is None and (tokens or batch.erase or self._store.unerased):
            writers = [writer for _, writer in batch.sealed]
            failure = self._attempt(partial(self._store.apply, writers))
            if failure is not None and len(tokens) > 1:
                return self._apply_one_by_one(batch)
        self._tell(tokens, failure)
        return failure

    def _apply_one_by_one(self, batch: _Batch) -> StoreError | None:
        """One entry that doesn't fit must not fail the others."""
        worst: StoreError | None = None
        for token, writer in batch.sealed:
            failure = self._attempt(partial(self._store.apply, [writer]))
            if failure is not None and (worst is None or isinstance(worst, StoreFull)):
                worst = failure
            self._tell([token], failure)
        return worst

    def _attempt(self, step: Callable[[], None]) -> StoreError | None:
        """Returns why nothing of it happened."""
        try:
            self._steps.clear()
            with self._under_way():
                step()
        except StoreError as problem:
            return problem
        # Nothing may end this thread: saves would wait for ever, and health would stay green.
        except BaseException as problem:
            log.error("store_raised", exc_info=problem)
            return StoreError(f"{type(problem).__name__}: {problem}")
        return None

    def _judge(self, failure: StoreError | None) -> None:
        """Log changes only: a store that fails, fails with every save."""
        full = isinstance(failure, StoreFull)
        tier = self._store.tier.label
        if failure is not None and not self._unwell:
            event = "device_full" if full else "commits_fail"
            log.error(event, tier=tier, unerased=self._store.unerased, error=str(failure))
        elif failure is None and self._unwell:
            log.warning("commits_succeed", tier=tier)
        self.full = str(failure) if full else None
        self.failure = None if failure is None or full else str(failure)

    def _record(self, usages: Sequence[Usage]) -> None:
        failure = self._attempt(partial(self._store.record_usage, usages))
        if failure is not None and self.usage_failure is None:
            log.warning("usage_not_recorded", tier=self._store.tier.label, error=str(failure))
        self.usage_failure = None if failure is None else str(failure)

    def _tell(self, tokens: Sequence[int], error: StoreError | None) -> None:
        if tokens:
            now_ns = self._clock.monotonic_ns()
            waited_ns = [now_ns - self._began_ns.pop(token, now_ns) for token in tokens]
            for each_ns in waited_ns:
                self.latency.observe(each_ns)
            steps = () if self._wall_ns is None else self._since(self._wall_ns() - max(waited_ns))
            self._done(CommitResult(tuple(tokens), error, steps))

    def _since(self, began_ns: int) -> tuple[Step, ...]:
        """All steps of a commit that was requested at `began_ns`, its wait first."""
        first_ns = self._steps[0].began_ns if self._steps else began_ns
        # Two clocks were read, one after the other: in between the thread may have waited.
        return (Step("commit.queue", min(began_ns, first_ns), first_ns), *self._steps)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Around a step of the store."""
        wall_ns, began_ns = self._wall_ns, self._clock.monotonic_ns()
        since_ns = wall_ns() if wall_ns is not None else 0
        try:
            yield
        finally:
            if name == "sync":
                self.sync.observe(self._clock.monotonic_ns() - began_ns)
            if wall_ns is not None:
                self._steps.append(Step(f"store.{name}", since_ns, wall_ns()))


class Committers:
    """A committer for each store that has records; other stores have nothing to write. Belongs to
    the event loop; no method raises."""

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        committed: Callable[[CommitResult], None],
        under_way: Callable[[Tier], AbstractContextManager[None]] = lambda _: nullcontext(),
        died: Callable[[Tier, BaseException], None] = lambda _tier, _problem: None,
        clock: Clock | None = None,
    ) -> None:
        """`committed`: called once for every token, on any thread. `under_way`: entered around all
        I/O of a tier. `died`: called on the thread of a committer."""
        self._stores = stores
        #: while garbage is collected: the generations of entries that were forgotten meanwhile
        self.forgotten: set[int] | None = None
        self._committers = {
            tier: Committer(
                store,
                committed,
                under_way=partial(under_way, tier),
                died=partial(died, tier),
                clock=clock,
            )
            for tier, store in stores.items()
            if store.recorded
        }

    def commit(self, tier: Tier, writes: Sequence[tuple[int, EntryWriter]]) -> None:
        """Make sealed writes durable."""
        self._committers[tier].commit(writes)

    def latencies(self) -> dict[Tier, Histogram]:
        """How long commits take, in nanoseconds."""
        return {tier: committer.latency for tier, committer in self._committers.items()}

    def syncs(self) -> dict[Tier, Histogram]:
        """How long devices take to make the payloads of a commit durable, in nanoseconds."""
        return {
            tier: committer.sync
            for tier, committer in self._committers.items()
            if self._stores[tier].blocking
        }

    def time_steps(self, wall_ns: Callable[[], int]) -> None:
        """See `Committer.time_steps`."""
        for committer in self._committers.values():
            committer.time_steps(wall_ns)

    def forget(self, tier: Tier, entries: Sequence[EntryRef]) -> None:
        """Have a store forget entries that no search finds any more."""
        store = self._stores[tier]
        store.forget(entries)
        if self.forgotten is not None:
            self.forgotten.update(entry.generation for entry in entries)
        if store.unerased:
            self._committers[tier].erase()

    async def erased(self, within_s: float) -> bool:
        """Wait until the erasure of everything that was forgotten is durable. False: a device has
        not taken it yet, or refused it."""
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[bool]] = []
        for tier, committer in self._committers.items():
            if not self._stores[tier].unerased:
                continue
            done: asyncio.Future[bool] = loop.create_future()
            committer.erased(partial(_tell, loop, done))
            waiting.append(done)
        if not waiting:
            return True
        finished, late = await asyncio.wait(waiting, timeout=within_s)
        return not late and all(done.result() for done in finished)

    def record_usage(self, tier: Tier, usages: tuple[Usage, ...]) -> None:
        committer = self._committers.get(tier)
        if committer is not None:
            committer.record_usage(usages)

    def unhealthy(self) -> dict[str, str]:
        """What does not work, by name."""
        return {
            f"{tier.label} commit": committer.failure
            for tier, committer in self._committers.items()
            if committer.failure is not None
        }

    def notices(self) -> dict[str, str]:
        """What is less than it could be, by name."""
        found = {}
        for tier, committer in self._committers.items():
            if committer.full is not None:
                found[f"{tier.label} device"] = f"full: {committer.full}"
            if committer.usage_failure is not None:
                found[f"{tier.label} usage"] = committer.usage_failure
        return found

    def closings(self) -> list[Callable[[], None]]:
        """For each thread: finish what is pending, and end it. Each blocks."""
        return [committer.close for committer in self._committers.values()]
