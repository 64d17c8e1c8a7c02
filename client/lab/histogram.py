"""A histogram of whole numbers, such as tokens or nanoseconds, in bounded memory."""

from __future__ import annotations

#: log2 of the number of buckets between a value and its double. Quantiles are exact to 1/128.
_SUB_BITS = 7
_QUANTILES = (0.1, 0.5, 0.9, 0.99)


class LogHistogram:
    """Counts of integers from 0 up, in buckets at most 1/128 of their value wide.

    Memory is bounded by the number of octaves; below 256 it is exact.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.max = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count one value, which must not be negative."""
        self.count += 1
        self.total += value
        if value > self.max:
            self.max = value
        bucket = _bucket(value)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def quantile(self, fraction: float) -> int:
        """The value at rank `fraction * count`, up to 1/128 too small; 0 when empty."""
        rank = fraction * self.count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                shift = bucket >> (_SUB_BITS + 1)
                value = bucket & ((1 << (_SUB_BITS + 1)) - 1)
                return value << shift
        return 0

    def at_most(self, value: int) -> float:
        """The share of values that are at most `value`, exact to the width of a bucket."""
        last = _bucket(value)
        below = sum(count for bucket, count in self._buckets.items() if bucket <= last)
        return below / self.count if self.count else 0.0

    def summary(self) -> dict[str, float]:
        """`mean`, `p10`, `p50`, `p90`, `p99`, `max`."""
        quantiles = {f"p{round(q * 100)}": self.quantile(q) for q in _QUANTILES}
        mean = self.total / self.count if self.count else 0.0
        return {"mean": mean, **quantiles, "max": self.max}


def _bucket(value: int) -> int:
    shift = max(value.bit_length() - _SUB_BITS - 1, 0)
    return (shift << (_SUB_BITS + 1)) + (value >> shift)
