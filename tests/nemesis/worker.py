"""One inference worker of a run: saves and reads at random from its seed, and checks every byte.

    python -m tests.nemesis.worker ADDRESS SEED

Prints a report of each operation as one line of JSON, until it is killed or its stdin ends.
"""

from __future__ import annotations

import ctypes
import json
import random
import select
import sys
import time
import traceback
from collections.abc import Sequence

from prefixd.client import Client, Hit, SaveItem, SaveReason, Tier
from prefixd.client.local import staging

from .keyspace import ENTRIES, key, payload, payload_bytes

DEADLINE_MS = 2_000
#: The longest time that a worker's C code holds the GIL: longer than a session lasts without a
#: heartbeat.
_LONGEST_HOLD_S = 2.0
#: The most bytes that differ when bits were flipped. In another entry, nearly all bytes differ.
_MOST_FLIPPED = 20


class Worker:
    def __init__(self, address: str, seed: int) -> None:
        self._random = random.Random(seed)
        if seed % 2:  # half of the workers lend the daemon the memory of every save
            staging.LEND_BYTES = 1
        self._client = Client(address, name=f"worker {seed}", deadline_ms=DEADLINE_MS)
        self._operations = [self._save, self._restore, self._look, self._view]

    def step(self) -> None:
        operation = self._random.choice(self._operations)
        tier = self._random.choice(list(ENTRIES))
        first = self._random.randrange(ENTRIES[tier])
        numbers = range(first, min(ENTRIES[tier], first + self._random.choice((1, 4, 16))))
        begun_s = time.time()  # the clock of the daemon's log
        try:
            result = operation(tier, numbers)
        except Exception:
            result = {"op": "raised", "why": traceback.format_exc(), "by": operation.__name__}
        took_s = time.time() - begun_s - float(result.pop("waited_s", 0.0))  # type: ignore[arg-type]
        report = {"tier": int(tier), "begun_s": begun_s, "took_s": took_s} | result
        print(json.dumps(report), flush=True)

    def _save(self, tier: Tier, numbers: range) -> dict[str, object]:
        items = [SaveItem(key(tier, number), payload(tier, number)) for number in numbers]
        outcomes = self._client.save_many(items, tier=tier, reason=SaveReason.EVICT)
        pairs = list(zip(numbers, outcomes, strict=True))
        return {
            "op": "save",
            "outcomes": [outcome.status.label for outcome in outcomes],
            # Saved now or present before: the daemon acknowledges both.
            "saved": [number for number, outcome in pairs if outcome.ok],
        }

    def _restore(self, tier: Tier, numbers: range) -> dict[str, object]:
        with self._client.claim([key(tier, number) for number in numbers]) as hit:
            return {"op": "restore"} | self._restored(hit, tier, numbers)

    def _look(self, tier: Tier, numbers: range) -> dict[str, object]:
        keys = [key(tier, number) for number in numbers]
        hit = self._client.longest_run(keys, claim=False)
        return {"op": "look"} | self._restored(hit, tier, numbers)

    def _restored(self, hit: Hit, tier: Tier, numbers: range) -> dict[str, object]:
        buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
        result = hit.restore_into(buffers)
        right = _right(hit, tier, numbers)
        wrong = [
            number
            for (number, data), buffer, good in zip(right, buffers, result.restored, strict=True)
            if good and buffer != data
        ]
        misses = [str(result.miss or hit.miss)] if not all(result.restored) or hit.miss else []
        return {"outcomes": ["hit"] * sum(result.restored) + misses, "wrong": wrong}

    def _view(self, tier: Tier, numbers: range) -> dict[str, object]:
        """View entries, perhaps for longer than the session lasts, and copy the views. The copies
        count if the release succeeds."""
        hit = self._client.claim([key(tier, number) for number in numbers])
        views = [hit.views(index) for index in range(len(hit))]
        waited_s = self._random.choice((0.0, 0.0, 0.01, self._random.uniform(0, _LONGEST_HOLD_S)))
        if waited_s:
            # This call holds the GIL, so no heartbeat is sent.
            ctypes.PyDLL(None).usleep(int(waited_s * 1e6))
        seen = [None if view is None else b"".join(view) for view in views]
        held = hit.release()
        outcomes = ["held" if held else "lost"] if hit else ["miss"]
        wrong = []
        for (number, data), copy in zip(_right(hit, tier, numbers), seen, strict=True):
            if copy is None or copy == data:
                continue
            if not held:
                outcomes.append("other bytes, claim reported lost")
            elif len(copy) == len(data) and _differing_bytes(copy, data) <= _MOST_FLIPPED:
                outcomes.append("flipped bits")  # views are not verified
            else:
                wrong.append(number)
        return {"op": "view", "outcomes": outcomes, "wrong": wrong, "waited_s": waited_s}


def _differing_bytes(one: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _right(hit: Hit, tier: Tier, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
    """The numbers and the right payloads of the entries of a hit."""
    by_key = {key(tier, number): number for number in numbers}
    found = [by_key[entry.key] for entry in hit.entries]
    for number, entry in zip(found, hit.entries, strict=True):
        assert entry.payload_bytes == payload_bytes(number)
    return [(number, payload(tier, number)) for number in found]


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    while not select.select([sys.stdin], [], [], 0)[0]:
        worker.step()


if __name__ == "__main__":
    main()
