"""What clients report of themselves, added up by label.

A lookup in place is no call: the daemon learns of it from the client's heartbeats. A client can
report what it likes. So reports that do not add up are refused, the number of labels is bounded,
and nothing but figures for people is made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from operator import add, attrgetter
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidSize, MalformedMessage
from ...proto.limits import (
    KEY_BYTES,
    LATENCY_BOUNDS_NS,
    MAX_LABELS,
    MAX_REPORTED,
    MAX_TOLD_KEYS,
    MAX_TOLD_MISSES,
)
from ...proto.namespaces import check_label
from ...proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from ..core.counters import Histogram
from ..core.journal import CAUSES, Happening, Journal
from ..core.shares import HOST, Holder, Shares

DEFAULT_LABEL: Final = "default"
OTHER_LABEL: Final = "other"
REASONS: Final = tuple(reason.value for reason in MissReason)
OUTCOMES: Final = tuple(status.label for status in SaveStatus)
#: How bytes reached the engine, as clients report it (`client.counters.PATHS`).
PATHS: Final = ("view", "copy", "stream")
#: Why absent entries are absent. They left a tier (`journal.Happening`); or they were never saved
#: since the start; or nothing is known: it is too long ago for the journal, or no keys were sent.
LEFT: Final = ("evicted", "deleted", "damaged", "replaced")
BECAUSE: Final = (*LEFT, "never_saved", "not_remembered", "not_told")
#: Counters that have no label but the namespace.
SCALARS: Final = ("lookups", "hits", "lookup_tokens", "restored_tokens")
#: Low enough for the sum over all labels to fit into a message, too.
_MOST_SHOWN: Final = 2**57


class LabelUsage:
    """The sums of one label. Names are those of `pb.Usage`."""

    def __init__(self, name: str = DEFAULT_LABEL) -> None:
        self.name: Final = name
        self.scalars = dict.fromkeys(SCALARS, 0)
        self.misses = dict.fromkeys(REASONS, 0)
        self.failures = dict.fromkeys(REASONS, 0)
        #: Absent misses of entries that left no tier. With `left` they add up to all absent misses.
        self.absent_because = dict.fromkeys(BECAUSE[len(LEFT) :], 0)
        #: Absent misses of entries that left a tier, by tier and reason.
        self.left = {(tier, because): 0 for tier in Tier for because in LEFT}
        self.hit_entries = dict.fromkeys(Tier, 0)
        self.hit_tokens = dict.fromkeys(Tier, 0)
        self.restored_bytes = {(tier, path): 0 for tier in Tier for path in PATHS}
        #: How long restores took, in nanoseconds.
        self.restores = Histogram(LATENCY_BOUNDS_NS)
        #: By tier, reason and outcome.
        self.saves: dict[tuple[Tier, SaveReason, str], int] = {}

    def add(self, usage: pb.Usage) -> None:
        """Add a report that was checked. `judge` adds its absent misses."""
        for name in SCALARS:
            self.scalars[name] += getattr(usage, name)
        self.absent_because["not_told"] += usage.misses.get("absent", 0) - len(usage.absent)
        for reason, count in usage.misses.items():
            self.misses[reason] += count
        for reason, count in usage.failures.items():
            self.failures[reason] += count
        for bucket, count in enumerate(usage.restore_times):
            self.restores.counts[bucket] += count
        self.restores.total += usage.restore_ns
        for part in usage.tiers:
            tier = Tier(part.tier)
            self.hit_entries[tier] += part.hit_entries
            self.hit_tokens[tier] += part.hit_tokens
            for path, size_bytes in part.restored_bytes.items():
                self.restored_bytes[tier, path] += size_bytes
            for saved in part.saves:
                kind = tier, SaveReason(saved.reason), saved.outcome
                self.saves[kind] = self.saves.get(kind, 0) + saved.entries

    def judge(self, absent: Iterable[pb.AbsentMiss], journal: Journal) -> None:
        """Count why keys are absent, as far as the journal reaches back. A miss with several keys
        counts by one of them that left a tier."""
        for miss in absent:
            fates = [fate for key in miss.keys if (fate := journal.fate(key)) is not None]
            # An entry that is cached now was saved after the client looked for it.
            left = [fate for fate in fates if fate.what is not Happening.SAVED]
            if left:
                first = min(left, key=attrgetter("what"))
                because = "evicted" if first.what in CAUSES else first.what.name.lower()
                self.left[first.tier, because] += 1
            else:
                because = "never_saved" if fates or journal.reaches_back else "not_remembered"
                self.absent_because[because] += 1

    def message(self) -> pb.Usage:
        """The sums as operators get them, without those that are 0."""
        usage = pb.Usage()
        for name, amount in self.scalars.items():
            setattr(usage, name, bounded(amount))
        if any(self.restores.counts):
            usage.restore_times.extend(map(bounded, self.restores.counts))
            usage.restore_ns = bounded(self.restores.total)
        because: Counter[str] = Counter(self.absent_because)
        for (_, how), count in self.left.items():
            because[how] += count
        counted: Iterable[tuple[str, Mapping[str, int]]] = (
            ("misses", self.misses),
            ("failures", self.failures),
            ("absent_because", because),
        )
        for name, counts in counted:
            getattr(usage, name).update({reason: bounded(n) for reason, n in counts.items() if n})
        for tier in Tier:
            paths = {path: bounded(self.restored_bytes[tier, path]) for path in PATHS}
            tier_usage = pb.TierUsage(
                hit_entries=bounded(self.hit_entries[tier]),
                hit_tokens=bounded(self.hit_tokens[tier]),
                restored_bytes={path: size for path, size in paths.items() if size},
                absent_because={
                    how: bounded(self.left[tier, how]) for how in LEFT if self.left[tier, how]
                },
                saves=[
                    pb.SavedUsage(reason=reason.value, outcome=outcome, entries=bounded(entries))  # type: ignore[arg-type]
                    for (saved_in, reason, outcome), entries in self.saves.items()
                    if saved_in is tier
                ],
            )
            if tier_usage.ByteSize():
                tier_usage.tier = pb.Tier.ValueType(tier)
                usage.tiers.append(tier_usage)
        return usage


def bounded(amount: int) -> int:
    """A reported sum, limited to what a message can hold: otherwise one client that lies could keep
    operators from seeing anything."""
    return min(amount, _MOST_SHOWN)


@dataclass(slots=True)
class SessionUsage:
    """What the client of one session has reported."""

    lookups: int = 0
    hits: int = 0
    restores: int = 0
    restored_bytes: int = 0

    def add(self, usage: pb.Usage) -> None:
        """Add a report that was checked."""
        self.lookups += usage.lookups
        self.hits += usage.hits
        self.restores += sum(usage.restore_times)
        self.restored_bytes += sum(sum(part.restored_bytes.values()) for part in usage.tiers)


class UsageBook:
    """The sums of all labels. When there are too many, new labels are counted as `OTHER_LABEL`. The
    event loop's; `items` may be called on any thread."""

    def __init__(self) -> None:
        self._labels: dict[str, LabelUsage] = {}
        #: One place is reserved for `OTHER_LABEL`.
        self._places = Shares("labels", MAX_LABELS - 1)
        #: What open sessions have reported, by their number.
        self.sessions: Final[dict[int, SessionUsage]] = {}

    def of(self, label: str, tenant: str = HOST) -> LabelUsage:
        """The sums of a label; "" is `DEFAULT_LABEL`. A tenant that has its share of the labels
        counts under `OTHER_LABEL`. Raises InvalidSize for an invalid label."""
        label = check_label(label) if label else DEFAULT_LABEL
        found = self._labels.get(label)
        if found is None:
            holder = Holder(tenant)
            if label != OTHER_LABEL and self._places.may_take(holder):
                self._places.add(holder)
            else:
                label = OTHER_LABEL
            found = self._labels.setdefault(label, LabelUsage(label))
        return found

    def restores(self) -> Histogram:
        """How long restores took, over all labels."""
        found = Histogram(LATENCY_BOUNDS_NS)
        for sums in list(self._labels.values()):
            found.counts = list(map(add, found.counts, sums.restores.counts))
            found.total += sums.restores.total
        return found

    def items(self) -> Iterator[tuple[str, LabelUsage]]:
        """Labels and their sums."""
        return iter(list(self._labels.items()))


def check_usage(usage: pb.Usage) -> pb.Usage:
    """Returns the report if it is consistent, and all names in it are known. Raises
    MalformedMessage, InvalidSize."""
    _check_lengths(usage)
    _known("reason of a miss", usage.misses, REASONS)
    _known("reason of a failure", usage.failures, REASONS)
    numbers = [getattr(usage, name) for name in SCALARS]
    numbers += [*usage.misses.values(), *usage.failures.values()]
    numbers += [*usage.restore_times, usage.restore_ns]
    tiers = set(map(int, Tier))
    for part in usage.tiers:
        _known("tier", [part.tier], tiers)
        _known("path", part.restored_bytes, PATHS)
        numbers += [part.hit_entries, part.hit_tokens, *part.restored_bytes.values()]
        for saved in part.saves:
            _known("reason of a save", [saved.reason], set(map(int, SaveReason)))
            _known("outcome of a save", [saved.outcome], OUTCOMES)
            numbers.append(saved.entries)
    if max(numbers) > MAX_REPORTED:
        raise InvalidSize(f"a report has numbers up to {MAX_REPORTED}, not {max(numbers)}")
    if usage.hits + sum(usage.misses.values()) != usage.lookups:
        raise MalformedMessage("the hits and misses of a report do not add up to its look-ups")
    if len(usage.absent) > min(MAX_TOLD_MISSES, usage.misses.get("absent", 0)) or any(
        not 0 < len(miss.keys) <= MAX_TOLD_KEYS or any(len(key) != KEY_BYTES for key in miss.keys)
        for miss in usage.absent
    ):
        raise MalformedMessage("a report names keys of misses that it does not count, or no keys")
    if len(usage.restore_times) not in (0, len(LATENCY_BOUNDS_NS) + 1):
        raise MalformedMessage(f"the times of restores are {len(LATENCY_BOUNDS_NS) + 1} numbers")
    if usage.absent_because or any(part.absent_because for part in usage.tiers):
        raise MalformedMessage("why an entry is absent is for the daemon to say")
    hit_tokens = sum(part.hit_tokens for part in usage.tiers)
    if hit_tokens > usage.lookup_tokens:
        raise MalformedMessage("a report has more hit tokens than were looked for")
    return usage


def _check_lengths(usage: pb.Usage) -> None:
    """Refuse columns with more values than there are names, before looking at any value."""
    _at_most(len(REASONS), "reasons of misses", usage.misses)
    _at_most(len(REASONS), "reasons of failures", usage.failures)
    _at_most(len(LATENCY_BOUNDS_NS) + 1, "times of restores", usage.restore_times)
    _at_most(MAX_TOLD_MISSES, "misses with their keys", usage.absent)
    _at_most(len(Tier), "tiers", usage.tiers)
    for part in usage.tiers:
        _at_most(len(PATHS), "paths", part.restored_bytes)
        _at_most(len(SaveReason) * len(OUTCOMES), "kinds of saves", part.saves)


def _at_most(most: int, what: str, given: Sized) -> None:
    if len(given) > most:
        raise MalformedMessage(f"a report has {len(given)} {what}, at most there are {most}")


def _known(what: str, given: Iterable[object], words: Iterable[object]) -> None:
    unknown = set(given) - set(words)
    if unknown:
        some = str(sorted(map(str, unknown))[0])[:40]
        raise MalformedMessage(f"a report names a {what} that there is not: {some!r}")
