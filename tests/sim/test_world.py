"""The simulated machine: scheduling, death of processes, and what devices lose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sim.files import SECTOR_BYTES, Devices, Fault, SimOs
from tests.sim.threads import SimCondition, SimExecutor, SimLock
from tests.sim.world import Failure, Process, World


def steps_of(seed: int) -> list[str]:
    """The order in which two processes perform three steps each."""
    world, done = World(seed, yield_rate=1), list[str]()

    def work(name: str) -> None:
        for step in range(3):
            world.operate()
            done.append(f"{name}{step}")

    for name in "ab":
        Process(world, name).spawn("main", lambda name=name: work(name))
    world.pass_time(10**9)
    world.end()
    return done


def test_the_seed_decides_who_is_next() -> None:
    orders = [tuple(steps_of(seed)) for seed in range(20)]
    assert [tuple(steps_of(seed)) for seed in range(20)] == orders
    assert len(set(orders)) > 5
    assert all(sorted(order) == ["a0", "a1", "a2", "b0", "b1", "b2"] for order in orders)


def test_nothing_of_a_killed_process_goes_on() -> None:
    world, done = World(1, yield_rate=1), list[int]()
    process = Process(world, "one")

    def work() -> None:
        for step in range(10):
            world.operate()
            done.append(step)

    process.kill_at_op = 4
    process.spawn("main", work)
    process.spawn("other", lambda: world.pass_time(10**12))
    world.pass_time(10**9)
    assert process.dead
    process.reap()
    assert done == [0, 1, 2]
    world.end()


def test_a_wait_that_nothing_ends_is_found() -> None:
    world = World(1)
    condition = SimCondition(world)

    def wait() -> None:
        with condition:
            condition.wait()

    Process(world, "one").spawn("main", wait)
    with pytest.raises(Failure, match="no fiber can ever run again"):
        world.block()
    world.end()


def test_a_fiber_that_dies_is_found() -> None:
    world = World(1)
    Process(world, "one").spawn("main", lambda: [][0])
    with pytest.raises(Failure, match="no task or thread fails silently"):
        world.pass_time(10**9)
    world.end()


def test_a_lock_has_one_holder() -> None:
    world = World(3, yield_rate=1)
    lock, held = SimLock(world), list[int]()

    def work() -> None:
        with lock:
            held.append(1)
            world.operate()
            assert sum(held) == 1
            held.pop()

    for name in "abc":
        Process(world, name).spawn("main", work)
    world.pass_time(10**10)
    world.raise_found()
    world.end()


def test_jobs_of_an_executor_end_or_fail_with_their_process() -> None:
    world, ended = World(1), list[str]()
    process = Process(world, "one")

    def work() -> None:
        executor = SimExecutor(world, 1)
        for job in (lambda: world.operate(), lambda: world.pass_time(10**12), lambda: None):
            future = executor.submit(job)
            future.add_done_callback(lambda f: ended.append(str(f.exception())))
        world.pass_time(10**12)

    process.spawn("main", work)
    world.pass_time(10**9)
    assert ended == ["None"]
    process.die()
    process.reap()
    assert ended == ["None", "the process died", "the process died"]
    world.end()


# ---- devices


def written(seed: int, directory: Path, *, sync: str) -> bytes:
    """The first byte of four sectors after a power loss: synced as `o`, then written as `n`."""
    world = World(seed, yield_rate=0)
    devices = Devices(world, directory)
    system = SimOs(world, devices)
    path = devices.disk / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    system.pwrite(fd, b"o" * 4 * SECTOR_BYTES, 0)
    system.fdatasync(fd)
    system.pwrite(fd, b"n" * 4 * SECTOR_BYTES, 0)
    if sync == "failed":
        devices.faults.append(Fault("sync error", "disk", 2**63, 1, 1))
        with pytest.raises(OSError, match="on purpose"):
            system.fdatasync(fd)
    if sync:
        system.fdatasync(fd)
    os.close(fd)
    devices.lose_power()
    world.end()
    data = path.read_bytes()
    assert len(data) == 4 * SECTOR_BYTES
    return bytes(data[sector * SECTOR_BYTES] for sector in range(4))


@pytest.mark.parametrize(
    ("sync", "some", "every"), [("", True, False), ("done", False, True), ("failed", True, False)]
)
def test_power_loss_takes_sectors_that_were_not_synced(
    tmp_path: Path, sync: str, some: bool, every: bool
) -> None:
    """Sectors of a failed sync may be lost too, even if a later sync succeeds."""
    found = set()
    for seed in range(20):
        directory = tmp_path / str(seed)
        directory.mkdir()
        found.add(written(seed, directory, sync=sync))
    assert (len(found) > 3) == some
    assert (found == {b"nnnn"}) == every


def test_power_loss_takes_all_of_shm(tmp_path: Path) -> None:
    world = World(1)
    devices = Devices(world, tmp_path)
    (devices.shm / "file").write_bytes(b"bytes")
    devices.lose_power()
    world.end()
    assert list(devices.shm.iterdir()) == []


def test_a_fault_ends(tmp_path: Path) -> None:
    world = World(1)
    devices = Devices(world, tmp_path)
    system = SimOs(world, devices)
    fd = os.open(devices.disk / "file", os.O_RDWR | os.O_CREAT)
    devices.faults = [
        Fault("write error", "disk", world.now_ns + 10**9, 1, 2),
        Fault("full", "shm", world.now_ns + 10**9, 1, 1000),
    ]
    for _ in range(2):
        with pytest.raises(OSError, match="on purpose"):
            system.pwrite(fd, b"bytes", 0)
    assert system.pwrite(fd, b"bytes", 0) == 5
    assert system.pread(fd, 5, 0) == b"bytes"
    os.close(fd)
    world.end()
