"""Group commit: everything that waits for a blocking store goes into its next transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from ..proto.keys import Key
from ..tiers.store import EntryWriter, Store, StoreError, StoreFull, Usage

log = structlog.get_logger("prefixd.committer")

#: After a failure the store is tried again this often, traffic or no traffic.
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How sealed writes ended: all of them in the same way."""

    tokens: tuple[int, ...]
    error: StoreError | None


@dataclass(slots=True)
class _Batch:
    sealed: list[tuple[int, EntryWriter]] = field(default_factory=list)
    erased: list[Key] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sealed or self.erased or self.usages)


class Committer:
    """One thread in front of one blocking store.

    The order of calls is kept where it matters: an erasure that was ordered before a save of
    the same key happens before it, and a save is only ever erased after `done` was called for
    it, which is in a later batch. `done` is called on the committer's thread, once for every
    token, whatever the store does. `failure` says what went wrong last; None: all is well.
    """

    def __init__(
        self, store: Store, done: Callable[[CommitResult], None], *, retry_s: float = _RETRY_S
    ) -> None:
        self._store = store
        self._done = done
        self._retry_s = retry_s
        self._pending = _Batch()
        self._wakeup = threading.Condition()
        #: erasures that failed; of keys that were saved again since, nothing is left to erase
        self._unerased: list[Key] = []
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"prefixd-{store.tier.label}-commit", daemon=True
        )
        self._thread.start()

    # ---- from the event loop

    def commit(self, writes: Sequence[tuple[int, EntryWriter]]) -> None:
        with self._wakeup:
            self._pending.sealed += writes
            self._wakeup.notify()

    def erase(self, keys: Sequence[Key]) -> None:
        with self._wakeup:
            self._pending.erased += keys
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

    def _run(self) -> None:
        last = False
        while not last:
            batch, last = self._next_batch()
            if batch or self.failure is not None:
                failure = self._apply(batch) or self._record(batch.usages)
                self.failure = None if failure is None else str(failure)
        if self._unerased:
            self._attempt([], self._unerased)

    def _next_batch(self) -> tuple[_Batch, bool]:
        """What is to be done now, with what could not be erased before, and whether it is the
        last. It is empty when a store that failed is only tried again: were that left to the
        next save, it might never come, for a sick daemon gets no traffic."""
        with self._wakeup:
            while not self._pending and not self._closing:
                ill = self.failure is not None or self._unerased
                if not self._wakeup.wait(self._retry_s if ill else None):
                    break
            batch, self._pending = self._pending, _Batch()
            batch.erased[:0] = self._unerased
            self._unerased = []
            return batch, self._closing

    def _apply(self, batch: _Batch) -> StoreError | None:
        """Everything in one transaction, or each by itself. Returns what makes the store ill."""
        if not (batch.sealed or batch.erased or self.failure):
            return None
        failure = self._attempt([writer for _, writer in batch.sealed], batch.erased)
        if failure is None:
            self._tell([token for token, _ in batch.sealed], None)
            return None
        log.warning(
            "commit_refused",
            tier=self._store.tier.label,
            saves=len(batch.sealed),
            erasures=len(batch.erased),
            error=str(failure),
        )
        if len(batch.sealed) + bool(batch.erased) > 1:
            return self._apply_one_by_one(batch)
        self._tell([token for token, _ in batch.sealed], failure)
        self._unerased = batch.erased
        return _illness(failure)

    def _apply_one_by_one(self, batch: _Batch) -> StoreError | None:
        """One entry that doesn't fit must not take the others with it."""
        failure = self._attempt([], batch.erased) if batch.erased else None
        illness = _illness(failure)
        # They have to happen some time: with whatever comes next.
        unerased = [] if failure is None else batch.erased
        for token, writer in batch.sealed:
            failure = self._attempt([writer], [])
            illness = _illness(failure) or illness
            if failure is None:
                # It took the place of what was to be erased.
                unerased = [key for key in unerased if key != writer.head.key]
            self._tell([token], failure)
        self._unerased = unerased
        return illness

    def _attempt(self, sealed: Sequence[EntryWriter], erased: Sequence[Key]) -> StoreError | None:
        """One transaction. Returns why nothing of it happened."""
        try:
            self._store.apply(sealed, erased)
        # Nothing ends this thread: saves would wait for ever, and health would stay green.
        except BaseException as problem:
            return _failure(problem)
        return None

    def _record(self, usages: Sequence[Usage]) -> StoreError | None:
        if not usages:
            return None
        try:
            self._store.record_usage(usages)
        except BaseException as problem:
            failure = _failure(problem)
            log.warning("usage_not_recorded", tier=self._store.tier.label, error=str(failure))
            return _illness(failure)
        return None

    def _tell(self, tokens: Sequence[int], error: StoreError | None) -> None:
        if tokens:
            self._done(CommitResult(tuple(tokens), error))


def _failure(problem: BaseException) -> StoreError:
    """What a store raised, also where the contract does not know it."""
    if isinstance(problem, StoreError):
        return problem
    log.error("store_raised", exc_info=problem)
    return StoreError(f"{type(problem).__name__}: {problem}")


def _illness(failure: StoreError | None) -> StoreError | None:
    """A full device is the answer to a save, not an illness of its store."""
    return None if isinstance(failure, StoreFull) else failure
