"""A daemon at a glance: what `stats` shows of it, the hit ratio first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto import prefixd_pb2 as pb
from ..message_json import tier_label
from .tables import NS_PER_MS, TierBar, age, make_table, percent, size, tier_name, used_bytes

#: What each reason of a miss means, for people.
MISS_WORDS: Final = {
    "absent": "never saved, or evicted",
    "in_flight": "being saved at that moment",
    "unavailable": "no daemon answered",
    "deadline": "took too long",
    "dropped": "too many calls waited",
    "slow": "computing is faster",
    "refused": "the daemon refused",
    "unexpected": "a bug, or another version",
    "lost": "evicted or lost while read",
    "corrupt": "other bytes than saved",
    "unreadable": "the store could not read it",
    "wrong_size": "of another layout",
}


def stats_view(stats: pb.StatsResponse, address: str) -> RenderableType:
    """Health, hit ratio, budgets, what the tiers did, who is connected."""
    lines: list[RenderableType] = [headline(stats, address)]
    lines += notice_lines(stats)
    lines += usage_view(stats)
    lines.append(budget_table(stats))
    lines += [namespaces_table(t) for t in stats.tiers if t.namespaces]
    if any(t.saves or t.hits or t.recovered_entries for t in stats.tiers):
        lines.append(activity_table(stats))
    if stats.shared:
        lines.append(shared_line(stats))
    if stats.shared_nodes:
        lines.append(shared_nodes_table(stats.shared_nodes))
    oldest = f" (oldest {age(stats.oldest_claim_ms * NS_PER_MS)})" if stats.claims else ""
    lines.append(held_line(stats, oldest))
    return Group(*lines)


def held_line(stats: pb.StatsResponse, oldest: str = "") -> Text:
    """How many sessions there are, and what they hold."""
    return Text(
        f"sessions {stats.sessions:,}   claims {stats.claims:,}{oldest}   "
        f"reservations {stats.reservations:,}   waiters {stats.waiters:,}"
    )


def notice_lines(stats: pb.StatsResponse, before: str = "") -> list[Text]:
    """What operators should know about parts of the daemon. `before` begins each line."""
    notices = sorted(stats.notices.items())
    return [Text(f"{before}{part}: {notice}", "yellow") for part, notice in notices]


def shared_line(stats: pb.StatsResponse) -> Text:
    """What was fetched from other nodes and offered to them."""
    s = stats.shared
    line = (
        f"shared: {s['fetched_entries']:,} entries ({size(s['fetched_bytes'])}) brought, "
        f"{s['offered_entries']:,} ({size(s['offered_bytes'])}) offered, "
        f"{s['waiting_offers']:,} wait"
    )
    problems = {
        "did not come": s["unavailable"],
        "damaged": s["damaged"],
        "refused": s["refused"],
        "dropped": s["offers_dropped"],
        "requests without an answer": s["unanswered"],
        "deleted but still there": s["waiting_withdrawals"],
    }
    counts = [f"{count:,} {what}" for what, count in problems.items() if count]
    return Text("; ".join([line, *counts]))


def shared_nodes_table(nodes: Iterable[pb.SharedNode]) -> Table:
    """The shared engine's nodes, as the daemon sees them."""
    table = make_table("engine|state|>requests|>unanswered|>refused|why")
    for node in nodes:
        table.add_row(
            node.name,
            Text(node.state, "green" if node.state == "serving" else "yellow"),
            f"{node.requests:,}",
            f"{node.unanswered:,}",
            f"{node.refused:,}",
            node.why,
        )
    return table


def health_text(stats: pb.StatsResponse) -> Text:
    """`serving` in green, or the part that is unhealthy in red."""
    return Text(stats.health or "unknown", "green" if stats.health == "serving" else "bold red")


def headline(stats: pb.StatsResponse, address: str) -> Text:
    """Version, health, uptime, process and address of the daemon."""
    return Text.assemble(
        (f"prefixd {stats.daemon_version}", "bold"),
        f", {stats.kernel.partition(' ')[0]}" if stats.kernel else "",
        "  ",
        health_text(stats),
        f"  up {age(stats.uptime_ms * NS_PER_MS)}  pid {stats.pid}  {address}",
    )


def budget_table(stats: pb.StatsResponse) -> Table:
    """How full the tiers are."""
    table = make_table("tier|policy||>full|>used|>budget|>pinned|>reserved|>entries")
    for t in stats.tiers:
        cap = f" of {t.max_entries:,}" if t.max_entries else ""
        budget = size(t.budget_bytes)
        if t.secured_bytes < t.budget_bytes:
            budget += f" ({size(t.secured_bytes)} secured)"
        if t.kept_bytes:
            budget += f" (+{size(t.kept_bytes)} kept)"
        if t.state not in ("", "serving"):
            budget += f" ({t.state})"
        table.add_row(
            tier_name(t.tier),
            t.policy,
            TierBar(t),
            percent(used_bytes(t), t.budget_bytes),
            size(used_bytes(t)),
            budget,
            size(t.pinned_bytes),
            size(t.reserved_bytes),
            f"{t.entries:,}{cap}",
        )
    return table


def namespaces_table(tier: pb.TierStats) -> Table:
    """What each namespace takes of a tier, and the share that it may take."""
    table = make_table(f"{tier_label(tier.tier)} of|>share|>used|>pinned|>entries")
    for each in tier.namespaces:
        table.add_row(
            each.namespace or Text("(no share)", style="dim"),
            size(each.share_bytes),
            size(each.used_bytes),
            size(each.fixed_bytes),
            f"{each.entries:,}",
        )
    return table


def activity_table(stats: pb.StatsResponse) -> RenderableType:
    """What the tiers did since the daemon started, then recoveries, damage and scrubbing."""
    table = make_table("tier|>hits|>hit tokens|>read by rpc|>saves|>saved|>evictions|>evicted")
    notes: list[RenderableType] = []
    for t in stats.tiers:
        table.add_row(
            tier_name(t.tier),
            f"{t.hits:,}",
            f"{t.hit_tokens:,}",
            size(t.read_bytes),
            f"{t.saves:,}",
            size(t.saved_bytes),
            f"{t.evictions:,}",
            size(t.evicted_bytes),
        )
        label = tier_label(t.tier)
        if t.recovered_entries or t.dropped_at_start:
            notes.append(
                Text(
                    f"{label}: recovered {t.recovered_entries:,} entries "
                    f"({size(t.recovered_bytes)}) at the start, dropped {t.dropped_at_start:,}"
                )
            )
        if t.corrupt:
            notes.append(
                Text(f"{label}: {t.corrupt:,} entries were damaged and dropped", style="bold red")
            )
        if t.HasField("scrub") and (t.entries or t.scrub.entries):
            notes.append(_scrub_line(label, t.scrub))
    return Group(table, *notes)


def _scrub_line(label: str, scrub: pb.ScrubStats) -> Text:
    passes = "1 pass" if scrub.passes == 1 else f"{scrub.passes:,} passes"
    line = Text(f"{label}: scrubber read {size(scrub.payload_bytes)}, {passes} complete")
    line.append(f", current pass at {scrub.progress_permille / 1000:.0%}")
    if scrub.unreadable_entries:
        line.append(f", {scrub.unreadable_entries:,} entries could not be read", style="bold red")
    return line


def total_usage(usages: Iterable[pb.Usage]) -> pb.Usage:
    """The sum of the usage of several labels. How saves ended is not summed up."""
    total = pb.Usage()
    for usage in usages:
        count_usage(total, usage)
    total.tiers.sort(key=attrgetter("tier"))
    return total


def count_usage(total: pb.Usage, usage: pb.Usage, sign: int = 1) -> None:
    """Add `usage` to `total`. With `sign` -1, subtract it; no count goes below 0."""
    numbers = ("lookups", "hits", "lookup_tokens", "restored_tokens", "restore_ns")
    _count(total, usage, sign, numbers, ("misses", "failures", "absent_because"))
    if usage.restore_times:
        so_far = total.restore_times or [0] * len(usage.restore_times)
        pairs = zip(so_far, usage.restore_times, strict=True)
        total.restore_times[:] = [max(0, count + sign * more) for count, more in pairs]
    tiers = {tier.tier: tier for tier in total.tiers}
    tier_numbers = ("hit_entries", "hit_tokens")
    for more in usage.tiers:
        tier = tiers.get(more.tier) or total.tiers.add(tier=more.tier)
        _count(tier, more, sign, tier_numbers, ("restored_bytes", "absent_because"))


def _count(total: Any, usage: Any, sign: int, numbers: Sequence[str], maps: Sequence[str]) -> None:
    for name in numbers:
        setattr(total, name, max(0, getattr(total, name) + sign * getattr(usage, name)))
    for name in maps:
        counts = getattr(total, name)
        for key, count in getattr(usage, name).items():
            counts[key] = max(0, counts[key] + sign * count)


def busiest(usages: Mapping[str, pb.Usage]) -> list[tuple[str, pb.Usage]]:
    """The labels with look-ups, those with the most first. Labels without any exist too: the daemon
    lists every namespace of a token from its start."""
    counted = [(label, usage) for label, usage in usages.items() if usage.lookups]
    return sorted(counted, key=lambda each: -each[1].lookups)


def hit_tokens(usage: pb.Usage) -> int:
    """The tokens that all tiers hit."""
    return sum(tier.hit_tokens for tier in usage.tiers)


def ratio_line(usage: pb.Usage) -> Text:
    """The share of tokens and of look-ups that hit."""
    line = Text("hit ratio  ", style="bold")
    if usage.lookup_tokens:
        line.append(percent(hit_tokens(usage), usage.lookup_tokens), style="bold green")
        line.append(f" of {usage.lookup_tokens:,} tokens, ", style="not bold")
    line.append(percent(usage.hits, usage.lookups), style="bold green")
    line.append(f" of {usage.lookups:,} look-ups", style="not bold")
    return line


def usage_view(stats: pb.StatsResponse) -> list[RenderableType]:
    """What the clients report: the hit ratio, and the reasons of misses."""
    total = total_usage(stats.usage.values())
    if not total.lookups:
        return [Text("no look-ups were reported yet", style="dim")]
    lines: list[RenderableType] = [ratio_line(total)]
    paths: Counter[str] = Counter()
    for tier in total.tiers:
        paths.update(tier.restored_bytes)
    if paths:
        ways = ", ".join(f"{size(paths[path])} by {path}" for path in sorted(paths))
        lines.append(Text(f"restored   {total.restored_tokens:,} tokens: {ways}"))
    if len(busiest(stats.usage)) > 1:
        lines.append(_labels_table(stats))
    if total.misses:
        lines.append(reasons_table("missed because", total.misses, total.lookups, "of look-ups"))
    if total.absent_because:
        lines.append(_because_line(total))
    if total.failures:
        lines.append(reasons_table("read in vain", total.failures, 0, ""))
    return lines


def _because_line(usage: pb.Usage) -> Text:
    """What became of the absent entries, and which tier they left. Only some misses are reported
    with their keys."""
    known = Counter(usage.absent_because)
    del known["not_told"]
    named = known.total()
    parts = [
        f"{because.replace('_', ' ')} {percent(count, named)}{_left_tiers(usage, because, named)}"
        for because, count in known.most_common()
    ]
    return Text(f"absent     {', '.join(parts)} (of {named:,} whose keys are known)")


def _left_tiers(usage: pb.Usage, because: str, named: int) -> str:
    """` (ram 30.0 %, disk 10.0 %)`, or an empty text if no tier is known."""
    parts = [
        f"{tier_label(tier.tier)} {percent(tier.absent_because[because], named)}"
        for tier in usage.tiers
        if because in tier.absent_because
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _labels_table(stats: pb.StatsResponse) -> Table:
    table = make_table("namespace|>by tokens|>by look-ups|>look-ups|>hit tokens")
    for label, usage in busiest(stats.usage):
        table.add_row(
            label,
            percent(hit_tokens(usage), usage.lookup_tokens),
            percent(usage.hits, usage.lookups),
            f"{usage.lookups:,}",
            f"{hit_tokens(usage):,}",
        )
    return table


def reasons_table(title: str, counts: Mapping[str, int], whole: int, of_what: str) -> Table:
    """Counts by reason. Each is shown as a share of `whole`, too, unless that is 0."""
    table = make_table(f"{title}|>count|>{of_what}|" if whole else f"{title}|>count|")
    for reason, count in Counter(counts).most_common():
        share = [percent(count, whole)] if whole else []
        table.add_row(reason, f"{count:,}", *share, Text(MISS_WORDS.get(reason, ""), style="dim"))
    return table
