"""What the operators' commands show of a daemon: entries, claims, sessions, results of changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ....proto import prefixd_pb2 as pb
from ....proto.units import format_bytes
from ....proto.vocabulary import SaveReason, Tier, label_of
from ..message_json import as_dict, label_in
from .text_tables import KEY_DIGITS, NS_PER_MS, age, make_table, pairs_table, size, tier_name

#: What happened to a key between the daemon and the engine that nodes share, in words.
SHARED_WORDS: Final = {
    "fetched": "brought from another node",
    "not_fetched": "another node's, did not come in time",
    "damaged": "another node's, damaged: dropped there",
    "offered": "offered to other nodes",
    "not_offered": "offered, no answer",
    "refused": "offered, refused",
}


def counters_table(counters: Mapping[str, int]) -> Table:
    """Every counter of the daemon, by its metric name."""
    caption = "calls to the daemon: what clients look up and read in place is not among them"
    table = make_table("counter|>value", caption=caption)
    for name, value in sorted(counters.items()):
        table.add_row(name, f"{value:,}")
    return table


# ---- entries


def entries_table(
    entries: Iterable[pb.EntryDetail], now_unix_ns: int, title: str, *, tiers: bool = False
) -> Table:
    """Entries, one per line, in the order given; `tiers`: each with its tier."""
    table = make_table(
        f"key|{'tier|' * tiers}>tokens|>payload|>stored|>age|>last use|>hits|>pins|reason",
        title=title,
    )
    for entry in entries:
        table.add_row(
            entry.key.hex()[:KEY_DIGITS],
            *([tier_name(entry.info.tier)] if tiers else []),
            f"{entry.info.token_count:,}",
            size(entry.info.payload_bytes),
            size(entry.stored_bytes),
            age(now_unix_ns - entry.created_unix_ns),
            age(now_unix_ns - entry.last_used_unix_ns),
            f"{entry.hits:,}",
            Text(f"{entry.pins}", style="bold" if entry.pins else "dim"),
            label_of(SaveReason, entry.info.reason),
        )
    return table


def entry_view(response: pb.InspectResponse, now_unix_ns: int, *, verify: bool) -> Table:
    """Everything known about one entry."""
    entry = response.entry
    info = entry.info
    extents = [
        f"{format_bytes(entry.extents[i + 1])} at {entry.extents[i]}"
        for i in range(0, len(entry.extents) - 1, 2)
    ]
    rows: list[tuple[str, RenderableType]] = [
        ("key", entry.key.hex()),
        ("tier", tier_name(info.tier)),
        ("tokens", f"{info.token_count:,}"),
        ("payload", f"{format_bytes(info.payload_bytes)} ({info.payload_bytes:,} B)"),
        ("stored", f"{format_bytes(entry.stored_bytes)} ({entry.stored_bytes:,} B)"),
        ("crc32c", f"{info.payload_crc32c:08x}"),
        ("layers", f"{info.layer_count}" if info.layer_count else "no layer table"),
        ("token ids", format_bytes(info.token_ids_bytes) if info.token_ids_bytes else "none"),
        ("reason", label_of(SaveReason, info.reason)),
        ("namespace", entry.namespace or "not known: an earlier start saved it"),
        ("generation", f"{info.generation}"),
        ("created", f"{age(now_unix_ns - entry.created_unix_ns)} ago"),
        ("last used", f"{age(now_unix_ns - entry.last_used_unix_ns)} ago"),
        ("hits", f"{entry.hits:,}"),
        ("pins", f"{entry.pins}"),
        ("extents", ", ".join(extents) or "addressed by key"),
    ]
    if verify:
        good = Text("every byte matches its checksum", style="green")
        bad = Text(response.problem or "could not be read", style="bold red")
        rows.append(("verified", good if response.verified and not response.problem else bad))
    return pairs_table(rows)


def preview_view(preview: pb.PreviewResponse, tier: str, now_unix_ns: int) -> RenderableType:
    """Whether a save would be admitted, and what it would evict."""
    if preview.admissible:
        verdict = Text("admissible", style="bold green")
    elif preview.retryable:
        verdict = Text("not now, but later", style="bold yellow")
    else:
        verdict = Text("never", style="bold red")
    lines: list[RenderableType] = [Text.assemble(tier_name(tier), ": ", verdict)]
    if preview.message:
        lines.append(Text(preview.message))
    lines.append(
        Text(
            f"needed {size(preview.needed_bytes)}   free {size(preview.free_bytes)}"
            f"   unpinned {size(preview.unpinned_bytes)}"
            f"   pinned {size(preview.pinned_bytes)}"
            f"   reserved {size(preview.reserved_bytes)}"
        )
    )
    if preview.victims:
        title = f"would evict {len(preview.victims):,} entries, {size(preview.evicted_bytes)}"
        lines.append(entries_table(preview.victims, now_unix_ns, title))
    return Group(*lines)


def why_view(text: str, response: pb.WhyResponse, now_unix_ns: int) -> RenderableType:
    """Why a key that begins with `text` is there or is not: a sentence, then the events."""
    lines: list[RenderableType] = [Text(_verdict(text, response, now_unix_ns), style="bold")]
    if response.present:
        lines.append(entries_table(response.present, now_unix_ns, "there now", tiers=True))
    if response.events:
        table = make_table("key|tier|>when|what|by|namespace", name_columns=3)
        for event in response.events:
            table.add_row(
                event.key.hex()[:KEY_DIGITS],
                tier_name(event.tier),
                f"{age(now_unix_ns - event.at_unix_ns)} ago",
                _event_words(event),
                f"{event.owner or 'a session that ended'} #{event.session_id}"
                if event.session_id
                else "",
                event.label,
            )
        lines.append(table)
    if response.shared:
        table = make_table("key|>when|what|where")
        for shared in response.shared:
            table.add_row(
                shared.key.hex()[:KEY_DIGITS],
                f"{age(now_unix_ns - shared.at_unix_ns)} ago",
                SHARED_WORDS.get(label_in(shared, "what"), label_in(shared, "what")),
                shared.node,
            )
        lines.append(table)
    since = (
        f"since {age(now_unix_ns - response.remembered_since_unix_ns)} ago"
        if response.remembered_since_unix_ns
        else "nothing happened since the start, or server.journal is 0"
    )
    lines.append(Text(f"remembered: {response.remembered_events:,} events, {since}", style="dim"))
    return Group(*lines)


def _verdict(text: str, response: pb.WhyResponse, now_unix_ns: int) -> str:
    keys = {bytes(event.key) for event in response.events}
    # Events have the first 16 bytes of a key.
    keys |= {bytes(entry.key[:16]) for entry in response.present}
    if len(keys) > 1:
        return f"{len(keys)} keys begin with {text}"
    if response.present:
        entry = response.present[0]
        return (
            f"it is there, in {label_of(Tier, entry.info.tier)}, for "
            f"{age(now_unix_ns - entry.created_unix_ns)}, with {entry.hits:,} hits"
        )
    if not response.events:
        return "it is not there, and nothing is remembered of it: never saved, or too long ago"
    last = response.events[-1]
    return f"it is not there: {_event_words(last)} {age(now_unix_ns - last.at_unix_ns)} ago"


def _event_words(event: pb.KeyEvent) -> str:
    what = label_in(event, "what")
    match what, label_in(event, "cause"):
        case "saved", _:
            return f"saved ({label_of(SaveReason, event.reason)})"
        case "evicted", "save":
            return "evicted for a save"
        case "evicted", "operator":
            return "evicted by an operator"
        case "evicted", "resize":
            return "evicted by a resize"
        case "evicted", "pressure":
            return "evicted because memory was short"
        case "replaced", _:
            return "replaced by a copy that was found"
        case _:
            return what


# ---- clients


def claims_table(claims: Sequence[pb.ClaimDetail]) -> RenderableType:
    """Claims, with their owners and leases."""
    if not claims:
        return Text("no claims")
    table = make_table(">claim|owner|session|>entries|>bytes|>age|>lease left")
    for claim in claims:
        table.add_row(
            f"{claim.claim_id}",
            claim.owner,
            f"{claim.session_id}",
            f"{claim.entries:,}",
            size(claim.payload_bytes),
            age(claim.age_ms * NS_PER_MS),
            age(claim.lease_left_ms * NS_PER_MS),
        )
    return table


def reservations_table(reservations: Sequence[pb.ReservationDetail]) -> RenderableType:
    """Saves that are not published yet."""
    if not reservations:
        return Text("no reservations")
    table = make_table("key|tier|stage|owner|session|>payload|>stored|>age|>time left|>waiters")
    for held in reservations:
        table.add_row(
            held.key.hex()[:KEY_DIGITS],
            tier_name(held.tier),
            label_in(held, "stage"),
            held.owner,
            f"{held.session_id}",
            size(held.payload_bytes),
            size(held.stored_bytes),
            age(held.age_ms * NS_PER_MS),
            age(held.ttl_left_ms * NS_PER_MS),
            f"{held.waiters}",
        )
    return table


class SessionRates(NamedTuple):
    """What a session does in a second. The fields have the names of `pb.SessionDetail`."""

    lookups: float
    hits: float
    restores: float
    restored_bytes: float
    saves: float
    saved_bytes: float


def session_rates(
    now: Sequence[pb.SessionDetail], before: Sequence[pb.SessionDetail], between_s: float
) -> list[SessionRates]:
    """The rates of each session of `now` since the sample `before`, taken `between_s` earlier.

    The rates of a session that is not in `before` are averages since it was opened.
    """
    known = {session.session_id: session for session in before}
    found = []
    for session in now:
        old, seconds = known.get(session.session_id), between_s
        # A restarted daemon gives out the same session ids again.
        if old is None or old.age_ms > session.age_ms:
            old, seconds = pb.SessionDetail(), session.age_ms / 1_000
        found.append(
            SessionRates(
                *(
                    (getattr(session, name) - getattr(old, name)) / seconds if seconds else 0.0
                    for name in SessionRates._fields
                )
            )
        )
    return found


def sessions_table(
    sessions: Sequence[pb.SessionDetail], rates: Sequence[SessionRates], between_s: float
) -> RenderableType:
    """Sessions with their rates over the last `between_s`, or since they were opened if it is 0."""
    if not sessions:
        return Text("no sessions")
    over = f"over the last {between_s:.3g} s" if between_s else "since the session was opened"
    caption = f"rates {over}; clients report with their heartbeats"
    table = make_table(
        "session|owner|version|namespace|>age|>last heartbeat|>claims|>reservations|"
        ">look-ups/s|>hits/s|>restores/s|>restored/s|>restored|>saves/s|>saved/s|>saved",
        caption=caption,
    )
    for session, rate in zip(sessions, rates, strict=True):
        table.add_row(
            f"{session.session_id}",
            session.owner,
            session.client_version,
            session.label,
            age(session.age_ms * NS_PER_MS),
            f"{age(session.heartbeat_age_ms * NS_PER_MS)} ago",
            f"{session.claims:,}",
            f"{session.reservations:,}",
            _per_second(rate.lookups),
            _per_second(rate.hits),
            _per_second(rate.restores),
            size(rate.restored_bytes),
            size(session.restored_bytes),
            _per_second(rate.saves),
            size(rate.saved_bytes),
            size(session.saved_bytes),
        )
    return table


def _per_second(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


# ---- results


def evicted_table(rows: Iterable[tuple[str, int, int]], *, dry_run: bool) -> Table:
    """(tier, entries, stored bytes) of an eviction."""
    verb = "would be evicted" if dry_run else "evicted"
    table = make_table(f"tier|>{verb}|>freed")
    for tier, entries, freed_bytes in rows:
        table.add_row(tier_name(tier), f"{entries:,}", size(freed_bytes))
    return table


def resized_view(tier: str, response: pb.ResizeResponse) -> RenderableType:
    """The new budget of a tier, what was evicted for it, and what is still to come."""
    lines = [Text.assemble(tier_name(tier), f" has {size(response.budget_bytes)} now")]
    if response.entries:
        lines.append(Text(f"{response.entries:,} entries left ({size(response.freed_bytes)})"))
    if response.secured_bytes < response.budget_bytes:
        there = size(response.secured_bytes)
        lines.append(Text(f"{there} of it are there; the rest comes in the background"))
    if response.kept_bytes:
        kept = size(response.kept_bytes)
        lines.append(Text(f"{kept} stay with the daemon until it is started again", "yellow"))
    lines.append(
        Text(f"until the next start: {tier}.budget in the configuration holds then", "dim")
    )
    return Group(*lines)


def cleared_view(
    namespace: str, response: pb.ClearResponse, *, dry_run: bool = False
) -> RenderableType:
    """What was dropped, and which entries of the namespace may be left."""
    freed = size(response.freed_bytes)
    done = "would be dropped" if dry_run else "dropped"
    lines = [Text(f"{namespace}: {response.entries:,} entries {done} ({freed})")]
    if response.pinned_entries:
        lines.append(Text(f"{response.pinned_entries:,} stay: they are being read", "yellow"))
    if response.erasing:
        lines.append(Text("not all is erased yet: a device or the engine is behind", "yellow"))
    if response.unknown_entries:
        unknown = f"{response.unknown_entries:,} entries came back from an earlier start"
        lines.append(Text(f"{unknown}: whose they are is not known", "yellow"))
    return Group(*lines)


def drained_view(response: pb.DrainResponse, *, stop: bool) -> RenderableType:
    """Whether the daemon is drained, or what it still holds."""
    ends = "the daemon ends" if stop else "it stays so until `drain --resume`"
    if response.drained:
        return Text.assemble(("drained", "green"), f": nothing is held any more; {ends}")
    held = (
        f"{response.claims:,} claims, {response.reservations:,} saves under way and "
        f"{response.calls:,} calls that move bytes are left"
    )
    return Text.assemble(("not drained yet", "bold yellow"), f": {held}; {ends}")


def gc_table(response: pb.GcResponse) -> Table:
    """What was released and dropped."""
    table = make_table("reaped|>count")
    for name, count in as_dict(response).items():
        table.add_row(name.replace("_", " "), f"{count:,}")
    return table


def check_view(response: pb.CheckResponse) -> RenderableType:
    """What `check` found."""
    counted = f"{response.entries:,} entries"
    if not response.problems:
        return Text.assemble(("everything adds up", "green"), f": {counted}")
    return _problems(response.problems, response.problem_count, counted)


def verified_so_far(found: pb.VerifyResponse) -> str:
    """How much was read back so far, and how much of it is bad."""
    parts = [f"{found.entries:,} entries ({size(found.payload_bytes)}) verified"]
    if found.damaged_entries:
        parts.append(f"{found.damaged_entries:,} damaged and dropped")
    if found.unreadable_entries:
        parts.append(f"{found.unreadable_entries:,} could not be read")
    return ", ".join(parts)


def verify_view(found: pb.VerifyResponse) -> RenderableType:
    """What `verify` found."""
    counted = verified_so_far(found)
    if not found.done:
        counted = f"stopped at {found.progress_permille / 1000:.0%}: {counted}"
    if found.problems:
        count = found.damaged_entries + found.unreadable_entries
        return _problems(found.problems, count, counted)
    if not found.done:
        return Text(counted)
    return Text.assemble(("every byte is right", "green"), f": {counted}")


def _problems(problems: Sequence[str], count: int, counted: str) -> RenderableType:
    """The first of `count` problems."""
    found = Text.assemble((f"{count:,} problems", "bold red"), f" in {counted}:")
    lines = [Text(f"- {problem}") for problem in problems]
    if count > len(lines):
        lines.append(Text(f"... and {count - len(lines):,} more"))
    return Group(found, *lines)


def changed_table(changed: Iterable[pb.ChangedOption], live: str) -> RenderableType:
    """Options that differ. `live` is what the last column says of those that need no restart."""
    table = make_table("option|running|configured|")
    for each in changed:
        table.add_row(
            each.option, each.running, each.configured, live if each.live else "needs a restart"
        )
    return table
