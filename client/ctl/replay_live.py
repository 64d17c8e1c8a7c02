"""`prefixctl replay-live`: runs the replay, shows how it goes and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ...proto.vocabulary import Tier
from ..lab.live import LiveReplay, Totals
from ..lab.replayer import STEPS, LiveOptions
from ..lab.trace import TraceReader
from . import render
from .command import make_console
from .connection import AdminConnection


def tiers_of(daemon: AdminConnection) -> tuple[Tier, ...]:
    """The tiers that the daemon has. Raises DaemonUnavailable when there is no daemon."""
    return tuple(Tier(t.tier) for t in daemon.stats().tiers)


def run_live(reader: TraceReader, options: LiveOptions) -> Totals:
    """Replay with a progress bar on standard error, if a person is looking."""
    with _progress(reader) as on_progress:
        return LiveReplay(reader, options, on_progress).run()


@contextmanager
def _progress(reader: TraceReader) -> Iterator[Callable[[Totals], None]]:
    console = make_console(stderr=True)
    with Progress(
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        # Of the requests when their number is known, else of the bytes of the file.
        total = reader.limit if reader.limit is not None else reader.total_bytes
        task = progress.add_task("", total=total, figures="")

        def update(totals: Totals) -> None:
            done = totals.requests if reader.limit is not None else reader.consumed_bytes
            progress.update(task, completed=done, figures=figures(totals))

        yield update


def figures(totals: Totals) -> str:
    """How it goes, in one line: `hit rate 8.9 %  412MiB/s verified  20MiB/s saved ...`."""
    seconds = totals.wall_seconds or 1.0
    line = (
        f"hit rate {render.percent(totals.hit_tokens, totals.prompt_tokens)}  "
        f"{render.size(totals.verified_bytes / seconds)}/s verified  "
        f"{render.size(totals.saved_bytes / seconds)}/s saved  "
        f"{totals.mismatches:,} mismatches"
    )
    if totals.unavailable_requests:
        line += f"  {totals.unavailable_requests:,} unavailable"
    return line


def totals_view(totals: Totals, title: str) -> RenderableType:
    """The tables at the end, the line about mismatches last."""
    tables = (_summary(totals, title), _latency_table(totals))
    return Group(*tables, *troubles(totals), mismatch_line(totals))


def troubles(totals: Totals) -> list[Text]:
    """What did not go as it should, but for the number of mismatches."""
    lines = []
    if totals.interrupted:
        lines.append(Text("stopped before the end", style="yellow"))
    if totals.gave_up:
        lines.append(Text("the daemon was away for too long; gave up", style="bold red"))
    if totals.workers_lost:
        lines.append(Text(f"{totals.workers_lost} workers died", style="bold red"))
    return lines + [Text(f"- {sentence}", style="red") for sentence in totals.described]


def mismatch_line(totals: Totals) -> Text:
    """`0 mismatches`, in its colour."""
    style = "bold red" if totals.mismatches else "bold green"
    return Text(f"{totals.mismatches:,} mismatches", style=style)


def _summary(totals: Totals, title: str) -> Table:
    seconds = totals.wall_seconds
    per_second = totals.requests / seconds if seconds else 0.0
    saves = ", ".join(f"{count:,} {status}" for status, count in sorted(totals.saves.items()))
    rpcs = ", ".join(f"{count:,} {name}" for name, count in sorted(totals.rpcs.items()) if count)
    rows = [
        ("requests", f"{totals.requests:,} in {seconds:.1f} s ({per_second:,.0f}/s)"),
        (
            "hit rate by tokens",
            f"{100 * totals.hit_rate:.2f} %  "
            f"({totals.hit_tokens:,} of {totals.prompt_tokens:,} tokens)",
        ),
        (
            "hit rate by requests",
            f"{100 * totals.request_hit_rate:.2f} %  "
            f"({totals.requests_with_hit:,} of {totals.requests:,})",
        ),
        ("verified", f"{render.size(totals.verified_bytes)}, every byte of {totals.hit_blocks:,} "
                     "blocks"),
        ("saved", f"{render.size(totals.saved_bytes)}; blocks: {saves or 'none'}"),
        ("rpcs", rpcs or "none"),
    ]  # fmt: skip
    if totals.unavailable_requests or totals.reconnects:
        rows.append(
            (
                "daemon away",
                f"{totals.unavailable_requests:,} requests without an answer, "
                f"{totals.reconnects:,} reconnects",
            )
        )
    if totals.lost_blocks:
        rows.append(("lost", f"{totals.lost_blocks:,} claimed blocks that never arrived whole"))
    table = Table(box=None, show_header=False, pad_edge=False, title=title, title_style="bold",
                  title_justify="left")  # fmt: skip
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _latency_table(totals: Totals) -> Table:
    numbers = ("calls", "p50 ms", "p99 ms")
    table = render.make_table("latency", *numbers, right=numbers)
    for step in STEPS:
        latencies = totals.latencies[step]
        if latencies.count:
            quantiles = (latencies.quantile(0.5), latencies.quantile(0.99))
            table.add_row(step, f"{latencies.count:,}", *[f"{ns / 1e6:.3f}" for ns in quantiles])
    return table
