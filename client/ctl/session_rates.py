"""What each session does, as `prefixctl sessions` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from .render import NS_PER_MS, age, make_table, size


class SessionRates(NamedTuple):
    """Of one session, a second. Names are those of `pb.SessionDetail`."""

    lookups: float
    hits: float
    restores: float
    restored_bytes: float
    saves: float
    saved_bytes: float


def rates(
    now: Sequence[pb.SessionDetail], before: Sequence[pb.SessionDetail], between_s: float
) -> list[SessionRates]:
    """Of each session of `now`, since the look `between_s` before it. Of one that was not there
    then, since it was opened: of all of them, if there was no such look."""
    known = {session.session_id: session for session in before}
    found = []
    for session in now:
        old, seconds = known.get(session.session_id), between_s
        # A daemon that was started again counts its sessions from one.
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
    sessions: Sequence[pb.SessionDetail], session_rates: Sequence[SessionRates], between_s: float
) -> RenderableType:
    """Sessions with their rates, which are of the last `between_s`; 0: since they were opened."""
    if not sessions:
        return Text("no sessions")
    numbers = (
        "age", "last heartbeat", "claims", "reservations",
        "look-ups/s", "hits/s", "restores/s", "restored/s", "restored",
        "saves/s", "saved/s", "saved",
    )  # fmt: skip
    table = make_table("session", "owner", "namespace", *numbers, right=numbers)
    for session, rate in zip(sessions, session_rates, strict=True):
        table.add_row(
            f"{session.session_id}",
            session.owner,
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
    over = f"the last {between_s:.3g} s" if between_s else "the time since a session was opened"
    table.caption = f"rates are of {over}; clients report with their heartbeats"
    table.caption_justify = "left"
    return table


def _per_second(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
