"""A real daemon whose disk stops responding: the other tiers still serve, health reports the disk,
and a stop ends in time."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from tests.support.daemon import eventually
from tests.support.event_loop import in_loop
from tests.support.outside import daemon_process
from tests.support.running import Refused, key, payload

DATA = payload(1, 100_000)
#: Larger than what the daemon copies on its event loop.
LARGE = payload(2, 2**21)
#: While the file `hangs` exists, a sync waits for a pipe that has no writer. A stop gives up soon.
HANGS = """
import os, sys
from functools import partialmethod
from prefixd.server import daemon
from prefixd.server.runtime.loop import Core
Core.close = partialmethod(Core.close, 0.3)
daemon._ENDED_WITHIN_S = 0.3
from prefixd.tiers.arena import DiskArena
sync = DiskArena.sync
def hang(self):
    place = self.path.parent.parent
    if (place / "hangs").exists():
        os.close(os.open(place / "pipe", os.O_RDONLY))
    sync(self)
DiskArena.sync = hang
daemon.main(sys.argv[1:])
"""
FLAGS = (
    "--disk.probe_interval=10ms",
    "--disk.hung_after=300ms",
    "--server.drain_timeout=100ms",
    "--ram.budget=16MiB",
)


@pytest.mark.parametrize("how", ["waits", "second signal"])
@in_loop
async def test_a_disk_that_hangs_takes_nothing_with_it(how: str) -> None:
    patience = {"waits": "100ms", "second signal": "1h"}[how]
    with daemon_process(
        *FLAGS, "--disk.budget=32MiB", f"--server.drain_timeout={patience}"
    ) as daemon:
        os.mkfifo(daemon.directory / "pipe")
        daemon.run_with(HANGS)
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
            (daemon.directory / "hangs").touch()
            # More than the daemon has threads.
            stuck = [
                asyncio.ensure_future(session.save({key(10 + n): LARGE[: 2**18]}, Tier.DISK))
                for n in range(8)
            ]
            with daemon.admin() as admin:
                hung = lambda: "disk device" in admin.stats().health  # noqa: E731
                await asyncio.to_thread(eventually, hung)
                disk = next(t for t in admin.stats().tiers if t.tier == Tier.DISK)
                assert disk.state == pb.TIER_STATE_HUNG
                assert disk.oldest_io_ms >= 300
                await asyncio.to_thread(eventually, lambda: not admin.health())
            # New saves are refused at once, and entries of the disk are not found.
            assert await session.save({key(2): DATA}, Tier.DISK) == [pb.SAVE_STATUS_NO_ROOM]
            assert (await session.claim([key(1)])).claim_id == 0
            assert len(daemon.logged("device_hangs")) == 1
            for tier in (Tier.RAM, Tier.SHM):
                of = key(3 + tier)
                data = LARGE if tier is Tier.RAM else DATA
                assert await session.save({of: data}, tier) == [pb.SAVE_STATUS_SAVED]
                assert await session.restore(of) == data
            os.kill(daemon.pid, signal.SIGTERM)
            if how == "second signal":
                eventually(lambda: daemon.logged("stopping"))
                os.kill(daemon.pid, signal.SIGTERM)
            assert await asyncio.to_thread(daemon.wait) == 0
            assert daemon.logged("threads_left")
            for one in stuck:
                with pytest.raises((Refused, grpc.aio.AioRpcError)):
                    await one
        (daemon.directory / "hangs").unlink()
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            # A disk that other processes keep busy for 300 ms counts as hung until it responds.
            while (claimed := await session.claim([key(1)])).claim_id == 0:
                pass
            assert await session.read(claimed.claim_id) == [DATA]
            assert await session.restore(key(3 + Tier.SHM)) == DATA


@in_loop
async def test_a_disk_that_answers_again_serves_again() -> None:
    with daemon_process(*FLAGS) as daemon:
        pipe = daemon.directory / "pipe"
        os.mkfifo(pipe)
        daemon.run_with(HANGS)
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            (daemon.directory / "hangs").touch()
            saving = asyncio.ensure_future(session.save({key(1): DATA}, Tier.DISK))
            with daemon.admin() as admin:
                await asyncio.to_thread(eventually, lambda: "disk device" in admin.stats().health)
                (daemon.directory / "hangs").unlink()
                # Opening the pipe for writing lets the hanging sync continue.
                wake = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
                await asyncio.to_thread(eventually, lambda: admin.stats().health == "serving")
                os.close(wake)
            assert await saving == [pb.SAVE_STATUS_SAVED]
            assert await session.restore(key(1)) == DATA
            assert await session.save({key(2): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]


@in_loop
async def test_a_hangup_signal_ends_nothing() -> None:
    with daemon_process() as daemon:
        daemon.start()
        async with daemon.client() as client:
            session = await client.open()
            os.kill(daemon.pid, signal.SIGHUP)
            await asyncio.to_thread(eventually, lambda: daemon.logged("nothing_to_reload"))
            assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
        assert await asyncio.to_thread(daemon.stop) == 0
