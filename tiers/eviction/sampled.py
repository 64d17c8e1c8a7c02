"""The LRU hit curve from a spatial sample: bounded memory, for live use and huge traces.

SHARDS (Waldspurger et al., FAST'15): a key is in the sample or not, for good, by a hash of
it. At a sampling rate R, a stack distance among sampled keys is R times the real one, and
every sampled access stands for 1/R accesses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import Generic

from .base import K
from .stack import StackDistances

#: where a key's position lies: 0 <= position < POSITIONS
POSITIONS = 1 << 64
#: distances are kept to this many significant bits: to 0.4 %
_DISTANCE_BITS = 8


def position_of_bytes(key: bytes) -> int:
    """The position of a key that is a hash already: its first 8 bytes."""
    return int.from_bytes(key[:8], "big")


def position_of_int(key: int) -> int:
    """The position of a number: two rounds of multiply and fold, so that neighbours part."""
    x = (key * 0x9E3779B97F4A7C15) & (POSITIONS - 1)
    x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & (POSITIONS - 1)
    return x ^ (x >> 32)


@dataclass(frozen=True, slots=True)
class CurveEstimate:
    """What a sample says: the value that hits at each capacity, and of what total.

    `capacities` ascend, `values[i]` is the value hit by an LRU cache of `capacities[i]` (and
    up to the next); `total` is the value of all accesses, hits or not.
    """

    capacities: list[int]
    values: list[float]
    total: float
    rate: float
    keys: int

    def at(self, capacity: int) -> float:
        """The value hit at a capacity."""
        index = bisect_right(self.capacities, capacity)
        return self.values[index - 1] if index else 0.0


class SampledCurve(Generic[K]):
    """Stack distances of a sample of the keys, and what they say about every capacity.

    `position` hashes a key to 0 <= p < 2**64; the key is in the sample when p < rate * 2**64.
    With `max_keys` the rate falls whenever there are more distinct keys in the sample: the
    keys with the highest positions leave it, and what was counted so far keeps the weight it
    had (fixed-size SHARDS). Memory is then bounded, whatever is accessed: measured 210 bytes
    for each of 8,192 keys beside the keys themselves, which includes one number for each of
    at most 7,500 distances. About 0.5 us for each key of a run.

    Runs are accessed like in `StackDistances`: a key counts at a capacity only when it and
    the sampled keys before it in its run lie within. For chains, where a block is never
    accessed without those before it, that loses nothing: the keys before one were accessed
    with it, so they lie at most one run deeper.
    """

    def __init__(
        self,
        position: Callable[[K], int],
        *,
        rate: float = 1.0,
        max_keys: int | None = None,
        root_mru: bool = False,
    ) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"the sampling rate must be above 0 and at most 1, got {rate}")
        if max_keys is not None and max_keys < 1:
            raise ValueError(f"a sample must have room for at least one key, got {max_keys}")
        self._position = position
        self._threshold = max(1, round(rate * POSITIONS))
        self._max_keys = max_keys
        self._stack: StackDistances[K] = StackDistances(root_mru=root_mru)
        #: (-position, key) of the sampled keys, when their number is bounded
        self._highest: list[tuple[int, K]] = []
        #: distance -> value that hits from there on
        self._values: dict[int, float] = {}
        #: value of all accesses, and of the sampled ones scaled up
        self._total = 0
        self._sampled = 0.0

    @property
    def rate(self) -> float:
        """The part of all keys that is sampled now."""
        return self._threshold / POSITIONS

    def __len__(self) -> int:
        """Distinct keys in the sample."""
        return len(self._stack)

    def access(
        self,
        keys: Sequence[K],
        values: Sequence[int] | None = None,
        weights: Sequence[int] | None = None,
    ) -> None:
        """Access a run: `values` is what a hit of each key is worth (tokens; None: 1 each),
        `weights` what each takes of the capacity (bytes; None: 1 each)."""
        threshold, position = self._threshold, self._position
        sample, sample_values, sample_weights = keys, values, weights
        if sample_values is None:
            sample_values = [1] * len(keys)
        if sample_weights is None:
            sample_weights = [1] * len(keys)
        self._total += sum(sample_values)
        if threshold < POSITIONS:  # else all of them are in the sample
            inside = [index for index, key in enumerate(keys) if position(key) < threshold]
            sample = [keys[index] for index in inside]
            sample_values = [sample_values[index] for index in inside]
            sample_weights = [sample_weights[index] for index in inside]
        if not sample:
            return
        scale = POSITIONS / threshold
        self._sampled += sum(sample_values) * scale
        if self._max_keys is not None:
            for key in dict.fromkeys(sample):
                if key not in self._stack:
                    heappush(self._highest, (-position(key), key))
        done = 0
        for distance, count in self._stack.access(sample, sample_weights):
            # The key's own weight is known; what lies above it is known in the sample only.
            own = sample_weights[done]
            full = _rounded(round((distance - own) * scale) + own)
            value = sum(sample_values[done:count]) * scale
            self._values[full] = self._values.get(full, 0.0) + value
            done = count
        self._shrink()

    def _shrink(self) -> None:
        """Lower the rate until the sample is within its bound."""
        while self._max_keys is not None and len(self._stack) > self._max_keys:
            self._drop_highest()
            while self._highest and -self._highest[0][0] >= self._threshold:
                self._drop_highest()

    def _drop_highest(self) -> None:
        negative, key = heappop(self._highest)
        self._threshold = max(1, -negative)
        self._stack.remove(key)

    def estimate(self) -> CurveEstimate:
        """The curve so far.

        What the sample has too little or too much of all accesses is taken for hits at the
        smallest distance (SHARDS-adj): the error comes from the few most popular keys being
        in the sample or not, and those always hit.
        """
        distances = sorted(self._values)
        missing = self._total - self._sampled
        sums = accumulate((self._values[distance] for distance in distances), initial=missing)
        values = [min(max(value, 0.0), float(self._total)) for value in sums]
        return CurveEstimate([0, *distances], values, float(self._total), self.rate, len(self))


def _rounded(distance: int) -> int:
    """To the nearest with at most `_DISTANCE_BITS` significant bits."""
    shift = max(0, distance.bit_length() - _DISTANCE_BITS)
    return (distance + (1 << shift >> 1)) >> shift << shift
