"""`prefixctl demo`: a private daemon, traffic made up on the spot, a crash, every byte verified."""

from __future__ import annotations

import io
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.units import format_bytes, parse_bytes
from ...proto.vocabulary import Tier, label_of
from ..lab.live_replay import LiveReplay, Totals
from ..lab.replayer import LiveOptions
from ..lab.workloads import generate
from .connection import AdminConnection
from .private import PrivateDaemon, temporary_directories, unwound_by_signals
from .views.live import figures, mismatch_line, troubles
from .views.operators import check_view, verify_view
from .views.progress import live_view
from .views.stats import activity_table
from .views.text_tables import size
from .views.top import Interval

#: So small that every tier has to evict.
BUDGETS: Final = {Tier.RAM: "96MiB", Tier.SHM: "128MiB", Tier.DISK: "160MiB"}
BLOCK_BYTES: Final = parse_bytes("256KiB")
BLOCK_TOKENS: Final = 512
PROFILE: Final = "multi-turn"
#: The share of the requests after which the daemon is killed.
KILLED_AFTER: Final = 0.6
#: Seconds between two samples of the daemon, on a terminal and where only lines can be printed.
DRAW_EVERY_S: Final = 0.25
LINE_EVERY_S: Final = 3.0
#: How long a worker waits for the next daemon.
_RECONNECT_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """How much to show."""

    requests: int
    workers: int
    seed: int


@dataclass(frozen=True, slots=True)
class Crash:
    """A daemon that was killed, and what the next one found."""

    pid: int
    #: From the kill until the next daemon served.
    away_s: float
    stats: pb.StatsResponse

    def sentence(self) -> str:
        """How soon the next daemon served, and what it recovered."""
        back = [
            f"{label_of(Tier, t.tier)} {t.recovered_entries:,} entries ({size(t.recovered_bytes)})"
            for t in self.stats.tiers
            if t.recovered_entries
        ]
        return (
            f"kill -9 {self.pid}: the next daemon served {self.away_s:.1f} s later and recovered "
            f"{' and '.join(back) or 'nothing'}"
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demonstration showed. `good`: no byte was wrong."""

    totals: Totals
    crash: Crash | None
    stats: pb.StatsResponse
    checked: pb.CheckResponse
    verified: pb.VerifyResponse

    @property
    def good(self) -> bool:
        return self.totals.good and not self.checked.problems and not self.verified.problems

    @property
    def restored_bytes_per_s(self) -> float:
        """The speed of one worker while it restored."""
        busy_ns = self.totals.latencies["restore"].total
        return self.totals.verified_bytes * 1e9 / busy_ns if busy_ns else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For `print_json`."""
        crash = self.crash
        return {
            "replay": self.totals.as_dict(),
            "restored_bytes_per_s": round(self.restored_bytes_per_s),
            "crash": None
            if crash is None
            else {
                "away_seconds": crash.away_s,
                "recovered_entries": sum(t.recovered_entries for t in crash.stats.tiers),
                "recovered_bytes": sum(t.recovered_bytes for t in crash.stats.tiers),
            },
            "stats": self.stats,
            "check": self.checked,
            "verify": self.verified,
        }


def run_demo(options: DemoOptions, console: Console, picture: Path | None = None) -> DemoResult:
    """The whole demonstration. Leaves nothing behind, however it ends, except for `picture`, an SVG
    of the last screen.

    Raises PrefixdError when the daemon can't be started, OSError when the picture can't be written.
    """
    with ExitStack() as stack:
        stack.enter_context(unwound_by_signals())
        directory, shm_directory = stack.enter_context(temporary_directories("demo"))
        console.print(_introduction(options))
        flags = [f"--{tier.label}.budget={budget}" for tier, budget in BUDGETS.items()]
        # Entries take whole slabs. Small ones waste little.
        flags += [f"--{tier.label}.slab=4KiB" for tier in BUDGETS]
        daemon = stack.enter_context(PrivateDaemon(directory, shm_directory, flags))
        admin = stack.enter_context(daemon.admin())
        show = _Show(console, daemon, admin, options)
        totals = show.replay()
        *_, verified = admin.verify()
        result = DemoResult(totals, show.crash, admin.stats(), admin.check(), verified)
        ending = _ending(result)
        console.print(ending)
        if picture is not None:
            _draw(picture, Group(_introduction(options), show.drawn(), ending))
        return result


class _Show:
    """The replay, the tiers as they fill, and the crash in the middle."""

    def __init__(
        self, console: Console, daemon: PrivateDaemon, admin: AdminConnection, options: DemoOptions
    ) -> None:
        self._console = console
        self._daemon = daemon
        self._admin = admin
        self._options = options
        self._board = Interval(daemon.address)
        self._totals = Totals()
        self._every_s = DRAW_EVERY_S if console.is_terminal else LINE_EVERY_S
        self._due_s = time.monotonic() + self._every_s
        self._note = ""
        self.crash: Crash | None = None

    def replay(self) -> Totals:
        options = self._options
        live = LiveOptions(
            address=self._daemon.address,
            workers=options.workers,
            tiers=tuple(BUDGETS),
            block_bytes=BLOCK_BYTES,
            block_tokens=BLOCK_TOKENS,
            in_place=True,
            reconnect_wait_s=_RECONNECT_WAIT_S,
        )
        requests = generate(PROFILE, requests=options.requests, seed=options.seed)
        with live_view(self._console, self._view) as self._refresh:
            totals = LiveReplay(requests, live, self._on_progress).run()
            self._sample(totals)
        return totals

    def _on_progress(self, totals: Totals) -> None:
        self._totals = totals
        if self.crash is None and totals.requests >= KILLED_AFTER * self._options.requests:
            self._kill()
        if time.monotonic() >= self._due_s:
            self._sample(totals)
            self._due_s = time.monotonic() + self._every_s

    def _sample(self, totals: Totals) -> None:
        self._totals = totals
        self._board.take(self._admin.stats(), (), time.monotonic())
        self._refresh()

    def _kill(self) -> None:
        """Kill the daemon and start the next one. The workers go on, and miss meanwhile."""
        self._sample(self._totals)
        pid, killed_s = self._daemon.pid, time.monotonic()
        self._daemon.kill()
        self._note = f"kill -9 {pid} ..."
        self._refresh()
        self._daemon.start()
        stats = self._admin.stats()
        self.crash = Crash(pid, time.monotonic() - killed_s, stats)
        self._note = self.crash.sentence()

    def _view(self) -> RenderableType:
        """The current state: drawn on a terminal, else as lines."""
        done, requests = self._totals.requests, self._options.requests
        if not self._console.is_terminal:
            lines = (
                f"{done:,} of {requests:,}  {figures(self._totals)}\n  {self._board.tiers_line()}"
            )
            return f"{lines}\n  {self._note}" if self._note else lines
        return Group(self.drawn(), Text(self._note, style="bold yellow"))

    def drawn(self) -> RenderableType:
        """How far the replay is, and the tiers."""
        done, requests = self._totals.requests, self._options.requests
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            ProgressBar(requests, done, width=30), f"{done:,} of {requests:,} requests"
        )
        return Group(progress, Text(figures(self._totals)), self._board.tiers_table())


def _introduction(options: DemoOptions) -> RenderableType:
    budgets = ", ".join(f"{tier.label} {budget}" for tier, budget in BUDGETS.items())
    return Group(
        Text.assemble(
            ("prefixd demo", "bold"),
            f"   {budgets}   {options.workers} workers   {format_bytes(BLOCK_BYTES)} of state for "
            f"{BLOCK_TOKENS} tokens",
        ),
        Text(
            f"{options.requests:,} requests of a made-up {PROFILE} workload: restore the longest "
            "cached prefix, compare every byte, save the rest.",
            style="dim",
        ),
        Text(),
    )


def _ending(result: DemoResult) -> RenderableType:
    """The results; the number of mismatches comes last."""
    totals = result.totals
    lines: list[RenderableType] = [activity_table(result.stats), *troubles(totals)]
    if result.crash is not None:
        lines.append(Text(result.crash.sentence()))
    lines += [check_view(result.checked), verify_view(result.verified)]
    look_up = totals.latencies["claim"]
    lines.append(
        Text.assemble(
            "gain: ",
            (f"{totals.hit_tokens:,} tokens not prefilled", "bold"),
            f" of {totals.prompt_tokens:,}, {size(totals.verified_bytes)} restored at ",
            (f"{size(result.restored_bytes_per_s)}/s", "bold"),
            " by each worker, ",
            (f"{look_up.quantile(0.5) / 1e3:,.0f} us a look-up", "bold"),
        )
    )
    lines.append(mismatch_line(totals))
    return Group(*lines)


def _draw(path: Path, what: RenderableType) -> None:
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make demo", style="bold"))
    console.print(what)
    path.write_text(console.export_svg(title="prefixd"))
