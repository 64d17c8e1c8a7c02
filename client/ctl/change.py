"""The commands that change a running daemon: evict, gc, delete, clear, kick, drain, config ..."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...proto.vocabulary import Tier
from .command import (
    LONG_TIMEOUT_S,
    MAX_NUMBER,
    TIER_NAMES,
    Ctl,
    NamedTiersOption,
    TiersOption,
    chosen,
    make_console,
    parse_size,
    parse_tier,
    print_json,
    size_option,
    time_option,
)
from .failures import ExitCode, exit_if, fail
from .look import find_key, least_recent_first

if TYPE_CHECKING:
    from ...proto import prefixd_pb2 as pb
    from .connection import AdminConnection


# ---- entries


def evict(
    ctl: Ctl,
    free: Annotated[int, size_option("How much to free, in each tier.", "--bytes")],
    tier: NamedTiersOption = None,
    all_tiers: Annotated[bool, typer.Option("--all-tiers", help="Every tier.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be evicted.")
    ] = False,
) -> None:
    """Evict the next victims of each named tier until at least SIZE is freed there.

    Never evicts entries in use. Exits 1 when less than SIZE could be freed.
    """
    from ...proto.vocabulary import Tier, label_of
    from .views.operators import evicted_table

    if bool(tier) == all_tiers:
        fail("say which --tier, or --all-tiers", ExitCode.BAD_INPUT)
    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        if dry_run:
            tiers = chosen(tier) or [Tier(t.tier) for t in daemon.stats().tiers]
            rows = [(t.label, *_victims(daemon, t, free)) for t in tiers]
        else:
            results = daemon.evict(free, chosen(tier)).results
            rows = [(label_of(Tier, r.tier), r.entries, r.freed_bytes) for r in results]
    data: dict[str, Any] = {
        "dry_run": dry_run,
        "results": [
            {"tier": name, "entries": count, "freed_bytes": freed} for name, count, freed in rows
        ],
    }
    ctl.show(data, lambda: evicted_table(rows, dry_run=dry_run))
    exit_if(any(freed < free for _, _, freed in rows))


def _victims(daemon: AdminConnection, tier: Tier, free_bytes: int) -> tuple[int, int]:
    """How many entries an eviction would take, and their stored bytes. Exact under LRU. Under other
    policies it is exact as long as the victims fit into one page."""
    from ...proto.limits import MAX_PAGE_ENTRIES

    page = daemon.next_victims(tier, MAX_PAGE_ENTRIES)
    found = _evictable(page, free_bytes)
    if found[1] < free_bytes and len(page) == MAX_PAGE_ENTRIES:
        return _evictable(least_recent_first(daemon, tier), free_bytes)
    return found


def _evictable(victims: Iterable[pb.EntryDetail], free_bytes: int) -> tuple[int, int]:
    entries = freed = 0
    for entry in victims:
        if freed >= free_bytes or entry.pins:
            break
        entries += 1
        freed += entry.stored_bytes
    return entries, freed


def delete(
    ctl: Ctl,
    key: Annotated[str, typer.Argument(help="Hexadecimal; a unique beginning is enough.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which entry would be dropped.")
    ] = False,
) -> None:
    """Drop one entry.

    Exits 1 when it is not there, or cannot be dropped because it is being read or saved.
    """
    from ...proto import prefixd_pb2 as pb
    from .message_json import enum_label

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        found = find_key(daemon, key)
        if dry_run:
            daemon.inspect(found, verify=False)  # is it there?
            ctl.show({"key": found.hex(), "dry_run": True}, lambda: f"{found.hex()} would go")
            return
        (status,) = daemon.drop([found])
    word = enum_label(pb.DeleteStatus.DESCRIPTOR, status)
    ctl.show({"key": found.hex(), "status": word}, lambda: f"{found.hex()}: {word}")
    exit_if(status != pb.DELETE_STATUS_DELETED)


def clear(
    ctl: Ctl,
    namespace: Annotated[str, typer.Option(metavar="LABEL", help="A namespace as stats lists it.")],
    tier: TiersOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be dropped.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Drop the entries of a namespace.

    Those are the entries that clients with this label saved since the daemon's start and, if it is
    a tenant's, all that it ever saved. Clients without a tenant's token choose their label
    themselves. If nodes share entries, all of them drop theirs within seconds, unless --tier is
    given. Asks first; where there is no terminal to ask, say --yes. Exits 1 when some entries
    stay because they are being read.
    """
    from .message_json import as_dict
    from .views.operators import cleared_view

    tiers = chosen(tier)
    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        if not (yes or dry_run):
            _ask_whether_to_clear(daemon, namespace, tiers)
        response = daemon.clear(namespace, tiers, dry_run=dry_run)
    data = {"dry_run": dry_run, **as_dict(response)}
    ctl.show(data, lambda: cleared_view(namespace, response, dry_run=dry_run))
    exit_if(response.pinned_entries)


def _ask_whether_to_clear(daemon: AdminConnection, namespace: str, tiers: list[Tier]) -> None:
    """Exits unless the user wants it."""
    from .views.text_tables import size

    if not sys.stdin.isatty():
        fail("clear destroys entries: say --yes, or see with --dry-run", ExitCode.BAD_INPUT)
    expected = daemon.clear(namespace, tiers, dry_run=True)
    question = f"drop {expected.entries:,} entries ({size(expected.freed_bytes)}) of {namespace}?"
    if not typer.confirm(question, err=True):
        fail("nothing was dropped", ExitCode.PROBLEM)


def gc(ctl: Ctl) -> None:
    """Release expired claims and reservations; drop records and index rows without an entry."""
    from .views.operators import gc_table

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.gc()
    ctl.show(response, lambda: gc_table(response))


# ---- the daemon


def kick(
    ctl: Ctl,
    session: Annotated[int, typer.Argument(help="As sessions lists it.", min=1)],
) -> None:
    """End a session, and release its claims and reservations.

    Its client opens another one with its next call.
    """
    if session > MAX_NUMBER:
        fail(f"there is no session {session}", ExitCode.PROBLEM)
    with ctl.connect() as daemon:
        daemon.kick(session)
    ctl.show({"session": session}, lambda: f"session {session} was ended")


def drain(
    ctl: Ctl,
    within: Annotated[float, time_option("The longest wait.")] = 60.0,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the daemon once it is drained, or after TIME.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Serve again.")] = False,
) -> None:
    """Refuse new sessions, claims and saves, and wait until the current ones end.

    The daemon stays drained until --resume, and tells probes and /readyz so. Clients can still read
    in place what lies in its memory. Exits 1 when something is still held after TIME.
    """
    from .views.operators import drained_view

    if stop and resume:
        fail("say --stop or --resume, not both", ExitCode.BAD_INPUT)
    with ctl.connect(within + LONG_TIMEOUT_S) as daemon:
        response = daemon.drain(0.0 if resume else within, stop=stop, resume=resume)
    ctl.show(response, lambda: "serving again" if resume else drained_view(response, stop=stop))
    exit_if(not resume and not response.drained)


class LogLevel(StrEnum):
    """The log levels as people write them."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def log_level(
    ctl: Ctl,
    level: Annotated[
        LogLevel, typer.Argument(help="The lowest level to log: debug, info, warning or error.")
    ],
) -> None:
    """Set the log level until the next start or reload."""
    from .message_json import label_in

    with ctl.connect() as daemon:
        before = label_in(daemon.set_log_level(level.value), "before")
    ctl.show(
        {"before": before, "level": level.value}, lambda: f"{level.value}; it was {before} before"
    )


def resize(
    ctl: Ctl,
    tier: Annotated[
        Tier, typer.Argument(metavar=TIER_NAMES, parser=parse_tier, help="Which tier.")
    ],
    budget: Annotated[
        int, typer.Argument(metavar="SIZE", parser=parse_size, help="The new budget: 12GiB.")
    ],
) -> None:
    """Give a tier another budget until the next start.

    A smaller budget evicts the next victims at once. Claimed entries stay; a budget that is too
    small for them is refused. Write the size into the configuration, too: config diff shows what
    differs.
    """
    from .views.operators import resized_view

    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.resize(tier, budget)
    ctl.show(response, lambda: resized_view(tier.label, response))


# ---- its configuration


def show(ctl: Ctl) -> None:
    """Show the current value of every option."""
    with ctl.connect() as daemon:
        running = dict(sorted(daemon.configure(apply=False).running.items()))
    ctl.show(
        {"options": running},
        lambda: "\n".join(f"{name} = {value}" for name, value in running.items()),
    )


def diff(ctl: Ctl) -> None:
    """Show the options that file, environment or flags now set differently."""
    with ctl.connect() as daemon:
        _show_changed(ctl, daemon.configure(apply=False), "changes with a reload")


def reload(ctl: Ctl) -> None:
    """Read the configuration again and apply what can change at run time, as SIGHUP does.

    Exits 1 when something needs a restart.
    """
    with ctl.connect() as daemon:
        response = daemon.configure(apply=True)
    _show_changed(ctl, response, "changed")
    exit_if(not all(each.live for each in response.changed))


def _show_changed(ctl: Ctl, response: pb.ConfigureResponse, live: str) -> None:
    from .views.operators import changed_table

    if ctl.as_json:
        print_json({"changed": list(response.changed), "warnings": list(response.warnings)})
    elif response.changed:
        make_console().print(changed_table(response.changed, live))
    else:
        typer.echo("nothing differs")
    for warning in [] if ctl.as_json else response.warnings:
        typer.echo(f"warning: {warning}")
