"""One inference worker of a run: saves and reads what its seed says, and checks every byte.

    python -m tests.nemesis.worker ADDRESS SEED

Says on stdout what it did, one JSON object a line, until it is killed or its stdin ends.
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
#: A worker's C code keeps the GIL at most so long: longer than a session lives without a
#: heartbeat.
_LONGEST_HOLD_S = 2.0
#: Bytes of an entry that differ where bits were flipped in it; of another entry's nearly all do.
_MOST_FLIPPED = 20


class Worker:
    def __init__(self, address: str, seed: int) -> None:
        self._random = random.Random(seed)
        if seed % 2:  # every second one lends the daemon whatever it saves
            staging.LEND_BYTES = 1
        self._client = Client(address, name=f"worker {seed}", deadline_ms=DEADLINE_MS)
        self._operations = [self._save, self._restore, self._look, self._view]

    def step(self) -> None:
        operation = self._random.choice(self._operations)
        tier = self._random.choice(list(ENTRIES))
        first = self._random.randrange(ENTRIES[tier])
        numbers = range(first, min(ENTRIES[tier], first + self._random.choice((1, 4, 16))))
        begun_s = time.time()  # what the daemon's log says the time with
        try:
            told = operation(tier, numbers)
        except Exception:
            told = {"op": "raised", "why": traceback.format_exc(), "by": operation.__name__}
        took_s = time.time() - begun_s - float(told.pop("waited_s", 0.0))  # type: ignore[arg-type]
        said = {"tier": int(tier), "begun_s": begun_s, "took_s": took_s} | told
        print(json.dumps(said), flush=True)

    def _save(self, tier: Tier, numbers: range) -> dict[str, object]:
        items = [SaveItem(key(tier, number), payload(tier, number)) for number in numbers]
        outcomes = self._client.save_many(items, tier=tier, reason=SaveReason.EVICT)
        pairs = list(zip(numbers, outcomes, strict=True))
        return {
            "op": "save",
            "outcomes": [outcome.status.label for outcome in outcomes],
            # Saved now or there before: the daemon vouches for both.
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
        """Looked at, perhaps for longer than the session lasts, and copied; good if the release
        says so."""
        hit = self._client.claim([key(tier, number) for number in numbers])
        views = [hit.views(index) for index in range(len(hit))]
        waited_s = self._random.choice((0.0, 0.0, 0.01, self._random.uniform(0, _LONGEST_HOLD_S)))
        if waited_s:
            # Holding the GIL: no heartbeat is sent meanwhile.
            ctypes.PyDLL(None).usleep(int(waited_s * 1e6))
        seen = [None if view is None else b"".join(view) for view in views]
        held = hit.release()
        outcomes = ["held" if held else "lost"] if hit else ["miss"]
        wrong = []
        for (number, data), copy in zip(_right(hit, tier, numbers), seen, strict=True):
            if copy is None or copy == data:
                continue
            if not held:
                outcomes.append("other bytes, and told so")
            elif len(copy) == len(data) and _differing_bytes(copy, data) <= _MOST_FLIPPED:
                outcomes.append("flipped bits")  # nobody checks a view
            else:
                wrong.append(number)
        return {"op": "view", "outcomes": outcomes, "wrong": wrong, "waited_s": waited_s}


def _differing_bytes(one: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _right(hit: Hit, tier: Tier, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
    """What the entries of a hit have to be."""
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
