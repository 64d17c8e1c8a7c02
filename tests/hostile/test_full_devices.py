"""Devices that are smaller than their tier, full at the start or full later: the daemon uses the
room that there is, warns once, and loses nothing that it acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from tests.support.daemon import SMALL_SLABS, eventually, problems_of, temporary_directories
from tests.support.devices import SmallDevice, small_device
from tests.support.entries import items_of, key_of, payload_of
from tests.support.outside import DaemonProcess

MIB = 2**20
PAYLOAD_BYTES = 600_000
#: A daemon that soon tries again to allocate the room that its device did not have.
AGAIN = """
from prefixd.server import opening
from prefixd.server.runtime import resizing
opening.AGAIN_S = resizing.SECURE_AGAIN_S = 0.1
"""
TIERS = pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)


@contextmanager
def on_small_device(tier: Tier) -> Iterator[tuple[DaemonProcess, SmallDevice]]:
    """A daemon, not started yet, one of whose tiers is configured for four times its device."""
    with temporary_directories() as (directory, shm_directory):
        places = {Tier.SHM: shm_directory, Tier.DISK: directory / "disk"}
        budgets = dict.fromkeys(Tier, "8MiB") | {tier: "64MiB"}
        flags = [f"--{other.label}.budget={budget}" for other, budget in budgets.items()]
        with small_device(places[tier], 16 * MIB) as device:
            daemon = DaemonProcess(directory, shm_directory, (*SMALL_SLABS, *flags))
            daemon.run_with(device.script(AGAIN))
            try:
                yield daemon, device
            finally:
                daemon.stop()


def tier_of(admin: AdminConnection, tier: Tier) -> pb.TierStats:
    (found,) = [one for one in admin.stats().tiers if one.tier == tier]
    return found


def names(first: int, count: int) -> list[str]:
    return [f"entry {first + number}" for number in range(count)]


def saved(client: Client, tier: Tier, first: int, count: int) -> list[str]:
    """Save entries one by one, so that the oldest are evicted first."""
    for item in items_of(names(first, count), PAYLOAD_BYTES):
        # Retried: when an allocation fails, a tmpfs also frees pages that the file had before, and
        # the process with the records of a disk tier may die of that.
        eventually(
            lambda item=item: (
                client.save(  # type: ignore[misc]
                    item.key, item.payload, tier=tier, reason=SaveReason.EVICT
                ).ok
            )
        )
    return names(first, count)


def found(daemon: DaemonProcess, count: int) -> set[str]:
    """The names of the entries that are found. Each of them has the right bytes."""
    present = set()
    with Client(daemon.address) as client:
        for name in names(0, count):
            with client.claim([key_of(name)]) as hit:
                if hit:
                    assert hit.read(0) == payload_of(key_of(name), PAYLOAD_BYTES)
                    present.add(name)
    return present


def warnings(daemon: DaemonProcess) -> list[str]:
    return [line for line in daemon.log.read_text().splitlines() if '"level": "warning"' in line]


@TIERS
def test_a_device_that_is_too_small_is_served_by_eviction(tier: Tier) -> None:
    with on_small_device(tier) as (daemon, _):
        daemon.start()
        with daemon.admin() as admin, Client(daemon.address) as client:
            stats = admin.stats()
            assert stats.health == "serving"
            assert "no more room" in stats.notices[f"{tier.label} arena"]
            assert 4 * MIB < tier_of(admin, tier).limit_bytes < 16 * MIB
            last = saved(client, tier, 0, 50)
            assert tier_of(admin, tier).evictions > 20
            assert problems_of(admin) == []
            kept = found(daemon, 50)
            assert {*last[-10:]} < kept
            assert admin.stats().health == "serving"
        daemon.kill()
        daemon.start()
        assert found(daemon, 50) == kept, "evicted entries do not come back"
        with daemon.admin() as admin, Client(daemon.address) as client:
            admin.evict(2**40, [tier])
            assert tier_of(admin, tier).published_bytes == 0
            saved(client, tier, 50, 3)
            assert problems_of(admin) == []
        daemon.stop()
        daemon.start()
        assert found(daemon, 53) == {*names(50, 3)}
        logged = warnings(daemon)
        # One warning at each start, not one for each save.
        assert len([line for line in logged if "arena_smaller" in line]) == 3
        assert len([line for line in logged if "configuration" not in line]) <= 6, logged


@TIERS
def test_a_device_that_is_full_at_the_start_is_used_when_there_is_room(tier: Tier) -> None:
    """A start that failed leaves nothing behind that stops the next one. A full disk stops none."""
    with on_small_device(tier) as (daemon, device):
        filler = device.fill()
        if tier is Tier.DISK:
            daemon.start_unwell()
            with daemon.admin() as admin:
                eventually(lambda: "disk tier: " in admin.stats().health)
            daemon.stop()
        else:
            with pytest.raises(PrefixdError, match=str(Path(tier.label))):
                daemon.start()
        filler.unlink()
        device.fill(6 * MIB).chmod(0o600)
        daemon.start()
        with daemon.admin() as admin, Client(daemon.address) as client:
            assert 0 < eventually(lambda: tier_of(admin, tier).limit_bytes) < 6 * MIB
            saved(client, tier, 0, 5)
            filler.unlink()
            eventually(lambda: tier_of(admin, tier).limit_bytes > 8 * MIB)
            saved(client, tier, 5, 10)
            # Foreign files take the rest of the device.
            device.fill()
            saved(client, tier, 15, 40)
            assert problems_of(admin) == []
            eventually(lambda: admin.stats().health == "serving")
        kept = found(daemon, 55)
        assert {*names(50, 5)} < kept
        daemon.kill()
        daemon.start()
        assert found(daemon, 55) == kept
        with daemon.admin() as admin, Client(daemon.address) as client:
            saved(client, tier, 55, 10)
            eventually(lambda: admin.stats().health == "serving")
            assert problems_of(admin) == []
