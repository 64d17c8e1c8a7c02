"""`prefixctl demo`: a private daemon, traffic made up on the spot, and every byte verified."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.units import format_bytes, parse_bytes
from ...proto.vocabulary import Tier
from ..lab.generate import generate
from ..lab.live import LiveReplay
from ..lab.outcome import Totals
from ..lab.worker import LiveOptions
from . import messages, render
from .connection import AdminConnection
from .live import TierBoard, live_view
from .private import PrivateDaemon, temporary_directories, unwound_by_signals
from .replay_live import figures, totals_view

#: Small enough that every tier has to evict.
BUDGETS: Final = {Tier.RAM: "24MiB", Tier.SHM: "32MiB", Tier.DISK: "40MiB"}
BLOCK_BYTES: Final = parse_bytes("64KiB")
PROFILE: Final = "multi-turn"
#: Seconds between two looks at the daemon, where it can be drawn and where only lines can.
DRAW_EVERY_S: Final = 0.25
LINE_EVERY_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """How much to show."""

    requests: int
    workers: int
    seed: int


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What was seen; `good` when it is what has to be seen."""

    totals: Totals
    stats: pb.StatsResponse
    checked: pb.CheckResponse
    verified: pb.VerifyResponse

    @property
    def good(self) -> bool:
        return self.totals.good and not self.checked.problems and not self.verified.problems

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "replay": self.totals.as_dict(),
            "stats": messages.as_dict(self.stats),
            "check": messages.as_dict(self.checked),
            "verify": messages.as_dict(self.verified),
        }


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """The whole demonstration. Leaves nothing behind, however it ends.

    Raises PrefixdError when the daemon can't be started.
    """
    with ExitStack() as stack:
        stack.enter_context(unwound_by_signals())
        directory, shm_directory = stack.enter_context(temporary_directories("demo"))
        console.print(_introduction(options, directory))
        flags = [f"--{tier.label}.budget={budget}" for tier, budget in BUDGETS.items()]
        # A block takes whole slabs: its bytes and the head and tail of its record.
        flags += [f"--{tier}.slab=4KiB" for tier in ("ram", "shm")]
        daemon = stack.enter_context(PrivateDaemon(directory, shm_directory, flags))
        admin = stack.enter_context(daemon.admin())
        totals = _replay(console, admin, daemon.address, options)
        *_, verified = admin.verify()
        result = DemoResult(totals, admin.stats(), admin.check(), verified)
        console.print(_ending(result))
        return result


def _replay(console: Console, admin: AdminConnection, address: str, options: DemoOptions) -> Totals:
    """Replay, with the tiers in view."""
    requests = generate(PROFILE, requests=options.requests, seed=options.seed)
    live = LiveOptions(
        address=address,
        workers=options.workers,
        tiers=tuple(BUDGETS),
        block_bytes=BLOCK_BYTES,
        reconnect_wait_s=5.0,
    )
    board = TierBoard()
    picture = Picture(board, options.requests, drawn=console.is_terminal)
    every_s = DRAW_EVERY_S if console.is_terminal else LINE_EVERY_S
    due_s = time.monotonic() + every_s

    with live_view(console, picture) as refresh:

        def show(totals: Totals) -> None:
            board.take(admin.stats(), time.monotonic())
            picture.totals = totals
            refresh()

        def on_progress(totals: Totals) -> None:
            nonlocal due_s
            if time.monotonic() >= due_s:
                show(totals)
                due_s = time.monotonic() + every_s

        totals = LiveReplay(requests, live, on_progress).run()
        show(totals)
    return totals


class Picture:
    """The replay and the tiers at one moment: drawn, or as one line."""

    def __init__(self, board: TierBoard, requests: int, *, drawn: bool) -> None:
        self._board = board
        self._requests = requests
        self._drawn = drawn
        self.totals = Totals()

    def __call__(self) -> RenderableType:
        done = self.totals.requests
        if not self._drawn:
            return f"{done:,} of {self._requests:,}  {figures(self.totals)}\n  {self._board.line()}"
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            ProgressBar(self._requests, done, width=30), f"{done:,} of {self._requests:,} requests"
        )
        return Group(progress, figures(self.totals), self._board)


def _introduction(options: DemoOptions, directory: Path) -> RenderableType:
    budgets = ", ".join(f"{tier.label} {budget}" for tier, budget in BUDGETS.items())
    return Padding(
        Text.assemble(
            ("prefixd demo\n", "bold"),
            f"A private daemon with three small tiers ({budgets}) in {directory}. "
            f"{options.workers} client processes replay {options.requests:,} requests of a made-up "
            f"{PROFILE} workload, {format_bytes(BLOCK_BYTES)} of state for a block of 512 tokens. "
            "For each request a worker claims the longest run of its blocks that is cached, reads "
            "it, compares every byte with what it must be, and saves the blocks that were missing. "
            "The tiers are too small on purpose: the least recently used chains are evicted, leaf "
            "first.",
        ),
        (1, 0),
    )


def _ending(result: DemoResult) -> RenderableType:
    """What it came to; the line about mismatches last."""
    return Group(
        Text(),
        render.activity_table(result.stats),
        render.check_view(result.checked),
        render.verify_view(result.verified),
        Text(),
        totals_view(result.totals, "the replay"),
    )
