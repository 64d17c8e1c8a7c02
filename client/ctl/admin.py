"""The operators' commands: what the daemon holds, who uses it, and making room."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.vocabulary import Tier
from .command import Ctl, ExitCode, command, fail, make_console, print_json
from .options import (
    DEFAULT_TIMEOUT_S,
    LONG_TIMEOUT_S,
    TierOption,
    TiersOption,
    chosen,
    parse_seconds,
    parse_size,
)

if TYPE_CHECKING:
    from ...proto import prefixd_pb2 as pb
    from .connection import AdminConnection

LOOK = "Look"
CHANGE = "Change"


def register(app: typer.Typer) -> None:
    """Add the operators' commands."""
    for name, function, panel in (
        ("stats", stats, LOOK),
        ("ls", ls, LOOK),
        ("inspect", inspect, LOOK),
        ("claims", claims, LOOK),
        ("reservations", reservations, LOOK),
        ("sessions", sessions, LOOK),
        ("preview", preview, LOOK),
        ("check", check, LOOK),
        ("verify", verify, LOOK),
        ("health", health, LOOK),
        ("evict", evict, CHANGE),
        ("gc", gc, CHANGE),
    ):
        command(app, name, panel=panel)(function)


def stats(
    ctl: Ctl,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch", metavar="TIME", parser=parse_seconds, help="As `top --every TIME`."
        ),
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Show everything that is counted, too.")
    ] = False,
) -> None:
    """Show budgets, hits, saves and evictions of the tiers."""
    from . import fleet, messages, render, stats_view

    if ctl.targets:
        if watch is not None or counters:
            raise typer.BadParameter("--watch and --counters are of one daemon: use --address")
        fleet.stats(ctl)
        return
    with ctl.connect() as daemon:
        if watch is not None:
            _watch(ctl, daemon, watch)
            return
        response = daemon.stats()
        if ctl.as_json:
            print_json(messages.as_dict(response))
            return
        console = make_console()
        console.print(stats_view.stats_view(response, daemon.address))
        if counters:
            console.print(render.counters_table(response.counters))


def _watch(ctl: Ctl, daemon: AdminConnection, interval_s: float) -> None:
    from . import messages
    from .top_board import follow

    try:
        if ctl.as_json:
            while True:
                print_json(messages.as_dict(daemon.stats()), indent=None)
                time.sleep(interval_s)
        follow(daemon, make_console(), interval_s)
    except KeyboardInterrupt:
        pass


def ls(
    ctl: Ctl,
    tier: TiersOption = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Entries per tier, 0 for all.")] = 20,
) -> None:
    """List the entries that leave next, in that order; pinned entries come last.

    With --limit 0, or more than fit into one answer, all are listed, least recently used first.
    """
    from . import messages, render

    with ctl.connect() as daemon:
        present = daemon.stats().tiers
        tiers = chosen(tier) or [Tier(t.tier) for t in present]
        entry_counts = {Tier(t.tier): t.entries for t in present}
        listed = [(t, _entries(daemon, t, limit)) for t in tiers]
    if ctl.as_json:
        print_json(
            {
                "tiers": [
                    {"tier": t.label, "entries": [messages.as_dict(entry) for entry in entries]}
                    for t, entries in listed
                ]
            }
        )
        return
    console = make_console()
    for t, entries in listed:
        if not entries:
            console.print(f"{t.label}: no entries")
            continue
        title = f"{t.label}: {len(entries):,} of {entry_counts.get(t, 0):,} entries"
        console.print(render.entries_table(entries, time.time_ns(), title))


def _entries(daemon: AdminConnection, tier: Tier, limit: int) -> list[pb.EntryDetail]:
    """What `ls` shows of a tier."""
    from ...proto.limits import MAX_PAGE_ENTRIES

    if 0 < limit <= MAX_PAGE_ENTRIES:
        return daemon.next_victims(tier, limit)
    entries = _least_recent_first(daemon, tier)
    return entries[:limit] if limit else entries


def _least_recent_first(daemon: AdminConnection, tier: Tier) -> list[pb.EntryDetail]:
    """Every entry of a tier, the pinned ones last: under LRU the order in which they leave."""
    return sorted(
        daemon.all_entries(tier), key=lambda entry: (entry.pins > 0, entry.last_used_unix_ns)
    )


def inspect(
    ctl: Ctl,
    key: Annotated[str, typer.Argument(help="Hexadecimal; a beginning that is unique will do.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the bytes and check them.")
    ] = False,
) -> None:
    """Show everything known of one entry.

    Exits 1 when --verify finds damage.
    """
    from . import messages, render

    with ctl.connect(LONG_TIMEOUT_S if verify else DEFAULT_TIMEOUT_S) as daemon:
        response = daemon.inspect(find_key(daemon, key), verify=verify)
    ctl.show(
        messages.as_dict(response),
        lambda: render.entry_view(response, time.time_ns(), verify=verify),
    )
    if verify and (response.problem or not response.verified):
        raise typer.Exit(ExitCode.PROBLEM)


#: Fewer digits would name several entries of any cache worth looking at.
MIN_KEY_DIGITS = 4


def find_key(daemon: AdminConnection, text: str) -> bytes:
    """The key of 64 hexadecimal digits, or of the one entry whose key begins with `text`.

    Raises InvalidKey when it is neither, or when several entries begin so.
    """
    from ...proto.errors import InvalidKey, UnknownEntry
    from ...proto.keys import key_from_hex
    from ...proto.limits import KEY_BYTES

    text = text.strip().lower()
    if len(text) >= 2 * KEY_BYTES:
        return key_from_hex(text)
    if len(text) < MIN_KEY_DIGITS or not all(digit in "0123456789abcdef" for digit in text):
        raise InvalidKey(
            f"{text[:80]!r} begins no key: write {MIN_KEY_DIGITS} to {2 * KEY_BYTES} "
            "hexadecimal digits"
        )
    found = {
        entry.key
        for tier in daemon.stats().tiers
        for entry in daemon.all_entries(Tier(tier.tier))
        if entry.key.hex().startswith(text)
    }
    if not found:
        raise UnknownEntry(f"no entry has a key that begins with {text}")
    if len(found) > 1:
        some = ", ".join(sorted(key.hex()[: len(text) + 8] for key in found)[:5])
        raise InvalidKey(
            f"{len(found):,} keys begin with {text}, such as {some}: write more digits"
        )
    return found.pop()


def claims(ctl: Ctl) -> None:
    """List who holds entries, since when, and for how long still."""
    from . import messages, render

    with ctl.connect() as daemon:
        found = daemon.claims()
    ctl.show(
        {"claims": [messages.as_dict(claim) for claim in found]},
        lambda: render.claims_table(found),
    )


def reservations(ctl: Ctl) -> None:
    """List saves that are not published yet, and their stage."""
    from . import messages, render

    with ctl.connect() as daemon:
        found = daemon.reservations()
    ctl.show(
        {"reservations": [messages.as_dict(one) for one in found]},
        lambda: render.reservations_table(found),
    )


def sessions(
    ctl: Ctl,
    every: Annotated[
        float | None,
        typer.Option(
            "--every", metavar="TIME", parser=parse_seconds, help="Look twice, TIME apart."
        ),
    ] = None,
) -> None:
    """List connected clients, how much each holds, saves and restores.

    Rates are averages since a session was opened; with --every, of the time between two looks.
    """
    from . import messages, session_rates

    before: Sequence[pb.SessionDetail] = ()
    between_s = 0.0
    with ctl.connect() as daemon:
        if every is not None:
            before, looked_s = daemon.sessions().sessions, time.monotonic()
            time.sleep(every)
            between_s = time.monotonic() - looked_s
        found = daemon.sessions().sessions
    rates = session_rates.rates(found, before, between_s)
    ctl.show(
        {
            "sessions": [
                messages.as_dict(session) | {"per_second": rate._asdict()}
                for session, rate in zip(found, rates, strict=True)
            ]
        },
        lambda: session_rates.sessions_table(found, rates, between_s),
    )


def preview(
    ctl: Ctl,
    payload: Annotated[
        int,
        typer.Option("--bytes", metavar="SIZE", parser=parse_size, help="Of one entry: 5MiB."),
    ],
    tier: TierOption,
    entries: Annotated[
        int, typer.Option("--entries", min=1, max=4096, help="How many of that size.")
    ] = 1,
    namespace: Annotated[
        str, typer.Option("--namespace", help="Of whose token; without: of none.")
    ] = "",
) -> None:
    """Say whether SIZE could be admitted, and what it would evict.

    Changes nothing. Exits 1 when it could not be admitted now.
    """
    from . import messages, render

    with ctl.connect() as daemon:
        response = daemon.preview(tier, payload, entries, namespace)
    ctl.show(
        messages.as_dict(response),
        lambda: render.preview_view(response, tier.label, time.time_ns()),
    )
    if not response.admissible:
        raise typer.Exit(ExitCode.PROBLEM)


def evict(
    ctl: Ctl,
    free: Annotated[
        int,
        typer.Option(
            "--bytes", metavar="SIZE", parser=parse_size, help="How much to free, in each tier."
        ),
    ],
    tier: TiersOption = None,
    all_tiers: Annotated[bool, typer.Option("--all-tiers", help="Every tier.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be evicted.")
    ] = False,
) -> None:
    """Evict the next victims until at least SIZE is freed.

    Never evicts what is in use. Exits 1 when less than SIZE could be freed.
    """
    from . import messages, render

    if bool(tier) == all_tiers:
        fail("say which --tier, or --all-tiers", ExitCode.BAD_INPUT)
    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        if dry_run:
            tiers = chosen(tier) or [Tier(t.tier) for t in daemon.stats().tiers]
            rows = [(t.label, *_victims(daemon, t, free)) for t in tiers]
        else:
            results = daemon.evict(free, chosen(tier)).results
            rows = [(messages.tier_label(r.tier), r.entries, r.freed_bytes) for r in results]
    data: dict[str, Any] = {
        "dry_run": dry_run,
        "results": [
            {"tier": name, "entries": count, "freed_bytes": freed} for name, count, freed in rows
        ],
    }
    ctl.show(data, lambda: render.evicted_table(rows, dry_run=dry_run))
    if any(freed < free for _, _, freed in rows):
        raise typer.Exit(ExitCode.PROBLEM)


def _victims(daemon: AdminConnection, tier: Tier, free_bytes: int) -> tuple[int, int]:
    """How many entries an eviction would take, and their stored bytes. Exact under LRU, and in
    other orders as far as one page of victims goes."""
    from ...proto.limits import MAX_PAGE_ENTRIES

    page = daemon.next_victims(tier, MAX_PAGE_ENTRIES)
    found = _sum_of(page, free_bytes)
    if found[1] < free_bytes and len(page) == MAX_PAGE_ENTRIES:
        return _sum_of(_least_recent_first(daemon, tier), free_bytes)
    return found


def _sum_of(victims: list[pb.EntryDetail], free_bytes: int) -> tuple[int, int]:
    entries = freed = 0
    for entry in victims:
        if freed >= free_bytes or entry.pins:
            break
        entries += 1
        freed += entry.stored_bytes
    return entries, freed


def gc(ctl: Ctl) -> None:
    """Reap what expired, and drop what no entry owns."""
    from . import messages, render

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.gc()
    ctl.show(messages.as_dict(response), lambda: render.gc_table(response))


def check(ctl: Ctl) -> None:
    """Recount the daemon's whole state from scratch.

    Exits 1 when something is wrong. The payloads are not read: that is `verify`.
    """
    from . import fleet, messages, render

    if ctl.targets:
        fleet.check(ctl, LONG_TIMEOUT_S)
        return
    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.check()
    ctl.show(messages.as_dict(response), lambda: render.check_view(response))
    if response.problems:
        raise typer.Exit(ExitCode.PROBLEM)


def verify(ctl: Ctl, tier: TiersOption = None) -> None:
    """Read every entry back and compare its checksums; damaged ones are dropped.

    Exits 1 when something is wrong. Ctrl-C stops it, in the daemon too.
    """
    from ...proto import prefixd_pb2 as pb
    from . import messages, render
    from .progress import of_a_whole

    found = pb.VerifyResponse()
    with ctl.connect() as daemon, closing(daemon.verify(chosen(tier))) as steps:
        try:
            for step in of_a_whole(steps, "verifying", render.verified_so_far):
                found = step
        except KeyboardInterrupt:
            pass
    ctl.show(messages.as_dict(found), lambda: render.verify_view(found))
    if found.problems:
        raise typer.Exit(ExitCode.PROBLEM)
    if not found.done:
        raise typer.Exit(ExitCode.INTERRUPTED)


def health(ctl: Ctl) -> None:
    """Ask the health service, as a probe does.

    Exits 0 when it serves, 1 when it is unhealthy or stopping, 3 when it is not there.
    """
    from .connection import Health

    with ctl.connect() as daemon:
        status = daemon.health()
        # "serving", or what does not work.
        why = "" if status is Health.SERVING else _why(daemon)
    if ctl.as_json:
        print_json({"address": ctl.address, "status": status.value, "why": why})
    elif status is Health.SERVING:
        typer.echo("serving")
    if status is not Health.SERVING:
        fail(f"not serving: {why}" if why else "not serving", ExitCode.PROBLEM)


def _why(daemon: AdminConnection) -> str:
    from ...proto.errors import PrefixdError

    try:
        said: pb.StatsResponse = daemon.stats()
    except PrefixdError as error:
        return str(error)
    return said.health
