"""prefixctl as it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from prefixd import __version__
from prefixd.client.ctl.main import app
from prefixd.proto import kernel

COMMANDS = {
    "demo", "replay", "stats", "ls", "inspect", "claims", "reservations", "sessions", "preview",
    "check", "health", "version", "evict", "gc", "trace", "analyze",
    "simulate",
}  # fmt: skip


def test_every_command_has_help_that_says_what_it_does() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for name in COMMANDS:
        assert f" {name} " in listed
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0
        assert "Usage" in shown.stdout


def test_nothing_at_all_shows_the_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "Usage" in result.output


def test_a_command_that_does_not_exist_is_bad_input() -> None:
    assert CliRunner().invoke(app, ["evcit"]).exit_code == 2


def test_the_console_script(tmp_path: Path) -> None:
    """Without a daemon: a sentence, an exit code, and no traceback."""
    script = Path(sys.executable).with_name("prefixctl")
    done = subprocess.run(
        [script, "stats", "--address", f"{tmp_path}/nobody"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"prefixctl: no daemon answers at unix:{tmp_path}/nobody")
    assert done.stderr.count("\n") == 1


def test_the_version_without_a_daemon() -> None:
    result = CliRunner().invoke(app, ["version"], env={"PREFIXD_ADDRESS": "/nowhere/at/all"})
    assert result.exit_code == 0
    assert result.stdout.startswith(f"prefixctl {__version__}\n")
    assert f"  kernel: {kernel.FORM}\n" in result.stdout
    assert "no daemon answers" in result.stdout


def test_the_version_as_a_flag() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"prefixctl {__version__}\n")


def test_evict_asks_for_a_tier() -> None:
    for flags in ([], ["--tier", "ram", "--all-tiers"]):
        result = CliRunner().invoke(app, ["evict", "--bytes", "1GiB", *flags])
        assert result.exit_code == 2
        assert "say which --tier, or --all-tiers" in result.stderr
