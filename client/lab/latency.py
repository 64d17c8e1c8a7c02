"""How long something took, many times over, in constant memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Final

#: Buckets between a value and its double: quantiles are exact to 1 / (2 * 64), 0.8 %.
_PER_OCTAVE: Final = 64


class Latencies:
    """A histogram of durations with buckets of equal relative width. Mergeable."""

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        #: how many durations fell into bucket b: the octave and its part, as one number
        self._buckets: Counter[int] = Counter(buckets or {})
        #: all durations together
        self.total_ns = 0

    def add(self, duration_ns: int) -> None:
        """One more; what is below a nanosecond counts as one."""
        self.total_ns += duration_ns
        mantissa, exponent = math.frexp(max(duration_ns, 1))
        part = int((mantissa - 0.5) * 2 * _PER_OCTAVE)
        self._buckets[exponent * _PER_OCTAVE + part] += 1

    def merge(self, other: Latencies) -> None:
        """Add everything that `other` has seen."""
        self._buckets.update(other._buckets)
        self.total_ns += other.total_ns

    @property
    def count(self) -> int:
        return self._buckets.total()

    def quantile_ms(self, share: float) -> float | None:
        """The duration that `share` of them (0 ... 1) do not exceed; None when there is none."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share is in 0 ... 1, not {share}")
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return _middle_ns(bucket) / 1e6
        return None


def _middle_ns(bucket: int) -> float:
    exponent, part = divmod(bucket, _PER_OCTAVE)
    return math.ldexp(0.5 + (part + 0.5) / (2 * _PER_OCTAVE), exponent)
