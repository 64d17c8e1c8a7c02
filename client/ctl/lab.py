"""The policy lab's commands: make, convert and analyse traces; curves and advice.

Only `replay-live` and `curve-live` need a daemon. Every one takes `--json FILE` (`-`: standard
output) beside the tables that people read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .command import Ctl, ExitCode, fail, make_console, print_json
from .options import parse_size

if TYPE_CHECKING:
    from rich.console import RenderableType

LAB = "Traces and policies"
STDOUT = "-"
PROFILE_NAMES = "chatbot|multi-turn|rag|code|batch|random"

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A trace in the Mooncake format: plain, gzip or zstd; - reads standard input.",
        show_default=False,
    ),
]
OutputOption = Annotated[
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
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Read at most this many requests.")
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Count bad lines and go on instead of stopping.")
]
BlockBytesOption = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=parse_size,
        help="Size of a block's KV state: shows capacities in bytes too.",
    ),
]
PoliciesOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME,...", help="Policies; unless named, all five."),
]
CapacityBlocksOption = Annotated[
    str | None,
    typer.Option(metavar="N,...", help="Where to replay them, in blocks: 4096,30000."),
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
    str, typer.Option(metavar="in-order|root-mru", help="How a request touches its blocks.")
]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Processes; unless named, one a core.")]
JsonFileOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - prints it."),
]


class JsonCommand(TyperCommand):
    """Lets `--json` stand alone for `--json -`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for argument, following in zip(args, [*args, "--"][1:], strict=True):
            given.append(argument)
            if argument == "--json" and following.startswith("-") and following != STDOUT:
                given.append(STDOUT)
        return super().parse_args(ctx, given)


def register(app: typer.Typer) -> None:
    """Add `trace` and `analyze`."""
    trace = typer.Typer(no_args_is_help=True, help="Make and convert request traces.")
    trace.command("generate", cls=JsonCommand)(generate)
    trace.command("convert", cls=JsonCommand)(convert)
    app.add_typer(trace, name="trace", rich_help_panel=LAB)
    app.command("analyze", cls=JsonCommand, rich_help_panel=LAB)(analyze)


def generate(
    ctx: typer.Context,
    profile: Annotated[str, typer.Option("--profile", metavar=PROFILE_NAMES, help="The workload.")],
    output: OutputOption,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same bytes.")] = 0,
    sessions_per_s: Annotated[
        float | None,
        typer.Option(help="How many sessions begin in a second; each profile has its own rate."),
    ] = None,
    block_tokens: BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    json_file: JsonFileOption = None,
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
    from . import lab_views as views
    from .progress import counting

    target = json_target(ctx, json_file, taken=output == STDOUT)
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
    show(data, target, lambda: views.written(data), stderr=output == STDOUT)


def convert(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSONL or a JSON array: token ids, text, messages, dialogues; gzip and zstd "
            "too; - reads standard input.",
            show_default=False,
        ),
    ],
    output: OutputOption,
    block_tokens: BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    bytes_per_token: Annotated[
        float, typer.Option(help="Text has no tokens: how many bytes stand for one.")
    ] = 4.0,
    source_block_tokens: Annotated[
        int | None,
        typer.Option(help="Block size of hash_ids in FILE: 16 for Bailian, else --block-tokens."),
    ] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(
            metavar="s|ms|us",
            help="Unit of the times in FILE: ms for Mooncake's, else s.",
        ),
    ] = None,
    requests_per_s: Annotated[
        float, typer.Option(help="How fast requests without a time arrive.")
    ] = 1.0,
    dialogues_in_flight: Annotated[
        int, typer.Option(min=1, help="Dialogues without times take turns, this many at once.")
    ] = 32,
    first_turn_only: Annotated[
        bool, typer.Option("--first-turn-only", help="Only the first question of a dialogue.")
    ] = False,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    json_file: JsonFileOption = None,
) -> None:
    """Turn a request file of another kind into a trace.

    Reads what vLLM and SGLang benchmarks, OpenAI requests and batch files,
    ShareGPT dialogues, Bailian traces and gateway logs hold. Blocks get their ids
    from chained SHA-256 hashes of token ids or, without a tokeniser, of the
    text's bytes.
    """
    from ..lab.analyze import Analyzer
    from ..lab.convert import Converter
    from ..lab.records import ConvertOptions
    from ..lab.trace import write_trace
    from . import lab_views as views
    from .progress import reading

    target = json_target(ctx, json_file, taken=output == STDOUT)
    with bad_input():
        if source != STDOUT and Path(source).resolve() == Path(output).resolve():
            raise ValueError(f"{output} is the file to read; write the trace to another one")
        options = ConvertOptions(
            block_tokens,
            source_block_tokens,
            bytes_per_token,
            requests_per_s,
            time_unit,
            first_turn_only,
            dialogues_in_flight,
        )
        converter = Converter(source, options, limit=limit, skip_bad=skip_bad)
        analyzer = Analyzer(block_tokens)
        write_trace(output, analyzer.watch(reading(converter, "converting")))
    data = {
        "source": source,
        "output": output,
        "shapes": dict(converter.shapes),
        "bad_records": converter.bad,
        **analyzer.finish().to_json(),
    }
    warn(converter.warnings())
    show(data, target, lambda: views.written(data), stderr=output == STDOUT)


def analyze(
    ctx: typer.Context,
    trace: TraceArgument,
    block_tokens: BlockTokensOption = DEFAULT_BLOCK_TOKENS,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    json_file: JsonFileOption = None,
) -> None:
    """Show what a trace offers a prefix cache.

    Unique, shared and reusable blocks, shared-prefix lengths, reuse distances,
    popularity, session depth, and what a cache without limits would save.
    """
    from ..lab import analyze as analysis
    from ..lab.trace import TraceReader
    from . import lab_views as views
    from .progress import reading

    target = json_target(ctx, json_file)
    with bad_input():
        reader = TraceReader(trace, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)
        found = analysis.analyze(reading(reader, "analysing"), block_tokens=block_tokens)
    data = {"path": trace, "bad_lines": reader.bad, **found.to_json()}
    warn(reader.warnings())
    show(data, target, lambda: views.analysis(data))


@contextmanager
def bad_input() -> Iterator[None]:
    """What the user gave is wrong: one sentence, exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(str(error), ExitCode.BAD_INPUT)


def warn(notes: Iterable[str]) -> None:
    """Say on standard error what the results don't."""
    for note in notes:
        typer.echo(f"prefixctl: note: {note}", err=True)


def json_target(ctx: typer.Context, json_file: str | None, *, taken: bool = False) -> str | None:
    """Where the JSON goes: what --json says, after the command's name or before it.

    `taken`: the trace itself goes to standard output, so the JSON cannot.
    """
    before_name = cast(Ctl, ctx.find_root().obj or Ctl()).as_json
    target = STDOUT if json_file is None and before_name else json_file
    if taken and target == STDOUT:
        fail("the trace and the JSON cannot both go to standard output", ExitCode.BAD_INPUT)
    return target


def show(
    data: dict[str, Any],
    target: str | None,
    view: Callable[[], RenderableType],
    *,
    stderr: bool = False,
) -> None:
    """Write the JSON to `target` and, unless that is standard output, show the view."""
    if target == STDOUT:
        print_json(data)
        return
    if target is not None:
        write_text(target, json.dumps(data, indent=2) + "\n")
    make_console(stderr=stderr).print(view())


def write_text(path: str, text: str) -> None:
    """Write a file, or leave with one sentence about why not."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        cannot_write(path, error)


def cannot_write(path: str, error: OSError) -> NoReturn:
    """Leave with one sentence about why a file cannot be written."""
    why = (error.strerror or str(error)).lower()
    fail(f"{path}: cannot be written: {why}", ExitCode.BAD_INPUT)
