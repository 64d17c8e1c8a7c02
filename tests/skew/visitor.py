"""A client, run by the interpreter of one release: saves or restores known bytes, and says what it
got. Uses only what is public in every release that is tried.

    visitor.py save|restore ADDRESS ROUTE SEED COUNT TIER
    visitor.py keys

Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
from hashlib import sha256

import prefixd
from prefixd.client import Client, Key, Namespace, Tier, block_keys, prefix_key

PAYLOAD_BYTES = 20_000
TOKENS = list(range(100, 164))
NAMESPACE = Namespace(bytes(range(32)), "q8_0", bytes(32), salt="salt", shard="1 of 2")
WITHIN_MS = 30_000


def key_of(seed: int, number: int) -> Key:
    return Key(sha256(f"{seed} {number}".encode()).digest())


def payload_of(seed: int, number: int) -> bytes:
    """The bytes of an entry, of its own length."""
    return random.Random(f"{seed} {number}").randbytes(PAYLOAD_BYTES + number)


def save(client: Client, seed: int, count: int, tier: Tier) -> dict[str, object]:
    statuses: dict[str, int] = {}
    for number in range(count):
        payload = payload_of(seed, number)
        saved = client.save(key_of(seed, number), payload, tier=tier, deadline_ms=WITHIN_MS)
        statuses[saved.status.name] = statuses.get(saved.status.name, 0) + 1
    return {"statuses": statuses}


def restore(client: Client, seed: int, count: int) -> dict[str, object]:
    """One run of all keys, pinned, then each by itself."""
    found = wrong = 0
    keys = [key_of(seed, number) for number in range(count)]
    with client.longest_run(keys, deadline_ms=WITHIN_MS) as hit:
        for number in range(len(hit)):
            wrong += hit.read(number) != payload_of(seed, number)
        run = len(hit)
    for number, key in enumerate(keys):
        wanted = payload_of(seed, number)
        buffer = bytearray(len(wanted))
        restored = client.restore_keys([key], [buffer], deadline_ms=WITHIN_MS)
        if restored.run:
            found += 1
            wrong += buffer != wanted
    return {"run": run, "found": found, "wrong": wrong}


def main(arguments: list[str]) -> dict[str, object]:
    what, *rest = arguments
    if what == "keys":
        keys = [*block_keys(NAMESPACE, TOKENS, 16), prefix_key(NAMESPACE, TOKENS)]
        return {"keys": [bytes(key).hex() for key in keys]}
    address, route, seed, count, tier = rest
    with Client(address, local=route == "local", shared_wait_ms=WITHIN_MS // 2) as client:
        if not client.wait_connected(deadline_ms=WITHIN_MS):
            raise SystemExit(f"no session with {address}")
        if what == "save":
            told = save(client, int(seed), int(count), Tier[tier.upper()])
        else:
            told = restore(client, int(seed), int(count))
        rpcs = client.counters["rpcs"]
        failures = {why: n for why, n in client.counters["failures"].items() if n}
    return {**told, "rpcs": rpcs, "failures": failures}


print(json.dumps({"version": prefixd.__version__, **main(sys.argv[1:])}))
