"""Records a daemon, and recovers the files that a power loss may have left."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prefixd.client import Client, Key
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.tiers.arena_stores import DiskStore
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.store import Damaged
from tests.support.daemon import SMALL_SLABS, problems_of, temporary_directories

from .device import CHOICES, Device, build
from .recording import Event, Kind, Recording
from .workload import BUDGET_BYTES, SLAB_BYTES, History, Workload, read_all

_FLAGS: Final = (
    *SMALL_SLABS,
    "--ram.budget=1MiB",
    "--shm.budget=1MiB",
    f"--disk.budget={BUDGET_BYTES}",
    f"--disk.max_budget={BUDGET_BYTES}",
)
SECTORS_BYTES: Final = (512, 4096)
#: The part of the recorded directory that is checked. The daemon's other files lie beside it.
TIER: Final = "disk"


@contextmanager
def daemon_at(directory: Path, shm_directory: Path) -> Iterator[PrivateDaemon]:
    """A daemon with its disk tier in `directory / "disk"`; not started."""
    daemon = PrivateDaemon(directory, shm_directory, _FLAGS)
    try:
        yield daemon
    finally:
        daemon.stop()


@dataclass
class Recorded:
    """A run of a daemon, or of a recovery."""

    events: list[Event]
    #: the files from before the recording, all of them safe
    before: Path | None
    history: History


def record(rng: random.Random, operations: int) -> Recorded:
    """Record a daemon under a workload. Checks that the records explain its files byte for byte."""
    with temporary_directories() as (directory, shm_directory):
        recording = Recording(shm_directory, directory)
        (shm_directory / "tier").mkdir()
        with daemon_at(directory, shm_directory / "tier") as daemon:
            with recording.preloaded():
                daemon.start()
            workload = Workload(daemon, recording, rng)
            workload.run(operations)
        events = recording.events()
        recording.close()
        check_complete(events, Device(), directory, TIER)
        return Recorded(events, None, workload.history)


def check_complete(events: list[Event], device: Device, root: Path, below: str) -> None:
    """Raises AssertionError unless the records reproduce the files below `root`."""
    for event in events:
        device.add(event)
    written = {name: data for name, data in device.written().items() if name.startswith(below)}
    actual = {
        str(path.relative_to(root)): path.read_bytes()
        for path in (root / below).rglob("*")
        if path.is_file()
    }
    assert written.keys() == actual.keys(), f"{written.keys() ^ actual.keys()} were not recorded"
    for name, data in actual.items():
        assert written[name] == data, f"a write to {name} was not recorded"


@dataclass
class Report:
    """The results of losses."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Losses:
    """Power losses at random records of one recording."""

    def __init__(self, recorded: Recorded, rng: random.Random) -> None:
        self.report = Report()
        self._recorded = recorded
        self._rng = rng
        self.report.counts["records"] = len(recorded.events)
        self.report.counts["acknowledged saves"] = recorded.history.acknowledged

    def places(self, count: int) -> list[int]:
        """Random numbers of records after which the power is lost, in order. They include records
        before the first save."""
        cuts = [
            index + 1
            for index, event in enumerate(self._recorded.events)
            if event.kind is not Kind.MARK
        ]
        return sorted(self._rng.sample(cuts, min(count, len(cuts))))

    def images(self, count: int) -> Iterator[tuple[str, int, dict[str, bytes]]]:
        """For each loss: its name, the last mark before it, and the files that it leaves."""
        device, done, mark = Device(), 0, 0
        for number, place in enumerate(self.places(count)):
            for event in self._recorded.events[done:place]:
                device.add(event)
                if event.kind is Kind.MARK:
                    mark = event.number
            done = place
            choice = CHOICES[number % len(CHOICES)]
            sector_bytes = self._rng.choice(SECTORS_BYTES)
            self.report.counts["losses"] += 1
            self.report.counts["changes that a loss could undo"] += device.unsafe
            name = f"after record {place}, {choice} kept in sectors of {sector_bytes}"
            yield name, mark, device.lost(self._rng, choice, sector_bytes)

    def judge(self, name: str, mark: int, found: dict[Key, bytes], problems: list[str]) -> None:
        """Judge the entries that were served after a loss, and the problems that were reported."""
        self.report.counts["recovered entries"] += len(found)
        wrong = problems + self._recorded.history.problems(found, mark)
        self.report.problems += [f"{name}: {problem}" for problem in wrong]

    # ---- the store alone

    def by_store(self, count: int) -> None:
        """Recover with the store, in this process."""
        for name, mark, files in self.images(count):
            with temporary_directories() as (directory, _):
                build(files, directory)
                self.judge(name, mark, *recovered(directory / TIER))

    # ---- the daemon

    def by_daemon(self, count: int, again_each: int = 0) -> None:
        """Start a daemon after each loss, and read with a client. The recovery from every
        `again_each`th loss is also recorded and interrupted by further losses."""
        numbers = sorted(self._recorded.history.attempts)
        for number, (name, mark, files) in enumerate(self.images(count)):
            with temporary_directories() as (directory, shm_directory):
                build(files, directory)
                if again_each and number % again_each == 0:
                    self._lose_power_during_recovery(name, mark, files)
                with daemon_at(directory, shm_directory) as daemon:
                    daemon.start()
                    with daemon.admin() as admin:
                        problems = problems_of(admin)
                    with Client(daemon.address, deadline_ms=30_000) as client:
                        assert client.wait_connected()
                        self.judge(name, mark, read_all(client, numbers), problems)

    def _lose_power_during_recovery(
        self, name: str, mark: int, files: dict[str, bytes], count: int = 3
    ) -> None:
        """Lose the power while the store recovers from a loss."""
        with temporary_directories() as (directory, log_directory):
            build(files, directory)
            device = Device.of(directory)
            recording = Recording(log_directory, directory)
            with recording.preloaded():
                subprocess.run(
                    [sys.executable, "-m", "tests.power.recover", str(directory / TIER)],
                    check=True,
                    cwd=Path(__file__).parents[2],
                )
            events = recording.events()
            recording.close()
            places = sorted(self._rng.sample(range(len(events)), min(count, len(events))))
            done = 0
            for place in places:
                for event in events[done:place]:
                    device.add(event)
                done = place
                choice = self._rng.choice(CHOICES)
                left = device.lost(self._rng, choice, self._rng.choice(SECTORS_BYTES))
                self.report.counts["losses during a recovery"] += 1
                with temporary_directories() as (other, _):
                    build(left, other)
                    found, problems = recovered(other / TIER)
                    self.judge(
                        f"{name}; then after record {place} of the recovery", mark, found, problems
                    )
            for event in events[done:]:
                device.add(event)
            check_complete([], device, directory, TIER)


def recovered(directory: Path) -> tuple[dict[Key, bytes], list[str]]:
    """The entries that the store in a directory recovers, and the problems that it finds.

    The bytes of an entry are safe before its record is written. So every entry with a record has
    to be right, even if its save was never acknowledged.
    """
    store = DiskStore(directory, BUDGET_BYTES, SLAB_BYTES)
    found, problems = {}, []
    try:
        store.set_incarnation(bytes(16))
        extents = ExtentAllocator(store.size_bytes, SLAB_BYTES, store.header_bytes)
        for batch in store.recover():
            problems += [f"{key.hex()} was dropped: {why}" for key, why in batch.dropped]
            for entry in batch.entries:
                entry_record = entry.record
                extents.claim(entry_record.location)
                try:
                    store.verify(entry_record, entry_record.payload_crc32c)
                except Damaged as problem:
                    problems.append(f"{entry_record.key.hex()} has a record but: {problem}")
                    continue
                views = store.read(entry_record, 0, entry_record.payload_bytes)
                found[entry_record.key] = b"".join(views)
    finally:
        store.close()
    return found, problems
