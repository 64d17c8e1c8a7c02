"""What `prefixctl top` shows: a daemon between two samples of its statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto import prefixd_pb2 as pb
from ....proto.units import format_duration
from ....proto.vocabulary import Tier, label_of
from ..message_json import label_in
from . import stats as stats_views
from .operators import claims_table
from .stats import busiest, count_usage, hit_tokens, missed_words, tokens_line, total_usage
from .text_tables import TierBar, make_table, percent, size, tier_name, used_bytes

#: How many namespaces are shown.
NAMESPACES: Final = 8
#: How many claims are shown.
OLDEST_CLAIMS: Final = 5


class Rates(NamedTuple):
    """What a daemon did between two samples. Rates but that of look-ups are bytes per second."""

    hit_tokens: int
    lookup_tokens: int
    lookups_per_s: float
    restored_per_s: float
    saved_per_s: float
    evicted_per_s: float
    #: Fetched from other nodes.
    fetched_per_s: float


class Interval:
    """A daemon between the last two samples. After the first one of a start: since its start."""

    def __init__(self, address: str) -> None:
        #: Shown last, unless empty.
        self.note = ""
        self._address = address
        self._now = self._before = pb.StatsResponse()
        self._claims: Sequence[pb.ClaimDetail] = ()
        self._at_s = 0.0
        self._seconds = 0.0

    def take(self, stats: pb.StatsResponse, oldest: Sequence[pb.ClaimDetail], at_s: float) -> None:
        """Add a sample, taken at `at_s` (monotonic). `oldest` are claims, the oldest first."""
        same = self._now.incarnation == stats.incarnation
        # Counters of a restarted daemon begin at 0, so the sample before tells nothing.
        self._before = self._now if same else pb.StatsResponse()
        self._seconds = at_s - self._at_s if same else stats.uptime_ms / 1_000
        self._now, self._claims, self._at_s = stats, oldest, at_s

    def between(self) -> pb.StatsResponse:
        """The last sample. Its usage and the times of its stages are of the time between both."""
        found = pb.StatsResponse()
        found.CopyFrom(self._now)
        for label, usage in found.usage.items():
            if label in self._before.usage:
                count_usage(usage, self._before.usage[label], -1)
        before = {stage.stage: stage for stage in self._before.stages}
        for stage in found.stages:
            if stage.stage in before:
                old = before[stage.stage].times
                stage.times[:] = [max(0, n - o) for n, o in zip(stage.times, old, strict=True)]
        return found

    def rates(self) -> Rates:
        """The rates between the samples."""
        usage = total_usage(self.between().usage.values())
        before = {tier.tier: tier for tier in self._before.tiers}
        pairs = [(tier, before.get(tier.tier, pb.TierStats())) for tier in self._now.tiers]
        fetched = [sample.shared.get("fetched_bytes", 0) for sample in (self._now, self._before)]
        return Rates(
            hit_tokens(usage),
            usage.lookup_tokens,
            self._rate(usage.lookups),
            self._rate(_restored_bytes(usage)),
            self._rate(sum(now.saved_bytes - old.saved_bytes for now, old in pairs)),
            self._rate(sum(now.evicted_bytes - old.evicted_bytes for now, old in pairs)),
            self._rate(fetched[0] - fetched[1]),
        )

    def _rate(self, count: float) -> float:
        return count / self._seconds if self._seconds > 0 else 0.0

    def __rich__(self) -> RenderableType:
        now, between = self._now, self.between()
        lines: list[RenderableType] = [stats_views.headline(now, self._address)]
        lines += stats_views.notice_lines(now)
        lines.append(self._hits_line(between))
        lines.append(self.tiers_table())
        if busiest(now.usage):
            lines.append(self._namespaces_table(between))
        if now.shared:
            lines.append(self._shared_line())
        if any(node.state != pb.SHARED_NODE_STATE_SERVING for node in now.shared_nodes):
            lines.append(stats_views.shared_nodes_table(now.shared_nodes))
        lines.append(self._stages_table(between.stages))
        lines.append(stats_views.held_line(now))
        if self._claims:
            lines.append(Text("oldest claims", "bold"))
            lines.append(claims_table(self._claims))
        if self.note:
            lines.append(Text(self.note, "bold red"))
        return Group(*lines)

    def _hits_line(self, between: pb.StatsResponse) -> Text:
        """Tokens hit and missed between the samples, and why."""
        recent = total_usage(between.usage.values())
        ever = total_usage(self._now.usage.values())
        line = tokens_line(recent)
        first = not self._before.incarnation
        if ever.lookup_tokens and not first:
            since = percent(hit_tokens(ever), ever.lookup_tokens)
            line.append(f" ({since} hit since the start)", style="not bold")
        if why := missed_words(recent):
            line.append(f"\nmissed     {why}", style="not bold")
        rates = (
            f"\n           {self._rate(recent.lookups):,.0f} look-ups/s"
            f"   {size(self._rate(_restored_bytes(recent)))}/s restored"
            f"{'   all rates: since the start' * first}"
        )
        return line.append(rates, style="not bold")

    def _shared_line(self) -> Text:
        """What is fetched from other nodes and offered to them."""
        now, before = self._now.shared, self._before.shared

        def rate(name: str) -> float:
            return self._rate(max(0, now[name] - before.get(name, 0)))

        serving, nodes = now["nodes_serving"], now["nodes"]
        return Text.assemble(
            ("shared     ", "bold"),
            f"{size(rate('fetched_bytes'))}/s brought   "
            f"{size(rate('offered_bytes'))}/s offered   "
            f"{now['waiting_offers']:,} wait   {rate('offers_dropped'):,.0f}/s dropped   "
            f"{rate('unanswered'):,.0f}/s unanswered   {serving:,} of {nodes:,} nodes",
        )

    def tiers_table(self) -> Table:
        """How full the tiers are, and what they do."""
        caption = "bright: claimed   plain: cached   white: being saved"
        table = make_table(
            "tier||>full|>budget|>entries|>hits/s|>saved/s|>evicted/s", caption=caption
        )
        before = {tier.tier: tier for tier in self._before.tiers}
        for tier in self._now.tiers:
            old = before.get(tier.tier, pb.TierStats())
            budget = size(tier.budget_bytes)
            if tier.state > pb.TIER_STATE_SERVING:
                budget += f" ({label_in(tier, 'state')})"
            table.add_row(
                tier_name(tier.tier),
                TierBar(tier),
                percent(used_bytes(tier), tier.budget_bytes),
                budget,
                f"{tier.entries:,}",
                f"{self._rate(tier.hits - old.hits):,.0f}",
                size(self._rate(tier.saved_bytes - old.saved_bytes)),
                size(self._rate(tier.evicted_bytes - old.evicted_bytes)),
            )
        return table

    def tiers_line(self) -> str:
        """The tiers in one line, for logs and pipes: counts since the start, no rates."""
        return "   ".join(
            f"{label_of(Tier, t.tier)} {percent(used_bytes(t), t.budget_bytes)}"
            f" full, {t.hits:,} hits, {t.evictions:,} evicted"
            for t in self._now.tiers
        )

    def _namespaces_table(self, between: pb.StatsResponse) -> Table:
        """The labels with the most look-ups between the samples."""
        table = make_table(
            "namespace|>tokens hit|>look-ups/s|>hit tokens/s|>restored/s|mostly missed"
        )
        labels = [label for label, _ in busiest(self._now.usage)]
        labels.sort(key=lambda label: -between.usage[label].lookups)
        for label in labels[:NAMESPACES]:
            usage = between.usage[label]
            table.add_row(
                label,
                percent(hit_tokens(usage), usage.lookup_tokens),
                f"{self._rate(usage.lookups):,.0f}",
                f"{self._rate(hit_tokens(usage)):,.0f}",
                size(self._rate(_restored_bytes(usage))),
                missed_words(usage, most=1),
            )
        return table

    def _stages_table(self, stages: Iterable[pb.StageTimes]) -> Table:
        """How long the stages took, the slowest first."""
        table = make_table("slowest stages|>half within|>99 of 100 within|>per second")
        timed = [stage for stage in stages if sum(stage.times)]
        for stage in sorted(timed, key=lambda stage: -quantile_ns(stage, 0.99)):
            table.add_row(
                stage.stage,
                _within(stage, 0.5),
                _within(stage, 0.99),
                f"{self._rate(sum(stage.times)):,.0f}",
            )
        if not timed:
            table.add_row("nothing was timed", "", "", "")
        return table


def quantile_ns(stage: pb.StageTimes, part: float) -> float:
    """The upper bound of the bucket with this quantile of the times. The last bucket has none, so
    it is infinite."""
    rank, seen = part * sum(stage.times), 0
    for count, bound_ns in zip(stage.times, (*stage.bounds_ns, float("inf")), strict=True):
        seen += count
        if seen >= rank:
            return bound_ns
    return 0.0


def _within(stage: pb.StageTimes, part: float) -> str:
    bound_ns = quantile_ns(stage, part)
    if bound_ns == float("inf"):
        return f"> {format_duration(stage.bounds_ns[-1])}"
    return f"{bound_ns / 1_000:.0f}us" if bound_ns < 1_000_000 else format_duration(int(bound_ns))


def _restored_bytes(usage: pb.Usage) -> int:
    return sum(sum(tier.restored_bytes.values()) for tier in usage.tiers)
