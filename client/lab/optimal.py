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
from heapq import heapify, heappop, heappush

from .trace import TraceColumns

#: The name beside the policies. It is none: a daemon doesn't know the future.
OPTIMAL = "optimal"
_NEVER = (1 << 63) - 1


class Optimum:
    """The optimum of a trace at any capacity. 9 bytes for each block reference, and as much again
    for those that are kept."""

    def __init__(self, trace: TraceColumns) -> None:
        self._trace = trace
        self._next_uses = _next_uses(trace)

    def hits(self, capacity_blocks: int) -> tuple[array[int], int, int]:
        """The hit blocks of each request, in order; blocks kept at the end, and evictions."""
        next_uses = self._next_uses
        # The cache as the block references that it will serve. The heap has the farthest first;
        # references that have passed sink to its end, where nothing looks for them.
        kept = bytearray(len(next_uses))
        farthest: list[int] = []
        hits = array("q")
        size = evictions = start = 0
        for blocks, _ in self._trace:
            end = start + len(blocks)
            found = kept.count(1, start, end)
            if found and len(blocks) > 1 and found < len(blocks):
                found += _repeated(kept, blocks, start)
            hits.append(found)
            size -= kept.count(1, start, end)
            for use in next_uses[start:end]:
                if use != _NEVER and not kept[use]:
                    kept[use] = 1
                    heappush(farthest, -use)
                    size += 1
            while size > capacity_blocks:
                kept[-heappop(farthest)] = 0
                size -= 1
                evictions += 1
            if len(farthest) > 2 * size + 1024:
                farthest = [use for use in farthest if -use >= end]
                heapify(farthest)
            start = end
        return hits, size, evictions


def _next_uses(trace: TraceColumns) -> array[int]:
    """For each block reference, the first reference of the next request that has the block."""
    uses = array("q", bytes(8 * trace.blocks))
    next_use = array("q", [_NEVER]) * trace.unique_blocks
    start = trace.blocks
    for blocks in trace.reversed_blocks():
        start -= len(blocks)
        uses[start : start + len(blocks)] = array("q", [next_use[block] for block in blocks])
        for index in range(len(blocks) - 1, -1, -1):
            next_use[blocks[index]] = start + index
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
