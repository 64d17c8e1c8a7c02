"""A daemon at a glance: what `stats` shows of it. Tokens that hit, and that missed by reason, come
first: clients report them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto import prefixd_pb2 as pb
from ....proto.vocabulary import Tier, label_of, missed_because
from ..message_json import label_in
from .text_tables import NS_PER_MS, TierBar, age, make_table, percent, size, tier_name, used_bytes

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
    """Health, tokens hit and missed, budgets, what the tiers did, who is connected."""
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
        serving = node.state == pb.SHARED_NODE_STATE_SERVING
        table.add_row(
            node.name,
            Text(label_in(node, "state"), "green" if serving else "yellow"),
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
        if t.state > pb.TIER_STATE_SERVING:
            budget += f" ({label_in(t, 'state')})"
        table.add_row(
            tier_name(t.tier),
            label_in(t, "policy"),
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
    table = make_table(f"{label_of(Tier, tier.tier)} of|>share|>used|>pinned|>entries")
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
        label = label_of(Tier, t.tier)
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
    if scrub.progress_permille < 1_000:
        line.append(f", current pass at {scrub.progress_permille / 1000:.0%}")
    if scrub.unreadable_entries:
        line.append(f", {scrub.unreadable_entries:,} entries could not be read", style="bold red")
    return line


# ---- what clients report of themselves


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
    _count(total, usage, sign, numbers, ("misses", "failures", "missed_tokens"))
    if usage.restore_times:
        times = total.restore_times or [0] * len(usage.restore_times)
        pairs = zip(times, usage.restore_times, strict=True)
        total.restore_times[:] = [max(0, count + sign * more) for count, more in pairs]
    missed = {(each.reason, each.tier, each.cause): each for each in total.missed}
    for each in usage.missed:
        why = each.reason, each.tier, each.cause
        so_far = missed.get(why) or total.missed.add(
            reason=each.reason, tier=each.tier, cause=each.cause
        )
        _count(so_far, each, sign, ("tokens", "lookups"), ())
    tiers = {tier.tier: tier for tier in total.tiers}
    tier_numbers = ("hit_entries", "hit_tokens")
    for more in usage.tiers:
        tier = tiers.get(more.tier) or total.tiers.add(tier=more.tier)
        _count(tier, more, sign, tier_numbers, ("restored_bytes",))


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


def missed_tokens(usage: pb.Usage) -> Counter[str]:
    """Missed tokens by reason, in words."""
    counted: Counter[str] = Counter()
    for each in usage.missed:
        if each.tokens:
            counted[_words(each)] += each.tokens
    return counted


def _words(missed: pb.Missed) -> str:
    return missed_because(label_in(missed, "reason"), missed.tier, label_in(missed, "cause"))


def missed_words(usage: pb.Usage, most: int = 0) -> str:
    """`78.0 % evicted from ram, 13.0 % never saved`, of all tokens; empty if none were missed.
    `most`: how many reasons; 0: all."""
    parts = missed_tokens(usage).most_common(most or None)
    return ", ".join(f"{percent(count, usage.lookup_tokens)} {why}" for why, count in parts)


def tokens_line(usage: pb.Usage) -> Text:
    """The share of tokens that hit, and that was missed. Without known tokens there is no ratio."""
    line = Text("tokens     ", style="bold")
    if not usage.lookups:
        return line.append("no look-ups", style="dim")
    if not usage.lookup_tokens:
        return line.append("no look-up said how many tokens it was for", style="dim")
    missed = usage.lookup_tokens - hit_tokens(usage)
    line.append(percent(hit_tokens(usage), usage.lookup_tokens), style="bold green")
    line.append(" hit, ", style="not bold")
    line.append(percent(missed, usage.lookup_tokens), style="bold")
    return line.append(f" missed of {usage.lookup_tokens:,} looked up", style="not bold")


def usage_view(stats: pb.StatsResponse) -> list[RenderableType]:
    """What the clients report: tokens hit and missed, and why."""
    total = total_usage(stats.usage.values())
    if not total.lookups:
        return [Text("no look-ups were reported yet", style="dim")]
    lines: list[RenderableType] = [tokens_line(total)]
    if missed_tokens(total):
        lines.append(missed_table(total))
    lines.append(_lookups_line(total))
    paths: Counter[str] = Counter()
    for tier in total.tiers:
        paths.update(tier.restored_bytes)
    if paths:
        ways = ", ".join(f"{size(paths[path])} by {path}" for path in sorted(paths))
        lines.append(Text(f"restored   {total.restored_tokens:,} tokens: {ways}"))
    if len(busiest(stats.usage)) > 1:
        lines.append(labels_table(stats))
    if total.failures:
        lines.append(failures_table(total.failures))
    return lines


def _lookups_line(usage: pb.Usage) -> Text:
    """How many look-ups found nothing at all, and why: also of those that know no tokens."""
    missed = usage.lookups - usage.hits
    why: Counter[str] = Counter()
    for each in usage.missed:
        if each.lookups:
            why[_words(each)] += each.lookups
    parts = ", ".join(f"{count:,} {words}" for words, count in why.most_common())
    line = f"look-ups   {usage.lookups:,}, of which {missed:,} found nothing"
    return Text(f"{line}: {parts}" if parts else line)


def missed_table(usage: pb.Usage) -> Table:
    """Missed tokens by what became of the first missing key."""
    table = make_table("missed tokens|>count|>of all tokens")
    for words, count in missed_tokens(usage).most_common():
        table.add_row(words, f"{count:,}", percent(count, usage.lookup_tokens))
    return table


def labels_table(stats: pb.StatsResponse) -> Table:
    """The labels, those with the most look-ups first."""
    table = make_table("namespace|>tokens hit|>look-ups|>hit tokens|mostly missed")
    for label, usage in busiest(stats.usage):
        table.add_row(
            label,
            percent(hit_tokens(usage), usage.lookup_tokens),
            f"{usage.lookups:,}",
            f"{hit_tokens(usage):,}",
            missed_words(usage, most=1),
        )
    return table


def failures_table(failures: Mapping[str, int]) -> Table:
    """Why hits could not be read."""
    table = make_table("read in vain|>count|")
    for reason, count in Counter(failures).most_common():
        table.add_row(reason, f"{count:,}", Text(MISS_WORDS.get(reason, ""), style="dim"))
    return table
