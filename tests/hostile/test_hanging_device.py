"""Daemons on a real device that stops answering (`support/hanging_device`): it takes nothing with
it but its own tier, and no process but one that was there for it."""

from __future__ import annotations

import inspect
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefixd.client import AsyncClient, Client, Hit, Reservation, Tier
from prefixd.client.aio import AsyncHit, AsyncReservation
from tests.support.daemon import eventually
from tests.support.every_call import ENTRIES, SYNCHRONOUS, TABLES, OnHangingDisk, on_hanging_disk
from tests.support.hanging_device import HangingDevice, hanging_device
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.running import key, payload

DATA = payload(1, 100_000)
FLAGS = (
    "--disk.budget=16MiB",
    "--disk.probe_interval=10ms",
    "--disk.hung_after=300ms",
    "--server.drain_timeout=100ms",
)
SOON = """
from prefixd.server import opening
opening.AGAIN_S = 0.05
opening._ANSWER_S = 0.3
"""


@contextmanager
def on_hanging_device(*flags: str) -> Iterator[tuple[DaemonProcess, HangingDevice]]:
    """A daemon with an entry in shm and on disk, and its disk."""
    with daemon_process(*FLAGS, *flags) as daemon, hanging_device(daemon.directory / "m") as device:
        daemon._command += (f"--disk.directory={daemon.directory / 'm' / 'disk'}",)
        daemon.run_with(device.script(SOON))
        daemon.start()
        with Client(daemon.address) as client:
            client.wait_connected()
            for tier in (Tier.SHM, Tier.DISK):
                assert client.save(key(tier), DATA, tier=tier).ok
        yield daemon, device


def hang(daemon: DaemonProcess, device: HangingDevice) -> None:
    """The device stops answering, and the daemon has noticed it: a call waits in the kernel."""
    device.hang()
    with daemon.admin() as admin:
        eventually(lambda: "disk device" in admin.stats().health)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_daemon_ends_while_its_disk_hangs_and_another_serves_the_rest(
    how: signal.Signals,
) -> None:
    with on_hanging_device() as (daemon, device):
        hang(daemon, device)
        os.kill(daemon.pid, how)
        # It is gone, not only told to go: nothing of it waits for the device.
        assert daemon.wait() == (0 if how is signal.SIGTERM else -how)
        assert not daemon.logged("stop_forced")
        daemon.start_unwell()
        with Client(daemon.address) as client, daemon.admin() as admin:
            client.wait_connected()
            assert client.restore_keys([key(Tier.SHM)], [bytearray(len(DATA))]).run == 1
            assert client.save(key(10), DATA, tier=Tier.RAM).ok
            eventually(lambda: "its device does not answer" in admin.stats().health)
            device.answer()
            eventually(lambda: admin.stats().health == "serving")
            eventually(
                lambda: client.restore_keys([key(Tier.DISK)], [bytearray(len(DATA))]).run == 1
            )
            eventually(lambda: client.save(key(11), DATA, tier=Tier.DISK).ok)
        assert daemon.stop() == 0


# ---- every call of the library


@pytest.fixture(scope="module")
def disk() -> Iterator[OnHangingDisk]:
    with on_hanging_disk() as disk:
        yield disk


KINDS = {
    "Client": (Client, AsyncClient),
    "Hit": (Hit, AsyncHit),
    "Reservation": (Reservation, AsyncReservation),
}


@pytest.mark.parametrize("name", TABLES)
def test_no_method_is_forgotten(name: str) -> None:
    for asynchronous, kind in enumerate(KINDS[name]):
        public = (attribute for attribute in dir(kind) if not attribute.startswith("_"))
        methods = {each for each in public if callable(inspect.getattr_static(kind, each))}
        assert methods == TABLES[name].keys() - (SYNCHRONOUS if asynchronous else set())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["threads", "asyncio"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "TCP"])
def test_every_call_ends_while_the_disk_hangs(
    disk: OnHangingDisk, local: bool, asynchronous: bool
) -> None:
    """How long after its deadline, bench/bench_hangs.py measures. One that waited for the device
    would not end here."""
    for end in disk.ends(30, local=local, asynchronous=asynchronous):
        assert end.took_s is not None, end
        assert "raised" not in end.what, end


def test_buffers_of_restores_that_were_given_up_are_the_callers_again(disk: OnHangingDisk) -> None:
    """1,000 of them in bench/bench_hangs.py."""
    chance = random.Random(1)
    with disk.client(5_000, local=True) as client:
        keys = disk.entries(client, ENTRIES)
        for _ in range(10):
            assert disk.reuse(client, keys, chance)
