"""A daemon at a glance: what `stats` shows of it, the tokens first."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto import prefixd_pb2 as pb
from ....proto.vocabulary import Tier, label_of
from ..message_json import label_in
from .tables import NS_PER_MS, TierBar, age, make_table, percent, size, tier_name, used_bytes
from .usage import usage_view


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
