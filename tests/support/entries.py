"""Entries whose bytes are derived from their keys, so that any reader can verify them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from prefixd.client import Client, Hit, Key, RestoreResult, SaveItem, SaveReason, Tier


def key_of(name: str) -> Key:
    return Key(hashlib.sha256(name.encode()).digest())


@lru_cache(32)
def payload_of(key: Key, payload_bytes: int) -> bytes:
    return hashlib.shake_128(key).digest(payload_bytes)


def items_of(names: Iterable[str], payload_bytes: int) -> list[SaveItem]:
    return [SaveItem(key, payload_of(key, payload_bytes), 512) for key in map(key_of, names)]


def save(client: Client, names: Iterable[str], payload_bytes: int, tier: Tier) -> list[Key]:
    """Save entries, and wait until they are published."""
    items = items_of(names, payload_bytes)
    outcomes = client.save_many(items, tier=tier, reason=SaveReason.EVICT)
    assert [outcome for outcome in outcomes if not outcome.ok] == []
    return [item.key for item in items]


def restore(hit: Hit) -> tuple[RestoreResult, list[bytes]]:
    """Restore into zeroed buffers: the result, and the bytes of every buffer."""
    buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
    return hit.restore_into(buffers), [bytes(buffer) for buffer in buffers]


def rpcs(client: Client) -> dict[str, int]:
    """How many of each rpc the client has made, without those that it never made."""
    counted = client.counters["rpcs"]
    assert isinstance(counted, dict)
    return {name: count for name, count in counted.items() if count}
