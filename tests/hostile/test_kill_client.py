"""A client that is killed or falls silent soon loses its claims and reservations, and other clients
do not wait for it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixd.client import Client, Key, SaveItem, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.vocabulary import Presence
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.small_staging import admin_of
from tests.support.warm import WARM

HEARTBEAT_S = 4.0
PUBLISHED = [Key(bytes([number]) * 32) for number in range(1, 6)]
RESERVED = [Key(bytes([number]) * 32) for number in range(100, 103)]

#: A client that claims all published keys, reserves the others, prints "holding", and stays.
HOLDER = f"""
import sys, time
from prefixd.client import Client, ReserveItem, SaveReason, Tier
published = [bytes([n]) * 32 for n in range(1, 6)]
reserved = [bytes([n]) * 32 for n in range(100, 103)]
client = Client(sys.argv[1], name="holder")
hit = client.longest_run(published)
items = [ReserveItem(key, 10_000, 512) for key in reserved]
held = client.reserve(items, tier=Tier.SHM, reason=SaveReason.COLD)
assert len(hit) == {len(PUBLISHED)} and all(one.granted for one in held)
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[PrivateDaemon]:
    """A daemon with the heartbeat interval of the test's parameter, or of four seconds."""
    heartbeat_s = getattr(request, "param", HEARTBEAT_S)
    with private_daemon(f"--sessions.heartbeat={heartbeat_s * 1000:.0f}ms") as running:
        yield running


admin = pytest.fixture(admin_of)


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, name="witness") as connected:
        items = [SaveItem(key, bytes(1000), 512) for key in PUBLISHED]
        outcomes = connected.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
        assert [outcome.status for outcome in outcomes] == [SaveStatus.SAVED] * len(PUBLISHED)
        yield connected


@pytest.fixture
def holder(daemon: PrivateDaemon, client: Client) -> Iterator[subprocess.Popen[str]]:
    assert client.connected
    command = [*WARM, "-c", HOLDER, daemon.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            process.kill()


def holds_nothing(admin: AdminConnection) -> bool:
    stats = admin.stats()
    owners = {session.owner for session in admin.sessions().sessions}
    return not (stats.claims or stats.reservations or any("holder" in owner for owner in owners))


def test_what_a_killed_client_held_is_free_within_two_heartbeats(
    admin: AdminConnection, holder: subprocess.Popen[str]
) -> None:
    (claim,) = admin.all_claims()
    assert "holder" in claim.owner
    assert {bytes(key) for key in claim.keys} == set(PUBLISHED)
    held = list(admin.all_reservations())
    assert {bytes(reservation.key) for reservation in held} == set(RESERVED)
    before = admin.stats()
    assert [tier.pinned_entries for tier in before.tiers] == [len(PUBLISHED), 0, 0]
    assert before.tiers[1].reserved_bytes > 0

    holder.kill()
    eventually(lambda: holds_nothing(admin), within_s=2 * HEARTBEAT_S)

    after = admin.stats()
    assert [tier.pinned_entries for tier in after.tiers] == [0, 0, 0]
    assert after.tiers[1].reserved_bytes == 0
    assert problems_of(admin) == []


@pytest.mark.parametrize("daemon", [0.1], indirect=True)
def test_what_a_silent_client_held_is_free_as_well(
    admin: AdminConnection, holder: subprocess.Popen[str]
) -> None:
    """Its connection stays open, so only the missing heartbeats show that it is stopped."""
    holder.send_signal(signal.SIGSTOP)
    eventually(lambda: holds_nothing(admin))
    assert problems_of(admin) == []


def test_waiters_for_the_save_of_a_killed_client_are_answered_at_once(
    admin: AdminConnection, client: Client, holder: subprocess.Popen[str]
) -> None:
    """With a miss, long before their wait times out."""
    wait_ms = 60_000
    (found,) = client.probe(RESERVED[:1], wait_ms=1)
    assert found.presence is Presence.IN_FLIGHT
    assert "holder" in found.owner

    with ThreadPoolExecutor(2) as threads:
        probing = threads.submit(client.probe, RESERVED[:1], wait_ms=wait_ms)
        claiming = threads.submit(client.longest_run, RESERVED[1:], wait_ms=wait_ms)
        eventually(lambda: admin.stats().waiters == 2)
        holder.kill()
        (answer,) = probing.result(wait_ms / 1e3 / 2)
        hit = claiming.result(wait_ms / 1e3 / 2)

    assert answer.presence is Presence.ABSENT
    assert not hit
    assert admin.stats().waiters == 0
    assert admin.check().problems == []


def test_the_reservation_of_a_killed_client_goes_to_another(
    admin: AdminConnection, client: Client, holder: subprocess.Popen[str]
) -> None:
    """Single-flight prefill survives the death of the client that computed."""
    item = SaveItem(RESERVED[0], bytes(10_000), 512)

    def save() -> SaveStatus:
        (outcome,) = client.save_many([item], tier=Tier.SHM, reason=SaveReason.EVICT)
        return outcome.status

    assert save() is SaveStatus.IN_FLIGHT
    holder.kill()
    eventually(lambda: holds_nothing(admin))
    assert save() is SaveStatus.SAVED
