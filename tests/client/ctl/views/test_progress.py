"""Progress bars pass items on unchanged, and draw nothing into pipes."""

import sys
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.text import Text

from prefixd.client.ctl.views import progress
from prefixd.client.lab.trace import Request, TraceReader, write_trace


class Terminal(StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def looked_at(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard error a terminal. To be called in the test itself, because pytest replaces the
    stream between fixtures and test."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_reading_passes_the_items_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looked_at(monkeypatch)
    path = tmp_path / "t.jsonl"
    requests = [Request(n, 512, 1, (n,)) for n in range(2000)]
    write_trace(path, requests)
    assert list(progress.reading(TraceReader(path), "reading the trace")) == requests
    assert "reading the trace" in terminal.getvalue()


def test_counting_passes_the_items_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looked_at(monkeypatch)
    assert list(progress.counting(iter(range(1000)), 1000, "making")) == list(range(1000))
    assert "1000/1000" in terminal.getvalue()
    assert list(progress.counting([], 0, "nothing")) == []


def test_rereading_reads_again_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looked_at(monkeypatch)
    path = tmp_path / "t.jsonl"
    requests = [Request(n, 512, 1, (n,)) for n in range(10)]
    write_trace(path, requests)
    again = progress.Rereading(TraceReader(path), "one pass", "another")
    for _ in range(3):
        assert list(again) == requests
    assert "one pass" in terminal.getvalue()
    assert "another" in terminal.getvalue()


class Step(NamedTuple):
    progress_permille: int


def test_a_whole_has_a_bar_where_a_person_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = looked_at(monkeypatch)
    steps = [Step(250), Step(1_000)]
    assert list(progress.permille_bar(iter(steps), "verifying", repr)) == steps
    assert "verifying" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_a_whole_has_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    steps = [Step(250), Step(1_000)]
    assert list(progress.permille_bar(iter(steps), "verifying", lambda _: "so far")) == steps
    assert pipe.getvalue() == "verifying: 25%, so far\nverifying: 100%, so far\n"


def test_a_pipe_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    assert list(progress.counting(range(600), 600, "making")) == list(range(600))
    assert pipe.getvalue() == ""


def test_a_terminal_is_drawn_over_and_a_pipe_gets_every_view() -> None:
    texts = ["first", "second", "third"]
    for terminal in (True, False):
        file = StringIO()
        to = Console(file=file, force_terminal=terminal, width=100)
        views = iter(texts)
        with progress.live_view(to, lambda views=views: Text(next(views))) as refresh:  # type: ignore[misc]
            refresh()
            refresh()
        assert all(text in file.getvalue() for text in texts)
        assert ("\x1b[" in file.getvalue()) is terminal
