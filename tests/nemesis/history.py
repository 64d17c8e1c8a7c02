"""The results that workers reported in a run, and what they prove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from prefixd.client import Tier

#: The report of one operation. A worker prints each as one line of JSON.
OperationReport = dict[str, Any]


@dataclass
class History:
    """Counts reported outcomes. Of each acknowledged entry, remembers the begin of the last call to
    which it was acknowledged.

    `wrong`: reads that returned wrong bytes as good.
    """

    counts: Counter[str] = field(default_factory=Counter)
    acknowledged: dict[Tier, dict[int, float]] = field(default_factory=dict)
    wrong: list[OperationReport] = field(default_factory=list)
    #: Exceptions of clients, which an engine must never see.
    raised: list[OperationReport] = field(default_factory=list)
    #: The longest time that each operation took.
    longest_s: dict[str, float] = field(default_factory=dict)

    def add(self, report: OperationReport) -> None:
        kind = report["op"]
        self.counts[kind] += 1
        for outcome in report.get("outcomes", ()):
            self.counts[f"{kind}: {outcome}"] += 1
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), report.get("took_s", 0.0))
        if "saved" in report:
            acknowledged = self.acknowledged.setdefault(Tier(report["tier"]), {})
            for number in report["saved"]:
                acknowledged[number] = max(report["begun_s"], acknowledged.get(number, 0.0))
        if report.get("wrong"):
            self.wrong.append(report)
        if kind == "raised":
            self.raised.append(report)

    def lost(self, tier: Tier, present: Collection[int]) -> set[int]:
        """Acknowledged entries that are missing in `present`."""
        return self.acknowledged.get(tier, {}).keys() - set(present)
