"""Commands over traces: `trace generate`, `trace convert`, `analyze` and `simulate`.

All commands over traces share the options that are defined here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .command import Ctl, size_option
from .failures import ExitCode, bad_input, fail
from .output_files import (
    STDOUT,
    ForceOption,
    OutputOption,
    check_new,
    show_result,
    warn,
    write_text,
)

if TYPE_CHECKING:
    from ..lab.trace import RequestReader, TraceColumns

T = TypeVar("T")
Name = TypeVar("Name", bound=StrEnum)

SHARING: Final = "What the nodes share; without any of these, nothing"
PROFILE_NAMES: Final = "chatbot|multi-turn|rag|code|batch|random"


# ---- options

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A trace in the Mooncake format, compressed or not; - reads standard input. "
        "`prefixctl trace convert` makes one from other files.",
        show_default=False,
    ),
]
TraceOutputOption = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Where to write the trace; .gz and .zst are compressed, - is standard output.",
        show_default=False,
    ),
]
BlockTokensOption = Annotated[int, typer.Option("--block-tokens", min=1, help="Tokens per block.")]
KnownBlockTokensOption = Annotated[
    int | None,
    typer.Option(
        "--block-tokens", min=1, help="Tokens per block (default: what the trace says or shows)."
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Read at most this many requests.")
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Count bad lines and go on instead of stopping.")
]
BlockBytesOption = Annotated[
    int | None, size_option("Size of a block's KV state: shows capacities in bytes, too.")
]
PoliciesOption = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="NAME,...", help="Policies (default: all five, and the optimum)."
    ),
]
CapacityBlocksOption = Annotated[
    str | None,
    typer.Option(metavar="N,...", help="Capacities to replay at, in blocks: 4096,30000."),
]
CapacityOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE,...", help="The same in bytes, with --block-bytes: 64GiB,1TiB."),
]
CapacityFractionOption = Annotated[
    str | None,
    typer.Option(metavar="SHARE,...", help="The same as shares of the different blocks."),
]
TouchOrderOption = Annotated[
    str,
    typer.Option(
        metavar="in-order|root-mru",
        help="The order in which a request uses its blocks: root first, or root last.",
    ),
]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core).")]


# ---- commands


def generate(
    ctl: Ctl,
    profile: Annotated[str, typer.Option(metavar=PROFILE_NAMES, help="The workload.")],
    output: TraceOutputOption,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, help="How many requests.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    sessions_per_s: Annotated[
        float | None,
        typer.Option(help="How many sessions begin per second (default: the profile's own rate)."),
    ] = None,
    block_tokens: BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    force: ForceOption = False,
) -> None:
    """Make an example trace for a workload.

    [bold]chatbot[/]: one product, a long system prompt, short chats.
    [bold]multi-turn[/]: long working sessions.
    [bold]rag[/]: questions over retrieved documents.
    [bold]code[/]: completions while typing.
    [bold]batch[/]: one instruction over many documents.
    [bold]random[/]: nothing in common.
    """
    from ..lab import workloads
    from ..lab.analyze import Analyzer
    from ..lab.trace import write_trace
    from .views.lab import written
    from .views.progress import counting

    check_trace_output(ctl, output, force=force)
    with bad_input():
        made = workloads.generate(
            profile,
            requests=requests,
            seed=seed,
            block_tokens=block_tokens,
            sessions_per_s=sessions_per_s,
        )
        analyzer = Analyzer(block_tokens)
        write_trace(output, analyzer.watch(counting(made, requests, f"making {profile}")))
    data = {"profile": profile, "seed": seed, "output": output, **analyzer.finish().to_json()}
    show_result(ctl, data, lambda: written(data), stderr=output == STDOUT)


def convert(
    ctl: Ctl,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Files, folders or globs of JSON in one of the formats of `trace formats`, "
            "compressed or not; - reads standard input.",
            show_default=False,
        ),
    ],
    output: TraceOutputOption,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens",
            min=1,
            help="Tokens per block to write (default: those of the blocks in FILE; "
            f"{DEFAULT_BLOCK_TOKENS} for text and token ids).",
        ),
    ] = None,
    bytes_per_token: Annotated[
        float,
        typer.Option("--text-bytes-per-token", help="How many bytes of text count as one token."),
    ] = 4.0,
    image_tokens: Annotated[int, typer.Option(help="How many tokens an image counts as.")] = 1024,
    source_block_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the blocks whose ids are in FILE (default: what the records say, or "
            "their lengths show)."
        ),
    ] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(
            metavar="s|ms|us|ns",
            help="Unit of the times in FILE (default: what the fields, the format or the sizes of "
            "the numbers say).",
        ),
    ] = None,
    requests_per_s: Annotated[
        float, typer.Option(help="How fast requests without a time arrive.")
    ] = 1.0,
    dialogues_in_flight: Annotated[
        int, typer.Option(min=1, help="How many dialogues without times take turns at once.")
    ] = 32,
    first_turn_only: Annotated[
        bool, typer.Option("--first-turn-only", help="Only the first question of a dialogue.")
    ] = False,
    separate_ids: Annotated[
        bool,
        typer.Option("--separate-ids", help="Block ids of different files are different blocks."),
    ] = False,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    force: ForceOption = False,
) -> None:
    """Turn request files of another kind into a trace, sorted by time.

    Reads block ids, token ids, text, messages and dialogues: [bold]prefixctl trace
    formats[/] lists the formats. The ids of blocks are chained SHA-256 hashes of
    what FILE has, and of the model, adapter, cache salt and tenant, which
    separate caches. Whatever FILE does not say is said on standard error.
    """
    from ..lab.analyze import Analyzer
    from ..lab.convert import Converter
    from ..lab.request_parts import ConvertOptions
    from ..lab.trace import write_trace
    from .views.lab import written
    from .views.progress import reading

    check_trace_output(ctl, output, force=force)
    with bad_input():
        options = ConvertOptions(
            block_tokens,
            source_block_tokens,
            bytes_per_token,
            requests_per_s,
            time_unit,
            first_turn_only,
            dialogues_in_flight,
            image_tokens,
            separate_ids,
        )
        converter = Converter(sources, options, limit=limit, skip_bad=skip_bad)
        if output != STDOUT and any(Path(f).resolve() == Path(output).resolve()
                                    for f in converter.files):  # fmt: skip
            raise ValueError(f"{output} is a file to read; write the trace to another one")
        requests = iter(reading(converter, "converting"))
        first = next(requests)  # the block size is known when everything is read
        analyzer = Analyzer(converter.block_tokens)
        write_trace(output, analyzer.watch(chain([first], requests)), converter.block_tokens)
    data = {
        "source": converter.path,
        "output": output,
        "formats": dict(converter.formats),
        "bad_records": converter.bad,
        "assumptions": converter.assumptions(),
        **analyzer.finish().to_json(),
    }
    show_result(ctl, data, lambda: written(data), stderr=output == STDOUT)
    warn(converter.assumptions() + converter.warnings())


def formats(ctl: Ctl) -> None:
    """List the formats that `trace convert` reads, with an example of each."""
    from ..lab.formats import readable
    from .views.lab import formats_view

    rows = [
        {"name": row.name, "about": row.about, "example": row.example.splitlines()}
        for row in readable()
    ]
    show_result(ctl, {"formats": rows}, lambda: formats_view(rows))


def analyze(
    ctl: Ctl,
    trace: TraceArgument,
    block_tokens: KnownBlockTokensOption = None,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Show how much of a trace a prefix cache can reuse.

    Unique, shared and reusable blocks, shared-prefix lengths, reuse distances,
    popularity, session depth, and what a cache without limits would save.
    """
    from ..lab.analyze import Analyzer
    from ..lab.trace import TraceReader
    from .views.lab import analysis as analysis_view
    from .views.progress import reading

    check_new(output, force=force)
    with bad_input():
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        analyzer = Analyzer(reader.block_tokens)
        for _ in analyzer.watch(reading(reader, "analysing")):
            pass
    data = {
        "path": trace,
        "bad_lines": reader.bad,
        "assumptions": reader.assumptions(),
        **analyzer.finish().to_json(),
    }
    show_result(ctl, data, lambda: analysis_view(data), output, force=force)
    warn(reader.assumptions() + reader.warnings() + collision_notes(trace, analyzer.collisions))


def simulate(
    ctl: Ctl,
    trace: TraceArgument,
    nodes: Annotated[int, typer.Option(metavar="N", help="How many nodes.")] = 16,
    route: Annotated[
        str,
        typer.Option(
            metavar="round-robin|hash|least-loaded|cache-aware", help="Which node gets a request."
        ),
    ] = "round-robin",
    capacity_blocks: Annotated[
        int, typer.Option(metavar="N", help="Blocks that each node holds.")
    ] = 4096,
    shared_blocks: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Blocks that a shared tier holds; 0 means no shared tier.",
            rich_help_panel=SHARING,
        ),
    ] = 0,
    write: Annotated[
        str,
        typer.Option(
            metavar="all|second-use",
            help="What enters the shared tier: every block that was not found, or only blocks that "
            "were used before.",
            rich_help_panel=SHARING,
        ),
    ] = "all",
    peer_reads: Annotated[
        bool,
        typer.Option(
            "--peer-reads", help="Nodes also read from each other.", rich_help_panel=SHARING
        ),
    ] = False,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="KV state of a token, all layers, as 128KiB: shows bytes and bandwidth.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also simulate every route: without sharing, with peer reads, with a shared tier.",
        ),
    ] = False,
    block_tokens: KnownBlockTokensOption = None,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with all results.")
    ] = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """Say what a fleet of nodes would hit.

    Each node has its own LRU. A request's blocks are looked up from the root on: a
    block in its node's LRU is a local hit, one in the shared tier's LRU a shared
    hit and, with --peer-reads, one in another node's LRU a peer hit. The first
    block in none of them ends the look-up. Then the places that gave blocks count
    these as used, all blocks of the request enter the node's LRU, and the blocks
    that --write names enter the shared one; always leaf first, root last.

    [bold]round-robin[/]: request r (from 0) goes to node r mod N.
    [bold]hash[/]: by the CRC32 of the first two blocks.
    [bold]least-loaded[/]: to the node that prefilled the fewest tokens lately.
    [bold]cache-aware[/]: to the node that holds the longest run, if that is worth it
    and its load is not far above the mean; else to the least loaded.
    """
    from ...proto.units import parse_bytes
    from ..lab.breakdown import Requests
    from ..lab.fleet import Fleet, Route, WriteRule, fleet_document, simulate_fleet
    from ..lab.report import render_fleet
    from ..lab.trace import TraceColumns, TraceReader
    from .views.lab import fleet_view
    from .views.progress import counting, reading

    check_new(output, html, force=force)
    with bad_input():
        requested = Fleet(
            nodes,
            capacity_blocks,
            parse_name("route", route, Route),
            shared_blocks,
            parse_name("write policy", write, WriteRule),
            peer_reads,
        )
        token_bytes = None if bytes_per_token is None else parse_bytes(bytes_per_token)
        if token_bytes is not None and token_bytes < 1:
            raise ValueError(f"a token must have at least one byte, got {bytes_per_token}")
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        timed = Requests(reading(reader, "reading"))
        block_size = reader.block_tokens
        columns = TraceColumns.load(timed)
        others = requested.alternatives() if compare else []
        fleets = dict.fromkeys([requested, *others])
        results = {
            fleet: simulate_fleet(columns, fleet, block_tokens=block_size)
            for fleet in counting(fleets, len(fleets), "simulating")
        }
        data = fleet_document(
            title_of(trace),
            {**columns.summary(block_size).to_json(), "duration_s": timed.duration_s},
            results[requested],
            compared=[results[fleet] for fleet in others],
            block_tokens=block_size,
            bytes_per_token=token_bytes,
        )
    if html is not None:
        write_text(html, render_fleet(data), force=force)
    rows = (data, *data["compared"])
    show_result(ctl, data, lambda: fleet_view(data), output, force=force, rows=rows)
    warn(notes_on(reader, columns))


# ---- values of options


def check_trace_output(ctl: Ctl, output: str, *, force: bool) -> None:
    """Exit with a sentence if a trace can't be written there."""
    check_new(output, force=force)
    if output == STDOUT and ctl.as_json:
        fail("the trace and the JSON cannot both go to standard output", ExitCode.BAD_INPUT)


def notes_on(reader: RequestReader, columns: TraceColumns) -> list[str]:
    """How a trace was understood, and what a user of the result should know."""
    notes = reader.assumptions() + reader.warnings()
    return notes + collision_notes(reader.path, columns.collisions)


def collision_notes(path: str, collisions: int) -> list[str]:
    """A note on ids that stand for several prefixes."""
    if not collisions:
        return []
    return [
        f"{path}: {collisions:,} requests have an id after another id than before, so ids do not "
        "stand for whole prefixes; if several traces with ids of their own were put together, "
        "their hits are not real: convert the traces with --separate-ids"
    ]


def title_of(trace: str) -> str:
    """The name of a trace in reports."""
    return "standard input" if trace == STDOUT else Path(trace).name


def parse_list(what: str, text: str | None, kind: Callable[[str], T]) -> list[T]:
    """The values of a comma-separated list, each once. None is an empty list.

    Raises ValueError that says `what` an item should be.
    """
    values = []
    for part in (text or "").split(","):
        try:
            if part.strip():
                values.append(kind(part.strip()))
        except ValueError:
            raise ValueError(f"{part.strip()!r} is no {what}") from None
    if text is not None and not values:
        raise ValueError(f"no {what} given")
    return list(dict.fromkeys(values))


def parse_name(what: str, text: str, names: type[Name]) -> Name:
    """The member with this value. Raises ValueError with the known values."""
    try:
        return names(text)
    except ValueError:
        raise ValueError(f"unknown {what} {text!r}, known are {', '.join(names)}") from None
