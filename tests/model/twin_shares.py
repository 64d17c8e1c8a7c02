"""Shares of the twin: what each namespace uses of a tier, and which entry is the next victim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TwinTier:
    budget: int
    limit: int
    cap: int  # most entries; 0: no limit
    cost: Callable[[int, int], int]  # (payload bytes, token id bytes) -> bytes of the budget
    slow: bool  # publishes only after Committed
    in_flight: int  # most reserved bytes, except by a single save; 0: no limit
    shares: dict[str, int] = field(default_factory=dict)  # bytes by part, see `TwinShares`


class TwinShares:
    """See the module. A part is a namespace, or "" for all keys without a share."""

    tiers: dict[str, TwinTier]
    parts: dict[str, str]  # the namespaces of keys
    entries: dict[str, dict[str, Any]]
    condemned: list[dict[str, Any]]
    saves: dict[int, dict[str, Any]]
    order: dict[str, list[str]]

    def used(self, tier: str) -> tuple[int, int]:
        """The bytes and the number of entries, published and reserved."""
        present = [*self.entries.values(), *self.condemned]
        mine = [e["cost"] for e in present if e["tier"] == tier]
        mine += [s["cost"] for s in self.saves.values() if s["tier"] == tier]
        return sum(mine), len(mine)

    def unpinned(self, tier: str) -> tuple[int, int]:
        costs = [self.entries[key]["cost"] for key in self.order[tier]]
        return sum(costs), len(costs)

    def share(self, tier: str, part: str, dimension: int) -> int:
        rules = self.tiers[tier]
        share, whole = rules.shares.get(part, 0), sum(rules.shares.values())
        if whole > rules.limit:
            share = share * rules.limit // whole
        return rules.cap * share // rules.limit if dimension else share

    def taken(self, tier: str, part: str, dimension: int, fixed: bool) -> int:
        """Bytes (dimension 0) or entries (1) of a part in a tier; if `fixed`, only those that
        can't be evicted."""
        present = [*self.entries.values(), *self.condemned, *self.saves.values()]
        mine = [e for e in present if e["tier"] == tier and self.part(tier, e["key"]) == part]
        if fixed:
            mine = [e for e in mine if e.get("pins", 1)]
        return len(mine) if dimension else sum(e["cost"] for e in mine)

    def part(self, tier: str, key: str) -> str:
        part = self.parts.get(key, "")
        return part if part in self.tiers[tier].shares else ""

    def may_fix(self, tier: str, new: list[dict[str, Any]]) -> bool:
        rules = self.tiers[tier]
        if not rules.shares:
            return True
        for dimension, whole in enumerate((rules.limit, rules.cap)):
            above = left = 0
            for part in ("", *rules.shares):
                mine = [e for e in new if e["tier"] == tier and self.part(tier, e["key"]) == part]
                fixed = self.taken(tier, part, dimension, fixed=True)
                fixed += len(mine) if dimension else sum(e["cost"] for e in mine)
                share = self.share(tier, part, dimension)
                above += max(0, fixed - share)
                left += share
            if (dimension == 0 or rules.cap) and above > whole - left:
                return False
        return True

    def next_out(
        self, tier: str, key: str | None = None, cost: int = 0, *, below: bool = False
    ) -> str | None:
        """The next victim for this key, or without a key. `below`: parts below their share too."""
        rules, order = self.tiers[tier], self.order[tier]
        if not rules.shares:
            return order[0] if order else None
        dimension = 0 if key is None or self.used(tier)[0] + cost > rules.limit else 1
        best = None
        for part in ("", *rules.shares):
            mine = [each for each in order if self.part(tier, each) == part]
            above = self.taken(tier, part, dimension, False) - self.share(tier, part, dimension)
            if key is not None and self.part(tier, key) == part:
                above += 1 if dimension else cost
            if mine and (above > 0 or below) and (best is None or above > best[0]):
                best = above, mine[0]
        return None if best is None else best[1]
