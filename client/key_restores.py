"""Restores by key: copies the entries that exist straight into buffers, without a hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..proto.keys import Key
from ..proto.payload import FlatBytes
from ..proto.vocabulary import ClaimMode, MissReason
from .buffers import all_flat
from .failures import Failures
from .hits import Hit, Reader
from .restores import Restore
from .results import RestoreResult, restore_result
from .search import Searcher
from .wire.deadline import Deadline
from .wire.sinks import Sink
from .wire.transport import Claimed, Transport

if TYPE_CHECKING:
    from .buffers import Payload


class KeyRestorer:
    """For one client. Thread-safe."""

    def __init__(
        self, transport: Transport, searcher: Searcher, reader: Reader, failures: Failures
    ) -> None:
        self._transport = transport
        self._searcher = searcher
        self._reader = reader
        self._failures = failures

    def restore(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        buffers: Sequence[Payload],
        left_ms: Callable[[], int],
    ) -> RestoreResult:
        """A buffer for each key. `left_ms`: of the call, beside the time to move its bytes."""
        targets = all_flat(buffers, writable=True)
        if not keys:
            return restore_result((), (), ())
        found = self._in_one_trip(keys, token_counts, mode, targets, left_ms)
        if found is None:
            # In place there is nothing to pin, and over gRPC a claim spares a look-up.
            pin = self._searcher.sees_all(mode) and self._transport.peek(()) is None
            deadline = Deadline(left_ms())
            hit = self._searcher.search(keys, token_counts, mode, 0, deadline, pin=pin)
            asked = [buffers[position] for position in hit.positions]
            try:
                result = self._reader.restore(hit, range(len(hit)), asked, left_ms())
            finally:
                hit.release(deadline_ms=left_ms())
        else:
            hit, result = found
        if len(hit) == len(keys):
            return result
        misses: list[MissReason | None] = [hit.miss or MissReason.ABSENT] * len(keys)
        for position, miss in zip(hit.positions, result.misses, strict=True):
            misses[position] = miss
        return restore_result(hit.entries, hit.token_counts, misses)

    def _in_one_trip(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        targets: Sequence[FlatBytes],
        left_ms: Callable[[], int],
    ) -> tuple[Hit, RestoreResult] | None:
        """None: that can't be done, and nothing was."""
        if len(keys) > self._transport.max_batch_keys or not self._searcher.sees_all(mode):
            return None
        begun: list[tuple[Hit, Restore]] = []

        def begin(claimed: Claimed) -> Sink:
            hit = self._searcher.claimed_at_once(claimed, keys, token_counts, mode)
            restore = self._reader.receive(hit, [targets[n] for n in hit.positions])
            begun.append((hit, restore))
            return restore

        room_bytes = [len(target) for target in targets]
        deadline = Deadline(left_ms(), sum(room_bytes))
        stopped: MissReason | None = None
        try:
            if not self._transport.fetch_found(keys, mode, room_bytes, begin, deadline):
                return None
        except Exception as problem:
            stopped = self._failures.reason(problem)
        if not begun:
            hit = self._searcher.claimed_at_once(
                stopped or MissReason.UNEXPECTED, keys, token_counts, mode
            )
            return hit, restore_result((), (), ())
        ((hit, restore),) = begun
        return hit, self._reader.received(hit, restore, stopped)
