"""No metric stands still: each shows another number when its source has one.

`test_metrics.py` shows, event by event, that the core counts what happens.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.limits import LATENCY_BOUNDS_NS
from prefixd.proto.vocabulary import MissReason, Tier
from prefixd.server.api.metrics import PRESSURE, SHARED, StateCollector
from prefixd.server.api.usage import PATHS, UsageBook
from prefixd.server.core.counters import Histogram
from prefixd.server.core.events import Committed, TierChanged, TierState
from prefixd.server.core.journal import EvictionCause
from prefixd.server.runtime.clock import BOUNDS_NS, Clock, Latencies, LoopLag
from prefixd.server.runtime.scrubbing import Scrub
from tests.support.measured import Daemon

#: These stay the same as long as the daemon runs.
STANDS_STILL = {"prefixd_build_info"}


class Sources:
    """All sources of a scrape, at zero."""

    def __init__(self) -> None:
        self.daemon = Daemon()
        self.unhealthy: dict[str, str] = {}
        self.notices: dict[str, str] = {}
        self.in_flight = {"staging_bytes": 0}
        self.shared = dict.fromkeys(SHARED, 0)
        self.pressure = dict.fromkeys(PRESSURE, 0.0)
        self.certificates = {"server.tls_cert": 0}
        self.scrub = Scrub()
        self.commit, self.sync = Histogram(LATENCY_BOUNDS_NS), Histogram(LATENCY_BOUNDS_NS)
        self.latencies, self.usage = Latencies(Clock()), UsageBook()
        self.usage.of("")
        self.lag = SimpleNamespace(pulses=Histogram(BOUNDS_NS))
        self.oldest_ns = 0
        self.now_ns = self.daemon.now_ns
        self.collector = StateCollector(
            self.daemon.state,
            lambda: self.unhealthy,
            cast(LoopLag, self.lag),
            lambda: self.in_flight,
            lambda: self.notices,
            lambda _tier: self.oldest_ns,
            {Tier.DISK: self.scrub},
            usage=self.usage,
            latencies=self.latencies,
            commits=lambda: {Tier.DISK: self.commit},
            syncs=lambda: {Tier.DISK: self.sync},
            now_ns=lambda: self.now_ns,
            shared=lambda: self.shared,
            pressure=lambda: self.pressure,
            certificates=lambda: self.certificates,
        )

    def scraped(self) -> dict[str, dict[tuple[Any, ...], float]]:
        """The samples of each family."""
        return {
            family.name: {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for sample in family.samples
            }
            for family in self.collector.collect()
        }


def add_to_all(counted: object) -> None:
    """Change each number of a dataclass."""
    for field in fields(counted):  # type: ignore[arg-type]
        value = getattr(counted, field.name)
        if isinstance(value, (int, float)):
            setattr(counted, field.name, value + 1)


def told() -> pb.Usage:
    """A report in which nothing is zero."""
    saved = pb.SavedUsage(reason=pb.SAVE_REASON_COLD, outcome=pb.SAVE_STATUS_SAVED, entries=1)
    tiers = [
        pb.TierUsage(
            tier=pb.Tier.ValueType(tier),
            hit_entries=1,
            hit_tokens=1,
            restored_bytes=dict.fromkeys(PATHS, 1),
            saves=[saved],
        )
        for tier in Tier
    ]
    reasons = {reason.value: 1 for reason in MissReason}
    return pb.Usage(
        lookups=len(reasons) + 1, hits=1, lookup_tokens=9, restored_tokens=1,
        misses=reasons, failures=reasons, tiers=tiers, restore_ns=1,
        restore_times=[1] * (len(LATENCY_BOUNDS_NS) + 1),
    )  # fmt: skip


def happen(to: Sources) -> None:
    """Let something happen to every source."""
    daemon, tables = to.daemon, to.daemon.state.tables
    session = daemon.session()
    daemon.save(session, 1)
    daemon.claim(session, 1, lease_ns=10**12)
    daemon.reserve(session, 2, 40)
    daemon.lookup(2, wait_ns=50)
    token = daemon.begin(session, 3, tier=Tier.DISK)
    daemon.seal(token)
    daemon.apply(Committed((token,), daemon.now_ns))
    daemon.claim(session, 3)
    daemon.apply(TierChanged(Tier.DISK, TierState.HUNG, daemon.now_ns))
    add_to_all(tables.counters)
    for tier, ledger in tables.ledgers.items():
        add_to_all(tables.tier_counters[tier])
        ledger.max_entries += 1
        ledger.budget_bytes += 1
        ledger.limit_bytes += 1
    tables.evicted([next(iter(tables.entries.values()))], EvictionCause.SAVE, daemon.now_ns)
    to.now_ns = daemon.now_ns + 10**9
    to.oldest_ns = 1
    to.unhealthy["disk device"] = to.notices["disk tier"] = "why"
    to.in_flight["staging_bytes"] += 1
    to.certificates["server.tls_cert"] += 1
    for name in SHARED:
        to.shared[name] += 1
    for name in PRESSURE:
        to.pressure[name] += 1
    add_to_all(to.scrub)
    times = (to.commit, to.sync, to.latencies.claim, to.latencies.save, to.lag.pulses)
    for histogram in times:
        histogram.observe(1)
    label = to.usage.of("")
    label.add(told())
    for why in label.missed:
        label.missed[why] = 1, 1


def test_every_metric_moves() -> None:
    sources = Sources()
    before = sources.scraped()
    assert sources.scraped() == before
    happen(sources)
    after = sources.scraped()
    assert after.keys() == before.keys()
    still = {name for name, samples in after.items() if samples == before[name]}
    assert still == STANDS_STILL


def test_every_series_of_what_clients_count_moves() -> None:
    """Each reason, path, tier and fate moves, and not just one of them."""
    sources = Sources()
    happen(sources)
    for name, samples in sources.scraped().items():
        if name.startswith("prefixd_client_"):
            assert all(samples.values()), name
