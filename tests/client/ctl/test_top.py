"""`prefixctl top --once`, on a real daemon."""

from __future__ import annotations

import json
import threading
from contextlib import suppress

from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.main import app
from prefixd.client.ctl.top import _follow
from prefixd.client.ctl.top_board import Board
from prefixd.proto.keys import Key
from tests.support.daemon import private_daemon

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
                "hit ratio",
                "ram",
                "slowest stages",
                "loop",
                "oldest claims",
                "claims 1",
            ):
                assert words in shown.stdout
            said = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
            stages = {stage["stage"]: sum(stage["times"]) for stage in said["stages"]}
            assert set(stages) == {"claim", "save", "commit shm", "commit disk", "loop"}
            assert stages["claim"] == 0, "none in between"


def test_it_goes_on_when_the_daemon_comes_back() -> None:
    with private_daemon() as daemon:
        board = Board(daemon.address)
        looks = []

        class Watched(AdminConnection):
            def oldest_claims(self, count: int) -> list:  # type: ignore[type-arg]
                looks.append(board.note)
                if len(looks) > 3:
                    raise KeyboardInterrupt
                return super().oldest_claims(count)

        def follow() -> None:
            with Watched(daemon.address, 1.0) as admin, suppress(KeyboardInterrupt):
                _follow(board, admin, 0.01)

        thread = threading.Thread(target=follow)
        thread.start()
        daemon.kill()
        daemon.start()
        thread.join()
        assert len(looks) == 4
