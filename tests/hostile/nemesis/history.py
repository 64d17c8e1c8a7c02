"""What workers did in a run, and what it proves about what was read.

Only one worker at a time saves and deletes a key, one call after another; all read it. A worker
reports a save or delete before it begins and after it has ended. One that is killed in between
leaves a call whose outcome is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from prefixd.client import Tier

from .keyspace import DURABLE

#: The report of one operation. A worker prints each as one line of JSON.
OperationReport = dict[str, Any]

#: Outcomes after which the state of a key is known.
_DEFINITE: Final = ("saved", "deleted", "absent")
#: Outcomes that change nothing. After any other one the state is not known.
_NOTHING: Final = (
    *("present", "pinned", "in flight", "no room", "too large", "lost", "failed"),
    *("device full", "crc mismatch", "length mismatch"),
)
#: A call whose outcome is not known may still take effect for so long.
_LATE_S: Final = 10.0


@dataclass(slots=True)
class Change:
    """A save of a version, or a delete (without a version)."""

    begun_s: float
    version: str | None = None
    tier: Tier | None = None
    ended_s: float = inf
    outcome: str = "unknown"

    @property
    def definite(self) -> bool:
        """Whether the key's state is known afterwards."""
        return self.outcome in _DEFINITE

    @property
    def changed_nothing(self) -> bool:
        # A delete that failed may have happened all the same: its client heard nothing.
        return self.outcome in _NOTHING and not (self.version is None and self.outcome == "failed")

    @property
    def reach_s(self) -> float:
        """Until when it may have an effect, if its outcome is not known."""
        return (self.ended_s if self.ended_s < inf else self.begun_s) + _LATE_S


@dataclass(frozen=True, slots=True)
class Seen:
    """What was read under a key between two moments. `version` None: a miss."""

    number: int
    version: str | None
    begun_s: float
    ended_s: float
    why: str = ""


@dataclass
class History:
    """Counts outcomes, and judges what was seen."""

    counts: Counter[str] = field(default_factory=Counter)
    changes: dict[int, list[Change]] = field(default_factory=dict)
    #: Reads that returned bytes as good which were never saved under their key.
    wrong: list[OperationReport] = field(default_factory=list)
    #: Exceptions of clients, which an engine must never see.
    raised: list[OperationReport] = field(default_factory=list)
    #: Reads that returned an older save, as sentences; and entries that are missing.
    stale: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    #: The longest time that each operation took.
    longest_s: dict[str, float] = field(default_factory=dict)
    #: When the disk's device was faulty.
    faults: list[tuple[float, float]] = field(default_factory=list)
    _seen: list[Seen] = field(default_factory=list)
    #: Changes in progress, by worker and key.
    _begun: dict[tuple[int, int], Change] = field(default_factory=dict)

    def add(self, report: OperationReport) -> None:
        kind = report["op"]
        if kind == "begin":
            self._begin(report)
            return
        self.counts[kind] += 1
        for outcome in report.get("outcomes", ()):
            self.counts[f"{kind}: {outcome}"] += 1
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), report.get("took_s", 0.0))
        if "changed" in report:
            for number, outcome in zip(report["changed"], report["outcomes"], strict=True):
                change = self._begun.pop((report["worker"], number))
                change.outcome, change.ended_s = outcome, report["ended_s"]
        for number, version in report.get("read", ()):
            self.saw(Seen(number, version, report["begun_s"], report["ended_s"]))
        if report.get("wrong"):
            self.wrong.append(report)
        if kind == "raised":
            self.raised.append(report)

    def _begin(self, report: OperationReport) -> None:
        versions = report.get("versions") or [None] * len(report["numbers"])
        tier = Tier(report["tier"]) if report.get("versions") else None
        for number, version in zip(report["numbers"], versions, strict=True):
            change = Change(report["begun_s"], version, tier)
            self.changes.setdefault(number, []).append(change)
            self._begun[report["worker"], number] = change

    def saw(self, seen: Seen) -> None:
        """Judge this later, when all changes before it have been reported."""
        self._seen.append(seen)

    def judge(
        self, before_s: float = inf, explained: Callable[[int, float], bool] | None = None
    ) -> int:
        """Judge what was seen before a moment. `explained(number, begun_s)`: whether damage
        explains that what a call that began then saved is missing. Returns how many are."""
        ready = [seen for seen in self._seen if seen.ended_s < before_s]
        self._seen = [seen for seen in self._seen if seen.ended_s >= before_s]
        damaged = 0
        for seen in ready:
            self._judge_age(seen)
            missing = self._missing(seen)
            if missing is None:
                continue
            if explained is not None and explained(seen.number, missing.begun_s):
                missing.outcome = "damaged"
                damaged += 1
            else:
                where = missing.tier.label if missing.tier else ""
                self.lost.append(f"key {seen.number}, saved to {where}: {seen.why or 'a miss'}")
        return damaged

    def _judge_age(self, seen: Seen) -> None:
        if seen.version is None:
            return
        changes = self.changes.get(seen.number, [])
        save = next((one for one in changes if one.version == seen.version), None)
        if save is None:
            self.wrong.append({"op": "never saved", "wrong": [seen.number]})
            return
        for later in changes:
            if later.definite and later.begun_s > save.ended_s and later.ended_s < seen.begun_s:
                what = (
                    f"a save to {later.tier.label}" if later.tier else f"a delete ({later.outcome})"
                )
                ago_s = seen.begun_s - later.ended_s
                where = save.tier.label if save.tier else ""
                self.stale.append(
                    f"key {seen.number}: as saved to {where}, {ago_s:.3f} s after {what}"
                )
                return

    def _missing(self, seen: Seen) -> Change | None:
        """The save to a durable tier that should have been seen, and was not."""
        if seen.version is not None:
            return None
        *earlier, last = [Change(0.0), *self._effects_before(seen)]
        if last.outcome != "saved" or last.ended_s >= seen.begun_s or last.tier not in DURABLE:
            return None
        if any(not one.definite and one.reach_s >= last.begun_s for one in earlier[1:]):
            return None
        if last.tier is Tier.DISK and any(
            begun_s <= seen.ended_s and seen.begun_s <= ended_s for begun_s, ended_s in self.faults
        ):
            return None
        return last

    def _effects_before(self, seen: Seen) -> list[Change]:
        """The changes that may have had an effect before the end of a read, in their order."""
        return [
            one
            for one in self.changes.get(seen.number, [])
            if one.begun_s < seen.ended_s and not one.changed_nothing
        ]


def labels(outcomes: Iterable[Any]) -> list[str]:
    """Statuses as the history names them."""
    return [str(outcome.name).lower().replace("_", " ") for outcome in outcomes]
