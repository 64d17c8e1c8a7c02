"""What a client counts of itself."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, TypeAlias

from ..proto import prefixd_pb2 as pb
from ..proto.keys import Key
from ..proto.limits import MAX_TOLD_MISSES
from ..proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from .results import Entry, SaveOutcome

Snapshot: TypeAlias = dict[str, int | dict[str, int]]

_SCALARS: Final = (
    "lookups",  # searches and claims, each with one hit or one miss
    "hits",
    "hit_entries",
    "hit_tokens",
    "lookup_tokens",  # that were looked for, as far as it was said or the hit shows
    "restored_entries",
    "restored_tokens",  # of the runs that restores had from their first entry on
    "restored_bytes",
    "saved_entries",
    "saved_bytes",
    "lost_claims",
    "lost_reservations",
    "sessions",  # opened, the first one included
    "data_fallbacks",  # calls that went over gRPC, for the data socket could not be reached
)

#: Over gRPC, or over the local or the data socket, which have one each that gRPC does not have.
_RPCS: Final = (*pb.DESCRIPTOR.services_by_name["Cache"].methods_by_name, "SaveStaged", "Fetch")
_LABELS: Final = {tier: tier.label for tier in Tier}


#: How the bytes of an entry came to the caller: left where they lie, copied from there, by rpc.
PATHS: Final = ("view", "copy", "stream")


class Report:
    """What a client has to tell the daemon: amounts by name, and what they are of. Not
    thread-safe."""

    __slots__ = ("absent", "amounts")

    def __init__(self) -> None:
        self.amounts: dict[tuple[Any, ...], int] = {}
        #: of some look-ups that found nothing, the keys: the daemon may know what became of them
        self.absent: list[Sequence[Key]] = []

    def tell_absent(self, keys: Sequence[Key]) -> None:
        """Of one look-up; those that come first in a report are told."""
        if len(self.absent) < MAX_TOLD_MISSES:
            self.absent.append(keys)

    def add(self, name: tuple[Any, ...], amount: int = 1) -> None:
        self.amounts[name] = self.amounts.get(name, 0) + amount

    def message(self) -> pb.Usage:
        """As it goes over the wire."""
        usage = pb.Usage()
        tiers: dict[Tier, pb.TierUsage] = {}
        for (name, *of), amount in self.amounts.items():
            if not of:
                setattr(usage, name, amount)
            elif name in ("misses", "failures"):
                getattr(usage, name)[of[0]] = amount
            else:
                told = tiers.setdefault(of[0], pb.TierUsage(tier=of[0]))
                match name:
                    case "restored_bytes":
                        told.restored_bytes[of[1]] = amount
                    case "saves":
                        told.saves.add(reason=of[1], outcome=of[2], entries=amount)
                    case _:
                        setattr(told, name, amount)
        usage.tiers.extend(tiers.values())
        usage.absent.extend(pb.AbsentMiss(keys=keys) for keys in self.absent)
        return usage


class Counters:
    """Thread-safe counts, all of them there from the start.

    `misses` are the look-ups that found nothing, by reason: they add up to lookups - hits.
    `failures` are restores, reads and probes that failed, by reason: a hit whose bytes then can't
    be restored is a hit, and a failure. `saves` are by the status in which they ended, `rpcs` by
    their name.

    What concerns the daemon's own numbers is taken by `take_report`, which the heartbeats carry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scalars = dict.fromkeys(_SCALARS, 0)
        self._groups: dict[str, dict[str, int]] = {
            "misses": {reason.value: 0 for reason in MissReason},
            "failures": {reason.value: 0 for reason in MissReason},
            "saves": {status.label: 0 for status in SaveStatus},
            "rpcs": dict.fromkeys(_RPCS, 0),
            "hit_tokens_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_path": dict.fromkeys(PATHS, 0),
        }
        #: what happened since the last report
        self._report = Report()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._scalars[name] += amount

    def rpc(self, name: str) -> None:
        with self._lock:
            self._groups["rpcs"][name] += 1

    def miss(self, reason: MissReason, lookup_tokens: int = 0, keys: Sequence[Key] = ()) -> None:
        """One look-up that found nothing, of so many tokens; 0: not known. `keys`: some of those
        that would have been a hit."""
        with self._lock:
            self._groups["misses"][reason.value] += 1
            self._looked(lookup_tokens)
            self._report.add(("misses", reason.value))
            if keys and reason is MissReason.ABSENT:
                self._report.tell_absent(keys)

    def hit(
        self, entries: Collection[Entry], token_counts: Collection[int], lookup_tokens: int = 0
    ) -> None:
        """One look-up that found these. `lookup_tokens`: what it was for; 0: not known."""
        with self._lock:
            scalars, by_tier = self._scalars, self._groups["hit_tokens_by_tier"]
            scalars["hits"] += 1
            self._report.add(("hits",))
            found_tokens = 0
            for tier, (entries_there, tokens) in _by_tier(entries, token_counts).items():
                found_tokens += tokens
                scalars["hit_entries"] += entries_there
                scalars["hit_tokens"] += tokens
                by_tier[_LABELS[tier]] += tokens
                self._report.add(("hit_entries", tier), entries_there)
                self._report.add(("hit_tokens", tier), tokens)
            self._looked(max(lookup_tokens, found_tokens))

    def _looked(self, lookup_tokens: int) -> None:
        self._scalars["lookups"] += 1
        self._scalars["lookup_tokens"] += lookup_tokens
        self._report.add(("lookups",))
        self._report.add(("lookup_tokens",), lookup_tokens)

    def failure(self, reason: MissReason) -> None:
        """A restore, a read or a probe that failed."""
        with self._lock:
            self._groups["failures"][reason.value] += 1
            self._report.add(("failures", reason.value))

    def restored(self, entries: Sequence[Entry], path: str) -> None:
        """These arrived whole, on that one of `PATHS`."""
        with self._lock:
            by_tier = self._groups["restored_bytes_by_tier"]
            sizes = [entry.payload_bytes for entry in entries]
            for tier, (entries_there, size_bytes) in _by_tier(entries, sizes).items():
                self._scalars["restored_entries"] += entries_there
                self._scalars["restored_bytes"] += size_bytes
                by_tier[_LABELS[tier]] += size_bytes
                self._add_bytes(tier, path, size_bytes)

    def viewed(self, entries: Sequence[Entry]) -> None:
        """The caller got views of these, and reads them where they lie."""
        with self._lock:
            sizes = [entry.payload_bytes for entry in entries]
            for tier, (_, size_bytes) in _by_tier(entries, sizes).items():
                self._add_bytes(tier, "view", size_bytes)

    def _add_bytes(self, tier: Tier, path: str, size_bytes: int) -> None:
        self._groups["restored_bytes_by_path"][path] += size_bytes
        self._report.add(("restored_bytes", tier, path), size_bytes)

    def restored_run(self, tokens: int) -> None:
        """So many tokens need not be computed, thanks to one restore."""
        with self._lock:
            self._scalars["restored_tokens"] += tokens
            self._report.add(("restored_tokens",), tokens)

    def saves(
        self,
        outcomes: Iterable[SaveOutcome],
        payload_bytes: Iterable[int],
        kinds: Iterable[tuple[Tier, SaveReason]],
    ) -> None:
        """How saves ended, each with its payload, its tier and why it was made."""
        ended: dict[tuple[SaveStatus, tuple[Tier, SaveReason]], int] = {}
        saved_entries = saved_bytes = 0
        # The kinds may be one that repeats without end.
        for outcome, size_bytes, kind in zip(outcomes, payload_bytes, kinds, strict=False):
            status = outcome.status
            how = status, kind
            ended[how] = ended.get(how, 0) + 1
            if status is SaveStatus.SAVED:
                saved_entries += 1
                saved_bytes += size_bytes
        with self._lock:
            self._scalars["saved_entries"] += saved_entries
            self._scalars["saved_bytes"] += saved_bytes
            for (status, (tier, reason)), entries in ended.items():
                self._groups["saves"][status.label] += entries
                self._report.add(("saves", tier, reason, status.label), entries)

    def take_report(self) -> Report:
        """What happened since this was last called, at one moment."""
        with self._lock:
            report, self._report = self._report, Report()
            return report

    def give_back(self, report: Report) -> None:
        """A report that the daemon may not have got: it goes with the next one."""
        with self._lock:
            for name, amount in report.amounts.items():
                self._report.add(name, amount)
            for keys in report.absent:
                self._report.tell_absent(keys)

    def snapshot(self) -> Snapshot:
        """Everything at one moment, as a dict that is the caller's own."""
        with self._lock:
            groups = {name: dict(group) for name, group in self._groups.items()}
            return {**self._scalars, **groups}


def _by_tier(entries: Collection[Entry], amounts: Collection[int]) -> dict[Tier, tuple[int, int]]:
    """How many entries there are of each tier, and the sum of their amounts."""
    tiers = {entry.tier for entry in entries}
    if len(tiers) == 1:
        return {tiers.pop(): (len(entries), sum(amounts))}
    found: dict[Tier, tuple[int, int]] = {}
    for entry, amount in zip(entries, amounts, strict=True):
        count, total = found.get(entry.tier, (0, 0))
        found[entry.tier] = count + 1, total + amount
    return found
