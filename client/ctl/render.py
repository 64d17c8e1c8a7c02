"""What the daemon says, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.units import format_bytes, format_duration
from ...proto.units import percent as share_text
from .fitted_table import FittedTable
from .messages import as_dict, reason_label, tier_label

BAR_MIN_WIDTH: Final = 8
#: Hexadecimal digits of a key that are shown in a table.
KEY_DIGITS: Final = 16
NS_PER_MS: Final = 1_000_000
TIER_STYLES: Final = {"ram": "cyan", "shm": "magenta", "disk": "yellow"}


def percent(part: float, whole: float) -> str:
    """`37.4 %`; nothing of nothing is a dash."""
    return share_text(part / whole if whole else None, 1)


def size(count: float) -> str:
    """Bytes with three digits or so: `31.9MiB`, `880B`, `1.04GiB`."""
    rounded = float(round(count))
    for name in ("B", "KiB", "MiB", "GiB", "TiB"):
        if rounded < 1000:
            return f"{rounded:.3g}{name}"
        rounded /= 1024
    return f"{rounded:.3g}PiB"


def age(duration_ns: int) -> str:
    """A rough duration: `850ms`, `12s`, `3m4s`; what is ahead of our clock is `0s`."""
    if duration_ns < 1_000 * NS_PER_MS:
        return format_duration(max(0, duration_ns // NS_PER_MS) * NS_PER_MS)
    return format_duration(duration_ns // (1_000 * NS_PER_MS) * (1_000 * NS_PER_MS))


def make_table(
    *columns: str, title: str | None = None, right: Iterable[str] = (), name_columns: int = 1
) -> Table:
    """A plain table; `right` names the columns of numbers, a column without a name is for a bar.
    Where it is too narrow for all columns, the table comes in several parts, each of which begins
    with the first `name_columns`: what tells the rows apart."""
    table = FittedTable(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
    )
    table.name_columns = name_columns
    aligned = set(right)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in aligned else "left",
            no_wrap=column in aligned or column in ("key", "tier"),
            min_width=None if column else BAR_MIN_WIDTH,
        )
    return table


class Bar:
    """A budget as a bar: what is pinned, published beside that, reserved, and free."""

    def __init__(
        self,
        budget: int,
        parts: Sequence[tuple[int, str]],
        *,
        max_width: int = 30,
    ) -> None:
        self.budget = budget
        self.parts = parts
        self.max_width = max_width

    @classmethod
    def of_tier(cls, tier: pb.TierStats, max_width: int = 30) -> Bar:
        style = TIER_STYLES.get(tier_label(tier.tier), "white")
        unpinned_bytes = max(0, tier.published_bytes - tier.pinned_bytes)
        parts = [
            (tier.pinned_bytes, f"bold bright_{style}"),
            (unpinned_bytes, style),
            (tier.reserved_bytes, "white"),
        ]
        return cls(tier.budget_bytes, parts, max_width=max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(BAR_MIN_WIDTH, self.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, self.max_width)
        full, empty = ("#", "-") if options.ascii_only else ("━", "─")
        done = cells = 0
        for part, style in self.parts:
            done += part
            # A byte too many must not look like a free cell, nor an empty part like a full one.
            end = min(width, -(-done * width // self.budget)) if self.budget and part else cells
            yield Segment(full * (end - cells), Style.parse(style))
            cells = max(cells, end)
        yield Segment(empty * (width - cells), Style.parse("bright_black"))


def used_bytes(tier: pb.TierStats) -> int:
    """What counts against the budget of a tier."""
    return tier.published_bytes + tier.reserved_bytes


def tier_name(tier: int) -> Text:
    return _name_of(tier_label(tier))


def _name_of(label: str) -> Text:
    return Text(label, style=f"bold {TIER_STYLES.get(label, 'white')}")


def counters_table(counters: Mapping[str, int]) -> Table:
    """Everything that the daemon counts, by its metric name."""
    table = make_table("counter", "value", right=("value",))
    table.caption = "calls to the daemon: what clients look up and read in place is not among them"
    table.caption_justify = "left"
    for name, value in sorted(counters.items()):
        table.add_row(name, f"{value:,}")
    return table


def entries_table(entries: Iterable[pb.EntryDetail], now_unix_ns: int, title: str) -> Table:
    """Entries, one per line, in the order given. Tier comes from each entry itself."""
    numbers = ("tokens", "payload", "stored", "age", "last used", "hits", "pins")
    table = make_table("key", "tier", *numbers, "reason", title=title, right=numbers)
    for entry in entries:
        table.add_row(
            entry.key.hex()[:KEY_DIGITS],
            tier_name(entry.info.tier),
            f"{entry.info.token_count:,}",
            size(entry.info.payload_bytes),
            size(entry.stored_bytes),
            age(now_unix_ns - entry.created_unix_ns),
            age(now_unix_ns - entry.last_used_unix_ns),
            f"{entry.hits:,}",
            Text(f"{entry.pins}", style="bold" if entry.pins else "dim"),
            reason_label(entry.info.reason),
        )
    return table


def entry_view(response: pb.InspectResponse, now_unix_ns: int, *, verify: bool) -> Table:
    """Everything known of one entry."""
    entry = response.entry
    info = entry.info
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    extents = [
        f"{format_bytes(entry.extents[i + 1])} at {entry.extents[i]}"
        for i in range(0, len(entry.extents) - 1, 2)
    ]
    layers = f"{info.layer_count}" if info.layer_count else "no layer table"
    rows: list[tuple[str, RenderableType]] = [
        ("key", entry.key.hex()),
        ("tier", tier_name(info.tier)),
        ("tokens", f"{info.token_count:,}"),
        ("payload", f"{format_bytes(info.payload_bytes)} ({info.payload_bytes:,} B)"),
        ("stored", f"{format_bytes(entry.stored_bytes)} ({entry.stored_bytes:,} B)"),
        ("crc32c", f"{info.payload_crc32c:08x}"),
        ("layers", layers),
        ("token ids", format_bytes(info.token_ids_bytes) if info.token_ids_bytes else "none"),
        ("reason", reason_label(info.reason)),
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
    for name, value in rows:
        table.add_row(name, value)
    return table


def claims_table(claims: Sequence[pb.ClaimDetail]) -> RenderableType:
    if not claims:
        return Text("no claims")
    numbers = ("claim", "entries", "bytes", "age", "lease left")
    table = make_table("claim", "owner", "session", "entries", "bytes", "age", "lease left",
                       right=numbers)  # fmt: skip
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
    if not reservations:
        return Text("no reservations")
    numbers = ("payload", "stored", "age", "time left", "waiters")
    table = make_table("key", "tier", "stage", "owner", "session", *numbers, right=numbers)
    for held in reservations:
        table.add_row(
            held.key.hex()[:KEY_DIGITS],
            tier_name(held.tier),
            held.stage,
            held.owner,
            f"{held.session_id}",
            size(held.payload_bytes),
            size(held.stored_bytes),
            age(held.age_ms * NS_PER_MS),
            age(held.ttl_left_ms * NS_PER_MS),
            f"{held.waiters}",
        )
    return table


def preview_view(preview: pb.PreviewResponse, tier: str, now_unix_ns: int) -> RenderableType:
    """What an admission would do."""
    if preview.admissible:
        verdict = Text("admissible", style="bold green")
    elif preview.retryable:
        verdict = Text("not now, but later", style="bold yellow")
    else:
        verdict = Text("never", style="bold red")
    lines: list[RenderableType] = [
        Text.assemble(tier_name(pb.Tier.Value(f"TIER_{tier.upper()}")), ": ", verdict),
        Text(preview.message),
        Text(
            f"needed {size(preview.needed_bytes)}   free {size(preview.free_bytes)}"
            f"   unpinned {size(preview.unpinned_bytes)}"
            f"   pinned {size(preview.pinned_bytes)}"
            f"   reserved {size(preview.reserved_bytes)}"
        ),
    ]
    if preview.victims:
        title = f"would evict {len(preview.victims):,} entries, {size(preview.evicted_bytes)}"
        lines.append(entries_table(preview.victims, now_unix_ns, title))
    return Group(*[line for line in lines if not (isinstance(line, Text) and not line.plain)])


def evicted_table(rows: Iterable[tuple[str, int, int]], *, dry_run: bool) -> Table:
    """(tier, entries, stored bytes) of an eviction."""
    verb = "would be evicted" if dry_run else "evicted"
    table = make_table("tier", verb, "freed", right=(verb, "freed"))
    for tier, entries, freed_bytes in rows:
        table.add_row(_name_of(tier), f"{entries:,}", size(freed_bytes))
    return table


def resized_view(tier: str, response: pb.ResizeResponse) -> RenderableType:
    """What a resize did, and what is to be known of it."""
    lines = [Text.assemble(_name_of(tier), f" has {size(response.budget_bytes)} now")]
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


def cleared_view(namespace: str, response: pb.ClearResponse) -> RenderableType:
    """What was dropped, and what may be of the same namespace still."""
    freed = size(response.freed_bytes)
    lines = [Text(f"{namespace}: {response.entries:,} entries dropped ({freed})")]
    if response.pinned_entries:
        lines.append(Text(f"{response.pinned_entries:,} stay: they are being read", "yellow"))
    if response.unknown_entries:
        unknown = f"{response.unknown_entries:,} entries came back from an earlier start"
        lines.append(Text(f"{unknown}: whose they are is not known", "yellow"))
    return Group(*lines)


def drained_view(response: pb.DrainResponse, *, stop: bool) -> RenderableType:
    """Whether something is still held."""
    ends = "the daemon ends" if stop else "it stays so until `drain --resume`"
    if response.drained:
        return Text.assemble(("drained", "green"), f": nothing is held any more; {ends}")
    held = (
        f"{response.claims:,} claims, {response.reservations:,} saves under way and "
        f"{response.calls:,} calls that move bytes are left"
    )
    return Text.assemble(("not drained yet", "bold yellow"), f": {held}; {ends}")


def gc_table(response: pb.GcResponse) -> Table:
    table = make_table("reaped", "count", right=("count",))
    for name, count in as_dict(response).items():
        table.add_row(name.replace("_", " "), f"{count:,}")
    return table


def check_view(response: pb.CheckResponse) -> RenderableType:
    """What the recount found."""
    counted = f"{response.entries:,} entries"
    if not response.problems:
        return Text.assemble(("everything adds up", "green"), f": {counted}")
    return _problems(response.problems, response.problem_count, counted)


def verified_so_far(found: pb.VerifyResponse) -> str:
    """How much was read back, and what of it is bad."""
    parts = [f"{found.entries:,} entries ({size(found.payload_bytes)}) verified"]
    if found.damaged_entries:
        parts.append(f"{found.damaged_entries:,} damaged and dropped")
    if found.unreadable_entries:
        parts.append(f"{found.unreadable_entries:,} could not be read")
    return ", ".join(parts)


def verify_view(found: pb.VerifyResponse) -> RenderableType:
    """What reading everything back found."""
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
    """`problems` are the first of `count`."""
    found = Text.assemble((f"{count:,} problems", "bold red"), f" in {counted}:")
    lines = [Text(f"- {problem}") for problem in problems]
    if count > len(lines):
        lines.append(Text(f"... and {count - len(lines):,} more"))
    return Group(found, *lines)


@contextmanager
def live_view(console: Console, view: Callable[[], RenderableType]) -> Iterator[Callable[[], None]]:
    """Redraw `view()` in place with every call of what this gives; into a pipe, print it again."""
    if not console.is_terminal:
        console.print(view())
        yield lambda: console.print(view())
        return
    with Live(view(), console=console, auto_refresh=False) as live:
        yield lambda: live.update(view(), refresh=True)
