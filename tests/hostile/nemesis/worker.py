"""One inference worker of a run: saves, deletes and reads at random, and checks every byte.

    python -m tests.hostile.nemesis.worker ADDRESS SEED SLOT WORKERS

It saves and deletes the keys of its slot only, and reads all. Prints a report of each operation as
one line of JSON, until it is killed or its stdin ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import sys
import time
import traceback
from collections.abc import Callable

from prefixd.client import Client, Hit, SaveItem, SaveReason, Tier
from prefixd.client.local import staging

from .history import labels
from .keyspace import KEYS, VERSION_DIGITS, key, payload, version_of, versions_in

DEADLINE_MS = 2_000
#: The longest time that a worker's C code holds the GIL: longer than a session lasts without a
#: heartbeat.
_LONGEST_HOLD_S = 2.0
#: The most bytes that differ when bits were flipped. In another entry, nearly all bytes differ.
_MOST_FLIPPED = 20


class Worker:
    def __init__(self, address: str, seed: int, slot: int, workers: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._own = range(slot, KEYS, workers)
        if seed % 2:  # half of the workers lend the daemon the memory of every save
            staging.LEND_BYTES = 1
        self._client = Client(address, name=f"worker {seed}", deadline_ms=DEADLINE_MS)
        self._operations: list[Callable[[], dict[str, object]]] = [
            *(self._save, self._save, self._delete),
            *(self._restore, self._look, self._view),
        ]

    def step(self) -> None:
        operation = self._random.choice(self._operations)
        begun_s = time.time()  # the clock of the daemon's log
        try:
            result = operation()
        except Exception:
            result = {"op": "raised", "why": traceback.format_exc(), "by": operation.__name__}
        ended_s = time.time()
        took_s = ended_s - begun_s - float(result.pop("waited_s", 0.0))  # type: ignore[arg-type]
        times = {"begun_s": begun_s, "ended_s": ended_s, "took_s": took_s}
        self._report(times | result)

    def _report(self, report: dict[str, object]) -> None:
        print(json.dumps({"worker": self._seed} | report), flush=True)

    def _some(self, numbers: range) -> list[int]:
        first = self._random.randrange(len(numbers))
        return list(numbers[first : first + self._random.choice((1, 2, 6))])

    def _save(self) -> dict[str, object]:
        tier = self._random.choice(list(Tier))
        numbers = self._some(self._own)
        versions = [os.urandom(VERSION_DIGITS // 2).hex() for _ in numbers]
        pairs = list(zip(numbers, versions, strict=True))
        items = [SaveItem(key(number), payload(number, version)) for number, version in pairs]
        self._report(
            {
                "op": "begin",
                "numbers": numbers,
                "versions": versions,
                "tier": int(tier),
                "begun_s": time.time(),
            }
        )
        outcomes = self._client.save_many(items, tier=tier, reason=SaveReason.EVICT)
        return {
            "op": "save",
            "changed": numbers,
            "outcomes": labels(outcome.status for outcome in outcomes),
        }

    def _delete(self) -> dict[str, object]:
        numbers = self._some(self._own)
        self._report({"op": "begin", "numbers": numbers, "begun_s": time.time()})
        results = self._client.delete([key(number) for number in numbers])
        return {"op": "delete", "changed": numbers, "outcomes": labels(results)}

    def _restore(self) -> dict[str, object]:
        numbers = self._some(range(KEYS))
        with self._client.claim([key(number) for number in numbers]) as hit:
            return {"op": "restore"} | self._restored(hit, numbers)

    def _look(self) -> dict[str, object]:
        numbers = self._some(range(KEYS))
        hit = self._client.longest_run([key(number) for number in numbers], claim=False)
        return {"op": "look"} | self._restored(hit, numbers)

    def _restored(self, hit: Hit, numbers: list[int]) -> dict[str, object]:
        buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
        result = hit.restore_into(buffers)
        read, wrong = [], []
        for number, buffer, good in zip(
            _numbers_of(hit, numbers), buffers, result.restored, strict=True
        ):
            version = version_of(number, bytes(buffer)) if good else None
            if version is not None:
                read.append((number, version))
            elif good:
                wrong.append(number)
        misses = [str(result.miss or hit.miss)] if not all(result.restored) or hit.miss else []
        outcomes = ["hit"] * sum(result.restored) + misses
        return {"outcomes": outcomes, "read": read, "wrong": wrong}

    def _view(self) -> dict[str, object]:
        """View entries, perhaps for longer than the session lasts, and copy the views. The copies
        count if the release succeeds."""
        numbers = self._some(range(KEYS))
        hit = self._client.claim([key(number) for number in numbers])
        views = [hit.views(index) for index in range(len(hit))]
        waited_s = self._random.choice((0.0, 0.0, 0.01, self._random.uniform(0, _LONGEST_HOLD_S)))
        if waited_s:
            # This call holds the GIL, so no heartbeat is sent.
            ctypes.PyDLL(None).usleep(int(waited_s * 1e6))
        seen = [None if view is None else b"".join(view) for view in views]
        held = hit.release()
        outcomes = ["held" if held else "lost"] if hit else ["miss"]
        read, wrong = [], []
        for number, copy in zip(_numbers_of(hit, numbers), seen, strict=True):
            if copy is None:
                continue
            version = version_of(number, copy)
            if version is None and not held:
                outcomes.append("other bytes, claim reported lost")
            elif version is None and _flipped(number, copy):
                outcomes.append("flipped bits")  # views are not verified
            elif version is None:
                wrong.append(number)
            elif held:
                # It was there when it was claimed, and stays as it was.
                read.append((number, version))
        return {
            "op": "view",
            "outcomes": outcomes,
            "read": read,
            "wrong": wrong,
            "waited_s": waited_s,
        }


def _flipped(number: int, copy: bytes) -> bool:
    """Whether these are the bytes of a version, but for some bits."""
    for version in versions_in(number, copy):
        right = payload(number, version)
        if len(right) == len(copy) and _differing_bytes(copy, right) <= _MOST_FLIPPED:
            return True
    return False


def _differing_bytes(one: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _numbers_of(hit: Hit, numbers: list[int]) -> list[int]:
    """The numbers of the entries of a hit."""
    by_key = {key(number): number for number in numbers}
    return [by_key[entry.key] for entry in hit.entries]


def main() -> None:
    address, *numbers = sys.argv[1:]
    worker = Worker(address, *map(int, numbers))
    while not select.select([sys.stdin], [], [], 0)[0]:
        worker.step()


if __name__ == "__main__":
    main()
