"""Commands of prefixctl, run in the test's process on a daemon."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from prefixd.client.ctl.command import DOCUMENT_VERSION
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon


def run(daemon: PrivateDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--address", daemon.address, *arguments])


def run_json(daemon: PrivateDaemon, *arguments: str, code: int = ExitCode.OK) -> Any:
    """The document that a command writes with --json, without its version."""
    result = run(daemon, *arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert found.pop("version") == DOCUMENT_VERSION
    return found
