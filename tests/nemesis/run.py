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
from pathlib import Path
from typing import Final, NamedTuple

from prefixd.client import Client, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import PrefixdError
from tests.support.daemon import private_daemon, whole_lines
from tests.support.warm import WARM

from .history import History
from .keyspace import BUDGETS, DURABLE, ENTRIES, key, payload

#: The heartbeat is so short that a stopped worker loses its session.
_FLAGS: Final = ("--sessions.heartbeat=500ms", "--server.drain_timeout=2s")
#: The most operations of the workers between two faults, and while a worker is stopped.
_MOST_OPERATIONS: Final = 40
_MOST_OPERATIONS_OF_A_STOP: Final = 500
_REPORT_WITHIN_S: Final = 60.0
#: The number of bits that are flipped at once.
_FLIPS_AT_ONCE: Final = 20
#: The log events of a damaged entry that is dropped.
_DAMAGE: Final = ("entry_damaged", "entry_dropped")
_DEADLINE_MS: Final = 30_000


class Faults(NamedTuple):
    """How often each fault is done."""

    kill_daemon: int = 10
    end_daemon: int = 2
    kill_worker: int = 10
    stop_worker: int = 10
    #: The number of bits. Half of them are flipped while the daemon runs.
    flip: int = 0


@dataclass
class Report:
    """The results of a run."""

    history: History
    done: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    #: Entries lost because of flipped bits: at most one for each flip.
    damaged: int = 0
    problems: list[str] = field(default_factory=list)
    #: The time from the start of each daemon until it served.
    starts_s: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        history = self.history
        return not (history.wrong or history.raised or self.lost or self.problems)

    def as_dict(self) -> dict[str, object]:
        history = self.history
        return {
            "good": self.good,
            "done": dict(self.done),
            "operations": dict(sorted(history.counts.items())),
            "longest_s": {name: round(took, 2) for name, took in history.longest_s.items()},
            "acknowledged": {tier.label: len(history.acknowledged.get(tier, {})) for tier in Tier},
            "wrong": history.wrong,
            "raised": history.raised[:10],
            "lost": self.lost,
            "damaged": self.damaged,
            "problems": self.problems,
            "slowest_start_s": round(max(self.starts_s, default=0.0), 2),
        }


class _Worker:
    """A worker process, and a thread that reads its reports."""

    def __init__(self, address: str, seed: int, reports: queue.SimpleQueue[str]) -> None:
        self.process = subprocess.Popen(
            [*WARM, "-m", "tests.nemesis.worker", address, str(seed)],
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
        names = {key(tier, number).hex() for tier in Tier for number in range(ENTRIES[tier])}
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

    def explains(self, tier: Tier, number: int, begun_s: float) -> bool:
        name = key(tier, number).hex()
        known = self._dropped_s.get(name, 0.0) >= begun_s
        if not known and self._nameless_s and self._nameless_s[-1] >= begun_s:
            self._dropped_s[name] = self._nameless_s.pop()
            return True
        return known


class _Nemesis:
    def __init__(self, daemon: PrivateDaemon, random: random.Random, workers: int) -> None:
        self.report = Report(History())
        self._daemon = daemon
        self._random = random
        self._reports: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seeds = iter(range(random.randrange(2**30), 2**31))
        self._workers = [self._worker() for _ in range(workers)]
        self._damage = Damage(daemon.log)

    def _worker(self) -> _Worker:
        return _Worker(self._daemon.address, next(self._seeds), self._reports)

    def go(self, faults: Faults) -> None:
        flips, rest = divmod(faults.flip, _FLIPS_AT_ONCE)
        plan = [
            *[self.kill_daemon] * faults.kill_daemon,
            *[self.end_daemon] * faults.end_daemon,
            *[self.kill_worker] * faults.kill_worker,
            *[self.stop_worker] * faults.stop_worker,
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
        self._workers[index] = self._worker()

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

    def _start(self) -> None:
        begun_s = time.monotonic()
        try:
            self._daemon.start()
        except PrefixdError as problem:
            self.report.problems.append(f"no start: {problem}")
            return
        self.report.starts_s.append(time.monotonic() - begun_s)
        self.verify()

    def verify(self) -> None:
        """Check that all acknowledged entries of durable tiers are present and right. Flipped bits
        explain losses."""
        self.take_reports()
        history = self.report.history
        flipped = self.report.done["flipped bits"] > 0
        with Client(self._daemon.address, name="verifier", deadline_ms=_DEADLINE_MS) as client:
            for tier in DURABLE:
                numbers = sorted(history.acknowledged.get(tier, {}))
                present, corrupt, misses = self._present(client, tier, numbers)
                # The log is read last, because running workers also find damage and report it.
                self._damage.read()
                for number in history.lost(tier, present):
                    begun_s = history.acknowledged[tier].pop(number)
                    # A reader has found the damage, and the daemon will log it later.
                    seen = flipped and number in corrupt
                    if seen or self._damage.explains(tier, number, begun_s):
                        self.report.damaged += 1
                    else:
                        why = misses.get(number, "corrupt")
                        self.report.lost.append(f"{tier.label} {number}: {why}")

    def _present(
        self, client: Client, tier: Tier, numbers: list[int]
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """The present entries, those with a wrong checksum, and the reasons of all other misses."""
        present, corrupt = [], []
        misses: dict[int, str] = {}
        for number in numbers:
            # One by one, because a damaged entry fails the whole claim.
            hit = client.longest_run([key(tier, number)], claim=False)
            if not hit:
                misses[number] = str(hit.miss)
                continue
            data = hit.read(0)
            if data is None:
                corrupt.append(number)
                continue
            present.append(number)
            if data != payload(tier, number):
                self.report.history.wrong.append({"op": "verify", "tier": tier, "wrong": [number]})
        return present, corrupt, misses

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def run(random: random.Random, faults: Faults, *, workers: int) -> Report:
    """Run once on a daemon of its own."""
    with ExitStack() as stack:
        daemon = stack.enter_context(private_daemon(*_FLAGS, **BUDGETS))
        nemesis = _Nemesis(daemon, random, workers)
        stack.callback(nemesis.close)
        nemesis.go(faults)
        return nemesis.report
