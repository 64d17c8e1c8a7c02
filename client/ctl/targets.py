"""Several daemons on one screen: `prefixctl --targets A,B,C stats|check|top`.

All are asked at once, each within the deadline of one call. A daemon that does not answer gets a
line that says so, and does not delay the others. The Admin service listens on the daemon's own
host, so the sockets of other hosts have to be brought here, by `ssh -L` or a shared directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.errors import PrefixdError
from ...proto.vocabulary import Tier, label_of
from .command import DEFAULT_TIMEOUT_S, Ctl, make_console
from .connection import AdminConnection
from .failures import ExitCode, exit_if
from .views.operators import check_view
from .views.progress import live_view
from .views.stats import health_text, hit_tokens, notice_lines, tokens_line, total_usage
from .views.text_tables import make_table, percent, size, used_bytes
from .views.top import Interval, Rates

R = TypeVar("R")

#: By target, in the order given: its answer, or why there is none.
Answers: TypeAlias = "dict[str, R | PrefixdError]"

#: How many daemons are asked at the same time.
_AT_ONCE: Final = 64


def ask_all(
    ctl: Ctl, call: Callable[[AdminConnection], R], timeout_s: float = DEFAULT_TIMEOUT_S
) -> Answers[R]:
    """Make the same call to every target."""
    targets = ctl.targets

    def ask(target: str) -> R | PrefixdError:
        try:
            with AdminConnection(target, ctl.timeout_s or timeout_s) as daemon:
                return call(daemon)
        except PrefixdError as problem:
            return problem

    with ThreadPoolExecutor(min(_AT_ONCE, len(targets))) as pool:
        return dict(zip(targets, pool.map(ask, targets), strict=True))


def stats(ctl: Ctl) -> None:
    """Exits 3 when a daemon does not answer."""
    answers = ask_all(ctl, AdminConnection.stats)
    ctl.show(_json_of(answers), lambda: stats_view(answers))
    _exit_on_silence(answers)


def check(ctl: Ctl, timeout_s: float) -> None:
    """Exits 1 when something is wrong with one daemon, else 3 when one does not answer."""
    answers = ask_all(ctl, AdminConnection.check, timeout_s)
    ctl.show(_json_of(answers), lambda: _check_view(answers))
    exit_if(any(response.problems for response in _answered(answers).values()))
    _exit_on_silence(answers)


def top(ctl: Ctl, every_s: float, *, once: bool) -> None:
    """With `once` or --json, exits 3 when a daemon does not answer."""
    board = FleetBoard(ctl.targets)

    def sample() -> None:
        board.take(ask_all(ctl, AdminConnection.stats), time.monotonic())

    sample()
    if once or ctl.as_json:
        time.sleep(every_s)
        sample()
        ctl.show(_json_of(board.between()), lambda: board)
        _exit_on_silence(board.answers)
        return
    with suppress(KeyboardInterrupt), live_view(make_console(), board.__rich__) as refresh:
        while True:
            time.sleep(every_s)
            sample()
            refresh()


class FleetBoard:
    """Each of several daemons between its last two samples, and all of them together."""

    def __init__(self, targets: Iterable[str]) -> None:
        self.boards: Final = {target: Interval(target) for target in targets}
        self.answers: Answers[pb.StatsResponse] = {}

    def take(self, answers: Answers[pb.StatsResponse], at_s: float) -> None:
        """Add a sample of every daemon, taken at `at_s` (monotonic)."""
        self.answers = answers
        for target, answer in _answered(answers).items():
            self.boards[target].take(answer, (), at_s)

    def between(self) -> Answers[pb.StatsResponse]:
        """By target: `Interval.between`, or the error of a daemon that did not answer."""
        return {
            target: answer if isinstance(answer, PrefixdError) else self.boards[target].between()
            for target, answer in self.answers.items()
        }

    def __rich__(self) -> RenderableType:
        numbers = ("hit ratio", "look-ups/s", "restored/s", "saved/s", "evicted/s", "brought/s")
        rates = {target: self.boards[target].rates() for target in _answered(self.answers)}
        table = _targets_table(self.answers, numbers, lambda target, _: _cells(rates[target]))
        if rates:
            total = Rates(*map(sum, zip(*rates.values(), strict=True)))
            table.add_row(Text("all of them", "bold"), "", *_cells(total), "")
        return Group(table, *_notices(self.answers), *_errors(self.answers))


def stats_view(answers: Answers[pb.StatsResponse]) -> RenderableType:
    """A line for each daemon, and the hit ratio of all together."""
    numbers = ("hit tokens", "look-ups", "entries", "used", "budget", "sessions", "claims")

    def cells(_target: str, stats: pb.StatsResponse) -> list[str]:
        usage = total_usage(stats.usage.values())
        return [
            percent(hit_tokens(usage), usage.lookup_tokens),
            f"{usage.lookups:,}",
            f"{sum(tier.entries for tier in stats.tiers):,}",
            size(sum(map(used_bytes, stats.tiers))),
            size(sum(tier.budget_bytes for tier in stats.tiers)),
            f"{stats.sessions:,}",
            f"{stats.claims:,}",
        ]

    table = _targets_table(answers, numbers, cells)
    lines: list[RenderableType] = [table]
    found = _answered(answers).values()
    total = total_usage(usage for answer in found for usage in answer.usage.values())
    if total.lookups:
        lines.append(Text.assemble("all of them: ", tokens_line(total)))
    return Group(*lines, *_notices(answers), *_errors(answers))


def _check_view(answers: Answers[pb.CheckResponse]) -> RenderableType:
    lines: list[RenderableType] = []
    for target, answer in _answered(answers).items():
        lines += [Text(target, "bold"), check_view(answer)]
    return Group(*lines, *_errors(answers))


def _targets_table(
    answers: Answers[pb.StatsResponse],
    numbers: Sequence[str],
    cells: Callable[[str, pb.StatsResponse], Sequence[str]],
) -> Table:
    """A row for each daemon: its health, `cells`, which are `numbers`, and how full it is."""
    table = make_table(f"daemon|health|>{'|>'.join(numbers)}|full")
    for target, answer in answers.items():
        if isinstance(answer, PrefixdError):
            table.add_row(target, Text("no answer", "bold red"), *[""] * len(numbers), "")
        else:
            full = " ".join(
                f"{label_of(Tier, tier.tier)} {percent(used_bytes(tier), tier.budget_bytes)}"
                for tier in answer.tiers
            )
            table.add_row(target, health_text(answer), *cells(target, answer), full)
    return table


def _cells(rates: Rates) -> list[str]:
    return [
        percent(rates.hit_tokens, rates.lookup_tokens),
        f"{rates.lookups_per_s:,.0f}",
        *(size(count) for count in rates[3:]),
    ]


def _notices(answers: Answers[pb.StatsResponse]) -> list[Text]:
    return [
        line
        for target, answer in _answered(answers).items()
        for line in notice_lines(answer, f"{target}: ")
    ]


def _answered(answers: Answers[R]) -> dict[str, R]:
    return {
        target: answer for target, answer in answers.items() if not isinstance(answer, PrefixdError)
    }


def _errors(answers: Mapping[str, object]) -> list[Text]:
    return [
        Text(f"{target}: {answer}", "bold red")
        for target, answer in answers.items()
        if isinstance(answer, PrefixdError)
    ]


def _json_of(answers: Mapping[str, object]) -> dict[str, object]:
    each = {
        target: {"error": answer.name, "message": str(answer)}
        if isinstance(answer, PrefixdError)
        else answer
        for target, answer in answers.items()
    }
    return {"targets": each}


def _exit_on_silence(answers: Mapping[str, object]) -> None:
    exit_if(_errors(answers), ExitCode.UNREACHABLE)
