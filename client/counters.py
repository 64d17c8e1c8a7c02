"""The counters of a client, and its reports to the daemon."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ..proto import prefixd_pb2 as pb
from ..proto.keys import Key
from ..proto.limits import LATENCY_BOUNDS_NS, MAX_TOLD_MISSES
from ..proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from .results import Entry, SaveOutcome, as_entries

Snapshot: TypeAlias = dict[str, int | dict[str, int]]
#: A counter's name, and what it is split by: a tier, a reason, a path.
Name: TypeAlias = tuple[Any, ...]

_SCALARS: Final = (
    "lookups",  # searches and claims, each with one hit or one miss
    "hits",
    "hit_entries",
    "hit_tokens",
    "lookup_tokens",  # that were looked for, as far as the caller said or the hit shows
    "restored_entries",
    "restores",  # calls, successful or not
    "restored_tokens",  # of the runs of good entries that restores began with
    "restored_bytes",
    "saved_entries",
    "saved_bytes",
    "lost_claims",
    "lost_reservations",
    "sessions",  # opened, the first one included
    "data_fallbacks",  # calls that went over gRPC because the data socket could not be reached
)

#: Over gRPC, or over the local or the data socket, which each have one that gRPC lacks.
_RPCS: Final = (*pb.DESCRIPTOR.services_by_name["Cache"].methods_by_name, "SaveStaged", "Fetch")
_VIEW: Final = "view"
#: How the caller got the bytes of an entry: as a view in place, copied in place, or sent by rpc.
PATHS: Final = (_VIEW, "copy", "stream")
#: Names of the counters that are reported to the daemon.
_REPORTED: Final = frozenset(
    (
        *("lookups", "hits", "misses", "hit_entries", "hit_tokens", "lookup_tokens", "failures"),
        *("restored_bytes", "restored_tokens", "restore_times", "restore_ns", "saves"),
    )
)


class Report(NamedTuple):
    """What a client reports to the daemon: how much each counter grew since the last report."""

    amounts: Mapping[Name, int]
    #: The keys of some look-ups that found nothing. The daemon may know why.
    absent: Sequence[Sequence[Key]]

    def message(self) -> pb.Usage:
        """The message that carries it."""
        usage = pb.Usage()
        tiers: dict[Tier, pb.TierUsage] = {}
        for (name, *of), amount in self.amounts.items():
            if not of:
                setattr(usage, name, amount)
            elif name in ("misses", "failures"):
                getattr(usage, name)[of[0]] = amount
            elif name == "restore_times":
                usage.restore_times[:] = usage.restore_times or [0] * (len(LATENCY_BOUNDS_NS) + 1)
                usage.restore_times[of[0]] = amount
            else:
                usage_of_tier = tiers.setdefault(of[0], pb.TierUsage(tier=of[0]))
                match name:
                    case "restored_bytes":
                        usage_of_tier.restored_bytes[of[1]] = amount
                    case "saves":
                        usage_of_tier.saves.add(reason=of[1], outcome=of[2], entries=amount)
                    case _:
                        setattr(usage_of_tier, name, amount)
        usage.tiers.extend(tiers.values())
        usage.absent.extend(pb.AbsentMiss(keys=keys) for keys in self.absent)
        return usage


class Counters:
    """Thread-safe counts, each present from the start.

    `misses` are the look-ups that found nothing, by reason: they add up to lookups - hits.
    `failures` are restores, reads and probes that failed, by reason: a hit whose bytes then can't
    be restored counts as a hit and as a failure. `saves` are by their final status, `rpcs` by their
    name.

    `take_report` takes what goes into the daemon's own numbers, for the heartbeats to carry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Everything that was ever counted, and how much of it was reported to the daemon.
        self._amounts: defaultdict[Name, int] = defaultdict(int)
        self._reported: defaultdict[Name, int] = defaultdict(int)
        #: Keys of some look-ups that found nothing, since the last report.
        self._absent: list[Sequence[Key]] = []

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._amounts[name,] += amount

    def rpc(self, name: str) -> None:
        with self._lock:
            self._amounts["rpcs", name] += 1

    def miss(self, reason: MissReason, lookup_tokens: int = 0, keys: Sequence[Key] = ()) -> None:
        """One look-up that found nothing. `lookup_tokens`: those looked for; 0: not known.
        `keys`: some of those that would have been a hit."""
        with self._lock:
            amounts = self._amounts
            amounts["misses", reason.value] += 1
            amounts["lookups",] += 1
            amounts["lookup_tokens",] += lookup_tokens
            if keys and reason is MissReason.ABSENT:
                self._keep_absent(keys)

    def hit(
        self, entries: Sequence[Entry], token_counts: Sequence[int], lookup_tokens: int = 0
    ) -> None:
        """One look-up that found `entries`. `lookup_tokens`: those looked for; 0: not known."""
        found = as_entries(entries).by_tier(token_counts)
        found_tokens = sum(token_counts)
        with self._lock:
            amounts = self._amounts
            amounts["hits",] += 1
            amounts["lookups",] += 1
            amounts["lookup_tokens",] += max(lookup_tokens, found_tokens)
            for tier, (entries_there, tokens) in found.items():
                amounts["hit_entries", tier] += entries_there
                amounts["hit_tokens", tier] += tokens

    def failure(self, reason: MissReason) -> None:
        """A restore, a read or a probe that failed."""
        with self._lock:
            self._amounts["failures", reason.value] += 1

    def restored(self, entries: Sequence[Entry], path: str) -> None:
        """The caller got these entries whole, by a path of `PATHS`."""
        entries = as_entries(entries)
        found = entries.by_tier(entries.payload_bytes)
        with self._lock:
            if path != _VIEW:
                self._amounts["restored_entries",] += len(entries)
            for tier, (_, size_bytes) in found.items():
                self._amounts["restored_bytes", tier, path] += size_bytes

    def viewed(self, entries: Sequence[Entry]) -> None:
        """The caller got views of these entries, to read them in place."""
        self.restored(entries, _VIEW)

    def restore(self, tokens: int, took_ns: int) -> None:
        """One restore, and the tokens that need not be computed because of it."""
        bucket = bisect_left(LATENCY_BOUNDS_NS, took_ns)
        with self._lock:
            amounts = self._amounts
            amounts["restored_tokens",] += tokens
            amounts["restore_times", bucket] += 1
            amounts["restore_ns",] += took_ns

    def saves(
        self,
        outcomes: Iterable[SaveOutcome],
        payload_bytes: Iterable[int],
        kinds: Iterable[tuple[Tier, SaveReason]],
    ) -> None:
        """How saves ended, each with the bytes of its payload, its tier and its reason."""
        ended: dict[tuple[SaveStatus, tuple[Tier, SaveReason]], int] = {}
        saved_entries = saved_bytes = 0
        # `kinds` may be endless.
        for outcome, size_bytes, kind in zip(outcomes, payload_bytes, kinds, strict=False):
            status = outcome.status
            how = status, kind
            ended[how] = ended.get(how, 0) + 1
            if status is SaveStatus.SAVED:
                saved_entries += 1
                saved_bytes += size_bytes
        with self._lock:
            self._amounts["saved_entries",] += saved_entries
            self._amounts["saved_bytes",] += saved_bytes
            for (status, (tier, reason)), entries in ended.items():
                self._amounts["saves", tier, reason, status.label] += entries

    @property
    def to_report(self) -> bool:
        """Whether `take_report` has something to take."""
        with self._lock:
            reported = self._reported
            return any(
                name[0] in _REPORTED and amount != reported[name]
                for name, amount in self._amounts.items()
            )

    def take_report(self) -> Report:
        """What was counted since the last call, as of one moment."""
        with self._lock:
            reported = self._reported
            amounts = {
                name: amount - reported[name]
                for name, amount in self._amounts.items()
                if name[0] in _REPORTED and amount != reported[name]
            }
            for name, amount in amounts.items():
                reported[name] += amount
            absent, self._absent = self._absent, []
            return Report(amounts, absent)

    def give_back(self, report: Report) -> None:
        """Add a report that the daemon may not have got to the next one."""
        with self._lock:
            for name, amount in report.amounts.items():
                self._reported[name] -= amount
            for keys in report.absent:
                self._keep_absent(keys)

    def _keep_absent(self, keys: Sequence[Key]) -> None:
        """Keep the keys of one look-up; a report has room for the first of them."""
        if len(self._absent) < MAX_TOLD_MISSES:
            self._absent.append(keys)

    def snapshot(self) -> Snapshot:
        """Everything as of one moment, as a dict of the caller's own."""
        scalars = dict.fromkeys(_SCALARS, 0)
        groups: dict[str, dict[str, int]] = {
            "misses": {reason.value: 0 for reason in MissReason},
            "failures": {reason.value: 0 for reason in MissReason},
            "saves": {status.label: 0 for status in SaveStatus},
            "rpcs": dict.fromkeys(_RPCS, 0),
            "hit_tokens_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_path": dict.fromkeys(PATHS, 0),
        }
        with self._lock:
            amounts = dict(self._amounts)
        for (name, *of), amount in amounts.items():
            match name:
                case "misses" | "failures" | "rpcs":
                    groups[name][of[0]] += amount
                case "saves":
                    groups[name][of[-1]] += amount
                case "restore_times":
                    scalars["restores"] += amount
                case "restore_ns":
                    pass  # only reported, with the histogram
                case "restored_bytes":
                    tier, path = of
                    groups["restored_bytes_by_path"][path] += amount
                    if path != _VIEW:  # nothing was restored
                        scalars[name] += amount
                        groups["restored_bytes_by_tier"][tier.label] += amount
                case _:
                    scalars[name] += amount
                    if name == "hit_tokens":
                        groups["hit_tokens_by_tier"][of[0].label] += amount
        return {**scalars, **groups}
