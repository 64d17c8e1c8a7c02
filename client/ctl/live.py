"""The tiers as they fill, which `demo` shows, and views that are redrawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from ...proto import prefixd_pb2 as pb
from . import messages, render

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Rates:
    """What a tier did per second between two samples."""

    hits: float = 0.0
    saved_bytes: float = 0.0
    evictions: float = 0.0


class TierBoard:
    """The tiers of one daemon: how full, how busy. Give it samples in order."""

    def __init__(self) -> None:
        self.stats: pb.StatsResponse | None = None
        self._at_s = 0.0
        self._rates: dict[int, Rates] = {}

    def take(self, stats: pb.StatsResponse, at_s: float) -> None:
        """A new sample, taken at `at_s` (monotonic)."""
        before = self.stats
        seconds = at_s - self._at_s
        if before is None or before.incarnation != stats.incarnation or seconds <= 0:
            self._rates = {}
        else:
            old = {t.tier: t for t in before.tiers}
            self._rates = {
                t.tier: _rates(old[t.tier], t, seconds) for t in stats.tiers if t.tier in old
            }
        self.stats, self._at_s = stats, at_s

    def rates(self, tier: int) -> Rates:
        """Between the last two samples; zero when there is only one."""
        return self._rates.get(tier, Rates())

    def __rich__(self) -> RenderableType:
        numbers = ("full", "budget", "entries", "hits", "evictions", "hits/s", "saved/s")
        table = render.make_table("tier", "", *numbers, right=numbers)
        table.caption = "bright: claimed   plain: cached   white: being saved"
        table.caption_justify = "left"
        for t in self.stats.tiers if self.stats is not None else ():
            rates = self.rates(t.tier)
            table.add_row(
                render.tier_name(t.tier),
                render.Bar.of_tier(t),
                render.percent(render.used_bytes(t), t.budget_bytes),
                render.size(t.budget_bytes),
                f"{t.entries:,}",
                f"{t.hits:,}",
                f"{t.evictions:,}",
                f"{rates.hits:,.0f}",
                render.size(rates.saved_bytes),
            )
        return table

    def line(self) -> str:
        """The same in one line, for logs and pipes."""
        if self.stats is None:
            return ""
        return "   ".join(
            f"{messages.tier_label(t.tier)} {render.percent(render.used_bytes(t), t.budget_bytes)}"
            f" full, {t.hits:,} hits, {t.evictions:,} evicted"
            for t in self.stats.tiers
        )


def _rates(old: pb.TierStats, new: pb.TierStats, seconds: float) -> Rates:
    return Rates(
        (new.hits - old.hits) / seconds,
        (new.saved_bytes - old.saved_bytes) / seconds,
        (new.evictions - old.evictions) / seconds,
    )


@contextmanager
def live_view(console: Console, view: Callable[[], RenderableType]) -> Iterator[Callable[[], None]]:
    """Redraw `view()` in place with every call of what this gives; into a pipe, print it again."""
    if not console.is_terminal:
        console.print(view())
        yield lambda: console.print(view())
        return
    with Live(view(), console=console, auto_refresh=False) as live:
        yield lambda: live.update(view(), refresh=True)
