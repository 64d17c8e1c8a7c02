"""`prefixctl bench`: measures the real client beside memcpy, hashing and other caches."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final, cast

import typer

from .command import Ctl, make_console, parse_size, versioned
from .output_files import STDOUT, ForceOption, cannot_write, check_new, opened

if TYPE_CHECKING:
    from ..bench.bench_report import Rows, TextTable
    from ..bench.run import BenchPlan, Note
    from ..bench.samples import Row
    from .private import PrivateDaemon

PARTS_HELP: Final = "ram shm disk data grpc walk many evict"
#: The default slab of a daemon.
SLAB_BYTES: Final = 64 * 2**10
#: More disk for the records beside the arena, and so that a full tier still admits saves.
DISK_SPARE_BYTES: Final = 64 * 2**20
MIN_IN_FLIGHT_BYTES: Final = 2**30


def bench(
    ctl: Ctl,
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PART",
            help=f"What to measure: {PARTS_HELP} (default: all; with --address all but evict).",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[
        str, typer.Option(metavar="N,...", help="How many blocks to move at once.")
    ] = "1,8,48",
    block_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE,...",
            help="The size of a block. The largest size is measured in full, the others only with "
            "the largest batch.",
        ),
    ] = "64KiB,192KiB,640KiB,5MiB",
    repeats: Annotated[
        int, typer.Option(min=1, help="Samples of each operation; the median counts.")
    ] = 8,
    verify: Annotated[
        str,
        typer.Option(
            "--check-crc",
            metavar="always|disk|never",
            help="When to check the CRC32C of restored blocks.",
        ),
    ] = "always",
    clients: Annotated[
        int, typer.Option(min=1, max=256, help="How many processes restore at once (many).")
    ] = 8,
    pinned: Annotated[
        int, typer.Option(min=0, help="How many claimed entries evictions must skip (evict).")
    ] = 100_000,
    compare: Annotated[
        str | None,
        typer.Option(
            "--peers", metavar="FILE", help="Rows of other caches to show, as JSON lines."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Also write the rows into a file, as JSON lines."
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Measure saves, restores, views, searches and evictions.

    Starts private daemons with budgets for the batches, in temporary directories,
    and moves blocks between ordinary memory and every tier with the real client, by
    turns with memcpy. Compares every byte afterwards. With --address, measures a
    running daemon instead; what is saved there evicts other entries, and stays
    until it is evicted itself.
    """
    from ..bench.bench_report import Rows, read_rows, tables

    *sizes, largest = sorted({parse_size(size) for size in block_bytes.split(",")})
    plan = _plan(ctl, parts, batches, largest, repeats, verify, clients, pinned)
    plans = [plan, *(plan.of_blocks(size) for size in sizes)] if plan.movers else [plan]
    peers = Rows() if compare is None else read_rows(Path(compare))
    check_new(output, force=force)
    measured: list[Row] = []
    with _output(ctl, output, force=force) as write, _notes() as note:
        for each in plans:
            for row in _measure(ctl, each, note):
                measured.append(row.of_blocks(each.block_bytes))
                write(json.dumps(versioned(measured[-1].as_dict())))
    if not ctl.as_json and output != STDOUT:
        found = Rows(measured)
        shown = [
            table
            for each in plans
            for table in tables(
                found.of_size(each.block_bytes),
                peers.of_size(each.block_bytes, or_unsaid=each is plan),
                each.block_bytes,
            )
        ]
        _show(shown, plan, measured, peers, markdown)


def _plan(
    ctl: Ctl,
    parts: list[str] | None,
    batches: str,
    block_bytes: int,
    repeats: int,
    verify: str,
    clients: int,
    pinned: int,
) -> BenchPlan:
    from ..bench.run import PARTS, BenchPlan
    from ..restores import VERIFY_CHOICES, Verify

    chosen = tuple(dict.fromkeys(parts or PARTS))
    if unknown := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"no such part: {', '.join(sorted(unknown))}; {PARTS_HELP}")
    if ctl.given_address is not None:
        if parts and "evict" in parts:
            raise typer.BadParameter("evict goes without --address: it fills daemons of its own")
        chosen = tuple(part for part in chosen if part != "evict")
    if verify not in VERIFY_CHOICES:
        raise typer.BadParameter(f"--check-crc is one of {', '.join(VERIFY_CHOICES)}")
    try:
        numbers = tuple(sorted({int(number) for number in batches.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"--batches: {batches!r} is no list of numbers") from None
    return BenchPlan(chosen, numbers, block_bytes, repeats, cast(Verify, verify), clients, pinned)


# ---- daemons


def _measure(ctl: Ctl, plan: BenchPlan, note: Note) -> Iterator[Row]:
    from ..bench.run import measure
    from .private import unwound_by_signals

    if ctl.given_address is not None:
        with ctl.connect() as admin:
            yield from measure(ctl.address, admin, plan, note)
        return
    with unwound_by_signals():
        if any(part != "evict" for part in plan.parts):
            note("starting a daemon")
            with _daemon(tier_flags(plan)) as daemon, daemon.admin() as admin:
                yield from measure(daemon.address, admin, plan, note)
        if "evict" in plan.parts:
            yield from _evictions(plan, note)


def tier_flags(plan: BenchPlan) -> list[str]:
    """Options of a daemon with budgets for everything in the plan but evictions. Parts that name no
    tier use RAM."""
    arena_bytes = plan.entries_bytes(SLAB_BYTES)
    disk_bytes = arena_bytes + DISK_SPARE_BYTES
    in_flight_bytes = max(MIN_IN_FLIGHT_BYTES, arena_bytes)
    return [
        f"--ram.budget={arena_bytes}",
        f"--shm.budget={arena_bytes if 'shm' in plan.parts else 0}",
        f"--disk.budget={disk_bytes if 'disk' in plan.parts else 0}",
        *(["--server.tcp=127.0.0.1:0"] if "data" in plan.parts else []),
        "--sessions.max_pinned_share=1",
        "--sessions.max_reserved_share=1",
        f"--disk.max_in_flight={in_flight_bytes}",
        *(f"--{tier}.slab={SLAB_BYTES}" for tier in ("ram", "shm")),
    ]


def _evictions(plan: BenchPlan, note: Note) -> list[Row]:
    from ..bench.run import (
        EVICTED,
        OPS,
        STORED_BYTES,
        measure_evictions,
        wait_until_secured,
    )
    from ..client import Client

    flags = [
        f"--ram.budget={(plan.pinned + 2 * EVICTED) * STORED_BYTES}",
        f"--ram.slab={STORED_BYTES}",
        "--shm.budget=0",
        "--disk.budget=0",
        # One client fills the tier and claims nearly all of it.
        "--sessions.max_pinned_share=1",
        "--sessions.max_reserved_share=1",
    ]
    with ExitStack() as stack:
        daemons = []
        for _ in OPS:
            daemon = stack.enter_context(_daemon(flags))
            admin = stack.enter_context(daemon.admin())
            wait_until_secured(admin)
            daemons.append((stack.enter_context(Client(daemon.address)), admin))
        return measure_evictions(daemons, plan, note)


@contextmanager
def _daemon(flags: list[str]) -> Iterator[PrivateDaemon]:
    from .private import PrivateDaemon, temporary_directories

    with (
        temporary_directories("bench") as directories,
        PrivateDaemon(*directories, flags) as daemon,
    ):
        yield daemon


# ---- output


@contextmanager
def _output(ctl: Ctl, output: str | None, *, force: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a row to where it is wanted."""
    with ExitStack() as stack:
        shown = ctl.as_json or output == STDOUT
        file: IO[str] | None = None
        if output is not None and output != STDOUT:
            file = stack.enter_context(opened(output, force=force))

        def write(row: str) -> None:
            if shown:
                print(row, flush=True)
            if file is not None and output is not None:
                try:
                    print(row, file=file, flush=True)
                except OSError as problem:
                    cannot_write(output, problem)

        yield write


@contextmanager
def _notes() -> Iterator[Note]:
    """Yields a function that shows what is measured at the moment, if standard error is a
    terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("measuring") as status:
        yield lambda what: status.update(f"measuring: {what}")


def _show(
    found: list[TextTable], plan: BenchPlan, rows: list[Row], peers: Rows, markdown: bool
) -> None:
    from ..bench.bench_report import as_markdown
    from .views.text_tables import make_table

    conditions = (
        f"medians of {plan.repeats} samples or more, by turns; CRC32C checked: {plan.verify}"
    )
    notes = [machine(), conditions, *_drift(rows, peers)]
    if markdown:
        print("\n\n".join(["\n".join(f"- {one}" for one in notes), *map(as_markdown, found)]))
        return
    console = make_console()
    for table in found:
        shown = make_table("|>".join(table.columns), title=table.title)
        for line in table.rows:
            shown.add_row(*line)
        console.print(shown)
    for one in notes:
        console.print(one, style="dim")


def machine() -> str:
    """The machine that everything was measured on."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # no such file, or no such line, on some machines
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def _drift(rows: list[Row], peers: Rows) -> list[str]:
    """The speed of memcpy when the peers were measured, compared with now."""
    from ..bench.transfers import MEMCPY

    ratios = []
    for row in rows:
        theirs = peers.find(MEMCPY, "restore", row.blocks) if row.peer == MEMCPY else None
        if theirs is not None and row.gb_per_s and theirs.gb_per_s:
            ratio = theirs.gb_per_s / row.gb_per_s
            ratios.append(f"{ratio:.2f} x at {row.blocks}")
    return [f"memcpy beside the peers, of memcpy here: {', '.join(ratios)}"] if ratios else []
