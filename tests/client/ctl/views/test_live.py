"""What a live replay shows while it runs and at the end."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from prefixd.client.ctl.live import run_live
from prefixd.client.ctl.views import progress
from prefixd.client.ctl.views.live import figures, totals_view
from prefixd.client.lab.live_replay import Totals
from prefixd.client.lab.replayer import LiveOptions, RequestOutcome
from prefixd.client.lab.trace import TraceReader, write_trace
from prefixd.client.lab.workloads import generate
from tests.support.daemon import private_daemon


def shown(totals: Totals, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(totals_view(totals, "live replay of a trace"))
    return file.getvalue()


def some() -> Totals:
    totals = Totals(wall_seconds=2.0, rpcs=Counter(Claim=3, Read=0))
    totals.add(
        RequestOutcome(
            prompt_tokens=1000,
            hit_tokens=512,
            hit_blocks=1,
            verified_bytes=2**20,
            saves=Counter(saved=7, no_room=1),
            saved_bytes=7 * 2**20,
            durations_ns={"walk": 1_000_000, "save": 2_500_000},
        )
    )
    return totals


def test_the_line_while_it_runs() -> None:
    assert figures(Totals()) == "hit rate -  0B/s verified  0B/s saved  0 mismatches"
    totals = some()
    totals.unavailable_requests = 4
    assert figures(totals) == (
        "hit rate 51.2 %  512KiB/s verified  3.5MiB/s saved  0 mismatches  4 unavailable"
    )


@pytest.mark.parametrize("width", [60, 100])
def test_the_tables_in_the_end(width: int) -> None:
    text = shown(some(), width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("live replay of a trace", "51.20 %", "(512 of 1,000 tokens)", "7 saved"):
        assert words in text
    assert "3 Claim" in text
    assert "Read" not in text
    assert "claim " not in text, "a step that nobody took has no row"
    assert text.endswith("0 mismatches\n")


def test_everything_that_went_wrong_is_told() -> None:
    totals = some()
    totals.add(RequestOutcome(mismatches=["block 5 at 2 has other bytes"], lost_blocks=3))
    totals.interrupted = totals.gave_up = True
    totals.workers_lost, totals.reconnects, totals.unavailable_requests = 2, 9, 8
    text = shown(totals)
    for words in (
        "stopped before the end",
        "gave up",
        "2 workers died",
        "9 reconnects",
        "8 requests without an answer",
        "3 claimed blocks that never arrived whole",
        "- block 5 at 2 has other bytes",
    ):
        assert words in text
    assert text.endswith("\n1 mismatches\n")


@pytest.mark.parametrize("limit", [None, 15])
def test_a_terminal_gets_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """The bar counts requests if their number is known, else bytes of the file."""
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, generate("chatbot", requests=20))
    file = io.StringIO()
    monkeypatch.setattr(
        progress,
        "make_console",
        lambda *, stderr: Console(file=file, force_terminal=stderr, width=100),
    )
    with private_daemon() as daemon:
        totals = run_live(TraceReader(trace, limit=limit), LiveOptions(daemon.address))
    assert totals.requests == (limit or 20)
    assert "100%" in file.getvalue()
    assert "0 mismatches" in file.getvalue()
