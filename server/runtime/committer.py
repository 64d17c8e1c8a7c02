"""Group commit: everything that waits for a store goes into its next `apply`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import structlog

from ...proto.limits import LATENCY_BOUNDS_NS
from ...tiers.store import EntryWriter, Store, StoreError, StoreFull, Usage
from ..core.counters import Histogram
from .clock import Clock
from .tracing import Step

log = structlog.get_logger("prefixd.committer")

#: After a failure the store is tried again this often, traffic or no traffic.
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How sealed writes ended: all of them in the same way."""

    tokens: tuple[int, ...]
    error: StoreError | None
    #: what took its time, where that is wanted (`Committer.time_steps`)
    steps: tuple[Step, ...] = ()


@dataclass(slots=True)
class _Batch:
    sealed: list[tuple[int, EntryWriter]] = field(default_factory=list)
    #: Were entries forgotten, whose records are to be erased?
    erase: bool = False
    usages: list[Usage] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sealed or self.erase or self.usages)


class Committer:
    """One thread in front of one store that has records.

    `done` is called once for every token, whatever the store does: on the committer's thread, or
    within `commit` if the store does not block and all is well.
    `failure` says what went wrong last; None: all is well. A store that failed is tried with a
    real write (`Store.probe`) until one succeeds: only that makes it well again. `full` says that
    its device has no room for a save, until it has; `usage_failure` is of the hints, which lie in
    a file of their own. `died` is told if the thread ends before `close`, on that thread.
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
        #: when each token was handed over, on the monotonic clock
        self._began_ns: dict[int, int] = {}
        #: from when bytes are whole until the store has said how their commit ended, in nanoseconds
        self.latency = Histogram(LATENCY_BOUNDS_NS)
        #: how long its device took to make the payloads of a commit durable, in nanoseconds
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
        """Say with each result when each step of it was, by `wall_ns`, from the first commit on."""
        self._wall_ns = wall_ns
        self._store.step = self._step

    # ---- from the event loop

    def commit(self, writes: Sequence[tuple[int, EntryWriter]]) -> None:
        self._began_ns.update(dict.fromkeys((t for t, _ in writes), self._clock.monotonic_ns()))
        if not self._store.blocking and self.failure is None:
            # A few rows in memory take less time than waking the thread. It judges what fails.
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
                self._judge(self._apply(batch))
                self._record(batch.usages)

    @property
    def _unwell(self) -> bool:
        return self.failure is not None or self.full is not None

    def _judge(self, failure: StoreError | None) -> None:
        """Tell of changes only: what fails, fails with every save."""
        full = isinstance(failure, StoreFull)
        tier = self._store.tier.label
        if failure is not None and not self._unwell:
            event = "device_full" if full else "commits_fail"
            log.error(event, tier=tier, unerased=self._store.unerased, error=str(failure))
        elif failure is None and self._unwell:
            log.warning("commits_succeed", tier=tier)
        self.full = str(failure) if full else None
        self.failure = None if failure is None or full else str(failure)

    def _next_batch(self) -> tuple[_Batch, bool]:
        """What is to be done now, and whether it is the last. It is empty when a store that failed
        is only tried again: were that left to the next save, it might never come, for a sick
        daemon gets no traffic."""
        with self._wakeup:
            while not self._pending and not self._closing:
                again = self._unwell or self._store.unerased
                if not self._wakeup.wait(self._retry_s if again else None):
                    break
            batch, self._pending = self._pending, _Batch()
            return batch, self._closing

    def _apply(self, batch: _Batch) -> StoreError | None:
        """Everything at once, or each save by itself. Returns what is wrong with the store."""
        if self.failure is not None or (self.full is not None and not batch.sealed):
            failure = self._attempt(self._store.probe)
            if failure is not None:
                self._refuse(batch, failure)
                return failure
        if not (batch.sealed or batch.erase or self._store.unerased):
            return None
        writers = [writer for _, writer in batch.sealed]
        failure = self._attempt(partial(self._store.apply, writers))
        if failure is None:
            self._tell([token for token, _ in batch.sealed], None)
            return None
        if len(batch.sealed) > 1:
            return self._apply_one_by_one(batch)
        self._refuse(batch, failure)
        return failure

    def _apply_one_by_one(self, batch: _Batch) -> StoreError | None:
        """One entry that doesn't fit must not take the others with it."""
        worst: StoreError | None = None
        for token, writer in batch.sealed:
            failure = self._attempt(partial(self._store.apply, [writer]))
            if failure is not None and (worst is None or isinstance(worst, StoreFull)):
                worst = failure
            self._tell([token], failure)
        return worst

    def _refuse(self, batch: _Batch, failure: StoreError) -> None:
        self._tell([token for token, _ in batch.sealed], failure)

    def _attempt(self, step: Callable[[], None]) -> StoreError | None:
        """Returns why nothing of it happened."""
        try:
            self._steps.clear()
            with self._under_way():
                step()
        # Nothing ends this thread: saves would wait for ever, and health would stay green.
        except BaseException as problem:
            return _failure(problem)
        return None

    def _record(self, usages: Sequence[Usage]) -> None:
        if not usages:
            return
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
        """Everything of a commit that was asked for then."""
        first_ns = self._steps[0].began_ns if self._steps else began_ns
        return (Step("commit.queue", began_ns, max(began_ns, first_ns)), *self._steps)

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


def _failure(problem: BaseException) -> StoreError:
    """What a store raised, also where the contract does not know it."""
    if isinstance(problem, StoreError):
        return problem
    log.error("store_raised", exc_info=problem)
    return StoreError(f"{type(problem).__name__}: {problem}")
