"""Several daemons on one screen. One of them does not answer, or is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner, Result

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.ctl.targets import FleetBoard
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DaemonUnavailable, PrefixdError
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon

NOWHERE = "unix:/nowhere/at/all"


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[PrivateDaemon]]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        made = [private_daemon("--sessions.heartbeat=50ms") for _ in range(2)]
        yield list(pool.map(stack.enter_context, made))


def ctl(targets: list[PrivateDaemon | str], *arguments: str) -> Result:
    addresses = [each if isinstance(each, str) else each.address for each in targets]
    return CliRunner().invoke(app, ["--targets", ",".join(addresses), *arguments])


def test_each_is_a_line_and_all_are_a_sum(daemons: list[PrivateDaemon]) -> None:
    for number, daemon in enumerate(daemons, 1):
        with Client(daemon.address) as client:
            key = Key(bytes([number]) * 32)
            client.save(key, b"state", tier=Tier.RAM, reason=SaveReason.EVICT, token_count=100)
            client.claim([key], prompt_tokens=100).release()
            client.claim([Key(bytes(32))], prompt_tokens=100)
        with daemon.admin() as admin:
            eventually(lambda admin=admin: admin.stats().usage)
    result = ctl([*daemons], "stats")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    for daemon in daemons:
        (line,) = [line for line in lines if line[:1] == [daemon.address]]
        assert line[1] == "serving"
        assert " ".join(line).endswith("shm 0.0 % disk 0.0 %")
    assert "of 400 looked up" in result.stdout
    whole = json.loads(ctl([*daemons], "--json", "stats").stdout)["targets"]
    assert [*whole] == [daemon.address for daemon in daemons]
    assert [int(each["tiers"][0]["entries"]) for each in whole.values()] == [1, 1]
    behind = ["stats", "--json", "--targets", ",".join(whole)]
    assert [*json.loads(CliRunner().invoke(app, behind).stdout)["targets"]] == [*whole]


def test_one_that_is_not_there_is_a_line_too(daemons: list[PrivateDaemon]) -> None:
    for command in ("stats", "check"):
        result = ctl([daemons[0], NOWHERE], command)
        assert result.exit_code == 3
        assert daemons[0].address in result.stdout
        assert f"{NOWHERE}: " in result.stdout
    found = json.loads(ctl([daemons[0], NOWHERE], "--json", "check").stdout)["targets"]
    assert found[NOWHERE]["error"] == "daemon_unavailable"
    assert "problems" not in found[NOWHERE]


def test_what_is_wrong_with_one_counts_more(
    daemons: list[PrivateDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ctl([*daemons], "check").exit_code == 0
    check = AdminConnection.check

    def damaged(self: AdminConnection) -> pb.CheckResponse:
        if self.address == daemons[1].address:
            return pb.CheckResponse(problems=["two of one"], problem_count=1, entries=3)
        return check(self)

    monkeypatch.setattr(AdminConnection, "check", damaged)
    result = ctl([*daemons, NOWHERE], "check")
    assert result.exit_code == 1
    assert "two of one" in result.stdout
    assert "everything adds up" in result.stdout


def test_top_is_a_line_each_and_a_sum(daemons: list[PrivateDaemon]) -> None:
    wide = CliRunner(env={"COLUMNS": "160"})
    addresses = ",".join([*(daemon.address for daemon in daemons), NOWHERE])
    looked = ["--targets", addresses, "top", "--once", "--every", "10ms"]
    shown = wide.invoke(app, looked)
    assert shown.exit_code == 3
    for words in (*(daemon.address for daemon in daemons), "all of them", "no answer", "brought/s"):
        assert words in shown.stdout
    said = json.loads(wide.invoke(app, ["--json", *looked]).stdout)["targets"]
    assert said[NOWHERE]["error"] == "daemon_unavailable"
    assert all(said[daemon.address]["health"] == "serving" for daemon in daemons)


def test_rates_are_of_what_came_between_two_looks(daemons: list[PrivateDaemon]) -> None:
    board = FleetBoard([daemon.address for daemon in daemons])
    first, second = daemons

    def look(at_s: float) -> None:
        answers: dict[str, pb.StatsResponse | PrefixdError] = {}
        for daemon in daemons:
            with daemon.admin() as admin:
                answers[daemon.address] = admin.stats()
        board.take(answers, at_s)

    look(0.0)
    with Client(first.address) as client:
        key = Key(b"\x77" * 32)
        client.save(key, bytes(4000), tier=Tier.RAM, reason=SaveReason.EVICT, token_count=10)
    look(2.0)
    assert board.boards[first.address].rates().saved_per_s >= 2000
    assert not board.boards[second.address].rates().saved_per_s
    board.take({first.address: DaemonUnavailable("it is gone")}, 3.0)
    assert isinstance(board.between()[first.address], PrefixdError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stats", "--targets", "/a,b"], "'b' is no address"),
        (["stats", "--targets", "/a,/b", "--address", "/c"], "without --address"),
        (["--targets", "/a,b", "stats"], "'b' is no address"),
        (["--targets", "/a,/b", "ls"], "--targets goes with stats, check, top"),
        (["--targets", "/a,/b", "stats", "--address", "/c"], "without --address"),
        (["--targets", "/a,/b", "stats", "--watch", "1"], "are of one daemon"),
    ],
)
def test_what_makes_no_sense_is_bad_input(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
