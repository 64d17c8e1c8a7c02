"""How much memory for which hit rate, split over the tiers, and what reordering would add.

From the exact LRU curve of a trace:

    capacity     the fewest blocks with which LRU reaches the wanted share of hit tokens
    working set  capacity * bytes of a block as stored
    budget       working set + 20 % headroom

The headroom is for what the curve does not know: reservations count against a budget before
they are published, pinned entries cannot leave, and tomorrow's trace is another one.

The split fills the fastest tier first, each up to its limit. Tiers are exclusive and a save
never moves, so the budgets add up to one cache only if each tier gets the share of the saves
that its budget is of the sum. Keys are SHA-256 hashes: dividing the saves by ranges of the
key does that, each tier is then an LRU over a random sample of the blocks in proportion to its
size, and all of them forget blocks of the same age. How close that comes is not assumed but
replayed: `split_hit_rate`.

Reordering sorts the requests within a time window by their block ids, so that those with a
shared prefix follow each other; the same curve of that order tells what it would add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction.lru import LRU
from .trace import Request

HEADROOM = 0.2
DEFAULT_WINDOW_MS = 10_000
#: The daemon hands out RAM and /dev/shm in slabs; this is its default.
SLAB_BYTES = 64 << 10
#: Budgets are whole MiB.
ROUND_BYTES = 1 << 20
TIERS = ("ram", "shm", "disk")


class Curve(Protocol):
    """What is needed of `curve.LruCurve`: hit tokens of LRU at every capacity."""

    @property
    def unique_blocks(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    def hit_tokens(self, capacity_blocks: int) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a token's KV state in one model (all shards together)."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: float

    @property
    def bytes_per_token(self) -> int:
        """A key and a value per layer, head and dimension."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes)


def parse_model_shape(text: str) -> ModelShape:
    """`32,8,128,2`: layers, KV heads, head dimension, bytes of a number (0.5 for 4 bits).

    Raises ValueError for anything else.
    """
    try:
        layers, kv_heads, head_dim, dtype_bytes = text.split(",")
        shape = ModelShape(int(layers), int(kv_heads), int(head_dim), float(dtype_bytes))
    except ValueError:
        shape = None
    if (
        shape is None
        or min(shape.layers, shape.kv_heads, shape.head_dim) < 1
        or not 0 < shape.dtype_bytes <= 16
    ):
        raise ValueError(
            f"{text!r} is no model shape: layers,kv_heads,head_dim,dtype_bytes like 32,8,128,2"
        )
    return shape


@dataclass(frozen=True, slots=True)
class TierAdvice:
    """One tier's part: its budget, the range of keys that it should be given, and what the
    tiers up to and including it would hit alone."""

    tier: str
    limit_bytes: int | None
    budget_bytes: int
    save_share: float
    hit_rate_up_to_here: float


@dataclass(frozen=True, slots=True)
class ReorderAdvice:
    """What sorting requests by shared prefix within windows of time adds under LRU."""

    window_ms: int
    hit_tokens: int
    hit_rate: float
    added_hit_tokens: int
    #: None: not even without a limit (an id that comes after different ones can do that).
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
        """All of it as plain values, units in the names, with the configuration to paste."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["tiers"] = [
            {name: getattr(tier, name) for name in tier.__slots__} for tier in self.tiers
        ]
        plain["reorder"] = {name: getattr(self.reorder, name) for name in self.reorder.__slots__}
        plain["toml"] = self.to_toml()
        return plain

    def to_toml(self) -> str:
        """The budgets as a part of prefixd.toml; a tier without one is turned off."""
        return "\n".join(
            f'[{tier.tier}]\nbudget = "{_exact_size(tier.budget_bytes)}"\n' for tier in self.tiers
        )


def advise(
    requests: Iterable[Request],
    curve_of: Callable[[Iterable[Request]], Curve],
    *,
    bytes_per_token: int,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    hit_rate: float | None = None,
    fraction_of_best: float = 0.9,
    limits: dict[str, int] | None = None,
    window_ms: int = DEFAULT_WINDOW_MS,
) -> Advice:
    """Advise on a trace that can be read three times.

    `curve_of` makes the LRU curve of requests in their order. Wanted is `hit_rate` or, if that
    is None, `fraction_of_best` of what a cache without limits hits. `limits` are bytes by
    tier; what is not named is not used; none at all means RAM without a limit.

    Raises ValueError for a rate that no capacity reaches or arguments out of range.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes per token must be at least 1, got {bytes_per_token}")
    if window_ms < 0:
        raise ValueError(f"a window must not be negative, got {window_ms} ms")
    curve = curve_of(requests)
    best = _rate(curve, curve.unique_blocks)
    wanted = _wanted(best, hit_rate, fraction_of_best)
    capacity = smallest_capacity(curve, wanted)
    block_bytes = stored_block_bytes(block_tokens * bytes_per_token)
    working_set = capacity * block_bytes
    budget = _round_up(working_set * (1 + HEADROOM))
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
        hit_rate=_rate(curve, capacity),
        working_set_bytes=working_set,
        headroom=HEADROOM,
        budget_bytes=budget,
        tiers=tiers,
        missing_bytes=missing,
        split_hit_rate=_split_rate(requests, tiers, block_bytes, block_tokens),
        reorder=_reorder(requests, curve, curve_of, capacity, window_ms),
    )


def stored_block_bytes(payload_bytes: int) -> int:
    """What a block takes from a budget: its payload, in whole slabs."""
    return -(-payload_bytes // SLAB_BYTES) * SLAB_BYTES


def smallest_capacity(curve: Curve, wanted: float) -> int:
    """The fewest blocks with which LRU hits the share `wanted` of the prompt tokens.

    Raises ValueError if no number of blocks does.
    """
    # A share that came from a count of tokens must find that count again.
    found = _fewest_blocks(curve, math.ceil(wanted * curve.prompt_tokens - 1e-6))
    if found is None:
        best = _rate(curve, curve.unique_blocks)
        raise ValueError(
            f"no cache hits {100 * wanted:.2f} % of this trace; without any limit one hits "
            f"{100 * best:.2f} %"
        )
    return found


def _fewest_blocks(curve: Curve, hit_tokens: int) -> int | None:
    low, high = 0, curve.unique_blocks
    if curve.hit_tokens(high) < hit_tokens:
        return None
    while low < high:  # hit tokens never fall with the capacity
        middle = (low + high) // 2
        if curve.hit_tokens(middle) >= hit_tokens:
            high = middle
        else:
            low = middle + 1
    return low


def reordered(requests: Iterable[Request], window_ms: int) -> Iterator[Request]:
    """The requests of each window of time sorted by their block ids, which puts those with a
    shared prefix beside each other; windows stay in order. Memory: one window."""
    window: list[Request] = []
    end_ms = -1
    for request in requests:
        if request.timestamp_ms >= end_ms:
            yield from sorted(window, key=_prefix)
            window = []
            end_ms = request.timestamp_ms + window_ms
        window.append(request)
    yield from sorted(window, key=_prefix)


def _prefix(request: Request) -> tuple[int, ...]:
    return request.hash_ids


def _rate(curve: Curve, capacity: int) -> float:
    return curve.hit_tokens(capacity) / curve.prompt_tokens if curve.prompt_tokens else 0.0


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


def _round_up(size_bytes: float) -> int:
    return math.ceil(size_bytes / ROUND_BYTES) * ROUND_BYTES


def _split(
    budget: int, limits: dict[str, int] | None, block_bytes: int, curve: Curve
) -> tuple[tuple[TierAdvice, ...], int]:
    """Fill the fastest tier first; returns the tiers and what found no room."""
    limits = limits or {}
    if unknown := set(limits) - set(TIERS):
        raise ValueError(f"there is no tier {', '.join(sorted(unknown))}")
    left = budget
    parts: list[tuple[str, int | None, int]] = []
    for tier in TIERS:
        limit = limits.get(tier, 0) if limits else (None if tier == "ram" else 0)
        # Budgets are whole MiB, so of a limit the last piece is left over.
        part = left if limit is None else min(left, limit // ROUND_BYTES * ROUND_BYTES)
        parts.append((tier, limit, part))
        left -= part
    total = budget - left
    advice = []
    so_far = 0
    for tier, limit, part in parts:
        so_far += part
        reached = _rate(curve, int(so_far / (1 + HEADROOM)) // block_bytes)
        advice.append(TierAdvice(tier, limit, part, part / total if total else 0.0, reached))
    return tuple(advice), left


def _split_rate(
    requests: Iterable[Request],
    tiers: tuple[TierAdvice, ...],
    block_bytes: int,
    block_tokens: int,
) -> float:
    """Replay with one LRU per tier, blocks divided by a hash of their id; no headroom used."""
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
    """A block's place between 0 and 1, as the first bytes of its key would give it."""
    digest = blake2b(str(block).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / (1 << 64)


def _reorder(
    requests: Iterable[Request],
    curve: Curve,
    curve_of: Callable[[Iterable[Request]], Curve],
    capacity: int,
    window_ms: int,
) -> ReorderAdvice:
    other = curve_of(reordered(requests, window_ms))
    hit_tokens = other.hit_tokens(capacity)
    in_order = curve.hit_tokens(capacity)
    return ReorderAdvice(
        window_ms=window_ms,
        hit_tokens=hit_tokens,
        hit_rate=_rate(other, capacity),
        added_hit_tokens=hit_tokens - in_order,
        same_hit_rate_capacity_blocks=_fewest_blocks(other, in_order),
    )
