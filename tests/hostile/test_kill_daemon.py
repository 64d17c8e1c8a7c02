"""kill -9 of the daemon: entries acknowledged on shm and disk come back, and clients reconnect."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from prefixd.client import Client, Key, SaveItem, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import LiveReplay, Totals
from prefixd.client.lab.replayer import BlockPayloads, LiveOptions, keys_of_ids, replay_namespace
from prefixd.client.lab.workloads import generate
from tests.support.daemon import PAUSE_S, eventually, private_daemon, problems_of, whole_lines
from tests.support.lengths import times

BLOCK_BYTES = 20_000
PAYLOADS = BlockPayloads(BLOCK_BYTES)
#: The root of keys that no replay uses.
ROOT = replay_namespace(BLOCK_BYTES, 512, "witness").root


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    """A daemon that evicts from RAM and shm all the time, but keeps everything on disk, where all
    acknowledged saves must be found."""
    with private_daemon(ram="2MiB", shm="3MiB", disk="512MiB") as running:
        yield running


class Witness:
    """Saves one block after the other to disk, and keeps the ids of the acknowledged ones."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self, address: str) -> None:
        with Client(address, name="witness", deadline_ms=2_000) as client:
            block_id = 0
            # The pause leaves time for the replay beside it.
            while not self._stopping.wait(PAUSE_S):
                block_id += 1
                (key,) = keys_of_ids(ROOT, [block_id])
                items = [SaveItem(key, PAYLOADS.payload(block_id), 512)]
                (outcome,) = client.save_many(items, tier=Tier.DISK, reason=SaveReason.SHUTDOWN)
                if outcome.status is SaveStatus.SAVED:
                    self.acknowledged.append(block_id)


def start_up_report(daemon: PrivateDaemon) -> dict[str, dict[str, int]]:
    """What the daemon logged about the recovery at its last start, by tier."""
    lines = [json.loads(line) for line in whole_lines(daemon.log)]
    return {line["tier"]: line for line in lines if line["event"] == "tier_recovered"}


def holds_nothing(admin: AdminConnection) -> bool:
    """Are all sessions gone, and their claims, reservations and waits with them?"""
    stats = admin.stats()
    return not (stats.sessions or stats.claims or stats.reservations or stats.waiters)


def read_back(client: Client, keys: list[Key]) -> list[bytes]:
    with client.claim(keys) as hit:
        assert hit.keys == keys, "an acknowledged entry is missing"
        buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
        assert hit.restore_into(buffers)
        return [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize(
    ("in_place", "how"), [(False, "killed"), (True, "killed"), (True, "stopped")]
)
def test_a_daemon_that_ends_in_the_middle_of_a_replay(
    daemon: PrivateDaemon, in_place: bool, how: str
) -> None:
    """Killed, or stopped (SIGTERM) within its bound: every acknowledged entry is there."""
    requests = list(generate("multi-turn", requests=times(90, 300), seed=11))
    witness = Witness(daemon.address)
    acknowledged_before: list[int] = []

    def kill_once(totals: Totals) -> None:
        if totals.requests < len(requests) // 3 or acknowledged_before:
            return
        acknowledged_before.append(len(witness.acknowledged))
        if how == "killed":
            daemon.kill()
        else:
            assert daemon.stop() == 0, "it ended by itself, and was not forced to"
        daemon.start()

    try:
        options = LiveOptions(
            daemon.address, workers=4, tiers=tuple(Tier), block_bytes=BLOCK_BYTES, in_place=in_place
        )
        totals = LiveReplay(requests, options, kill_once).run()
        eventually(lambda: len(witness.acknowledged) > acknowledged_before[0])
    finally:
        witness.stop()

    assert totals.mismatches == 0
    assert totals.requests == len(requests), (
        "the workers have to reconnect by themselves and finish"
    )
    assert totals.good
    assert totals.reconnects >= 4
    assert acknowledged_before[0] > 0

    with daemon.admin() as admin:
        stats = admin.stats()
        tiers = {Tier(t.tier).label: t for t in stats.tiers}
        report = start_up_report(daemon)
        for label, tier in tiers.items():
            assert report[label]["entries"] == tier.recovered_entries
            assert report[label]["payload_bytes"] == tier.recovered_bytes
            assert report[label]["dropped"] == tier.dropped_at_start
        assert tiers["ram"].recovered_entries == 0
        assert tiers["shm"].recovered_entries > 0
        assert tiers["disk"].recovered_entries >= acknowledged_before[0]
        assert problems_of(admin) == []
        eventually(lambda: holds_nothing(admin))

    with Client(daemon.address) as client:
        acknowledged = witness.acknowledged
        keys = keys_of_ids(ROOT, acknowledged)
        for start in range(0, len(keys), 500):
            payloads = read_back(client, keys[start : start + 500])
            for block_id, payload in zip(acknowledged[start : start + 500], payloads, strict=True):
                assert PAYLOADS.matches(block_id, payload), block_id


def test_an_idle_daemon_comes_back_as_it_was_killed(daemon: PrivateDaemon) -> None:
    """The same entries, in the same order of eviction, with the same bytes; only RAM is empty."""
    with Client(daemon.address) as client:
        for tier in Tier:
            ids = range(100 * tier, 100 * tier + 40)
            for block_id, key in zip(ids, keys_of_ids(ROOT, ids), strict=True):
                items = [SaveItem(key, PAYLOADS.payload(block_id), 512)]
                client.save_many(items, tier=tier, reason=SaveReason.EVICT)
    with daemon.admin() as admin:
        before = {tier: admin.next_victims(tier, 1_000) for tier in Tier}
        incarnation = admin.stats().incarnation
    assert all(len(entries) == 40 for entries in before.values())

    daemon.kill()
    daemon.start()

    with daemon.admin() as admin:
        stats = admin.stats()
        assert stats.incarnation != incarnation
        assert [t.recovered_entries for t in stats.tiers] == [0, 40, 40]
        assert [t.recovered_bytes for t in stats.tiers] == [0, 40 * BLOCK_BYTES, 40 * BLOCK_BYTES]
        assert [t.entries for t in stats.tiers] == [0, 40, 40]
        for tier in (Tier.SHM, Tier.DISK):
            after = admin.next_victims(tier, 1_000)
            assert [e.key for e in after] == [e.key for e in before[tier]]
            assert [e.info for e in after] == [e.info for e in before[tier]]
        assert problems_of(admin) == []


def test_a_daemon_killed_again_and_again_serves_only_whole_entries(daemon: PrivateDaemon) -> None:
    """Killed in the middle of saves: no partial entry is ever visible, and no garbage is left."""
    witness = Witness(daemon.address)
    try:
        for _ in range(3):
            seen = len(witness.acknowledged)
            eventually(lambda seen=seen: len(witness.acknowledged) > seen + 5)  # type: ignore[misc]
            daemon.kill()
            daemon.start()
            with daemon.admin() as admin:
                assert problems_of(admin) == []
    finally:
        witness.stop()
    with Client(daemon.address) as client, daemon.admin() as admin:
        keys = keys_of_ids(ROOT, witness.acknowledged)
        for block_id, payload in zip(witness.acknowledged, read_back(client, keys), strict=True):
            assert PAYLOADS.matches(block_id, payload), block_id
        assert admin.gc().orphan_records == 0
