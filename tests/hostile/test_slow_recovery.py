"""A daemon with a long recovery: it listens, serves what it has recovered, and can be stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from prefixd.client import Client, SaveOutcome, SaveReason, SaveStatus
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from tests.support.columns import Item
from tests.support.daemon import eventually, health_of
from tests.support.event_loop import in_loop
from tests.support.outside import DaemonProcess, assert_sound, daemon_process
from tests.support.running import key, payload

DATA = payload(1, 100_000)
#: The disk tier recovers two entries at a time, and halts after the first batch until a pipe has a
#: writer. A stop gives up soon.
HALTS = """
import os, sys
from functools import partialmethod
from prefixd.server import daemon
from prefixd.server.runtime.loop import Core
from prefixd.tiers import records
from prefixd.tiers.arena_stores import DiskStore
Core.close = partialmethod(Core.close, 0.3)
records._BATCH_ENTRIES = 2
recover = DiskStore.recover
def halting(self):
    for number, batch in enumerate(recover(self)):
        if number == 1:
            (self.directory.parent / "halts").touch()
            os.close(os.open(self.directory.parent / "pipe", os.O_RDONLY))
        yield batch
DiskStore.recover = halting
daemon.main(sys.argv[1:])
"""


#: RAM has no memory until a pipe has a writer.
HAS_NO_MEMORY = """
import os, sys
from prefixd.server import daemon
from prefixd.tiers.arena_stores import RamStore
secure = RamStore.secure_segments
def halting(self):
    os.close(os.open({pipe!r}, os.O_RDONLY))
    yield from secure(self)
RamStore.secure_segments = halting
daemon.main(sys.argv[1:])
"""


async def filled(daemon: DaemonProcess) -> None:
    """Save six entries on disk and one in shared memory, and stop the daemon."""
    daemon.start()
    async with daemon.client() as client:
        session = await client.open()
        for number in range(6):
            statuses = await session.save({key(number): payload(number)}, Tier.DISK)
            assert statuses == [pb.SAVE_STATUS_SAVED]
        await session.save({key(50): DATA}, Tier.SHM)
    assert await asyncio.to_thread(daemon.stop) == 0


@contextmanager
def halted(daemon: DaemonProcess) -> Iterator[subprocess.Popen[bytes]]:
    """Start the daemon, which listens in the middle of its recovery and halts there."""
    os.mkfifo(daemon.directory / "pipe")
    daemon.run_with(HALTS)
    with daemon.log.open("ab") as log:
        process = subprocess.Popen(
            daemon._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        with daemon.admin(timeout_s=60) as admin:
            # A health check passes, so that engines may use the daemon already.
            assert health_of(admin)
        # Before it halts, a stop has nothing to wait for.
        eventually((daemon.directory / "halts").exists)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_tier_without_memory_says_so_and_others_are_served() -> None:
    with daemon_process() as daemon:
        pipe = daemon.directory / "pipe"
        os.mkfifo(pipe)
        daemon.run_with(HAS_NO_MEMORY.format(pipe=str(pipe)))
        daemon.start_unwell()
        with Client(daemon.address) as client, daemon.admin() as admin:
            assert client.wait_connected()

            def save(tier: Tier) -> SaveOutcome:
                return client.save(Key(key(tier)), DATA, tier=tier, reason=SaveReason.EVICT)

            eventually(lambda: save(Tier.SHM).ok)
            refused = save(Tier.RAM)
            assert refused.status is SaveStatus.NO_ROOM
            assert "secures memory" in refused.message
            stats = admin.stats()
            assert stats.tiers[0].state == pb.TIER_STATE_RECOVERING
            assert stats.notices["ram tier"] == "secures its first memory"
            wake = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            eventually(lambda: not admin.stats().notices)
            os.close(wake)
            assert save(Tier.RAM).ok


@in_loop
async def test_recovered_entries_and_other_tiers_are_served_meanwhile() -> None:
    with daemon_process() as daemon:
        await filled(daemon)
        with halted(daemon):
            async with daemon.client() as client:
                session = await client.open()
                with daemon.admin() as admin:
                    notice = "recovers: 2 entries adopted, "
                    await asyncio.to_thread(
                        eventually,
                        lambda: admin.stats().notices.get("disk tier", "").startswith(notice),
                    )
                    serving, recovering = pb.TIER_STATE_SERVING, pb.TIER_STATE_RECOVERING
                    await asyncio.to_thread(
                        eventually,
                        lambda: (
                            [tier.state for tier in admin.stats().tiers]
                            == [serving, serving, recovering]
                        ),
                    )
                    assert admin.stats().health == "serving"
                    # Entries are found and read in the middle of the recovery.
                    assert await session.restore(key(0)) == payload(0)
                    assert await session.restore(key(50)) == DATA
                    (refused,) = await session.reserve(
                        [Item(key=key(9), payload_bytes=9)], Tier.DISK
                    )
                    assert refused.status == pb.RESERVE_STATUS_NO_ROOM
                    for tier in (Tier.RAM, Tier.SHM):
                        saved = await session.save({key(10 + tier): DATA}, tier)
                        assert saved == [pb.SAVE_STATUS_SAVED]
                    # An entry that is not recovered yet is a miss, and is saved again.
                    assert await session.save({key(5): payload(5)}) == [pb.SAVE_STATUS_SAVED]
                    # Records of entries that are still to be recovered are not garbage.
                    collected = await client.admin.Gc(pb.GcRequest())
                    assert collected.orphan_records == 0
                    wake = os.open(daemon.directory / "pipe", os.O_RDWR | os.O_NONBLOCK)
                    await asyncio.to_thread(eventually, lambda: not admin.stats().notices)
                    os.close(wake)
                assert await session.save({key(9): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
                for number in range(6):
                    assert await session.restore(key(number)) == payload(number)
                (found,) = await client.lookup(key(5))
                assert found.entry.tier == Tier.DISK, "the copy in the more durable tier is kept"
                await assert_sound(client)


@in_loop
async def test_a_stop_does_not_wait_for_a_recovery() -> None:
    with daemon_process() as daemon:
        await filled(daemon)
        with halted(daemon) as process:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
        assert daemon.logged("threads_left")
        daemon.run_with(HALTS.replace("number == 1", "False"))
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            for number in range(6):
                assert await session.restore(key(number)) == payload(number)
            await assert_sound(client)
