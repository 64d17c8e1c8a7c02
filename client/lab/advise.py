"""How much memory a hit rate needs, how to split it over the tiers, and what reordering adds.

From the exact LRU curve of a trace:

    capacity     the fewest blocks with which LRU reaches the requested share of hit tokens
    working set  capacity * bytes of a block as stored
    budget       working set + 20 % headroom

The headroom is for what the curve leaves out: reservations count against a budget before they are
published, pinned entries cannot be evicted, and future traffic differs.

The split fills the fastest tier first, each up to its limit. An entry stays in the tier that it was
saved to, so the budgets act as one cache only if each tier gets the share of the saves that its
budget has in the sum. Keys are SHA-256 hashes, so dividing the saves by ranges of the key does
that: each tier is an LRU over a random sample of the blocks in proportion to its size, and all
evict blocks of the same age. `split_hit_rate` replays how close that comes to one cache.

Reordering sorts the requests within a time window by their block ids, so that requests with a
shared prefix follow each other. The LRU curve of that order shows what it adds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction.lru import LRU
from .curve import LruCurve, exact_curve
from .trace import Request, TraceColumns

HEADROOM = 0.2
DEFAULT_WINDOW_MS = 10_000
#: The daemon hands out RAM and /dev/shm in slabs; this is its default.
SLAB_BYTES = 64 << 10
#: Budgets are whole MiB.
ROUND_BYTES = 1 << 20
TIERS = ("ram", "shm", "disk")


def model_bytes_per_token(model_shape: str) -> int:
    """The size of a token's KV state, all shards together: a key and a value per layer, head and
    dimension. The shape `32,8,128,2` is layers, KV heads, head dimension, bytes of a number (0.5
    for 4 bits).

    Raises ValueError for anything else.
    """
    problem = (
        f"{model_shape!r} is no model shape: layers,kv_heads,head_dim,dtype_bytes like 32,8,128,2"
    )
    try:
        layers, kv_heads, head_dim, dtype_bytes = model_shape.split(",")
        counts, number_bytes = (int(layers), int(kv_heads), int(head_dim)), float(dtype_bytes)
    except ValueError:
        raise ValueError(problem) from None
    if min(counts) < 1 or not 0 < number_bytes <= 16:
        raise ValueError(problem)
    return round(2 * math.prod(counts) * number_bytes)


@dataclass(frozen=True, slots=True)
class TierAdvice:
    """One tier: its budget, its share of the saves, and the hit rate of the tiers up to it."""

    tier: str
    limit_bytes: int | None
    budget_bytes: int
    save_share: float
    hit_rate_up_to_here: float


@dataclass(frozen=True, slots=True)
class ReorderAdvice:
    """What sorting requests by shared prefix within time windows adds under LRU."""

    window_ms: int
    hit_tokens: int
    hit_rate: float
    added_hit_tokens: int
    #: None if no capacity reaches it (possible when an id follows different ids).
    same_hit_rate_capacity_blocks: int | None


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer; rates are shares of prompt tokens between 0 and 1."""

    block_tokens: int
    bytes_per_token: int
    stored_block_bytes: int
    prompt_tokens: int
    unique_blocks: int
    best_hit_rate: float
    wanted_hit_rate: float
    capacity_blocks: int
    hit_rate: float
    working_set_bytes: int
    headroom: float
    budget_bytes: int
    tiers: tuple[TierAdvice, ...]
    missing_bytes: int
    split_hit_rate: float
    reorder: ReorderAdvice

    def to_json(self) -> dict[str, Any]:
        """As plain values, with a configuration to paste."""
        return {
            **asdict(self),
            "tiers": [asdict(tier) for tier in self.tiers],
            "toml": self.to_toml(),
        }

    def to_toml(self) -> str:
        """The budgets as a part of prefixd.toml. A tier without a budget is turned off."""
        return "\n".join(
            f'[{tier.tier}]\nbudget = "{_exact_size(tier.budget_bytes)}"\n' for tier in self.tiers
        )


def advise(
    requests: Iterable[Request],
    *,
    bytes_per_token: int,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    hit_rate: float | None = None,
    fraction_of_best: float = 0.9,
    limits: dict[str, int] | None = None,
    window_ms: int = DEFAULT_WINDOW_MS,
) -> Advice:
    """Advise on a trace that can be read three times.

    The target is `hit_rate` or, if that is None, `fraction_of_best` of what a cache without limits
    hits. `limits` are bytes by tier. A tier without one is not used; without any, RAM is used
    without a limit.

    Raises ValueError for a rate that no capacity reaches or arguments out of range.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes per token must be at least 1, got {bytes_per_token}")
    if window_ms < 0:
        raise ValueError(f"a window must not be negative, got {window_ms} ms")
    curve = _curve(requests, block_tokens)
    best = curve.hit_rate(curve.unique_blocks)
    wanted = _wanted(best, hit_rate, fraction_of_best)
    capacity = smallest_capacity(curve, wanted)
    block_bytes = stored_block_bytes(block_tokens * bytes_per_token)
    working_set = capacity * block_bytes
    budget = math.ceil(working_set * (1 + HEADROOM) / ROUND_BYTES) * ROUND_BYTES
    tiers, missing = _split(budget, limits, block_bytes, curve)
    return Advice(
        block_tokens=block_tokens,
        bytes_per_token=bytes_per_token,
        stored_block_bytes=block_bytes,
        prompt_tokens=curve.prompt_tokens,
        unique_blocks=curve.unique_blocks,
        best_hit_rate=best,
        wanted_hit_rate=wanted,
        capacity_blocks=capacity,
        hit_rate=curve.hit_rate(capacity),
        working_set_bytes=working_set,
        headroom=HEADROOM,
        budget_bytes=budget,
        tiers=tiers,
        missing_bytes=missing,
        split_hit_rate=_split_rate(requests, tiers, block_bytes, block_tokens),
        reorder=_reorder(requests, curve, capacity, window_ms),
    )


def stored_block_bytes(payload_bytes: int) -> int:
    """Bytes of a budget that a block takes: its payload, in whole slabs."""
    return -(-payload_bytes // SLAB_BYTES) * SLAB_BYTES


def smallest_capacity(curve: LruCurve, wanted: float) -> int:
    """The fewest blocks with which LRU hits the share `wanted` of the prompt tokens.

    Raises ValueError if no number of blocks does.
    """
    # The tolerance lets a share that was computed from a count of tokens find that count again.
    found = _fewest_blocks(curve, math.ceil(wanted * curve.prompt_tokens - 1e-6))
    if found is None:
        best = curve.hit_rate(curve.unique_blocks)
        raise ValueError(
            f"no cache hits {100 * wanted:.2f} % of this trace; without any limit one hits "
            f"{100 * best:.2f} %"
        )
    return found


def _fewest_blocks(curve: LruCurve, hit_tokens: int) -> int | None:
    """The smallest capacity with that many hit tokens, which never fall with the capacity."""
    blocks = bisect_left(range(curve.unique_blocks + 1), hit_tokens, key=curve.hit_tokens)
    return blocks if blocks <= curve.unique_blocks else None


def reordered(requests: Iterable[Request], window_ms: int) -> Iterator[Request]:
    """The requests of each time window sorted by their block ids, which puts requests with a shared
    prefix side by side. Windows stay in order. Needs memory for one window."""
    window: list[Request] = []
    end_ms = -1.0
    for request in requests:
        if request.timestamp_ms >= end_ms:
            yield from sorted(window, key=attrgetter("hash_ids"))
            window = []
            end_ms = request.timestamp_ms + window_ms
        window.append(request)
    yield from sorted(window, key=attrgetter("hash_ids"))


def _curve(requests: Iterable[Request], block_tokens: int) -> LruCurve:
    """The exact curve of requests, read once."""
    return exact_curve(TraceColumns.load(requests), block_tokens=block_tokens)


def _wanted(best: float, hit_rate: float | None, fraction_of_best: float) -> float:
    if hit_rate is not None:
        if not 0 <= hit_rate <= 1:
            raise ValueError(f"a hit rate is between 0 and 1, got {hit_rate}")
        return hit_rate
    if not 0 <= fraction_of_best <= 1:
        raise ValueError(f"a fraction is between 0 and 1, got {fraction_of_best}")
    return best * fraction_of_best


def _exact_size(size_bytes: int) -> str:
    if size_bytes and not size_bytes % (1 << 30):
        return f"{size_bytes >> 30}GiB"
    return f"{size_bytes >> 20}MiB" if size_bytes else "0"


def _split(
    budget: int, limits: dict[str, int] | None, block_bytes: int, curve: LruCurve
) -> tuple[tuple[TierAdvice, ...], int]:
    """Fill the fastest tier first. Returns the tiers and the bytes that do not fit."""
    limits = limits or {}
    if unknown := set(limits) - set(TIERS):
        raise ValueError(f"there is no tier {', '.join(sorted(unknown))}")
    left = budget
    parts: list[tuple[str, int | None, int]] = []
    for tier in TIERS:
        limit = limits.get(tier, 0) if limits else (None if tier == "ram" else 0)
        # Budgets are whole MiB, so the rest of a limit is not used.
        part = left if limit is None else min(left, limit // ROUND_BYTES * ROUND_BYTES)
        parts.append((tier, limit, part))
        left -= part
    total = budget - left
    advice = []
    so_far = 0
    for tier, limit, part in parts:
        so_far += part
        reached = curve.hit_rate(int(so_far / (1 + HEADROOM)) // block_bytes)
        advice.append(TierAdvice(tier, limit, part, part / total if total else 0.0, reached))
    return tuple(advice), left


def _split_rate(
    requests: Iterable[Request],
    tiers: tuple[TierAdvice, ...],
    block_bytes: int,
    block_tokens: int,
) -> float:
    """Replay with one LRU per tier, blocks divided by a hash of their id, without the headroom."""
    caches: list[LRU[int]] = []
    ends: list[float] = []
    for tier in tiers:
        if tier.budget_bytes:
            caches.append(LRU(int(tier.budget_bytes / (1 + HEADROOM)) // block_bytes))
            ends.append(tier.save_share + (ends[-1] if ends else 0.0))
    homes: dict[int, LRU[int]] = {}
    hit_tokens = prompt_tokens = 0
    for request in requests:
        prompt_tokens += request.input_length
        if not caches:
            continue
        for block in request.hash_ids:
            if block not in homes:
                point = _hash_share(block)
                homes[block] = caches[next((i for i, e in enumerate(ends) if point < e), -1)]
        hits = 0
        for block in request.hash_ids:
            if block not in homes[block]:
                break
            hits += 1
        hit_tokens += min(hits * block_tokens, request.input_length)
        for block in request.hash_ids:
            homes[block].access(block)
    return hit_tokens / prompt_tokens if prompt_tokens else 0.0


def _hash_share(block: int) -> float:
    """A block's position between 0 and 1, as the first bytes of its key would give it."""
    digest = blake2b(str(block).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / (1 << 64)


def _reorder(
    requests: Iterable[Request],
    curve: LruCurve,
    capacity: int,
    window_ms: int,
) -> ReorderAdvice:
    other = _curve(reordered(requests, window_ms), curve.block_tokens)
    hit_tokens = other.hit_tokens(capacity)
    in_order = curve.hit_tokens(capacity)
    return ReorderAdvice(
        window_ms=window_ms,
        hit_tokens=hit_tokens,
        hit_rate=other.hit_rate(capacity),
        added_hit_tokens=hit_tokens - in_order,
        same_hit_rate_capacity_blocks=_fewest_blocks(other, in_order),
    )
