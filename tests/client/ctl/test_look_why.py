"""What `prefixctl why` says."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, Tier
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

KEY = Key(b"\xab" * 32)
OTHER = Key(b"\xab" * 31 + b"\xac")


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        with Client(daemon.address, name="engine", label="model-x") as client:
            client.save_many([SaveItem(KEY, b"bytes", 5)], tier=Tier.RAM)
        yield daemon


def run(daemon: PrivateDaemon, *arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(
        app, [*arguments, "--address", daemon.address]
    )
    assert result.exit_code == code, result.output
    return result.stdout


def test_why(daemon: PrivateDaemon) -> None:
    said = run(daemon, "why", "ababa")
    assert said.startswith("it is there, in ram, for ")
    assert "saved (cold)" in said or "saved (finish)" in said
    assert "engine (pid" in said
    assert "model-x" in said
    run(daemon, "evict", "--bytes", "4KiB", "--tier", "ram")
    said = run(daemon, "why", KEY.hex())
    assert said.startswith("it is not there: evicted by an operator ")
    found = json.loads(run(daemon, "why", KEY.hex(), "--json"))
    assert [event["what"] for event in found["events"]] == ["saved", "evicted"]
    assert "nothing is remembered of it" in run(daemon, "why", "cdcd")
    assert "nothing is remembered of it" in run(daemon, "why", "abac0"), "half a byte counts"
    for wrong in ("ab", "xyz123", "ab" * 33):
        run(daemon, "why", wrong, code=ExitCode.BAD_INPUT)


def test_misses_are_told_apart(daemon: PrivateDaemon) -> None:
    with Client(daemon.address, label="misser") as client:
        client.save_many([SaveItem(OTHER, b"bytes", 5)], tier=Tier.SHM)
        run(daemon, "evict", "--bytes", "4KiB", "--tier", "shm")
        for missing in (OTHER, OTHER, Key(b"\x01" * 32)):
            with client.longest_run([missing], prompt_tokens=10) as hit:
                assert not hit
    with daemon.admin() as admin:
        usage = eventually(lambda: admin.stats().usage.get("misser"))
    told = {(m.reason, m.tier, m.cause): (m.tokens, m.lookups) for m in usage.missed}
    assert told == {
        (pb.MISS_REASON_EVICTED, Tier.SHM, pb.EVICTION_CAUSE_OPERATOR): (20, 2),
        (pb.MISS_REASON_NEVER_SAVED, 0, 0): (10, 1),
    }
    said = run(daemon, "stats")
    assert "0.0 % hit, 100.0 % missed of 30 looked up" in said
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "evicted from shm by an operator 20 66.7 %" in lines
    assert "never saved 10 33.3 %" in lines
    found_nothing = "3 found nothing: 2 evicted from shm by an operator, 1 never saved"
    assert found_nothing in " ".join(lines)
