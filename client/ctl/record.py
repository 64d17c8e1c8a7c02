"""`prefixctl trace record`: what the clients of a running daemon look up, as a trace."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import lab
from .command import Ctl, size_option, time_option
from .failures import bad_input, exit_if
from .output_files import STDOUT, ForceOption, show_result, warn

if TYPE_CHECKING:
    from ...proto.errors import PrefixdError
    from .connection import AdminConnection

DEFAULT_TRACE_BYTES: Final = 2**30
#: How long after its end a recording takes what was looked up before. Clients send four times a
#: second.
TAIL_S: Final = 0.5


def record(
    ctl: Ctl,
    output: lab.TraceOutputOption,
    sample: Annotated[
        float, typer.Option(help="The share of prompts to record, by their first blocks.")
    ] = 1.0,
    duration_s: Annotated[
        float | None, time_option("End after this time (default: with Ctrl-C).", "--for")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="End after so many requests.")
    ] = None,
    max_size: Annotated[
        int, size_option("End when the trace has this size; with --keep, begin another file.")
    ] = DEFAULT_TRACE_BYTES,
    keep: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Write files with numbers (trace.1.jsonl, ...) and keep the last N; 0: one file.",
        ),
    ] = 0,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens",
            min=1,
            help="Tokens per block, for look-ups that say neither this nor how many tokens they "
            "stand for (default: leave them out).",
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Record what the clients of a running daemon look up, as a trace for `replay` and the others.

    The daemon asks its clients, which send what they look up: times, lengths, and
    ids that are hashes under a secret which ends with the recording. So a trace has
    no text and no key, and two recordings have different ids. Nothing is recorded
    at other times, and one recording runs at a time.

    Not recorded: look-ups that don't name the blocks of a prompt (vLLM's, and those
    of whole states), and clients that are no Python clients of this version. Their
    numbers are shown.
    """
    from ..lab.recorded import piece_name
    from .views.lab import recorded_view

    with bad_input():
        first = piece_name(output, 1) if keep else output
        if not 0.001 <= sample <= 1:
            raise ValueError(f"a sample is a share of 0.001 to 1, not {sample}")
    lab.check_trace_output(ctl, first, force=force)
    with ctl.connect() as daemon, bad_input():
        data, problem = _recorded(
            daemon, output, sample, duration_s, limit, max_size, keep, block_tokens
        )
    show_result(ctl, data, lambda: recorded_view(data), stderr=output == STDOUT)
    warn(recording_notes(data))
    if problem is not None:
        raise problem
    exit_if(not data["requests"])


def _recorded(
    daemon: AdminConnection,
    output: str,
    sample: float,
    duration_s: float | None,
    limit: int | None,
    max_bytes: int,
    keep: int,
    block_tokens: int | None,
) -> tuple[dict[str, Any], PrefixdError | None]:
    """Record until it ends. Returns the result, and why the daemon ended it, if it did. Raises
    PrefixdError if nothing came."""
    from ...proto.errors import PrefixdError
    from ..lab.recorded import LookupOrder, TraceFiles

    counts = Counter[str]()
    order = LookupOrder(block_tokens)
    started_s = time.monotonic()
    end_s = math.inf if duration_s is None else started_s + duration_s
    problem = None
    sessions = recording = most = 0

    def write(now_s: float | None) -> bool:
        """Whether there is room for more."""
        for request, size in order.ready(now_s):
            if not files.write(request, size):
                return False
            counts["requests"] += 1
            counts["blocks"] += len(request.hash_ids)
            counts["prompt_tokens"] += request.input_length
            if counts["requests"] == limit:
                return False
        return True

    with TraceFiles(output, max_bytes, keep) as files, interruptible() as interrupted:
        try:
            with closing(daemon.record(round(1000 * sample))) as responses:
                for response in responses:
                    order.take(response, time.time())
                    counts["dropped"] += response.dropped
                    counts["unnamed"] += response.unnamed
                    sessions, recording = response.sessions, response.recording
                    most = max(most, recording)
                    now_s = time.monotonic()
                    if interrupted.is_set():
                        end_s = min(end_s, now_s)
                    if not write(time.time()) or now_s >= end_s + TAIL_S:
                        break
        except PrefixdError as raised:
            problem = raised
        if not files.full and counts["requests"] != limit:
            write(None)
    if problem is not None and not counts["requests"]:
        raise problem
    return {
        "output": list(files.paths) if keep else output,
        "seconds": time.monotonic() - started_s,
        "sample": sample,
        **{name: counts[name] for name in ("requests", "blocks", "prompt_tokens")},
        "hit_blocks": order.hit_blocks,
        "full": files.full,
        "dropped": counts["dropped"],
        "unnamed": counts["unnamed"],
        "untold": order.untold,
        "sessions": sessions,
        "recording_sessions": recording,
        "most_recording_sessions": most,
    }, problem


def recording_notes(data: Mapping[str, Any]) -> list[str]:
    """What a user of a recorded trace should know, one sentence each."""
    notes = []
    if not data["requests"]:
        notes.append("nothing was recorded, so no file was written")
    if data["full"]:
        notes.append("the recording ended because the trace reached --max-size")
    silent = data["sessions"] - data["recording_sessions"]
    if silent:
        notes.append(f"{silent:,} of {data['sessions']:,} clients did not record: they are of "
                     "another language, or of a version that can't")  # fmt: skip
    if data["unnamed"]:
        notes.append(f"{data['unnamed']:,} look-ups are not in the trace, because they don't name "
                     "the blocks of a prompt: vLLM's, or those of whole states")  # fmt: skip
    if data["untold"]:
        notes.append(f"{data['untold']:,} look-ups are not in the trace, because they don't say "
                     "how many tokens they stand for: give --block-tokens")  # fmt: skip
    if data["dropped"]:
        notes.append(f"{data['dropped']:,} look-ups were dropped, because too many came at once: "
                     "give a --sample")  # fmt: skip
    return notes


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that is set by Ctrl-C, or by SIGTERM, in place of what they do. A second one does
    that."""
    asked = threading.Event()
    before: dict[int, Any] = {}

    def ask(number: int, _frame: object) -> None:
        asked.set()
        signal.signal(number, before[number])

    here = threading.current_thread() is threading.main_thread()
    for number in (int(signal.SIGINT), int(signal.SIGTERM)) if here else ():
        before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
