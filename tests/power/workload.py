"""The workload of a recorded daemon, and the entries that have to survive a loss."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefixd.client import Client, Key, SaveItem, SaveReason, SaveStatus, Tier
from prefixd.client.ctl.private import PrivateDaemon

from .recording import Recording

#: Some forty saves fill the tier, and later ones evict.
BUDGET_BYTES: Final = 3 * 2**20
SMALL_BUDGET_BYTES: Final = 2 * 2**20
SLAB_BYTES: Final = 4096
_KEYS: Final = 90
_MOST_BYTES: Final = 60_000
_DEADLINE_MS: Final = 30_000


def key(number: int) -> Key:
    return Key(hashlib.sha256(b"power %d" % number).digest())


def payload(number: int, version: int) -> bytes:
    rng = random.Random(f"{number} {version}")
    return rng.randbytes(rng.randint(1, _MOST_BYTES))


@dataclass
class _Attempt:
    """An attempt to save a version of a key. Its times are numbers of marks."""

    version: int
    begun: int
    acknowledged: int | None = None


@dataclass
class History:
    """For each key: the attempts to save it, and the times after which it may have been removed."""

    attempts: dict[int, list[_Attempt]] = field(default_factory=lambda: defaultdict(list))
    removed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def problems(self, found: Mapping[Key, bytes], at: int) -> list[str]:
        """What is wrong with `found`: the entries a daemon served after a loss at mark `at`."""
        known = {key(number) for number in self.attempts}
        problems = [f"{unknown.hex()} was never saved" for unknown in found.keys() - known]
        for number, attempts in self.attempts.items():
            begun = [attempt for attempt in attempts if attempt.begun <= at]
            safe = [a for a in begun if a.acknowledged is not None and a.acknowledged <= at]
            data = found.get(key(number))
            if data is None:
                if safe and not any(safe[-1].begun < t <= at for t in self.removed[number]):
                    problems.append(f"entry {number} was acknowledged but is lost")
                continue
            least = safe[-1].version if safe else 0
            allowed = [a.version for a in begun if a.version >= least]
            if data not in [payload(number, version) for version in allowed]:
                problems.append(f"entry {number} has bytes that were never saved, or older ones")
        return problems

    @property
    def acknowledged(self) -> int:
        return sum(a.acknowledged is not None for many in self.attempts.values() for a in many)


class Workload:
    """Saves, deletes and restarts. One thread, so that the order of acknowledgements is known."""

    def __init__(self, daemon: PrivateDaemon, recording: Recording, rng: random.Random) -> None:
        self.history = History()
        self._daemon = daemon
        self._recording = recording
        self._rng = rng
        self._present: set[int] = set()

    def run(self, operations: int) -> None:
        """Perform operations, interrupted by a kill, an orderly restart and two resizes."""
        third = max(1, operations // 3)
        self._operate(third)
        self._daemon.kill()
        self._start()
        self._resize(SMALL_BUDGET_BYTES)
        self._operate(third)
        self._daemon.stop()
        self._start()
        self._resize(BUDGET_BYTES)
        self._operate(operations - 2 * third)

    def _start(self) -> None:
        with self._recording.preloaded():
            self._daemon.start()

    def _resize(self, budget_bytes: int) -> None:
        begun = self._recording.mark("resize")
        with self._daemon.admin() as admin:
            admin.resize(Tier.DISK, budget_bytes)
        with self._client() as client:
            self._note_removed(client, begun)

    def _client(self) -> Client:
        return Client(self._daemon.address, name="power", deadline_ms=_DEADLINE_MS)

    def _operate(self, operations: int) -> None:
        with self._client() as client:
            assert client.wait_connected()
            for _ in range(operations):
                if self._present and self._rng.random() < 0.25:
                    self._delete(client)
                else:
                    self._save(client)

    def _save(self, client: Client) -> None:
        absent = sorted(set(range(_KEYS)) - self._present)
        numbers = self._rng.sample(absent, min(len(absent), self._rng.choice((1, 1, 3, 8))))
        begun = self._recording.mark("save")
        attempts = []
        for number in numbers:
            attempt = _Attempt(len(self.history.attempts[number]) + 1, begun)
            self.history.attempts[number].append(attempt)
            attempts.append(attempt)
        items = [
            SaveItem(key(number), payload(number, attempt.version), 512)
            for number, attempt in zip(numbers, attempts, strict=True)
        ]
        outcomes = client.save_many(items, tier=Tier.DISK, reason=SaveReason.EVICT)
        acknowledged = self._recording.mark("saved")
        for number, attempt, outcome in zip(numbers, attempts, outcomes, strict=True):
            if outcome.status is SaveStatus.SAVED:
                attempt.acknowledged = acknowledged
                self._present.add(number)
        self._note_removed(client, begun)

    def _delete(self, client: Client) -> None:
        numbers = self._rng.sample(sorted(self._present), min(len(self._present), 3))
        begun = self._recording.mark("delete")
        client.delete([key(number) for number in numbers])
        self._note_removed(client, begun)
        assert not self._present & set(numbers)

    def _note_removed(self, client: Client, begun: int) -> None:
        """Note that entries which are gone by now were removed after `begun`."""
        numbers = sorted(self._present)
        presence = client.exists([key(number) for number in numbers])
        for number, exists in zip(numbers, presence, strict=True):
            if not exists:
                self.history.removed[number].append(begun)
                self._present.discard(number)


def read_all(client: Client, numbers: Sequence[int]) -> dict[Key, bytes]:
    """The payloads of these entries as a client reads them, with checksums verified."""
    found = {}
    for number in numbers:
        with client.claim([key(number)]) as hit:
            data = hit.read(0) if hit else None
            if data is not None:
                found[key(number)] = bytes(data)
    return found
