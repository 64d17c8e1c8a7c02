"""`prefixctl curve-live`, compared with what daemons of those budgets really hit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from prefixd.client.ctl.live import live_curves
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveReplay
from prefixd.client.lab.replayer import LiveOptions
from prefixd.client.lab.trace import Request
from prefixd.client.lab.workloads import generate
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import private_daemon

SLOTS = 150
#: The tolerance, as a share of all tokens. The sample has all keys here. What remains is that
#: distances are kept to 0.4 %, and that the curve gets a request's hits before its saves, about 24
#: blocks.
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Enough requests for twice as many slots to make a difference."""
    return list(generate("multi-turn", requests=300, seed=3, sessions_per_s=20))


@pytest.fixture(scope="module")
def once(requests: list[Request]) -> Iterator[PrivateDaemon]:
    """A RAM tier of 150 blocks that got all requests, and an shm tier that got none."""
    with fed_daemon(requests, SLOTS) as running:
        yield running


@pytest.fixture(scope="module")
def twice(requests: list[Request]) -> Iterator[PrivateDaemon]:
    """The same with 300 blocks."""
    with fed_daemon(requests, 2 * SLOTS) as running:
        yield running


@contextmanager
def fed_daemon(requests: list[Request], slots: int, *flags: str) -> Iterator[PrivateDaemon]:
    """A daemon with this many RAM slots, through which the requests were replayed."""
    with private_daemon("--disk.budget=0", *flags, ram=f"{4 * slots}KiB") as running:
        assert LiveReplay(requests, LiveOptions(running.address)).run().good
        yield running


def ctl(daemon: PrivateDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--address", daemon.address, "curve-live", *arguments])


def curve_of(daemon: PrivateDaemon, *arguments: str) -> Any:
    """The curve of the RAM tier."""
    result = ctl(daemon, "--tier", "ram", "--json", *arguments)
    assert result.exit_code == 0, result.output
    (tier,) = json.loads(result.stdout)["tiers"]
    return tier


def rates(curve: Any) -> dict[float, float]:
    return {point["times_budget"]: point["hit_rate"] for point in curve["points"]}


def test_at_its_own_budget_it_says_what_really_hit(
    once: PrivateDaemon, requests: list[Request]
) -> None:
    curve = curve_of(once)
    assert curve["budget_bytes"] == SLOTS * 4096
    assert curve["total_tokens"] == sum(request.input_length for request in requests)
    assert 0.3 < curve["hit_rate"] < 0.9, "the budget makes a difference"
    assert rates(curve)[1.0] == pytest.approx(curve["hit_rate"], abs=TOLERANCE)


def test_at_other_budgets_it_says_what_they_really_hit(
    once: PrivateDaemon, twice: PrivateDaemon
) -> None:
    small, large = curve_of(once), curve_of(twice)
    assert large["hit_rate"] > small["hit_rate"] + 2 * TOLERANCE
    assert rates(small)[2.0] == pytest.approx(large["hit_rate"], abs=TOLERANCE)
    assert rates(large)[0.5] == pytest.approx(small["hit_rate"], abs=TOLERANCE)
    at_size = curve_of(once, "--capacity", f"{8 * SLOTS}KiB,{4 * SLOTS}KiB")
    assert rates(at_size) == {2.0: rates(small)[2.0], 1.0: rates(small)[1.0]}


def test_the_curve_as_json(once: PrivateDaemon, requests: list[Request]) -> None:
    curve = curve_of(once)
    assert list(rates(curve)) == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert [p["budget_bytes"] for p in curve["points"]] == [
        SLOTS * 4096 * quarters // 4 for quarters in (1, 2, 4, 8, 16)
    ]
    hit_tokens = [point["hit_tokens"] for point in curve["points"]]
    assert hit_tokens == sorted(hit_tokens)
    assert hit_tokens[-1] <= curve["total_tokens"]
    assert curve["policy"] == "lru"
    assert curve["sample_rate"] == 1.0
    assert curve["sampled_keys"] == len({block for r in requests for block in r.hash_ids})
    everything = ctl(once, "--json")
    assert [tier["tier"] for tier in json.loads(everything.stdout)["tiers"]] == ["ram", "shm"]
    assert json.loads(everything.stdout)["tiers"][0] == curve


def test_the_curve_as_a_table(once: PrivateDaemon) -> None:
    curve = curve_of(once)
    result = ctl(once)
    assert result.exit_code == 0, result.output
    head, *rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert " ".join(head).endswith("hit rate now at 0.25x at 0.5x at 1x at 2x at 4x sampled")
    ram = next(row for row in rows if row[0] == "ram")
    shown = [f"{100 * rate:.1f}" for rate in [curve["hit_rate"], *rates(curve).values()]]
    assert [cell for cell in ram if "." in cell and cell != "%"][:6] == shown
    assert f"{curve['sampled_keys']:,}" in ram
    shm = next(row for row in rows if row[0] == "shm")
    assert shm.count("-") == 6, "nothing was looked for there"
    by_size = ctl(once, "--tier", "ram", "--capacity", "1MiB,2MiB")
    assert "at 1MiB" in by_size.stdout
    assert "at 2MiB" in by_size.stdout


def test_nothing_was_looked_for(once: PrivateDaemon) -> None:
    with once.admin() as admin:
        (shm,) = live_curves(admin, [Tier.SHM])["tiers"]
    assert (shm["total_tokens"], shm["hit_rate"], shm["sample_rate"]) == (0, None, None)
    assert {point["hit_rate"] for point in shm["points"]} == {None}


def test_a_small_sample_is_said_to_be_one(requests: list[Request]) -> None:
    with fed_daemon(requests[:100], SLOTS, "--server.curve_keys=64") as daemon:
        curve = curve_of(daemon)
    assert 0 < curve["sampled_keys"] <= 64
    assert 0 < curve["sample_rate"] < 0.5


def test_a_daemon_that_keeps_no_sample_says_so() -> None:
    with private_daemon("--server.curve_keys=0") as daemon:
        result = ctl(daemon)
    assert result.exit_code == 1
    assert result.stderr == ("prefixctl: this daemon samples no curve; set server.curve_keys\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tier", "tape"], "'tape' is none of ram, shm, disk"),
        (["--tier", "disk"], "the disk tier is not configured"),
        (["--capacity", "2GB"], "unknown unit 'GB'"),
    ],
)
def test_what_makes_no_sense_is_bad_input(
    once: PrivateDaemon, arguments: list[str], words: str
) -> None:
    result = ctl(once, *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_no_daemon_is_an_exit_code_of_its_own() -> None:
    result = CliRunner().invoke(app, ["--address", "/nowhere/at/all", "curve-live"])
    assert result.exit_code == 3
    assert "no daemon answers" in result.stderr
