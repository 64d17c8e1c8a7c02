"""Every counter is shown, and every number that is shown moves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import count

import pytest
from prometheus_client import CollectorRegistry

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.limits import LATENCY_BOUNDS_NS
from prefixd.proto.vocabulary import SaveReason, SaveStatus, Tier
from prefixd.server.api import metrics
from prefixd.server.api.metrics import StateCollector, counters_dict
from prefixd.server.core.counters import Counters, Histogram, TierCounters
from prefixd.server.core.events import (
    CancelAsked,
    CommitFailed,
    Committed,
    DeleteAsked,
    EntryDamaged,
    EvictAsked,
    KeysSuspected,
    KeysTouched,
    ReleaseAsked,
    SessionLost,
    Tick,
    TierChanged,
    TierRecovered,
    TierState,
    WriteStopped,
)
from prefixd.server.runtime.clock import Clock, Latencies
from prefixd.server.runtime.scrubbing import Scrub
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.ledger import Ledger
from prefixd.tiers.store import StoredEntry
from tests.support.measured import BUDGET_BYTES, Daemon, key

RAM = {"tier": "ram", "policy": "lru"}
DISK = {"tier": "disk", "policy": "fifo"}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    assert made.state.check() == []


# ---- nothing is forgotten


def test_every_counter_is_shown_and_explained() -> None:
    assert list(metrics.COUNTERS) == [field.name for field in fields(Counters)]
    gauge, _ = metrics._PAYLOAD
    assert [*metrics.TIER_COUNTERS, gauge] == [field.name for field in fields(TierCounters)]


def test_names_and_types_are_as_prometheus_wants_them(daemon: Daemon) -> None:
    families = list(daemon.collector.collect())
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert family.name.startswith("prefixd_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")


def test_the_counters_of_stats_are_those_of_the_metrics(daemon: Daemon) -> None:
    daemon.save(daemon.session(), 1)
    counters = counters_dict(daemon.state)
    assert counters["prefixd_reservations_total"] == 1
    for name, value in counters.items():
        assert daemon.registry.get_sample_value(name) == value


# ---- everything moves


def lookups(daemon: Daemon) -> None:
    daemon.save(daemon.session(), 1)
    daemon.lookup(1)
    daemon.lookup(2)


def claims(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.save(session, 1)
    daemon.save(session, 2)
    claim = daemon.claim(session, 1, 2)
    daemon.claim(session, 3)
    daemon.apply(ReleaseAsked(next(daemon.requests), session, (claim,), daemon.now_ns))


def a_lease_that_runs_out(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.save(session, 1)
    daemon.claim(session, 1, lease_ns=50)
    daemon.tick(60)


def refusals(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.save(session, 1)
    daemon.reserve(session, 1, 100)
    daemon.reserve(session, 2, 100)
    daemon.reserve(session, 2, 100)
    daemon.reserve(session, 3, 1001)
    daemon.claim(session, 1)
    daemon.reserve(session, 4, 900)


def lost_reservations(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.reserve(session, 1, 100)
    daemon.tick(200)
    order = daemon.reserve(session, 2, 100)
    assert order is not None
    daemon.apply(CancelAsked(next(daemon.requests), session, (order.token,), daemon.now_ns))
    daemon.reserve(session, 3, 100)
    daemon.apply(SessionLost(session, "gone", daemon.now_ns))


def a_closed_session(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.apply(SessionLost(session, "it closed it", daemon.now_ns, closed=True))


def wrong_bytes(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.seal(daemon.begin(session, 1), expected_crc32c=8)
    token = daemon.begin(session, 2)
    outcome = SaveStatus.LENGTH_MISMATCH
    daemon.apply(WriteStopped(token, outcome, "too few", daemon.now_ns))
    token = daemon.begin(session, 3, tier=Tier.DISK)
    daemon.seal(token)
    daemon.apply(CommitFailed((token,), True, "full", daemon.now_ns))


def waits(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.reserve(session, 1, 100)
    daemon.lookup(1, wait_ns=20)
    daemon.lookup(1, wait_ns=10_000)
    daemon.tick(30)
    daemon.tick(200)


def reports_of_clients(daemon: Daemon) -> None:
    daemon.save(daemon.session(), 1)
    daemon.apply(KeysTouched((key(1), key(9)), daemon.now_ns))
    daemon.apply(KeysSuspected((key(1), key(9)), daemon.now_ns))
    daemon.apply(DeleteAsked(next(daemon.requests), 1, (key(1), key(9)), daemon.now_ns))


def more_than_a_share(daemon: Daemon) -> None:
    daemon.state.tables.config = replace(daemon.state.tables.config, max_reserved_share=0.01)
    session = daemon.session()
    daemon.reserve(session, 1, 10)
    daemon.reserve(session, 2, 10)


def a_tier_that_recovers(daemon: Daemon) -> None:
    daemon.apply(TierChanged(Tier.RAM, TierState.RECOVERING, daemon.now_ns))
    daemon.reserve(daemon.session(), 1, 10)


MOVES: list[tuple[Callable[[Daemon], None], dict[str, int]]] = [
    (lookups, {"lookups": 2, "lookup_keys": 2, "lookup_hits": 1}),
    (claims, {"claims": 2, "claims_empty": 1, "claimed_entries": 2, "releases": 1}),
    (a_lease_that_runs_out, {"claims_lost": 1}),
    (
        refusals,
        {
            "reservations": 2,
            "duplicate_saves": 1,
            "in_flight_refusals": 1,
            "too_large_refusals": 1,
            "no_room_refusals": 1,
        },
    ),
    (lost_reservations, {"reservations_lost": 3, "sessions_opened": 1, "sessions_lost": 1}),
    (a_closed_session, {"sessions_ended": 1, "sessions_lost": 0}),
    (wrong_bytes, {"crc_mismatches": 1, "length_mismatches": 1, "failed_saves": 1}),
    (waits, {"waits": 2, "waits_timed_out": 1}),
    (more_than_a_share, {"quota_refusals": 1}),
    (a_tier_that_recovers, {"closed_refusals": 1}),
    (reports_of_clients, {"touches": 1, "suspects": 1, "deletes": 1}),
]


@pytest.mark.parametrize(("happens", "expected"), MOVES)
def test_counters_move(
    daemon: Daemon, happens: Callable[[Daemon], None], expected: dict[str, int]
) -> None:
    for name in expected:
        assert daemon.value(f"{name}_total") == 0
    happens(daemon)
    assert {name: daemon.value(f"{name}_total") for name in expected} == expected


def test_every_counter_is_moved_by_the_test_above() -> None:
    assert {name for _, expected in MOVES for name in expected} == set(metrics.COUNTERS)


def test_the_counters_and_gauges_of_a_tier_move(daemon: Daemon) -> None:
    session = daemon.session()
    for number in range(1, 11):
        daemon.save(session, number)
    daemon.save(session, 11, 250)  # three leave
    daemon.claim(session, 11)
    daemon.reserve(session, 12, 40)
    daemon.state.tables.tier_counters[Tier.RAM].read_bytes += 250
    damaged = daemon.state.tables.entries[key(4)]
    daemon.apply(EntryDamaged(damaged.key, damaged.generation, "a bit flipped", daemon.now_ns))
    token = daemon.begin(session, 20, 300, Tier.DISK)
    daemon.seal(token)
    daemon.apply(Committed((token,), daemon.now_ns))
    expected = {
        "hits_total": 1,
        "hit_tokens_total": 16,
        "saves_total": 11,
        "saved_bytes_total": 1250,
        "read_bytes_total": 250,
        "evictions_total": 3,
        "evicted_bytes_total": 300,
        "corrupt_total": 1,
        "budget_bytes": BUDGET_BYTES,
        "limit_bytes": BUDGET_BYTES,
        "published_bytes": 850,
        "reserved_bytes": 40,
        "pinned_bytes": 250,
        "entries": 7,
        "pinned_entries": 1,
        "reservations": 1,
        "max_entries": 0,
        "payload_bytes": 850,
    }
    assert {name: daemon.value(f"tier_{name}", RAM) for name in expected} == expected
    assert daemon.value("tier_saves_total", DISK) == 1
    assert daemon.value("tier_published_bytes", DISK) == 300
    assert daemon.value("tier_max_entries", DISK) == 50


def test_what_came_back_at_the_start_is_shown(daemon: Daemon) -> None:
    def stored(number: int, size: int) -> StoredEntry:
        record = EntryRecord(
            key=key(number),
            tier=Tier.DISK,
            reason=SaveReason.COLD,
            generation=number,
            created_ns=number,
            content=Content(size, 16),
            location=(),
        )
        return StoredEntry(record, last_used_ns=number, hits=0)

    entries = (stored(1, 600), stored(2, 300), stored(3, 200))
    daemon.apply(TierRecovered(Tier.DISK, entries, 4, daemon.now_ns))
    assert daemon.value("tier_recovered_entries_total", DISK) == 2
    assert daemon.value("tier_recovered_bytes_total", DISK) == 500
    assert daemon.value("tier_dropped_at_start_total", DISK) == 5


def test_the_sizes_of_tables_go_up_and_down(daemon: Daemon) -> None:
    session = daemon.session()
    token = daemon.begin(session, 1, tier=Tier.DISK)
    daemon.seal(token)
    daemon.apply(Committed((token,), daemon.now_ns))
    daemon.claim(session, 1)
    daemon.reserve(session, 2, 100)
    daemon.lookup(2, wait_ns=50)
    sizes = {name: daemon.value(name) for name in metrics.TABLE_SIZES}
    assert sizes.pop("timers") > 0
    assert sizes == dict.fromkeys(sizes, 1)
    daemon.apply(SessionLost(session, "gone", daemon.now_ns))
    daemon.apply(Tick(daemon.now_ns, flush=True))
    for name in sizes:
        assert daemon.value(name) == 0


def test_health_and_build() -> None:
    daemon = Daemon()
    ill: dict[str, str] = {}
    registry = CollectorRegistry()
    registry.register(StateCollector(daemon.state, lambda: ill))
    assert registry.get_sample_value("prefixd_healthy") == 1
    ill["disk commit"] = "no space"
    assert registry.get_sample_value("prefixd_healthy") == 0
    assert registry.get_sample_value("prefixd_unhealthy", {"part": "disk commit"}) == 1
    (build,) = (f for f in daemon.collector.collect() if f.name == "prefixd_build_info")
    assert build.samples[0].labels["version"]


def test_what_is_in_flight_is_shown() -> None:
    daemon = Daemon()
    flight = {"read_stream_bytes": 7, "staging_refusals": 0}
    registry = CollectorRegistry()
    registry.register(StateCollector(daemon.state, dict, in_flight=lambda: flight))
    for what, value in flight.items():
        assert registry.get_sample_value("prefixd_in_flight", {"what": what}) == value
    flight["read_stream_bytes"] = 0
    assert registry.get_sample_value("prefixd_in_flight", {"what": "read_stream_bytes"}) == 0


def test_a_scrape_changes_nothing(daemon: Daemon) -> None:
    claims(daemon)
    first = [f.samples for f in daemon.collector.collect()]
    second = [f.samples for f in daemon.collector.collect()]
    assert first == second


def used_bytes(daemon: Daemon) -> float:
    """Published and reserved bytes of the RAM tier, in one scrape."""
    names = ("prefixd_tier_published_bytes", "prefixd_tier_reserved_bytes")
    return sum(
        sample.value
        for family in daemon.collector.collect()
        if family.name in names
        for sample in family.samples
        if sample.labels == RAM
    )


class MovingLedger(Ledger):
    """Another thread evicts 300 bytes and reserves 400 between two reads of the first scrape."""

    moves = 1

    def __getattribute__(self, name: str) -> object:
        if name == "reserved_bytes" and self.moves:
            self.moves = 0
            self.published_bytes -= 300
            self.reserved_bytes += 400
        return super().__getattribute__(name)


def test_the_numbers_of_a_tier_are_of_one_moment() -> None:
    ledger = MovingLedger(Tier.RAM, BUDGET_BYTES, make_policy("lru", BUDGET_BYTES))
    ledger.published_bytes = 900
    made = Daemon()
    made.state.tables.ledgers[Tier.RAM] = ledger
    assert used_bytes(made) == 1000


def test_scrapes_while_everything_moves_never_show_more_than_the_budget(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.save(session, 1)
    seen: list[float] = []
    failures: list[BaseException] = []

    def scrape_often() -> None:
        try:
            seen.extend(used_bytes(daemon) for _ in range(300))
        except BaseException as failure:
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        scraping = threading.Thread(target=scrape_often)
        scraping.start()
        for number in count(2):
            daemon.save(session, number, 70 + number % 60)
            if not scraping.is_alive():
                break
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert 0 < min(seen) <= max(seen) <= BUDGET_BYTES


def test_how_scrubbing_goes_is_shown() -> None:
    scrub = Scrub(payload_bytes=5, damaged_entries=2, passes=1, progress=0.5)
    scrub.last_pass_unix_ns = 3_000_000_000
    registry = CollectorRegistry()
    registry.register(StateCollector(Daemon().state, dict, scrubs={Tier.DISK: scrub}))
    for name, value in (
        ("payload_bytes_total", 5),
        ("damaged_entries_total", 2),
        ("unreadable_entries_total", 0),
        ("passes_total", 1),
        ("progress_ratio", 0.5),
        ("last_pass_timestamp_seconds", 3),
    ):
        assert registry.get_sample_value(f"prefixd_scrub_{name}", {"tier": "disk"}) == value


def test_evictions_are_told_apart_by_cause_with_their_ages(daemon: Daemon) -> None:
    session = daemon.session()
    for number in range(1, 11):
        daemon.save(session, number)
    daemon.now_ns += 2 * 10**9
    daemon.save(session, 11, 250)  # three leave
    asked = EvictAsked(next(daemon.requests), Tier.RAM, 1, 10, daemon.now_ns)
    daemon.apply(asked)
    for cause, evicted in (("save", 3), ("operator", 1)):
        labels = {"tier": "ram", "cause": cause}
        assert daemon.value("eviction_age_seconds_count", labels) == evicted
        assert daemon.value("eviction_age_seconds_bucket", {**labels, "le": "1"}) == 0
        assert daemon.value("eviction_age_seconds_bucket", {**labels, "le": "5"}) == evicted


def test_the_oldest_claim_is_shown(daemon: Daemon) -> None:
    session = daemon.session()
    daemon.save(session, 1)
    assert daemon.value("oldest_claim_seconds") == 0
    daemon.claim(session, 1, lease_ns=10**12)
    daemon.now_ns += 3 * 10**9
    daemon.claim(session, 1, lease_ns=10**12)
    assert 2.9 < daemon.value("oldest_claim_seconds") < 3.1


def test_how_long_calls_and_commits_take_is_shown() -> None:
    latencies, commit = Latencies(Clock()), Histogram(LATENCY_BOUNDS_NS)
    registry = CollectorRegistry()
    registry.register(
        StateCollector(
            Daemon().state, dict, latencies=latencies, commits=lambda: {Tier.DISK: commit}
        )
    )
    with latencies.measured(latencies.claim):
        pass
    latencies.save.observe(1_500_000)
    commit.observe(3_000_000)
    for name, labels, bound in (
        ("claim", {}, "10"),
        ("save", {}, "0.002"),
        ("commit", {"tier": "disk"}, "0.005"),
    ):
        named = {**labels, "le": bound}
        assert registry.get_sample_value(f"prefixd_{name}_seconds_bucket", named) == 1
        assert registry.get_sample_value(f"prefixd_{name}_seconds_count", labels) == 1
