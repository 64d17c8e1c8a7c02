"""The nemesis harms workers, the daemon and files, and checks the survivors against the history."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from prefixd.client import Client, Hit, MissReason
from prefixd.proto.errors import PrefixdError
from tests.support.daemon import eventually, whole_lines
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.warm import WARM

from .history import History, Seen
from .keyspace import BUDGETS, KEYS, SIZES, key, version_of

#: The heartbeat is so short that a stopped worker loses its session.
_FLAGS: Final = (
    "--sessions.heartbeat=500ms",
    "--server.drain_timeout=2s",
    "--disk.probe_interval=50ms",
    "--disk.hung_after=300ms",
)
#: A daemon whose disk tier commits nothing while the file `hangs` or `read-only` exists beside its
#: directory, neither payloads nor records. What is killed in a commit that hangs is not made good.
_FAULTY_DISK: Final = """
import errno, sys, time
from pathlib import Path
from prefixd.server import daemon
from prefixd.tiers.arena_stores import DiskStore
from prefixd.tiers.store import StoreError
def faulty(real):
    def call(self, *arguments):
        place = self.arena.path.parent.parent
        while (place / "hangs").exists():
            time.sleep(0.01)
        if (place / "read-only").exists():
            raise StoreError("Read-only file system, on purpose")
        return real(self, *arguments)
    return call
for name in ("apply", "probe", "record_usage"):
    setattr(DiskStore, name, faulty(getattr(DiskStore, name)))
daemon.main(sys.argv[1:])
"""
#: How long reports of workers may be under way.
_REPORTED_WITHIN_S: Final = 5.0
#: What a device does after a fault for so long is not looked at.
_AFTER_FAULT_S: Final = 2.0
#: The most operations of the workers between two faults, and while a worker is stopped.
_MOST_OPERATIONS: Final = 40
_MOST_OPERATIONS_OF_A_FAULT: Final = 100
_MOST_OPERATIONS_OF_A_STOP: Final = 500
_REPORT_WITHIN_S: Final = 60.0
#: The number of bits that are flipped at once.
_FLIPS_AT_ONCE: Final = 20
#: The log events of a damaged entry that is dropped.
_DAMAGE: Final = ("entry_damaged", "entry_dropped")
_DEADLINE_MS: Final = 30_000
_NO_ANSWER: Final = (MissReason.UNAVAILABLE, MissReason.DEADLINE)


class Faults(NamedTuple):
    """How often each fault is done."""

    kill_daemon: int = 10
    end_daemon: int = 2
    kill_worker: int = 10
    stop_worker: int = 10
    resize: int = 5
    #: The disk hangs, or takes no writes, for a while; every second time the daemon is killed then.
    hang: int = 2
    read_only: int = 2
    #: The number of bits. Half of them are flipped while the daemon runs.
    flip: int = 0


@dataclass
class Report:
    """The results of a run."""

    history: History
    done: Counter[str] = field(default_factory=Counter)
    #: Entries lost because of flipped bits: at most one for each flip.
    damaged: int = 0
    problems: list[str] = field(default_factory=list)
    #: The time from the start of each daemon until it served.
    starts_s: list[float] = field(default_factory=list)

    @property
    def harm(self) -> dict[str, object]:
        """What must not be, without what is empty."""
        history = self.history
        found = {
            "wrong": history.wrong,
            "stale": history.stale,
            "lost": history.lost,
            "raised": history.raised[:10],
            "problems": self.problems,
        }
        return {name: what for name, what in found.items() if what}

    def as_dict(self) -> dict[str, object]:
        history = self.history
        return {
            "good": not self.harm,
            "done": dict(self.done),
            "operations": dict(sorted(history.counts.items())),
            "longest_s": {name: round(took, 2) for name, took in history.longest_s.items()},
            "damaged": self.damaged,
            "slowest_start_s": round(max(self.starts_s, default=0.0), 2),
            **self.harm,
        }


def _answered(client: Client, number: int) -> tuple[float, Hit] | None:
    """When the daemon was asked for an entry, and what it has. None: it gave no answer, which says
    nothing about the entry."""
    begun_s = time.time()
    # One by one, because a damaged entry fails the whole claim.
    hit = client.longest_run([key(number)], claim=False)
    return None if hit.miss in _NO_ANSWER else (begun_s, hit)


class _Worker:
    """A worker process, and a thread that reads its reports."""

    def __init__(self, address: str, numbers: list[int], reports: queue.SimpleQueue[str]) -> None:
        self.process = subprocess.Popen(
            [*WARM, "-m", "tests.hostile.nemesis.worker", address, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_reports, args=(reports,), daemon=True)
        self._reader.start()

    def _read_reports(self, reports: queue.SimpleQueue[str]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reports.put(line)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Damage:
    """The entries that the daemon dropped as damaged, according to its log.

    A drop explains the loss of an entry that was acknowledged to a call which began before the
    drop. The worker's report of that call may be read after the drop.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        #: When each key was last dropped.
        self._dropped_s: dict[str, float] = {}
        #: When records were dropped whose key was damaged too: each may be of any entry.
        self._nameless_s: list[float] = []
        self._read_lines = 0

    def read(self) -> None:
        names = {key(number).hex() for number in range(KEYS)}
        lines = whole_lines(self._log)
        for line in lines[self._read_lines :]:
            event = json.loads(line) if line[:1] == "{" else {}
            if event.get("event") not in _DAMAGE:
                continue
            at_s = datetime.fromisoformat(event["timestamp"]).timestamp()
            if event["key"] in names:
                self._dropped_s[event["key"]] = at_s
            else:
                self._nameless_s.append(at_s)
        self._read_lines = len(lines)

    def explains(self, number: int, begun_s: float) -> bool:
        name = key(number).hex()
        known = self._dropped_s.get(name, 0.0) >= begun_s
        if not known and self._nameless_s and self._nameless_s[-1] >= begun_s:
            self._dropped_s[name] = self._nameless_s.pop()
            return True
        return known


class _Nemesis:
    def __init__(self, daemon: DaemonProcess, random: random.Random, workers: int) -> None:
        self.report = Report(History())
        self._daemon = daemon
        self._random = random
        self._reports: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seeds = iter(range(random.randrange(2**30), 2**31))
        self._slots = workers
        self._workers = [self._worker(slot) for slot in range(workers)]
        self._damage = Damage(daemon.log)
        #: Entries that a read found damaged, which the daemon will log later.
        self._corrupt: set[int] = set()

    def _worker(self, slot: int) -> _Worker:
        numbers = [next(self._seeds), slot, self._slots]
        return _Worker(self._daemon.address, numbers, self._reports)

    def go(self, faults: Faults) -> None:
        flips, rest = divmod(faults.flip, _FLIPS_AT_ONCE)
        plan = [
            *[self.kill_daemon] * faults.kill_daemon,
            *[self.end_daemon] * faults.end_daemon,
            *[self.kill_worker] * faults.kill_worker,
            *[self.stop_worker] * faults.stop_worker,
            *[self.resize] * faults.resize,
            *[self.hang] * faults.hang,
            *[self.read_only] * faults.read_only,
            *[self.flip_running] * (flips // 2),
            *[self.flip_stopped] * (flips - flips // 2 + bool(rest)),
        ]
        self._random.shuffle(plan)
        for step in plan:
            self.take_reports(self._random.randrange(_MOST_OPERATIONS))
            step()
            self.report.done[step.__name__] += 1
            if self.report.problems:
                return
        self.verify()

    def take_reports(self, wait_for: int = 0) -> None:
        """Note all reports of the workers, and wait for at least `wait_for` reports."""
        while wait_for > 0 or not self._reports.empty():
            try:
                line = self._reports.get(timeout=_REPORT_WITHIN_S)
            except queue.Empty:
                self.report.problems.append(f"no worker did anything for {_REPORT_WITHIN_S:g} s")
                return
            wait_for -= 1
            if line.endswith("\n"):  # the last line of a killed worker may be cut off
                self.report.history.add(json.loads(line))
        for worker in self._workers:
            if worker.process.poll() is not None:
                self.report.problems.append(f"a worker ended: {worker.process.returncode}")

    # ---- faults

    def kill_daemon(self) -> None:
        self._check_alive()
        self._daemon.kill()
        self._start()

    def end_daemon(self) -> None:
        status = self._daemon.stop()
        if status:
            self.report.problems.append(f"the daemon ended with {status}: {self._daemon.tail()}")
        self._start()

    def kill_worker(self) -> None:
        index = self._random.randrange(len(self._workers))
        self._workers[index].end()
        self._workers[index] = self._worker(index)

    def resize(self) -> None:
        """To a size that has room for all entries, so that only ram evicts. A later start makes the
        tier as large as it is configured."""
        tier = self._random.choice(list(SIZES))
        budget_bytes = self._random.randint(*SIZES[tier]) * 2**20
        with self._daemon.admin() as admin:
            try:
                admin.resize(tier, budget_bytes)
            except PrefixdError as problem:
                self.report.done[f"resize refused: {type(problem).__name__}"] += 1

    def hang(self) -> None:
        self._fault("hangs")

    def read_only(self) -> None:
        self._fault("read-only")

    def _fault(self, name: str) -> None:
        """The disk has a fault for a while, at the end of which the daemon may be killed."""
        flag = self._daemon.directory / name
        begun_s = time.time()
        kills = self._random.random() < 0.5
        flag.touch()
        try:
            self.take_reports(self._random.randrange(_MOST_OPERATIONS_OF_A_FAULT))
            if kills:
                self._daemon.kill()
        finally:
            flag.unlink()
        if kills:
            self._start(verify=False)
            self.report.done[f"kills while it {name.replace('-', ' ')}"] += 1
        with self._daemon.admin() as admin:
            eventually(lambda: admin.stats().health == "serving")
        self.report.history.faults.append((begun_s, time.time() + _AFTER_FAULT_S))
        self.verify()

    def stop_worker(self) -> None:
        process = self._random.choice(self._workers).process
        process.send_signal(signal.SIGSTOP)
        try:
            self.take_reports(self._random.randrange(_MOST_OPERATIONS_OF_A_STOP))
        finally:
            process.send_signal(signal.SIGCONT)

    def flip_running(self) -> None:
        self._flip()
        self._check_alive()
        self.verify()

    def flip_stopped(self) -> None:
        self._check_alive()
        self._daemon.kill()
        self._flip()
        self._start()

    def _flip(self) -> None:
        paths = [path for path in self._files() if path.stat().st_size]
        for _ in range(_FLIPS_AT_ONCE):
            path = self._random.choice(paths)
            fd = os.open(path, os.O_RDWR)
            try:
                at = self._random.randrange(os.fstat(fd).st_size)
                byte = os.pread(fd, 1, at)[0] ^ 1 << self._random.randrange(8)
                os.pwrite(fd, bytes([byte]), at)
            finally:
                os.close(fd)
        self.report.done["flipped bits"] += _FLIPS_AT_ONCE

    def _files(self) -> list[Path]:
        """All files of the daemon's tiers except lock files."""
        roots = (self._daemon.directory / "disk", self._daemon.shm_directory)
        return [
            path
            for root in roots
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        ]

    # ---- checks

    def _check_alive(self) -> None:
        try:
            os.kill(self._daemon.pid, 0)
            with self._daemon.admin() as admin:
                admin.stats()
        except (OSError, PrefixdError) as problem:
            self.report.problems.append(f"the daemon died: {problem}\n{self._daemon.tail()}")

    def _start(self, *, verify: bool = True) -> None:
        begun_s = time.monotonic()
        try:
            self._daemon.start()
        except PrefixdError as problem:
            self.report.problems.append(f"no start: {problem}")
            return
        self.report.starts_s.append(time.monotonic() - begun_s)
        if verify:
            self.verify()

    def verify(self) -> None:
        """Look at every key, and judge what was seen some time ago."""
        with Client(self._daemon.address, name="verifier", deadline_ms=_DEADLINE_MS) as client:
            for number in range(KEYS):
                self._look(client, number)
        self.take_reports()
        self._judge(time.time() - _REPORTED_WITHIN_S)

    def _look(self, client: Client, number: int) -> None:
        begun_s, hit = eventually(partial(_answered, client, number))
        data = hit.read(0) if hit else None
        ended_s = time.time()
        if data is None:
            if hit:
                self._corrupt.add(number)
            why = "it could not be read" if hit else str(hit.miss)
            self.report.history.saw(Seen(number, None, begun_s, ended_s, why))
            return
        version = version_of(number, data)
        if version is None:
            self.report.history.wrong.append({"op": "verify", "wrong": [number]})
        else:
            self.report.history.saw(Seen(number, version, begun_s, ended_s))

    def _judge(self, before_s: float) -> None:
        self._damage.read()
        self.report.damaged += self.report.history.judge(before_s, self._explained)

    def _explained(self, number: int, begun_s: float) -> bool:
        if not self.report.done["flipped bits"]:
            return False
        return number in self._corrupt or self._damage.explains(number, begun_s)

    def finish(self) -> None:
        """End the workers, and judge everything that was seen."""
        self.close()
        self.take_reports()
        self._judge(inf)

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()


def run(random: random.Random, faults: Faults, *, workers: int) -> Report:
    """Run once on a daemon of its own."""
    with ExitStack() as stack:
        budgets = [f"--{tier}.budget={size}" for tier, size in BUDGETS.items()]
        most = [f"--{tier.label}.max_budget={sizes[1]}MiB" for tier, sizes in SIZES.items()]
        daemon = stack.enter_context(daemon_process(*_FLAGS, *budgets, *most))
        daemon.run_with(_FAULTY_DISK)
        daemon.start()
        nemesis = _Nemesis(daemon, random, workers)
        stack.callback(nemesis.close)
        nemesis.go(faults)
        nemesis.finish()
        return nemesis.report
