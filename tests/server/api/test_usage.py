"""What clients report of themselves: added up if it is consistent, refused if not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefixd.client.counters import PATHS, Counters
from prefixd.client.results import Entry, SaveOutcome
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidSize, MalformedMessage, PrefixdError
from prefixd.proto.keys import Key
from prefixd.proto.limits import LATENCY_BOUNDS_NS, MAX_LABELS, MAX_REPORTED, MAX_TOLD_MISSES
from prefixd.proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from prefixd.server.api import usage as subject
from prefixd.server.api.metrics import StateCollector
from prefixd.server.api.usage import (
    LabelUsage,
    SessionUsage,
    UsageBook,
    bounded,
    check_usage,
)
from prefixd.server.core import entries
from prefixd.server.core.journal import Happening, Journal
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from tests.support.unseen import Unseen

KEY = Key(bytes(32))


def saved(key: Key, tier: Tier = Tier.RAM) -> entries.Entry:
    return entries.Entry(key, 1, (), tier, SaveReason.COLD, 1, 0, 1, 1, 0, 0, 0)


def test_client_and_daemon_have_the_same_words() -> None:
    assert set(subject.REASONS) == {reason.value for reason in MissReason}
    assert set(subject.OUTCOMES) == {status.label for status in SaveStatus}
    assert set(subject.PATHS) == set(PATHS)


def test_what_a_client_counts_arrives() -> None:
    counters = Counters()
    entries = [Entry(KEY, tier, 100, 10, 0, 0, 0, 1, SaveReason.COLD) for tier in Tier]
    counters.hit(entries, [10, 20, 30], 90)
    counters.miss(MissReason.SLOW, 5)
    counters.failure(MissReason.LOST)
    counters.restored(entries[:2], "copy")
    counters.viewed(entries[2:])
    counters.restore(30, 60_000)
    counters.restore(0, 3 * 10**12)
    counters.saves([SaveOutcome(KEY, SaveStatus.NO_ROOM)], [7], [(Tier.RAM, SaveReason.FINISH)])
    report = counters.take_report()
    assert not counters.take_report().amounts, "it is told once"
    counters.give_back(report)
    message = counters.take_report().message()
    book = UsageBook()
    book.of("m").add(check_usage(message))
    assert book.of("m").message() == message
    assert message.lookups == 2
    assert (message.lookup_tokens, message.restored_tokens) == (95, 30)
    assert list(message.restore_times) == [0, 1, *[0] * 15, 1]
    assert message.restore_ns == 3 * 10**12 + 60_000
    assert counters.snapshot()["restores"] == 2
    assert dict(message.misses) == {"slow": 1}
    assert sum(tier.hit_tokens for tier in message.tiers) == 60


GOOD = {"lookups": 3, "hits": 1, "misses": {"absent": 2}}
TIER = {"tier": pb.TIER_RAM}


@pytest.mark.parametrize(
    "usage",
    [
        {**GOOD, "hits": 2},
        {**GOOD, "misses": {"absent": 1}},
        {**GOOD, "misses": {"boredom": 2}},
        {**GOOD, "failures": {"boredom": 2}},
        {**GOOD, "lookup_tokens": MAX_REPORTED + 1},
        {**GOOD, "absent": [{"keys": [KEY]}] * 3},
        {**GOOD, "absent": [{"keys": [KEY] * 9}]},
        {**GOOD, "absent": [{"keys": [KEY[:8]]}]},
        {**GOOD, "absent": [{}]},
        {**GOOD, "absent_because": {"evicted": 1}},
        {**GOOD, "restore_times": [1]},
        {**GOOD, "restore_times": [0] * 17 + [MAX_REPORTED + 1]},
        {**GOOD, "restore_ns": MAX_REPORTED + 1},
        {**GOOD, "tiers": [{"hit_tokens": 1}]},
        {**GOOD, "tiers": [{**TIER, "hit_tokens": 1}]},
        {**GOOD, "tiers": [{**TIER, "restored_bytes": {"air": 1}}]},
        {**GOOD, "tiers": [{**TIER, "restored_bytes": {"copy": 2**63}}]},
        {**GOOD, "tiers": [{**TIER, "saves": [{"outcome": "saved"}]}]},
        {**GOOD, "tiers": [{**TIER, "saves": [{"reason": 1, "outcome": "x" * 99}]}]},
    ],
)
def test_what_does_not_add_up_is_refused(usage: dict[str, object]) -> None:
    check_usage(pb.Usage(**GOOD))  # type: ignore[arg-type]
    with pytest.raises((MalformedMessage, InvalidSize)):
        check_usage(pb.Usage(**usage))  # type: ignore[arg-type]


REPORT = {"misses": {}, "failures": {}, "restore_times": [], "absent": [], "tiers": []}
OF_TIER = {"restored_bytes": {}, "saves": []}


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("misses", len(subject.REASONS)),
        ("failures", len(subject.REASONS)),
        ("restore_times", len(LATENCY_BOUNDS_NS) + 1),
        ("absent", MAX_TOLD_MISSES),
        ("tiers", len(Tier)),
        ("restored_bytes", len(subject.PATHS)),
        ("saves", len(SaveReason) * len(subject.OUTCOMES)),
    ],
)
def test_a_report_that_is_too_long_is_refused_unseen(field: str, most: int) -> None:
    """A million tiers, or a million saves, would hold the daemon for seconds."""
    told = {field: Unseen(most + 1)}
    if field in OF_TIER:
        told = {"tiers": [SimpleNamespace(**OF_TIER | told)]}
    usage: Any = SimpleNamespace(**REPORT | told)
    with pytest.raises(MalformedMessage, match=f"a report has {most + 1} .*, at most .* {most}"):
        check_usage(usage)


def test_the_longest_report_there_can_be_is_taken() -> None:
    saves = [
        {"reason": reason.value, "outcome": outcome, "entries": 1}
        for reason in SaveReason
        for outcome in subject.OUTCOMES
    ]
    paths = dict.fromkeys(subject.PATHS, 1)
    usage = pb.Usage(
        lookups=len(subject.REASONS),
        misses=dict.fromkeys(subject.REASONS, 1),
        failures=dict.fromkeys(subject.REASONS, 1),
        tiers=[{"tier": tier.value, "restored_bytes": paths, "saves": saves} for tier in Tier],  # type: ignore[list-item]
    )
    assert check_usage(usage) is usage


def test_the_journal_says_why_what_was_looked_for_is_absent() -> None:
    evicted, deleted, again, never = (Key(bytes([number]) * 32) for number in range(1, 5))
    journal = Journal(44 * 100)
    for what, key in (
        (Happening.SAVED, evicted),
        (Happening.EVICTED_FOR_SAVE, evicted),
        (Happening.SAVED, evicted),
        (Happening.DELETED, deleted),
        (Happening.SAVED, again),
    ):
        journal.note(what, [saved(key)], 1)
    gone = Key(bytes([5]) * 32)
    journal.note(Happening.EVICTED_BY_RESIZE, [saved(gone, Tier.DISK)], 1)
    counters = Counters()
    for keys in ([evicted], [deleted], [again], [never], [never, gone], [never, again]):
        counters.miss(MissReason.ABSENT, 1, keys)
    counters.miss(MissReason.SLOW, 1, [evicted])
    report = counters.take_report()
    counters.give_back(report)
    usage = check_usage(counters.take_report().message())
    assert len(usage.absent) == 6
    book = UsageBook().of("m")
    book.judge(usage.absent, journal)
    told = book.message()
    assert dict(told.absent_because) == {"evicted": 2, "deleted": 1, "never_saved": 3}
    by_tier = {tier.tier: dict(tier.absent_because) for tier in told.tiers}
    assert by_tier == {pb.TIER_RAM: {"evicted": 1, "deleted": 1}, pb.TIER_DISK: {"evicted": 1}}
    with pytest.raises(MalformedMessage):
        check_usage(pb.Usage(tiers=told.tiers))
    for number in range(200):
        other = Key(number.to_bytes(32, "big"))
        journal.note(Happening.SAVED, [saved(other)], 1)
    book.judge([pb.AbsentMiss(keys=[never])], journal)
    assert book.absent_because["not_remembered"] == 1
    for _ in range(2 * MAX_TOLD_MISSES):
        counters.miss(MissReason.ABSENT, 1, [never])
    many = check_usage(counters.take_report().message())
    assert len(many.absent) == MAX_TOLD_MISSES
    book.add(many)
    assert book.absent_because["not_told"] == MAX_TOLD_MISSES, "the others"


def test_a_client_that_lies_again_and_again_hides_nothing_from_operators() -> None:
    """Its sums would no longer fit into a message."""
    most = MAX_REPORTED
    saved = pb.SavedUsage(reason=pb.SAVE_REASON_COLD, outcome="saved", entries=most)
    paths = dict.fromkeys(PATHS, most)
    tiers = [
        pb.TierUsage(
            tier=pb.Tier.ValueType(tier), hit_entries=most, restored_bytes=paths, saves=[saved]
        )
        for tier in Tier
    ]
    told = pb.Usage(
        lookups=most, misses={"slow": most}, failures={"slow": most}, lookup_tokens=most
    )
    told.tiers.extend(tiers)
    label, session = LabelUsage(), SessionUsage()
    for _ in range(2**16 + 1):
        label.add(told)
        session.add(told)
    assert label.scalars["lookups"] > 2**64
    assert pb.StatsResponse(usage={"a": label.message()}).usage["a"].lookups == 2**57
    assert bounded(session.restored_bytes) == 2**57


def test_labels_are_bounded() -> None:
    book = UsageBook()
    for number in range(3 * MAX_LABELS):
        book.of(f"model-{number}").scalars["lookups"] += 1
    sums = dict(book.items())
    assert len(sums) == MAX_LABELS
    assert sums["other"].scalars["lookups"] == 3 * MAX_LABELS - (MAX_LABELS - 1)
    assert book.of("model-0") is sums["model-0"]


@pytest.mark.parametrize("label", ["x" * 65, "a b", 'a"b', "a\nb", "ä"])
def test_a_label_that_can_be_none_is_refused(label: str) -> None:
    make: Callable[[str], object] = UsageBook().of
    with pytest.raises(PrefixdError, match="a label has"):
        make(label)


def test_what_clients_count_is_shown_by_label() -> None:
    usage = UsageBook()
    state = MetaState(StateConfig(), {}, {}, frozenset(), 1)
    registry = CollectorRegistry()
    registry.register(StateCollector(state, usage=usage))
    report = pb.Usage(
        lookups=3,
        hits=1,
        misses={"absent": 2},
        failures={"lost": 1},
        lookup_tokens=900,
        restored_tokens=100,
        tiers=[
            pb.TierUsage(
                tier=pb.TIER_SHM,
                hit_entries=2,
                hit_tokens=300,
                restored_bytes={"view": 5, "copy": 6, "stream": 7},
                saves=[
                    pb.SavedUsage(reason=pb.SAVE_REASON_COLD, outcome="saved", entries=4),
                    pb.SavedUsage(reason=pb.SAVE_REASON_COLD, outcome="no_room", entries=1),
                ],
            )
        ],
    )
    usage.of("a").add(report)
    usage.of("").add(report)
    a, shm = {"namespace": "a"}, {"namespace": "a", "tier": "shm"}
    for name, labels, value in (
        ("lookups", a, 3),
        ("hits", a, 1),
        ("misses", {**a, "reason": "absent"}, 2),
        ("misses", {**a, "reason": "slow"}, 0),
        ("failures", {**a, "reason": "lost"}, 1),
        ("lookup_tokens", {"namespace": "default"}, 900),
        ("restored_tokens", a, 100),
        ("hit_entries", shm, 2),
        ("hit_tokens", shm, 300),
        ("restored_bytes", {**shm, "path": "view"}, 5),
        ("restored_bytes", {**shm, "path": "copy"}, 6),
        ("restored_bytes", {**shm, "path": "stream"}, 7),
        ("saves", {**shm, "reason": "cold", "outcome": "saved"}, 4),
        ("saves", {**shm, "reason": "cold", "outcome": "no_room"}, 1),
    ):
        assert registry.get_sample_value(f"prefixd_client_{name}_total", labels) == value, name
