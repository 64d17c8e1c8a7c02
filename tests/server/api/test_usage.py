"""What clients report of themselves: added up if it is consistent, refused if not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefixd.client.counters import PATHS, ClientCounters, Missing
from prefixd.client.ctl.message_json import label_in
from prefixd.client.results import Entries, Entry, SaveOutcome
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import InvalidSize, MalformedMessage, PrefixdError
from prefixd.proto.keys import Key
from prefixd.proto.limits import (
    LATENCY_BOUNDS_NS,
    MAX_LABELS,
    MAX_REPORTED,
    MAX_TOLD_KEYS,
    MAX_TOLD_MISSES,
)
from prefixd.proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from prefixd.server.api import usage as subject
from prefixd.server.api.metrics import StateCollector, collect_usage
from prefixd.server.api.usage import (
    LabelUsage,
    ReportPace,
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


def saved(key: Key, tier: Tier = Tier.RAM) -> entries.EntryState:
    return entries.EntryState(key, 1, (), tier, SaveReason.COLD, 1, 0, Content(1, 1), 0)


def test_client_and_daemon_have_the_same_words() -> None:
    assert set(subject.REASONS) == {reason.value for reason in MissReason}
    assert set(subject.PATHS) == set(PATHS)


def test_what_a_client_counts_arrives() -> None:
    counters = ClientCounters()
    entries = Entries([Entry(KEY, tier, Content(100, 10), 0, 1, SaveReason.COLD) for tier in Tier])
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
    told = book.of("m").message()
    assert {label_in(m, "reason"): m.tokens for m in told.missed} == {
        "slow": 5,
        "partial_block": 30,
    }
    del told.missed[:]
    message.missed_tokens.clear()
    assert told == message
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
        {**GOOD, "lookup_tokens": MAX_REPORTED + 1},
        {**GOOD, "absent": [{"keys": [KEY], "lookups": 1}] * 3},
        {**GOOD, "absent": [{"keys": [KEY], "tokens": 1}]},
        {**GOOD, "absent": [{"keys": [KEY] * (MAX_TOLD_KEYS + 1)}]},
        {**GOOD, "absent": [{"keys": [KEY] * MAX_TOLD_KEYS}] * 5},
        {**GOOD, "absent": [{"keys": [KEY], "age_ns": MAX_REPORTED + 1}]},
        {**GOOD, "misses": {"boredom": MAX_REPORTED, "sleep": MAX_REPORTED + 1}},
        {**GOOD, "lookup_tokens": 5, "missed_tokens": {"absent": 6}},
        {**GOOD, "absent": [{"keys": [KEY[:8]]}]},
        {**GOOD, "absent": [{}]},
        {**GOOD, "missed": [{"reason": pb.MISS_REASON_EVICTED, "tokens": 1}]},
        {**GOOD, "restore_times": [1]},
        {**GOOD, "restore_times": [0] * 17 + [MAX_REPORTED + 1]},
        {**GOOD, "restore_ns": MAX_REPORTED + 1},
        {**GOOD, "tiers": [{"hit_tokens": 1}]},
        {**GOOD, "lookup_tokens": 1, "tiers": [{"hit_tokens": 1, "restored_bytes": {"copy": 1}}]},
        {**GOOD, "tiers": [{**TIER, "hit_tokens": 1}]},
        {**GOOD, "tiers": [{**TIER, "restored_bytes": {"copy": 2**63}}]},
        {**GOOD, "tiers": [{"saves": [{"reason": 1, "outcome": 1}]}]},
    ],
)
def test_what_does_not_add_up_is_refused(usage: dict[str, object]) -> None:
    check_usage(pb.Usage(**GOOD))  # type: ignore[arg-type]
    with pytest.raises((MalformedMessage, InvalidSize)):
        check_usage(pb.Usage(**usage))  # type: ignore[arg-type]


def test_a_report_of_a_later_client_is_put_in_known_words() -> None:
    """Each would end the session of every client that is newer than the daemon."""
    usage = check_usage(
        pb.Usage(
            lookups=6,
            hits=1,
            misses={"absent": 2, "unexpected": 1, "boredom": 1, "sleep": 1},
            failures={"boredom": 2},
            lookup_tokens=20,
            missed_tokens={"boredom": 5, "partial_block": 1},
            tiers=[
                {"tier": 9, "hit_entries": 3, "hit_tokens": 4, "restored_bytes": {"copy": 1}},  # type: ignore[list-item]
                {
                    "tier": pb.TIER_RAM,
                    "restored_bytes": {"air": 1, "copy": 2},
                    "saves": [
                        {"reason": 99, "outcome": 1, "entries": 7},
                        {"reason": 1, "outcome": 99, "entries": 8},
                    ],
                },  # type: ignore[list-item]
            ],
        )
    )
    assert dict(usage.misses) == {"absent": 2, "unexpected": 3}
    assert dict(usage.failures) == {"unexpected": 2}
    assert dict(usage.missed_tokens) == {"unexpected": 5, "partial_block": 1}
    unknown, ram = usage.tiers
    assert (unknown.tier, unknown.hit_entries, unknown.hit_tokens) == (0, 3, 4)
    assert not unknown.restored_bytes
    assert dict(ram.restored_bytes) == {"copy": 2}
    (failed,) = ram.saves
    assert (failed.reason, failed.outcome, failed.entries) == (1, pb.SAVE_STATUS_FAILED, 8)


REPORT = {"restore_times": [], "absent": [], "tiers": []} | dict.fromkeys(
    ("misses", "failures", "missed_tokens"), ()
)
OF_TIER = {"restored_bytes": {}, "saves": []}


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("misses", subject.MAX_WORDS),
        ("failures", subject.MAX_WORDS),
        ("missed_tokens", subject.MAX_WORDS),
        ("restore_times", len(LATENCY_BOUNDS_NS) + 1),
        ("absent", MAX_TOLD_MISSES),
        ("tiers", subject.MAX_TIERS),
        ("restored_bytes", subject.MAX_WORDS),
        ("saves", subject.MAX_SAVE_KINDS),
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
        {"reason": reason.value, "outcome": outcome.value, "entries": 1}
        for reason in SaveReason
        for outcome in SaveStatus
    ]
    paths = dict.fromkeys(subject.PATHS, 1)
    usage = pb.Usage(
        lookups=len(subject.REASONS),
        misses=dict.fromkeys(subject.REASONS, 1),
        failures=dict.fromkeys(subject.REASONS, 1),
        tiers=[{"tier": tier.value, "restored_bytes": paths, "saves": saves} for tier in Tier],  # type: ignore[list-item]
    )
    assert check_usage(usage) is usage


def missed(told: pb.Usage) -> dict[tuple[str, int, str], tuple[int, int]]:
    return {
        (label_in(m, "reason"), m.tier, label_in(m, "cause") if m.cause else ""): (
            m.tokens,
            m.lookups,
        )
        for m in told.missed
    }


def report(counters: ClientCounters) -> pb.Usage:
    return check_usage(counters.take_report().message())


def test_the_journal_says_why_what_was_looked_for_is_absent() -> None:
    evicted, deleted, again, never, gone = (Key(bytes([n]) * 32) for n in range(1, 6))
    journal = Journal(44 * 100, 1)
    for what, key in (
        (Happening.SAVED, evicted),
        (Happening.EVICTED_FOR_SAVE, evicted),
        (Happening.SAVED, evicted),
        (Happening.DELETED, deleted),
        (Happening.SAVED, again),
    ):
        journal.note(what, [saved(key)], 1)
    journal.note(Happening.EVICTED_BY_RESIZE, [saved(gone, Tier.DISK)], 1)
    counters = ClientCounters()
    for keys in ([evicted], [deleted], [again], [never], [never, gone], [never, again]):
        counters.miss(MissReason.ABSENT, 10, keys)
    counters.miss(MissReason.SLOW, 7, [evicted])
    found = Entries([Entry(KEY, Tier.RAM, Content(9, 4), 0, 1, SaveReason.COLD)])
    counters.hit(found, [4], 64, [Missing(MissReason.ABSENT, 0, [evicted])])
    usage = report(counters)
    book = UsageBook().of("m")
    book.add(usage, journal, 10**12)
    told = missed(book.message())
    assert told == {
        ("evicted", pb.TIER_RAM, "save"): (10 + 60, 1),
        ("evicted", pb.TIER_DISK, "resize"): (10, 1),
        ("deleted", pb.TIER_RAM, ""): (10, 1),
        ("never_saved", 0, ""): (30, 3),
        ("slow", 0, ""): (7, 1),
    }
    with pytest.raises(MalformedMessage):
        check_usage(book.message())


def test_a_miss_is_judged_by_what_was_known_when_it_happened() -> None:
    """It was saved after the look-up, and evicted before the report."""
    journal, counters = Journal(44 * 100, 1), ClientCounters()
    counters.miss(MissReason.ABSENT, 5, [KEY])
    usage = report(counters)
    usage.absent[0].age_ns = 10**6
    journal.note(Happening.SAVED, [saved(KEY)], 10**9 + 100)
    journal.note(Happening.EVICTED_FOR_SAVE, [saved(KEY)], 10**9 + 200)
    for now_ns, why in ((10**9 + 10**6, "never_saved"), (2 * 10**9, "evicted")):
        book = UsageBook().of("m")
        book.add(usage, journal, now_ns)
        assert [label_in(each, "reason") for each in book.message().missed] == [why]


def test_what_is_too_old_to_be_known_is_told_from_what_was_never_saved() -> None:
    journal, other = Journal(44 * 100, 1), Key(b"o" * 32)
    journal.note(Happening.EVICTED_FOR_SAVE, [saved(KEY)], 1)
    for number in range(1, 201):
        journal.note(Happening.SAVED, [saved(Key(number.to_bytes(32, "little")))], 1)
    counters = ClientCounters()
    counters.miss(MissReason.ABSENT, 5, [KEY])
    counters.miss(MissReason.ABSENT, 7, [other])
    book = UsageBook().of("m")
    book.add(report(counters), journal, 10**12)
    assert missed(book.message()) == {("too_old", 0, ""): (5, 1), ("never_saved", 0, ""): (7, 1)}


@pytest.mark.parametrize(
    ("looked_s", "why"), [(50, "before_start"), (150, "before_start"), (400, "never_saved")]
)
def test_after_a_restart_nothing_is_called_never_saved_at_first(looked_s: int, why: str) -> None:
    journal = Journal(44 * 100, 100 * 10**9, 200 * 10**9)
    usage = pb.Usage(
        lookups=1, misses={"absent": 1}, absent=[pb.AbsentMiss(keys=[KEY], lookups=1, age_ns=10**9)]
    )
    book = UsageBook().of("m")
    book.add(usage, journal, (looked_s + 1) * 10**9)
    assert [label_in(each, "reason") for each in book.message().missed] == [why]


def test_what_a_report_has_no_room_for_is_counted_as_not_told() -> None:
    counters, journal = ClientCounters(), Journal(44 * 100, 1)
    soon: list[bool] = []
    counters.when_many = lambda: soon.append(True)
    for number in range(2 * MAX_TOLD_MISSES):
        counters.miss(MissReason.ABSENT, 3, [Key(number.to_bytes(32, "big"))])
    assert soon == [True], "a report is asked for once, before there is no room"
    counters.miss(MissReason.ABSENT, 3, [Key(bytes(32))])
    usage = report(counters)
    assert len(usage.absent) == MAX_TOLD_MISSES
    assert usage.absent[0].lookups == 2, "the same key takes no second place"
    book = UsageBook().of("m")
    book.add(usage, journal, 10**12)
    told = missed(book.message())
    assert told["not_told", 0, ""] == (3 * MAX_TOLD_MISSES, MAX_TOLD_MISSES)
    assert sum(tokens for tokens, _ in told.values()) == usage.lookup_tokens


def test_a_report_of_an_older_client_still_adds_up() -> None:
    book = UsageBook().of("m")
    book.add(check_usage(pb.Usage(lookups=3, hits=1, misses={"absent": 2}, lookup_tokens=9)))
    assert missed(book.message()) == {("not_told", 0, ""): (9, 2)}


def test_tokens_count_only_where_they_are_known() -> None:
    """A look-up of raw keys knows how many tokens it found, but not how many it was for."""
    counters, entry = ClientCounters(), Entry(KEY, Tier.RAM, Content(9, 4), 0, 1, SaveReason.COLD)
    counters.hit(Entries([entry]), [4])
    counters.looked([Tier.RAM, -1], 3, 0, Missing(MissReason.ABSENT, 0, [KEY]))
    usage = report(counters)
    assert (usage.lookups, usage.hits, usage.lookup_tokens) == (2, 2, 0)
    assert not usage.missed_tokens
    assert {tier.tier: (tier.hit_entries, tier.hit_tokens) for tier in usage.tiers} == {
        pb.TIER_RAM: (2, 0),
        pb.TIER_UNSPECIFIED: (1, 0),
    }
    counters.looked([Tier.RAM, Tier.DISK], 3, 50, Missing(MissReason.ABSENT, 0, [KEY]))
    counters.looked([Tier.RAM, Tier.DISK, Tier.DISK], 3, 50, None)
    counters.hit(Entries([entry]), [4], 5)
    usage = report(counters)
    assert usage.lookup_tokens == 105
    assert dict(usage.missed_tokens) == {"absent": 18, "partial_block": 1}
    assert sum(tier.hit_tokens for tier in usage.tiers) == 105 - 19


def test_a_client_that_lies_again_and_again_hides_nothing_from_operators() -> None:
    """Its sums would no longer fit into a message."""
    most = MAX_REPORTED
    saved = pb.SavedUsage(reason=pb.SAVE_REASON_COLD, outcome=pb.SAVE_STATUS_SAVED, entries=most)
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


def test_a_session_that_reports_too_often_has_to_wait() -> None:
    pace = ReportPace(heartbeat_interval_ms=2_000)
    second_ns = 10**9
    assert [pace.reported(second_ns) for _ in range(8)] == [0] * 8
    assert [pace.reported(second_ns) for _ in range(2)] == [second_ns // 2, second_ns]
    for beat in range(4, 100):
        assert pace.reported(second_ns * 2 * beat) == 0, "one with each heartbeat never waits"


def test_labels_are_bounded() -> None:
    book = UsageBook()
    with ExitStack() as sessions:
        for number in range(3 * MAX_LABELS):
            usage = sessions.enter_context(book.session(f"model-{number}"))
            usage.scalars["lookups"] += 1
        sums = dict(book.items())
        assert len(sums) == MAX_LABELS
        assert sums["other"].scalars["lookups"] == 3 * MAX_LABELS - (MAX_LABELS - 1)
        assert book.of("model-0").scalars == sums["model-0"].scalars


def test_a_label_without_a_session_gives_its_place_to_a_new_one() -> None:
    book = UsageBook()
    book.keep("kept")
    for number in range(3 * MAX_LABELS):
        with book.session(f"a/{number}", "namespace a") as usage:
            assert usage.name == f"a/{number}"
    its_own = [name for name, _ in book.items() if name.startswith("a/")]
    last = 3 * MAX_LABELS
    assert its_own == [f"a/{number}" for number in range(last - len(its_own), last)], "the latest"
    with ExitStack() as sessions:
        here = [sessions.enter_context(book.session(f"m-{n}")).name for n in range(MAX_LABELS)]
        assert here.count("other") == MAX_LABELS - (MAX_LABELS - 2 - len(its_own)), (
            "those of a stay"
        )
        with book.session("b/0", "namespace b") as usage:
            assert usage.name == "b/0", "a tenant without one gets one that nobody uses"
    assert {"kept", "b/0"} <= {name for name, _ in book.items()}
    assert len(list(book.items())) == MAX_LABELS


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
                    pb.SavedUsage(
                        reason=pb.SAVE_REASON_COLD, outcome=pb.SAVE_STATUS_SAVED, entries=4
                    ),
                    pb.SavedUsage(
                        reason=pb.SAVE_REASON_COLD, outcome=pb.SAVE_STATUS_NO_ROOM, entries=1
                    ),
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
        ("misses", {**a, "reason": "slow"}, None),
        ("missed_tokens", {**a, "reason": "never_saved", "tier": "none", "cause": ""}, 0),
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


def test_a_label_begins_with_few_series() -> None:
    book = UsageBook()
    book.of("a")
    assert sum(len(family.samples) for family in collect_usage(book)) <= 41
