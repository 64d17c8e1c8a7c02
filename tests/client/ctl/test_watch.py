"""What `prefixctl watch` and `prefixctl publish-kv-events` print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, SaveReason, Tier
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.keys import Key
from tests.support.daemon import private_daemon
from tests.support.warm import WARM

KEYS = [Key(bytes([n]) * 32) for n in range(4)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        with Client(daemon.address, label="model-x") as client:
            for of, tier in zip(KEYS, (Tier.RAM, Tier.SHM, Tier.DISK, Tier.RAM), strict=True):
                item = SaveItem(of, b"bytes", 1, token_ids=[7])
                assert all(client.save_many([item], tier=tier, reason=SaveReason.EVICT))
        yield daemon


def run(daemon: PrivateDaemon, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--address", daemon.address])
    assert result.exit_code == code, result.output
    return result.output


def test_everything_that_is_there(daemon: PrivateDaemon) -> None:
    first, *lines, last = run(daemon, "watch", "--once").splitlines()
    assert first == "everything that is there follows"
    assert sorted(lines) == sorted(
        f"+ {of.hex()} {tier:4} 1 tokens, 5 bytes"
        for of, tier in zip(KEYS, ("ram", "shm", "disk", "ram"), strict=True)
    )
    assert last.startswith("that is all until now (event ")


def test_one_tier_as_json(daemon: PrivateDaemon) -> None:
    said = run(daemon, "watch", "--once", "--tier", "shm", "--json")
    first, entry, last = map(json.loads, said.splitlines())
    assert first == {"version": 1, "event": "cleared", "why": ""}
    assert entry["event"] == "published"
    assert (entry["key"], entry["tier"], entry["namespace"]) == (KEYS[1].hex(), "shm", "model-x")
    assert (entry["reason"], entry["parent"]) == ("evict", None)
    assert last["event"] == "synced"


def test_what_comes_and_goes_is_a_line_each(daemon: PrivateDaemon) -> None:
    run_main = "from prefixd.client.ctl.main import main; main()"
    command = [*WARM, "-c", run_main, "watch", "--tier", "ram"]
    with subprocess.Popen(
        [*command, "--address", daemon.address], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("that is all"):
            pass
        run(daemon, "delete", KEYS[3].hex())
        assert process.stdout.readline() == f"- {KEYS[3].hex()} ram\n"
        process.kill()


def test_nobody_to_watch(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", "--address", f"unix:{tmp_path}/nobody"])
    assert result.exit_code == ExitCode.UNREACHABLE
    assert f"the daemon at unix:{tmp_path}/nobody can't be watched: " in result.output


def test_what_publishing_needs_is_said(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefixd.client.ctl.kv_events", None)
    said = run(daemon, "publish-kv-events", code=ExitCode.BAD_INPUT)
    assert "pip install pyzmq msgspec" in said


def test_a_place_where_nobody_can_listen(daemon: PrivateDaemon) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    pytest.importorskip("msgspec", reason="msgspec is not installed")
    said = run(daemon, "publish-kv-events", "--bind", "tcp://nowhere", code=ExitCode.BAD_INPUT)
    assert "can't publish at tcp://nowhere: invalid argument; write tcp://HOST:PORT" in said
