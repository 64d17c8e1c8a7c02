"""Prometheus metrics, read from the live tables with each scrape.

Nothing is stored here: `StateCollector` reads the numbers that `MetaState` keeps anyway. It does
so on the thread of the HTTP server, while the event loop may be changing them. So it reads only
single numbers and lengths, never walks a table, and reads a tier again until two readings agree:
the numbers of a tier are of one moment, those of different tiers may be a moment apart.

Names start with `prefixd_` and end with their unit. Counters end with `_total`, and start at zero
with the daemon. All metrics of a tier have the labels `tier` and `policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import accumulate
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ... import __version__
from ...proto.vocabulary import Tier
from ...tiers.ledger import Ledger
from ..core.counters import Histogram, TierCounters
from ..core.events import TierState
from ..core.state import MetaState
from ..core.tables import Tables
from ..runtime.clock import Latencies, LoopLag
from ..runtime.scrubbing import Scrub
from .usage import SCALARS, UsageBook

#: Counters of the daemon: the fields of `tables.Counters`.
COUNTERS: Final = {
    "lookups": "Lookups that the daemon answered; those in place are prefixd_client_lookups_total.",
    "lookup_keys": "Keys in the lookups that the daemon answered.",
    "lookup_hits": "Keys of the lookups that the daemon answered which were published.",
    "claims": "Claims that were requested; reads in place without one are prefixd_touches_total.",
    "claims_empty": "Claims of which no key was published.",
    "claimed_entries": "Entries in the claims that were granted.",
    "releases": "Claims that their holder released.",
    "claims_lost": "Claims that were taken from their holder: lease over, or an entry damaged.",
    "reservations": "Reservations that were granted.",
    "duplicate_saves": "Saves of keys that were published already.",
    "in_flight_refusals": "Saves of keys that another client was saving.",
    "too_large_refusals": "Saves that no eviction could make room for.",
    "no_room_refusals": "Saves refused because everything was pinned or reserved.",
    "quota_refusals": "Claims and saves refused because a session had its share of a tier.",
    "closed_refusals": "Saves refused because their tier recovers, or its device hangs.",
    "reservations_lost": "Reservations that expired, were cancelled, or lost their session.",
    "crc_mismatches": "Saves whose bytes did not have the expected CRC32C.",
    "length_mismatches": "Saves with fewer or more bytes than reserved.",
    "failed_saves": "Saves that a store could not make durable.",
    "waits": "Requests that waited for saves in flight.",
    "waits_timed_out": "Waits that ended without the save.",
    "touches": "Reads in place, without a claim, that clients reported afterwards.",
    "suspects": "Entries that a client reported as damaged.",
    "deletes": "Entries that a client deleted.",
    "sessions_opened": "Sessions that were opened.",
    "sessions_ended": "Sessions that ended, for whatever reason.",
    "sessions_lost": "Sessions that ended although their client did not close them.",
}
#: Counters of each tier: the fields of `tables.TierCounters`, except its gauge.
TIER_COUNTERS: Final = {
    "hits": "Uses of entries: by claims, by saves of published keys, and in place as reported.",
    "hit_tokens": "Tokens of the entries that were used.",
    "saves": "Entries that were published.",
    "saved_bytes": "Payload bytes that were published.",
    "read_bytes": "Payload bytes that the daemon read for clients; reads in place are not counted.",
    "evictions": "Entries that were evicted.",
    "evicted_bytes": "Stored bytes that were evicted.",
    "corrupt": "Entries that were dropped because their bytes were wrong.",
    "recovered_entries": "Entries that were recovered at the start.",
    "recovered_bytes": "Payload bytes that were recovered at the start.",
    "dropped_at_start": "Entries that were found at the start and dropped.",
}
#: Gauges of each tier: attributes of its `Ledger`.
TIER_GAUGES: Final = {
    "budget_bytes": "Bytes that entries and reservations may occupy.",
    "limit_bytes": "Bytes that they may occupy now; grows to the budget while memory is secured.",
    "published_bytes": "Stored bytes of published entries.",
    "reserved_bytes": "Stored bytes of saves in flight.",
    "pinned_bytes": "Stored bytes of the published entries that are claimed.",
    "entries": "Published entries.",
    "pinned_entries": "Published entries that are claimed.",
    "reservations": "Saves in flight.",
    "max_entries": "Entries at most; 0: not capped.",
}
#: Counters of each tier that is scrubbed: fields of `Scrub`.
SCRUB_COUNTERS: Final = {
    "entries": "Entries that were read back in the background.",
    "payload_bytes": "Payload bytes that were read back in the background.",
    "damaged_entries": "Entries that scrubbing found damaged, and dropped.",
    "unreadable_entries": "Entries that scrubbing could not read.",
    "passes": "How often the whole tier was read back.",
}
_PAYLOAD: Final = ("payload_bytes", "Payload bytes of published entries.")
#: Counters that clients report, by label: `usage.SCALARS`.
CLIENT_COUNTERS: Final = {
    "lookups": "Searches of clients, in place or by a call.",
    "hits": "Searches that found something.",
    "lookup_tokens": "Tokens that were searched for, by searches that know how many.",
    "restored_tokens": "Tokens whose state arrived whole in the engines.",
}
#: Sharing with other nodes: the figures of `Sharing.counts`.
SHARED: Final = {
    "fetches": "Searches that looked for entries of other nodes.",
    "fetched_entries": "Entries that were fetched from the shared engine.",
    "fetched_bytes": "Payload bytes that were fetched from the shared engine.",
    "unavailable": "Entries of the engine that did not arrive in time, or found no room.",
    "damaged": "Entries of the engine whose bytes were wrong; they were deleted there.",
    "second_asked": "Entries that were requested from a second node, because the first was late.",
    "second_came": "Entries that the second node delivered.",
    "bucket_fetched": "Entries that came from the bucket behind the engine.",
    "bucket_offered": "Entries that were given to the bucket behind the engine.",
    "bucket_missed": "Entries that the bucket behind the engine did not take.",
    "offered_entries": "Entries that were given to the shared engine.",
    "offered_bytes": "Payload bytes that were given to the shared engine.",
    "refused": "Entries that the engine refused.",
    "offers_dropped": "Entries that were not offered: too many waited, they left, or it hung.",
    "touched": "Entries whose lifetime in the engine was extended.",
    "withdrawn": "Deleted entries that the engine dropped, too.",
    "deletes_learned": "Deletes of other nodes that were read: of up to 32 keys, or a namespace.",
    "unvouched": "Entries that were not fetched: their node may not know that they were deleted.",
    "too_short": "Fetches not tried: computing the tokens takes less time than two trips.",
    "unanswered": "Requests that no node of the engine answered in time.",
    "waiting_offers": "Entries that wait to be offered.",
    "waiting_withdrawals": "Deleted entries that the engine has not dropped yet.",
    "waiting_deletes": "Deletes that are not durable here yet, or not in the engine's log.",
    "nodes": "Nodes of the engine that are known.",
    "nodes_serving": "Nodes of the engine that are in use now.",
}
#: Memory pressure: the fields of `pressure.PressureCounts`, if there is a source.
PRESSURE: Final = {
    "under": "1: memory is short, and clients are told so.",
    "used_ratio": "The part of the memory that is used, according to the source.",
    "stalled_ratio": "The part of the last seconds in which some process waited for memory.",
    "episodes": "How often memory became short.",
    "evicted_entries": "Entries that were evicted for it.",
    "freed_bytes": "Stored bytes that were evicted for it.",
    "source_failures": "How often the source failed or did not answer.",
}
_PRESSURE_GAUGES: Final = ("under", "used_ratio", "stalled_ratio")
SHARED_GAUGES: Final = (
    "waiting_offers",
    "waiting_withdrawals",
    "waiting_deletes",
    "nodes",
    "nodes_serving",
)
#: Sizes of the tables.
TABLE_SIZES: Final[dict[str, tuple[str, Callable[[Tables], int]]]] = {
    "open_sessions": ("Connected clients.", lambda t: len(t.sessions)),
    "held_claims": ("Claims that are held.", lambda t: len(t.claims)),
    "open_reservations": ("Saves in flight, over all tiers.", lambda t: len(t.reservations)),
    "waiters": ("Requests that wait for saves in flight.", lambda t: len(t.waiting)),
    "unrecorded_entries": ("Entries with uses not yet recorded.", lambda t: len(t.unrecorded)),
    "timers": ("Deadlines that the daemon watches.", lambda t: len(t.timers)),
}
_TIER_LABELS: Final = ("tier", "policy")
#: Two readings of a tier agree at once unless an event falls between them.
_MAX_READINGS: Final = 16

#: Values of labels, and the number.
_Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]


def counters_dict(state: MetaState) -> dict[str, int]:
    """Everything that is counted over all tiers, by its metric name."""
    counters = state.tables.counters
    return {f"prefixd_{field}_total": getattr(counters, field) for field in COUNTERS}


def lag_dict(lag: LoopLag) -> dict[str, int]:
    """How late the event loop was, in microseconds: at most since the start, and as percentiles of
    the last minute."""
    return {
        "prefixd_loop_lag_max_us": lag.max_us,
        "prefixd_loop_lag_p50_us": lag.percentile_us(50),
        "prefixd_loop_lag_p99_us": lag.percentile_us(99),
    }


@dataclass(eq=False, repr=False)
class StateCollector(Collector):
    """The metrics of one `MetaState`. Changes nothing; `collect` may run on any thread, and calls
    the functions below on it."""

    state: MetaState
    #: The parts of the daemon that do not work, each with the reason.
    unhealthy: Callable[[], Mapping[str, str]] = dict
    lag: LoopLag | None = None
    #: Memory that calls occupy (`Front.in_flight`).
    in_flight: Callable[[], Mapping[str, int]] = dict
    #: The parts that are less than they could be, each with the reason.
    notices: Callable[[], Mapping[str, str]] = dict
    #: For how long a device has not answered.
    oldest_ns: Callable[[Tier], int] = lambda _tier: 0
    scrubs: Mapping[Tier, Scrub] = field(default_factory=dict)
    _: KW_ONLY
    #: What clients report.
    usage: UsageBook = field(default_factory=UsageBook)
    latencies: Latencies | None = None
    #: How long commits, and the syncs in them, take.
    commits: Callable[[], Mapping[Tier, Histogram]] = dict
    syncs: Callable[[], Mapping[Tier, Histogram]] = dict
    now_ns: Callable[[], int] | None = None
    shared: Callable[[], Mapping[str, int]] = dict
    pressure: Callable[[], Mapping[str, float]] = dict
    #: When each certificate ends, by its option, in Unix seconds.
    certificates: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[Metric]:
        """One reading of everything."""
        tables = self.state.tables
        for name, value in counters_dict(self.state).items():
            counter = name.removeprefix("prefixd_").removesuffix("_total")
            yield CounterMetricFamily(name, COUNTERS[counter], value)
        for name, (about, size) in TABLE_SIZES.items():
            yield _gauge(name, about, size(tables))
        for name, value in self.shared().items():
            kind = GaugeMetricFamily if name in SHARED_GAUGES else CounterMetricFamily
            yield kind(f"prefixd_shared_{name}", SHARED[name], value)
        for name, number in self.pressure().items():
            kind = GaugeMetricFamily if name in _PRESSURE_GAUGES else CounterMetricFamily
            yield kind(f"prefixd_pressure_{name}", PRESSURE[name], number)
        yield _gauges(
            "certificate_ends_timestamp_seconds",
            "When a certificate in use ends.",
            ["option"],
            (([option], ends_s) for option, ends_s in self.certificates().items()),
        )
        yield from self._collect_tiers(tables)
        yield from self._collect_scrubs()
        yield from self._collect_health()
        if self.lag is not None:
            yield _histogram(
                "loop_lag_seconds",
                "How late the event loop came to its pulse.",
                [],
                [((), self.lag.pulses)],
            )
        yield from collect_usage(self.usage)
        yield from self._collect_times(tables)
        yield _gauges(
            "in_flight",
            "Memory that calls use, and calls that were refused for lack of it.",
            ["what"],
            (([what], value) for what, value in self.in_flight().items()),
        )
        yield _gauges("build_info", "Always 1.", ["version"], [([__version__], 1)])

    def _collect_tiers(self, tables: Tables) -> Iterator[Metric]:
        readings = [
            ((tier.label, ledger.policy.name), _reading(ledger, tables.tier_counters[tier]))
            for tier, ledger in tables.ledgers.items()
        ]
        columns = (*TIER_COUNTERS.items(), *TIER_GAUGES.items(), _PAYLOAD)
        for column, (name, about) in enumerate(columns):
            make = _counters if name in TIER_COUNTERS else _gauges
            samples = ((labels, reading[column]) for labels, reading in readings)
            yield make(f"tier_{name}", about, _TIER_LABELS, samples)

    def _collect_times(self, tables: Tables) -> Iterator[Metric]:
        now_ns = tables.stamp_ns if self.now_ns is None else self.now_ns()
        yield _gauge(
            "oldest_claim_seconds",
            "For how long the oldest claim has been held; 0: there is none.",
            tables.oldest_claim_ns(now_ns) / 1e9,
        )
        yield _histogram(
            "eviction_age_seconds",
            "For how long evicted entries had not been used; the count is that of evictions.",
            ["tier", "cause"],
            [((t.label, cause.value), ages) for (t, cause), ages in tables.eviction_ages.items()],
        )
        yield _histogram(
            "commit_seconds",
            "From the last byte of an entry until its store has recorded it.",
            ["tier"],
            [((tier.label,), taken) for tier, taken in self.commits().items()],
        )
        yield _histogram(
            "sync_seconds",
            "How long a device took to make the payloads of a commit durable (fdatasync).",
            ["tier"],
            [((tier.label,), taken) for tier, taken in self.syncs().items()],
        )
        if self.latencies is not None:
            for name, about in (
                ("claim", "From a claim to its answer, waiting for saves in flight included."),
                ("save", "From the first message of a save to its results."),
            ):
                taken = getattr(self.latencies, name)
                yield _histogram(f"{name}_seconds", about, [], [((), taken)])

    def _collect_scrubs(self) -> Iterator[Metric]:
        scrubs = [([tier.label], scrub) for tier, scrub in self.scrubs.items()]
        for name, about in SCRUB_COUNTERS.items():
            samples = ((labels, getattr(scrub, name)) for labels, scrub in scrubs)
            yield _counters(f"scrub_{name}", about, ["tier"], samples)
        yield _gauges(
            "scrub_last_pass_timestamp_seconds",
            "When the whole tier had last been read back; 0: not since the start.",
            ["tier"],
            ((labels, scrub.last_pass_unix_ns / 1e9) for labels, scrub in scrubs),
        )
        yield _gauges(
            "scrub_progress_ratio",
            "The part of the tier that the current pass has read back.",
            ["tier"],
            ((labels, scrub.progress) for labels, scrub in scrubs),
        )

    def _collect_health(self) -> Iterator[Metric]:
        unhealthy = self.unhealthy()
        yield _gauge("healthy", "1: everything works; 0: see the log.", not unhealthy)
        yield _gauges(
            "unhealthy",
            "1 for each part that does not work.",
            ["part"],
            (([part], 1) for part in unhealthy),
        )
        yield _gauges(
            "notices",
            "1 for each part that is less than it could be while the daemon serves.",
            ["part"],
            (([part], 1) for part in self.notices()),
        )
        tiers, closed = list(self.state.tables.ledgers), self.state.tables.closed
        yield _gauges(
            "tier_closed",
            "1: it takes no saves now.",
            ["tier", "state"],
            (
                ([tier.label, state.label], closed.get(tier) is state)
                for tier in tiers
                for state in TierState
                if state is not TierState.SERVING
            ),
        )
        yield _gauges(
            "tier_oldest_io_seconds",
            "For how long its device has not answered; 0: it owes no answer.",
            ["tier"],
            (([tier.label], self.oldest_ns(tier) / 1e9) for tier in tiers),
        )


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    about: str,
    labels: Sequence[str],
    samples: _Samples,
) -> Metric:
    family = kind(f"prefixd_{name}", about, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


_counters = partial(_family, CounterMetricFamily)
_gauges = partial(_family, GaugeMetricFamily)


def _gauge(name: str, about: str, number: float) -> Metric:
    return GaugeMetricFamily(f"prefixd_{name}", about, number)


def _histogram(
    name: str,
    about: str,
    labels: Sequence[str],
    histograms: Iterable[tuple[Sequence[str], Histogram]],
) -> Metric:
    """Histograms of nanoseconds as one metric in seconds."""
    family = HistogramMetricFamily(f"prefixd_{name}", about, labels=labels)
    for values, histogram in histograms:
        names = [*(f"{bound / 1e9:g}" for bound in histogram.bounds), "+Inf"]
        counts = map(float, accumulate(histogram.counts))
        family.add_metric(values, list(zip(names, counts, strict=True)), histogram.total / 1e9)
    return family


def _reading(ledger: Ledger, counters: TierCounters) -> tuple[int, ...]:
    """All numbers of a tier, of one moment."""

    def read() -> tuple[int, ...]:
        return (
            *(getattr(counters, name) for name in TIER_COUNTERS),
            *(getattr(ledger, name) for name in TIER_GAUGES),
            counters.payload_bytes,
        )

    reading = read()
    for _ in range(_MAX_READINGS):
        before, reading = reading, read()
        if reading == before:
            break
    return reading


def _tier_label(tier: Tier | None) -> str:
    return "none" if tier is None else tier.label


def collect_usage(usage: UsageBook) -> Iterator[Metric]:
    """What clients report, by label. All but the usual reasons and paths have a series once
    they were met: most labels never meet most of them."""
    labels = list(usage.items())
    for name in SCALARS:
        samples = (([label], sums.scalars[name]) for label, sums in labels)
        yield _counters(f"client_{name}", CLIENT_COUNTERS[name], ["namespace"], samples)
    for name, about, shown in (
        ("misses", "Searches that found nothing: they add up to lookups - hits.", ("absent",)),
        ("failures", "Restores, reads and probes that failed.", ("lost", "corrupt", "unreadable")),
    ):
        by_reason = (
            ([label, reason], count)
            for label, sums in labels
            for reason, count in getattr(sums, name).items()
            if count or reason in shown
        )
        yield _counters(f"client_{name}", about, ["namespace", "reason"], by_reason)
    yield _counters(
        "client_missed_tokens",
        "Tokens that searches did not get, by what became of the first missing key: they add up to"
        " lookup_tokens - hit_tokens.",
        ["namespace", "reason", "tier", "cause"],
        (
            ([label, why.reason, _tier_label(why.tier), why.cause], tokens)
            for label, sums in labels
            for why, (tokens, _) in sums.missed.items()
        ),
    )
    for name, about in (
        ("hit_entries", "Entries that searches found."),
        ("hit_tokens", "Tokens of the entries that searches found."),
    ):
        by_tier = (
            ([label, _tier_label(tier)], count)
            for label, sums in labels
            for tier, count in getattr(sums, name).items()
        )
        yield _counters(f"client_{name}", about, ["namespace", "tier"], by_tier)
    yield _counters(
        "client_restored_bytes",
        "Bytes that reached engines: as views, copied in place, or streamed by the daemon.",
        ["namespace", "tier", "path"],
        (
            ([label, tier.label, path], size_bytes)
            for label, sums in labels
            for (tier, path), size_bytes in sums.restored_bytes.items()
            if size_bytes or path == "copy"
        ),
    )
    yield _counters(
        "client_saves",
        "Saves by why they were made and how they ended.",
        ["namespace", "tier", "reason", "outcome"],
        (
            ([label, tier.label, why.label, outcome.label], count)
            for label, sums in labels
            for (tier, why, outcome), count in list(sums.saves.items())
        ),
    )
    yield _histogram(
        "client_restore_seconds",
        "How long restores took, whatever came of them.",
        ["namespace"],
        [((label,), sums.restores) for label, sums in labels],
    )
