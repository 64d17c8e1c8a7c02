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
from dataclasses import asdict, dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any, Final, TypeAlias

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction.stack_distance import SampledCurve, position_of_int
from .simulate import TouchOrder
from .trace import TraceColumns, tokens_of_blocks

#: Points of a curve in a document or a chart.
DEFAULT_POINTS = 256
#: So many references share one sum, as bits to shift by, and so many sums one of the next level.
_LEAF_BITS: Final = 8
_SUM_BITS: Final = 4
_LAST_SUM: Final = (1 << _SUM_BITS) - 1
#: A reference has so many bytes.
_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hits of an LRU cache of one size."""

    capacity_blocks: int
    hit_tokens: int
    hit_rate: float

    def to_json(self, block_bytes: int | None = None) -> dict[str, Any]:
        point = asdict(self)
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


#: Blocks of a request that were last referenced in a row, too: the place of the first of them in
#: the request, their number, and how large a cache must be to hold the first. With the root most
#: recent, each further block takes one more; else each takes one less.
Row: TypeAlias = tuple[int, int, int]


class RecencyStack:
    """The blocks of a trace by their last reference, from request to request: how large an LRU
    cache must be for each block reference to hit.

    `tiers.eviction.stack_distance` knows the same of any stream of keys, one key after the other.
    Here the whole trace is there in columns, and a prompt has many blocks in a row that an earlier
    prompt had in a row, too: such a row is found, measured and moved as one.

    `root_mru`: a request touches its blocks in reverse, so that its first one ends up as the most
    recent. Memory: about 1.1 bytes for each reference and 8 for each different block, beside the
    trace.
    """

    def __init__(self, trace: TraceColumns, *, root_mru: bool) -> None:
        self._bytes = memoryview(trace.references).cast("B")
        self._ends = trace.ends
        self._root_mru = root_mru
        #: The last reference of each block.
        self._last = array("Q", bytes(8 * trace.unique_blocks))
        #: Blocks that were referenced: their numbers are below it.
        self._known = 0
        #: 1 for the last reference of each block so far, else 0.
        self._live = bytearray(trace.blocks)
        #: The sums of `_live`, then sums of sums, up to one.
        self._levels: list[list[int]] = []
        size, bits = trace.blocks, _LEAF_BITS
        while size:
            size = size >> bits
            self._levels.append([0] * (size + 1))
            bits = _SUM_BITS

    def reference(self, index: int, blocks: list[int]) -> list[Row]:
        """Reference the blocks of request `index`; the requests come in order, each of them once.
        Returns what was known of its beginning; blocks after the first new one are in no row."""
        start = self._ends[index - 1] if index else 0
        if len(set(blocks)) < len(blocks):
            return self._repeated(start, blocks)
        last, known, live = self._last, self._known, self._live
        count = len(blocks)
        rows: list[Row] = []
        first = 0
        while first < count and (block := blocks[first]) < known:
            place = last[block]
            distance, most = self._distance(place)
            if most > count - first:
                most = count - first
            later = live.find(0, place, place + most)
            if later >= 0:
                most = later - place
            if most > 1:
                most = self._same(place, start + first, most)
            rows.append((first, most, distance))
            first += most
        if first < count:
            # New blocks are numbered on: if the last one has this number, all of them are new.
            if blocks[-1] - known != count - first - 1:
                for block in blocks[first:]:
                    if block < known:
                        self._forget(last[block], 1)
            self._known = max(known, max(blocks) + 1)
        for first, most, _ in rows:
            self._forget(last[blocks[first]], most)
        for place, block in enumerate(blocks, start):
            last[block] = place
        live[start : start + count] = b"\1" * count
        self._count(start, count, 1)
        return rows

    def _distance(self, place: int) -> tuple[int, int]:
        """How large a cache must be to hold the block last referenced at `place`, and how many
        references from there on are moved alike."""
        if not self._root_mru:
            return self._from(place), len(self._live)
        owner = bisect_right(self._ends, place)
        end = self._ends[owner]
        before = self._ends[owner - 1] if owner else 0
        return self._from(end) + self._live.count(1, before, place + 1), end - place

    def _same(self, place: int, start: int, most: int) -> int:
        """How many of `most` blocks from `start` on are those from `place` on."""
        ours = self._bytes[place * _BYTES : (place + most) * _BYTES]
        its = self._bytes[start * _BYTES : (start + most) * _BYTES]
        if ours == its:
            return most
        # The lowest bit in which they differ.
        other = int.from_bytes(ours, "little") ^ int.from_bytes(its, "little")
        return ((other & -other).bit_length() - 1) // (8 * _BYTES)

    def _repeated(self, start: int, blocks: list[int]) -> list[Row]:
        """The same for a request that has a block twice."""
        last, known = self._last, self._known
        rows: list[Row] = []
        for first, block in enumerate(blocks):
            if block >= known:
                break
            rows.append((first, 1, self._distance(last[block])[0]))
        for block in {block for block in blocks if block < known}:
            self._forget(last[block], 1)
        places = list(enumerate(blocks, start))
        # The last touch of a repeated block counts: with the root most recent, its first place.
        for place, block in reversed(places) if self._root_mru else places:
            last[block] = place
        for block in set(blocks):
            self._live[last[block]] = 1
            self._count(last[block], 1, 1)
        self._known = max(known, max(blocks) + 1)
        return rows

    def _from(self, place: int) -> int:
        """How many blocks have their last reference at `place` or later."""
        index = (place >> _LEAF_BITS) + 1
        found = self._live.count(1, place, index << _LEAF_BITS)
        for sums in self._levels:
            last = index | _LAST_SUM
            found += sum(sums[index : last + 1])
            index = (last >> _SUM_BITS) + 1
        return found

    def _forget(self, place: int, count: int) -> None:
        """These references are not the last of their blocks any more."""
        self._live[place : place + count] = bytes(count)
        self._count(place, count, -1)

    def _count(self, place: int, count: int, sign: int) -> None:
        """Count so many references in the sums, or no more."""
        while count:
            leaf = place >> _LEAF_BITS
            some = ((leaf + 1) << _LEAF_BITS) - place
            if some > count:
                some = count
            place += some
            count -= some
            some *= sign
            for sums in self._levels:
                sums[leaf] += some
                leaf >>= _SUM_BITS


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
