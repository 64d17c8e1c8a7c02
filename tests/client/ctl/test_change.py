"""Changing a running daemon from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

KEY = Key(b"\xab" * 32)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


def run(daemon: PrivateDaemon, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--address", daemon.address])
    assert result.exit_code == code, result.output
    return result.stdout


def test_delete_drops_one_entry_that_nobody_holds(daemon: PrivateDaemon) -> None:
    with Client(daemon.address, label="test") as client:
        client.save_many([SaveItem(KEY, b"bytes", 5)], tier=Tier.RAM)
        with client.claim([KEY]):
            assert "pinned" in run(daemon, "delete", "abababab", code=ExitCode.PROBLEM)
        assert run(daemon, "delete", KEY.hex(), "--dry-run") == f"{KEY.hex()} would go\n"
        assert run(daemon, "delete", "abababab") == f"{KEY.hex()}: deleted\n"
        assert client.exists([KEY]) == [False]
        assert "absent" in run(daemon, "delete", KEY.hex(), code=ExitCode.PROBLEM)
        assert run(daemon, "delete", KEY.hex(), "--dry-run", code=ExitCode.PROBLEM) == ""
    with daemon.admin() as admin:
        eventually(lambda: admin.stats().usage["test"].lookups)


def test_a_client_that_was_kicked_comes_back(daemon: PrivateDaemon) -> None:
    with Client(daemon.address, name="kicked") as client:
        assert client.wait_connected()
        (session,) = json.loads(run(daemon, "sessions", "--json"))["sessions"]
        run(daemon, "kick", str(session["session_id"]))
        eventually(lambda: client.counters["sessions"] == 2)
        for gone in (session["session_id"], 2**64):
            run(daemon, "kick", str(gone), code=ExitCode.PROBLEM)


def test_the_configuration_of_a_running_daemon(daemon: PrivateDaemon) -> None:
    shown = run(daemon, "config", "show")
    assert "ram.budget = 8MiB\n" in shown
    assert "sessions.max_pinned_share = 0.75\n" in shown
    options = json.loads(run(daemon, "config", "show", "--json"))["options"]
    assert options["ram.budget"] == "8MiB"
    assert run(daemon, "config", "diff") == "nothing differs\n"
    assert run(daemon, "config", "reload") == "nothing differs\n"
    assert json.loads(run(daemon, "config", "diff", "--json")) == {
        "version": 1,
        "changed": [],
        "warnings": [],
    }


def test_a_tier_is_resized_until_the_next_start(daemon: PrivateDaemon) -> None:
    try:
        said = run(daemon, "tier", "resize", "ram", "4MiB")
        assert said.startswith("ram has 4MiB now\n")
        assert "4MiB stay with the daemon until it is started again" in said
        assert "until the next start" in said
        (tier, *_) = json.loads(run(daemon, "stats", "--json"))["tiers"]
        assert (tier["budget_bytes"], tier["kept_bytes"]) == (4 * 2**20, 4 * 2**20)
        (changed,) = json.loads(run(daemon, "config", "diff", "--json"))["changed"]
        assert (changed["option"], changed["running"], changed["configured"]) == (
            "ram.budget", "4MiB", "8MiB",
        )  # fmt: skip
        assert not changed["live"]
        run(daemon, "tier", "resize", "ram", "16MiB", code=ExitCode.BAD_INPUT)
        run(daemon, "tier", "resize", "ram", "lots", code=ExitCode.BAD_INPUT)
    finally:
        run(daemon, "tier", "resize", "ram", "8MiB")
    assert run(daemon, "config", "diff") == "nothing differs\n"


def test_drain_and_resume(daemon: PrivateDaemon) -> None:
    other = Key(b"\xcd" * 32)
    with Client(daemon.address) as client:
        client.save_many([SaveItem(other, b"bytes", 5)], tier=Tier.RAM)
        try:
            with client.claim([other]) as claim:
                assert claim
                said = run(daemon, "drain", "--within", "50ms", code=ExitCode.PROBLEM)
                assert "not drained yet: 1 claims" in said
                health = ["health", "--address", daemon.address]
                eventually(lambda: CliRunner().invoke(app, health).exit_code == ExitCode.PROBLEM)
            said = run(daemon, "drain", "--within", "10s")
            assert said == "drained: nothing is held any more; it stays so until `drain --resume`\n"
            assert client.claim([other]).miss is not None
        finally:
            assert run(daemon, "drain", "--resume") == "serving again\n"

        def served() -> bool:
            with client.claim([other]) as hit:
                return bool(hit)

        eventually(served)
    run(daemon, "drain", "--resume", "--stop", code=ExitCode.BAD_INPUT)


def test_the_log_level(daemon: PrivateDaemon) -> None:
    assert run(daemon, "log-level", "debug") == "debug; it was info before\n"
    assert "log.level" in run(daemon, "config", "diff")
    assert "log.level" in run(daemon, "config", "reload"), "back to what is configured"
    assert run(daemon, "config", "diff") == "nothing differs\n"
    run(daemon, "log-level", "loud", code=ExitCode.BAD_INPUT)


def test_a_drained_daemon_can_end() -> None:
    with private_daemon() as daemon:
        assert "the daemon ends" in run(daemon, "drain", "--stop")
        assert daemon._process is not None
        assert daemon._process.wait(60) == 0


def test_what_a_namespace_saved_is_cleared(daemon: PrivateDaemon) -> None:
    keys = {
        label: [Key(bytes([n, len(label)]) * 16) for n in range(5)] for label in ("one", "other")
    }
    for label, its_keys in keys.items():
        with Client(daemon.address, label=label) as client:
            for tier in (Tier.RAM, Tier.SHM):
                some = its_keys[:3] if tier is Tier.RAM else its_keys[3:]
                client.save_many([SaveItem(key, b"bytes", 5) for key in some], tier=tier)
    assert "namespace   one" in run(daemon, "inspect", keys["one"][0].hex())
    with Client(daemon.address, label="reader") as client:
        with client.claim(keys["one"][3:4]) as hit:
            assert hit
            asked = run(daemon, "clear", "--namespace", "one", code=ExitCode.BAD_INPUT)
            assert asked == "", "nobody can answer here"
            said = run(daemon, "clear", "--namespace", "one", "--dry-run", code=ExitCode.PROBLEM)
            assert said == "one: 5 entries would be dropped (20KiB)\n1 stay: they are being read\n"
            assert client.exists(keys["one"]) == [True] * 5
            said = run(daemon, "clear", "--namespace", "one", "--yes", code=ExitCode.PROBLEM)
            assert said == "one: 4 entries dropped (16KiB)\n1 stay: they are being read\n"
        assert client.exists(keys["one"]) == [False] * 3 + [True, False]
        assert run(daemon, "clear", "-y", "--namespace", "one", "--tier", "ram").startswith(
            "one: 0 "
        )
        assert run(daemon, "clear", "-y", "--namespace", "one").startswith("one: 1 ")
        assert client.exists(keys["other"]) == [True] * 5
    run(daemon, "clear", "-y", "--namespace", "no label", code=ExitCode.BAD_INPUT)
    run(daemon, "clear", code=ExitCode.BAD_INPUT)


def test_entries_of_an_earlier_start_are_of_no_known_namespace() -> None:
    with private_daemon() as daemon:
        with Client(daemon.address, label="one") as client:
            client.save_many([SaveItem(KEY, b"bytes", 5)], tier=Tier.SHM)
        daemon.stop()
        daemon.start()
        said = run(daemon, "clear", "-y", "--namespace", "one")
        assert "1 entries came back from an earlier start: whose they are is not known" in said
        assert "not known" in run(daemon, "inspect", KEY.hex())
