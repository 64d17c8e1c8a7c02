"""The offline replay: a trace against one policy at one capacity, exactly.

A request hits the longest run h_0 ... h_{k-1} of its blocks that is resident when it arrives,
without gaps and before any block of this request is admitted. Its hit tokens are
min(k * block_tokens, input_length). Then all its blocks, repeats included, are accessed once each:
first to last, or with `TouchOrder.ROOT_MRU` last to first, so that the root ends up as the most
recent. Every block weighs 1.
"""

from __future__ import annotations

import os
import signal
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction import make_policy
from ...tiers.eviction.lru import LRU
from ...tiers.eviction.s3fifo import S3FIFO, shares
from .optimal import OPTIMAL, Optimum
from .trace import TraceColumns

#: Block references times cells per process, below which starting one takes longer than it saves.
_WORTH_A_PROCESS = 2_000_000


class TouchOrder(StrEnum):
    """The order in which a request's blocks are accessed after its lookup."""

    IN_ORDER = "in-order"
    ROOT_MRU = "root-mru"


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay to run, of a policy or of the optimum. Raises ValueError for an unknown policy or
    a negative capacity."""

    policy: str
    capacity_blocks: int
    touch_order: TouchOrder = TouchOrder.IN_ORDER

    def __post_init__(self) -> None:
        if self.policy != OPTIMAL or self.capacity_blocks < 0:
            make_policy("lru" if self.policy == OPTIMAL else self.policy, self.capacity_blocks)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one replay. `seconds` excludes reading the trace."""

    cell: Cell
    total_hit_tokens: int
    total_prompt_tokens: int
    final_cache_blocks: int
    #: Blocks that stopped being resident.
    evictions: int
    ghost_blocks: int
    accesses: int
    #: How often the policy put a block into a queue or moved one, ghosts included.
    queue_moves: int
    seconds: float
    #: "p10", "p50", "p90" -> percentile of the hit tokens per request.
    hit_tokens_percentiles: dict[str, int]
    #: Prompt tokens and hit tokens of each request, in order.
    per_request: tuple[array[int], array[int]] | None = None

    @property
    def overall_hit_rate(self) -> float:
        """Hit tokens of all requests over their prompt tokens, 0 to 1."""
        return self.total_hit_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    @property
    def moves_per_access(self) -> float:
        return self.queue_moves / self.accesses if self.accesses else 0.0

    def to_json(self) -> dict[str, Any]:
        """This replay's entry in the JSON document; `per_request` only if it was recorded."""
        entry: dict[str, Any] = {
            "policy": self.cell.policy,
            "capacity_blocks": self.cell.capacity_blocks,
            "touch_order": self.cell.touch_order.value,
            "total_hit_tokens": self.total_hit_tokens,
            "total_prompt_tokens": self.total_prompt_tokens,
            "overall_hit_rate": self.overall_hit_rate,
            "final_cache_blocks": self.final_cache_blocks,
            "evictions": self.evictions,
            "ghost_blocks": self.ghost_blocks,
            "accesses": self.accesses,
            "seconds": self.seconds,
            "hit_tokens_per_request": self.hit_tokens_percentiles,
            "queue_moves": self.queue_moves,
            "moves_per_access": self.moves_per_access,
        }
        if self.per_request is not None:
            entry["per_request"] = [
                {"prompt_tokens": prompt, "hit_tokens": hit}
                for prompt, hit in zip(*self.per_request, strict=True)
            ]
        return entry


def replay(
    trace: TraceColumns,
    cell: Cell,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    per_request: bool = False,
) -> ReplayResult:
    """Replay a trace once. Raises ValueError when a block has no tokens."""
    if block_tokens < 1:
        raise ValueError(f"a block must have at least one token, got {block_tokens}")
    if cell.policy == OPTIMAL:
        run = _optimum
    elif cell.policy == LRU.name and cell.capacity_blocks:
        run = _lru
    elif cell.policy == S3FIFO.name and cell.capacity_blocks:
        run = _s3fifo
    else:
        run = _any_policy
    started = perf_counter()
    outcome = run(trace, cell, block_tokens)
    seconds = perf_counter() - started
    prompt_tokens = array("q", trace.lengths)
    return ReplayResult(
        cell=cell,
        total_hit_tokens=sum(outcome.hit_tokens),
        total_prompt_tokens=sum(prompt_tokens),
        final_cache_blocks=outcome.kept,
        evictions=outcome.evictions,
        ghost_blocks=outcome.ghosts,
        accesses=trace.blocks,
        queue_moves=outcome.moves,
        seconds=seconds,
        hit_tokens_percentiles=_percentiles(outcome.hit_tokens),
        per_request=(prompt_tokens, outcome.hit_tokens) if per_request else None,
    )


class _Outcome(NamedTuple):
    """What became of a trace: the hit tokens of each request, blocks that are kept at the end,
    evictions, and the ghosts and moves of a policy's queues."""

    hit_tokens: array[int]
    kept: int
    evictions: int
    ghosts: int = 0
    moves: int = 0


def _any_policy(trace: TraceColumns, cell: Cell, block_tokens: int) -> _Outcome:
    """The policy itself, as a tier of the daemon has it."""
    policy = make_policy(cell.policy, cell.capacity_blocks)
    root_mru = cell.touch_order is TouchOrder.ROOT_MRU
    resident_run, access_run = policy.resident_run, policy.access_run
    hit_tokens = array("q")
    hit_blocks = 0
    for blocks, input_length in trace:
        hit_tokens.append(min(resident_run(blocks) * block_tokens, input_length))
        if root_mru:
            blocks.reverse()
        hit_blocks += access_run(blocks)
    # Every block of weight 1 fits into any capacity but 0.
    admitted = trace.blocks - hit_blocks if cell.capacity_blocks else 0
    return _Outcome(hit_tokens, len(policy), admitted - len(policy), policy.ghosts, policy.moves)


def _lru(trace: TraceColumns, cell: Cell, block_tokens: int) -> _Outcome:
    """LRU without a list of what is resident: the trace itself is the order of recency.

    The uses of blocks form a window, which begins where everything before was evicted. A block is
    resident if it has a use in there. When there is no room the window loses uses at its beginning,
    until one of them was the last of its block. Takes 4 bytes for each different block, whatever
    the capacity.
    """
    capacity, root_mru = cell.capacity_blocks, cell.touch_order is TouchOrder.ROOT_MRU
    hit_tokens = array("q")
    #: The uses of each block in the window.
    uses = array("I", bytes(4 * trace.unique_blocks))
    oldest = _reversed_uses(trace) if root_mru else iter(trace.references)
    size = hits = 0
    for blocks, input_length in trace:
        run = 0
        if root_mru:
            for block in blocks:
                if not uses[block]:
                    break
                run += 1
            rest = blocks[::-1]
        else:
            # The hits evict nothing, so they can be used at once.
            for block in blocks:
                number = uses[block]
                if not number:
                    break
                uses[block] = number + 1
                run += 1
            hits += run
            rest = blocks[run:]
        hit_tokens.append(min(run * block_tokens, input_length))
        for block in rest:
            number = uses[block]
            uses[block] = number + 1
            if number:
                hits += 1
            elif size < capacity:
                size += 1
            else:
                for victim in oldest:
                    number = uses[victim] - 1
                    uses[victim] = number
                    if not number:
                        break
    return _Outcome(hit_tokens, size, trace.blocks - hits - size, moves=trace.blocks)


#: What S3-FIFO knows of a block, in one byte: not there, a ghost, or in the small or main queue
#: with 0 to 3 hits; and what that is after a hit.
_GHOST, _SMALL, _MAIN = 1, 2, 6
_AFTER_HIT = bytes((0, 1, 3, 4, 5, 5, 7, 8, 9, 9))


def _s3fifo(trace: TraceColumns, cell: Cell, block_tokens: int) -> _Outcome:
    """`S3FIFO` of blocks that all weigh 1 and are never pinned, with a byte for each different one.

    A ghost that is hit stays in the queue until it comes to the head of it.
    """
    root_mru = cell.touch_order is TouchOrder.ROOT_MRU
    small_share, main_share = shares(cell.capacity_blocks)
    hit_tokens = array("q")
    state, after_hit = bytearray(trace.unique_blocks), _AFTER_HIT
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: deque[int] = deque()
    #: How many of a block's places in `ghosts` are of earlier lives: the first ones.
    past: Counter[int] = Counter()
    hits = moves = ghost_count = 0

    def remember(block: int) -> None:
        nonlocal ghosts, moves, ghost_count
        if not main_share:
            state[block] = 0
            return
        state[block] = _GHOST
        ghosts.append(block)
        moves += 1
        ghost_count += 1
        if ghost_count > main_share:
            while past[oldest := ghosts.popleft()]:
                past[oldest] -= 1
            state[oldest] = 0
            ghost_count -= 1
        elif len(ghosts) > 2 * main_share + 1024:
            ghosts = deque(each for each in ghosts if not _taken(past, each))

    def evict_main() -> None:
        nonlocal moves
        while (known := state[block := main.popleft()]) != _MAIN:
            state[block] = known - 1
            main.append(block)
            moves += 1
        remember(block)

    for blocks, input_length in trace:
        run = 0
        if root_mru:
            for block in blocks:
                if state[block] < _SMALL:
                    break
                run += 1
            rest = blocks[::-1]
        else:
            # The hits evict nothing, so they can be counted at once.
            for block in blocks:
                known = state[block]
                if known < _SMALL:
                    break
                state[block] = after_hit[known]
                run += 1
            hits += run
            rest = blocks[run:]
        hit_tokens.append(min(run * block_tokens, input_length))
        for block in rest:
            known = state[block]
            if known >= _SMALL:
                state[block] = after_hit[known]
                hits += 1
            elif known == _GHOST:
                past[block] += 1
                ghost_count -= 1
                if len(main) == main_share:
                    evict_main()
                main.append(block)
                state[block] = _MAIN
            else:
                if len(small) == small_share:
                    head = small.popleft()
                    known = state[head]
                    if known > _SMALL and main_share:
                        if len(main) == main_share:
                            evict_main()
                        main.append(head)
                        state[head] = known - _SMALL + _MAIN
                        moves += 1
                    else:
                        remember(head)
                small.append(block)
                state[block] = _SMALL
    size = len(small) + len(main)
    evictions = trace.blocks - hits - size
    return _Outcome(hit_tokens, size, evictions, ghost_count, moves + trace.blocks - hits)


def _taken(past: Counter[int], block: int) -> bool:
    """Whether one more place of a block is of an earlier life; it counts as taken away then."""
    if not past[block]:
        return False
    past[block] -= 1
    return True


def _reversed_uses(trace: TraceColumns) -> Iterator[int]:
    """The blocks of all requests in order, those of each request from its last to its first."""
    for blocks, _ in trace:
        yield from reversed(blocks)


def _optimum(trace: TraceColumns, cell: Cell, block_tokens: int) -> _Outcome:
    """The optimum in the form of a replay, which moves no queues."""
    hit_blocks, kept, evictions = Optimum(trace).hits(cell.capacity_blocks)
    hit_tokens = array(
        "q",
        [min(n * block_tokens, m) for n, m in zip(hit_blocks, trace.lengths, strict=True)],
    )
    return _Outcome(hit_tokens, kept, evictions)


def _percentiles(hit_tokens: array[int]) -> dict[str, int]:
    # Not sorted as they are: that takes a number object for each, and most hits are of few lengths.
    counts = Counter(hit_tokens)
    lengths = sorted(counts)
    ends = list(accumulate(map(counts.__getitem__, lengths)))
    return {
        f"p{percent}": lengths[bisect_left(ends, -(-len(hit_tokens) * percent // 100))]
        if ends
        else 0
        for percent in (10, 50, 90)
    }


def replay_all(
    trace: TraceColumns,
    cells: Sequence[Cell],
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    per_request: bool = False,
    jobs: int = 1,
) -> Generator[tuple[int, ReplayResult], None, None]:
    """Replay every cell, in up to `jobs` processes. Yields each result when it is there, with the
    index of its cell.

    The processes are spawned and map one copy of the trace from a temporary folder. They end with
    the generator. With little work, or with `jobs` 1, all replays run in this process. (Scripts
    that spawn must be importable, behind `if __name__ == "__main__"`.)
    """
    workers = min(jobs, len(cells), trace.blocks * len(cells) // _WORTH_A_PROCESS + 1)
    if workers <= 1:
        for index, cell in enumerate(cells):
            yield index, replay(trace, cell, block_tokens=block_tokens, per_request=per_request)
        return
    with TemporaryDirectory(prefix="prefixd-replay-") as folder:
        trace.save(Path(folder))
        pool = ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_start_worker, initargs=(folder,)
        )
        try:
            futures = {
                pool.submit(_replay_in_worker, cell, block_tokens, per_request): index
                for index, cell in enumerate(cells)
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def available_jobs() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


#: In a worker process: the trace that all its replays share.
_worker_trace: TraceColumns | None = None


def _start_worker(folder: str) -> None:
    global _worker_trace
    # The parent handles Ctrl-C: it hands out no more work and waits for what is running.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_trace = TraceColumns.map(Path(folder))


def _replay_in_worker(cell: Cell, block_tokens: int, per_request: bool) -> ReplayResult:
    assert _worker_trace is not None
    return replay(_worker_trace, cell, block_tokens=block_tokens, per_request=per_request)
