"""A search: asks the daemon, or the index in place, for keys, and makes a hit of what is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING

from ..proto.keys import Key
from ..proto.limits import MAX_TOLD_KEYS
from ..proto.payload import FlatBytes
from ..proto.vocabulary import ClaimMode, MissReason, Presence
from .buffers import all_flat
from .context import CallContext
from .counters import Missing
from .hits import Hit, Reader
from .policy import MinBenefit
from .restores import Restore
from .results import NO_ENTRIES, Entries, Entry, Found, RestoreResult, restore_result
from .wire.deadline import Deadline
from .wire.transport import Claimed, Holding, Sink

if TYPE_CHECKING:
    from .buffers import Payload


class _Search:
    """One search: what it is for, and what it has found so far."""

    def __init__(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        stride_tokens: int = 0,
    ) -> None:
        self.keys = keys
        self._stride_tokens = stride_tokens
        self.token_counts = token_counts
        self.mode = mode
        self.claims: list[Holding] = []
        #: Of each entry, its place among the keys.
        self.positions: list[int] = []
        self.entries = NO_ENTRIES
        #: Why the search ended, unless everything was found.
        self.gap = MissReason.ABSENT

    def add(
        self,
        positions: Sequence[int],
        entries: Entries,
        *,
        start: int = 0,
        in_flight: bool = False,
    ) -> None:
        """Add entries; `positions` count from `start`. `in_flight`: one of the others is being
        saved."""
        self.positions += [start + position for position in positions] if start else positions
        self.entries = Entries([*self.entries, *entries]) if self.entries else entries
        if in_flight:
            self.gap = MissReason.IN_FLIGHT

    def full_hit_tokens(self) -> int:
        """What a full hit would have: of the longest prefix, or of all blocks; 0: not known."""
        known = filter(None, self.token_counts or ())
        return max(known, default=0) if self.mode is ClaimMode.FIRST else sum(known)

    def usual(self, end: int) -> Sequence[int]:
        """Positions before `end` of the keys that a policy saves: the first one, and those at
        multiples of the stride."""
        stride_tokens = self._stride_tokens
        if not stride_tokens or self.token_counts is None:
            return range(end)
        counts = enumerate(islice(self.token_counts, end))
        return [n for n, count in counts if not (n and (count or 0) % stride_tokens)]

    def first_missing(self) -> Sequence[Key]:
        """The first key that was not found; of prefixes, the usual ones that are longer than the
        one that was."""
        there = self.positions
        if self.mode is ClaimMode.FIRST:
            end = there[0] if there else len(self.keys)
            # One more than a report names, to show that there are more.
            return [self.keys[position] for position in self.usual(end)[: MAX_TOLD_KEYS + 1]]
        first = next((n for n, position in enumerate(there) if n != position), len(there))
        return self.keys[first : first + 1]

    def counts(self) -> Sequence[int]:
        """The tokens of each entry."""
        if self.token_counts is None:
            return self.entries.token_counts
        return [
            saved if (known := self.token_counts[position]) is None else known
            for saved, position in zip(self.entries.token_counts, self.positions, strict=True)
        ]


class Searcher:
    """Searches for one client, and restores by key. Thread-safe.

    `token_counts`: the tokens that each key stands for; None where only the entry says. Where one
    call does not take all keys, several make one hit.
    """

    def __init__(
        self,
        context: CallContext,
        reader: Reader,
        benefit: MinBenefit,
        *,
        lease_ms: int,
        shared_wait_ms: int,
    ) -> None:
        self._transport = context.transport
        self._counters = context.counters
        self._failures = context.failures
        self._reader = reader
        self._benefit = benefit
        self._lease_ms = lease_ms
        self._shared_wait_ms = shared_wait_ms

    def search(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
        prompt_tokens: int = 0,
        *,
        pin: bool = True,
        stride_tokens: int = 0,
        counted: bool = True,
    ) -> Hit:
        """The entries of `keys` that `mode` selects: pinned by one rpc, or else looked up in place
        if possible, by one rpc if not. `prompt_tokens`: what all keys stand for, for the hit ratio;
        0: what `token_counts` add up to. `stride_tokens`: a policy saves at its multiples; only
        those and the first key are asked of other nodes, and told to the daemon as missing. 0: all.
        `counted`: whether this is a look-up in the counters."""
        search = _Search(keys, token_counts, mode, stride_tokens)
        step = self._claim if pin else self._look
        try:
            step(search, wait_ms, deadline)
            while self._pull(search, deadline, step, prompt_tokens):
                pass
        except Exception as problem:
            search.gap = self._failures.reason(problem)
        return self._hit(search, prompt_tokens, counted=counted)

    def _claim(self, search: _Search, wait_ms: int, deadline: Deadline) -> None:
        keys, mode, size = search.keys, search.mode, self._transport.max_batch_keys
        for start in range(0, len(keys), size):
            batch = keys if len(keys) <= size else keys[start : start + size]
            claimed = self._transport.claim(batch, mode, wait_ms, self._lease_ms, deadline)
            if claimed.in_flight:
                search.gap = MissReason.IN_FLIGHT
            if claimed.holding is not None:
                search.claims.append(claimed.holding)
                search.add(claimed.positions, claimed.entries, start=start)
            if mode is ClaimMode.FIRST and search.entries:
                return
            if mode is ClaimMode.RUN and len(claimed.entries) < len(batch):
                return

    def _look(self, search: _Search, wait_ms: int, deadline: Deadline) -> None:
        if not search.keys:
            return
        # The index does not list saves in flight: only the daemon can wait for those.
        looked = None if wait_ms else self._transport.find(search.keys, search.mode, deadline)
        if looked is not None:
            search.add(looked.positions, looked.entries)
            return
        results = self._transport.lookup(list(search.keys), wait_ms, deadline)
        positions, entries = _selected(results, search.mode)
        in_flight = any(result.presence is Presence.IN_FLIGHT for result in results)
        search.add(positions, Entries(entries), in_flight=in_flight)

    def _pull(
        self,
        search: _Search,
        deadline: Deadline,
        step: Callable[[_Search, int, Deadline], None],
        prompt_tokens: int,
    ) -> bool:
        """Ask the daemon to fetch the missing keys from other nodes, then search again for those.
        It may take as long as computing their tokens. True: all of them came, and there may be
        more."""
        mode = search.mode
        if mode is ClaimMode.ANY or search.gap is not MissReason.ABSENT or not self._shares():
            return False
        size, keys, counts = self._transport.max_batch_keys, search.keys, search.token_counts
        places: Sequence[int]
        if mode is ClaimMode.FIRST:
            end = search.positions[0] if search.positions else len(keys)
            places = search.usual(end)[:size]
            more = _Search(
                [keys[place] for place in places],
                None if counts is None else [counts[place] for place in places],
                mode,
            )
        else:
            places = range(len(search.entries), min(len(keys), len(search.entries) + size))
            missing = slice(places.start, places.stop)
            more = _Search(keys[missing], None if counts is None else counts[missing], mode)
        if not places:
            return False
        tokens = more.full_hit_tokens()
        if mode is ClaimMode.FIRST:
            tokens = tokens or prompt_tokens
            if tokens and search.entries:
                tokens = max(1, tokens - search.counts()[0])  # a longer prefix has those, too
        elif not tokens:
            tokens = ceil(prompt_tokens * len(more.keys) / len(keys))
        prefill_ms = self._benefit.prefill_ms(tokens)
        wait_ms = self._shared_wait_ms
        if prefill_ms is not None:
            wait_ms = min(wait_ms, prefill_ms)
        if not wait_ms or not self._transport.pull(more.keys, mode, wait_ms, deadline):
            return False
        step(more, 0, deadline)
        if mode is ClaimMode.FIRST and more.entries:
            for claim in search.claims:
                self._transport.forget(claim)
            search.claims, search.positions, search.entries = [], [], NO_ENTRIES
        search.claims += more.claims
        search.add([places[position] for position in more.positions], more.entries)
        search.gap = more.gap
        return mode is ClaimMode.RUN and len(more.entries) == len(more.keys)

    def _shares(self) -> bool:
        """May a search wait for entries of other nodes?"""
        return bool(self._shared_wait_ms) and self._transport.shares

    def _hit(self, search: _Search, prompt_tokens: int = 0, *, counted: bool = True) -> Hit:
        """Counts one hit or one miss."""
        lookup_tokens = prompt_tokens or search.full_hit_tokens()
        entries, keys, mode = search.entries, search.keys, search.mode
        counts = search.counts()
        worth = len(entries)
        if entries and mode is not ClaimMode.ANY and self._benefit.gates:
            worth = self._benefit.worth(entries, counts)
        complete = len(entries) == len(keys) or bool(entries and mode is ClaimMode.FIRST)
        slow = worth < len(entries)
        positions = search.positions
        found, shown = entries, counts
        if slow:
            found, shown, positions = entries.some(range(worth)), counts[:worth], positions[:worth]
        hit = Hit(
            self._reader,
            found,
            shown,
            claims=search.claims,
            positions=positions,
            miss=MissReason.SLOW if slow else None if complete and entries else search.gap,
        )
        if counted:
            missing = [Missing(MissReason.SLOW, sum(counts[worth:]))] if slow else []
            if search.positions[:1] != [0] or not complete:
                missing.append(Missing(search.gap, 0, search.first_missing()))
            if prompt_tokens and worth and not any(counts) and mode is not ClaimMode.FIRST:
                shown = [prompt_tokens // len(keys)] * worth
            self._counters.hit(found, shown, lookup_tokens, missing)
        if entries and not worth:
            self._reader.release([hit], None)
            return Hit(self._reader, miss=MissReason.SLOW)
        return hit

    # ---- restores by key

    def restore(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        buffers: Sequence[Payload],
        left_ms: Callable[[], int],
        *,
        counted: bool = True,
    ) -> RestoreResult:
        """Copy what is there of `keys` into `buffers`, one for each key. `left_ms`: the time left
        for the call, beside the time to move its bytes. `counted` as in `search`."""
        targets = all_flat(buffers, writable=True)
        if not keys:
            return restore_result(NO_ENTRIES, (), ())
        search = _Search(keys, token_counts, mode)
        found = self._fetch_found(search, targets, left_ms, counted=counted)
        if found is None:
            # In place nothing needs a pin; over gRPC a claim saves a look-up.
            pin = self._daemon_decides(mode) and self._transport.peek(()) is None
            deadline = Deadline(left_ms())
            hit = self.search(keys, token_counts, mode, 0, deadline, pin=pin, counted=counted)
            hit_buffers = [buffers[position] for position in hit.positions]
            try:
                result = self._reader.restore(hit, range(len(hit)), hit_buffers, left_ms())
            finally:
                hit.release(deadline_ms=left_ms())
        else:
            hit, result = found
        if len(hit) == len(keys):
            return result
        misses: list[MissReason | None] = [hit.miss or MissReason.ABSENT] * len(keys)
        for position, miss in zip(hit.positions, result.misses, strict=True):
            misses[position] = miss
        return restore_result(hit._found, hit.token_counts, misses)

    def _fetch_found(
        self,
        search: _Search,
        targets: Sequence[FlatBytes],
        left_ms: Callable[[], int],
        *,
        counted: bool,
    ) -> tuple[Hit, RestoreResult] | None:
        """Claim, read and release in one trip, counted as a search is; the hit pins nothing. None:
        the transport can't, and nothing was done."""
        keys, mode = search.keys, search.mode
        if len(keys) > self._transport.max_batch_keys or not self._daemon_decides(mode):
            return None
        room_bytes = [len(target) for target in targets]
        if self._transport.streams(sum(room_bytes)) > 1:
            return None  # two trips more, and the bytes at several times the speed
        begun: list[tuple[Hit, Restore]] = []

        def begin(claimed: Claimed) -> Sink:
            search.add(claimed.positions, claimed.entries, in_flight=claimed.in_flight)
            hit = self._hit(search, counted=counted)
            restore = self._reader.receive(hit, [targets[n] for n in hit.positions])
            begun.append((hit, restore))
            return restore

        deadline = Deadline(left_ms(), sum(room_bytes))
        stopped: MissReason | None = None
        try:
            if not self._transport.fetch_found(keys, mode, room_bytes, begin, deadline):
                return None
        except Exception as problem:
            stopped = self._failures.reason(problem)
        if not begun:
            search.gap = stopped or MissReason.UNEXPECTED
            return self._hit(search, counted=counted), restore_result(NO_ENTRIES, (), ())
        ((hit, restore),) = begun
        return hit, self._reader.received(hit, restore, stopped)

    def _daemon_decides(self, mode: ClaimMode) -> bool:
        """Does a search find exactly what the daemon itself has: nothing from other nodes, and
        nothing left out as too slow?"""
        return mode is ClaimMode.ANY or not (self._shares() or self._benefit.gates)


def _selected(results: Sequence[Found], mode: ClaimMode) -> tuple[list[int], list[Entry]]:
    """Positions and entries that `mode` selects of looked-up keys."""
    positions: list[int] = []
    entries: list[Entry] = []
    for position, result in enumerate(results):
        if result.entry is not None:
            positions.append(position)
            entries.append(result.entry)
            if mode is ClaimMode.FIRST:
                break
        elif mode is ClaimMode.RUN:
            break
    return positions, entries
