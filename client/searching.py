"""From keys to a hit: one question to the daemon, and what is made of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto.errors import CallerError, InvalidBatch, PrefixdError
from ..proto.keys import Key, check_key
from .benefit import MinBenefit
from .counters import Counters
from .deadline import Deadline
from .hit import Hit
from .reading import Reader
from .results import NOT_FOUND, ClaimMode, Entry, Found, MissReason, Presence, miss_reason
from .transport import Transport


class Searcher:
    """Searches for one client. Thread-safe.

    `token_counts` say what each key stands for, where the caller knows; None is what the entry
    says of itself.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        counters: Counters,
        benefit: MinBenefit,
        *,
        lease_ms: int,
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._counters = counters
        self._benefit = benefit
        self._lease_ms = lease_ms

    def claim(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
    ) -> Hit:
        """What `mode` wants of the keys, pinned; one rpc, or none without keys."""
        self._counters.add("lookups")
        if not keys:
            return self._miss(MissReason.ABSENT)
        try:
            claimed = self._transport.claim(keys, mode, wait_ms, self._lease_ms, deadline)
        except CallerError:
            raise
        except PrefixdError as problem:
            return self._miss(miss_reason(problem))
        gap = MissReason.IN_FLIGHT if claimed.in_flight else MissReason.ABSENT
        if claimed.holding is None:
            return self._miss(gap)
        entries, positions = claimed.entries, claimed.positions
        counts = _counts(entries, positions, token_counts)
        worth = len(entries)
        if mode is not ClaimMode.ANY:
            worth = self._benefit.worth(entries, counts)
        complete = mode is ClaimMode.FIRST or len(entries) == len(keys)
        hit = Hit(
            self._reader,
            entries[:worth],
            counts[:worth],
            holding=claimed.holding,
            miss=MissReason.SLOW if worth < len(entries) else None if complete else gap,
        )
        if not worth:
            self._reader.release([hit], None)
            return self._miss(MissReason.SLOW)
        self._counters.hit(hit.entries, hit.token_counts)
        return hit

    def look(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
    ) -> Hit:
        """What `mode` wants of the keys, not pinned; in place if possible, else one rpc."""
        self._counters.add("lookups")
        if not keys:
            return self._miss(MissReason.ABSENT)
        gap = MissReason.ABSENT
        try:
            # The index knows nothing of saves in flight: whoever waits for those has to ask.
            found = None if wait_ms else self._transport.find(keys, mode, deadline)
            if found is None:
                answers = self._transport.lookup(list(keys), wait_ms, deadline)
                found = _wanted(answers, mode)
                if any(answer.presence is Presence.IN_FLIGHT for answer in answers):
                    gap = MissReason.IN_FLIGHT
        except CallerError:
            raise
        except PrefixdError as problem:
            return self._miss(miss_reason(problem))
        if not found:
            return self._miss(gap)
        entries = [entry for _, entry in found]
        counts = _counts(entries, [position for position, _ in found], token_counts)
        worth = self._benefit.worth(entries, counts)
        if not worth:
            return self._miss(MissReason.SLOW)
        complete = mode is ClaimMode.FIRST or len(entries) == len(keys)
        miss = MissReason.SLOW if worth < len(entries) else None if complete else gap
        hit = Hit(self._reader, entries[:worth], counts[:worth], miss=miss)
        self._counters.hit(hit.entries, hit.token_counts)
        return hit

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> list[bool]:
        """Which keys are published; none when the daemon can't be asked."""
        try:
            return self._transport.exist(keys, deadline)
        except CallerError:
            raise
        except PrefixdError as problem:
            self._counters.miss(miss_reason(problem))
            return [False] * len(keys)

    def probe(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """What is known of each key; nothing of any of them when the call fails."""
        try:
            return self._transport.lookup(keys, wait_ms, deadline)
        except CallerError:
            raise
        except PrefixdError as problem:
            self._counters.miss(miss_reason(problem))
            return [NOT_FOUND] * len(keys)

    def _miss(self, reason: MissReason) -> Hit:
        self._counters.miss(reason)
        return Hit(self._reader, miss=reason)


def _wanted(answers: Sequence[Found], mode: ClaimMode) -> list[tuple[int, Entry]]:
    """Positions and entries that `mode` wants of what was looked up."""
    wanted: list[tuple[int, Entry]] = []
    for position, answer in enumerate(answers):
        if answer.entry is not None:
            wanted.append((position, answer.entry))
            if mode is ClaimMode.FIRST:
                break
        elif mode is ClaimMode.RUN:
            break
    return wanted


def checked_keys(keys: Sequence[Key], max_keys: int) -> list[Key]:
    """Raises InvalidBatch, InvalidKey."""
    if not 0 < len(keys) <= max_keys:
        raise InvalidBatch(f"a batch has 1 ... {max_keys} keys, not {len(keys)}")
    return [check_key(key) for key in keys]


def _counts(
    entries: Sequence[Entry],
    positions: Sequence[int],
    token_counts: Sequence[int | None] | None,
) -> list[int]:
    if token_counts is None:
        return [entry.token_count for entry in entries]
    known = [token_counts[position] for position in positions]
    return [
        entry.token_count if count is None else count
        for entry, count in zip(entries, known, strict=True)
    ]
