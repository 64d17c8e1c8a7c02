"""An engine's worker as a user writes it: `test_user_script.py` runs it, and checks its types.

python user_script.py ADDRESS
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from prefixd.client import (
    Adapter,
    AsyncClient,
    Client,
    Disconnected,
    Entry,
    Hit,
    Key,
    MissReason,
    Namespace,
    Published,
    ReserveItem,
    RestoreResult,
    SaveItem,
    SaveOutcome,
    SavePolicy,
    SaveReason,
    SaveStatus,
    Synced,
    Tier,
    Watch,
    errors,
    prefix_key,
)

BLOCK_TOKENS = 512


@dataclass
class Engine:
    """Computes: a payload a block."""

    block_bytes: int

    def prefill(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes(self.block_bytes) for _ in range(len(tokens) // BLOCK_TOKENS)]


def namespace(rank: int, size: int) -> Namespace:
    base = Namespace(b"w" * 32, "q4_k_m", b"c" * 32, adapters=(Adapter(b"a" * 32, 1.0),))
    return replace(base, shard=f"tp {rank}/{size}") if size > 1 else base


def serve(cache: Client, model: Namespace, tokens: list[int], engine: Engine) -> int:
    chain = cache.chain(model, tokens, block_tokens=BLOCK_TOKENS)
    buffers = [bytearray(engine.block_bytes) for _ in chain]
    with cache.longest_run(chain) as hit:
        restored: RestoreResult = hit.restore_into(buffers[: len(hit)])
    if not restored:
        why: MissReason | None = restored.miss
        print("missed:", why and why.label)
    computed = engine.prefill(tokens[restored.token_count :])
    items = [
        SaveItem(key, payload, token_count=BLOCK_TOKENS)
        for key, payload in zip(chain[restored.run :], computed, strict=False)
    ]
    outcomes: list[SaveOutcome] = cache.save_many(
        items, tier=Tier.RAM, reason=SaveReason.COLD, ancestors=chain[: restored.run]
    )
    return sum(outcome.status is SaveStatus.SAVED for outcome in outcomes)


def whole(cache: Client, model: Namespace, tokens: list[int]) -> bytes | None:
    with cache.longest_prefix(model, tokens) as hit:
        found: Hit = hit
        state = found.read(0) if found else None
    key: Key = prefix_key(model, tokens)
    pending: Future[SaveOutcome] = cache.save_async(key, b"state", tier=Tier.DISK)
    if pending.result().retryable:
        (reservation,) = cache.reserve([ReserveItem(key, 5)], tier=Tier.DISK)
        with reservation:
            print(reservation.write(b"state").status.label)
    return None if state is None else bytes(state)


async def serve_async(cache: Client, keys: list[Key]) -> list[Entry]:
    found: list[Entry] = []
    client = AsyncClient(cache)
    async with client.claim(keys) as hit:
        found.extend(hit)
        view = await hit.read(0)
        print(len(view) if view is not None else 0)
    return found


def count(cache: Client) -> float:
    counted = cache.counters
    misses = {reason: number for reason, number in counted["misses"].items() if number}
    print(misses, counted["saves"]["saved"], counted["rpcs"]["Claim"] + counted["restores"])
    return counted["hit_tokens"] / max(1, counted["lookup_tokens"])


def main(address: str) -> None:
    policy = SavePolicy()
    with Client(address, label="chat", policy=policy) as cache:
        model = namespace(0, 1)
        tokens = list(range(2 * BLOCK_TOKENS))
        print("saved", serve(cache, model, tokens, Engine(4096)), whole(cache, model, tokens))
        print("saved", serve(cache, model, tokens, Engine(4096)), whole(cache, model, tokens))
        found = asyncio.run(serve_async(cache, [prefix_key(model, tokens)]))
        print([entry.tier.label for entry in found], f"{count(cache):.0%}")
    try:
        with Watch(address, tiers=[Tier.RAM]) as watching:
            for event in watching:
                if isinstance(event, Published):
                    print(event.key.hex()[:8], event.tier.label)
                elif isinstance(event, Synced | Disconnected):
                    break
    except errors.PrefixdError as problem:
        print(problem)


if __name__ == "__main__":
    main(sys.argv[1])
