"""The commands that look into a running daemon: stats, top, ls, inspect, why, identity ..."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...proto.vocabulary import Tier
from .command import (
    DEFAULT_TIMEOUT_S,
    LONG_TIMEOUT_S,
    MAX_NUMBER,
    TABLE_ROWS,
    Ctl,
    TierOption,
    TiersOption,
    chosen,
    make_console,
    print_json,
    size_option,
    time_option,
)
from .failures import ExitCode, exit_if, fail
from .output_files import STDOUT

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ...proto import prefixd_pb2 as pb
    from ..identity import StateIdentity
    from .connection import AdminConnection
    from .views.top import Interval

#: The shortest beginning of a key, or of an identity's digest, that is accepted. Fewer digits match
#: several entries of any cache of a useful size.
MIN_KEY_DIGITS: Final = 4
_BEGINNING: Final = re.compile(rf"[0-9a-f]{{{MIN_KEY_DIGITS},64}}")
#: The size of a file that is read: more than an identity has.
_MAX_IDENTITY_BYTES: Final = 2**20


# ---- the whole daemon


def stats(
    ctl: Ctl,
    watch: Annotated[float | None, time_option("The same as top --every TIME.")] = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Show every counter of the daemon, too.")
    ] = False,
) -> None:
    """Show budgets, hits, saves and evictions of the tiers."""
    from rich.console import Group

    from . import targets
    from .views.operators import counters_table
    from .views.stats import stats_view

    if ctl.targets:
        if watch is not None or counters:
            raise typer.BadParameter("--watch and --counters are of one daemon: use --address")
        targets.stats(ctl)
        return
    with ctl.connect() as daemon:
        if watch is not None:
            with suppress(KeyboardInterrupt):
                while ctl.as_json:
                    print_json(daemon.stats(), indent=None)
                    time.sleep(watch)
                follow(daemon, make_console(), watch)
            return
        response = daemon.stats()
    more = [counters_table(response.counters)] if counters else []
    ctl.show(response, lambda: Group(stats_view(response, ctl.address), *more))


def top(
    ctl: Ctl,
    every: Annotated[float, time_option("How often to refresh.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Take two samples, show what happened between, and exit.")
    ] = False,
) -> None:
    """Show what the daemon does now: tiers, rates, hit ratios, slow stages, the oldest claims.

    With --targets, several daemons: a line for each, and one for all together.
    Ends with Ctrl-C. Clients report with their heartbeats, so what they read in place shows later.
    """
    from .views.top import Interval

    if ctl.targets:
        from . import targets

        targets.top(ctl, every, once=once)
        return
    with ctl.connect() as daemon:
        if not once and not ctl.as_json:
            with suppress(KeyboardInterrupt):
                follow(daemon, make_console(), every)
            return
        board = Interval(daemon.address)
        _sample(board, daemon)
        time.sleep(every)
        _sample(board, daemon)
    ctl.show(board.between(), lambda: board)


def follow(daemon: AdminConnection, console: Console, every_s: float) -> None:
    """Show what a daemon does until interrupted, across its restarts. Raises DaemonUnavailable
    when no daemon answers at first."""
    from ...proto.errors import DaemonUnavailable, DeadlineExceeded
    from .views.progress import live_view
    from .views.top import Interval

    board = Interval(daemon.address)
    _sample(board, daemon)
    with live_view(console, board.__rich__) as refresh:
        while True:
            time.sleep(every_s)
            try:
                _sample(board, daemon)
                board.note = ""
            except (DaemonUnavailable, DeadlineExceeded):
                board.note = "the daemon does not answer; trying again"
            refresh()


def _sample(board: Interval, daemon: AdminConnection) -> None:
    from .views.top import OLDEST_CLAIMS

    board.take(daemon.stats(), daemon.oldest_claims(OLDEST_CLAIMS), time.monotonic())


def health(ctl: Ctl) -> None:
    """Ask the health service, as a probe does.

    Exits 0 when the daemon serves, 1 when it is unhealthy or stopping, 3 when none answers.
    """
    with ctl.connect() as daemon:
        serving = daemon.health()
        reason = "" if serving else _unhealthy_part(daemon)
    if ctl.as_json:
        status = "serving" if serving else "not_serving"
        print_json({"address": ctl.address, "status": status, "why": reason})
    elif serving:
        typer.echo("serving")
    if not serving:
        fail(f"not serving: {reason}" if reason else "not serving", ExitCode.PROBLEM)


def _unhealthy_part(daemon: AdminConnection) -> str:
    """The part of the daemon that does not work, or why it does not say."""
    from ...proto.errors import PrefixdError

    try:
        response: pb.StatsResponse = daemon.stats()
    except PrefixdError as error:
        return str(error)
    return response.health


def check(ctl: Ctl) -> None:
    """Recount the daemon's whole state from scratch.

    Exits 1 when something is wrong. Does not read the payloads; verify does.
    """
    from . import targets
    from .views.operators import check_view

    if ctl.targets:
        targets.check(ctl, LONG_TIMEOUT_S)
        return
    with ctl.connect(LONG_TIMEOUT_S) as daemon:
        response = daemon.check()
    ctl.show(response, lambda: check_view(response))
    exit_if(response.problems)


def verify(ctl: Ctl, tier: TiersOption = None) -> None:
    """Read every entry back and compare its checksums; damaged entries are dropped.

    Exits 1 when something is wrong. Ctrl-C stops it, in the daemon too.
    """
    from ...proto import prefixd_pb2 as pb
    from .views.operators import verified_so_far, verify_view
    from .views.progress import permille_bar

    found = pb.VerifyResponse()
    with (
        ctl.connect() as daemon,
        closing(daemon.verify(chosen(tier))) as steps,
        suppress(KeyboardInterrupt),
    ):
        for step in permille_bar(steps, "verifying", verified_so_far):
            found = step
    ctl.show(found, lambda: verify_view(found))
    exit_if(found.problems)
    exit_if(not found.done, ExitCode.INTERRUPTED)


# ---- entries


def ls(
    ctl: Ctl,
    tier: TiersOption = None,
    limit: Annotated[int, typer.Option(min=0, help="Entries per tier, 0 for all.")] = 20,
) -> None:
    """List the next victims of eviction in their order; pinned entries come last.

    With --limit 0, or a limit above one page, the least recently used entries come first. They are
    sorted in a temporary file and printed as they come, so memory doesn't grow with their number.
    """
    with ctl.connect() as daemon:
        entry_counts = {Tier(t.tier): t.entries for t in daemon.stats().tiers}
        listed = ((t, _entries(daemon, t, limit)) for t in chosen(tier) or entry_counts)
        if ctl.as_json:
            tiers = ({"tier": t.label, "entries": entries} for t, entries in listed)
            print_json({"tiers": tiers})
            return
        console = make_console()
        for t, entries in listed:
            for table in _tables(t, entries, entry_counts.get(t, 0)):
                console.print(table)


def _tables(tier: Tier, entries: Iterator[pb.EntryDetail], count: int) -> Iterator[RenderableType]:
    """What `ls` shows of a tier to people. `count`: how many entries it has."""
    from .views.operators import entries_table

    first = 1
    page = list(islice(entries, TABLE_ROWS))
    if not page:
        yield f"{tier.label}: no entries"
    while page:
        following = list(islice(entries, TABLE_ROWS))
        shown = f"{len(page):,}"
        if following or first > 1:
            shown = f"{first:,} to {first + len(page) - 1:,}"
        title = f"{tier.label}: {shown} of {count:,} entries"
        yield entries_table(page, time.time_ns(), title)
        first += len(page)
        page = following


def _entries(daemon: AdminConnection, tier: Tier, limit: int) -> Iterator[pb.EntryDetail]:
    """What `ls` lists of a tier."""
    from ...proto.limits import MAX_PAGE_ENTRIES

    if 0 < limit <= MAX_PAGE_ENTRIES:
        return iter(daemon.next_victims(tier, limit))
    return islice(least_recent_first(daemon, tier), min(limit, MAX_NUMBER) or None)


def least_recent_first(daemon: AdminConnection, tier: Tier) -> Iterator[pb.EntryDetail]:
    """Every entry of a tier, the pinned ones last. Under LRU this is the order of eviction."""
    from ...proto import prefixd_pb2 as pb
    from .disk_sort import sorted_on_disk

    entries = daemon.all_entries(tier)
    records = ((e.pins > 0, e.last_used_unix_ns, e.SerializeToString()) for e in entries)
    return map(pb.EntryDetail.FromString, sorted_on_disk(records))


def inspect(
    ctl: Ctl,
    key: Annotated[str, typer.Argument(help="Hexadecimal; a unique beginning is enough.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the payload and compare its checksum.")
    ] = False,
) -> None:
    """Show everything known about one entry, and what its key depends on if its client said so.

    Exits 1 when --verify finds damage.
    """
    with ctl.connect(LONG_TIMEOUT_S if verify else DEFAULT_TIMEOUT_S) as daemon:
        response = daemon.inspect(find_key(daemon, key), verify=verify)
    ctl.show(response, lambda: _entry_and_identity(response, verify=verify))
    exit_if(verify and (response.problem or not response.verified))


def _entry_and_identity(response: pb.InspectResponse, *, verify: bool) -> RenderableType:
    from rich.console import Group

    from .views.model_identity import saver_view
    from .views.operators import entry_view

    entry = entry_view(response, time.time_ns(), verify=verify)
    if not response.identities:
        return entry
    return Group(entry, "", saver_view(response.identities))


def find_key(daemon: AdminConnection, text: str) -> bytes:
    """The key that `text` spells in full, or the key of the one entry that begins with it.

    Raises InvalidKey when `text` is neither or several entries begin with it, UnknownEntry when
    none does.
    """
    from ...proto.errors import InvalidKey, UnknownEntry
    from ...proto.keys import key_from_hex
    from ...proto.limits import KEY_BYTES

    text = text.strip().lower()
    if len(text) >= 2 * KEY_BYTES:
        return key_from_hex(text)
    if not _BEGINNING.fullmatch(text):
        raise InvalidKey(_no_beginning(text))
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


def _no_beginning(text: str) -> str:
    return f"{text[:80]!r} begins no key: write {MIN_KEY_DIGITS} to 64 hexadecimal digits"


def why(
    ctl: Ctl,
    key: Annotated[str, typer.Argument(help="Hexadecimal; its first 4 digits or more are enough.")],
) -> None:
    """Say why an entry is there or is not: when and by whom it was saved, why it was evicted.

    The daemon remembers the latest events since its start, as many as server.journal allows.
    """
    from .views.operators import why_view

    text = key.strip().lower()
    if not _BEGINNING.fullmatch(text):
        fail(_no_beginning(key), ExitCode.BAD_INPUT)
    with ctl.connect() as daemon:
        response = daemon.why(bytes.fromhex(text[: len(text) // 2 * 2]))
    if len(text) % 2:
        # The daemon searches for whole bytes. The last digit is half a byte.
        for listed in (response.events, response.present, response.shared):
            kept = [one for one in listed if one.key.hex().startswith(text[: 2 * len(one.key)])]
            del listed[:]
            listed.extend(kept)  # type: ignore[arg-type]
    ctl.show(response, lambda: why_view(text, response, time.time_ns()))


def preview(
    ctl: Ctl,
    payload: Annotated[int, size_option("Of one entry: 5MiB.", "--bytes")],
    tier: TierOption,
    entries: Annotated[int, typer.Option(min=1, max=4096, help="How many of that size.")] = 1,
    namespace: Annotated[
        str, typer.Option(help="Namespace of the client's token (default: none).")
    ] = "",
) -> None:
    """Say whether entries of SIZE could be admitted, and what they would evict.

    Changes nothing. Exits 1 when they could not be admitted now.
    """
    from .views.operators import preview_view

    with ctl.connect() as daemon:
        response = daemon.preview(tier, payload, entries, namespace)
    ctl.show(response, lambda: preview_view(response, tier.label, time.time_ns()))
    exit_if(not response.admissible)


# ---- clients


def claims(ctl: Ctl) -> None:
    """List who holds entries, since when, and for how much longer."""
    from .views.operators import claims_table

    with ctl.connect() as daemon:
        ctl.show_list("claims", daemon.all_claims(), claims_table)


def reservations(ctl: Ctl) -> None:
    """List saves that are not published yet, and their stage."""
    from .views.operators import reservations_table

    with ctl.connect() as daemon:
        ctl.show_list("reservations", daemon.all_reservations(), reservations_table)


def sessions(
    ctl: Ctl,
    every: Annotated[float | None, time_option("Take two samples, TIME apart.")] = None,
) -> None:
    """List connected clients, and how much each holds, saves and restores.

    Rates are averages since a session was opened or, with --every, between the two samples.
    """
    from .message_json import as_dict
    from .views.operators import session_rates, sessions_table

    before: Sequence[pb.SessionDetail] = ()
    between_s = 0.0
    with ctl.connect() as daemon:
        if every is not None:
            before, sampled_s = daemon.sessions().sessions, time.monotonic()
            time.sleep(every)
            between_s = time.monotonic() - sampled_s
        found = daemon.sessions().sessions
    rates = session_rates(found, before, between_s)
    data = [
        as_dict(session) | {"per_second": rate._asdict()}
        for session, rate in zip(found, rates, strict=True)
    ]
    ctl.show({"sessions": data}, lambda: sessions_table(found, rates, between_s))


# ---- identities


def identity(
    ctl: Ctl,
    one: Annotated[
        str | None,
        typer.Argument(
            metavar="A", help="A digest, the beginning of one, or a file that --json wrote."
        ),
    ] = None,
    other: Annotated[str | None, typer.Argument(metavar="B", help="Another one.")] = None,
) -> None:
    """Say what the keys of the connected engines depend on.

    Without arguments it lists the identities of open sessions: engines share where the digests are
    equal. With one it shows its dimensions. With two it says in which dimensions they differ, and
    exits 1 if they do.
    """
    from .views.model_identity import differences_view, identities_table, identity_view

    if one is None:
        with ctl.connect() as daemon:
            listed = daemon.identities()
        ctl.show({"identities": listed}, lambda: identities_table(listed))
        return
    found = _find_identity(ctl, one)
    if other is None:
        ctl.show(found.to_json(), lambda: identity_view(found))
        return
    second = _find_identity(ctl, other)
    from ..identity import differences

    differing = differences(found, second)
    ctl.show(
        {"equal": not differing, "differences": [each._asdict() for each in differing]},
        lambda: differences_view(found, second, differing),
    )
    exit_if(differing)


def _find_identity(ctl: Ctl, text: str) -> StateIdentity:
    """The identity that open sessions announced with a digest that begins with `text`, or that of a
    file, for which no daemon is needed."""
    from ...proto.errors import InvalidNamespace

    digits = text.strip().lower()
    if not _BEGINNING.fullmatch(digits):
        try:
            return _parsed_identity(_read_identity(text))
        except OSError as problem:
            why = (problem.strerror or "").lower()
        except ValueError as problem:
            why = str(problem)
        fail(
            f"{text[:80]!r} begins no digest (4 to 64 hexadecimal digits), and is no file with an "
            f"identity: {why}",
            ExitCode.BAD_INPUT,
        )
    # The daemon searches for whole bytes. The last digit may be half a byte.
    with ctl.connect() as daemon:
        announced = daemon.identities(bytes.fromhex(digits[: len(digits) // 2 * 2]))
    listed = [each for each in announced if each.identity.digest.hex().startswith(digits)]
    digests = {each.identity.digest for each in listed}
    if not digests:
        fail(f"no open session has announced an identity {digits}", ExitCode.PROBLEM)
    if len(digests) > 1:
        some = ", ".join(sorted(each.hex()[: len(digits) + 8] for each in digests)[:5])
        fail(f"{len(digests)} digests begin with {digits}, such as {some}", ExitCode.BAD_INPUT)
    # Each session says what it wants: words that do not give the digest are not believed.
    for each in listed:
        try:
            found = _parsed_identity(each.identity.words)
        except InvalidNamespace:
            continue
        if found.digest == each.identity.digest:
            return found
    return fail(f"no session says in words what {digits} stands for", ExitCode.PROBLEM)


def _read_identity(name: str) -> str:
    if name == STDOUT:
        return typer.get_text_stream("stdin").read(_MAX_IDENTITY_BYTES)
    with Path(name).open(encoding="utf-8") as file:
        return file.read(_MAX_IDENTITY_BYTES)


def _parsed_identity(text: str) -> StateIdentity:
    """Raises InvalidNamespace."""
    from ...proto.errors import InvalidNamespace
    from ..identity import StateIdentity

    try:
        return StateIdentity.from_json(json.loads(text))
    except InvalidNamespace:
        raise
    except (ValueError, RecursionError):
        raise InvalidNamespace("it is no JSON of one") from None
