"""`prefixctl why`: what the daemon remembers of a key."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from .admin import LOOK
from .command import Ctl, ExitCode, command, fail

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...proto import prefixd_pb2 as pb


#: What happened to a key between a daemon and the engine that nodes share: its word, and ours.
SHARED_WORDS = {
    "fetched": "brought from another node",
    "not_fetched": "another node's, did not come in time",
    "damaged": "another node's, damaged: dropped there",
    "offered": "offered to other nodes",
    "not_offered": "offered, no answer",
    "refused": "offered, refused",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "why", panel=LOOK)(why)


_BEGINNING = re.compile(r"[0-9a-f]{4,64}")


def why(
    ctl: Ctl,
    key: Annotated[str, typer.Argument(help="Hexadecimal; its first 4 digits or more will do.")],
) -> None:
    """Say why an entry is there or is not: saved when and by whom, evicted when and for whom.

    The daemon remembers the last events of this start, as many as fit into server.journal.
    """
    from . import messages

    text = key.strip().lower()
    if not _BEGINNING.fullmatch(text):
        fail(f"{key[:80]!r} begins no key: write 4 to 64 hexadecimal digits", ExitCode.BAD_INPUT)
    beginning = bytes.fromhex(text[: len(text) // 2 * 2])
    with ctl.connect() as daemon:
        response = daemon.why(beginning)
    if len(text) % 2:
        # Half a byte more than the daemon was asked for.
        for listed in (response.events, response.present, response.shared):
            kept = [one for one in listed if one.key.hex().startswith(text[: 2 * len(one.key)])]
            del listed[:]
            listed.extend(kept)  # type: ignore[arg-type]
    ctl.show(messages.as_dict(response), lambda: why_view(text, response, time.time_ns()))


def why_view(text: str, response: pb.WhyResponse, now_unix_ns: int) -> RenderableType:
    """The answer in a sentence, and what it follows from."""
    from rich.console import Group
    from rich.text import Text

    from .render import age, entries_table, make_table, tier_name

    lines: list[RenderableType] = [Text(_verdict(text, response, now_unix_ns), style="bold")]
    if response.present:
        lines.append(entries_table(response.present, now_unix_ns, "there now"))
    if response.events:
        table = make_table(
            "key", "tier", "when", "what", "by", "namespace", right=("when",), name_columns=3
        )
        for event in response.events:
            table.add_row(
                event.key.hex()[:16],
                tier_name(event.tier),
                f"{age(now_unix_ns - event.at_unix_ns)} ago",
                _what(event),
                _who(event),
                event.label,
            )
        lines.append(table)
    if response.shared:
        table = make_table("key", "when", "what", "where", right=("when",))
        for shared in response.shared:
            table.add_row(
                shared.key.hex()[:16],
                f"{age(now_unix_ns - shared.at_unix_ns)} ago",
                SHARED_WORDS.get(shared.what, shared.what),
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
    from .messages import tier_label
    from .render import age

    keys = {bytes(event.key) for event in response.events}
    keys |= {bytes(entry.key[:16]) for entry in response.present}
    if len(keys) > 1:
        return f"{len(keys)} keys begin with {text}"
    if response.present:
        entry = response.present[0]
        return (
            f"it is there, in {tier_label(entry.info.tier)}, for "
            f"{age(now_unix_ns - entry.created_unix_ns)}, with {entry.hits:,} hits"
        )
    if not response.events:
        return "it is not there, and nothing is remembered of it: never saved, or too long ago"
    last = response.events[-1]
    return f"it is not there: {_what(last)} {age(now_unix_ns - last.at_unix_ns)} ago"


def _what(event: pb.KeyEvent) -> str:
    from .messages import reason_label

    match event.what, event.cause:
        case "saved", _:
            return f"saved ({reason_label(event.reason)})"
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
            return event.what


def _who(event: pb.KeyEvent) -> str:
    if not event.session_id:
        return ""
    return f"{event.owner or 'a session that ended'} #{event.session_id}"
