"""Is loading a hit faster than computing it again? Measured, not assumed.

A hit that takes longer to load than its prefill would have is no hit. The client is told the
speed of the prefill; the speed of loading it measures itself, per tier, on what it restores.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from ..proto.errors import InvalidSize
from ..proto.vocabulary import Tier
from .results import Entry

#: What a measurement still weighs after the next one: about the last ten restores count.
DECAY: Final = 0.9
#: Of this many hits that look too slow one is loaded all the same, to measure again: the tier
#: may have recovered, and nothing else would tell.
RETRY_EVERY: Final = 32


class LoadSpeeds:
    """Payload bytes per second of each tier, over its latest restores. Thread-safe.

    The ratio of exponentially weighted sums, so that a restore counts by its size: the fixed
    cost of a call does not make large hits look slow after many small ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Tier, tuple[float, float]] = {}

    def measured(self, tier: Tier, payload_bytes: int, seconds: float) -> None:
        """One restore took `seconds` for the bytes that it loaded from `tier`."""
        with self._lock:
            sum_bytes, sum_s = self._sums.get(tier, (0.0, 0.0))
            self._sums[tier] = (sum_bytes * DECAY + payload_bytes, sum_s * DECAY + seconds)

    def estimate_s(self, tier: Tier, payload_bytes: int) -> float:
        """How long loading `payload_bytes` takes; 0 as long as nothing was measured."""
        with self._lock:
            sum_bytes, sum_s = self._sums.get(tier, (0.0, 0.0))
        return payload_bytes * sum_s / sum_bytes if sum_bytes else 0.0

    def snapshot(self) -> dict[str, float]:
        """Bytes per second by tier, for those that were measured."""
        with self._lock:
            return {
                tier.label: sum_bytes / sum_s
                for tier, (sum_bytes, sum_s) in self._sums.items()
                if sum_s > 0
            }


class MinBenefit:
    """The gate: how much of a hit is worth loading."""

    def __init__(
        self, speeds: LoadSpeeds, prefill_tokens_per_s: float | None, min_benefit_ms: float = 0.0
    ) -> None:
        """`prefill_tokens_per_s` None: everything is. `min_benefit_ms`: what loading has to
        save over computing. Raises InvalidSize for a speed that is not above 0."""
        if prefill_tokens_per_s is not None and not prefill_tokens_per_s > 0:
            raise InvalidSize(f"a prefill speed is above 0 tokens/s, not {prefill_tokens_per_s}")
        if not min_benefit_ms >= 0:
            raise InvalidSize(f"a benefit is at least 0 ms, not {min_benefit_ms}")
        self._speeds = speeds
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._min_benefit_s = min_benefit_ms / 1e3
        self._lock = threading.Lock()
        self._skipped = 0

    @property
    def gates(self) -> bool:
        """May there be something that is not worth loading?"""
        return self._prefill_tokens_per_s is not None

    def prefill_ms(self, token_count: int) -> int:
        """How long the engine would compute these tokens; 0: not known."""
        if self._prefill_tokens_per_s is None:
            return 0
        return round(1e3 * token_count / self._prefill_tokens_per_s)

    def worth(self, entries: Sequence[Entry], token_counts: Sequence[int]) -> int:
        """How many of `entries`, from the first on, to load: as many as save the most time.

        All of them for every `RETRY_EVERY`-th hit that should be cut, and where a token count is
        0: unknown, so that nothing can be said.
        """
        if self._prefill_tokens_per_s is None or 0 in token_counts:
            return len(entries)
        best, best_s, saved_s = 0, self._min_benefit_s, 0.0
        for count, (entry, tokens) in enumerate(zip(entries, token_counts, strict=True), 1):
            saved_s += tokens / self._prefill_tokens_per_s
            saved_s -= self._speeds.estimate_s(entry.tier, entry.payload_bytes)
            if saved_s >= best_s:
                best, best_s = count, saved_s
        if best < len(entries):
            with self._lock:
                self._skipped += 1
                if self._skipped % RETRY_EVERY == 0:
                    return len(entries)
        return best
