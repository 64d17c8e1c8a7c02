"""What `prefixctl identity` and `inspect` show of identities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from ....proto import prefixd_pb2 as pb
from ....proto.errors import InvalidNamespace
from ...identity import Difference, StateIdentity, cut, printable, shortened
from .text_tables import KEY_DIGITS, make_table, pairs_table

#: Characters of a value. `--json` shows all of them.
_VALUE_CHARS: Final = 240
#: Sessions that are named in a row.
_SESSIONS: Final = 4


def identities_table(listed: Iterable[pb.AnnouncedIdentity]) -> RenderableType:
    """Identities with the sessions that announced them: one row for each digest."""
    by_digest: dict[bytes, list[pb.AnnouncedIdentity]] = {}
    for each in listed:
        by_digest.setdefault(each.identity.digest, []).append(each)
    if not by_digest:
        return Text("no session has announced what its keys depend on")
    table = make_table(
        "digest|engine|namespace|>sessions|owners",
        caption="sessions with one digest share; `prefixctl identity A B` says why two do not",
    )
    for digest, sessions in by_digest.items():
        owners = [each.owner for each in sessions]
        more = len(owners) - _SESSIONS
        table.add_row(
            digest.hex()[:KEY_DIGITS],
            ", ".join(dict.fromkeys(each.identity.engine for each in sessions)),
            ", ".join(dict.fromkeys(each.label for each in sessions)),
            f"{len(sessions):,}",
            ", ".join(owners[:_SESSIONS]) + (f" and {more:,} more" if more > 0 else ""),
        )
    return table


def identity_view(identity: StateIdentity) -> RenderableType:
    """The dimensions of an identity."""
    table = make_table(
        "dimension|value|part|source",
        title=f"{identity.digest.hex()}\n{printable(identity.engine)}",
    )
    for each in identity.dimensions:
        value = _shown(each.words) if each.revealed else "not revealed"
        table.add_row(each.name, value, each.part.value, printable(each.source))
    if identity.unshared is None:
        return table
    return Group(table, Text(printable(identity.unshared), style="yellow"))


def differences_view(
    one: StateIdentity, other: StateIdentity, differing: Sequence[Difference]
) -> RenderableType:
    """The dimensions in which two identities differ."""
    if not differing:
        return Text("they share keys: every dimension is equal", style="green")
    names = [each.digest.hex()[:KEY_DIGITS] for each in (one, other)]
    table = make_table(f"dimension|{names[0]}|{names[1]}")
    for each in differing:
        one_words, other_words = _shown(each.one), _shown(each.other)
        if one_words == other_words:
            one_words, other_words = each.one, each.other
        table.add_row(each.name, one_words, other_words)
    count = f"{len(differing)} dimension{'s' * (len(differing) > 1)}"
    return Group(Text(f"they share no key: {count} differ{'s' * (len(differing) == 1)}"), table)


def _shown(words: str) -> str:
    """The words of a value, with the beginnings of digests."""
    return cut(shortened(words), _VALUE_CHARS)


def saver_view(identities: Sequence[pb.Identity]) -> RenderableType:
    """What the session that saved an entry has announced."""
    if len(identities) == 1:
        try:
            identity = StateIdentity.from_json(json.loads(identities[0].words))
            if identity.digest == identities[0].digest:
                return identity_view(identity)
        except (ValueError, RecursionError, InvalidNamespace):
            pass  # too long, or not true: its digest and engine are shown
    return pairs_table(
        [("one of", f"{each.digest.hex()[:KEY_DIGITS]} {each.engine}") for each in identities],
        title="the session that saved it has announced",
    )
