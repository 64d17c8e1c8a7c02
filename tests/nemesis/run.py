"""The nemesis: does harm to workers, daemon and files, and holds what it finds against history."""

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

#: So short that a stopped worker loses its session.
_FLAGS: Final = ("--sessions.heartbeat=500ms", "--server.drain_timeout=2s")
#: Between two kinds of harm, and while a worker is stopped, the workers do at most so much.
_MOST_OPERATIONS: Final = 40
_MOST_OPERATIONS_OF_A_STOP: Final = 500
_SAYS_WITHIN_S: Final = 60.0
#: Bits that are flipped at once.
_FLIPS_AT_ONCE: Final = 20
#: What the daemon's log calls the end of an entry that was damaged.
_DAMAGE: Final = ("entry_damaged", "entry_dropped")
_DEADLINE_MS: Final = 30_000


class Faults(NamedTuple):
    """How often each is done."""

    kill_daemon: int = 10
    end_daemon: int = 2
    kill_worker: int = 10
    stop_worker: int = 10
    #: Bits, half of them while the daemon runs.
    flip: int = 0


@dataclass
class Report:
    """What a run showed."""

    history: History
    done: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    #: Lost because of flipped bits: at most one for each flip.
    damaged: int = 0
    problems: list[str] = field(default_factory=list)
    #: From the start of a daemon until it serves.
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
    """A process, and a thread that reads what it says."""

    def __init__(self, address: str, seed: int, said: queue.SimpleQueue[str]) -> None:
        self.process = subprocess.Popen(
            [*WARM, "-m", "tests.nemesis.worker", address, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._reader.start()

    def _listen(self, said: queue.SimpleQueue[str]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said.put(line)

    def end(self) -> None:
        """At once."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Damage:
    """What the daemon said of entries that it dropped because they were damaged.

    It explains the loss of what was acknowledged to a call that began before. A call may say so
    late: it was told that an entry is there, and the entry is found damaged before its line is
    read.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        #: By key: when it was last dropped.
        self._dropped_s: dict[str, float] = {}
        #: Drops of records so damaged that they show no key of ours: each may be any entry's.
        self._nameless_s: list[float] = []
        self._read_lines = 0

    def read(self) -> None:
        names = {key(tier, number).hex() for tier in Tier for number in range(ENTRIES[tier])}
        lines = whole_lines(self._log)
        for line in lines[self._read_lines :]:
            told = json.loads(line) if line[:1] == "{" else {}
            if told.get("event") not in _DAMAGE:
                continue
            at_s = datetime.fromisoformat(told["timestamp"]).timestamp()
            if told["key"] in names:
                self._dropped_s[told["key"]] = at_s
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
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seeds = iter(range(random.randrange(2**30), 2**31))
        self._workers = [self._worker() for _ in range(workers)]
        self._damage = Damage(daemon.log)

    def _worker(self) -> _Worker:
        return _Worker(self._daemon.address, next(self._seeds), self._said)

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
            self.listen(self._random.randrange(_MOST_OPERATIONS))
            step()
            self.report.done[step.__name__] += 1
            if self.report.problems:
                return
        self.verify()

    def listen(self, wait_for: int = 0) -> None:
        """Take down what the workers said, and wait until they did so many things."""
        while wait_for > 0 or not self._said.empty():
            try:
                line = self._said.get(timeout=_SAYS_WITHIN_S)
            except queue.Empty:
                self.report.problems.append(f"no worker did anything for {_SAYS_WITHIN_S:g} s")
                return
            wait_for -= 1
            if line.endswith("\n"):  # the last words of one that was killed may be cut off
                self.report.history.add(json.loads(line))
        for worker in self._workers:
            if worker.process.poll() is not None:
                self.report.problems.append(f"a worker ended: {worker.process.returncode}")

    # ---- harm

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
            self.listen(self._random.randrange(_MOST_OPERATIONS_OF_A_STOP))
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
        """Everything that the daemon keeps, but what only says that it runs."""
        roots = (self._daemon.directory / "disk", self._daemon.shm_directory)
        return [
            path
            for root in roots
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        ]

    # ---- what must hold

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
        """Every acknowledged entry of a durable tier is there, and right, but what was flipped."""
        self.listen()
        history = self.report.history
        flipped = self.report.done["flipped bits"] > 0
        with Client(self._daemon.address, name="verifier", deadline_ms=_DEADLINE_MS) as client:
            for tier in DURABLE:
                numbers = sorted(history.acknowledged.get(tier, {}))
                present, corrupt, misses = self._present(client, tier, numbers)
                # Read afterwards: workers that run meanwhile find damage too, and have it dropped.
                self._damage.read()
                for number in history.lost(tier, present):
                    begun_s = history.acknowledged[tier].pop(number)
                    # What a reader noticed, the daemon is told, and says so later.
                    seen = flipped and number in corrupt
                    if seen or self._damage.explains(tier, number, begun_s):
                        self.report.damaged += 1
                    else:
                        why = misses.get(number, "corrupt")
                        self.report.lost.append(f"{tier.label} {number}: {why}")

    def _present(
        self, client: Client, tier: Tier, numbers: list[int]
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """What is there, what does not match its checksum, and why the rest is not there."""
        present, corrupt = [], []
        misses: dict[int, str] = {}
        for number in numbers:
            # One by one, for what is damaged takes its claim with it.
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
    """One run on a daemon of its own, gone in the end."""
    with ExitStack() as stack:
        daemon = stack.enter_context(private_daemon(*_FLAGS, **BUDGETS))
        nemesis = _Nemesis(daemon, random, workers)
        stack.callback(nemesis.close)
        nemesis.go(faults)
        return nemesis.report
