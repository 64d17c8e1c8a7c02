"""Eviction policies: pure bookkeeping, for the tiers and for the offline replay."""

from __future__ import annotations

from typing import Any

from .arc import ARC
from .base import EvictionPolicy
from .fifo import FIFO
from .lfu import LFU
from .lru import LRU
from .s3fifo import S3FIFO

__all__ = ["ARC", "FIFO", "LFU", "LRU", "POLICIES", "S3FIFO", "EvictionPolicy", "make_policy"]

#: The policies by their names in configuration files and command lines.
POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    policy.name: policy for policy in (LRU, LFU, FIFO, S3FIFO, ARC)
}


def make_policy(name: str, capacity: int, *, max_ghosts: int | None = None) -> EvictionPolicy[Any]:
    """An empty policy, for a capacity in the unit of its weights.

    `max_ghosts`: see `EvictionPolicy`. Raises ValueError for an unknown name, and lists the known
    ones, and for a negative capacity.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}, known are {', '.join(POLICIES)}")
    return policy(capacity, max_ghosts=max_ghosts)
