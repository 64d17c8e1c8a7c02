"""Would SIEVE or W-TinyLFU be worth adding? What they hit beside the policies, on traces.

Shows, at shares of the different blocks, the hit rate of the best of the five policies, of the
optimum and of each candidate, and which part of the gap between the first two it closes. Of both
touch orders, a candidate's better one counts.

    python tests/bench/bench_candidates.py conversation_trace.jsonl synthetic_trace.jsonl
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Protocol

from prefixd.client.lab.optimal import OPTIMAL
from prefixd.client.lab.simulate import Cell, replay
from prefixd.client.lab.trace import TraceColumns, TraceReader
from prefixd.tiers.eviction import POLICIES


class Candidate(Protocol):
    def __contains__(self, block: int) -> bool: ...
    def access(self, block: int) -> None: ...


class Sieve:
    """One queue and a hand that passes blocks that were used since it last came (Zhang et al.,
    NSDI 2024)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, bool] = {}
        self.newer: dict[int, int | None] = {}
        self.older: dict[int, int | None] = {}
        self.newest: int | None = None
        self.oldest: int | None = None
        self.hand: int | None = None

    def __contains__(self, block: int) -> bool:
        return block in self.used

    def access(self, block: int) -> None:
        if block in self.used:
            self.used[block] = True
            return
        if len(self.used) >= self.capacity:
            self._evict()
        self.used[block] = False
        self.newer[block], self.older[block] = None, self.newest
        if self.newest is not None:
            self.newer[self.newest] = block
        self.newest = block
        self.oldest = block if self.oldest is None else self.oldest

    def _evict(self) -> None:
        victim = self.oldest if self.hand is None else self.hand
        assert victim is not None
        while self.used[victim]:
            self.used[victim] = False
            newer = self.newer[victim]
            victim = self.oldest if newer is None else newer
            assert victim is not None
        del self.used[victim]
        self.hand = newer = self.newer.pop(victim)
        older = self.older.pop(victim)
        if newer is None:
            self.newest = older
        else:
            self.older[newer] = older
        if older is None:
            self.oldest = newer
        else:
            self.newer[older] = newer


class WTinyLfu:
    """A window in front of a segmented LRU that admits what is used more often than its victim
    (Einziger et al., 2017). Counts are exact, which the sketch of the paper approximates."""

    def __init__(self, capacity: int, window: float) -> None:
        self.capacity = capacity
        self.window_size = max(1, int(capacity * window))
        self.main_size = capacity - self.window_size
        self.window: OrderedDict[int, None] = OrderedDict()
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()
        self.counts: dict[int, int] = {}
        self.accesses = 0

    def __contains__(self, block: int) -> bool:
        return block in self.window or block in self.probation or block in self.protected

    def access(self, block: int) -> None:
        self._count(block)
        if block in self.window:
            self.window.move_to_end(block)
        elif block in self.protected:
            self.protected.move_to_end(block)
        elif block in self.probation:
            del self.probation[block]
            self.protected[block] = None
            if len(self.protected) > self.main_size * 0.8:
                self.probation[self.protected.popitem(last=False)[0]] = None
        else:
            self.window[block] = None
            if len(self.window) > self.window_size:
                self._admit(self.window.popitem(last=False)[0])

    def _count(self, block: int) -> None:
        self.counts[block] = min(self.counts.get(block, 0) + 1, 15)
        self.accesses += 1
        if self.accesses >= 10 * self.capacity:
            self.accesses //= 2
            self.counts = {key: count // 2 for key, count in self.counts.items() if count > 1}

    def _admit(self, block: int) -> None:
        if len(self.probation) + len(self.protected) < self.main_size:
            self.probation[block] = None
        elif self.probation:
            victim = next(iter(self.probation))
            if self.counts.get(block, 0) > self.counts.get(victim, 0):
                del self.probation[victim]
                self.probation[block] = None


def hit_tokens(trace: TraceColumns, cache: Candidate, block_tokens: int, root_mru: bool) -> int:
    """The hits of a candidate by the rules of a replay."""
    tokens = 0
    for blocks, length in trace:
        hits = 0
        while hits < len(blocks) and blocks[hits] in cache:
            hits += 1
        tokens += min(hits * block_tokens, length)
        for block in reversed(blocks) if root_mru else blocks:
            cache.access(block)
    return tokens


CANDIDATES = {
    "SIEVE": Sieve,
    "W-TinyLFU, window 1 %": lambda capacity: WTinyLfu(capacity, 0.01),
    "W-TinyLFU, window 20 %": lambda capacity: WTinyLfu(capacity, 0.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--shares", default="0.01,0.02,0.05,0.1,0.2")
    options = parser.parse_args()
    for path in options.traces:
        reader = TraceReader(path)
        block_tokens = reader.block_tokens
        trace = TraceColumns.load(reader)
        print(f"{path}: {len(trace):,} requests, {trace.unique_blocks:,} different blocks")
        for share in map(float, options.shares.split(",")):
            capacity = max(2, round(share * trace.unique_blocks))
            tokens = {
                policy: replay(trace, Cell(policy, capacity), block_tokens=block_tokens)
                for policy in (*POLICIES, OPTIMAL)
            }
            best, policy = max((tokens[p].total_hit_tokens, p) for p in POLICIES)
            optimum = tokens[OPTIMAL].total_hit_tokens
            shown = [f"{capacity:>7,} blocks: {policy} {best / trace.prompt_tokens:.2%}",
                     f"optimum {optimum / trace.prompt_tokens:.2%}"]  # fmt: skip
            for name, make in CANDIDATES.items():
                found = max(
                    hit_tokens(trace, make(capacity), block_tokens, order)
                    for order in (False, True)
                )
                gap = (found - best) / (optimum - best) if optimum > best else 0.0
                shown.append(f"{name} {found / trace.prompt_tokens:.2%} ({gap:+.0%} of the gap)")
            print("  " + "; ".join(shown))


if __name__ == "__main__":
    main()
