"""Readers that are stopped at the worst moments, and bits that flip under them: a restore brings
the right bytes or is a miss, and a release succeeds only if a view still has its entry's bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest

from prefixd.client import Client, MissReason, SaveReason, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.arena_header import ARENA_HEADER_BYTES
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.entries import items_of, payload_of, restore, save
from tests.support.lengths import LONG, times
from tests.support.moments import MOMENTS
from tests.support.stopping_worker import NAMES
from tests.support.warm import WARM

PAYLOAD_BYTES = 300_000
BUDGET_BYTES = 2 * 2**20
BUDGETS = dict.fromkeys(("ram", "shm", "disk"), "2MiB")
#: A session is lost after two heartbeats.
HEARTBEAT = "--sessions.heartbeat=300ms"


class Worker:
    """A process of `stopping_worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def command(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        report: dict[str, Any] = json.loads(self._process.stdout.readline())
        return report

    def wait_until_stopped(self) -> None:
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def worker(daemon: PrivateDaemon, verify: str) -> Iterator[Worker]:
    command = [*WARM, "-m", "tests.support.stopping_worker", daemon.address, verify]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def saved(client: Client, names: list[str], tier: Tier) -> None:
    """Save the entries. Retries, because with such short heartbeats the session may be lost."""

    def all_saved() -> bool:
        items = items_of(names, PAYLOAD_BYTES)
        outcomes = client.save_many(items, tier=tier, reason=SaveReason.EVICT, deadline_ms=60_000)
        return all(outcome.ok for outcome in outcomes)

    eventually(all_saved)


def reuse_the_room(client: Client, admin: AdminConnection, tier: Tier) -> None:
    """Once the stopped client's session is lost, fill the tier with other entries."""
    eventually(lambda: admin.stats().claims == 0)
    admin.evict(BUDGET_BYTES, [tier])
    saved(client, [f"other {number}" for number in range(5)], tier)


@contextmanager
def daemon_and_two_entries(
    tier: Tier,
) -> Iterator[tuple[PrivateDaemon, Client, AdminConnection]]:
    with (
        private_daemon(HEARTBEAT, **BUDGETS) as daemon,
        Client(daemon.address, local=False, save_timeout_ms=60_000) as client,
        daemon.admin() as admin,
    ):
        saved(client, [*NAMES], tier)
        yield daemon, client, admin


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SHM])
@pytest.mark.parametrize("how", ["stopped", "in C code"])
def test_a_view_over_a_stop_is_not_released_as_held(tier: Tier, how: str) -> None:
    """A worker that is stopped, or that loads a model or captures a graph in C code, loses its
    session, and its view may then show another entry's bytes. After a short stop, the view is still
    good, and its release succeeds."""
    with daemon_and_two_entries(tier) as (daemon, client, admin), worker(daemon, "never") as one:
        for reused in (True, False, True)[: times(2, 3)]:
            one.command(f"view {'stopped' if how == 'stopped' else 'C'}")
            if how == "stopped":
                one.wait_until_stopped()
            else:
                assert one.report() == {"waiting": True}
            if reused:
                reuse_the_room(client, admin, tier)
            if how == "stopped":
                one.go_on()
            else:
                one.command("")
            assert one.report() == {"held": not reused, "right": not reused}
            if reused:
                admin.evict(BUDGET_BYTES, [tier])
                saved(client, [*NAMES], tier)
        assert problems_of(admin) == []


#: In one process, `test_fast_path_races.py` tries each tier with both, at the same moments.
TIERS_AND_CHECKS = [(Tier.RAM, "always"), (Tier.SHM, "never"), (Tier.DISK, "never")]


@pytest.mark.parametrize(
    ("tier", "verify"), [*product(Tier, ["always", "never"])] if LONG else TIERS_AND_CHECKS
)
def test_a_restore_over_a_stop_brings_the_right_bytes_or_a_miss(tier: Tier, verify: str) -> None:
    """At every moment of a restore, with and without a claim. There is one worker for each moment,
    and all are stopped at the same time."""
    with daemon_and_two_entries(tier) as (daemon, client, admin), ExitStack() as open_:
        workers = [open_.enter_context(worker(daemon, verify)) for _ in MOMENTS]
        for kind in ("claimed", "looked"):
            for number, one in enumerate(workers):
                one.command(f"{kind} {number}")
            for one in workers:
                one.wait_until_stopped()
            reuse_the_room(client, admin, tier)
            for moment, one in zip(MOMENTS, workers, strict=True):
                one.go_on()
                report = one.report()
                whole = moment == MOMENTS[-1]
                assert report["restored"] == [whole, whole], (moment, kind)
                assert not whole or report["right"] == [True, True], (moment, kind)
                assert report["held"] == (kind == "looked"), "only a claim can be lost"
            admin.evict(BUDGET_BYTES, [tier])
            saved(client, [*NAMES], tier)


FLIPS = 500


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK])
def test_flipped_bits_in_a_live_arena_are_never_served(tier: Tier) -> None:
    """With a client's default settings, with and without a claim, in place and over gRPC."""
    random_ = random.Random(int(tier))
    with private_daemon() as daemon, Client(daemon.address) as client, daemon.admin() as admin:
        keys = [
            key
            for batch in range(0, 60, 10)
            for key in save(client, [f"entry {batch + n}" for n in range(10)], 120_000, tier)
        ]
        directory = {Tier.SHM: daemon.shm_directory, Tier.DISK: daemon.directory / "disk"}[tier]
        (directory / "arena").chmod(0o600)
        with (directory / "arena").open("r+b") as arena:
            end_bytes = arena.seek(0, os.SEEK_END)
            for _ in range(FLIPS):
                place = random_.randrange(ARENA_HEADER_BYTES, end_bytes)
                arena.seek(place)
                byte = arena.read(1)[0]
                arena.seek(place)
                arena.write(bytes([byte ^ 1 << random_.randrange(8)]))
        misses = 0
        with Client(daemon.address, local=False) as remote:
            for number, key in enumerate(keys):
                reader = (client, remote)[number % 2]
                hit = reader.longest_run([key], claim=number % 4 < 2)
                result, payloads = restore(hit)
                if not hit:
                    misses += 1  # the scrubber has already dropped it
                elif result:
                    assert payloads == [payload_of(key, 120_000)]
                else:
                    assert result.miss in {MissReason.CORRUPT, MissReason.UNREADABLE}
                    misses += 1
                hit.release()
        assert misses > len(keys) // 2, "the flipped bits are in most entries"
        assert daemon.pid
        # Reported entries are dropped, and the daemon still serves the rest.
        eventually(lambda: sum(client.exists(keys)) <= len(keys) - misses)
        assert admin.health()
