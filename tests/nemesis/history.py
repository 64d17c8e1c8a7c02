"""What happened in a run, as its workers told it, and what it proves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from prefixd.client import Tier

#: A worker says each of these as one JSON object on a line.
Told = dict[str, Any]


@dataclass
class History:
    """Counts what is said, and remembers which entries were acknowledged, by the time at which
    the last call began that was told so.

    `wrong`: reads that gave other bytes than were saved under their key, and called them good.
    """

    counts: Counter[str] = field(default_factory=Counter)
    acknowledged: dict[Tier, dict[int, float]] = field(default_factory=dict)
    wrong: list[Told] = field(default_factory=list)
    #: What a client raised into its worker: the engine must never see one.
    raised: list[Told] = field(default_factory=list)
    #: Longest answer of any call, by the operation.
    longest_s: dict[str, float] = field(default_factory=dict)

    def add(self, told: Told) -> None:
        kind = told["op"]
        self.counts[kind] += 1
        for outcome in told.get("outcomes", ()):
            self.counts[f"{kind}: {outcome}"] += 1
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), told.get("took_s", 0.0))
        if "saved" in told:
            acknowledged = self.acknowledged.setdefault(Tier(told["tier"]), {})
            for number in told["saved"]:
                acknowledged[number] = max(told["begun_s"], acknowledged.get(number, 0.0))
        if told.get("wrong"):
            self.wrong.append(told)
        if kind == "raised":
            self.raised.append(told)

    def lost(self, tier: Tier, present: Collection[int]) -> set[int]:
        """Entries that were acknowledged and are not there."""
        return self.acknowledged.get(tier, {}).keys() - set(present)
