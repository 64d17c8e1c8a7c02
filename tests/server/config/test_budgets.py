"""What each tier gets on which machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixd.proto.errors import ConfigError
from prefixd.proto.vocabulary import Tier
from prefixd.server.config.budgets import Plan, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.config.machine import Machine

MIB = 2**20
GIB = 2**30
BIG = Machine(
    memory_bytes=256 * GIB,
    available_bytes=240 * GIB,
    shm_size_bytes=128 * GIB,
    shm_room_bytes=120 * GIB,
    disk_room_bytes=1024 * GIB,
    shm_held_bytes=0,
)
PATHS = ["--shm.directory=/dev/shm/p", "--disk.directory=/d/p"]


def plan(machine: Machine, *argv: str) -> Plan:
    return resolve(load_config([*PATHS, *argv], {}), machine)


def budget(tier: Tier, machine: Machine, *argv: str) -> int:
    return plan(machine, *argv).all_tiers[tier].budget_bytes


def test_a_large_machine() -> None:
    assert plan(BIG).describe() == [
        "ram: 60GiB (auto: 25% of 240GiB of available memory)",
        "shm: 64GiB in /dev/shm/p (auto: 25% of 256GiB of memory)",
        "disk: 64GiB in /d/p (auto: the most that is taken unasked)",
    ]
    assert plan(BIG).warnings == ()


@pytest.mark.parametrize(
    ("machine", "budget_bytes", "why"),
    [
        (replace(BIG, memory_bytes=40 * GIB), 10 * GIB, "25% of 40GiB of memory"),
        (replace(BIG, available_bytes=8 * GIB), 4 * GIB, "50% of 8GiB of available memory"),
        (replace(BIG, shm_size_bytes=64 * MIB), 32 * MIB, "50% of the 64MiB of /dev/shm"),
        (replace(BIG, shm_room_bytes=40 * GIB), 30 * GIB, "75% of 40GiB of room in /dev/shm"),
    ],
)
def test_shm_takes_the_least_of_its_shares(machine: Machine, budget_bytes: int, why: str) -> None:
    shm = plan(machine).tiers[Tier.SHM]
    assert (shm.budget_bytes, shm.why) == (budget_bytes, f"auto: {why}")


def test_shm_comes_out_the_same_when_it_is_full_at_the_next_start() -> None:
    # A tier that shrinks evicts entries.
    first_bytes = budget(Tier.SHM, BIG)
    again = replace(
        BIG, available_bytes=BIG.available_bytes - first_bytes, shm_held_bytes=first_bytes
    )
    assert budget(Tier.SHM, again) == first_bytes


def test_a_small_disk_gives_a_quarter() -> None:
    assert budget(Tier.DISK, replace(BIG, disk_room_bytes=10 * GIB)) == 2560 * MIB


def test_auto_is_in_whole_mib() -> None:
    machine = replace(BIG, available_bytes=11 * MIB, disk_room_bytes=7 * MIB + 1)
    assert budget(Tier.RAM, machine) == 2 * MIB
    assert budget(Tier.DISK, machine) == 1 * MIB


def test_auto_on_a_machine_without_room_is_no_tier() -> None:
    machine = replace(BIG, shm_size_bytes=0, shm_room_bytes=0)
    assert Tier.SHM not in plan(machine).tiers
    assert plan(machine).describe()[1] == "shm: off (auto: 50% of the 0B of /dev/shm)"


def test_configured_budgets_are_taken_in_whole_slabs() -> None:
    made = plan(BIG, "--ram=1000000", "--shm=4096", "--shm.slab=4KiB", "--disk=200000")
    assert [p.budget_bytes for p in made.tiers.values()] == [15 * 65536, 4096, 3 * 65536]
    assert made.describe()[0] == "ram: 960KiB (configured, in whole 64KiB)"


def test_zero_switches_a_tier_off() -> None:
    made = plan(BIG, "--ram=0", "--disk=0")
    assert list(made.tiers) == [Tier.SHM]
    assert made.describe()[0] == "ram: off (switched off)"


def test_a_plan_carries_what_a_tier_is_made_of() -> None:
    made = plan(BIG, "--ram.policy=arc", "--disk.max_entries=9", "--shm.slab=1MiB")
    assert made.tiers[Tier.RAM].policy == "arc"
    assert made.tiers[Tier.DISK].max_entries == 9
    assert made.tiers[Tier.SHM].slab_bytes == MIB
    assert made.tiers[Tier.RAM].directory is None
    assert str(made.tiers[Tier.DISK].directory) == "/d/p"


def test_budgets_beyond_the_machine_are_warned_of() -> None:
    made = plan(BIG, "--ram=200GiB", "--shm=130GiB", "--disk=2TiB")
    assert made.warnings == (
        "ram.budget and shm.budget together are 330GiB, more than the 256GiB of memory",
        "shm.budget is 130GiB, more than the 120GiB that /dev/shm/p has room for",
        "disk.budget is 2TiB, more than the 1TiB that /d/p has room for",
    )


def test_a_tier_that_is_larger_than_its_budget_is_warned_of() -> None:
    found = replace(BIG, shm_arena_bytes=2**30, disk_arena_bytes=2**31)
    assert plan(found, "--shm=1GiB", "--disk=2GiB").warnings == ()
    assert plan(found, "--shm=512MiB", "--disk=1GiB").warnings == (
        "shm.budget is 512MiB, and the tier is 1GiB now: a start keeps what fits, the last that "
        "would be evicted",
        "disk.budget is 1GiB, and the tier is 2GiB now: a start keeps what fits, the last that "
        "would be evicted",
    )
    assert plan(found, "--shm=0", "--disk=0").warnings == (), "their files are left alone"


SECURED = (
    "--tcp=127.0.0.1:1",
    "--server.tls_cert=/c",
    "--server.tls_key=/k",
    "--server.tokens=/t",
)


def test_shares_are_no_more_than_the_machine_gives() -> None:
    made = plan(BIG, *SECURED, "--shm.shares=a=1GiB,b=2GiB")
    assert made.tiers[Tier.SHM].shares == {"a": 2**30, "b": 2**31}
    assert made.tiers[Tier.RAM].shares == {}
    assert made.warnings == ()
    with pytest.raises(ConfigError, match=r"ram\.shares add up to 1TiB, and the tier has .*auto"):
        plan(BIG, *SECURED, "--ram.shares=a=1TiB")


def test_shares_that_leave_nothing_are_warned_of() -> None:
    (warning,) = plan(BIG, *SECURED, "--ram=3GiB", "--ram.shares=a=1GiB,b=2GiB").warnings
    assert warning.startswith("ram.shares leave nothing of the tier")
