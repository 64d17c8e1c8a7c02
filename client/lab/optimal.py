"""The optimum: the most blocks of a trace that any cache of a size could hit.

Belady's rule, which knows the future, for whole requests: after each request a cache may keep any
blocks that it held before or that the request brought, at most its capacity; it keeps those that
are used again soonest, and of those used by the same request the ones nearest to the root.

**What is optimal.** The number of hit blocks: no policy, whatever it admits, keeps or drops, hits
more blocks at this capacity. A block that is kept is used again no earlier than the blocks before
it in its prompt, so these are kept, too, and every hit is in the prefix that is hit; this needs ids
that stand for whole prefixes (`TraceColumns.collisions` is 0). For other traces the number is an
upper bound. Tokens are those of the hit blocks, so for prompts of whole blocks they are optimal as
well; where last blocks are partial, another choice of as many blocks can have a few more tokens.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush, heapreplace

from .trace import TraceColumns

#: The name beside the policies. It is none: a daemon doesn't know the future.
OPTIMAL = "optimal"
_NEVER = (1 << 63) - 1


class Optimum:
    """The optimum of a trace at any capacity. 9 bytes for each block reference, and a few for each
    row of references that is kept."""

    def __init__(self, trace: TraceColumns) -> None:
        self._trace = trace
        self._next_uses = _next_uses(trace)

    def hits(self, capacity_blocks: int) -> tuple[array[int], int, int]:
        """The hit blocks of each request, in order; blocks kept at the end, and evictions."""
        next_uses = self._next_uses
        # The cache as the block references that it will serve, and these as rows without gaps: what
        # a prompt shares with a later one is one row. The heap has the farthest first, as (-last,
        # first); rows that have passed sink to its end, where nothing looks for them.
        kept = bytearray(len(next_uses))
        farthest: list[tuple[int, int]] = []
        hits = array("q")
        size = evictions = start = 0
        for blocks, _ in self._trace:
            end = start + len(blocks)
            held = found = kept.count(1, start, end)
            if found and len(blocks) > 1 and found < len(blocks):
                found += _repeated(kept, blocks, start)
            hits.append(found)
            size -= held
            for first, last in _rows(next_uses[start:end]):
                count = last + 1 - first
                size += count - kept.count(1, first, last + 1)
                kept[first : last + 1] = b"\1" * count
                heappush(farthest, (-last, first))
            while size > capacity_blocks:
                last, first = -farthest[0][0], max(farthest[0][1], end)
                least = max(first, last + 1 - (size - capacity_blocks))
                dropped = kept.count(1, least, last + 1)
                kept[least : last + 1] = bytes(last + 1 - least)
                size -= dropped
                evictions += dropped
                if least > first:
                    heapreplace(farthest, (1 - least, first))
                else:
                    heappop(farthest)
            if len(farthest) > 2 * size + 1024:
                farthest = [row for row in farthest if -row[0] >= end]
                heapify(farthest)
            start = end
        return hits, size, evictions


def _rows(uses: array[int]) -> list[tuple[int, int]]:
    """The numbers of `uses` but for `_NEVER`, as rows without gaps: (first, last) of each."""
    rows: list[tuple[int, int]] = []
    first = last = -2
    for use in uses:
        if use != last + 1:
            if first >= 0:
                rows.append((first, last))
            first = use if use != _NEVER else -2
        last = use
    if first >= 0:
        rows.append((first, last))
    return rows


def _next_uses(trace: TraceColumns) -> array[int]:
    """For each block reference, the first reference of the next request that has the block."""
    uses = array("q", bytes(8 * trace.blocks))
    next_use = array("q", [_NEVER]) * trace.unique_blocks
    start = trace.blocks
    for blocks in trace.reversed_blocks():
        start -= len(blocks)
        end = start + len(blocks)
        uses[start:end] = array("q", map(next_use.__getitem__, blocks))
        for block, place in zip(reversed(blocks), range(end - 1, start - 1, -1), strict=True):
            next_use[block] = place
    return uses


def _repeated(kept: bytearray, blocks: list[int], start: int) -> int:
    """The references of a request to a block that is kept and that it already had."""
    if len(set(blocks)) == len(blocks):
        return 0
    first: dict[int, int] = {}
    more = 0
    for index, block in enumerate(blocks):
        if first.setdefault(block, index) != index:
            more += kept[start + first[block]]
    return more
