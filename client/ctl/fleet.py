"""Several daemons on one screen: `prefixctl --targets A,B,C stats|check|top`.

They are asked at once, each within the deadline of one call; one that does not answer is a line
that says so, and costs the others nothing. Operators are served on a daemon's own host: the
sockets of others have to be brought here, by `ssh -L` or a shared directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.errors import PrefixdError
from . import messages
from .command import Ctl, ExitCode, make_console
from .connection import AdminConnection
from .messages import tier_label
from .options import DEFAULT_TIMEOUT_S
from .render import check_view, live_view, make_table, percent, size, used_bytes
from .stats_view import hit_tokens, ratio_line, total_usage
from .top_board import Board, Rates

R = TypeVar("R")

#: By target, in the order given: what it said, or why it said nothing.
Answers: TypeAlias = "dict[str, R | PrefixdError]"

#: Daemons that are asked at the same time.
_AT_ONCE: Final = 64


def ask_all(
    ctl: Ctl, what: Callable[[AdminConnection], R], timeout_s: float = DEFAULT_TIMEOUT_S
) -> Answers[R]:
    """Ask every target the same."""
    targets = ctl.targets

    def ask(target: str) -> R | PrefixdError:
        try:
            with AdminConnection(target, ctl.timeout_s or timeout_s) as daemon:
                return what(daemon)
        except PrefixdError as problem:
            return problem

    with ThreadPoolExecutor(min(_AT_ONCE, len(targets))) as pool:
        return dict(zip(targets, pool.map(ask, targets), strict=True))


def stats(ctl: Ctl) -> None:
    """Exits 3 when a daemon does not answer."""
    answers = ask_all(ctl, AdminConnection.stats)
    ctl.show(_as_dict(answers), partial(_stats_view, answers))
    _leave(answers, problems=False)


def check(ctl: Ctl, timeout_s: float) -> None:
    """Exits 1 when something is wrong with one, else 3 when one does not answer."""
    answers = ask_all(ctl, AdminConnection.check, timeout_s)
    ctl.show(_as_dict(answers), partial(_check_view, answers))
    found = [answer for answer in answers.values() if isinstance(answer, pb.CheckResponse)]
    _leave(answers, problems=any(response.problems for response in found))


class FleetBoard:
    """What each of several daemons did between the last two looks at it, and all of them."""

    def __init__(self, targets: Iterable[str]) -> None:
        self.boards: Final = {target: Board(target) for target in targets}
        self.answers: Answers[pb.StatsResponse] = {}

    def take(self, answers: Answers[pb.StatsResponse], at_s: float) -> None:
        """A look, at `at_s` (monotonic)."""
        self.answers = answers
        for target, answer in answers.items():
            if isinstance(answer, pb.StatsResponse):
                self.boards[target].take(answer, (), at_s)

    def between(self) -> dict[str, object]:
        """By target, as `Board.between`; an error in the place of what was not said."""
        return {
            target: answer if isinstance(answer, PrefixdError) else self.boards[target].between()
            for target, answer in self.answers.items()
        }

    def __rich__(self) -> RenderableType:
        numbers = ("hit ratio", "look-ups/s", "restored/s", "saved/s", "evicted/s", "brought/s")
        table = make_table("daemon", "health", *numbers, "full", right=numbers)
        found: list[Rates] = []
        for target, answer in self.answers.items():
            if isinstance(answer, PrefixdError):
                table.add_row(target, Text("no answer", "bold red"), *[""] * len(numbers), "")
                continue
            rates = self.boards[target].rates()
            found.append(rates)
            table.add_row(target, _health(answer), *_shown(rates), _full(answer))
        if found:
            table.add_row(Text("all of them", "bold"), "", *_shown(_sum(found)), "")
        lines: list[RenderableType] = [table]
        for target, answer in self.answers.items():
            if isinstance(answer, pb.StatsResponse):
                lines += _notices(target, answer)
        return Group(*lines, *_silent(self.answers))


def top(ctl: Ctl, every_s: float, *, once: bool) -> None:
    """Exits 3 when a daemon does not answer, if it ends by itself."""
    board = FleetBoard(ctl.targets)

    def look() -> None:
        board.take(ask_all(ctl, AdminConnection.stats), time.monotonic())

    look()
    if once or ctl.as_json:
        time.sleep(every_s)
        look()
        ctl.show(_as_dict(board.between()), lambda: board)
        _leave(board.answers, problems=False)
        return
    with suppress(KeyboardInterrupt), live_view(make_console(), board.__rich__) as refresh:
        while True:
            time.sleep(every_s)
            look()
            refresh()


def _shown(rates: Rates) -> list[str]:
    return [
        percent(rates.hit_tokens, rates.lookup_tokens) if rates.lookup_tokens else "-",
        f"{rates.lookups_per_s:,.0f}",
        *(size(count) for count in rates[3:]),
    ]


def _sum(found: Sequence[Rates]) -> Rates:
    return Rates(*map(sum, zip(*found, strict=True)))


def _health(stats: pb.StatsResponse) -> Text:
    return Text(stats.health or "unknown", "green" if stats.health == "serving" else "bold red")


def _full(stats: pb.StatsResponse) -> str:
    return " ".join(
        f"{tier_label(tier.tier)} {percent(used_bytes(tier), tier.budget_bytes)}"
        for tier in stats.tiers
    )


def _notices(target: str, stats: pb.StatsResponse) -> list[RenderableType]:
    return [Text(f"{target}: {part}: {why}", "yellow") for part, why in stats.notices.items()]


def _leave(answers: Mapping[str, object], *, problems: bool) -> None:
    if problems:
        raise typer.Exit(ExitCode.PROBLEM)
    if any(isinstance(answer, PrefixdError) for answer in answers.values()):
        raise typer.Exit(ExitCode.UNREACHABLE)


def _as_dict(answers: Mapping[str, object]) -> dict[str, object]:
    """By target; an error in the place of what was not said."""
    return {
        target: {"error": answer.name, "message": str(answer)}
        if isinstance(answer, PrefixdError)
        else messages.as_dict(answer)  # type: ignore[arg-type]  # a message, each of them
        for target, answer in answers.items()
    }


def _stats_view(answers: Answers[pb.StatsResponse]) -> RenderableType:
    found = {t: a for t, a in answers.items() if isinstance(a, pb.StatsResponse)}
    numbers = ["hit tokens", "look-ups", "entries", "used", "budget", "sessions", "claims"]
    table = make_table("daemon", "health", *numbers, "full", right=numbers)
    for target, answer in answers.items():
        if isinstance(answer, PrefixdError):
            table.add_row(target, Text("no answer", "bold red"), *[""] * len(numbers), "")
            continue
        usage = total_usage(answer.usage.values())
        table.add_row(
            target,
            _health(answer),
            percent(hit_tokens(usage), usage.lookup_tokens) if usage.lookup_tokens else "-",
            f"{usage.lookups:,}",
            f"{sum(tier.entries for tier in answer.tiers):,}",
            size(sum(map(used_bytes, answer.tiers))),
            size(sum(tier.budget_bytes for tier in answer.tiers)),
            f"{answer.sessions:,}",
            f"{answer.claims:,}",
            _full(answer),
        )
    lines: list[RenderableType] = [table]
    total = total_usage(usage for answer in found.values() for usage in answer.usage.values())
    if total.lookups:
        lines.append(Text.assemble("all of them: ", ratio_line(total)))
    for target, answer in found.items():
        lines += _notices(target, answer)
    return Group(*lines, *_silent(answers))


def _check_view(answers: Answers[pb.CheckResponse]) -> RenderableType:
    lines: list[RenderableType] = []
    for target, answer in answers.items():
        if not isinstance(answer, PrefixdError):
            lines += [Text(target, "bold"), check_view(answer)]
    return Group(*lines, *_silent(answers))


def _silent(answers: Mapping[str, object]) -> list[RenderableType]:
    """Why some said nothing."""
    return [
        Text(f"{target}: {answer}", "bold red")
        for target, answer in answers.items()
        if isinstance(answer, PrefixdError)
    ]
