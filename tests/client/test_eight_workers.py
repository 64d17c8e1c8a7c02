"""Eight workers at once on three tiers that are far too small: no byte and no number is wrong."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveReplay
from prefixd.client.lab.replayer import LiveOptions
from prefixd.client.lab.trace import Request, TraceReader
from prefixd.client.lab.workloads import generate
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import LimitReached
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import eventually, private_daemon
from tests.support.lengths import times

TRACES = Path(os.environ.get("PREFIXD_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
WORKERS = 8
#: The pause between two samples of the tiers.
SAMPLE_S = 0.01


def generated() -> list[Request]:
    return list(generate("multi-turn", requests=times(200, 800), seed=8))


def conversation() -> list[Request]:
    """The first requests of an hour of real traffic."""
    path = TRACES / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; $PREFIXD_TRACES says where traces are")
    return list(TraceReader(path, limit=times(170, 3_000)))


@contextmanager
def sampled(daemon: PrivateDaemon) -> Iterator[list[pb.StatsResponse]]:
    """Samples of the daemon's statistics, taken all the time."""
    samples: list[pb.StatsResponse] = []
    stopping = threading.Event()

    def sample() -> None:
        with daemon.admin() as admin:
            while not stopping.wait(SAMPLE_S):
                samples.append(admin.stats())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stopping.set()
        thread.join()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("trace", "in_place"), [(generated, False), (generated, True), (conversation, True)]
)
def test_eight_workers_on_tiers_that_are_far_too_small(
    trace: Callable[[], list[Request]], in_place: bool
) -> None:
    requests = trace()
    with private_daemon(ram="128KiB", shm="128KiB", disk="768KiB") as daemon:
        options = LiveOptions(daemon.address, workers=WORKERS, tiers=tuple(Tier), in_place=in_place)
        with sampled(daemon) as samples:
            totals = LiveReplay(requests, options).run()

        assert totals.mismatches == 0
        assert totals.good
        assert totals.requests == len(requests)
        assert totals.hit_tokens > 0
        assert totals.unavailable_requests == 0
        assert set(totals.saves) <= {"saved", "present", "in_flight", "no_room"}

        assert len(samples) > 10
        for sample in samples:
            for tier in sample.tiers:
                assert tier.published_bytes + tier.reserved_bytes <= tier.budget_bytes
                assert tier.pinned_bytes <= tier.published_bytes
        assert max(sample.sessions for sample in samples) == WORKERS

        with daemon.admin() as admin:
            eventually(lambda: admin.stats().sessions == 0)
            stats = admin.stats()
            assert (stats.claims, stats.reservations, stats.waiters) == (0, 0, 0)
            assert all(tier.evictions > 20 for tier in stats.tiers)
        for command in ("check", "verify"):
            checked = CliRunner().invoke(app, [command, "--address", daemon.address])
            assert checked.exit_code == 0, checked.output


@pytest.mark.timeout(300)
def test_tiers_that_get_smaller_and_larger_under_eight_workers() -> None:
    """Every sample after a resize shows the size that it answered; no worker reads a wrong byte."""
    chance = random.Random(12)
    sizes = {Tier.RAM: 2**20, Tier.SHM: 2**20, Tier.DISK: 2**20}
    resized: list[tuple[Tier, int]] = []
    refused: list[LimitReached] = []
    wrong: list[str] = []
    stopping = threading.Event()

    def look(stats: pb.StatsResponse) -> None:
        for tier in stats.tiers:
            used_bytes = tier.published_bytes + tier.reserved_bytes
            if not used_bytes <= tier.limit_bytes <= tier.budget_bytes == sizes[Tier(tier.tier)]:
                wrong.append(f"{tier} with {sizes}")

    def change(daemon: PrivateDaemon) -> None:
        with daemon.admin() as admin:
            while not stopping.is_set():
                tier = chance.choice(list(Tier))
                size = chance.randrange(5 * 2**18, 3 * 2**20) // 4096 * 4096
                try:
                    sizes[tier] = admin.resize(tier, size).budget_bytes
                    resized.append((tier, size))
                except LimitReached as problem:
                    refused.append(problem)
                for _ in range(3):
                    look(admin.stats())

    with private_daemon(
        *(f"--{tier.label}.max_budget=3MiB" for tier in Tier), ram="1MiB", shm="1MiB", disk="1MiB"
    ) as daemon:
        thread = threading.Thread(target=change, args=(daemon,))
        thread.start()
        options = LiveOptions(daemon.address, workers=WORKERS, tiers=tuple(Tier), in_place=True)
        try:
            # A busy machine has no time for so many resizes beside one replay.
            while len(resized) <= 20 and thread.is_alive():
                totals = LiveReplay(generated(), options).run()
                assert totals.mismatches == 0
                assert totals.good
        finally:
            stopping.set()
            thread.join()
        assert wrong == []
        assert len(resized) > 20
        for command in ("check", "verify"):
            checked = CliRunner().invoke(app, [command, "--address", daemon.address])
            assert checked.exit_code == 0, checked.output
