"""`prefixctl top` and `stats --watch`, on a real daemon."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.look import follow
from prefixd.client.ctl.main import app
from prefixd.proto.errors import DaemonUnavailable
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

KEY = Key(b"\xab" * 32)


def test_once() -> None:
    with private_daemon() as daemon, Client(daemon.address, label="model-x") as client:
        client.save_many([SaveItem(KEY, b"bytes", 5)], tier=Tier.RAM)
        with client.claim([KEY]) as held:
            assert held
            command = ["top", "--once", "--every", "50ms", "--address", daemon.address]
            shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, command)
            assert shown.exit_code == 0, shown.output
            for words in (
                "tokens",
                "ram",
                "slowest stages",
                "loop",
                "oldest claims",
                "claims 1",
            ):
                assert words in shown.stdout
            said = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
            stages = {stage["stage"]: sum(stage["times"]) for stage in said["stages"]}
            commits = {"commit shm", "commit disk", "sync disk"}
            assert set(stages) == {"claim", "save", "restore", "loop"} | commits
            assert stages["claim"] == 0, "none in between"


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def answers(admin: AdminConnection) -> bool:
    try:
        admin.stats()
    except DaemonUnavailable:
        return False
    return True


def test_watching_finds_a_daemon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_daemon() as daemon, daemon.admin(timeout_s=20) as admin:
        happens = iter(["nothing", "kill", "start", "nothing", "stop"])

        def sleep(_seconds: float) -> None:
            match next(happens):
                case "kill":
                    daemon.kill()
                case "start":
                    daemon.start()
                    # The channel waits up to half a second before it connects again.
                    eventually(lambda: answers(admin))
                case "stop":
                    raise Interrupted

        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr("prefixd.client.ctl.look.time", clock)
        file = io.StringIO()
        to = Console(file=file, width=120)
        with pytest.raises(Interrupted):
            follow(admin, to, 1.0)
    views = file.getvalue().split("tokens     no look-up")[1:]
    missed = [view for view in views if "does not answer; trying again" in view]
    assert len(views) == 5
    assert len(missed) == 1
    assert missed[0] is views[2]


def test_watching_nobody_says_so_at_once(tmp_path: Path) -> None:
    to = Console(file=io.StringIO(), width=120)
    with (
        AdminConnection(f"unix:{tmp_path}/nobody", 5) as admin,
        pytest.raises(DaemonUnavailable),
    ):
        follow(admin, to, 1.0)
