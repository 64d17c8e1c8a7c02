"""The counters of a client, and its reports to the daemon."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, groupby
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypedDict, cast, get_type_hints

from ..proto.keys import Key
from ..proto.limits import (
    LATENCY_BOUNDS_NS,
    MAX_TOLD_KEYS,
    MAX_TOLD_KEYS_IN_ALL,
    MAX_TOLD_MISSES,
)
from ..proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from .results import Entries, SaveOutcome

if TYPE_CHECKING:  # imported where it is used: it takes longer than the client's own modules
    from ..proto import prefixd_pb2 as pb

#: A counter's name, and what it is split by: a tier, a reason, a path.
Name: TypeAlias = tuple[Any, ...]


class Snapshot(TypedDict):
    """What a client has counted so far. Every counter is there from the start, as is every reason,
    status, tier and call by which one is split."""

    #: Searches and claims, each with one hit or one miss.
    lookups: int
    hits: int
    hit_entries: int
    hit_tokens: int
    #: Tokens that were looked for, by look-ups that know how many.
    lookup_tokens: int
    restored_entries: int
    #: Calls, successful or not.
    restores: int
    #: Tokens of the runs of good entries that restores began with.
    restored_tokens: int
    restored_bytes: int
    saved_entries: int
    saved_bytes: int
    lost_claims: int
    lost_reservations: int
    #: Sessions that were opened, the first one included.
    sessions: int
    #: Calls that went over gRPC because the data socket could not be reached.
    data_fallbacks: int
    #: Look-ups that found nothing, by `MissReason`; they add up to lookups - hits.
    misses: dict[str, int]
    #: Restores, reads and probes that failed, by `MissReason`.
    failures: dict[str, int]
    #: Tokens that look-ups did not get, by `MissReason`, or `partial_block`; they add up to
    #: lookup_tokens - hit_tokens.
    missed_tokens: dict[str, int]
    #: By `SaveStatus.label`.
    saves: dict[str, int]
    #: Calls to the daemon, by name.
    rpcs: dict[str, int]
    #: By `Tier.label`.
    hit_tokens_by_tier: dict[str, int]
    restored_bytes_by_tier: dict[str, int]
    #: By `view` (read in place), `copy` (copied in place) and `stream` (sent by rpc).
    restored_bytes_by_path: dict[str, int]


_SCALARS: Final = tuple(name for name, kind in get_type_hints(Snapshot).items() if kind is int)

_VIEW: Final = "view"
#: How the caller got the bytes of an entry: as a view in place, copied in place, or sent by rpc.
PATHS: Final = (_VIEW, "copy", "stream")
#: Names of the counters that are reported to the daemon.
_REPORTED: Final = frozenset(
    (
        *("lookups", "hits", "misses", "hit_entries", "hit_tokens", "lookup_tokens", "failures"),
        "missed_tokens",
        *("restored_bytes", "restored_tokens", "restore_times", "restore_ns", "saves"),
    )
)


_SAVED: Final = SaveStatus.SAVED
#: What every look-up counts, found without the enumeration: its attributes take 0.1 us each.
_ABSENT: Final = MissReason.ABSENT
_MISSES: Final[Mapping[MissReason, Name]] = {each: ("misses", each.value) for each in MissReason}
#: Why tokens are missed for which no key was looked up: they do not fill a block.
NO_KEY: Final = "partial_block"
#: A report goes out at once when its misses fill this part of it.
_HURRY: Final = 0.75


class Missing(NamedTuple):
    """What a look-up did not get, and why."""

    reason: MissReason
    #: 0: not known.
    tokens: int = 0
    #: Its first missing key; of prefixes, those that were not there, longest first.
    keys: Sequence[Key] = ()


class _Absent:
    """Look-ups that missed the same keys."""

    __slots__ = ("lookups", "since_s", "tokens")

    def __init__(self, since_s: float, tokens: int = 0, lookups: int = 0) -> None:
        self.tokens = tokens
        #: Of them, those that found nothing.
        self.lookups = lookups
        #: When the first of them was.
        self.since_s = since_s


class Report(NamedTuple):
    """What a client reports to the daemon: how much each counter grew since the last report."""

    amounts: Mapping[Name, int]
    #: The keys that look-ups missed. The daemon may know why.
    absent: Mapping[tuple[Key, ...], _Absent]

    def message(self) -> pb.Usage:
        """The message that carries it."""
        from ..proto import prefixd_pb2 as pb

        usage = pb.Usage()
        tiers: dict[int, pb.TierUsage] = {}
        for (name, *of), amount in self.amounts.items():
            if not of:
                setattr(usage, name, amount)
            elif name in ("misses", "failures", "missed_tokens"):
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
        now_s = monotonic()
        usage.absent.extend(
            pb.AbsentMiss(
                keys=keys[:MAX_TOLD_KEYS],
                more=len(keys) > MAX_TOLD_KEYS,
                tokens=missed.tokens,
                lookups=missed.lookups,
                age_ns=max(0, round((now_s - missed.since_s) * 1e9)),
            )
            for keys, missed in self.absent.items()
        )
        return usage


def _rpcs() -> tuple[str, ...]:
    """Calls over gRPC but for sessions, which are counted on their own, and the two that only the
    local and the data socket have."""
    from ..proto import prefixd_pb2 as pb

    service = pb.DESCRIPTOR.services_by_name["Cache"]
    return (*(name for name in service.methods_by_name if name != "Session"), "SaveStaged", "Fetch")


class ClientCounters:
    """Thread-safe counts.

    Look-ups that do not know their tokens count no tokens at all. A hit whose bytes then can't be
    restored counts as a hit and as a failure.

    `take_report` takes what goes into the daemon's own numbers, for the heartbeats to carry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Everything that was ever counted, and how much of it was reported to the daemon.
        self._amounts: defaultdict[Name, int] = defaultdict(int)
        self._reported: defaultdict[Name, int] = defaultdict(int)
        #: Look-ups of one key that were found, by tier; `_fold` adds them to `_amounts`.
        self._found_ones: defaultdict[int, int] = defaultdict(int)
        #: What look-ups missed since the last report, by the keys that were not there.
        self._absent: dict[tuple[Key, ...], _Absent] = {}
        self._absent_keys = 0
        #: Called when the misses should be reported soon, in the thread of a look-up.
        self.when_many: Callable[[], None] | None = None

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._amounts[name,] += amount

    def rpc(self, name: str) -> None:
        with self._lock:
            self._amounts["rpcs", name] += 1

    def miss(self, reason: MissReason, lookup_tokens: int = 0, keys: Sequence[Key] = ()) -> None:
        """One look-up that found nothing. `lookup_tokens`: those looked for; 0: not known.
        `keys`: as in `Missing`."""
        self._looked({}, lookup_tokens, (Missing(reason, lookup_tokens, keys),))

    def hit(
        self,
        entries: Entries,
        token_counts: Sequence[int],
        lookup_tokens: int = 0,
        missing: Sequence[Missing] = (),
    ) -> None:
        """One look-up that found `entries`. `lookup_tokens`: those looked for; 0: not known.
        `missing`: what it did not get; its tokens are those looked for and not found, so the last
        one need not have any."""
        found = entries.by_tier(token_counts) if entries else {}
        self._looked({int(tier): sums for tier, sums in found.items()}, lookup_tokens, missing)

    def looked(
        self, tiers: Sequence[int], keys: int, lookup_tokens: int, missing: Missing | None
    ) -> None:
        """One look-up of `keys` keys, without their entries. `tiers`: of those that are there, by
        number; below 0: not known. `lookup_tokens`: what all keys stand for; 0: not known."""
        found: dict[int, tuple[int, int]] = {}
        share, remains = divmod(lookup_tokens, keys)
        for tier in set(tiers):
            entries = tiers.count(tier)
            found[tier] = entries, entries * share
        if remains and missing is None:
            # All keys are there: the last one has what remains of the division.
            entries, tokens = found[tiers[-1]]
            found[tiers[-1]] = entries, tokens + remains
        self._looked(found, lookup_tokens, () if missing is None else (missing,))

    def found_one(self, tier: int) -> None:
        """One look-up of one key, which is in this tier; it stands for no known tokens."""
        with self._lock:
            self._found_ones[tier] += 1

    def _fold(self) -> None:
        """Add what `found_one` counted. Called with the lock, before the amounts are read."""
        for tier, count in self._found_ones.items():
            self._amounts["lookups",] += count
            self._amounts["hits",] += count
            self._amounts["hit_entries", tier] += count
        self._found_ones.clear()

    def _looked(
        self,
        found: Mapping[int, tuple[int, int]],
        lookup_tokens: int,
        missing: Sequence[Missing],
    ) -> None:
        """One look-up. `found`: by tier, how many entries, and their tokens."""
        left = 0
        if lookup_tokens:
            found_tokens = sum([tokens for _, tokens in found.values()])
            lookup_tokens = max(lookup_tokens, found_tokens)
            left = lookup_tokens - found_tokens
        hurry = False
        with self._lock:
            amounts = self._amounts
            amounts["lookups",] += 1
            if found:
                amounts["hits",] += 1
            else:
                amounts[_MISSES[missing[0].reason]] += 1
            if lookup_tokens:
                amounts["lookup_tokens",] += lookup_tokens
            for number, (entries, tokens) in found.items():
                tier = number if number > 0 else 0
                amounts["hit_entries", tier] += entries
                if lookup_tokens:
                    amounts["hit_tokens", tier] += tokens
            for place, (reason, tokens, keys) in enumerate(missing, 1):
                missed = 0
                if left:
                    missed = left if place == len(missing) else min(left, tokens)
                    left -= missed
                if missed:
                    named = keys or reason is not _ABSENT
                    amounts["missed_tokens", reason.value if named else NO_KEY] += missed
                if keys and reason is _ABSENT and (missed or not found):
                    hurry = self._keep_absent(tuple(keys), missed, 0 if found else 1)
            if left:
                amounts["missed_tokens", NO_KEY] += left
        if hurry and self.when_many is not None:
            self.when_many()

    def failure(self, reason: MissReason) -> None:
        """A restore, a read or a probe that failed."""
        with self._lock:
            self._amounts["failures", reason.value] += 1

    def restored(self, entries: Entries, path: str) -> None:
        """The caller got these entries whole, by a path of `PATHS`."""
        found = entries.by_tier(entries.payload_bytes)
        with self._lock:
            if path != _VIEW:
                self._amounts["restored_entries",] += len(entries)
            for tier, (_, size_bytes) in found.items():
                self._amounts["restored_bytes", tier, path] += size_bytes

    def viewed(self, entries: Entries) -> None:
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
        statuses = [outcome.status for outcome in outcomes]
        saved = [status is _SAVED for status in statuses]
        # `kinds` may be endless. Of one save, nearly all ended alike.
        ended = [
            (*kind, status, sum(1 for _ in some))
            for (status, kind), some in groupby(zip(statuses, kinds, strict=False))
        ]
        with self._lock:
            self._amounts["saved_entries",] += sum(saved)
            self._amounts["saved_bytes",] += sum(compress(payload_bytes, saved))
            for tier, reason, status, entries in ended:
                self._amounts["saves", tier, reason, status] += entries

    @property
    def to_report(self) -> bool:
        """Whether `take_report` has something to take."""
        with self._lock:
            self._fold()
            reported = self._reported
            return any(
                name[0] in _REPORTED and amount != reported[name]
                for name, amount in self._amounts.items()
            )

    def take_report(self) -> Report:
        """What was counted since the last call, as of one moment."""
        with self._lock:
            self._fold()
            reported = self._reported
            amounts = {
                name: amount - reported[name]
                for name, amount in self._amounts.items()
                if name[0] in _REPORTED and amount != reported[name]
            }
            for name, amount in amounts.items():
                reported[name] += amount
            absent, self._absent, self._absent_keys = self._absent, {}, 0
            return Report(amounts, absent)

    def give_back(self, report: Report) -> None:
        """Add a report that the daemon may not have got to the next one."""
        with self._lock:
            for name, amount in report.amounts.items():
                self._reported[name] -= amount
            for keys, missed in report.absent.items():
                self._keep_absent(keys, missed.tokens, missed.lookups, missed.since_s)

    @property
    def many(self) -> bool:
        """Are there so many misses that they should be reported soon?"""
        return (
            max(len(self._absent) / MAX_TOLD_MISSES, self._absent_keys / MAX_TOLD_KEYS_IN_ALL)
            >= _HURRY
        )

    def _keep_absent(
        self, keys: tuple[Key, ...], tokens: int, lookups: int, since_s: float | None = None
    ) -> bool:
        """Keep what look-ups missed since then (None: now), as far as a report has room. True: it
        just became much."""
        kept = self._absent.get(keys)
        if kept is None:
            told = min(len(keys), MAX_TOLD_KEYS)
            if (
                len(self._absent) >= MAX_TOLD_MISSES
                or self._absent_keys + told > MAX_TOLD_KEYS_IN_ALL
            ):
                return False
            before = self.many
            since_s = monotonic() if since_s is None else since_s
            self._absent[keys] = _Absent(since_s, tokens, lookups)
            self._absent_keys += told
            return self.many and not before
        kept.tokens += tokens
        kept.lookups += lookups
        if since_s is not None:
            kept.since_s = min(kept.since_s, since_s)
        return False

    def snapshot(self) -> Snapshot:
        """Everything as of one moment, as a dict of the caller's own."""
        scalars = dict.fromkeys(_SCALARS, 0)
        groups: dict[str, dict[str, int]] = {
            "misses": {reason.value: 0 for reason in MissReason},
            "failures": {reason.value: 0 for reason in MissReason},
            "missed_tokens": dict.fromkeys((*map(str, MissReason), NO_KEY), 0),
            "saves": {status.label: 0 for status in SaveStatus},
            "rpcs": dict.fromkeys(_rpcs(), 0),
            "hit_tokens_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_path": dict.fromkeys(PATHS, 0),
        }
        with self._lock:
            self._fold()
            amounts = dict(self._amounts)
        for (name, *of), amount in amounts.items():
            match name:
                case "misses" | "failures" | "missed_tokens" | "rpcs":
                    groups[name][of[0]] += amount
                case "saves":
                    groups[name][of[-1].label] += amount
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
                    if name == "hit_tokens" and of[0]:
                        groups["hit_tokens_by_tier"][Tier(of[0]).label] += amount
        return cast(Snapshot, {**scalars, **groups})
