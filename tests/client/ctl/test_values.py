"""The help of every command names values as people write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from prefixd.client.ctl.main import app


def paths(command: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command, of groups too."""
    below = getattr(command, "commands", {})
    return [before, *(path for name, one in below.items() for path in paths(one, (*before, name)))]


@pytest.mark.parametrize("path", paths(get_command(app)), ids=" ".join)
def test_no_help_shows_a_type_of_python(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
    assert "--help" in shown
    assert not re.search(r"<\w", shown), shown
    assert "...}" not in shown, shown


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("kick", ["prefixctl kick [OPTIONS] {SESSION}"]),
        ("ls", ["--limit N [x>=0] Entries", "--tier ram|shm|disk Which"]),
        ("log-level", ["[OPTIONS] {LEVEL}", "LEVEL The lowest level to log: debug,"]),
        ("publish-kv-events", ["--topic TEXT"]),
    ],
)
def test_values_have_names(path: str, lines: list[str]) -> None:
    shown = CliRunner().invoke(app, [path, "--help"], env={"COLUMNS": "100"}).stdout
    shown = " ".join(shown.split())
    for line in lines:
        assert line in shown, shown
