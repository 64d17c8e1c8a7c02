"""LRU hit tokens at every capacity: exact in one pass, or estimated from a sample.

A block is a hit at capacity C only if it and all blocks before it in its request are among the C
most recent different blocks when the request arrives. So a prefix needs a capacity equal to the
largest stack distance in it, and adding up the tokens by that capacity gives the curve: the LRU
replay (`simulate`) at all capacities at once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction.stack_distance import SampledCurve, position_of_int
from .recency import RecencyStack
from .simulate import TouchOrder
from .trace import Request, TraceColumns, tokens_of_blocks

#: Points of a curve in a document or a chart.
DEFAULT_POINTS = 256


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hits of an LRU cache of one size."""

    capacity_blocks: int
    hit_tokens: int
    hit_rate: float

    def to_json(self, block_bytes: int | None = None) -> dict[str, Any]:
        point: dict[str, Any] = {
            "capacity_blocks": self.capacity_blocks,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
        }
        if block_bytes is not None:
            point["capacity_bytes"] = self.capacity_blocks * block_bytes
        return point


@dataclass(frozen=True, slots=True)
class Sample:
    """The blocks that a sampled curve saw: their share, and their number."""

    rate: float
    blocks: int


@dataclass(frozen=True, slots=True)
class LruCurve:
    """Hit tokens of LRU as a function of the capacity: a staircase.

    `capacities` ascend. From `capacities[i]` blocks up to the next, `tokens[i]` tokens are hit.
    Exact if `sample` is None, else an estimate. `seconds` is the time of the measurement.
    """

    touch_order: TouchOrder
    block_tokens: int
    requests: int
    prompt_tokens: int
    #: Different blocks; an estimate if the curve is sampled.
    unique_blocks: int
    capacities: Sequence[int]
    tokens: Sequence[int]
    seconds: float
    sample: Sample | None = None

    def hit_tokens(self, capacity_blocks: int) -> int:
        """Hit tokens at a capacity."""
        index = bisect_right(self.capacities, capacity_blocks)
        return self.tokens[index - 1] if index else 0

    def hit_rate(self, capacity_blocks: int) -> float:
        """Hit tokens at a capacity over all prompt tokens, 0 to 1."""
        return self.point(capacity_blocks).hit_rate

    @property
    def infinite_hit_tokens(self) -> int:
        """Hit tokens of a cache without limits."""
        return self.tokens[-1] if self.tokens else 0

    def point(self, capacity_blocks: int) -> CurvePoint:
        tokens = self.hit_tokens(capacity_blocks)
        rate = tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return CurvePoint(capacity_blocks, tokens, rate)

    def points(self, most: int = DEFAULT_POINTS) -> list[CurvePoint]:
        """At most `most` points (at least 2), evenly spaced on a logarithmic axis from one block to
        the smallest capacity with all possible hits."""
        last = max(1, self.capacities[-1]) if self.capacities else 1
        steps = max(2, most) - 1
        return [
            self.point(c) for c in sorted({round(last ** (i / steps)) for i in range(steps + 1)})
        ]

    def knee(self) -> CurvePoint | None:
        """The point where more memory starts to pay less than on average; None without any hit.

        It is the point of the staircase that is highest above the straight line from the origin to
        the smallest capacity with all possible hits (Satopää et al., 2011, both axes scaled to 1).
        """
        if not self.infinite_hit_tokens:
            return None
        capacity, tokens = self.capacities[-1], self.tokens[-1]
        best = max(
            range(len(self.capacities)),
            key=lambda i: self.tokens[i] / tokens - self.capacities[i] / capacity,
        )
        return self.point(self.capacities[best])

    def to_json(
        self, *, most_points: int = DEFAULT_POINTS, block_bytes: int | None = None
    ) -> dict[str, Any]:
        knee = self.knee()
        found = {
            "policy": "lru",
            "touch_order": self.touch_order.value,
            "unique_blocks": self.unique_blocks,
            "seconds": self.seconds,
            "knee": None if knee is None else knee.to_json(block_bytes),
            "points": [point.to_json(block_bytes) for point in self.points(most_points)],
        }
        if self.sample is not None:
            found |= {"sample_rate": self.sample.rate, "sampled_blocks": self.sample.blocks}
        return found


@dataclass(frozen=True, slots=True)
class CurveError:
    """How far an estimated curve is from the exact one, in hit rate (0.01: one point)."""

    mean_absolute_error: float
    max_absolute_error: float


def curve_of(
    requests: Iterable[Request],
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    touch_order: TouchOrder = TouchOrder.IN_ORDER,
) -> LruCurve:
    """The exact curve of requests, read once. Needs the memory of `TraceColumns`."""
    trace = TraceColumns.load(requests)
    return exact_curve(trace, block_tokens=block_tokens, touch_order=touch_order)


def exact_curve(
    trace: TraceColumns,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    touch_order: TouchOrder = TouchOrder.IN_ORDER,
) -> LruCurve:
    """The exact curve of a trace: one pass over its rows of blocks (`RecencyStack`)."""
    started = perf_counter()
    root_mru = touch_order is TouchOrder.ROOT_MRU
    stack = RecencyStack(trace, root_mru=root_mru)
    #: Tokens that hit from each capacity on, and the blocks of `block_tokens` that hit from each
    #: capacity on, as the differences from one capacity to the next.
    tokens = array("q", bytes(8 * (trace.unique_blocks + 2)))
    blocks_more = array("q", bytes(8 * (trace.unique_blocks + 2)))
    for index, (blocks, length) in enumerate(trace):
        deepest = covered = 0
        for first, count, distance in stack.reference(index, blocks):
            end = first + count
            below = deepest
            if not root_mru:
                # All of the row within the distance of its first block.
                within = count
                if distance > deepest:
                    below = deepest = distance
            else:
                # The blocks within `deepest` need no more than those before them, and each further
                # one needs one more.
                within = min(max(deepest - distance + 1, 0), count)
                if within < count:
                    deepest = distance + count - 1
                    blocks_more[distance + within] += 1
                    blocks_more[distance + count] -= 1
                    for late in range(max(first + within, length // block_tokens), end):
                        missing = block_tokens - max(length - late * block_tokens, 0)
                        tokens[distance + late - first] -= missing
            if within:
                tokens[below] += min((first + within) * block_tokens, length) - covered
            covered = min(end * block_tokens, length)
    capacities, tokens_so_far = array("q"), array("q")
    hit = 0
    for capacity, more in enumerate(accumulate(blocks_more)):
        found = tokens[capacity] + more * block_tokens
        if found:
            hit += found
            capacities.append(capacity)
            tokens_so_far.append(hit)
    return LruCurve(
        touch_order,
        block_tokens,
        len(trace),
        trace.prompt_tokens,
        trace.unique_blocks,
        capacities,
        tokens_so_far,
        perf_counter() - started,
    )


def sampled_curve(
    runs: Iterable[tuple[Sequence[int], int]],
    *,
    rate: float = 1.0,
    max_blocks: int | None = None,
    seed: int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    touch_order: TouchOrder = TouchOrder.IN_ORDER,
) -> LruCurve:
    """The curve from a spatial sample of the blocks: a fixed rate, or at most `max_blocks` and the
    rate that this allows (`SampledCurve`). Another seed gives another sample.

    Raises ValueError for a rate outside (0, 1] or `max_blocks` below 1.
    """
    shift = position_of_int(seed)
    sample: SampledCurve[int] = SampledCurve(
        lambda block: position_of_int(block + shift),
        rate=rate,
        max_keys=max_blocks,
        root_mru=touch_order is TouchOrder.ROOT_MRU,
    )
    requests = prompt_tokens = 0
    started = perf_counter()
    for blocks, input_length in runs:
        requests += 1
        prompt_tokens += input_length
        sample.access(blocks, tokens_of_blocks(len(blocks), input_length, block_tokens))
    estimate = sample.estimate()
    return LruCurve(
        touch_order,
        block_tokens,
        requests,
        prompt_tokens,
        round(len(sample) / sample.rate),
        estimate.capacities,
        [round(value) for value in estimate.values],
        perf_counter() - started,
        Sample(sample.rate, len(sample)),
    )


def curve_error(exact: LruCurve, estimate: LruCurve) -> CurveError:
    """Compare two curves at the points of the exact one."""
    errors = [
        abs(point.hit_rate - estimate.hit_rate(point.capacity_blocks)) for point in exact.points()
    ]
    return CurveError(sum(errors) / len(errors), max(errors))
