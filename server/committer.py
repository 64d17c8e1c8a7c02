"""Group commit: everything that waits for a blocking store goes into its next transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from ..proto.keys import Key
from ..tiers.store import EntryWriter, Store, StoreError, StoreFull, Usage

log = structlog.get_logger("prefixd.committer")


@dataclass(frozen=True, slots=True)
class CommitResult:
    """How one batch of sealed writes ended."""

    tokens: tuple[int, ...]
    error: StoreError | None


@dataclass(slots=True)
class _Pending:
    sealed: list[tuple[int, EntryWriter]] = field(default_factory=list)
    erased: list[Key] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sealed or self.erased or self.usages)


class Committer:
    """One thread in front of one blocking store.

    The order of calls is kept where it matters: an erasure that was ordered before a save of
    the same key happens before it, and a save is only ever erased after `done` was called for
    it, which is in a later batch. `done` is called on the committer's thread.
    """

    def __init__(self, store: Store, done: Callable[[CommitResult], None]) -> None:
        self._store = store
        self._done = done
        self._pending = _Pending()
        self._wakeup = threading.Condition()
        self._retried_erasures: list[Key] = []
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
        while True:
            with self._wakeup:
                while not self._pending and not self._closing:
                    self._wakeup.wait()
                batch, self._pending = self._pending, _Pending()
                if not batch:
                    return
                batch.erased[:0] = self._retried_erasures
                self._retried_erasures = []
            # One bad batch is a failed batch, never a dead thread; health says so.
            failure = self._carry_out(batch)
            self.failure = None if failure is None else f"{type(failure).__name__}: {failure}"

    def _carry_out(self, batch: _Pending) -> Exception | None:
        """Returns what went wrong, if anything did."""
        failure: Exception | None = None
        if batch.sealed or batch.erased:
            failure = self._apply(batch)
        if batch.usages:
            try:
                self._store.record_usage(batch.usages)
            except Exception as problem:
                log.warning("usage_not_recorded", error=str(problem))
                failure = problem
        return failure

    def _apply(self, batch: _Pending) -> Exception | None:
        try:
            self._store.apply([writer for _, writer in batch.sealed], batch.erased)
        except Exception as problem:
            log.warning(
                "commit_refused",
                tier=self._store.tier.label,
                saves=len(batch.sealed),
                erasures=len(batch.erased),
                error=str(problem),
            )
            self._apply_one_by_one(batch)
            # A full device is the answer to a save, not an illness of this thread.
            return None if isinstance(problem, StoreFull) else problem
        if batch.sealed:
            self._done(CommitResult(tuple(token for token, _ in batch.sealed), None))
        return None

    def _apply_one_by_one(self, batch: _Pending) -> None:
        """One entry that doesn't fit must not take the others with it."""
        try:
            self._store.apply([], batch.erased)
        except Exception:
            # They have to happen some time: with whatever comes next.
            with self._wakeup:
                self._retried_erasures += batch.erased
        for token, writer in batch.sealed:
            error: StoreError | None = None
            try:
                self._store.apply([writer], [])
            except StoreError as problem:
                error = problem
            except Exception as problem:
                error = StoreError(f"{type(problem).__name__}: {problem}")
            self._done(CommitResult((token,), error))
