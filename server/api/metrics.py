"""Prometheus metrics, read from the live tables with each scrape.

Nothing is kept here: `StateCollector` reads the numbers that `MetaState` keeps anyway. It does
so on the thread of the HTTP server while the event loop may be changing them, so it reads
single numbers and lengths only, never walks a table, and reads a tier again until two readings
agree. Sums over a tier are therefore of one moment; different tiers may be a moment apart.

Names start with `prefixd_` and end with their unit; counters end with `_total`, and start at
zero with the daemon. Everything of a tier carries the labels `tier` and `policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

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
from ..runtime.lag import LoopLag
from ..runtime.latencies import Latencies
from ..runtime.scrubbing import Scrub
from .usage import SCALARS, UsageBook

#: What the daemon counts: the fields of `tables.Counters`.
COUNTERS: Final = {
    "lookups": "Lookups that the daemon answered; those in place are prefixd_client_lookups_total.",
    "lookup_keys": "Keys in the lookups that the daemon answered.",
    "lookup_hits": "Keys of the lookups that the daemon answered which were published.",
    "claims": "Claims that were asked for; reads in place without one are prefixd_touches_total.",
    "claims_empty": "Claims of which no key was published.",
    "claimed_entries": "Entries in the claims that were granted.",
    "releases": "Claims that were given back by their holder.",
    "claims_lost": "Claims that were taken from their holder: lease over, or an entry damaged.",
    "reservations": "Reservations that were granted.",
    "duplicate_saves": "Saves of keys that were published already.",
    "in_flight_refusals": "Saves of keys that somebody else was saving.",
    "too_large_refusals": "Saves that no eviction could make room for.",
    "no_room_refusals": "Saves refused because everything was pinned or reserved.",
    "quota_refusals": "Claims and saves refused because a session had its share of a tier.",
    "closed_refusals": "Saves refused because their tier recovers, or its device hangs.",
    "reservations_lost": "Reservations that expired, were cancelled, or lost their session.",
    "crc_mismatches": "Saves whose bytes were not those that were meant.",
    "length_mismatches": "Saves with fewer or more bytes than reserved.",
    "failed_saves": "Saves that a store could not make durable.",
    "waits": "Requests that waited for saves in flight.",
    "waits_timed_out": "Waits that ended without the save.",
    "touches": "Reads in place, without a claim, that clients told of afterwards.",
    "suspects": "Entries that a client reported as damaged.",
    "deletes": "Entries that a client deleted.",
    "sessions_opened": "Sessions that were opened.",
    "sessions_ended": "Sessions that ended, however they did.",
    "sessions_lost": "Sessions that ended without their client's closing them.",
}
#: What the daemon counts in every tier: the fields of `tables.TierCounters`, less its gauge.
TIER_COUNTERS: Final = {
    "hits": "Uses of entries: by claims, by saves of what is there, and in place as told.",
    "hit_tokens": "Tokens of the entries that were used.",
    "saves": "Entries that were published.",
    "saved_bytes": "Payload bytes that were published.",
    "read_bytes": "Payload bytes that the daemon read for clients; in place they do it themselves.",
    "evictions": "Entries that were evicted.",
    "evicted_bytes": "Stored bytes that were evicted.",
    "corrupt": "Entries that were dropped because their bytes were wrong.",
    "recovered_entries": "Entries that came back at the start.",
    "recovered_bytes": "Payload bytes that came back at the start.",
    "dropped_at_start": "Entries that were found at the start and not taken back.",
}
#: What is booked in every tier at this moment: attributes of its `Ledger`.
TIER_GAUGES: Final = {
    "budget_bytes": "What entries and reservations may take.",
    "limit_bytes": "What they may take now; grows to the budget while memory is secured.",
    "published_bytes": "Stored bytes of published entries.",
    "reserved_bytes": "Stored bytes of saves in flight.",
    "pinned_bytes": "Stored bytes of the published entries that are claimed.",
    "entries": "Published entries.",
    "pinned_entries": "Published entries that are claimed.",
    "reservations": "Saves in flight.",
    "max_entries": "Entries at most; 0: not capped.",
}
#: How scrubbing goes: fields of `Scrub`, in tiers that are scrubbed.
SCRUB_COUNTERS: Final = {
    "entries": "Entries that were read back in the background.",
    "payload_bytes": "Payload bytes that were read back in the background.",
    "damaged_entries": "Entries that were found damaged so, and dropped.",
    "unreadable_entries": "Entries that could not be read when it was their turn.",
    "passes": "Times that the whole tier was read back.",
}
_PAYLOAD: Final = ("payload_bytes", "Payload bytes of published entries.")
#: What clients count, in every label: `usage.SCALARS`.
CLIENT_COUNTERS: Final = {
    "lookups": "Searches of clients, in place or by asking.",
    "hits": "Searches that found something.",
    "lookup_tokens": "Tokens that were searched for, as far as the callers said.",
    "restored_tokens": "Tokens whose state arrived whole in the engines.",
}
#: What was shared with other nodes: what `Sharing.counts` says, one of it a gauge.
SHARED: Final = {
    "fetches": "Searches that asked what other nodes have.",
    "fetched_entries": "Entries that came from the shared engine.",
    "fetched_bytes": "Payload bytes that came from the shared engine.",
    "unavailable": "Entries that the engine has and that did not come in time, or had no room.",
    "damaged": "Entries of the engine whose bytes were wrong; they were dropped there.",
    "second_asked": "Entries that a second node was asked for: the first had not brought them.",
    "second_came": "Entries that came from that second node.",
    "offered_entries": "Entries that were given to the shared engine.",
    "offered_bytes": "Payload bytes that were given to the shared engine.",
    "refused": "Entries that the engine did not take.",
    "offers_dropped": "Entries that were not offered: too many waited, they left, or it hung.",
    "touched": "Entries whose life in the engine was made longer.",
    "unanswered": "Requests that no node of the engine answered in time.",
    "waiting_offers": "Entries that wait to be offered.",
    "nodes": "Nodes of the engine that are known.",
    "nodes_serving": "Nodes of the engine that are asked now.",
}
#: What `pressure.PressureCounts` has, where a source is asked: the first three are of this moment.
PRESSURE: Final = {
    "under": "1: memory is short, and the sessions are told so.",
    "used_ratio": "The part of the memory that is used, as the source said.",
    "stalled_ratio": "The part of the last seconds in which somebody waited for memory.",
    "episodes": "Times that memory became short.",
    "evicted_entries": "Entries that were evicted for it.",
    "freed_bytes": "Stored bytes that were evicted for it.",
    "source_failures": "Times that the source failed or did not answer.",
}
_PRESSURE_GAUGES: Final = ("under", "used_ratio", "stalled_ratio")
SHARED_GAUGES: Final = ("waiting_offers", "nodes", "nodes_serving")
#: What the tables hold at this moment.
TABLE_SIZES: Final[dict[str, tuple[str, Callable[[Tables], int]]]] = {
    "open_sessions": ("Connected clients.", lambda t: len(t.sessions)),
    "held_claims": ("Claims that are held.", lambda t: len(t.claims)),
    "open_reservations": ("Saves in flight, over all tiers.", lambda t: len(t.reservations)),
    "waiters": ("Requests that wait for saves in flight.", lambda t: len(t.waiting)),
    "unrecorded_entries": ("Entries with uses not yet recorded.", lambda t: len(t.unrecorded)),
    "timers": ("Deadlines that are being watched.", lambda t: len(t.timers)),
}
_TIER_LABELS: Final = ("tier", "policy")
#: Two readings of a tier agree at once unless an event falls between them.
_MAX_READINGS: Final = 16


def counters_dict(state: MetaState) -> dict[str, int]:
    """Everything that is counted over all tiers, by its metric name."""
    counters = state.tables.counters
    return {f"prefixd_{field}_total": getattr(counters, field) for field in COUNTERS}


def lag_dict(lag: LoopLag) -> dict[str, int]:
    """How late the event loop is, in microseconds: since the start, and of the last minute."""
    return {
        "prefixd_loop_lag_max_us": lag.max_us,
        "prefixd_loop_lag_p50_us": lag.percentile_us(50),
        "prefixd_loop_lag_p99_us": lag.percentile_us(99),
    }


def _nothing() -> dict[str, Any]:
    return {}


def _no_io(_tier: Tier) -> int:
    return 0


def _no_commits() -> Mapping[Tier, Histogram]:
    return {}


_NO_SCRUBS: Final[Mapping[Tier, Scrub]] = {}


class StateCollector(Collector):
    """The metrics of one `MetaState`. Changes nothing; `collect` may run on any thread.

    `unhealthy` says what of the daemon does not work, by name, `notices` what is less than it could
    be, `in_flight` what calls take of its memory (`front.Front.in_flight`), `oldest_ns` since when
    a device owes an answer, `commits` and `syncs` how long those take, and `now_ns` what the time
    is; they are called on that thread, too. `usage` is what the clients count, `shared` what went
    from and to other nodes, `pressure` what is known of it (`pressure.PressureCounts`),
    `certificates` when each ends, by its option, in Unix seconds.
    """

    def __init__(
        self,
        state: MetaState,
        unhealthy: Callable[[], Mapping[str, str]] = _nothing,
        lag: LoopLag | None = None,
        in_flight: Callable[[], Mapping[str, int]] = _nothing,
        notices: Callable[[], Mapping[str, str]] = _nothing,
        oldest_ns: Callable[[Tier], int] = _no_io,
        scrubs: Mapping[Tier, Scrub] = _NO_SCRUBS,
        *,
        usage: UsageBook | None = None,
        latencies: Latencies | None = None,
        commits: Callable[[], Mapping[Tier, Histogram]] = _no_commits,
        syncs: Callable[[], Mapping[Tier, Histogram]] = _no_commits,
        now_ns: Callable[[], int] | None = None,
        shared: Callable[[], Mapping[str, int]] = _nothing,
        pressure: Callable[[], Mapping[str, float]] = _nothing,
        certificates: Callable[[], Mapping[str, int]] = _nothing,
    ) -> None:
        self.unhealthy = unhealthy
        self._notices = notices
        self._oldest_ns = oldest_ns
        self._scrubs = scrubs
        self._state = state
        self._lag = lag
        self._in_flight = in_flight
        self._usage = usage or UsageBook()
        self._latencies = latencies
        self._commits = commits
        self._syncs = syncs
        self._shared = shared
        self._pressure = pressure
        self._certificates = certificates
        self._now_ns = now_ns or (lambda: state.tables.stamp_ns)

    def collect(self) -> Iterator[Metric]:
        """One reading of everything."""
        tables = self._state.tables
        for name, value in counters_dict(self._state).items():
            field = name.removeprefix("prefixd_").removesuffix("_total")
            yield CounterMetricFamily(name, COUNTERS[field], value)
        for name, (about, size) in TABLE_SIZES.items():
            yield GaugeMetricFamily(f"prefixd_{name}", about, size(tables))
        for name, value in self._shared().items():
            kind = GaugeMetricFamily if name in SHARED_GAUGES else CounterMetricFamily
            yield kind(f"prefixd_shared_{name}", SHARED[name], value)
        for name, number in self._pressure().items():
            kind = GaugeMetricFamily if name in _PRESSURE_GAUGES else CounterMetricFamily
            yield kind(f"prefixd_pressure_{name}", PRESSURE[name], number)
        ends = GaugeMetricFamily(
            "prefixd_certificate_ends_timestamp_seconds",
            "When a certificate ends that is in use.",
            labels=["option"],
        )
        for option, ends_s in self._certificates().items():
            ends.add_metric([option], ends_s)
        yield ends
        yield from self._collect_tiers(tables)
        yield from self._collect_scrubs()
        yield from self._collect_health()
        if self._lag is not None:
            yield _histogram(
                "prefixd_loop_lag_seconds",
                "How late the event loop came to its pulse.",
                [],
                [((), self._lag.pulses)],
            )
        yield from collect_usage(self._usage)
        yield from self._collect_times(tables)
        flight = GaugeMetricFamily(
            "prefixd_in_flight",
            "Memory that calls use, and calls that were refused for lack of it.",
            labels=["what"],
        )
        for what, value in self._in_flight().items():
            flight.add_metric([what], value)
        yield flight
        build = GaugeMetricFamily("prefixd_build_info", "Always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build

    def _collect_tiers(self, tables: Tables) -> Iterator[Metric]:
        readings = [
            ((tier.label, ledger.policy.name), _reading(ledger, tables.tier_counters[tier]))
            for tier, ledger in tables.ledgers.items()
        ]
        columns: list[CounterMetricFamily | GaugeMetricFamily] = [
            *(
                CounterMetricFamily(f"prefixd_tier_{name}", about, labels=_TIER_LABELS)
                for name, about in TIER_COUNTERS.items()
            ),
            *(
                GaugeMetricFamily(f"prefixd_tier_{name}", about, labels=_TIER_LABELS)
                for name, about in (*TIER_GAUGES.items(), _PAYLOAD)
            ),
        ]
        for labels, reading in readings:
            for column, value in zip(columns, reading, strict=True):
                column.add_metric(labels, value)
        yield from columns

    def _collect_times(self, tables: Tables) -> Iterator[Metric]:
        now_ns = self._now_ns()
        yield GaugeMetricFamily(
            "prefixd_oldest_claim_seconds",
            "For how long the oldest claim is held; 0: there is none.",
            tables.oldest_claim_ns(now_ns) / 1e9,
        )
        yield _histogram(
            "prefixd_eviction_age_seconds",
            "For how long evicted entries had not been used; the count is that of evictions.",
            ["tier", "cause"],
            [((t.label, cause.value), ages) for (t, cause), ages in tables.eviction_ages.items()],
        )
        yield _histogram(
            "prefixd_commit_seconds",
            "From whole bytes until their store has recorded them.",
            ["tier"],
            [((tier.label,), taken) for tier, taken in self._commits().items()],
        )
        yield _histogram(
            "prefixd_sync_seconds",
            "How long a device took to make the payloads of a commit durable (fdatasync).",
            ["tier"],
            [((tier.label,), taken) for tier, taken in self._syncs().items()],
        )
        if self._latencies is not None:
            for name, about in (
                ("claim", "From a claim to its answer, waiting for saves in flight included."),
                ("save", "From the first message of a save to its results."),
            ):
                taken = getattr(self._latencies, name)
                yield _histogram(f"prefixd_{name}_seconds", about, [], [((), taken)])

    def _collect_scrubs(self) -> Iterator[Metric]:
        for name, about in SCRUB_COUNTERS.items():
            counter = CounterMetricFamily(f"prefixd_scrub_{name}", about, labels=["tier"])
            for tier, scrub in self._scrubs.items():
                counter.add_metric([tier.label], getattr(scrub, name))
            yield counter
        ended = GaugeMetricFamily(
            "prefixd_scrub_last_pass_timestamp_seconds",
            "When the whole tier had last been read back; 0: not since the start.",
            labels=["tier"],
        )
        progress = GaugeMetricFamily(
            "prefixd_scrub_progress_ratio",
            "The part of the tier that the current pass has behind it.",
            labels=["tier"],
        )
        for tier, scrub in self._scrubs.items():
            ended.add_metric([tier.label], scrub.last_pass_unix_ns / 1e9)
            progress.add_metric([tier.label], scrub.progress)
        yield from (ended, progress)

    def _collect_health(self) -> Iterator[Metric]:
        unhealthy = self.unhealthy()
        yield GaugeMetricFamily(
            "prefixd_healthy", "1: everything works; 0: see the log.", not unhealthy
        )
        parts = GaugeMetricFamily(
            "prefixd_unhealthy", "1 for each part that does not work.", labels=["part"]
        )
        for part in unhealthy:
            parts.add_metric([part], 1)
        yield parts
        notices = GaugeMetricFamily(
            "prefixd_notices",
            "1 for each part that is less than it could be while the daemon serves.",
            labels=["part"],
        )
        for part in self._notices():
            notices.add_metric([part], 1)
        yield notices
        closed = GaugeMetricFamily(
            "prefixd_tier_closed", "1: it takes no saves now.", labels=["tier", "state"]
        )
        oldest = GaugeMetricFamily(
            "prefixd_tier_oldest_io_seconds",
            "For how long its device has not answered; 0: it owes no answer.",
            labels=["tier"],
        )
        for tier in list(self._state.tables.ledgers):
            state = self._state.tables.closed.get(tier)
            for one in (TierState.RECOVERING, TierState.HUNG):
                closed.add_metric([tier.label, one.value], int(one is state))
            oldest.add_metric([tier.label], self._oldest_ns(tier) / 1e9)
        yield closed
        yield oldest


def _histogram(
    name: str,
    about: str,
    labels: Sequence[str],
    histograms: Iterable[tuple[Sequence[str], Histogram]],
) -> Metric:
    """Histograms of nanoseconds as one metric in seconds."""
    family = HistogramMetricFamily(name, about, labels=labels)
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


def collect_usage(usage: UsageBook) -> Iterator[Metric]:
    """What the clients count, by label."""
    labels = list(usage.items())
    for name in SCALARS:
        scalar = CounterMetricFamily(
            f"prefixd_client_{name}", CLIENT_COUNTERS[name], labels=["namespace"]
        )
        for label, sums in labels:
            scalar.add_metric([label], sums.scalars[name])
        yield scalar
    for name, about in (
        ("misses", "Searches that found nothing: they add up to lookups - hits."),
        ("failures", "Restores, reads and probes that failed."),
    ):
        by_reason = CounterMetricFamily(
            f"prefixd_client_{name}", about, labels=["namespace", "reason"]
        )
        for label, sums in labels:
            for reason, count in getattr(sums, name).items():
                by_reason.add_metric([label, reason], count)
        yield by_reason
    absent = CounterMetricFamily(
        "prefixd_client_absent",
        "Absent misses, by what the journal says of their keys and the tier that these left.",
        labels=["namespace", "because", "tier"],
    )
    for label, sums in labels:
        for because, count in sums.absent_because.items():
            absent.add_metric([label, because, "none"], count)
        for (tier, because), count in sums.left.items():
            absent.add_metric([label, because, tier.label], count)
    yield absent
    for name, about in (
        ("hit_entries", "Entries that searches found."),
        ("hit_tokens", "Tokens of the entries that searches found."),
    ):
        by_tier = CounterMetricFamily(f"prefixd_client_{name}", about, labels=["namespace", "tier"])
        for label, sums in labels:
            for tier, count in getattr(sums, name).items():
                by_tier.add_metric([label, tier.label], count)
        yield by_tier
    restored = CounterMetricFamily(
        "prefixd_client_restored_bytes",
        "Bytes that reached engines: as views, copied in place, or streamed by the daemon.",
        labels=["namespace", "tier", "path"],
    )
    saves = CounterMetricFamily(
        "prefixd_client_saves",
        "Saves by why they were made and how they ended.",
        labels=["namespace", "tier", "reason", "outcome"],
    )
    for label, sums in labels:
        for (tier, path), size_bytes in sums.restored_bytes.items():
            restored.add_metric([label, tier.label, path], size_bytes)
        for (tier, why, outcome), count in list(sums.saves.items()):
            saves.add_metric([label, tier.label, why.label, outcome], count)
    yield restored
    yield saves
    yield _histogram(
        "prefixd_client_restore_seconds",
        "How long restores took, whatever came of them.",
        ["namespace"],
        [((label,), sums.restores) for label, sums in labels],
    )
