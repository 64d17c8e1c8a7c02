"""What `prefixctl top` shows: a daemon between two looks at it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.units import format_duration
from . import render, stats_view
from .messages import tier_label

if TYPE_CHECKING:
    from .connection import AdminConnection

NAMESPACES: Final = 8
#: Claims that are shown.
OLDEST_CLAIMS: Final = 5


class Rates(NamedTuple):
    """What a daemon did between two looks: of its clients' look-ups, and in bytes a second."""

    hit_tokens: int
    lookup_tokens: int
    lookups_per_s: float
    restored_per_s: float
    saved_per_s: float
    evicted_per_s: float
    #: brought from other nodes
    fetched_per_s: float


class Board:
    """One daemon between the last two samples that it was given."""

    def __init__(self, address: str) -> None:
        self.note = ""
        self._address = address
        self._now = self._before = pb.StatsResponse()
        self._claims: Sequence[pb.ClaimDetail] = ()
        self._at_s = 0.0
        self._seconds = 0.0

    def take(self, stats: pb.StatsResponse, oldest: Sequence[pb.ClaimDetail], at_s: float) -> None:
        """A new sample, taken at `at_s` (monotonic). `oldest`: claims, the oldest first."""
        same = self._now.incarnation == stats.incarnation
        # Of a daemon that was restarted nothing before is comparable.
        self._before = self._now if same else stats
        self._seconds = at_s - self._at_s if same else 0.0
        self._now, self._claims, self._at_s = stats, oldest, at_s

    def between(self) -> pb.StatsResponse:
        """What clients did and how long stages took between the samples; the rest is as it is."""
        found = pb.StatsResponse()
        found.CopyFrom(self._now)
        for label, usage in found.usage.items():
            if label in self._before.usage:
                stats_view.count_usage(usage, self._before.usage[label], -1)
        before = {stage.stage: stage for stage in self._before.stages}
        for stage in found.stages:
            if stage.stage in before:
                old = before[stage.stage].times
                stage.times[:] = [max(0, n - o) for n, o in zip(stage.times, old, strict=True)]
        return found

    def rates(self) -> Rates:
        """Between the two samples."""
        usage = stats_view.total_usage(self.between().usage.values())
        before = {tier.tier: tier for tier in self._before.tiers}
        pairs = [(tier, before.get(tier.tier, tier)) for tier in self._now.tiers]
        fetched = [stats.shared.get("fetched_bytes", 0) for stats in (self._now, self._before)]
        return Rates(
            stats_view.hit_tokens(usage),
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
        lines: list[RenderableType] = [stats_view.headline(now, self._address)]
        lines += [Text(f"{part}: {what}", "yellow") for part, what in sorted(now.notices.items())]
        lines.append(self._hits_line(between))
        lines.append(self.tiers_table())
        if stats_view.busiest(now.usage):
            lines.append(self._namespaces_table(between))
        if now.shared:
            lines.append(self._shared_line())
        if any(node.state != "serving" for node in now.shared_nodes):
            lines.append(stats_view.shared_nodes_table(now.shared_nodes))
        lines.append(self._stages_table(between.stages))
        lines.append(
            Text(
                f"sessions {now.sessions:,}   claims {now.claims:,}   "
                f"reservations {now.reservations:,}   waiters {now.waiters:,}"
            )
        )
        if self._claims:
            lines.append(Text("oldest claims", "bold"))
            lines.append(render.claims_table(self._claims))
        if self.note:
            lines.append(Text(self.note, "bold red"))
        return Group(*lines)

    def _hits_line(self, between: pb.StatsResponse) -> Text:
        """The ratio of now, and since the start."""
        recent = stats_view.total_usage(between.usage.values())
        ever = stats_view.total_usage(self._now.usage.values())
        line = Text("hit ratio  ", style="bold")
        now = render.percent(stats_view.hit_tokens(recent), recent.lookup_tokens)
        since = render.percent(stats_view.hit_tokens(ever), ever.lookup_tokens)
        line.append(now, style="bold green")
        line.append(f" of tokens now, {since} since the start", style="not bold")
        rates = (
            f"\n           {self._rate(recent.lookups):,.0f} look-ups/s"
            f"   {render.size(self._rate(_restored_bytes(recent)))}/s restored"
        )
        return line.append(rates, style="not bold")

    def _shared_line(self) -> Text:
        """What comes from other nodes and goes to them."""
        now, before = self._now.shared, self._before.shared

        def rate(name: str) -> float:
            return self._rate(max(0, now[name] - before.get(name, 0)))

        serving, nodes = now["nodes_serving"], now["nodes"]
        return Text.assemble(
            ("shared     ", "bold"),
            f"{render.size(rate('fetched_bytes'))}/s brought   "
            f"{render.size(rate('offered_bytes'))}/s offered   "
            f"{now['waiting_offers']:,} wait   {rate('offers_dropped'):,.0f}/s dropped   "
            f"{rate('unanswered'):,.0f}/s unanswered   {serving:,} of {nodes:,} nodes",
        )

    def tiers_table(self) -> RenderableType:
        """How full the tiers are, and what they do."""
        numbers = ("full", "budget", "entries", "hits/s", "saved/s", "evicted/s")
        table = render.make_table("tier", "", *numbers, right=numbers)
        table.caption = "bright: claimed   plain: cached   white: being saved"
        table.caption_justify = "left"
        before = {tier.tier: tier for tier in self._before.tiers}
        for tier in self._now.tiers:
            old = before.get(tier.tier, tier)
            budget = render.size(tier.budget_bytes)
            table.add_row(
                render.tier_name(tier.tier),
                render.Bar.of_tier(tier),
                render.percent(render.used_bytes(tier), tier.budget_bytes),
                budget if tier.state in ("", "serving") else f"{budget} ({tier.state})",
                f"{tier.entries:,}",
                f"{self._rate(tier.hits - old.hits):,.0f}",
                render.size(self._rate(tier.saved_bytes - old.saved_bytes)),
                render.size(self._rate(tier.evicted_bytes - old.evicted_bytes)),
            )
        return table

    def tiers_line(self) -> str:
        """The tiers in one line, for logs and pipes: counts since the start, no rates."""
        return "   ".join(
            f"{tier_label(t.tier)} {render.percent(render.used_bytes(t), t.budget_bytes)}"
            f" full, {t.hits:,} hits, {t.evictions:,} evicted"
            for t in self._now.tiers
        )

    def _namespaces_table(self, between: pb.StatsResponse) -> RenderableType:
        """The busiest labels."""
        numbers = ("hit ratio", "look-ups/s", "hit tokens/s", "restored/s", "missed")
        table = render.make_table("namespace", *numbers, "mostly", right=numbers)
        counted = [
            (label, between.usage[label]) for label, _ in stats_view.busiest(self._now.usage)
        ]
        counted.sort(key=lambda each: -each[1].lookups)
        for label, usage in counted[:NAMESPACES]:
            missed = sum(usage.misses.values())
            table.add_row(
                label,
                render.percent(stats_view.hit_tokens(usage), usage.lookup_tokens),
                f"{self._rate(usage.lookups):,.0f}",
                f"{self._rate(stats_view.hit_tokens(usage)):,.0f}",
                render.size(self._rate(_restored_bytes(usage))),
                f"{missed:,}",
                max(usage.misses, key=usage.misses.__getitem__) if missed else "",
            )
        return table

    def _stages_table(self, stages: Iterable[pb.StageTimes]) -> RenderableType:
        """What took longest first."""
        numbers = ("half within", "99 of 100 within", "per second")
        table = render.make_table("slowest stages", *numbers, right=numbers)
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
    """The bound of the bucket that this part of the times falls into; infinite above them all."""
    wanted, seen = part * sum(stage.times), 0
    for count, bound_ns in zip(stage.times, (*stage.bounds_ns, float("inf")), strict=True):
        seen += count
        if seen >= wanted:
            return bound_ns
    return 0.0


def _within(stage: pb.StageTimes, part: float) -> str:
    bound_ns = quantile_ns(stage, part)
    if bound_ns == float("inf"):
        return f"> {format_duration(stage.bounds_ns[-1])}"
    return f"{bound_ns / 1_000:.0f}us" if bound_ns < 1_000_000 else format_duration(int(bound_ns))


def _restored_bytes(usage: pb.Usage) -> int:
    return sum(sum(tier.restored_bytes.values()) for tier in usage.tiers)


def look(board: Board, daemon: AdminConnection) -> None:
    """Take a sample for the board."""
    board.take(daemon.stats(), daemon.oldest_claims(OLDEST_CLAIMS), time.monotonic())


def follow(daemon: AdminConnection, console: Console, every_s: float) -> None:
    """Show what a daemon does until interrupted. One that is restarted is found again; raises
    DaemonUnavailable if there is none at first."""
    from ...proto.errors import DaemonUnavailable, DeadlineExceeded

    board = Board(daemon.address)
    look(board, daemon)
    with render.live_view(console, board.__rich__) as refresh:
        while True:
            time.sleep(every_s)
            try:
                look(board, daemon)
                board.note = ""
            except (DaemonUnavailable, DeadlineExceeded):
                board.note = "the daemon does not answer; trying again"
            refresh()
