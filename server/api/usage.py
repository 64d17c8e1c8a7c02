"""What clients report of themselves, added up by label.

A lookup in place is no call: the daemon learns of it from the client's heartbeats. A client can
report what it likes. So reports that do not add up are refused, the number of labels is bounded,
and nothing but figures for people is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from threading import Lock
from typing import Final, NamedTuple

from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidSize, MalformedMessage
from ...proto.limits import (
    KEY_BYTES,
    LATENCY_BOUNDS_NS,
    MAX_LABELS,
    MAX_REPORTED,
    MAX_TOLD_KEYS,
    MAX_TOLD_KEYS_IN_ALL,
    MAX_TOLD_MISSES,
)
from ...proto.namespaces import check_label
from ...proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier, missed_because
from ..core.counters import Histogram
from ..core.journal import CAUSES, Happening, Journal
from ..core.shares import HOST, Holder, Shares

DEFAULT_LABEL: Final = "default"
OTHER_LABEL: Final = "other"
REASONS: Final = tuple(reason.value for reason in MissReason)
#: How bytes reached the engine, as clients report it (`client.counters.PATHS`).
PATHS: Final = ("view", "copy", "stream")
#: What became of the first key that a look-up missed, when the client says that it was absent. It
#: left a tier (`journal.Happening`), or it left none that is known.
LEFT: Final = ("deleted", "damaged", "replaced")
EVICTED: Final = "evicted"
IN_NO_TIER: Final = ("never_saved", "too_old", "before_start", "not_told")
ABSENT: Final = MissReason.ABSENT.value
#: Tokens of prompts for which there is no key (`client.counters.NO_KEY`).
NO_KEY: Final = "partial_block"
#: What a report has of a kind, at most: more than this version knows, for later ones.
MAX_WORDS: Final = 64
MAX_TIERS: Final = 8
MAX_SAVE_KINDS: Final = 2 * len(SaveReason) * len(SaveStatus)
_UNEXPECTED: Final = MissReason.UNEXPECTED.value
_TIERS: Final = frozenset(map(int, Tier))
_SAVE_REASONS: Final = frozenset(map(int, SaveReason))
_OUTCOMES: Final = frozenset(map(int, SaveStatus))
#: Reasons of missed tokens that need no journal.
_OTHERS: Final = (*(reason for reason in REASONS if reason != ABSENT), NO_KEY)
#: Counters that have no label but the namespace.
SCALARS: Final = ("lookups", "hits", "lookup_tokens", "restored_tokens")
#: Low enough for the sum over all labels to fit into a message, too.
_MOST_SHOWN: Final = 2**57


class Why(NamedTuple):
    """Why tokens were missed: a reason, the tier that the key left, and why it was evicted."""

    reason: str
    tier: Tier | None = None
    cause: str = ""


#: The usual reasons have a series from the start, so that their first tokens show in its rate.
_FROM_THE_START: Final = (Why("never_saved"), *(Why(EVICTED, tier, "save") for tier in Tier))


class LabelUsage:
    """The sums of one label. Names are those of `pb.Usage`.

    `add` changes all of them at once: what `copy` returns adds up, on any thread.
    """

    def __init__(self, name: str = DEFAULT_LABEL, holder: Holder | None = None) -> None:
        self.name: Final = name
        #: Whose share of the labels it counts to. None: it takes no place.
        self.holder: Final = holder
        #: Open sessions that count under it.
        self.sessions = 0
        self.scalars = dict.fromkeys(SCALARS, 0)
        self.misses = dict.fromkeys(REASONS, 0)
        self.failures = dict.fromkeys(REASONS, 0)
        #: Missed tokens, and look-ups that found nothing, by what became of the first missing key.
        #: The tokens add up to `lookup_tokens` less all `hit_tokens`, the look-ups to `misses`.
        self.missed = dict.fromkeys(_FROM_THE_START, (0, 0))
        #: By tier; None: not known, of look-ups that were told presences only.
        self.hit_entries: dict[Tier | None, int] = dict.fromkeys(Tier, 0)
        self.hit_tokens: dict[Tier | None, int] = dict.fromkeys(Tier, 0)
        self.restored_bytes = {(tier, path): 0 for tier in Tier for path in PATHS}
        #: How long restores took, in nanoseconds.
        self.restores = Histogram(LATENCY_BOUNDS_NS)
        #: By tier, reason and outcome.
        self.saves: dict[tuple[Tier, SaveReason, SaveStatus], int] = {}

        self._lock: Final = Lock()

    def add(self, usage: pb.Usage, journal: Journal | None = None, now_ns: int = 0) -> None:
        """Add a report that was checked. `journal` knows why keys are absent."""
        judged = self._judge(usage, journal, now_ns)
        with self._lock:
            self._add(usage)
            for why, (tokens, lookups) in judged.items():
                before = self.missed.get(why, (0, 0))
                self.missed[why] = before[0] + tokens, before[1] + lookups

    def copy(self) -> LabelUsage:
        """The sums of one moment."""
        found = LabelUsage(self.name)
        with self._lock:
            for name, sums in vars(self).items():
                if isinstance(sums, dict):
                    setattr(found, name, dict(sums))
            found.restores.counts[:] = self.restores.counts
            found.restores.total = self.restores.total
        return found

    def _add(self, usage: pb.Usage) -> None:
        for name in SCALARS:
            self.scalars[name] += getattr(usage, name)
        for reason, count in usage.misses.items():
            self.misses[reason] += count
        for reason, count in usage.failures.items():
            self.failures[reason] += count
        for bucket, count in enumerate(usage.restore_times):
            self.restores.counts[bucket] += count
        self.restores.total += usage.restore_ns
        for part in usage.tiers:
            where = Tier(part.tier) if part.tier else None
            self.hit_entries[where] = self.hit_entries.get(where, 0) + part.hit_entries
            self.hit_tokens[where] = self.hit_tokens.get(where, 0) + part.hit_tokens
            if where is None:
                continue
            for path, size_bytes in part.restored_bytes.items():
                self.restored_bytes[where, path] += size_bytes
            for saved in part.saves:
                kind = where, SaveReason(saved.reason), SaveStatus(saved.outcome)
                self.saves[kind] = self.saves.get(kind, 0) + saved.entries

    def _judge(
        self, usage: pb.Usage, journal: Journal | None, now_ns: int
    ) -> dict[Why, tuple[int, int]]:
        """Why tokens of a report were missed. What it does not explain was not told."""
        judged: dict[Why, tuple[int, int]] = {}
        left_tokens = usage.lookup_tokens - sum(part.hit_tokens for part in usage.tiers)
        left_lookups = usage.lookups - usage.hits
        known = [
            (Why(reason), usage.missed_tokens.get(reason, 0), usage.misses.get(reason, 0))
            for reason in _OTHERS
        ]
        if journal is not None:
            known += [
                (fate(miss, journal, now_ns - miss.age_ns), miss.tokens, miss.lookups)
                for miss in usage.absent
            ]
        for why, tokens, lookups in known:
            if tokens or lookups:
                before = judged.get(why, (0, 0))
                judged[why] = before[0] + tokens, before[1] + lookups
                left_tokens -= tokens
                left_lookups -= lookups
        if left_tokens or left_lookups:
            judged[Why("not_told")] = left_tokens, left_lookups
        return judged

    def message(self) -> pb.Usage:
        """The sums as operators get them, without those that are 0."""
        usage = pb.Usage()
        for name, amount in self.scalars.items():
            setattr(usage, name, bounded(amount))
        if any(self.restores.counts):
            usage.restore_times.extend(map(bounded, self.restores.counts))
            usage.restore_ns = bounded(self.restores.total)
        for name, counts in (("misses", self.misses), ("failures", self.failures)):
            getattr(usage, name).update({reason: bounded(n) for reason, n in counts.items() if n})
        for why, (tokens, lookups) in self.missed.items():
            if not tokens and not lookups:
                continue
            usage.missed.add(
                reason=pb.MissReason.Value(f"MISS_REASON_{why.reason.upper()}"),
                tier=pb.Tier.ValueType(why.tier or 0),
                cause=pb.EvictionCause.Value(
                    f"EVICTION_CAUSE_{why.cause.upper() or 'UNSPECIFIED'}"
                ),
                tokens=bounded(tokens),
                lookups=bounded(lookups),
            )
        for tier in (*Tier, None):
            tier_usage = pb.TierUsage(
                hit_entries=bounded(self.hit_entries.get(tier, 0)),
                hit_tokens=bounded(self.hit_tokens.get(tier, 0)),
            )
            if tier is not None:
                paths = {path: bounded(self.restored_bytes[tier, path]) for path in PATHS}
                tier_usage.restored_bytes.update({p: size for p, size in paths.items() if size})
            tier_usage.saves.extend(
                pb.SavedUsage(
                    reason=reason.value,  # type: ignore[arg-type]
                    outcome=outcome.value,  # type: ignore[arg-type]
                    entries=bounded(entries),
                )
                for (saved_in, reason, outcome), entries in self.saves.items()
                if saved_in is tier
            )
            if tier_usage.ByteSize():
                tier_usage.tier = pb.Tier.ValueType(tier or 0)
                usage.tiers.append(tier_usage)
        return usage


def fate(miss: pb.AbsentMiss, journal: Journal, at_ns: int) -> Why:
    """What became of the keys of a look-up at `at_ns`: of the first one that left a tier."""
    keys = miss.keys
    if not journal.most:
        return Why("too_old")
    if at_ns < journal.started_ns:
        return Why("before_start")
    saved = False
    for key in keys:
        found = journal.fate(key, at_ns)
        if found is None:
            continue
        # An entry that was only saved before that time was on its way when the client looked.
        if found.what is Happening.SAVED:
            saved = True
        elif found.what in CAUSES:
            return Why(EVICTED, found.tier, CAUSES[found.what].value)
        else:
            return Why(found.what.name.lower(), found.tier)
    # A key with later records may have left after the look-up only.
    if not saved and any(journal.has_left(key) and journal.fate(key) is None for key in keys):
        return Why("too_old")
    if miss.more:
        return Why("not_told")
    # A key that is asked for again and was saved since the start is not of an earlier one.
    return Why("before_start" if at_ns < journal.unsure_until_ns and not saved else "never_saved")


def words_of(missed: pb.Missed) -> str:
    """Why tokens were missed, for people."""
    reason = pb.MissReason.Name(missed.reason).removeprefix("MISS_REASON_").lower()
    cause = pb.EvictionCause.Name(missed.cause).removeprefix("EVICTION_CAUSE_").lower()
    return missed_because(reason, missed.tier, cause)


def bounded(amount: int) -> int:
    """A reported sum, limited to what a message can hold: otherwise one client that lies could keep
    operators from seeing anything."""
    return min(amount, _MOST_SHOWN)


#: Reports that a session may send at once, and how many in each heartbeat interval after that.
_BURST: Final = 8
_PER_HEARTBEAT: Final = 4


class ReportPace:
    """How often a session may report. A client sends one with a heartbeat, but each may name as
    many keys as take milliseconds to look up."""

    def __init__(self, heartbeat_interval_ms: int) -> None:
        self._each_ns: Final = heartbeat_interval_ms * 10**6 // _PER_HEARTBEAT
        #: The time at which the reports so far would be paid for, each with `_each_ns`.
        self._paid_until_ns = 0

    def reported(self, now_ns: int) -> int:
        """One more was taken. Returns how long, in nanoseconds, no message of this session is to be
        taken: what it sends meanwhile stays in the kernel, and then with the client."""
        self._paid_until_ns = max(self._paid_until_ns, now_ns) + self._each_ns
        return max(0, self._paid_until_ns - now_ns - _BURST * self._each_ns)


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
    """The sums of all labels. When there are too many, a new one takes the place of the one without
    an open session that was used first; while there is none, it counts under `OTHER_LABEL`. The
    event loop's; `items` may be called on any thread."""

    def __init__(self) -> None:
        self._labels: dict[str, LabelUsage] = {}
        #: One place is reserved for `OTHER_LABEL`.
        self._places = Shares("labels", MAX_LABELS - 1)
        #: What open sessions have reported, by their number.
        self.sessions: Final[dict[int, SessionUsage]] = {}

    @contextmanager
    def session(self, label: str, tenant: str = HOST) -> Iterator[LabelUsage]:
        """The sums of a label, which keep their place meanwhile. See `of`."""
        found = self.of(label, tenant)
        found.sessions += 1
        try:
            yield found
        finally:
            found.sessions -= 1

    def keep(self, label: str) -> None:
        """Reserve a place for a label for as long as the daemon runs."""
        self.of(label).sessions += 1

    def of(self, label: str, tenant: str = HOST) -> LabelUsage:
        """The sums of a label; "" is `DEFAULT_LABEL`. A tenant that has its share of the labels
        counts under `OTHER_LABEL`. Raises InvalidSize for an invalid label."""
        label = check_label(label) if label else DEFAULT_LABEL
        found = self._labels.get(label)
        if found is None:
            holder = None if label == OTHER_LABEL else self._place_for(tenant)
            label = OTHER_LABEL if holder is None else label
            found = self._labels.setdefault(label, LabelUsage(label, holder))
        return found

    def _place_for(self, tenant: str) -> Holder | None:
        """Take a place for one more label of this tenant. None: it may have no more."""
        holder = Holder(tenant)
        if not self._places.may_take(holder):
            unused = [each for each in self._labels.values() if each.holder and not each.sessions]
            its_own = [each for each in unused if each.holder == holder]
            if not its_own and self._places.held_by(holder):
                return None
            gone = next(iter(its_own or unused), None)
            if gone is None or gone.holder is None:
                return None
            # Its sums are not added to others: they would look like work done now.
            del self._labels[gone.name]
            self._places.give(gone.holder)
        self._places.add(holder)
        return holder

    def restores(self) -> Histogram:
        """How long restores took, over all labels."""
        found = Histogram(LATENCY_BOUNDS_NS)
        for sums in list(self._labels.values()):
            found.counts = list(map(add, found.counts, sums.restores.counts))
            found.total += sums.restores.total
        return found

    def items(self) -> Iterator[tuple[str, LabelUsage]]:
        """Labels and their sums, each of one moment."""
        return ((label, sums.copy()) for label, sums in list(self._labels.items()))


def check_usage(usage: pb.Usage) -> pb.Usage:
    """Returns the report if it is consistent, in the words of this version. Raises
    MalformedMessage, InvalidSize."""
    _check_lengths(usage)
    numbers = [getattr(usage, name) for name in SCALARS]
    numbers += [*usage.misses.values(), *usage.failures.values()]
    numbers += [*usage.restore_times, usage.restore_ns, *usage.missed_tokens.values()]
    for miss in usage.absent:
        numbers += [miss.tokens, miss.lookups, miss.age_ns]
    for part in usage.tiers:
        if not part.tier and (part.restored_bytes or part.saves):
            raise MalformedMessage("a report has restores or saves of no tier")
        numbers += [part.hit_entries, part.hit_tokens, *part.restored_bytes.values()]
        numbers += [saved.entries for saved in part.saves]
    if max(numbers) > MAX_REPORTED:
        raise InvalidSize(f"a report has numbers up to {MAX_REPORTED}, not {max(numbers)}")
    _put_in_known_words(usage)
    if usage.hits + sum(usage.misses.values()) != usage.lookups:
        raise MalformedMessage("the hits and misses of a report do not add up to its look-ups")
    if sum(len(miss.keys) for miss in usage.absent) > MAX_TOLD_KEYS_IN_ALL or any(
        not 0 < len(miss.keys) <= MAX_TOLD_KEYS or any(len(key) != KEY_BYTES for key in miss.keys)
        for miss in usage.absent
    ):
        raise MalformedMessage("a report names too many keys of a miss, or none")
    for what, told, counted in (
        ("tokens", sum(miss.tokens for miss in usage.absent), usage.missed_tokens.get(ABSENT, 0)),
        ("look-ups", sum(miss.lookups for miss in usage.absent), usage.misses.get(ABSENT, 0)),
    ):
        if told > counted:
            raise MalformedMessage(f"a report explains {told} missed {what}, and has {counted}")
    if len(usage.restore_times) not in (0, len(LATENCY_BOUNDS_NS) + 1):
        raise MalformedMessage(f"the times of restores are {len(LATENCY_BOUNDS_NS) + 1} numbers")
    if usage.missed:
        raise MalformedMessage("what became of an entry is for the daemon to say")
    hit_tokens = sum(part.hit_tokens for part in usage.tiers)
    if hit_tokens + sum(usage.missed_tokens.values()) > usage.lookup_tokens:
        raise MalformedMessage("a report has more hit and missed tokens than were looked for")
    return usage


def _put_in_known_words(usage: pb.Usage) -> None:
    """A later version of a client may name what this one does not know, and is served all the same:
    such a miss is an unexpected one, such a save failed, hits in such a tier are in one that is not
    known. Why such a save was made, and how such bytes came, is not counted."""
    for counts, words in (
        (usage.misses, REASONS),
        (usage.failures, REASONS),
        (usage.missed_tokens, (*REASONS, NO_KEY)),
    ):
        for name in set(counts).difference(words):
            counts[_UNEXPECTED] += counts.pop(name)
    for part in usage.tiers:
        if part.tier not in _TIERS:
            part.ClearField("restored_bytes")
            part.ClearField("saves")
            part.tier = pb.TIER_UNSPECIFIED
        for path in set(part.restored_bytes).difference(PATHS):
            del part.restored_bytes[path]
        for saved in part.saves:
            if saved.outcome not in _OUTCOMES:
                saved.outcome = pb.SAVE_STATUS_FAILED
        known = [saved for saved in part.saves if saved.reason in _SAVE_REASONS]
        if len(known) < len(part.saves):
            part.ClearField("saves")
            part.saves.extend(known)


def _check_lengths(usage: pb.Usage) -> None:
    """Refuse columns with more values than there are names, before looking at any value."""
    _at_most(MAX_WORDS, "reasons of misses", usage.misses)
    _at_most(MAX_WORDS, "reasons of failures", usage.failures)
    _at_most(MAX_WORDS, "reasons of missed tokens", usage.missed_tokens)
    _at_most(len(LATENCY_BOUNDS_NS) + 1, "times of restores", usage.restore_times)
    _at_most(MAX_TOLD_MISSES, "misses with their keys", usage.absent)
    _at_most(MAX_TIERS, "tiers", usage.tiers)
    for miss in usage.absent:
        _at_most(MAX_TOLD_KEYS, "keys of a miss", miss.keys)
    for part in usage.tiers:
        _at_most(MAX_WORDS, "paths", part.restored_bytes)
        _at_most(MAX_SAVE_KINDS, "kinds of saves", part.saves)


def _at_most(most: int, what: str, given: Sized) -> None:
    if len(given) > most:
        raise MalformedMessage(f"a report has {len(given)} {what}, at most there are {most}")
